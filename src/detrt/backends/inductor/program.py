"""From a source to the graph that is compiled: captured, simplified, typed."""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.load import Source
from ...spec import ModelSpec
from .capture import Captured, Range, capture, capture_text
from .epilogues import fuse_epilogues, pad_heads
from .fusing import pad_stem
from .nodes import Constants, aten, finish
from .passes import lower_deformable, simplify
from .selection import fuse_selections
from .types import lower_types
from .windows import fuse_windows


def prepare(
    source: Source,
    spec: ModelSpec,
    batch: Range,
    precision: str = "fp32",
    device: str = "cpu",
    tokens: int | None = None,
    biased: bool = True,
    names: int | None = None,
) -> Captured:
    """The graph of a detector for one device.

    batch: smallest and largest. precision: "fp32", "fp16" or "bf16". tokens, names: of a prompted model, the length of its
    prompts or tasks, and of its lists of names. biased: see `passes.fuse_attention`. On a GPU deformable attention stays an
    op, for detrt's kernel; elsewhere it becomes plain operators.

    Raises:
        ExportError: the model cannot be captured.
    """
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        _use_kernels(source)
    if spec.text is None:
        captured = capture(source, spec, batch, device)
    else:
        captured = capture_text(source, spec, batch, tokens or 6, device, names)
    simplify(captured.graph, biased)
    if precision in ("fp16", "bf16"):
        lower_types(captured.graph, precision)
    if on_gpu:
        tune_for_gpu(captured)
    else:
        lower_deformable(captured.graph)
    finish(captured.graph)
    return captured


def _use_kernels(source: Source) -> None:
    from ...models import ops as kernels

    install = getattr(kernels, "install", None)
    if install is not None and kernels.triton_available():
        install(source.module)


def tune_for_gpu(captured: Captured, linears: bool = True, convolutions: str = "all") -> None:
    """Layouts that tensor cores read without a detour, and epilogues (see `fuse_epilogues`); after the types are chosen."""
    fuse_windows(captured.graph)
    pad_stem(captured.graph, 4)
    channels_last(captured)
    fuse_epilogues(captured.graph, linears, convolutions)
    pad_heads(captured.graph)
    fuse_selections(captured.graph)
    finish(captured.graph)


def channels_last(captured: Captured) -> None:
    """Store the weights of convolutions as the tensor cores read them, so that nothing is converted at run time."""
    graph = captured.graph
    constants = Constants(graph)
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in (aten.conv2d.default, aten.conv2d.padding):
            weight = constants.get(node.args[1])
            if weight is not None and weight.ndim == 4:
                new = constants.add(_packed(weight), node, node)
                node.args = (node.args[0], new, *node.args[2:])


def _packed(weight: Tensor) -> Tensor:
    return weight.contiguous(memory_format=torch.channels_last)
