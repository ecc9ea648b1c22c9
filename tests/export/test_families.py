"""Every family as a tiny random model: the graph's facts, and its numbers at sizes that were not traced."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")

from onnx import numpy_helper
from random_rows import MODELS, OWN_MODELS, TEXT_MODELS
from tiny_exports import SHARED

from detrt import graph
from detrt.backends.compare import relative_error
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.torch.session import TorchSession, contract
from detrt.data.matching import Gate, match
from detrt.data.postprocess import decode
from detrt.export.onnx import ExportConfig
from detrt.graph.clean import with_outputs
from detrt.graph.selections import topk_outputs
from detrt.models.contract import exported_spec, other_size, trace_size
from detrt.models.example_inputs import example_feeds
from detrt.models.families import BY_NAME
from detrt.models.hooks import forced_topk
from detrt.spec import PIXEL_MASK, PIXEL_VALUES, Precision

# Variants of a family that has another one in the quick run, in one graph at least.
SLOW = {
    *("deformable_detr-refine", "deformable_detr-plain", "rt_detr", "rt_detr_v2-discrete", "lw_detr-two-scales"),
    *("d_fine-seg", "ecdet", "rf_detr-large", "rf_detr-xlarge", "rf_detr-2xlarge"),
}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS]
MASKED = ("detr", "table-transformer", "conditional_detr", "dab_detr", "deformable_detr")
# name -> choices: the other ways to export, each with a family of every kind.
VARIANTS = [
    ("detr", {"height": 128, "width": 160}),
    ("detr", {"height": 128, "width": 160, "mask": False}),
    ("detr", {"decode": "graph"}),
    ("detr", {"normalize": False}),
    ("deformable_detr", {"msda": "gridsample"}),
    ("deformable_detr-single-scale", {"msda": "gridsample"}),
    ("deformable_detr-plain", {"height": 128, "width": 96, "mask": False}),
    ("rt_detr_v2", {"decode": "graph", "max_detections": 30, "score_threshold": 0.3, "opset": 20}),
    ("rt_detr_v2", {"decode": "graph", "max_detections": 30, "score_threshold": 0.3, "msda": "gridsample", "opset": 20}),
    ("rt_detr_v2-discrete", {"msda": "gridsample"}),
    ("rt_detr", {"msda": "gridsample", "height": 128, "width": 160}),
    ("d_fine", {"msda": "gridsample"}),
    ("deimv2", {"input_dtype": "float32", "opset": 18}),
    ("lw_detr", {"msda": "gridsample", "height": 128, "width": 192}),
    ("rf_detr", {"decode": "graph"}),
    ("rf_detr", {"msda": "gridsample", "decode": "graph"}),
    ("rf_detr", {"height": 56, "width": 112}),
    ("yolos", {"decode": "graph", "opset": 19}),
    ("yolos", {"input_dtype": "float32", "opset": 18}),
    ("yolos", {"height": 96, "width": 64, "normalize": False}),
]

SLOW_VARIANTS = [
    ("deformable_detr", {"msda": "gridsample"}),
    ("deformable_detr-plain", {"height": 128, "width": 96, "mask": False}),
    ("rt_detr_v2", {"decode": "graph", "max_detections": 30, "score_threshold": 0.3, "msda": "gridsample", "opset": 20}),
    ("d_fine", {"msda": "gridsample"}),
    ("rf_detr", {"msda": "gridsample", "decode": "graph"}),
    ("rf_detr", {"height": 56, "width": 112}),
    ("deimv2", {"input_dtype": "float32", "opset": 18}),
    ("lw_detr", {"msda": "gridsample", "height": 128, "width": 192}),
    ("deformable_detr-single-scale", {"msda": "gridsample"}),
    ("rt_detr_v2-discrete", {"msda": "gridsample"}),
]


def ids(value):
    return "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value


CASES = [pytest.param(*p.values, {}, marks=p.marks) for p in NAMES]
CASES += [pytest.param(*v, marks=[pytest.mark.slow] * (v in SLOW_VARIANTS)) for v in VARIANTS]


def test_the_quick_tests_export_every_family():
    sources = {**MODELS, **OWN_MODELS, **TEXT_MODELS}
    assert {sources[name][0] for name in SHARED} == set(BY_NAME)
    quick = [case.values for case in CASES if not case.marks]
    assert [name for name in MODELS if name in SHARED and (name, SHARED[name]) not in quick] == []


@pytest.mark.parametrize(("name", "choices"), CASES, ids=ids)
def test_the_built_in_check_ran_at_what_was_not_traced(name, choices, exported):
    report = exported(name, **choices)
    traced, other = trace_size(report.spec), other_size(report.spec)
    cases = {(row["batch"], row["height"], row["width"]) for row in report.errors}
    assert cases == {(1, *traced), (3, *other)}  # the trace has batch 2
    assert (traced != other) is report.spec.input.dynamic
    assert {row["output"] for row in report.errors} == {info.name for info in contract(report.spec)[1]}
    assert report.worst <= Precision.FP32.output_tolerance / 10


@pytest.mark.parametrize(("name", "choices"), CASES, ids=ids)
def test_facts_of_the_graph(name, choices, exported, tiny):
    report = exported(name, **choices)
    model = graph.load(report.path)
    nodes, tensors = model.graph.node, model.graph.initializer
    inputs, outputs = contract(report.spec)
    assert dict(report.summary.inputs) == {i.name: (i.dtype, i.shape) for i in inputs}
    assert dict(report.summary.outputs) == {o.name: (o.dtype, o.shape) for o in outputs}
    assert report.summary == graph.summarise(model)
    assert [(e.domain, e.version) for e in model.opset_import] == [("", choices.get("opset", 17))]
    assert {node.domain for node in nodes} == {""}
    assert graph.read_spec(report.path) == report.spec == exported_spec(tiny(name), ExportConfig(**choices))

    names = [node.name for node in nodes]
    assert all(names) and len(set(names)) == len(names)
    used = {i for node in nodes for i in node.input} | {o.name for o in outputs}
    assert [t.name for t in tensors if t.name not in used] == []
    assert [node.name for node in nodes if not used.intersection(node.output)] == []
    same = Counter((t.data_type, tuple(t.dims), numpy_helper.to_array(t).tobytes()) for t in tensors)
    assert [key[:2] for key, count in same.items() if count > 1] == []
    calls = Counter((n.op_type, *n.input, *(a.SerializeToString() for a in n.attribute)) for n in nodes if n.input)
    assert [key[:2] for key, count in calls.items() if count > 1] == []

    layer_norms = [n for n in nodes if n.op_type == "LayerNormalization"]
    assert len(layer_norms) >= 2
    # A path a reader finds in the checkpoint: the numbered layers of encoder or decoder.
    assert any("layers.1/" in n or "layer.1/" in n for n in names)
    least = 2 if name.startswith("eomt") else 3  # a norm of EoMT is a module of the model itself
    assert all(n.name.count("/") >= least for n in layer_norms)


def forced_pair(session, module, feeds, exact=False):
    """(expected, actual) outputs of the plain transformers model and of a graph with its selections shared.

    exact: also those of the model in float64, as a third.
    """
    model = graph.load(session.path)
    selections = topk_outputs(model)
    probe = OnnxSession(with_outputs(model, selections).SerializeToString(), session.spec)
    got = probe.run(feeds)
    modules = [module, copy.deepcopy(module).double()] if exact else [module]
    expected = []
    for one in modules:
        with torch.no_grad(), forced_topk([torch.from_numpy(got[name]) for name in selections]):
            expected.append(plain(one, session.spec, feeds))
    return expected[0], got, *expected[1:]


def plain(module, spec, feeds):
    """The transformers model called directly, normalised by hand as its image processor does."""
    pixels = feeds[PIXEL_VALUES].astype(np.float64)
    if spec.input.normalize_in_graph:
        mean, std = (np.array(v).reshape(1, 3, 1, 1) for v in (spec.input.mean, spec.input.std))
        pixels = (pixels * spec.input.rescale - mean) / std
    arguments = {"pixel_values": torch.from_numpy(pixels).to(next(module.parameters()).dtype)}
    if PIXEL_MASK in feeds:
        arguments["pixel_values"] *= torch.from_numpy(feeds[PIXEL_MASK])[:, None]
        arguments["pixel_mask"] = torch.from_numpy(feeds[PIXEL_MASK])
    with torch.no_grad():
        outputs = module(**arguments)
    names = {"logits": "logits", "pred_boxes": "pred_boxes"} | ({"mask_logits": "pred_masks"} if spec.has_masks else {})
    if spec.decode.reading_order != "none":
        return documents(outputs, spec)
    return {ours: getattr(outputs, theirs).numpy() for ours, theirs in names.items()}


def documents(outputs, spec):
    """Outputs of PP-DocLayout by the contract: written out here, and pair by pair."""
    found = {"logits": outputs.logits, "pred_boxes": outputs.pred_boxes}
    pairs = outputs.get("order_logits", outputs.get("relative_order_logits")).clone()
    for i in range(spec.decode.num_queries):
        if spec.decode.reading_order == "votes":
            pairs[:, i, i], pairs[:, i, :i] = 0, -pairs[:, :i, i]
    found["order_logits"] = pairs
    if "out_masks" in outputs:
        found["mask_logits"] = outputs.out_masks
    if spec.decode.quads:
        successor = outputs.successor_order_logits.clone()
        successor[:, range(spec.decode.num_queries), range(spec.decode.num_queries)] = 0
        x = outputs.pred_boxes[..., :1] + outputs.pred_boxes[..., 2::2] - 0.5
        y = outputs.pred_boxes[..., 1:2] + outputs.pred_boxes[..., 3::2] - 0.5
        sides = [(v.max(-1).values + v.min(-1).values) / 2 for v in (x, y)] + [
            v.max(-1).values - v.min(-1).values for v in (x, y)
        ]
        found |= {"successor_logits": successor, "quads": torch.stack([x, y], -1), "pred_boxes": torch.stack(sides, -1)}
    return {name: value.numpy() for name, value in found.items()}


def third_size(spec):
    """A size that neither the trace nor the built-in check uses."""
    if not spec.input.dynamic:
        return spec.input.size_hw
    step = spec.input.multiple_of
    size = (max(2 * step, 192 // step * step), max(3 * step, 416 // step * step))
    assert size not in (trace_size(spec), other_size(spec))
    return size


@pytest.mark.parametrize("name", NAMES)
def test_third_size_equals_the_transformers_model(name, exported, tiny):
    report = exported(name)
    feeds = example_feeds(report.spec, 4, third_size(report.spec), seed=9)
    session, module = OnnxSession(report.path), tiny(name).module
    want, got = forced_pair(session, module, feeds)
    errors = {output: relative_error(want[output], got[output]) for output in want}
    if max(errors.values()) > 1e-4:
        # Random weights can give boxes so small that the library's own FP32 differs from its float64 by more than that.
        want, got, exact = forced_pair(session, module, feeds, exact=True)
        rounding = {output: relative_error(exact[output], want[output]) for output in want}
        assert all(error <= max(1e-4, rounding[output]) for output, error in errors.items()), (errors, rounding)


@pytest.mark.parametrize("name", NAMES)
def test_torch_session_is_the_transformers_model(name, tiny):
    session = TorchSession(tiny(name))
    feeds = example_feeds(session.spec, 2, third_size(session.spec), seed=3)
    got, want = session.run(feeds), plain(tiny(name).module, session.spec, feeds)
    for info in session.outputs:
        shape = got[info.name].shape
        fixed = [(side, axis) for side, axis in zip(shape, info.shape, strict=True) if isinstance(axis, int)]
        assert shape == want[info.name].shape and all(side == axis for side, axis in fixed)
        # Folding the normalisation changes the last digit; where that swaps a selection, rows swap.
        assert relative_error(np.sort(want[info.name], 1), np.sort(got[info.name], 1)) <= 1e-4


@pytest.mark.parametrize("choices", ({}, {"normalize": False}, {"height": 128, "width": 160}), ids=ids)
@pytest.mark.parametrize("name", MASKED)
def test_padding_is_exact(name, choices, exported, tiny):
    """Garbage under mask 0 changes nothing; an image in a larger canvas is what transformers makes of it."""
    if choices and name != "detr":
        pytest.skip("the choices are tried with one family")
    report = exported(name, **choices)
    session = OnnxSession(report.path)
    size = third_size(report.spec)
    feeds = example_feeds(report.spec, 3, size, seed=5)
    clean = session.run(feeds)
    noise = np.random.default_rng(0).integers(0, 256, feeds[PIXEL_VALUES].shape).astype(feeds[PIXEL_VALUES].dtype)
    dirty = {**feeds, PIXEL_VALUES: np.where(feeds[PIXEL_MASK][:, None] == 1, feeds[PIXEL_VALUES], noise)}
    assert (dirty[PIXEL_VALUES] != feeds[PIXEL_VALUES]).any()
    got = session.run(dirty)
    for output in clean:
        np.testing.assert_array_equal(got[output], clean[output])
    # One image alone and the same one first in a padded batch: both as the transformers model.
    alone = {k: v[1:2] for k, v in feeds.items()}
    rows, columns = (int(n) for n in (alone[PIXEL_MASK][0].sum(0).max(), alone[PIXEL_MASK][0].sum(1).max()))
    if report.spec.input.dynamic:
        alone = {
            PIXEL_VALUES: np.ascontiguousarray(alone[PIXEL_VALUES][:, :, :rows, :columns]),
            PIXEL_MASK: np.ones((1, rows, columns), np.int64),
        }
    for batch in (feeds, alone):
        want, seen = forced_pair(session, tiny(name).module, batch)
        for output in want:
            assert relative_error(want[output], seen[output]) <= 1e-4, output


@pytest.mark.parametrize("name", ("detr", "rt_detr_v2", "rf_detr", "yolos"))
def test_decoding_in_the_graph_is_the_reference(name, exported):
    choices = next(c for n, c in VARIANTS if n == name and c.get("decode") == "graph")
    whole = exported(name, **choices)
    raw = exported(name, **{k: v for k, v in choices.items() if k == "msda"})
    size = third_size(raw.spec)
    feeds = example_feeds(whole.spec, 2, size, seed=11)
    sizes = [tuple(map(int, row)) for row in feeds["target_sizes"]]
    found = decode(OnnxSession(whole.path).run(feeds), whole.spec, sizes, threshold=0.0)
    logits = OnnxSession(raw.path).run({k: v for k, v in feeds.items() if k != "target_sizes"})
    spec = raw.spec.with_decode(max_detections=whole.spec.decode.max_detections)
    expected = decode(logits, spec, sizes, threshold=0.0)
    least = choices.get("score_threshold", 0.0)
    assert whole.spec.decode.score_threshold == least
    for ours, reference in zip(found, expected, strict=True):
        reference = reference[reference.scores >= least]
        assert len(ours) == len(reference) > 0
        np.testing.assert_allclose(ours.scores, reference.scores, atol=1e-5)
        # Rows by partner, as two graphs order equal scores differently; a tie at the end may be cut differently.
        everything = spec.decode.select == "query" and len(ours) == spec.decode.num_queries
        end = 0.0 if everything else float(reference.scores[-1]) + 2e-5
        result = match(reference, ours, Gate(threshold=end, at_least=1, box_px=0.01, score=1e-5))
        assert (result.missing, result.extra) == (0, 0) and result.compared >= 1
        assert result.box_px <= 0.01 and result.score <= 1e-5


def test_choices_in_the_graph_change_the_contract(exported):
    """The facts above are the spec's own; these are written out once."""
    fixed = exported("detr", height=128, width=160).summary
    assert fixed.inputs[PIXEL_VALUES] == ("uint8", ("batch", 3, 128, 160))
    assert fixed.inputs[PIXEL_MASK] == ("int64", ("batch", 128, 160))
    assert list(exported("detr", height=128, width=160, mask=False).summary.inputs) == [PIXEL_VALUES]
    assert exported("detr").summary.inputs[PIXEL_VALUES] == ("uint8", ("batch", 3, "height", "width"))
    assert exported("detr").summary.outputs["logits"] == ("float32", ("batch", 12, 8))
    assert exported("detr", normalize=False).summary.inputs[PIXEL_VALUES][0] == "float32"
    assert exported("rf_detr").summary.inputs[PIXEL_VALUES] == ("uint8", ("batch", 3, 112, 112))
