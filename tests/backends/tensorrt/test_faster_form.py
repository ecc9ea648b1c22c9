"""Deformable attention for a TensorRT whose plugin was measured to be faster than gathers, or to which detrt's was given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
onnxruntime = pytest.importorskip("onnxruntime")

from detrt.backends.onnxruntime.session import run_graph
from detrt.backends.tensorrt import EngineConfig
from detrt.backends.tensorrt.rewrite import rewrite
from detrt.backends.tensorrt.v8.rewrite import FP32_MARK
from detrt.backends.tensorrt.versions import row_of
from detrt.graph.clean import with_outputs
from detrt.graph.msda_plugin import plugin_nodes, runnable
from detrt.graph.selections import topk_outputs
from detrt.models.example_inputs import example_feeds
from detrt.precision.apply import apply_precision
from detrt.precision.config import PrecisionConfig

WHY = {
    "NVIDIA": "NVIDIA's plugin, which is faster here than gathers",
    "own": "detrt's plugin, whose library was given",
}
GRID = {"map": (1, 1, 2, 2), "grid": (1, 2, 2, 2)}
PLUGIN_NODE = {"NVIDIA": "MultiscaleDeformableAttnPlugin_TRT", "own": "MSDeformAttn"}


@pytest.fixture(scope="module")
def typed(exported, shared):
    """(name, precision) -> (path of the graph, its ModelSpec), made once a run."""

    def make(name, precision):
        report = exported(name)
        if precision == "fp32":
            return report.path, report.spec

        def write(folder):
            model, _ = apply_precision(onnx.load(report.path), report.spec, PrecisionConfig(precision=precision))
            onnx.save(model, folder / "model.onnx")
            return folder / "model.onnx"

        return shared(f"{name}_{precision}_for_engines", write), report.spec

    return make


@pytest.mark.parametrize(
    ("name", "version", "precision", "own_plugin", "nodes", "whose"),
    [
        ("deformable_detr", "8.5.3", "fp32", False, 4, "NVIDIA"),
        ("deformable_detr", "8.5.3", "fp16", False, 4, "NVIDIA"),
        ("grounding_dino", "8.5.3", "fp16", False, 0, ""),  # how fast NVIDIA's is was not measured
        pytest.param("dino", "8.5.3", "fp32", False, 4, "NVIDIA", marks=pytest.mark.slow),  # 11 s, and 8 in FP16
        ("deformable_detr", "10.12.0", "fp32", False, 0, ""),  # not measured
        ("rt_detr_v2", "8.5.3", "fp32", False, 0, ""),  # gathers are faster
        ("deformable_detr", "8.5.3", "fp32", True, 4, "own"),
        ("deformable_detr", "8.5.3", "fp16", True, 4, "own"),
        pytest.param("dino", "8.5.3", "fp16", True, 4, "own", marks=pytest.mark.slow),
        ("rt_detr_v2", "8.5.3", "fp16", True, 0, ""),  # gathers are faster
        ("deformable_detr", "10.12.0", "fp16", True, 0, ""),  # the types of the graph decide; export with --msda plugin
    ],
)
def test_each_family_gets_the_form_that_is_fastest(typed, tmp_path, name, version, precision, own_plugin, nodes, whose):
    path, spec = typed("deformable_detr" if name == "grounding_dino" else name, precision)
    spec = replace(spec, family=name)
    (tmp_path / "rewritten").mkdir()
    config = EngineConfig(target="tensorrt", batch=(2, 2, 2), height=(96, 96, 96), width=(128, 128, 128))
    plugins = frozenset({"MSDeformAttn"} if own_plugin else ())
    source = rewrite(path, row_of("tensorrt", version), config, spec, tmp_path / "rewritten", plugins)
    rewritten = onnx.load(source.path)
    assert plugin_nodes(rewritten) == ({PLUGIN_NODE[whose]: nodes} if nodes else {})
    (tmp_path / "kept").mkdir()
    kept = onnx.load(
        rewrite(path, row_of("tensorrt", version), replace(config, keep_gathers=True), spec, tmp_path / "kept", plugins).path
    )
    assert not plugin_nodes(kept)
    # What `build` prints.
    said = row_of("tensorrt", version).spoken().notes(source, own_plugin and version == "8.5.3")
    if own_plugin and not nodes and version == "8.5.3":
        assert len(said) == 1 and said[0].startswith("no layer uses detrt's plugin that was given")
        return
    if name == "grounding_dino":
        assert len(said) == 1 and "give it with `plugins`" in said[0]
        sampled = onnx.load(path)  # GridSample is no gather that a plugin could replace
        tensors = [onnx.numpy_helper.from_array(np.zeros(shape, np.float32), tensor) for tensor, shape in GRID.items()]
        sampled.graph.initializer.extend(tensors)
        sampled.graph.node.append(onnx.helper.make_node("GridSample", [*GRID], ["sampled"]))
        sampled.graph.output.append(onnx.helper.make_tensor_value_info("sampled", onnx.TensorProto.FLOAT, None))
        onnx.save(sampled, tmp_path / "sampled.onnx")
        (tmp_path / "again").mkdir()
        assert not rewrite(
            tmp_path / "sampled.onnx", row_of("tensorrt", version), config, spec, tmp_path / "again"
        ).plugin_is_faster
        return
    assert said == ([] if not nodes else [f"{nodes} deformable attentions run in {WHY[whose]}"])
    if nodes:
        marked = [FP32_MARK in node.name for node in rewritten.graph.node if node.op_type == PLUGIN_NODE[whose]]
        assert set(marked) == {precision == "fp16" and whose == "NVIDIA"}  # detrt's takes FP16 values beside FP32 locations
        # ONNX Runtime makes a Gemm of MatMul and Add where it knows the shape, behind a plugin too.
        gemms = [sum(node.op_type == "Gemm" for node in graph.graph.node) for graph in (rewritten, kept)]
        assert gemms[0] == gemms[1] > 0
        # Of FP16 both in FP32, as the parser reads them.
        model = onnx.load(path) if precision == "fp32" else kept
        feeds = example_feeds(spec, 2, (96, 128), seed=1)
        results = []
        options = onnxruntime.SessionOptions()
        # A graph that ONNX Runtime has simplified holds constants under the names that it would give to others.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        for graph in (model, runnable(rewritten)):
            session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
            taken = {one.name: one.type for one in session.get_inputs()}
            # The dialect of 8.5 has INT32 in place of INT64.
            given = {k: v.astype(np.int32) if "int32" in taken[k] else v for k, v in feeds.items() if k in taken}
            results.append(session.run(None, given))
        for mine, want in zip(*results, strict=True):
            np.testing.assert_allclose(mine, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "precision", "version", "plugins", "gathers", "found"),
    [
        ("detr", "fp16", "8.5.3", {"LayerNorm"}, False, True),
        ("detr", "fp16", "8.5.3", set(), False, False),  # TensorRT 8.5.1 has no such plugin
        ("detr", "fp32", "8.5.3", {"LayerNorm"}, False, False),  # not measured
        ("rt_detr_v2", "fp16", "8.5.3", {"LayerNorm"}, False, False),  # slower
        ("detr", "fp16", "8.6.1", {"LayerNorm"}, False, False),  # it has a layer of its own
        ("deformable_detr", "fp16", "8.5.3", {"LayerNorm"}, False, True),
        ("deformable_detr", "fp16", "8.5.3", {"LayerNorm"}, True, False),  # it would cut a node of Myelin
    ],
)
def test_layer_norm_runs_in_nvidias_plugin_where_it_is_faster(
    typed, tmp_path, monkeypatch, name, precision, version, plugins, gathers, found
):
    monkeypatch.setattr("detrt.backends.tensorrt.v8.write_out._FEWEST_NORMALISED", 8)  # the small model has narrow rows
    path, spec = typed(name, precision)
    config = EngineConfig(target="tensorrt", batch=(1, 1, 1), height=(96, 96, 96), width=(128, 128, 128), keep_gathers=gathers)
    (tmp_path / "rewritten").mkdir()
    row = row_of("tensorrt", version)
    source = rewrite(path, row, config, spec, tmp_path / "rewritten", frozenset(plugins))
    norms = [node for node in onnx.load(source.path).graph.node if node.op_type == "LayerNorm"]
    assert bool(norms) is found
    assert source.changes.get("LayerNormalization to NVIDIA's plugin", 0) == len(norms)
    assert not any(FP32_MARK in node.name for node in norms)


def test_graphs_of_symbolic_size_keep_gathers(exported, tmp_path):
    """With a plugin engines of symbolic size are wrong."""
    report = exported("deformable_detr")
    symbolic = EngineConfig(target="tensorrt", batch=(1, 2, 2), height=(96, 96, 128), width=(128, 128, 160))
    fixed = replace(symbolic, height=(96, 96, 96), width=(128, 128, 128))
    for config, nodes in ((symbolic, 0), (fixed, 4)):
        folder = tmp_path / str(nodes)
        folder.mkdir()
        source = rewrite(report.path, row_of("tensorrt", "8.5.3"), config, report.spec, folder)
        assert sum(plugin_nodes(onnx.load(source.path)).values()) == nodes


@pytest.mark.parametrize(
    ("family", "version", "precision", "gone"),
    [
        ("detr", "8.5.3", "fp32", {"CumSum"}),
        ("detr", "8.5.3", "fp16", {"CumSum"}),
        ("detr", "10.12.0", "fp16", set()),
        ("owlvit", "8.5.3", "fp16", {"CumSum", "Sigmoid"}),
        ("owlvit", "8.5.3", "fp32", {"CumSum"}),
    ],
)
def test_what_is_read_and_runs_badly_is_written_out(typed, tmp_path, family, version, precision, gone):
    path, spec = typed("detr", precision)
    config = EngineConfig(target="tensorrt", batch=(1, 1, 1), height=(96, 96, 96), width=(128, 128, 128))
    found = rewrite(path, row_of("tensorrt", version), config, replace(spec, family=family), tmp_path)
    graph = onnx.load(found.path).graph
    assert {"CumSum", "Sigmoid"} - {node.op_type for node in graph.node} == gone
    assert gone <= found.changes.keys()
    if "Sigmoid" in gone:
        parts = [node.name for node in graph.node if "/Sigmoid/written/" in node.name]
        assert len(parts) == 4 and all(FP32_MARK in name for name in parts)


@pytest.mark.parametrize("version", ["8.5.3", "10.12.0"])
def test_selections_are_returned(typed, tmp_path, version):
    """With the indices that the graph itself chooses; the file stays as it was."""
    path, spec = typed("rt_detr_v2", "fp32")
    before = path.read_bytes()
    config = EngineConfig(target="tensorrt", batch=(2, 2, 2), height=(96, 96, 96), width=(128, 128, 128), return_selections=True)
    found = rewrite(path, row_of("tensorrt", version), config, spec, tmp_path)
    assert path.read_bytes() == before and found.path != path
    assert found.changes["selections returned"] == 1
    feeds = example_feeds(spec, 2, (96, 128), seed=1)
    (chosen,) = (array for name, array in run_graph(found.path, feeds).items() if name == "selection.0")
    (name,) = topk_outputs(model := onnx.load(path))
    (wanted,) = (array for key, array in run_graph(with_outputs(model, [name]).SerializeToString(), feeds).items() if key == name)
    assert chosen.dtype == np.int64 and chosen.shape == wanted.shape == (2, spec.decode.num_queries)
    # Rounding may move one of the worst.
    assert all(len(set(a) & set(b)) >= len(a) - 1 for a, b in zip(chosen.tolist(), wanted.tolist(), strict=True))
    described = [one["name"] for one in found.outputs or ()]
    assert described == ([] if version != "8.5.3" else ["logits", "pred_boxes", "selection.0"])
