"""An FP32 graph in, a graph with explicit types out, and the proof of what it computes in."""

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
from ..errors import GraphError
from ..graph.msda_plugin import runnable
from ..graph.names import matches
from ..graph.view import GraphView
from ..models.contract import contract
from ..spec import PIXEL_MASK, PIXEL_VALUES, TARGET_SIZES, ModelSpec, Precision
from ..system import Progress
from .calibrate import TensorRange, histograms, lost_in_fp16, scan, threshold
from .cast import Typing, retype
from .config import PrecisionConfig
from .noise import LayerNoise, correct_biases, leave_noisy, measure
from .proof import FlopShare, check_share, flop_share, multiply_adds
from .quantize import QuantPlan, channel_axis, insert_qdq, last_gemms, plan_quantization
from .rules import Rules

# Fraction of the MACs that a BF16 graph may keep in FP32 for its last matmuls.
MAX_EXACT_FRACTION = 0.015
_USUAL_LENGTHS = {"tokens": 32, "classes": 16, "phrases": 8}


@dataclass(slots=True)
class PrecisionReport:
    """What was done to a graph, and what it computes in now.

    precision: the low type. share: of MatMul and Conv. kept: node -> why it stays FP32. left_out: layers that
    are not quantized, and why. ranges: of every tensor, where images were given. thresholds: calibrated |x|.
    """

    precision: str
    share: FlopShare
    kept: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    quantized: int = 0
    casts: int = 0
    images: int = 0
    ranges: Mapping[str, TensorRange] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    search: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        shares = ", ".join(f"{kind} {share:.1%}" for kind, share in self.share.shares.items())
        return f"{shares} of MatMul and Conv, {self.casts} casts"

    def to_dict(self) -> dict[str, Any]:
        """For `detrt.json`: without the ranges, which have a file of their own."""
        return {
            "precision": self.precision,
            "share": self.share.to_dict(),
            "fp32_nodes": len(self.kept),
            "fp32_reasons": dict(Counter(self.kept.values()).most_common()),
            "quantized_layers": self.quantized,
            "left_out": dict(self.left_out),
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
    known: Calibration | None = None,
) -> tuple[onnx.ModelProto, PrecisionReport]:
    """Give a graph the types of `config`; the model that is passed in stays as it is.

    Inputs and outputs keep their types. For FP16 the calibration images are the overflow scan: without them
    nothing is known about ranges, and the report says so. known: a calibration to use again.

    Raises:
        GraphError: a graph that cannot take the type, or no images where they are needed.
        GateError: less than `config.required_share` of the MACs is in the low precision.
    """
    say = progress or (lambda fraction, text: None)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    target = config.target
    counts = multiply_adds(runnable(model), blank_feeds(spec))
    if target == Precision.FP32:
        report = PrecisionReport(config.precision, flop_share(model, counts))
        check_share(report.share, config)
        return copy, report
    known = known or calibrate(model, spec, config, calibration_images, progress=say)
    say(None, f"types: {target}")
    view = GraphView.typed(copy)
    if any(kind in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16) for kind in view.types.values()):
        raise GraphError("the graph already has 16-bit tensors; give the FP32 graph (detrt export without --precision)")
    if target.base == Precision.FP16:
        lost = known.lost
    else:
        lost = last_gemms(view, Rules(view, config.target.base), counts, MAX_EXACT_FRACTION)
    rules = Rules(view, config.target.base, config.keep_fp32, lost)
    plan = plan_quantization(view, rules, target) if target.quantized else QuantPlan()
    if plan.activations:
        leave_noisy(plan, known.noise, counts, config.quantize_share)
        if correct_biases(copy, plan, known.noise):  # new constants: the view must know them
            view = GraphView.typed(copy)
            rules = Rules(view, config.target.base, config.keep_fp32, lost)
    typing: Typing = retype(copy, rules, config.target.base)
    centres = {n: c for n in plan.activations if n in known.noise and (c := known.noise[n].centre) is not None}
    quantized = insert_qdq(copy, plan, dict(known.thresholds), target, centres) if plan.activations else 0
    _check(copy)
    share = flop_share(copy, counts)
    warnings = list(known.warnings)
    report = PrecisionReport(
        target, share, typing.kept, plan.left_out, quantized, typing.casts, known.images, known.ranges,
        {name: known.thresholds[name] for name in plan.activations.values()}, tuple(warnings),
    )  # fmt: skip
    check_share(share, config)
    return copy, report


