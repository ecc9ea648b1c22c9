"""Conversion of an FP32 graph to a graph with explicit types, and the report of what it computes in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from .. import files
from ..backends.base import Feeds
from ..data.images import ImageSource
from ..errors import GraphError, number_of, one_line
from ..graph.msda_plugin import runnable
from ..graph.names import matches
from ..graph.unsigned import unsigned_activations
from ..graph.view import GraphView
from ..models.contract import contract
from ..spec import PIXEL_MASK, PIXEL_VALUES, TARGET_SIZES, ModelSpec, Precision
from ..system import SATURATES, Progress, saturates_int8
from .calibrate import TensorRange, bytes_of, fp16_failures, histograms, scan, threshold
from .cast import Typing, retype
from .config import PrecisionConfig
from .noise import LayerNoise, correct_biases, exclude_noisy, measure
from .proof import MacFractions, check_fraction, count_macs, mac_fractions
from .quantize import (
    QuantPlan,
    channel_axis,
    conv_results,
    exclude_halves,
    insert_qdq,
    output_layers,
    plan_quantization,
    residual_inputs,
    stages,
)
from .rules import Rules

# Fraction of the MACs that a BF16 graph may keep in FP32 for its last matmuls.
MAX_EXACT_FRACTION = 0.015


@dataclass(slots=True)
class PrecisionReport:
    """How a graph was converted, and what it computes in.

    precision: the low type. fractions: of MatMul and Conv MACs by type. fp32_reasons: node -> why it stays FP32. excluded: layer ->
    why it is not quantized. ranges: of every tensor, beside FP32 of those that are quantized, if images were given. thresholds: calibrated |x|.
    """

    precision: str
    fractions: MacFractions
    fp32_reasons: Mapping[str, str] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)
    quantized: int = 0
    casts: int = 0
    images: int = 0
    ranges: Mapping[str, TensorRange] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    search: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        parts = ", ".join(f"{kind} {fraction:.1%}" for kind, fraction in self.fractions.by_type.items())
        searched = f"; {self.search['verdict']}" if self.search else ""
        return f"{parts} of MatMul and Conv, {number_of(self.casts, 'cast')}{searched}"

    def to_dict(self) -> dict[str, Any]:
        """For `detrt.json`: without the ranges, which have a file of their own."""
        return {
            "precision": self.precision,
            "share": self.fractions.to_dict(),
            "fp32_nodes": len(self.fp32_reasons),
            "fp32_reasons": dict(Counter(self.fp32_reasons.values()).most_common()),
            "quantized_layers": self.quantized,
            "left_out": dict(self.excluded),
            "casts": self.casts,
            "calibration_images": self.images,
            "warnings": list(self.warnings),
            "search": dict(self.search),
        }


def apply_precision(
    model: onnx.ModelProto,
    spec: ModelSpec,
    config: PrecisionConfig,
    calibration_images: Sequence[ImageSource] = (),
    *,
    progress: Progress | None = None,
    calibration: Calibration | None = None,
    left_out: Sequence[str] = (),
) -> tuple[onnx.ModelProto, PrecisionReport]:
    """Give a copy of a graph the types of `config`.

    Inputs and outputs keep their types. For FP16 the overflow scan runs on the calibration images: without them
    ranges are unknown, and the report says so. calibration: a calibration to use again. left_out: module paths that a search leaves in
    16 bits beside 8, and in FP32 beside 16.

    Raises:
        GraphError: a graph that does not support the type, or no images though the type needs them.
        GateError: less than `config.required_fraction` of the MACs is in the low precision.
    """
    say = progress or (lambda fraction, text: None)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    target = config.target
    counts = count_macs(runnable(model), blank_feeds(spec))
    if target == Precision.FP32:
        report = PrecisionReport(config.precision, mac_fractions(model, counts))
        check_fraction(report.fractions, config)
        return copy, report
    calibration = calibration or calibrate(model, spec, config, calibration_images, progress=say)
    say(None, f"types: {target}")
    view = GraphView.typed(copy)
    if any(kind in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16) for kind in view.types.values()):
        raise GraphError("the graph already has 16-bit tensors; give the FP32 graph (detrt export without `precision`)")
    keep_fp32: dict[str, str] = {}
    if config.base == Precision.FP16:
        keep_fp32 = calibration.fp16_failures
    elif config.base == Precision.BF16:
        keep_fp32 = output_layers(view, Rules(view, config.base), counts, MAX_EXACT_FRACTION)
    kept = config.keep_fp32 if target.quantized else (*config.keep_fp32, *left_out)
    rules = Rules(view, config.base, kept, keep_fp32)
    plan = plan_quantization(view, rules, target, fuses=config.fuses) if target.quantized else QuantPlan()
    for name in [name for name in plan.activations if matches(name, left_out)]:
        del plan.activations[name]
        plan.excluded[name] = "the search leaves its block out"
    if plan.activations:
        if config.fuses:
            exclude_halves(view, rules, plan)
            groups = stages(view, plan, counts)
        else:
            groups = [[name] for name in plan.activations]
        exclude_noisy(plan, calibration.noise, counts, config.quantize_at_least, groups)
        if target == Precision.INT8:
            inputs = residual_inputs(view, rules, plan)
            plan.residuals = {name: one for name, one in inputs.items() if one[1] in calibration.thresholds}
        if config.for_cpu:
            plan.results = conv_results(view, plan)
        if correct_biases(copy, plan, calibration.noise):
            # The nodes are the same, and so are the decisions that the plan rests on; the constants are new.
            rules.view = GraphView.typed(copy)
    typing = Typing() if config.base == Precision.FP32 else retype(copy, rules, config.base)
    known = {name: calibration.noise[name] for name in plan.activations if name in calibration.noise}
    quantized = 0
    if plan.activations:
        quantized = insert_qdq(
            copy,
            plan,
            dict(calibration.thresholds),
            target,
            {name: one.centre for name, one in known.items() if one.centre is not None},
            weights={name: one.weight for name, one in known.items() if one.weight is not None},
            base=config.base,
            positive=calibration.positive,
        )
        if config.for_cpu:
            unsigned_activations(copy)
    _check(copy)
    fractions = mac_fractions(copy, counts)
    warnings = list(calibration.warnings)
    if config.for_cpu and saturates_int8():
        warnings.append(SATURATES)
    report = PrecisionReport(
        target, fractions, typing.fp32_reasons, plan.excluded, quantized, typing.casts, calibration.images, calibration.ranges,
        {name: calibration.thresholds[name] for name in plan.tensors}, tuple(warnings),
    )  # fmt: skip
    check_fraction(fractions, config)
    return copy, report


@dataclass(slots=True)
class Calibration:
    """Measurements of a graph on images: ranges, nodes that FP16 would break, thresholds of activations, and the quantization
    noise of each layer. positive: tensors without negative values, which a CPU stores unsigned, in 255 steps instead of 127."""

    images: int = 0
    ranges: dict[str, TensorRange] = field(default_factory=dict)
    fp16_failures: dict[str, str] = field(default_factory=dict)
    thresholds: dict[str, float] = field(default_factory=dict)
    noise: dict[str, LayerNoise] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    positive: frozenset[str] = frozenset()


def calibrate(
    model: onnx.ModelProto,
    spec: ModelSpec,
    config: PrecisionConfig,
    images: Sequence[ImageSource],
    *,
    progress: Progress | None = None,
) -> Calibration:
    """Scan ranges on images, and for INT8 and FP8 find the threshold of the input of every layer.

    Raises:
        GraphError: no images for a type that needs them.
    """
    say = progress or (lambda fraction, text: None)
    if not len(images):
        if config.target.quantized:
            raise GraphError(f"{config.target} needs calibration images; give `calibration=DIR` or a COCO file")
        missing = "no `calibration` was given, so no tensor was checked for overflow; check the result with detrt verify"
        return Calibration(warnings=(missing,) if config.target == Precision.FP16 else ())
    runs = runnable(model)
    view, sizes = GraphView.typed(model), bytes_of(runs, spec, images) if config.target.quantized else None
    # Beside FP32 nothing overflows, so that only what is quantized has to be read; large models have ten times as much.
    plan = _calibrated(view, config, {}) if config.target.quantized and config.base == Precision.FP32 else None
    wanted = None if plan is None else plan.tensors
    ranges = scan(runs, spec, images, lambda done, all_: say(done / all_, "ranges"), sizes, wanted)
    result = Calibration(len(images), ranges, {} if plan is not None else fp16_failures(view, ranges, config.margin))
    if config.target.quantized:
        if plan is None:
            plan = _calibrated(view, config, result.fp16_failures if config.base == Precision.FP16 else {})
        absmax = {name: ranges[name].absmax if name in ranges else 1.0 for name in plan.tensors}
        axes = {}
        if config.target == Precision.FP8:
            readers = {node.name: node for node in view.nodes}
            axes = {tensor: channel_axis(readers[name]) for name, tensor in plan.activations.items()}
        counts, means = histograms(runs, spec, images, absmax, lambda done, all_: say(done / all_, "histograms"), axes, sizes)
        if config.for_cpu:
            result.positive = frozenset(name for name in absmax if name in ranges and ranges[name].minimum >= 0)
        result.thresholds = {
            name: threshold(
                counts[name],
                absmax[name],
                config.method,
                config.target,
                config.percentile,
                positive=name in result.positive,
            )
            for name in absmax
        }
        result.noise = measure(
            runs, spec, images, plan, result.thresholds, config.target,
            lambda done, all_: say(done / all_, "noise of layers"), means, result.positive, sizes,
        )  # fmt: skip
    return result


def _calibrated(view: GraphView, config: PrecisionConfig, keep_fp32: Mapping[str, str]) -> QuantPlan:
    """The plan whose tensors need a threshold. keep_fp32: node -> why it stays FP32."""
    rules = Rules(view, config.base, (), keep_fp32)
    plan = plan_quantization(view, rules, config.target, fuses=config.fuses)
    plan.residuals = residual_inputs(view, rules, plan) if config.target == Precision.INT8 else {}
    plan.results = conv_results(view, plan) if config.for_cpu else {}
    return plan


def blank_feeds(spec: ModelSpec) -> Feeds:
    """One blank image of the default size of the model, and for a prompted model a prompt of typical length."""
    height, width = spec.input.size_hw
    feeds = {PIXEL_VALUES: np.zeros((1, 3, height, width), spec.input.dtype)}
    if spec.input.mask:
        feeds[PIXEL_MASK] = np.ones((1, height, width), np.int64)
    if spec.decode.in_graph:
        feeds[TARGET_SIZES] = np.array([[height, width]], np.int64)
    lengths = {} if spec.text is None else spec.text.prompt_kind.lengths(spec)
    for info in contract(spec)[0] if spec.text is not None else ():
        shape = [lengths.get(side, (1, 1, 1))[1] if isinstance(side, str) else side for side in info.shape]
        feeds.setdefault(info.name, np.ones(shape, info.dtype))
    return feeds


def write_ranges(report: PrecisionReport, path: Path) -> None:
    """Write ranges, thresholds and the reasons for FP32 as JSON."""
    by_node = dict(report.fp32_reasons)
    rows = {}
    for name, found in report.ranges.items():
        row = found.to_dict()
        if found.node in by_node:
            row["fp32"] = by_node[found.node]
        if name in report.thresholds:
            row["threshold"] = round(report.thresholds[name], 6)
        rows[name] = row
    files.write_text(path, json.dumps({"images": report.images, "tensors": rows}, indent=1) + "\n")


def unmatched_patterns(model: onnx.ModelProto, patterns: Sequence[str]) -> list[str]:
    """Patterns of --keep-fp32 that match no node, such as spelling mistakes."""
    return [p for p in patterns if not any(matches(node.name, (p,)) for node in model.graph.node)]


def _check(model: onnx.ModelProto) -> None:
    try:
        if model.ByteSize() < 1_900_000_000:
            onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        text = one_line(error, 500)
        raise GraphError(f"the typed graph is invalid, which is a bug in detrt: {text}") from error
