"""Faults that are planted into good graphs: `verify` must find each one and name its module."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
pytest.importorskip("onnxslim", reason="needs the 'export' extra")

from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from detrt import graph
from detrt.cli import main
from detrt.data.scenes.scene import draw_scene
from detrt.evaluation.parity import verify
from detrt.graph.view import GraphView
from detrt.spec import ModelSpec

CHOICES = {"height": 128, "width": 128}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for seed, size_hw in enumerate(((96, 128), (128, 96), (112, 112))):
        Image.fromarray(draw_scene(seed, size_hw=size_hw).image).save(folder / f"{seed}.png")
    return folder


@pytest.fixture
def clean(exported):
    return lambda name="rt_detr_v2", **choices: exported(name, **{**CHOICES, **choices}).path


@pytest.fixture
def check(images, tmp_path, capsys):
    """Run the command on a damaged copy of a graph; gives the exit code and the JSON report."""

    def run(good, damage, *more, against=None):
        model = graph.load(good)
        damage(model)
        bad = tmp_path / "bad.onnx"
        graph.save(model, bad)
        report = tmp_path / "report.json"
        code = main(
            ["verify", str(bad), "--images", str(images), "--against", str(against or good), "--json", str(report), *more]
        )
        capsys.readouterr()
        return code, json.loads(report.read_text("utf-8"))

    return run


def weight(model, node_name):
    """(node, its weight tensor)."""
    node = next(node for node in model.graph.node if node.name == node_name)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    return node, next(tensors[name] for name in node.input if name in tensors and len(tensors[name].dims) > 1)


def change(tensor, function):
    array = function(numpy_helper.to_array(tensor).copy())
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def after(model, node_name, build):
    """Put nodes after a node: build(its old output, its name) -> nodes whose last output has that name."""
    index, node = next((i, node) for i, node in enumerate(model.graph.node) if node.name == node_name)
    name = node.output[0]
    node.output[0] = name + "_good"
    for offset, added in enumerate(build(node.output[0], name)):
        model.graph.node.insert(index + 1 + offset, added)


def constant(model, name, value):
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return name


def first(report):
    return report["divergence"]["first"]


def test_clean_graph_passes_with_every_level(check, clean):
    code, report = check(clean(), lambda model: None, "--divergence", "always")
    assert code == 0 and report["passed"] and report["failures"] == []
    assert report["precision"] == "fp32" and report["gate"]["box_px"] == 0.5
    assert {row["batch"] for row in report["slots"]} == {2, 4}
    assert {row["output"] for row in report["tensors"]} == {"logits", "pred_boxes"}
    assert first(report) is None and report["divergence"]["compared"] > 300


def test_one_wrong_weight(check, clean, images):
    node = "/model/decoder/layers.1/encoder_attn/value_proj/MatMul"

    def damage(model):
        def one(array):
            array[3, 5] += 2.0
            return array

        change(weight(model, node)[1], one)

    # Against the checkpoint itself: the reference graph is exported on the fly.
    code, report = check(clean(), damage, against="random:rt_detr_v2/tiny")
    assert code == 3
    assert first(report)["module"] == "model.decoder.layers.1.encoder_attn.value_proj"
    assert first(report)["op"] == "MatMul" and first(report)["node"] == node
    assert report["divergence"]["against"] == "an FP32 export of the reference"


@pytest.mark.slow
def test_one_wrong_weight_of_a_model_that_takes_a_prompt(check, clean, tmp_path):
    node = "/decoder/layers.1/encoder_attn_text/value/MatMul"
    good = clean("grounding_dino")
    for name in ("text.onnx", "tokenizer.json"):
        shutil.copyfile(good.parent / name, tmp_path / name)

    def damage(model):
        change(weight(model, node)[1], lambda array: array + 0.5)

    code, report = check(good, damage, "--prompt", "red circle. blue square.")
    assert code == 3
    assert first(report)["module"] == "decoder.layers.1.encoder_attn_text.value"
    assert first(report)["op"] == "MatMul" and first(report)["node"] == node


def test_swapped_box_axes(check, clean):
    node = "/model/decoder/bbox_embed.1/layers.2/Add"

    def damage(model):
        order = constant(model, "order", np.array([2, 3, 0, 1]))
        after(model, node, lambda x, y: [helper.make_node("Gather", [x, order], [y], name=node + "/swap", axis=-1)])

    code, report = check(clean(), damage)
    assert code == 3
    assert first(report)["module"].startswith("model.decoder.bbox_embed.1.layers.2")


def test_swapped_height_and_width(check, clean):
    node = "/model/backbone/model/embedder/embedder/embedder.2/convolution/Conv"

    def damage(model):
        after(model, node, lambda x, y: [helper.make_node("Transpose", [x], [y], name=node + "/swap", perm=[0, 1, 3, 2])])

    code, report = check(clean(), damage)
    assert code == 3
    assert first(report)["module"].startswith("model.backbone.model.embedder.embedder.2")


def test_one_wrong_batch_slot(check, clean):
    node = "/model/decoder/layers.0/mlp/fc1/Add"

    def nodes(model):
        zero, one, two = (constant(model, f"n{i}", np.array(i)) for i in range(3))
        axes = constant(model, "axes", np.array([1, 2]))
        half = constant(model, "half", np.array(0.5, np.float32))

        def build(x, y):
            return [
                helper.make_node("Shape", [x], ["s"]),
                helper.make_node("Gather", ["s", zero], ["n"]),
                helper.make_node("Range", [zero, "n", one], ["slot"]),
                helper.make_node("Less", ["slot", two], ["fine"]),
                helper.make_node("Unsqueeze", ["fine", axes], ["fine3"]),
                helper.make_node("Mul", [x, half], ["wrong"]),
                helper.make_node("Where", ["fine3", x, "wrong"], [y], name=node + "/slot"),
            ]

        after(model, node, build)

    code, report = check(clean(), nodes)
    assert code == 3
    wrong = {(row["batch"], row["slot"]) for row in report["slots"] if not row["passed"]}
    assert wrong == {(4, 2), (4, 3)}
    assert first(report)["module"].startswith("model.decoder.layers.0.mlp.fc1")


def test_baked_size(check, exported):
    """A table made for one size: the spec's own size is right, every other one is wrong."""
    good = exported("rt_detr_v2").path
    found = []

    def damage(model):
        view = GraphView(model)
        # A length of a feature map that goes into the grid of anchors.
        node = next(
            node
            for node in model.graph.node
            if node.op_type == "Range" and node.input[1] in view.producer and node.name.startswith("/")
        )
        baked = constant(model, "baked", np.array(80, helper.tensor_dtype_to_np_dtype(view.types[node.input[1]])))
        node.input[1] = baked
        found.append(view.module_of(node))

    code, report = check(good, damage, "--batches", "1")
    assert code == 3
    assert first(report)["module"] == found[0]
    assert first(report)["op"] == "Range"


