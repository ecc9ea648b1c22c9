"""PP-DocLayout beyond its graph: what is refused, engines, packages. Its numbers are in test_families.py and data/test_reading_order.py."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")

from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.tensorrt.build import build_engine
from detrt.backends.tensorrt.config import EngineConfig
from detrt.backends.torch.session import TorchSession
from detrt.data.scenes.scene import draw_scene
from detrt.detector import Detector
from detrt.errors import ExportError, SourceError
from detrt.evaluation.parity import verify
from detrt.models.contract import ExportConfig, exported_spec
from detrt.models.load import load_source
from detrt.tasks.reading_order import CUT_TOLERANCE

NAMES = [f"pp_doclayout_v{version}" for version in (2, 3, 4)]
IMAGE = draw_scene(1, size_hw=(150, 200)).image


@pytest.mark.parametrize("name", NAMES)
def test_an_export_reads_in_the_order_of_the_model(name, exported, tiny):
    with (
        Detector(OnnxSession(exported(name).path), threshold=0.0) as ours,
        Detector(TorchSession(tiny(name)), threshold=0.0) as reference,
    ):
        found, want = ours(IMAGE), reference(IMAGE)
    assert len(set(found.reading_order.tolist())) > 5
    if name.endswith("2"):  # PyTorch's sort of its flags has no order of equal ones
        return
    np.testing.assert_array_equal(found.reading_order, want.reading_order)
    np.testing.assert_allclose(found.boxes_xyxy, want.boxes_xyxy, atol=0.01)


def test_a_server_answers_in_reading_order(exported):
    httpx = pytest.importorskip("httpx", reason="needs the 'dev' extra")
    pytest.importorskip("fastapi", reason="needs the 'serve' extra")
    from serve_support import Server, png

    path = exported("pp_doclayout_v4").path
    with Detector(OnnxSession(path), threshold=0.3) as detector:
        expected = detector(IMAGE)
    with Server(path, "--workers", 1) as server:
        answer = httpx.post(
            server.address + "/v1/detect", files={"images": png(IMAGE)}, data={"threshold": "0.3"}, timeout=60
        ).json()
    found = answer["images"][0]["detections"]
    assert found == expected.to_list() and len(found) > 5
    assert [one["reading_order"] for one in found] == sorted(one["reading_order"] for one in found)
    scores = [one["score"] for one in found]
    assert scores != sorted(scores, reverse=True) and np.array(found[0]["quad"]).shape == (4, 2)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_ranks_by_score(name, exported, tiny, tmp_path):
    """The truth is what PyTorch finds with the best scores; pycocotools judges PyTorch's detections by themselves."""
    pytest.importorskip("pycocotools", reason="needs the 'eval' extra")
    from PIL import Image
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    from detrt.evaluation.coco import evaluate_coco

    images, found = [], []
    with TorchSession(tiny(name)) as session, Detector(session, threshold=0.0) as reference:
        categories = [{"id": i, "name": session.spec.label(i)} for i in range(session.spec.decode.num_classes)]
        for number in range(3):
            image = draw_scene(number, size_hw=(150, 200)).image
            Image.fromarray(image).save(tmp_path / f"{number}.png")
            images.append({"id": number, "file_name": f"{number}.png", "height": 150, "width": 200})
            found += reference(image).to_coco(number)
    best = sorted(found, key=lambda one: -one["score"])[: len(found) // 2]
    annotations = [{**one, "id": i, "area": one["bbox"][2] * one["bbox"][3], "iscrowd": 0} for i, one in enumerate(best, 1)]
    for one in annotations:
        one.pop("segmentation", None)
    truth = tmp_path / "truth.json"
    truth.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    with OnnxSession(exported(name).path) as session:
        figures = evaluate_coco(session, truth, tmp_path, iou_type="bbox").metrics
    coco = COCO(str(truth))
    judged = COCOeval(coco, coco.loadRes(sorted(found, key=lambda one: -one["score"])), "bbox")
    judged.evaluate()
    judged.accumulate()
    judged.summarize()
    assert len(annotations) > 20 and figures["AP"] == pytest.approx(judged.stats[0], abs=1e-3) and judged.stats[0] > 0.9


@pytest.fixture
def cut_coordinates(exported):
    """Of PP-DocLayoutV2, which cuts coordinates to thousandths: its export, its graph, the name of the uncut coordinates, and
    by -> the graph with larger ones."""
    import onnx
    from onnx import helper, numpy_helper

    from detrt.graph.selections import cut_outputs

    report = exported("pp_doclayout_v2")
    model = onnx.load(report.path)
    ((cut, number),) = cut_outputs(model, report.spec).items()

    def shifted(by):
        copy = onnx.ModelProto.FromString(model.SerializeToString())
        copy.graph.initializer.append(numpy_helper.from_array(np.float32(by), "by"))
        at, node = next((i, node) for i, node in enumerate(copy.graph.node) if cut in node.output)
        copy.graph.node.insert(at, helper.make_node("Add", [node.input[0], "by"], ["moved"]))
        copy.graph.node[at + 1].input[0] = "moved"
        return copy

    return report, model, number, shifted


def test_coordinates_at_an_integer_do_not_fail_the_check(cut_coordinates, tiny, monkeypatch):
    """A graph whose coordinates are larger by less than CUT_TOLERANCE of one, so that some are cut to the next, passes, and one with
    larger differences does not."""
    import onnx

    from detrt.export.onnx import check_export
    from detrt.graph.clean import with_outputs
    from detrt.models.example_inputs import example_feeds

    (report, model, number, shifted), source = cut_coordinates, tiny("pp_doclayout_v2")
    errors = lambda graph: max(row["error"] for row in check_export(source, graph, report.spec))  # noqa: E731
    wide = with_outputs(model, [number], onnx.TensorProto.FLOAT)
    feeds = example_feeds(report.spec, 3, report.spec.input.size_hw, seed=3)
    values = OnnxSession(wide.SerializeToString(), report.spec).run(feeds)[number]
    assert (values % 1 > 1 - CUT_TOLERANCE * 0.9).any(), "no coordinate that a shift of this size cuts otherwise"
    assert errors(model) < 1e-3 and errors(shifted(CUT_TOLERANCE * 0.9)) < 1e-3
    assert errors(shifted(0.3)) > 1e-3
    monkeypatch.setattr("detrt.tasks.reading_order.CUT_TOLERANCE", 0.0)
    assert errors(shifted(CUT_TOLERANCE * 0.9)) > 1e-3, "no other integer"


@pytest.mark.slow
def test_coordinates_at_an_integer_do_not_fail_verify(cut_coordinates, tiny, monkeypatch, tmp_path):
    """Beside PyTorch and beside a graph."""
    import onnx

    report, _, _, shifted = cut_coordinates
    near, far = tmp_path / "near.onnx", tmp_path / "far.onnx"
    onnx.save(shifted(CUT_TOLERANCE * 0.9), near)
    onnx.save(shifted(0.3), far)
    images = [draw_scene(seed, size_hw=(150, 200)).image for seed in range(6)]
    tensors = lambda a, b: max(row["error"] for row in verify(a, str(b), images).tensors)  # noqa: E731
    for reference in (tiny("pp_doclayout_v2"), str(report.path)):
        assert tensors(reference, near) < 1e-3 < tensors(reference, far)
    monkeypatch.setattr("detrt.tasks.reading_order.CUT_TOLERANCE", 0.0)
    assert tensors(str(report.path), near) > 1e-3


def test_what_is_refused(tiny):
    with pytest.raises(ExportError, match="`decode=graph`: PP-DocLayoutV4 gives reading order and its ranks, quadrilaterals"):
        exported_spec(tiny("pp_doclayout_v4"), ExportConfig(decode="graph"))
    with pytest.raises(SourceError, match="`queries=5`: PP-DocLayoutV3 is not made for fewer queries"):
        load_source("random:pp_doclayout_v3/tiny", queries=5)


def test_boxes_without_masks():
    source = load_source("random:pp_doclayout_v3/tiny", no_masks=True)
    assert "task" not in exported_spec(source, ExportConfig()).to_dict()
    with Detector(TorchSession(source), threshold=0.0) as detector:
        found = detector(IMAGE)
    assert found.masks is None and found.reading_order is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_is_built(name, exported, tmp_path):
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the 'rtx' extra")
    report = exported(name, height=320, width=320)
    built = build_engine(report.path, tmp_path / "m.engine", EngineConfig(target="tensorrt-rtx", sms=(89,)))
    assert built.path.stat().st_size > 100_000 and built.facts.layers > 100