@dataclass(slots=True)
class Calibration:
    """What images say about a graph: ranges, nodes that FP16 would break, thresholds of activations, and what
    eight bits do to each layer."""

    images: int = 0
    ranges: dict[str, TensorRange] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    thresholds: dict[str, float] = field(default_factory=dict)
    noise: dict[str, LayerNoise] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def calibrate(
    model: onnx.ModelProto,
    spec: ModelSpec,
    config: PrecisionConfig,
    images: Sequence[ImageSource],
    *,
    progress: Progress | None = None,
) -> Calibration:
    """Scan ranges on images, and for INT8 and FP8 find the thresholds of every layer's input.

    Raises:
        GraphError: no images for a type that needs them.
    """
    say = progress or (lambda fraction, text: None)
    if not len(images):
        if config.target.quantized:
            raise GraphError(f"{config.target} needs calibration images; give --calibration DIR or a COCO file")
        missing = "no --calibration was given, so no tensor was checked for overflow; check the result with detrt verify"
        return Calibration(warnings=(missing,) if config.target == Precision.FP16 else ())
    runs = runnable(model)
    ranges = scan(runs, spec, images, lambda done, all_: say(done / all_, "ranges"))
    view = GraphView.typed(model)
    found = Calibration(len(images), ranges, lost_in_fp16(view, ranges, config.margin))
    if config.target.quantized:
        rules = Rules(view, config.target.base, (), found.lost)
        plan = plan_quantization(view, rules, config.target)
        absmax = {name: ranges[name].absmax if name in ranges else 1.0 for name in plan.activations.values()}
        axes = {}
        if config.target == Precision.FP8:
            readers = {node.name: node for node in view.nodes}
            axes = {tensor: channel_axis(readers[name]) for name, tensor in plan.activations.items()}
        counts, means = histograms(runs, spec, images, absmax, lambda done, all_: say(done / all_, "histograms"), axes)
        found.thresholds = {
            name: threshold(counts[name], absmax[name], config.method, config.target, config.percentile) for name in absmax
        }
        found.noise = measure(
            runs, spec, images, plan, found.thresholds, config.target,
            lambda done, all_: say(done / all_, "noise of layers"), means,
        )  # fmt: skip
    return found


def blank_feeds(spec: ModelSpec) -> Feeds:
    """One empty image of the model's usual size, and of a prompted model a prompt of the usual length."""
    height, width = spec.input.size_hw
    feeds = {PIXEL_VALUES: np.zeros((1, 3, height, width), spec.input.dtype)}
    if spec.input.mask:
        feeds[PIXEL_MASK] = np.ones((1, height, width), np.int64)
    if spec.decode.in_graph:
        feeds[TARGET_SIZES] = np.array([[height, width]], np.int64)
    for info in contract(spec)[0] if spec.text is not None else ():
        shape = [_USUAL_LENGTHS.get(side, 1) if isinstance(side, str) else side for side in info.shape]
        feeds.setdefault(info.name, np.ones(shape, info.dtype))
    return feeds


def write_ranges(report: PrecisionReport, path: Path) -> None:
    """Save what the scan saw, and what became of it, as JSON."""
    by_node = dict(report.kept)
    rows = {}
    for name, found in report.ranges.items():
        row = found.to_dict()
        if found.node in by_node:
            row["fp32"] = by_node[found.node]
        if name in report.thresholds:
            row["threshold"] = round(report.thresholds[name], 6)
        rows[name] = row
    files.write_text(path, json.dumps({"images": report.images, "tensors": rows}, indent=1) + "\n")


def blocks_matching(model: onnx.ModelProto, patterns: Sequence[str]) -> list[str]:
    """Patterns of --keep-fp32 that fit no node: spelling mistakes."""
    return [p for p in patterns if not any(matches(node.name, (p,)) for node in model.graph.node)]


def _check(model: onnx.ModelProto) -> None:
    try:
        if model.ByteSize() < 1_900_000_000:
            onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        text = " ".join(str(error).split())[:500]
        raise GraphError(f"the typed graph is not valid, which is a fault of detrt: {text}") from error