@pytest.mark.slow
def test_fp16_overflow(tiny, images, tmp_path):
    """A checkpoint with one large activation, and a graph that holds it in FP16."""
    from dataclasses import replace

    import torch

    from detrt.export import ExportConfig, export_onnx

    source = replace(tiny("detr"), module=copy.deepcopy(tiny("detr").module))
    layer = source.module.get_submodule("model.decoder.layers.0.mlp")
    with torch.no_grad():  # ReLU in between: the function stays the same
        layer.fc1.weight.mul_(1e7)
        layer.fc1.bias.mul_(1e7)
        layer.fc2.weight.div_(1e7)
    good = export_onnx(source, tmp_path / "good.onnx", ExportConfig(check=False, **CHOICES)).path
    model = graph.load(good)
    node = next(n for n in model.graph.node if n.name == "/model/decoder/layers.0/mlp/fc2/MatMul")
    index = list(model.graph.node).index(node)
    halves = [helper.make_node("Cast", [n], [f"{n}_half"], to=TensorProto.FLOAT16) for n in node.input]
    back = helper.make_node("Cast", ["low"], [node.output[0]], to=TensorProto.FLOAT, name="back")
    for i, name in enumerate(list(node.input)):
        node.input[i] = f"{name}_half"
    node.output[0] = "low"
    for offset, cast in enumerate(halves):
        model.graph.node.insert(index + offset, cast)
    model.graph.node.insert(index + 3, back)
    graph.save(model, tmp_path / "bad.onnx")
    report = verify(source, tmp_path / "bad.onnx", sorted(images.glob("*.png")), divergence="auto")
    assert not report.passed
    assert any("NaN or infinite" in text for text in report.failures)
    assert report.divergence.first.module == "model.decoder.layers.0.mlp.fc2"
    assert "infinite" in report.divergence.first.text or "NaN" in report.divergence.first.text
    assert report.divergence.first.before < 1e-4


@pytest.mark.slow
def test_wrong_mean_in_the_spec(check, clean):
    def damage(model):
        spec = graph.io.ModelSpec.from_json(next(p.value for p in model.metadata_props if p.key == graph.io.SPEC_KEY))
        graph.with_spec(model, spec.with_input(mean=(0.1, 0.2, 0.3)))

    code, report = check(clean("detr", normalize=False), damage)
    assert code == 3
    assert any(text.startswith("spec.input.mean is (0.1, 0.2, 0.3)") for text in report["failures"])
    assert first(report) is None, "the graphs are equal"
    assert any("fields of the spec" in note for note in report["notes"])


def test_wrong_labels(check, clean):
    def damage(model):
        spec = graph.io.ModelSpec.from_json(next(p.value for p in model.metadata_props if p.key == graph.io.SPEC_KEY))
        labels = {**spec.labels, 0: spec.label(1), 1: spec.label(0)}
        graph.with_spec(model, ModelSpec(spec.family, spec.input, spec.decode, labels))

    code, report = check(clean(), damage)
    assert code == 3
    assert any("spec.labels: 2 of 7 differ: class 0 is" in text for text in report["failures"])
