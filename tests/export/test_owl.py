"""OWL-ViT and OWLv2: names to boxes, beside transformers' own processors, models and post-processing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")
pytest.importorskip("onnxslim", reason="needs the 'export' extra")

from checkpoint_folders import image_processor, save_folder
from PIL import Image
from tiny_exports import SHARED

from detrt import Detector, ExportConfig, ImageQueries, export_onnx
from detrt.backends.compare import unpadded
from detrt.backends.open import open_session
from detrt.backends.torch.session import open_torch
from detrt.cli import main
from detrt.data.preprocess import preprocess
from detrt.data.scenes.scene import draw_scene
from detrt.errors import ExportError, PromptError, SessionError, SourceError
from detrt.evaluation.parity import verify
from detrt.models.example_inputs import example_ids, image_feeds, text_feeds
from detrt.models.load import load_source
from detrt.models.wrapper import StockQueryEncoder, StockTextEncoder, StockTextModule
from detrt.pipeline import build

NAMES = ["owlvit", "owlv2"]
IMAGES = [draw_scene(index, size_hw=size).image for index, size in enumerate([(150, 200), (180, 120)])]
PROMPT = "a cat. dog. red bus. chair. person."


@pytest.fixture(scope="module")
def models(exported):
    """The exported detectors with their encoders, without a prompt."""
    opened = {name: open_session(str(exported(name, **SHARED[name]).path)) for name in NAMES}
    yield opened
    for session in opened.values():
        session.close()


@pytest.mark.parametrize("name", NAMES)
def test_detections_are_those_of_transformers(name, tiny, exported, tmp_path):
    """From pixels and text: its image processor, tokenization, model and post-processing, on a folder as it saves one."""
    pytest.importorskip("scipy", reason="OWLv2's processor needs it")
    folder = save_folder(tiny(name), tmp_path)
    report = verify(str(folder), str(exported(name, **SHARED[name]).path), IMAGES, slots=False, prompt=PROMPT)
    published = report.published
    assert report.passed and published.oracle.startswith("Ow") and published.pixels < 1e-5 and not published.differences
    assert published.unmatched[:2] == (0, 0) and published.unmatched[2] >= 10


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 4), (4, 16)])
def test_untraced_batches_and_names_equal_the_library(name, batch, tokens, tiny, exported, models):
    source, spec, session = tiny(name), exported(name, **SHARED[name]).spec, models[name]
    ids = example_ids(source, batch, tokens, seed=7)
    encode = lambda rows, mask: session.text_encoder.run({"input_ids": rows, "attention_mask": mask})  # noqa: E731
    with torch.no_grad():
        (want,) = StockTextEncoder(source)(*map(torch.from_numpy, ids))
    np.testing.assert_allclose(encode(*ids)["class_features"], want.numpy(), atol=1e-5)
    feeds = image_feeds(spec, batch, spec.input.size_hw) | text_feeds(source, spec, ids, encode)
    got = session.detector.run(feeds)
    stock = StockTextModule(source, spec).eval()
    with torch.no_grad():
        expected = stock(*(torch.from_numpy(feeds[name]) for name in stock.input_names))
    assert got["logits"].shape == (batch, 36, batch + 2)
    for output, tensor in zip(("logits", "pred_boxes"), expected, strict=True):
        a, b = unpadded(tensor.numpy(), got[output], feeds, output)
        assert np.abs(a - b).max() < 1e-4 and a.std() > 0.01
    # The library's whole forward, from token ids.
    if batch == 1:
        pixels = stock.normalized(torch.from_numpy(feeds["pixel_values"]), None)
        one = example_ids(source, 3, 7, seed=1)
        with torch.no_grad():
            whole = source.module(
                input_ids=torch.from_numpy(one[0]), attention_mask=torch.from_numpy(one[1]), pixel_values=pixels
            )
        np.testing.assert_allclose(got["logits"], whole.logits.numpy(), atol=1e-4)
        np.testing.assert_allclose(got["pred_boxes"], whole.pred_boxes.numpy(), atol=1e-5)


@pytest.mark.parametrize("choices", [{}, pytest.param({"decode": "graph"}, marks=pytest.mark.slow)], ids=["raw", "graph"])
def test_a_list_in_chunks_equals_one_run(choices, exported):
    report = exported("owlv2", **SHARED["owlv2"], **choices)
    path, spec = report.path, report.spec
    names = [name.strip() for name in PROMPT.split(".") if name]
    found = []
    for one in (spec, spec.with_decode(num_classes=2)):
        with open_session(str(path), spec=one) as session:
            bound = session.bind(names)
            found.append((bound.chunks, Detector(bound, threshold=0.0)(IMAGES[0])))
    (one, want), (several, got) = found
    assert (one, several) == (1, 3) and len(set(want.class_ids.tolist())) > 1
    if not choices:  # in a graph, boxes of two chunks at the same position are one
        assert got.class_ids.tolist() == want.class_ids.tolist()
        np.testing.assert_allclose(got.scores, want.scores, atol=1e-6)
    np.testing.assert_allclose(got.scores[:3], want.scores[:3], atol=1e-6)


@pytest.mark.parametrize("name", [pytest.param("owlvit", marks=pytest.mark.slow), "owlv2"])
def test_decoding_in_the_graph(name, exported, models):
    """Boxes of OWLv2 are relative to the square around the image, and clipped to the image."""
    want = [Detector(models[name], prompt=PROMPT, threshold=0.3)(image) for image in IMAGES]
    with Detector.open(
        str(exported(name, decode="graph", **SHARED[name]).path), prompt=PROMPT, threshold=0.3, batch_size=2
    ) as detector:
        found = detector(IMAGES)
    for a, b in zip(want, found, strict=True):
        assert len(a) and a.class_ids.tolist() == b.class_ids.tolist()
        np.testing.assert_allclose(a.boxes_xyxy, b.boxes_xyxy, atol=0.01)
        height, width = b.image_size_hw
        assert (b.boxes_xyxy.max(0) <= [width, height, width, height]).all()


def test_facts(tiny):
    for name, resize, dtype in (("owlvit", "stretch", "float32"), ("owlv2", "square", "float32")):
        spec = tiny(name).spec
        assert (spec.text.kind, spec.text.max_tokens, spec.decode.select, spec.decode.num_queries) == ("names", 16, "query", 36)
        assert spec.input.resize == resize and spec.input.size_hw == (96, 96) and not spec.input.dynamic
        assert type(spec).from_json(spec.to_json()) == spec
        assert (spec.input.antialias, spec.input.dtype) in ((True, "uint8"), (False, dtype))
    assert spec.input.box_size((30, 50)) == (50, 50)


def test_what_is_refused(tiny, models, tmp_path):
    with pytest.raises(PromptError, match="takes no task"):
        models["owlvit"].bind("cat", task="Find it.")
    with pytest.raises(PromptError, match=r"has \d+ tokens, this model takes at most 16 in one name"):
        models["owlv2"].bind("cat " * 20)
    for size, words in ((64, "multiple of 96; got 64"), (192, "takes 96x96 only")):
        with pytest.raises(ExportError, match=words):
            export_onnx(tiny("owlv2"), tmp_path / "model.onnx", ExportConfig(height=size, width=size))
    with pytest.raises(ExportError, match="runs its text encoder over every name"):
        export_onnx(tiny("owlvit"), tmp_path / "model.onnx", ExportConfig(single_graph=True))
    assert not list(tmp_path.iterdir())
    folder = save_folder(tiny("owlv2"), tmp_path / "folder")
    path = folder / "preprocessor_config.json"
    written = json.loads(path.read_text())
    for change, words in (
        ({"do_pad": False}, "do_pad False"),
        ({"resample": 3}, "resample 3"),
        ({"size": [64, 64]}, "e.g. `resize=96x96`"),
    ):
        path.write_text(json.dumps({**written, **change}))
        with pytest.raises(SourceError, match=words):
            load_source(str(folder))


def test_the_first_files_of_owlvit_are_read(tiny, tmp_path):
    """Their key of do_rescale was "rescale", which transformers still reads."""
    folder = save_folder(tiny("owlvit"), tmp_path)
    path = folder / "preprocessor_config.json"
    data = json.loads(path.read_text())
    del data["do_rescale"]
    kind = {"feature_extractor_type": "OwlViTFeatureExtractor", "size": [96, 96], "rescale": True, "crop_size": 96}
    path.write_text(json.dumps({**data, **kind}))
    assert load_source(str(folder)).spec.input == tiny("owlvit").spec.input


def test_commands(exported, tmp_path, capsys):
    model = str(exported("owlv2", **SHARED["owlv2"]).path)
    assert main(["demo-data", str(tmp_path / "scenes"), "--count", "2"]) == 0
    images, found = tmp_path / "scenes" / "images", tmp_path / "found.jsonl"
    assert main(["detect", model, str(images), "--prompt", PROMPT, "--threshold", "0.1", "--json", str(found)]) == 0
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    assert len(rows) == 2 and rows[0]["detections"][0]["label"] in PROMPT
    pytest.importorskip("pycocotools")
    annotations = tmp_path / "scenes" / "annotations.json"
    assert main(["eval", model, "--ground-truth", str(annotations), "--images", str(images)]) == 0
    assert "AP" in capsys.readouterr().out


@pytest.mark.slow
def test_a_compiled_package(tmp_path):
    """Four names in a run, so that five take two."""
    from detrt.backends.inductor.config import InductorConfig
    from detrt.pipeline import build

    build("random:owlv2/tiny", tmp_path / "b", targets=(InductorConfig(tokens=4),), export=ExportConfig(check=False))
    found = []
    for backend in ("inductor", "onnxruntime"):
        with Detector.open(str(tmp_path / "b"), backend=backend, prompt=PROMPT, threshold=0.0) as detector:
            found.append(detector(IMAGES[0]))
    assert found[0].class_ids.tolist() == found[1].class_ids.tolist()
    np.testing.assert_allclose(found[0].scores, found[1].scores, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_full_size(name, tmp_path):
    report = export_onnx(load_source(f"random:{name}"), tmp_path / "model.onnx")
    assert report.errors and report.worst < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_image_queries_find_what_transformers_finds(name, tiny, models):
    """From both images to boxes: its processor, `image_guided_detection` and post-processing."""
    pytest.importorskip("scipy", reason="OWLv2's processor needs it")
    source, (target, query) = tiny(name), IMAGES
    processor = image_processor(source)
    pixels, shown = (processor(images=image, return_tensors="pt")["pixel_values"] for image in (target, query))
    with torch.no_grad():
        outputs = source.module.image_guided_detection(pixel_values=pixels, query_pixel_values=shown)
    session = models[name]
    bound = session.bind(ImageQueries((query,), ("it",)))
    raw = bound.run(preprocess([target], session.spec).feeds)
    np.testing.assert_allclose(raw["logits"], outputs.logits.numpy(), atol=1e-4)
    np.testing.assert_allclose(raw["pred_boxes"], outputs.target_pred_boxes.numpy(), atol=1e-5)
    (theirs,) = processor.post_process_image_guided_detection(
        outputs, threshold=0.0, nms_threshold=0.3, target_sizes=torch.tensor([target.shape[:2]])
    )
    best = float(outputs.logits.sigmoid().max()) + 1e-6
    found = Detector(bound, threshold=0.1 * best)(target)
    assert len(found) == len(theirs["scores"]) >= 2 and set(found.labels) == {"it"}
    # It returns scores relative to the best one.
    order = np.argsort(-theirs["scores"].numpy(), kind="stable")
    np.testing.assert_allclose((found.scores - 0.1 * best) / (0.9 * best), theirs["scores"].numpy()[order], atol=1e-5)
    height, width = target.shape[:2]
    boxes = np.clip(theirs["boxes"].numpy()[order], 0, [width, height, width, height])
    np.testing.assert_allclose(found.boxes_xyxy, boxes, atol=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_the_feature_of_an_image_equals_the_library(name, tiny, exported, models):
    """At batches that were not traced; among them images whose best patches differ."""
    source, spec = tiny(name), exported(name, **SHARED[name]).spec
    pixels = np.concatenate([image_feeds(spec, 4, spec.input.size_hw, seed=seed)["pixel_values"] for seed in range(5)])
    stock = StockQueryEncoder(source, spec).eval()
    with torch.no_grad():
        want = stock(torch.from_numpy(pixels))[0].numpy()
    with models[name].query_encoder() as encoder:
        found = np.concatenate([encoder.run({"pixel_values": part})["class_features"] for part in np.split(pixels, [1, 5, 7])])
    np.testing.assert_allclose(found, want, atol=1e-4)
    assert len(np.unique(want.round(3), axis=0)) > 5


def test_several_images_and_texts(models, tiny):
    """Each image is a class; prompts of a call may be of both kinds; a checkpoint needs no file for it."""
    session, scene = models["owlv2"], IMAGES[0]
    both = Detector(session.bind(ImageQueries((IMAGES[1], scene[40:90, 30:90]))), threshold=0.0)(scene)
    assert set(both.labels) <= {"image 0", "image 1"} and both.phrase_spans is None
    plain = Detector(open_torch(tiny("owlv2")), prompt=ImageQueries((IMAGES[1],)), threshold=0.3)
    want = plain(scene)
    mixed = Detector(session, threshold=0.3, batch_size=3)([scene] * 3, prompts=["a cat", ImageQueries((IMAGES[1],)), "a dog"])
    assert [set(found.labels) <= {name} for found, name in zip(mixed, ("a cat", "image 0", "a dog"), strict=True)] == [True] * 3
    assert len(want) and len(mixed[1]) == len(want)
    np.testing.assert_allclose(mixed[1].scores, want.scores, atol=1e-5)
    calls = []
    opener = session.query_encoder
    session.query_encoder = lambda: calls.append(1) or opener()
    for _ in range(2):
        session.bind(ImageQueries((scene[10:60],)))
    session.query_encoder = opener
    assert len(calls) == 1, "the feature of an image is kept"


def test_image_queries_that_are_refused(exported, models, tmp_path, capsys):
    """One clear line, exit code 2, and nothing is written."""
    Image.fromarray(IMAGES[0]).save(tmp_path / "it.png")
    (tmp_path / "no.png").write_text("no image")
    image, found = str(tmp_path / "it.png"), tmp_path / "found.json"
    fixed, worded, model = (str(exported(name, **SHARED[name]).path) for name in ("detr", "omdet_turbo", "owlvit"))
    plain = str(tmp_path / "plain" / "model.onnx")
    shutil.copytree(Path(model).parent, tmp_path / "plain", ignore=lambda *_: ["query.onnx"])
    cases = [
        (model, ["--query-image", str(tmp_path / "none.png")], "none.png"),
        (model, ["--query-image", str(tmp_path / "no.png")], "no.png"),
        (model, ["--query-image", image, "--prompt", "cat"], "--prompt and --query-image say what to find more than once"),
        (model, ["--query-image", image, "--task", "Find it."], "takes no task"),
        (plain, ["--query-image", image], "--image-queries"),
        (worded, ["--query-image", image], "takes no query image, only text"),
        (fixed, ["--query-image", image], "has fixed classes and takes no prompt"),
        (model, ["--query-image"], "requires an argument"),
    ]
    for name, options, words in cases:
        assert main(["detect", name, image, "--json", str(found), *options]) == 2
        error = capsys.readouterr().err
        assert words in error and "Traceback" not in error and not found.exists(), (options, error)
    with pytest.raises(PromptError, match="give at least one"):
        ImageQueries(())
    with pytest.raises(PromptError, match="2 names of 1 query image"):
        ImageQueries((image,), ("a", "b"))
    with pytest.raises(ExportError, match="`image_queries` is for OWL-ViT and OWLv2"):
        export_onnx(load_source("random:omdet_turbo/tiny"), tmp_path / "m.onnx", ExportConfig(image_queries=True))
    decoded = open_session(str(exported("owlv2", decode="graph", **SHARED["owlv2"]).path))
    with decoded, pytest.raises(PromptError, match="without `decode=graph`"):
        decoded.bind(ImageQueries((image,)))
    with pytest.raises(SessionError, match="give the model itself"):
        open_session(str(exported("owlvit", **SHARED["owlvit"]).path.with_name("query.onnx")))


def test_a_bundle_with_image_queries(tmp_path, capsys):
    build("random:owlvit/tiny", tmp_path / "b", export=ExportConfig(check=False, image_queries=True))
    build(tmp_path / "b" / "model.onnx", tmp_path / "again")
    Image.fromarray(IMAGES[0]).save(tmp_path / "it.png")
    found = []
    for bundle in ("b", "again"):
        path = tmp_path / f"{bundle}.jsonl"
        image = str(tmp_path / "it.png")
        options = ["--query-image", image, "--threshold", "0.1", "--json", str(path)]
        assert main(["detect", str(tmp_path / bundle), image, *options]) == 0
        found.append(path.read_text())
    assert found[0] == found[1] and '"label": "it"' in found[0]
    assert main(["info", str(tmp_path / "again")]) == 0
    assert "query.onnx" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_of_names_is_that_of_transformers(name, tiny, exported, tmp_path):
    """The names of the categories are the prompt, and all pairs of a patch and a name count; pycocotools judges what transformers finds in
    the same files with each of the names. The truth is every third of that."""
    pytest.importorskip("pycocotools", reason="needs the 'eval' extra")
    pytest.importorskip("scipy", reason="OWLv2's processor needs it")
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    from detrt.evaluation.coco import evaluate_coco
    from detrt.models.published import processor_with_text

    source, names = tiny(name), ["cat", "red bus", "person"]
    processor, images, found = processor_with_text(source, image_processor(source)), [], []
    for number, image in enumerate(IMAGES):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
        height, width = image.shape[:2]
        images.append({"id": number, "file_name": f"{number}.png", "height": height, "width": width})
        with torch.no_grad():
            outputs = source.module(**processor(images=image, text=[names], return_tensors="pt"))
        for column in range(len(names)):
            alone = SimpleNamespace(logits=outputs.logits[..., column, None], pred_boxes=outputs.pred_boxes)
            (one,) = processor.post_process_grounded_object_detection(alone, threshold=0.0, target_sizes=[(height, width)])
            corners = np.clip(one["boxes"].numpy(), 0, [width, height, width, height])
            boxes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()
            for box, score in zip(boxes, one["scores"].tolist(), strict=True):
                found.append({"image_id": number, "category_id": column + 5, "bbox": box, "score": score})
    # As the authors' evaluator, which keeps 300 of them: the best pairs of an image.
    most = source.spec.decode.max_detections
    found.sort(key=lambda row: -row["score"])
    found = [row for number in range(2) for row in [row for row in found if row["image_id"] == number][:most]]
    some = [row for row in found if min(row["bbox"][2:]) > 1][::3]
    annotations = [{**row, "id": i, "area": row["bbox"][2] * row["bbox"][3], "iscrowd": 0} for i, row in enumerate(some, 1)]
    categories = [{"id": i, "name": category} for i, category in enumerate(names, 5)]
    truth = tmp_path / "truth.json"
    truth.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    with open_session(str(exported(name, **SHARED[name]).path)) as session:
        figures = evaluate_coco(session, truth, tmp_path).metrics["AP"]
    coco = COCO(str(truth))
    judged = COCOeval(coco, coco.loadRes(found), "bbox")
    judged.evaluate()
    judged.accumulate()
    judged.summarize()
    assert len(annotations) >= 10 and figures == pytest.approx(judged.stats[0], abs=1e-3) and 0.2 < judged.stats[0] < 0.9
