"""The graph that a parser gets: the ONNX file itself, or a copy in the dialect of an older TensorRT.

Builders without strong typing choose types by flags. The copy for them is FP32 throughout, with a mark in the name of each node
that the typed graph computes in FP32; the parser keeps names, and the builder is told to keep those layers (see `worker`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import EngineError
from ...spec import ModelSpec
from .config import EngineConfig
from .profile import NetworkTensor, plan_profile
from .versions import Version

FP32_MARK = "@fp32"
# Written out in operators whose sums and squares overflow FP16.
_WIDE = ("LayerNormalization", "GroupNormalization")


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A graph for a parser.

    Attributes:
        path: the file to parse.
        low, quantized: whether the typed graph computes in FP16, and holds Q/DQ; for builders without strong typing.
        changes: operator -> how many nodes were written out.
        inputs, outputs: {"name", "dtype", "shape"} of the ONNX file, where the parser would change them; else None.
    """

    path: Path
    low: bool = False
    quantized: bool = False
    changes: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[Mapping[str, Any], ...] | None = None
    outputs: tuple[Mapping[str, Any], ...] | None = None


def rewrite(onnx: Path, row: Version, config: EngineConfig, spec: ModelSpec, folder: Path) -> Rewritten:
    """Write the graph that a version's parser reads into `folder`, where it needs another one than the file.

    Raises:
        EngineError: an opset that is too new. GraphError: what cannot be written out, or a type that the version lacks.
    """
    if not row.rewrites:
        return Rewritten(onnx)
    from ... import graph
    from ...graph.dialect import Widened, fix_axes, widen, write_out
    from ..onnxruntime.session import optimize_basic

    model = graph.load(onnx)
    summary = graph.summarise(model)
    if summary.opset > row.opset:
        raise EngineError(
            f"'{onnx.name}' has opset {summary.opset}; this TensorRT reads up to {row.opset}. Export it with --opset {row.opset}"
        )
    widened = Widened() if row.strongly_typed else widen(model)
    # Before the rest: the optimiser writes default attributes out, and what it computes need not be written out.
    fixed = {} if row.strongly_typed else _fixed_shapes(summary.inputs, config, spec)
    if fixed:
        fix_axes(model, fixed, optimize_basic)
    written = write_out(model, row.lacks, shape_range=row.shape_range, scatter_reduction=row.scatter_reduction)
    if row.strongly_typed and not written:
        return Rewritten(onnx)
    described = {}
    if not row.strongly_typed:
        for one in written:
            if one.operator in _WIDE or one.output in widened.fp32:
                widened.fp32.update(one.parts)
        described = {side: _described(getattr(summary, side)) for side in ("inputs", "outputs")}
        _mark(model, widened.fp32 if widened.low else set())
    path = folder / "model.onnx"
    graph.save(model, path)
    changes = dict(Counter(one.operator for one in written))
    return Rewritten(path, widened.low, widened.quantized, changes, **described)


def _described(tensors: Mapping[str, tuple[str, tuple[int | str, ...]]]) -> tuple[Mapping[str, Any], ...]:
    return tuple({"name": name, "dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in tensors.items())


def _fixed_shapes(
    tensors: Mapping[str, tuple[str, tuple[int | str, ...]]], config: EngineConfig, spec: ModelSpec
) -> dict[str, list[int]]:
    """Shapes of the inputs whose profile is one shape."""
    network = [
        NetworkTensor(name, dtype, tuple(side if isinstance(side, int) else -1 for side in shape))
        for name, (dtype, shape) in tensors.items()
    ]
    profile = plan_profile(network, config, spec)
    return {name: shapes["opt"] for name, shapes in profile.items() if shapes["min"] == shapes["max"]}


def _mark(model: Any, fp32: set[str]) -> None:
    """Give each node a name of its own, with FP32_MARK where it gives one of the tensors `fp32`."""
    seen: Counter[str] = Counter()
    for node in model.graph.node:
        name = node.name or f"/{node.op_type}"
        seen[name] += 1
        name += f".{seen[name]}" if seen[name] > 1 else ""
        node.name = name + (FP32_MARK if fp32.intersection(node.output) else "")
