"""Planted faults: an export that is wrong must fail its gate and leave no file."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")

from onnx import helper, numpy_helper

from detrt.backends.compare import relative_error
from detrt.errors import ExportError, GateError, SessionError
from detrt.export import ExportConfig, export_onnx
from detrt.export import trace as exporter
from detrt.models import rewrites as rewriting
from detrt.models.hooks import forced_topk
from detrt.models.load import load_source

pytestmark = pytest.mark.usefixtures("plain_simplifier")


@pytest.fixture
def source():
    """Not the shared one: some faults change it."""
    return load_source("random:rt_detr_v2/tiny")


@pytest.fixture
def detr(tiny):
    return tiny("detr")


def scale_one_weight(model):
    tensor = next(t for t in model.graph.initializer if len(t.dims) == 4)
    array = numpy_helper.to_array(tensor).copy()
    array[0, 0] *= 1.5
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def bake_batch(model):
    """The first Reshape with a computed shape gets the traced batch of 2 in place of the symbol."""
    nodes = model.graph.node
    for node in nodes:
        made = next((n for n in nodes if node.op_type == "Reshape" and node.input[1] in n.output), None)
        if made is not None and made.op_type == "Concat":
            batch = numpy_helper.from_array(np.array([2], np.int64), "baked")
            model.graph.initializer.append(batch)
            made.input[0] = "baked"
            return
    pytest.fail("the graph has no computed shape to bake")


def negate_logits(model):
    node = next(n for n in model.graph.node if "logits" in n.output)
    node.output[list(node.output).index("logits")] = "raw_logits"
    model.graph.node.append(helper.make_node("Neg", ["raw_logits"], ["logits"], name="/Neg"))


def after_simplify(monkeypatch, fault):
    original = exporter.simplify

    def faulty(model, optimize):
        slim = original(model, optimize)
        fault(slim)
        return slim

    monkeypatch.setattr(exporter, "simplify", faulty)


@pytest.mark.parametrize("fault", (scale_one_weight, negate_logits))
def test_wrong_numbers_fail_the_gate(fault, detr, monkeypatch, tmp_path):
    """No file is written, and an older one stays."""
    after_simplify(monkeypatch, fault)
    older = [tmp_path / "model.onnx"] * (fault is negate_logits)
    for path in older:
        path.write_bytes(b"older")
    with pytest.raises(GateError, match=r"differs from PyTorch by .* at batch \d, size \d+x\d+: .*; no file was written"):
        export_onnx(detr, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == older and all(path.read_bytes() == b"older" for path in older)


def test_baked_batch_is_caught(detr, monkeypatch, tmp_path):
    after_simplify(monkeypatch, bake_batch)
    with pytest.raises((GateError, ExportError, SessionError), match="batch|shape"):
        export_onnx(detr, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_wrong_lowering_fails_the_gate(source, monkeypatch, tmp_path):
    original = exporter.lower_msda

    def shifted(model, how):
        """Half a cell off: `align_corners` taken for the wrong value, a classic."""
        count = original(model, how)
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "align_corners":
                    attribute.i = 1
        return count

    monkeypatch.setattr(exporter, "lower_msda", shifted)
    with pytest.raises(GateError, match="differs from PyTorch"):
        export_onnx(source, tmp_path / "model.onnx", ExportConfig(msda="gridsample"))
    assert list(tmp_path.iterdir()) == []


def test_baked_sizes_are_caught(tiny, monkeypatch, tmp_path):
    """Without the rewrite of its sizes Deformable DETR keeps the traced ones, under symbolic input names."""
    bare = rewriting.Rewrite("", lambda module, model: [])
    monkeypatch.setitem(rewriting.REWRITES, "symbolic_shapes", bare)
    with pytest.raises((GateError, ExportError, SessionError)) as caught:
        export_onnx(tiny("deformable_detr"), tmp_path / "model.onnx")
    assert caught.value.exit_code in (2, 3)
    assert list(tmp_path.iterdir()) == []


def test_unchecked_export_is_written(detr, monkeypatch, tmp_path):
    after_simplify(monkeypatch, negate_logits)
    report = export_onnx(detr, tmp_path / "model.onnx", ExportConfig(check=False))
    assert report.path.is_file() and report.errors == ()


@pytest.mark.parametrize(
    ("name", "choices", "words"),
    [
        ("rt_detr", {"height": 330, "width": 640}, "RT-DETR takes a height that is a multiple of 32; got 330, try 320 or 352"),
        ("rt_detr", {"height": 16, "width": 640}, "got 16, try 32"),
        ("rt_detr", {"decode": "graph", "max_detections": 141}, "at most 140 .*got 141"),
        ("detr", {"max_detections": 13}, "at most 12 .*got 13"),
        ("yolos", {"height": 100, "width": 96}, "YOLOS takes a height that is a multiple of 16; got 100"),
    ],
)
def test_choices_that_a_family_cannot_take(name, choices, words, tiny, tmp_path):
    with pytest.raises(ExportError, match=words):
        export_onnx(tiny(name), tmp_path / "model.onnx", ExportConfig(**choices))


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"opset": 16}, "`opset` must be one of 17, 18, 19, 20; got 16"),
        ({"msda": "kernel"}, "`msda` must be one of .*got 'kernel'"),
        ({"decode": "nms"}, "`decode` .*got 'nms'"),
        ({"input_dtype": "float16"}, "`input_dtype` .*got 'float16'"),
        ({"height": 640}, "give both `height` and `width`"),
        ({"height": 0, "width": 64}, "`height` .*got 0"),
        ({"width": 2.5, "height": 64}, "`width` .*got 2.5"),
        ({"max_detections": 0}, "`max_detections` .*got 0"),
        ({"score_threshold": 1.5}, "`score_threshold` .*got 1.5"),
        ({"score_threshold": 0.3}, "`score_threshold=0.3` is for a graph that decodes: add `decode=graph`"),
        ({"mask": False}, "needs a fixed size"),
    ],
)
def test_choices_that_are_never_possible(choices, words):
    with pytest.raises(ExportError, match=words):
        ExportConfig(**choices)


def test_forced_selection():
    values = torch.tensor([[0.3, 0.3, 0.1]])
    index = torch.tensor([[1, 0]])
    with forced_topk([index]):
        found = torch.topk(values, 2, dim=1)
    assert torch.equal(found.indices, index)
    assert torch.equal(found.values, torch.tensor([[0.3, 0.3]]))
    assert torch.equal(values.topk(1).indices, torch.tensor([[0]]))
    with pytest.raises(ExportError, match="fewer top-k selections"), forced_topk([]):
        values.topk(1)
    with pytest.raises(ExportError, match="more top-k selections"), forced_topk([index]):
        pass
    with pytest.raises(ExportError, match=r"selects 2 .*, the PyTorch model 3; .*`queries`"), forced_topk([index]):
        values.topk(3)


@pytest.mark.parametrize(
    ("expected", "actual", "error"),
    [
        ([1.0, -2.0], [1.0, -2.0], 0.0),
        ([1.0, -2.0], [1.0, -1.9], 0.05),
        ([0.0, np.nan], [0.0, 1.0], np.inf),
        ([np.inf, 1.0], [np.inf, 1.0], 0.0),
        ([np.nan], [np.nan], 0.0),
    ],
)
def test_relative_error(expected, actual, error):
    assert relative_error(np.array(expected), np.array(actual)) == pytest.approx(error)
