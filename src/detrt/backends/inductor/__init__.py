"""The target `inductor`: a checkpoint compiled by PyTorch for one CPU or GPU, and the session that runs it."""

from ...system import Ability
from ..target import Build, Target
from .config import NATIVE

_ON_CPU = Ability(
    "build and run compiled packages on the CPU", ("torch", "transformers"), works="building needs a C++ compiler, g++ or clang++"
)
# What `auto` takes: on a CPU OpenVINO and ONNX Runtime are as fast, and need no compiler.
_HERE = Ability("build and run compiled packages on a GPU", ("torch", "transformers"), on_gpu=True)

TARGET = Target(
    name="inductor",
    kind="inductor",
    words="a compiled package",
    opener=f"{__name__}.opening:OPENER",
    builder=f"{__name__}.building:BUILDER",
    config=f"{__name__}.config:InductorConfig",
    suffixes=(".pt2",),
    devices=("cuda",),
    title="PyTorch's compiler",
    builds=(
        Build(
            "inductor",
            _HERE,
            device="cuda",
            from_checkpoint=True,
            takes=("devices", "batch", "height", "width", "sizes", "timeout_seconds"),
        ),
    ),
    abilities=(_ON_CPU, _HERE),
    native=NATIVE,
    sidecar=True,
)
