"""The graph that a parser of TensorRT 8 gets.

Its builders choose types by flags. The copy for them is FP32 throughout, with a mark in the name of each node that the typed graph
computes in FP32; the parser keeps names, and the builder is told to keep those layers (see `weak`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....models.families import having
from ....models.families.base import SAMPLING_ENCODER
from ....spec import PIXEL_VALUES, ModelSpec
from ..config import EngineConfig
from ..profile import NetworkTensor, Profile, plan_profile
from ..rewrite import SELECTIONS_RETURNED, Rewritten
from . import OldVersion

if TYPE_CHECKING:
    from .write_out import Widened

FP32_MARK = "@fp32"
# `Rewritten.changes`: gathers of deformable attention that became nodes of a plugin, by its name.
RAISED = {"plugin": "gathers to detrt's plugin", "nvidia-plugin": "gathers to NVIDIA's plugin"}
# Written out in operators whose sums and squares overflow FP16.
_WIDE = ("LayerNormalization", "GroupNormalization", "InstanceNormalization")


def rewrite_weak(
    onnx: Path, row: OldVersion, config: EngineConfig, spec: ModelSpec, folder: Path, plugins: frozenset[str]
) -> Rewritten:
    """`rewrite` for a builder without strong typing. plugins: of detrt's deformable attention and NVIDIA's LayerNorm, those loaded.

    Raises:
        GraphError: what cannot be written out or in the opset that the version reads, or a type that it lacks.
    """
    from .... import graph
    from ....graph.dialect import cumsum_to_matmul
    from ....graph.lower_msda import sum_by_reduction
    from ....graph.msda_plugin import emit, plugin_nodes, set_plugin_version
    from ....graph.operators import MSDA, NVIDIA_MSDA
    from ....graph.opset import lower_opset
    from ....graph.raise_msda import raise_msda
    from ....graph.selections import return_selections
    from ...onnxruntime.session import optimize_basic
    from .write_out import (
        LAYER_NORM,
        fix_axes,
        move_integers,
        scale_before_matmul,
        use_layer_norm_plugin,
        widen,
        write_out,
    )

    model = graph.load(onnx)
    changes: Counter[str] = Counter()
    if config.return_selections:
        changes[SELECTIONS_RETURNED] = len(return_selections(model))
    summary = graph.summarise(model)
    profile = _profile_of(summary.inputs, config, spec, row.one_phrase)
    plugin_is_faster = False
    widened = widen(model)
    if how := _plugin_form(row, config, spec, profile, MSDA in plugins):
        changes[RAISED[how]] = raise_msda(model)
        emit(model, how)
    elif not plugin_nodes(model) and all(node.op_type != "GridSample" for node in model.graph.node):
        plugin_is_faster = widened.low and bool(_plugin_form(row, config, spec, profile, True))
    # NVIDIA's plugin computes coordinates in the type of its inputs. FP16 moves samples by up to a quarter of a pixel.
    widened.fp32.update(name for node in model.graph.node if node.op_type == NVIDIA_MSDA for name in node.output)
    changes["MatMul"] = sum_by_reduction(model)
    changes["plugin versions"] = set_plugin_version(model, row.msda_plugin)
    # Before the rest: the optimiser writes default attributes out, and what it computes need not be written out.
    lengths = {
        name: [low if low == high else None for low, high in zip(shapes["min"], shapes["max"], strict=True)]
        for name, shapes in profile.items()
    }
    symbolic = [
        length
        for name, (_, shape) in summary.inputs.items()
        for side, length in zip(shape, lengths[name], strict=True)
        if isinstance(side, str)
    ]
    if not symbolic or any(length is not None for length in symbolic):
        fix_axes(model, lengths, optimize_basic)
    changes["booleans"] = move_integers(model)
    changes["CumSum"] = cumsum_to_matmul(model)
    changes["scale before MatMul"] = scale_before_matmul(model, widened.fp32) if widened.low else 0
    if LAYER_NORM in plugins and _layer_norm_is_faster(row, spec, widened, bool(plugin_nodes(model))):
        changes["LayerNormalization to NVIDIA's plugin"] = use_layer_norm_plugin(model, widened.fp32)
    also = _fp32_sigmoids(model, widened) if widened.low and spec.family in having(row.sigmoid_for) else ()
    written = write_out(model, row.lacks, also=also)
    lower_opset(model, row.opset)  # newer operators are written out by now
    changes += Counter(one.operator for one in written)
    for one in written:
        if one.operator in _WIDE or one.output in widened.fp32:
            widened.fp32.update(one.parts)
    described = {side: summary.described(side) for side in ("inputs", "outputs")}
    _mark(model, widened.fp32 if widened.low else set())
    path = folder / "model.onnx"
    graph.save(model, path)
    return Rewritten(path, widened.low, dict(changes), plugin_is_faster, **described)


def _layer_norm_is_faster(row: OldVersion, spec: ModelSpec, widened: Widened, has_plugins: bool) -> bool:
    """Whether NVIDIA's plugin for LayerNormalization is. In FP32 it was not measured.

    has_plugins: whether deformable attention runs in one. Gathers of an encoder are in one node of Myelin with the layers around them, which
    a plugin would cut.
    """
    whole = spec.family in having(SAMPLING_ENCODER) and not has_plugins
    return widened.low and spec.family in having(row.layer_norm_for) and not whole


def _fp32_sigmoids(model: Any, widened: Widened) -> set[str]:
    return {node.output[0] for node in model.graph.node if node.op_type == "Sigmoid"} & widened.fp32


def _plugin_form(row: OldVersion, config: EngineConfig, spec: ModelSpec, profile: Profile, own_plugin: bool) -> str:
    """Which plugin runs deformable attention in place of gathers; "": none."""
    image = profile.get(PIXEL_VALUES)
    # With a plugin, engines of symbolic size find something else, also with the preview feature of `weak`.
    if config.keep_gathers or image is None or image["min"][2:] != image["max"][2:]:
        return ""
    if own_plugin and spec.family in having(SAMPLING_ENCODER):
        return "plugin"
    return "nvidia-plugin" if spec.family in having(row.plugin_for) else ""


def _profile_of(
    tensors: Mapping[str, tuple[str, tuple[int | str, ...]]], config: EngineConfig, spec: ModelSpec, one_phrase: bool
) -> Profile:
    network = [
        NetworkTensor(name, dtype, tuple(side if isinstance(side, int) else -1 for side in shape))
        for name, (dtype, shape) in tensors.items()
    ]
    return plan_profile(network, config, spec, one_phrase=one_phrase)


def _mark(model: Any, fp32: set[str]) -> None:
    """Give each node a name of its own, with FP32_MARK where it gives one of the tensors `fp32`."""
    seen: Counter[str] = Counter()
    for node in model.graph.node:
        name = node.name or f"/{node.op_type}"
        seen[name] += 1
        name += f".{seen[name]}" if seen[name] > 1 else ""
        node.name = name + (FP32_MARK if fp32.intersection(node.output) else "")


def notes_on(source: Rewritten, own_plugin: bool = False) -> list[str]:
    """How the graph was changed in a way that a user may want to know of.

    own_plugin: whether detrt's plugin was given for a detector; a text encoder has no use for it.
    """
    from ....graph.operators import MSDA, named_in

    reasons = {
        "plugin": "detrt's plugin, whose library was given",
        "nvidia-plugin": "NVIDIA's plugin, which is faster here than gathers",
    }
    counts = {how: source.changes.get(RAISED[how], 0) for how in reasons}
    notes = [f"{count} deformable attentions run in {reasons[how]}" for how, count in counts.items() if count]
    if source.plugin_is_faster:
        notes.append(
            "deformable attention of the encoder runs as gathers; detrt's plugin is faster there: give it with `plugins` "
            "(docs/guide/plugin.md)"
        )
    if own_plugin and not named_in(source.path, (MSDA,)):
        notes.append(
            "no layer uses detrt's plugin that was given: by itself it takes the place of gathers in encoders of one image size only, where "
            "it is faster; export with `msda=plugin` to use it everywhere"
        )
    return notes
