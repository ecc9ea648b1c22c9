"""A new engine beside its graph: a right one passes, a planted wrong one is found. ONNX Runtime stands in for the engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
from planted_faults import disturb, multiply

from detrt.backends.base import BaseSession
from detrt.backends.compare import relative_error
from detrt.backends.engine_check import EngineCheck, EngineRow, compare_sessions
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.open import open_session
from detrt.backends.prompted import PromptedSession
from detrt.backends.tensorrt import compare as engine_compare
from detrt.backends.tensorrt.compare import compare_engine
from detrt.data.matching import gate_for
from detrt.export import export_onnx
from detrt.graph.msda_plugin import emit
from detrt.graph.selections import return_selections
from detrt.models.contract import ExportConfig
from detrt.models.load import load_source
from detrt.precision.apply import apply_precision
from detrt.precision.config import PrecisionConfig
from detrt.spec import LOGITS, MASK_LOGITS, PIXEL_VALUES, PRED_BOXES, SELECTION
from detrt.text.tensors import PHRASE_FEATURES, PHRASE_MASK

PROFILE = {PIXEL_VALUES: ((1, 3, 192, 192), (2, 3, 320, 320), (3, 3, 320, 384))}


class StandIn(OnnxSession):
    """Tells what it selects as engines do: where that is among its outputs."""

    tells_selections = BaseSession.tells_selections
    selections = BaseSession.selections

    def _returned(self):
        return [info.name for info in self.outputs if info.name.startswith(SELECTION)] or None


@pytest.fixture
def engine(monkeypatch):
    """Makes `compare_engine` open `path.engine` as the ONNX file `path` with a profile."""

    def open_engine_beside(reference, path, text_engine=None):
        session = StandIn(path.with_suffix(".onnx"))
        session._info = replace(session.info, profile=PROFILE, max_batch=3)
        return reference.with_sessions(session, reference.text_encoder) if isinstance(reference, PromptedSession) else session

    monkeypatch.setattr(engine_compare, "open_engine_beside", open_engine_beside)
    for name in ("SCENES", "OTHER_SCENES"):  # one batch at each shape
        monkeypatch.setattr(f"detrt.backends.engine_check.{name}", 1)


@pytest.fixture(scope="module")
def graph(exported):
    """The trained model that comes with detrt: rounding does not change which of its queries win."""
    return exported("embedded:shapes").path


def with_boxes(path, target, change, output=PRED_BOXES):
    """A copy of a graph whose boxes, or another output, pass through one more node."""
    model = onnx.load(path)
    multiply(model, output, change)
    onnx.save(model, target)
    return target.with_suffix(".engine")


def test_a_right_engine_passes(engine, graph, tmp_path):
    found = compare_engine(graph, with_boxes(graph, tmp_path / "model.onnx", 1.0), "fp32")
    assert found.passed, found.verdict
    assert [(row.batch, row.height, row.width) for row in found.rows] == [
        (1, 320, 320), (2, 320, 320), (3, 320, 320), (1, 192, 192), (1, 320, 384),
    ]  # fmt: skip
    assert all(row.compared for row in found.rows)


@pytest.mark.parametrize(("change", "passed"), [(1.0, True), (-1.0, False)])
def test_an_engine_with_wrong_masks_is_found(engine, exported, tmp_path, monkeypatch, change, passed):
    monkeypatch.setitem(PROFILE, PIXEL_VALUES, ((1, 3, 112, 112),) * 3)
    path = exported("rf_detr-seg").path
    found = compare_engine(path, with_boxes(path, tmp_path / "model.onnx", change, MASK_LOGITS), "fp32")
    assert found.passed is passed
    assert found.rows[0].box_px == 0 and (found.rows[0].mask_iou >= 0.99) is passed


@pytest.mark.parametrize(
    ("change", "precision"),
    [
        (1.02, "fp32"),
        pytest.param(1.1, "fp16", marks=pytest.mark.slow),
        pytest.param(1.5, "int8", marks=pytest.mark.slow),
        (np.nan, "fp16"),
    ],
)
def test_a_wrong_engine_is_found(engine, graph, tmp_path, change, precision):
    found = compare_engine(graph, with_boxes(graph, tmp_path / "model.onnx", change), precision)
    assert not found.passed
    assert found.to_dict()["passed"] is False


@pytest.mark.parametrize(
    ("noise", "precision", "passed"),
    [
        (0.01, "fp16", True),
        (0.08, "fp16", False),
        pytest.param(0.0, "fp32", True, marks=pytest.mark.slow),
        pytest.param(0.01, "fp32", False, marks=pytest.mark.slow),
    ],
)
def test_rounding_may_move_a_few_detections_of_many(graph, tmp_path, noise, precision, passed):
    """Weights with noise of 1 % of their deviation keep the AP of drawn scenes within 0.002; with 8 % it falls."""
    model = onnx.load(graph)
    disturb(model, noise)
    onnx.save(model, tmp_path / "model.onnx")
    with OnnxSession(graph) as reference, StandIn(tmp_path / "model.onnx") as candidate:
        found = compare_sessions(reference, candidate, precision, shapes=[(1, (320, 320))])
    (row,) = found.rows
    assert found.passed is passed, found.verdict
    assert bool(row.beyond) is bool(noise) and (row.compared > 80 or (precision == "fp32" and noise))
    assert bool(noise) is ("of them beyond the tolerance" in found.verdict)


@pytest.mark.parametrize(
    ("rows", "passed"),
    [
        ([(100, 10, 0)], True),
        ([(100, 11, 0)], False),
        ([(100, 6, 4)], True),
        ([(100, 6, 5)], False),
        ([(100, 0, 0), (5, 1, 0)], True),
        ([(100, 0, 0), (5, 0, 2)], False),  # of one shape
        ([(100, 9, 0), (20, 5, 0)], False),  # of all together
    ],
)
def test_below_fp32_most_detections_must_be_near(rows, passed):
    """(compared, beyond, missing) of each shape."""
    found = [EngineRow(1, 64, 64, compared=n, beyond=beyond, missing=missing, error=1.0) for n, beyond, missing in rows]
    assert EngineCheck(tuple(found), gate_for("fp16")).passed is passed
    assert EngineCheck(tuple(replace(row, error=0.0) for row in found), gate_for("fp16")).passed


def test_no_scenes_are_added_when_the_time_is_over(graph):
    with OnnxSession(graph) as reference, StandIn(graph) as candidate:
        (short,) = compare_sessions(reference, candidate, "fp16", shapes=[(1, (192, 192))], seconds=0).rows
        (long,) = compare_sessions(reference, candidate, "fp16", shapes=[(1, (192, 192))]).rows
    assert 0 < 5 * short.compared < long.compared


def test_a_verdict_names_the_one_shape_that_is_wrong():
    right, wrong = EngineRow(4, 800, 1066, compared=400), EngineRow(1, 640, 853, compared=100, missing=100, error=1.0)
    gate = gate_for("fp32")
    assert "400 of 500 detections matched, at batch 1, 640x853 0 of 100, box" in EngineCheck((right, wrong), gate).verdict
    assert "400 of 400 detections matched, box" in EngineCheck((right,), gate).verdict
    assert "0 of 100 detections matched, box" in EngineCheck((wrong,), gate).verdict


@pytest.mark.parametrize("wrong", ["", "long", "short"])
def test_an_engine_is_asked_for_prompts_of_several_lengths(exported, monkeypatch, wrong):
    """Engines of TensorRT 8.5 were wrong at some lengths of the prompt; which are asked for, and what a wrong one gives."""
    path = exported("grounding_dino").path
    asked = []

    def compare(reference, candidate, *shape):
        prompt = candidate.prompts[0].prompt.text
        asked.append(len(prompt.split()))
        kind = "long" if asked[-1] > 6 else "short" if asked[-1] < 6 else "usual"
        return EngineRow(*shape[:1], *shape[1], compared=10, missing=10 * (kind == wrong), error=float(kind == wrong))

    monkeypatch.setattr("detrt.backends.engine_check._compare", compare)
    with open_session(path) as reference, open_session(path) as candidate:
        found = compare_sessions(reference, candidate, "fp32", shapes=[(1, (64, 96)), (2, (64, 96))])
    assert asked[:3] == [6, 6, 2] and asked[3] > 12
    assert [bool(row.prompt) for row in found.rows] == [False, False, True, True]
    assert found.passed is (not wrong)
    assert "2 shapes, 3 prompts" in found.verdict
    assert (f"a prompt of {asked[3] if wrong == 'long' else 2} words, 0 of 10" in found.verdict) is bool(wrong)


def test_an_engine_that_takes_a_phrase_a_run_is_compared_with_a_graph_that_takes_several(engine, exported, tmp_path, monkeypatch):
    """As TensorRT 8.5 runs SAM 3: the graph runs the prompt at once, the engine in chunks, and for several images at once."""
    path = exported("sam3").path
    monkeypatch.setitem(PROFILE, PIXEL_VALUES, ((1, 3, 56, 56), (1, 3, 56, 56), (2, 3, 56, 56)))
    monkeypatch.setattr("detrt.backends.engine_check._longest_prompt", lambda session: "a dog. a red bus.")
    model = onnx.load(path)
    for value in model.graph.input:
        if value.name in (PHRASE_MASK, PHRASE_FEATURES):
            value.type.tensor_type.shape.dim[1].dim_value = 1
    onnx.save(model, tmp_path / "model.onnx")
    found = compare_engine(path, tmp_path / "model.engine", "fp32")
    assert found.passed and sum(row.compared for row in found.rows) >= 5, found.verdict
    assert "2 shapes, 3 prompts" in found.verdict


@pytest.mark.parametrize(
    ("name", "fault", "passed"),
    [
        ("dino", "", True),
        ("dino", "boxes", False),
        ("dino", "selection", False),
        ("rt_detr_v2", "low", True),
        pytest.param("grounding_dino", "", True, marks=pytest.mark.slow),  # 10 s
    ],
)
def test_selections_of_the_engine_are_given_to_the_graph(engine, exported, tmp_path, monkeypatch, name, fault, passed):
    """Weights that are off by a thousandth choose other queries among random scores; on the same ones outputs are equal."""
    report = exported(name)
    path = report.path
    if fault == "low":  # in FP16, without the shapes of its tensors
        onnx.save(apply_precision(onnx.load(path), report.spec, PrecisionConfig("fp16"))[0], path := tmp_path / "low.onnx")
    monkeypatch.setitem(PROFILE, PIXEL_VALUES, ((2, 3, 96, 128),) * 3)
    disturb(model := onnx.load(path), 1e-3)
    if fault == "selection":  # the worst proposals, computed rightly
        next(a for node in model.graph.node if node.op_type == "TopK" for a in node.attribute if a.name == "largest").i = 0
    assert return_selections(model) == ["selection.0"]
    onnx.save(model, tmp_path / "model.onnx")
    target = with_boxes(tmp_path / "model.onnx", tmp_path / "model.onnx", 1.2 if fault == "boxes" else 1.0)
    found = compare_engine(path, target, "fp16")
    assert found.on_same_queries and found.passed is passed, found.verdict
    assert "on the queries of the engine" in found.verdict and ("below the best" in found.verdict) is (fault == "selection")
    assert (max(row.error for row in found.rows) < 0.02) is (fault != "boxes")
    assert (max(row.selection for row in found.rows) < 0.02) is (fault != "selection")
    assert found.to_dict()["rows"][0]["selection"] is not None
    if name == "dino" and not fault:  # what cannot be told from a wrong engine otherwise
        del (model := onnx.load(tmp_path / "model.onnx")).graph.output[-1:]
        onnx.save(model, tmp_path / "model.onnx")
        without = compare_engine(path, target, "fp16")
        assert not without.passed and not without.on_same_queries and "of the engine" not in without.verdict


@pytest.fixture(scope="module")
def plugin_graphs(tmp_path_factory):
    """The embedded detector with the nodes of detrt's plugin and of NVIDIA's."""
    folder = tmp_path_factory.mktemp("plugins")
    export_onnx(load_source("embedded:shapes"), folder / "plugin.onnx", ExportConfig(msda="plugin", check=False))
    model = onnx.load(folder / "plugin.onnx")
    emit(model, "nvidia-plugin")
    onnx.save(model, folder / "nvidia-plugin.onnx")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plugin", "nvidia-plugin"])
def test_the_graph_of_a_plugin_engine_is_run_in_standard_operators(engine, graph, plugin_graphs, tmp_path, monkeypatch, how):
    """ONNX Runtime has no plugins; the graph beside such an engine is its reference all the same.

    Quick with one kind of nodes: that NVIDIA's are lowered to equal operators is in tests/graph/test_msda_plugin.py.
    """
    monkeypatch.setitem(PROFILE, PIXEL_VALUES, ((1, 3, 192, 192),) * 3)
    path = plugin_graphs / f"{how}.onnx"
    found = compare_engine(path, with_boxes(graph, tmp_path / "model.onnx", 1.0), "fp32")
    assert found.passed, found.verdict
    assert not compare_engine(path, with_boxes(graph, tmp_path / "model.onnx", 1.02), "fp32").passed
    with open_session(path) as session:
        assert any("standard operators" in note for note in session.info.notes)


def test_logits_of_masked_classes_are_equal_in_whatever_form():
    """TensorRT has the least number of a type where a graph has minus infinity."""
    want = np.array([[1.0, -np.inf]], np.float32)
    assert relative_error(want, np.array([[1.0, -3.4e38]], np.float32), LOGITS) == 0.0
    assert relative_error(want, np.array([[1.5, -65504.0]], np.float32), LOGITS) == 0.5
    for got in ([[1.0, -5.0]], [[-np.inf, -np.inf]], [[np.nan, -np.inf]]):
        assert relative_error(want, np.array(got, np.float32), LOGITS) == np.inf
    assert relative_error(want, np.array([[1.0, -3.4e38]], np.float32), PRED_BOXES) == np.inf
