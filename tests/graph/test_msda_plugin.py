"""Deformable attention as plugin nodes: what is emitted, that it computes the same, and what is refused."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

pytest.importorskip("torch", reason="needs the 'export' extra")

from fake_tensorrt import FakeCuda, fake_trt

from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.open import open_session
from detrt.backends.tensorrt import EngineConfig, build_engine
from detrt.backends.tensorrt.rewrite import rewrite
from detrt.backends.tensorrt.session import plugins_of
from detrt.backends.tensorrt.versions import row_of
from detrt.bundle import EngineFacts
from detrt.cli import main
from detrt.data.preprocess import preprocess
from detrt.data.scenes.scene import draw_scene
from detrt.errors import EngineError, ExportError, GraphError
from detrt.export import export_onnx
from detrt.graph import read_spec
from detrt.graph.emulate_low_precision import emulate
from detrt.graph.lower_msda import lower_msda
from detrt.graph.msda_plugin import emit, plugin_nodes, runnable
from detrt.graph.operators import PLUGIN_NODES
from detrt.graph.view import element_types
from detrt.models.contract import ExportConfig
from detrt.models.load import load_source
from detrt.precision.apply import apply_precision
from detrt.precision.config import PrecisionConfig


@pytest.fixture(scope="module")
def plugin_exports(tmp_path_factory):
    """The same model as nodes of both plugins, and as standard operators."""
    folder = tmp_path_factory.mktemp("plugin")
    paths = {how: folder / f"{how}.onnx" for how in ("plugin", "nvidia-plugin", "gather")}
    # Compared with PyTorch at shapes that were not traced, with its nodes lowered.
    assert export_onnx(load_source("embedded:shapes", no_masks=True), paths["plugin"], ExportConfig(msda="plugin")).worst < 1e-4
    model = onnx.load(paths["plugin"])
    emit(model, "nvidia-plugin")
    onnx.save(model, paths["nvidia-plugin"])
    model = onnx.load(paths["plugin"])
    assert lower_msda(model, "gather") == 3
    onnx.save(model, paths["gather"])
    return paths


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    pixels = np.random.default_rng(3).integers(0, 256, (2, 3, 96, 128), dtype=np.uint8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"pixel_values": pixels})


def test_own_plugin_node_has_its_attributes_and_name(plugin_exports):
    model = onnx.load(plugin_exports["plugin"])
    nodes = [node for node in model.graph.node if node.op_type == "MSDeformAttn"]
    assert plugin_nodes(model) == {"MSDeformAttn": 3} and len(nodes) == 3
    for node in nodes:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert (attributes["plugin_version"], attributes["plugin_namespace"], node.domain) == (b"1", b"detrt", "detrt")
        assert {"heads", "head_dim", "points_per_level", "discrete"} <= set(attributes) and len(node.input) == 4
    assert not any("Gather" in n.op_type and "MSDeformAttn" in n.name for n in model.graph.node)
    assert {o.domain for o in model.opset_import} == {"", "detrt"}
    assert [v.name for v in model.graph.input] == ["pixel_values"]
    assert [v.name for v in model.graph.output] == ["logits", "pred_boxes"]


@pytest.mark.parametrize("how", ["plugin", "nvidia-plugin"])
def test_a_file_with_plugin_nodes_tells_what_the_standard_graph_selects(plugin_exports, how):
    """`verify` gives both models the selections of one: it called every FP32 file with such nodes different."""
    feeds = {"pixel_values": np.random.default_rng(3).integers(0, 256, (2, 3, 96, 128), dtype=np.uint8)}
    found = {}
    for name in (how, "gather"):
        with OnnxSession(plugin_exports[name]) as session:
            found[name] = session.selections(feeds)
    (outputs, choices), (expected, standard) = found[how], found["gather"]
    assert len(choices.selections) == 1 and all(map(np.array_equal, choices.selections, standard.selections))
    assert list(outputs) == list(expected)
    for name, array in outputs.items():
        np.testing.assert_allclose(array, expected[name], atol=1e-4)


def test_nvidia_plugin_node_equals_the_standard_graph(plugin_exports):
    """NVIDIA's node by what its documentation says of inputs and output, written as our own node and lowered."""
    model = onnx.load(plugin_exports["nvidia-plugin"])
    assert plugin_nodes(model) == {"MultiscaleDeformableAttnPlugin_TRT": 3}
    own = onnx.load(plugin_exports["plugin"])
    attributes = [list(n.attribute) for n in own.graph.node if n.op_type == "MSDeformAttn"]
    nodes = []
    for node in model.graph.node:
        if node.op_type != "MultiscaleDeformableAttnPlugin_TRT":
            nodes.append(node)
            continue
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert (given["plugin_version"], given["plugin_namespace"]) == (b"2", b"") and len(node.input) == 5
        value, shapes, starts, places, shares = node.input
        mine = attributes.pop(0)
        sizes = {a.name: helper.get_attribute_value(a) for a in mine}
        heads, dim, points = sizes["heads"], sizes["head_dim"], sizes["points_per_level"]
        name = node.output[0]
        layout = {"places": [0, 0, heads, sum(points), 2], "shares": [0, 0, heads, sum(points)], "out": [0, 0, heads, dim]}
        for key, shape in layout.items():
            model.graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), f"{name}.{key}"))
        nodes += [
            helper.make_node("Cast", [shapes], [f"{name}.sizes"], to=onnx.TensorProto.INT64),
            helper.make_node("Reshape", [places, f"{name}.places"], [f"{name}.p"]),
            helper.make_node("Reshape", [shares, f"{name}.shares"], [f"{name}.s"]),
            helper.make_node(
                "MSDeformAttn", [value, f"{name}.sizes", f"{name}.p", f"{name}.s"], [f"{name}.o"], name, domain="detrt"
            ),
            helper.make_node("Reshape", [f"{name}.o", f"{name}.out"], [name]),
        ]
        nodes[-2].attribute.extend(mine)
        # The starts of the levels are an input of their own: they must be those that the sizes give.
        model.graph.output.append(helper.make_tensor_value_info(starts, onnx.TensorProto.INT32, None))
        model.graph.output.append(helper.make_tensor_value_info(shapes, onnx.TensorProto.INT32, None))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    lower_msda(model, "gather")
    seen: set[str] = set()
    outputs = [v for v in model.graph.output if not (v.name in seen or seen.add(v.name))]
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    got = run(model)
    for mine, want in zip(got[:2], run(onnx.load(plugin_exports["gather"])), strict=True):
        np.testing.assert_allclose(mine, want, atol=2e-4)
    found = dict(zip([v.name for v in model.graph.output], got, strict=True))
    for starts, shapes in zip(list(found.values())[2::2], list(found.values())[3::2], strict=True):
        assert starts.dtype == shapes.dtype == np.int32
        assert starts.tolist() == [0, *np.cumsum(shapes.prod(1))[:-1]]


