"""ONNX files of other exporters: as bundles, and through every command, against ONNX Runtime or PyTorch run by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the 'export' extra")
import foreign_models as made
import onnx
import torch
from onnxruntime import InferenceSession
from PIL import Image

from detrt import Bundle, Detector, build, open_session, verify
from detrt.backends.onnxruntime.session import run_graph
from detrt.backends.tensorrt import EngineConfig
from detrt.bundle import read_sidecar
from detrt.detections import cxcywh_to_xyxy
from detrt.errors import GateError, GraphError
from detrt.evaluation.coco import evaluate_coco
from detrt.export.foreign import export_foreign
from detrt.models.foreign import ForeignModel, read_foreign
from detrt.models.load_options import LoadOptions
from detrt.precision import PrecisionConfig

RNG = np.random.default_rng(3)
IMAGES = [RNG.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in ((80, 120), (64, 96))]
THRESHOLD = 0.4


def pixels(image, size_hw=(made.HEIGHT, made.WIDTH), mean=0.0, std=1.0):
    """As the exporters document it: Pillow's bilinear resize, RGB / 255, mean and standard deviation, NCHW."""
    resized = np.asarray(Image.fromarray(image).resize(size_hw[::-1], Image.Resampling.BILINEAR), np.float32) / 255
    return ((resized - mean) / std).astype(np.float32).transpose(2, 0, 1)[None]


