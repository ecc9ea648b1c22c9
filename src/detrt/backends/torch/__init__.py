"""Checkpoints in PyTorch, the reference of all comparisons. No bundle has one."""

from ..target import Target

TARGET = Target(
    name="torch",
    kind="checkpoint",
    words="a checkpoint",
    opener=f"{__name__}.opening:OPENER",
    reads_load=True,
    title="PyTorch",
)