def test_nvidia_plugin_survives_the_dialect_of_tensorrt_8_5(plugin_exports, tmp_path):
    """ONNX Runtime, which folds the shapes of that dialect, does not have the plugin's node."""
    config = EngineConfig(target="tensorrt", batch=(2, 2, 2), height=(96, 96, 96), width=(128, 128, 128))
    original = onnx.load(plugin_exports["nvidia-plugin"])
    source = rewrite(
        plugin_exports["nvidia-plugin"], row_of("tensorrt", "8.5.3"), config, read_spec(plugin_exports["plugin"]), tmp_path
    )
    rewritten = onnx.load(source.path)
    assert plugin_nodes(rewritten) == plugin_nodes(original) == {"MultiscaleDeformableAttnPlugin_TRT": 3}
    assert not [node for node in rewritten.graph.node if node.op_type == "Shape"], "shapes that are fixed were not folded"
    for mine, want in zip(run(runnable(rewritten)), run(runnable(original)), strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-4, atol=1e-4)


FLOAT, HALF, BF16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16


@pytest.mark.parametrize(("precision", "kind"), [("fp16", HALF), pytest.param("bf16", BF16, marks=pytest.mark.slow)])
def test_low_types_reach_the_plugins_as_they_take_them(plugin_exports, precision, kind):
    """Values of 16 bits beside FP32 locations for our own, one type for NVIDIA's; what they compute is the standard graph's."""
    spec = read_spec(plugin_exports["plugin"])
    results = {}
    for how in ("plugin", "nvidia-plugin", "gather"):
        typed, report = apply_precision(onnx.load(plugin_exports[how]), spec, PrecisionConfig(precision=precision))
        assert report.fractions.of(precision) > 0.99
        types = element_types(typed)
        for node in typed.graph.node:
            if node.op_type in PLUGIN_NODES:
                value, places, shares = (types[node.input[i]] for i in ((0, 2, 3) if how == "plugin" else (0, 3, 4)))
                expected = (kind, FLOAT, kind) if how == "plugin" else (FLOAT, FLOAT, FLOAT)
                assert (value, places, shares) == expected and types[node.output[0]] == value
        assert plugin_nodes(runnable(typed)) == {}
        results[how] = run(runnable(emulate(typed)))
    for how in ("plugin", "nvidia-plugin"):
        # The lowered graph keeps its sums in FP32; a plugin rounds its result once more.
        for mine, want in zip(results[how], results["gather"], strict=True):
            assert np.median(np.abs(mine - want)) <= 0.05 * np.median(np.abs(want))


@pytest.mark.parametrize(("change", "what"), [({"points_per_level": [3, 5]}, r"\[3, 5\]"), ({"discrete": 1}, "discrete")])
def test_nvidia_plugin_refuses_what_it_cannot_compute(change, what):
    attributes = {"heads": 2, "head_dim": 8, "points_per_level": [4, 4], "discrete": 0, **change}
    node = helper.make_node("MSDeformAttn", ["v", "s", "l", "w"], ["o"], "layer", domain="detrt", **attributes)
    model = helper.make_model(helper.make_graph([node], "g", [], []))
    with pytest.raises(GraphError, match=what):
        emit(model, "nvidia-plugin")