def top(scores, boxes, image, count, *, by_query=False):
    """Rows (score, class, box in pixels) above the threshold: of the best pairs, or of the best class of each query."""
    height, width = image.shape[:2]
    kept = scores * (scores == scores.max(-1, keepdims=True)) if by_query else scores
    order = np.argsort(-kept.reshape(-1), kind="stable")[:count]
    rows = [(kept.reshape(-1)[i], i % scores.shape[1], boxes[i // scores.shape[1]]) for i in order]
    scale = np.float32([width, height, width, height])
    return [(score, label, cxcywh_to_xyxy(box[None])[0] * scale) for score, label, box in rows if score > THRESHOLD]


def same(found, rows, size_hw, *, scores=1e-5, boxes=1e-2):
    assert rows, "nothing above the threshold: the test would show nothing"
    height, width = size_hw
    assert found.class_ids.tolist() == [label for _, label, _ in rows]
    np.testing.assert_allclose(found.scores, [score for score, _, _ in rows], atol=scores)
    expected = np.clip(np.stack([box for _, _, box in rows]), 0, [width, height, width, height])
    np.testing.assert_allclose(found.boxes_xyxy, expected, atol=boxes)


def expected_rows(layout, module, image, **settings):
    given = torch.from_numpy(pixels(image, **settings))
    with torch.no_grad():
        if layout == "rt-detr":
            labels, boxes, scores = module(given, torch.tensor([[image.shape[1], image.shape[0]]]))
            order = torch.argsort(-scores[0], stable=True)
            rows = zip(scores[0][order], labels[0][order], boxes[0][order], strict=True)
            return [(float(s), int(c), b.numpy()) for s, c, b in rows if s > THRESHOLD]
        logits, boxes = module.heads(given)
    scores = logits.sigmoid()[0].numpy()
    return top(scores, boxes[0].numpy(), image, len(boxes[0]), by_query=layout == "ultralytics")


@pytest.fixture
def labels(tmp_path):
    path = tmp_path / "labels.txt"
    path.write_text("\n".join(made.NAMES) + "\n")
    return path


@pytest.mark.parametrize(
    ("layout", "stated", "settings", "changes"),
    [
        ("rt-detr", {"preprocess": "family-default"}, {}, {}),
        ("rt-detr", {"family": "d_fine"}, {}, {"focal": False}),
        ("rt-detr", {"mean": tuple(made.MEAN), "std": tuple(made.STD)}, {"mean": made.MEAN, "std": made.STD}, {"batch": 1}),
        ("rf-detr", {}, {"mean": made.MEAN, "std": made.STD}, {}),
        ("rf-detr", {}, {"mean": made.MEAN, "std": made.STD}, {"batch": 2}),
        ("ultralytics", {}, {}, {}),
        ("ultralytics", {}, {}, {"hidden": True, "batch": 1}),
    ],
    ids=lambda value: " ".join(map(str, value.items())) if isinstance(value, dict) else "",
)
def test_a_bundle_detects_as_its_authors_document(layout, stated, settings, changes, labels, tmp_path):
    module = made.write(tmp_path / "theirs.onnx", layout, **changes)
    report = build(tmp_path / "theirs.onnx", tmp_path / "b", labels=labels, **stated)
    assert "equal to the original" in report.stages[0].verdict and f"layout {layout}" in report.notes[0]
    origin = report.bundle.provenance
    assert origin.source == str(tmp_path / "theirs.onnx") and origin.parameters > 500
    with Detector.open(tmp_path / "b", threshold=THRESHOLD) as detector:
        found = detector(IMAGES)
    for image, detections in zip(IMAGES, found, strict=True):
        same(detections, expected_rows(layout, module, image, **settings), image.shape[:2])
        assert detections.labels == tuple(made.NAMES[i] for i in detections.class_ids)


def test_half_precision(labels, tmp_path):
    module = made.write(tmp_path / "theirs.onnx", "ultralytics", half=True).float()
    with Detector.open(tmp_path / "theirs.onnx", threshold=THRESHOLD, labels=labels) as detector:
        for image in IMAGES:
            rows = expected_rows("ultralytics", module, image)
            found = detector([image])[0]
            # Scores near one another change places, so each expected box is looked for.
            for score, label, box in rows[:3]:
                near = [
                    np.abs(b - np.clip(box, 0, 120)).max()
                    for b, c in zip(found.boxes_xyxy, found.class_ids, strict=True)
                    if c == label
                ]
                assert min(near) < 0.5 and np.abs(found.scores - score).min() < 5e-3


def test_a_batch_axis_that_is_only_declared(labels, tmp_path):
    made.write(tmp_path / "theirs.onnx", "rt-detr", baked_batch=True)
    report = build(tmp_path / "theirs.onnx", tmp_path / "b", labels=labels, preprocess="family-default")
    assert "batch 1 only" in report.notes[-1]
    with Detector.open(tmp_path / "b", threshold=THRESHOLD, batch_size=2) as detector:
        assert detector.session.info.fixed_batch == 1
        assert [len(found) > 0 for found in detector(IMAGES)] == [True, True]


def test_a_graph_that_is_not_equal_is_refused(labels, tmp_path, monkeypatch):
    made.write(tmp_path / "theirs.onnx", "rf-detr")
    right = read_foreign(tmp_path / "theirs.onnx", LoadOptions(labels=labels), run_graph)
    other = LoadOptions(labels=labels, mean=(0.1, 0.2, 0.3), std=(1, 1, 1))
    wrong = read_foreign(tmp_path / "theirs.onnx", other, run_graph).contract()
    monkeypatch.setattr(ForeignModel, "contract", lambda self, batch=None: wrong)
    with pytest.raises(GateError, match="differs from"):
        export_foreign(right, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("name", ["atto", "femto"])
def test_the_files_of_deimv2(name, real_data, tmp_path):
    """The authors' files on photographs, against ONNX Runtime run by hand with the preprocessing that they document."""
    path = real_data / "weights" / "deimv2" / f"deimv2_hgnetv2_{name}_coco.onnx"
    side = {"atto": 320, "femto": 416}[name]
    session = InferenceSession(str(path), providers=["CPUExecutionProvider"])
    photographs = sorted((real_data / "images/coco_permissive/val2017").glob("*.jpg"))[:3]
    with Detector.open(path, preprocess="family-default", threshold=THRESHOLD) as detector:
        assert detector.session.spec.label(0) == "person" and detector.session.spec.decode.num_classes == 80
        found = detector(photographs)
    for file, detections in zip(photographs, found, strict=True):
        image = np.asarray(Image.open(file).convert("RGB"))
        feeds = {"images": pixels(image, (side, side)), "orig_target_sizes": np.array([[image.shape[1], image.shape[0]]])}
        labels, boxes, scores = session.run(["labels", "boxes", "scores"], feeds)
        rows = [row for row in zip(scores[0], labels[0], boxes[0], strict=True) if row[0] > THRESHOLD]
        same(detections, rows, image.shape[:2])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ap", "ap50"), [("atto", 0.288, 0.444), ("femto", 0.334, 0.496)])
def test_average_precision_of_deimv2(name, ap, ap50, real_data, tmp_path):
    """The figures that ONNX Runtime and pycocotools give for the authors' files."""
    path = real_data / "weights" / "deimv2" / f"deimv2_hgnetv2_{name}_coco.onnx"
    build(path, tmp_path / "b", preprocess="family-default")
    images = real_data / "images/coco_permissive"
    with open_session(tmp_path / "b") as session:
        report = evaluate_coco(session, images / "annotations/instances_val2017.json", images / "val2017")
    assert report.metrics["AP"] == pytest.approx(ap, abs=6e-4) and report.metrics["AP50"] == pytest.approx(ap50, abs=6e-4)


@pytest.mark.parametrize("name", ["detr", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rt_detr", "yolos"))])
def test_a_folder_as_optimum_writes_it(name, tiny, tmp_path):
    """torch.onnx.export of transformers' own class, with its config and its image processor, against its own post-processing."""
    import transformers

    source = tiny(name)
    kind = getattr(transformers, {"detr": "Detr", "rt_detr": "RTDetr", "yolos": "Yolos"}[name] + "ImageProcessorPil")
    height, width = source.spec.input.size_hw if name == "yolos" else (96, 128)
    processor = kind(size={"height": height, "width": width}, do_pad=False)
    processor.save_pretrained(tmp_path)
    source.module.config.save_pretrained(tmp_path)
    inputs = {"pixel_values": torch.rand(1, 3, height, width)}
    if name == "detr":
        inputs["pixel_mask"] = torch.ones(1, height, width, dtype=torch.int64)
    with torch.no_grad():
        torch.onnx.export(
            _Outputs(source.module).eval(), tuple(inputs.values()), str(tmp_path / "model.onnx"), dynamo=False, opset_version=17,
            input_names=list(inputs), output_names=["logits", "pred_boxes"], dynamic_axes={key: {0: "batch_size"} for key in inputs},
        )  # fmt: skip
    report = build(tmp_path / "model.onnx", tmp_path / "b")
    assert "layout transformers" in report.stages[0].verdict and any("config.json" in note for note in report.notes)
    spec = report.bundle.spec
    assert spec.decode == source.spec.decode and spec.labels == source.spec.labels and spec.family == name
    # Whatever ran before: with random weights proposals are nearly equal, and for three of six images the file itself, in ONNX Runtime, selects
    # others than PyTorch. With this one it selects the same.
    image = np.random.default_rng(3).integers(0, 256, (70, 110, 3), dtype=np.uint8)
    given = processor(images=[Image.fromarray(image)], return_tensors="pt")
    with torch.no_grad():
        outputs = source.module(pixel_values=given["pixel_values"])
    expected = processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=[image.shape[:2]])[0]
    order = torch.argsort(-expected["scores"], stable=True)[:10]
    with Detector.open(tmp_path / "b", threshold=0.0) as detector:
        found = detector([image])[0]
    np.testing.assert_allclose(found.scores[:10], expected["scores"][order], atol=1e-4)
    clipped = np.clip(expected["boxes"][order].numpy(), 0, [110, 70, 110, 70])
    np.testing.assert_allclose(found.boxes_xyxy[:10], clipped, atol=0.1)


class _Outputs(torch.nn.Module):
    """Outputs as a tuple, which torch's exporter needs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        outputs = self.model(*inputs)
        return outputs.logits, outputs.pred_boxes


def test_a_sidecar_and_renamed_tensors(labels, tmp_path):
    """A file whose tensors have other names, and everything else from its sidecar."""
    module = made.write(tmp_path / "theirs.onnx", "rt-detr")
    model = onnx.load(tmp_path / "theirs.onnx")
    for value in (*model.graph.input, *model.graph.output):
        for node in model.graph.node:
            for side in (node.input, node.output):
                side[:] = [f"my_{name}" if name == value.name else name for name in side]
        value.name = f"my_{value.name}"
    onnx.save(model, tmp_path / "theirs.onnx")
    names = ("images", "orig_target_sizes", "labels", "boxes", "scores")
    sidecar = {"layout": "rt-detr", "tensors": {name: f"my_{name}" for name in names}}
    with pytest.raises(GraphError, match=r"my_images.*fit no layout that detrt knows: transformers \(pixel_values"):
        Detector.open(tmp_path / "theirs.onnx")
    sidecar |= {"labels": list(made.NAMES), "mean": made.MEAN.tolist(), "std": made.STD.tolist()}
    (tmp_path / "theirs.onnx.json").write_text(json.dumps(sidecar))
    with Detector.open(tmp_path / "theirs.onnx", threshold=THRESHOLD) as detector:
        assert "class names of the sidecar" in detector.session.info.note
        found = detector(IMAGES[:1])[0]
    same(found, expected_rows("rt-detr", module, IMAGES[0], mean=made.MEAN, std=made.STD), IMAGES[0].shape[:2])


def test_names_in_the_metadata(tmp_path):
    """ultralytics writes them; a file of YOLO is refused."""
    made.write(tmp_path / "theirs.onnx", "ultralytics", batch=1)
    made.add_metadata(tmp_path / "theirs.onnx", names=str(dict(enumerate(made.NAMES))), task="detect")
    with open_session(tmp_path / "theirs.onnx") as session:
        assert session.spec.label(3) == "cat" and session.spec.decode.select == "query"
    made.add_metadata(tmp_path / "theirs.onnx", end2end="True")
    with pytest.raises(GraphError, match="fit no layout"):
        open_session(tmp_path / "theirs.onnx")
    with pytest.raises(GraphError, match="YOLO models are not supported"):
        open_session(tmp_path / "theirs.onnx", layout="ultralytics")


@pytest.mark.slow
def test_half_precision_of_deimv2(real_data, tmp_path):
    """Its graph in FP16 still runs, and finds the same on a photograph."""
    path = real_data / "weights/deimv2/deimv2_hgnetv2_atto_coco.onnx"
    build(path, tmp_path / "b", preprocess="family-default", precision=PrecisionConfig("fp16"))
    photograph = real_data / "images/coco_permissive/val2017/000000005001.jpg"
    with Detector.open(path, preprocess="family-default", threshold=0.5) as detector:
        expected = detector([photograph])[0]
    with Detector.open(tmp_path / "b", threshold=0.4) as detector:
        found = detector([photograph])[0]
    assert len(expected) > 3 and found.class_ids[: len(expected)].tolist() == expected.class_ids.tolist()
    np.testing.assert_allclose(found.scores[: len(expected)], expected.scores, atol=0.02)


@pytest.mark.slow
def test_deimv2_beside_its_folder(real_data):
    """One --family says how both sides are read."""
    path = real_data / "weights" / "deimv2" / "deimv2_hgnetv2_atto_coco.onnx"
    photograph = real_data / "images/coco_permissive/val2017/000000005001.jpg"
    folder = real_data / "checkpoints" / "deimv2-atto-coco"
    choices = {"family": "deimv2-upstream", "preprocess": "family-default"}
    report = verify(str(folder), path, [photograph], slots=False, **choices)
    assert report.passed and report.compared > 3, report.failures


@pytest.mark.slow
@pytest.mark.parametrize("name", ["atto", "femto"])
def test_an_engine_and_a_server_of_deimv2(name, real_data, tmp_path):
    """The authors' files as engines for TensorRT-RTX, and served, with the detections that they give by hand."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the 'rtx' extra")
    httpx = pytest.importorskip("httpx", reason="needs the 'serve' extra")
    from serve_support import Server

    path = real_data / "weights" / "deimv2" / f"deimv2_hgnetv2_{name}_coco.onnx"
    build(path, tmp_path / "b", targets=(EngineConfig(sms=(89,)),), preprocess="family-default")
    bundle = Bundle.open(tmp_path / "b")
    (engine,) = bundle.of_kind("engine")
    spec, facts = read_sidecar(bundle.checked_path(engine))
    assert spec == bundle.spec and facts.profile["pixel_values"]["max"][0] == 8 and facts.precision == "fp32"
    photograph = real_data / "images/coco_permissive/val2017/000000005001.jpg"
    with Detector.open(path, preprocess="family-default", threshold=THRESHOLD) as detector:
        expected = detector([photograph])[0]
    with Server(tmp_path / "b", "--device", "cpu") as server:
        files = {"image": photograph.read_bytes()}
        answer = httpx.post(f"{server.address}/v1/detect", files=files, data={"threshold": THRESHOLD}, timeout=60).json()
    found = answer["images"][0]["detections"]
    assert len(found) == len(expected) > 3
    np.testing.assert_allclose([row["score"] for row in found], expected.scores, atol=1e-4)