def test_plugin_for_a_family_without_deformable_attention_is_refused(tmp_path):
    with pytest.raises(ExportError, match="no deformable attention"):
        export_onnx(load_source("random:detr"), tmp_path / "m.onnx", ExportConfig(msda="plugin"))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["nvidia-plugin", "plugin"])
def test_prompted_models_have_plugin_nodes(tmp_path, how, tiny, exported):
    path = tmp_path / how / "model.onnx"
    path.parent.mkdir()
    reports = {how: export_onnx(tiny("grounding_dino"), path, ExportConfig(msda=how)), "gather": exported("grounding_dino")}
    found = {}
    for lowering, report in reports.items():
        assert report.worst < 1e-4
        path = report.path
        with open_session(path).bind("a cat. a dog.") as session:  # text encoder and tokenizer lie beside the graph
            found[lowering] = session.run(preprocess([draw_scene(1, size_hw=(96, 128)).image], session.spec).feeds)
    assert sum(plugin_nodes(onnx.load(tmp_path / how / "model.onnx")).values()) > 0
    assert plugin_nodes(onnx.load(tmp_path / how / "text.onnx")) == {}
    for name, want in found["gather"].items():
        np.testing.assert_allclose(found[how][name], want, rtol=1e-4, atol=1e-5)


def test_rtx_has_no_plugins(plugin_exports, tmp_path):
    with pytest.raises(EngineError, match="no plugin layers"):
        build_engine(plugin_exports["nvidia-plugin"], tmp_path / "m.engine", EngineConfig())
    with pytest.raises(EngineError, match="no plugin layers"):
        build_engine(plugin_exports["plugin"], tmp_path / "m.engine", EngineConfig())
    library = tmp_path / "libp.so"
    library.write_bytes(b"\x7fELF")
    with pytest.raises(EngineError, match="no plugin layers"):
        EngineConfig(plugins=(library,))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--msda", "plugin", "--target", "tensorrt-rtx"], "TensorRT-RTX has no plugin layers"),
        (["--msda", "plugin", "--target", "tensorrt"], "--plugin libdetrt_plugin.so"),
        (["--target", "onnx", "--plugin", "none.so"], "no effect without --target tensorrt"),
        (["--target", "tensorrt", "--plugin", "none.so"], "there is no plugin library"),
    ],
)
def test_wrong_choices_are_refused_before_any_work(options, what, tmp_path, capsys):
    code = main(["build", "embedded:shapes", "-o", str(tmp_path / "b"), *options])
    assert code == 2 and what in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "b").exists()


def test_config_keeps_plugins_through_json(tmp_path):
    library = tmp_path / "libp.so"
    library.write_bytes(b"\x7fELF")
    config = EngineConfig(target="tensorrt", plugins=(library,))
    assert EngineConfig.from_dict(config.to_dict()) == config


def test_plugins_are_loaded_once_and_refusals_are_told(tmp_path):
    trt = fake_trt("tensorrt", FakeCuda(), lambda feeds: {}, version="10.13.0.35")
    library, text = tmp_path / "libp.so", tmp_path / "text.so"
    library.write_bytes(b"\x7fELF and more")
    text.write_text("no library")
    trt.load_plugins([library, library])
    trt.load_plugins([library])
    assert Counter(trt.module.get_plugin_registry().loaded) == {str(library): 1}
    copy = tmp_path / "elsewhere" / library.name  # its creators are registered already: as good as loaded
    copy.parent.mkdir()
    copy.write_bytes(library.read_bytes())
    trt.load_plugins([copy])
    with pytest.raises(EngineError, match="text.so.*headers of this TensorRT"):
        trt.load_plugins([text])
    with pytest.raises(EngineError, match="there is no plugin library"):
        trt.load_plugins([tmp_path / "gone.so"])
    with pytest.raises(EngineError, match="no plugin layers"):
        fake_trt("tensorrt-rtx", FakeCuda(), lambda feeds: {}).load_plugins([library])


def test_an_engine_names_its_plugins_and_the_environment_moves_them(monkeypatch):
    facts = EngineFacts("tensorrt", "10.13.0", (90,), "fp32", {}, "", options={"plugins": ["/built/here/libp.so"]})
    assert plugins_of(facts) == ["/built/here/libp.so"]
    monkeypatch.setenv("DETRT_PLUGINS", "/a.so:/b.so")
    assert plugins_of(facts) == ["/a.so", "/b.so"]
    monkeypatch.delenv("DETRT_PLUGINS")
    assert plugins_of(EngineFacts("tensorrt", "10.13.0", (90,), "fp32", {}, "")) == []
