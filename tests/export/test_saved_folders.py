"""Folders that `save_pretrained` of model and processor wrote: pixels, outputs and detections against transformers' own.

transformers opens the folder by its Auto classes, so nothing of detrt's reader is on that side. DEIMv2 is not among the
families: transformers does not read back the box head that it writes (`test_load.test_shared_box_head_is_read_back`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
transformers = pytest.importorskip("transformers", reason="needs the 'export' extra")

from checkpoint_folders import image_processor, save_folder
from parity_scenes import parity_set
from torchvision_nms import batched_nms

from detrt import Detector, graph
from detrt.backends.compare import relative_error
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.torch.session import open_torch
from detrt.data.matching import Gate, match
from detrt.data.postprocess import decode
from detrt.data.preprocess import preprocess
from detrt.data.scenes.scene import draw_scene
from detrt.errors import GateError, SourceError
from detrt.export import ExportConfig, export_onnx
from detrt.graph.clean import with_outputs
from detrt.graph.selections import topk_outputs
from detrt.models import published
from detrt.models.hooks import forced_topk
from detrt.models.load import load_source
from detrt.spec import Precision

FAMILIES = (
    *("detr", "table-transformer", "conditional_detr", "dab_detr", "deformable_detr", "yolos"),
    *("rt_detr", "rt_detr_v2", "d_fine", "lw_detr"),
)
EDGED = FAMILIES[:6]
TORCHVISION = importlib.util.find_spec("torchvision") is not None
SLOW = ("rt_detr",)  # as in test_families, whose exports these are: RT-DETRv2 is the quick one of the two
EDGES = {"size": {"shortest_edge": 128, "longest_edge": 192}}
SQUARE = {"size": {"height": 128, "width": 128}}
LETTERBOX = {"size": {"max_height": 128, "max_width": 128}, "do_pad": True, "pad_size": {"height": 128, "width": 128}}
# name -> settings of the processor for a family that resizes by edges, for the others, options of the model's `save_pretrained`
FOLDERS = {
    "as saved": (EDGES, SQUARE, {}),
    "another size": ({"size": {"shortest_edge": 96, "longest_edge": 256}}, {"size": {"height": 128, "width": 192}}, {}),
    "padded, as the guide of transformers": (LETTERBOX, LETTERBOX, {}),
    "sharded": (EDGES, SQUARE, {"max_shard_size": "200KB"}),
}
IMAGES = [draw_scene(index, size_hw=size).image for index, size in enumerate(((150, 200), (220, 140)))]
SAME = Gate(threshold=0.3, at_least=5, box_px=0.1, score=1e-4)


def opened(folder):
    """transformers' own model and image processor of a folder."""
    model = transformers.AutoModelForObjectDetection.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")


def check(path, spec, folder, images):
    """One image at a time: pixels, outputs with the graph's selections forced, and detections."""
    model, processor = opened(folder)
    exported = graph.load(path)
    selections = topk_outputs(exported)
    plain = spec.with_input(normalize_in_graph=False, dtype="float32")
    with OnnxSession(with_outputs(exported, selections).SerializeToString(), graph.read_spec(path)) as session:
        for image in images:
            inputs = processor(images=image, return_tensors="pt")
            np.testing.assert_allclose(
                preprocess([image], plain).feeds["pixel_values"], inputs["pixel_values"].numpy(), atol=1e-5
            )
            got = session.run(preprocess([image], spec).feeds)
            with torch.no_grad(), forced_topk([torch.from_numpy(got[name]) for name in selections]):
                want = model(**inputs)
            for name in ("logits", "pred_boxes"):
                assert relative_error(want[name].numpy(), got[name]) < Precision.FP32.output_tolerance, name
            theirs = processor.post_process_object_detection(want, threshold=0.0, target_sizes=torch.tensor([image.shape[:2]]))[0]
            ours = decode(got, spec, [image.shape[:2]], threshold=0.0)[0]
            found = match(published._as_detections(theirs, image.shape[:2]), ours, SAME)
            assert found.compared >= 5 and (found.missing, found.extra) == (0, 0)
            assert found.box_px < 0.1 and found.score < 1e-4


def _is_quick(name, variant):
    """Each family, and each kind of folder with a family that resizes by edges and one that does not."""
    return name not in SLOW and (variant == "as saved" or name in ("detr", "rt_detr_v2"))


CASES = [pytest.param(n, v, marks=[] if _is_quick(n, v) else [pytest.mark.slow]) for n in FAMILIES for v in FOLDERS]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_a_saved_folder(name, variant, tiny, exported, tmp_path):
    """The weights are those of the exported graph, whose sides are symbolic; the spec is read from the folder."""
    edged, others, saving = FOLDERS[variant]
    save_folder(tiny(name), tmp_path, edged if name in EDGED else others, **saving)
    if name in ("yolos", "lw_detr") and variant.startswith("padded"):
        with pytest.raises(SourceError, match="says pad_size .*`resize=HEIGHTxWIDTH`"):
            load_source(str(tmp_path))
        return
    check(exported(name).path, load_source(str(tmp_path)).spec, tmp_path, IMAGES)


def test_a_dab_detr_with_patterns_has_a_box_for_each_anchor_and_pattern(tiny, tmp_path):
    source = tiny("dab_detr")
    config = deepcopy(source.module.config)
    config.num_patterns = 2
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = type(source.module)(config).eval()
    save_folder(replace(source, module=module), tmp_path / "folder", EDGES)
    loaded = load_source(str(tmp_path / "folder"))
    assert loaded.spec.decode.num_queries == 2 * source.spec.decode.num_queries
    report = export_onnx(loaded, tmp_path / "model.onnx", ExportConfig())
    check(report.path, report.spec, tmp_path / "folder", IMAGES)


def exported_variant(folder, variant):
    """The export of a saved folder beside it, whose weights become FP16, or whose processor's files go, if the variant says so."""
    choices = {}
    if variant == "fp16":
        model, _ = opened(folder)
        model.half().save_pretrained(folder)
    if variant == "family default":
        choices["preprocess"] = "family-default"
        for file in folder.glob("*processor_config.json"):
            file.unlink()
    return export_onnx(load_source(str(folder), **choices), folder.parent / "model.onnx", ExportConfig())


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["fp16", "family default", "letterbox at another size"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_folder_is_exported(name, variant, tiny, tmp_path):
    """With its own export, and its check."""
    folder = tmp_path / "folder"
    source = tiny(name)
    save_folder(source, folder, LETTERBOX if variant.startswith("letterbox") and name not in ("yolos", "lw_detr") else None)
    report = exported_variant(folder, variant)
    if variant == "family default":
        assert not report.processing.oracle  # nothing in the folder that transformers could read
        image_processor(source).save_pretrained(folder)
    else:
        assert report.processing.oracle.endswith("ImageProcessorPil") and report.processing.pixels < 1e-5
    check(report.path, report.spec, folder, IMAGES[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grounding_dino", "mm_grounding_dino", "omdet_turbo"])
def test_a_saved_folder_with_a_prompt_is_exported(name, tiny, tmp_path):
    """Outputs are compared with the library's model by the export's own check; trained ones below."""
    source = load_source(str(save_folder(tiny(name), tmp_path / "folder", SQUARE if name == "omdet_turbo" else EDGES)))
    report = export_onnx(source, tmp_path / "model.onnx")
    assert report.processing.oracle == f"{source.family.processor.name}ImageProcessorPil" and report.processing.pixels < 1e-5
    assert report.errors and report.worst < Precision.FP32.output_tolerance


@pytest.mark.parametrize(("name", "settings"), [("detr", EDGES), ("rt_detr_v2", SQUARE)])
def test_processing_is_compared_with_transformers(name, settings, tiny, tmp_path):
    source = load_source(str(save_folder(tiny(name), tmp_path, settings)))
    done = published.check_processing(source)
    assert done.oracle == f"{source.family.processor.name}ImageProcessorPil" and done.pixels < 1e-5
    assert done.detections == source.spec.decode.max_detections and "post-processing" in done.verdict


@pytest.mark.skipif(TORCHVISION, reason="torchvision is installed")
def test_a_processor_that_needs_torchvision(tiny, tmp_path):
    """RF-DETR's: its pixels are compared where torchvision is (below), and the report says so where it is not."""
    done = published.check_processing(load_source(str(save_folder(tiny("rf_detr"), tmp_path))))
    assert not done.oracle and done.verdict.endswith("which needs torchvision: install it to compare")


RF_DETR_FOLDERS: dict[str, tuple[dict, dict]] = {
    "as saved": ({}, {}),
    "another size": ({"size": {"height": 168, "width": 168}}, {}),
    "sharded": ({}, {"max_shard_size": "200KB"}),
    "fp16": ({}, {}),
    "family default": ({}, {}),
}


@pytest.mark.skipif(not TORCHVISION, reason="RF-DETR's processor needs torchvision: make test-torchvision")
@pytest.mark.parametrize("variant", RF_DETR_FOLDERS)
@pytest.mark.parametrize("name", ["rf_detr", "rf_detr-seg"])
def test_a_saved_folder_of_rf_detr(name, variant, tiny, tmp_path):
    """Its processor by torchvision: pixels, outputs and detections as in `check`; without its file, the authors' antialiased resize."""
    settings, saving = RF_DETR_FOLDERS[variant]
    folder = save_folder(tiny(name), tmp_path / "folder", settings, **saving)
    report = exported_variant(folder, variant)
    if variant == "family default":
        assert not report.processing.oracle and report.spec.input.antialias
        return
    assert report.processing.oracle == "RfDetrImageProcessor" and report.processing.pixels < 1e-5
    assert report.processing.detections
    check(report.path, report.spec, folder, IMAGES)


@pytest.mark.skipif(not TORCHVISION, reason="PP-DocLayout's processors need torchvision: make test-torchvision")
@pytest.mark.parametrize("version", [2, 3, 4])
def test_a_saved_folder_of_pp_doclayout(version, tiny, tmp_path):
    """Its own processor: pixels, boxes, reading order and quadrilaterals."""
    settings = {"size": {"height": 160, "width": 160}}
    source = load_source(str(save_folder(tiny(f"pp_doclayout_v{version}"), tmp_path, settings)))
    done = published.check_processing(source)
    assert done.oracle == f"PPDocLayoutV{version}ImageProcessor" and done.pixels < 1e-5 and done.detections > 10


@pytest.mark.skipif(not TORCHVISION, reason="RF-DETR's processor needs torchvision: make test-torchvision")
def test_wrong_pixels_of_rf_detr_are_found(tiny, tmp_path):
    from dataclasses import replace

    source = load_source(str(save_folder(tiny("rf_detr"), tmp_path)))
    wrong = replace(source, spec=source.spec.with_input(antialias=True))
    with pytest.raises(GateError, match="preprocessing differs from transformers' RfDetrImageProcessor: pixels of an image"):
        published.check_processing(wrong)


# What a wrong reader would make of a folder: each must be a failed check that names the difference.
WRONG = {
    "size": (
        {"shortest_edge": 96},
        "preprocessing differs from .*DetrImageProcessorPil: an image of 480x640 .* becomes 96x128 here",
    ),
    "filter": ({"resample": "bicubic"}, "preprocessing differs .*: pixels of an image of 480x640 by .*ours are from"),
    "mean": ({"mean": (0.5, 0.5, 0.5)}, "preprocessing differs .*: pixels of an image"),
    "rescale": ({"rescale": 1.0}, "preprocessing differs .*: pixels of an image"),
}


@pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG)
def test_wrong_preprocessing_fails_the_export(changes, words, tiny, tmp_path):
    from dataclasses import replace

    source = load_source(str(save_folder(tiny("detr"), tmp_path / "folder", EDGES)))
    wrong = replace(source, spec=source.spec.with_input(**changes))
    with pytest.raises(GateError, match=words):
        export_onnx(wrong, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"select": "topk", "max_detections": 5}, "5 detections here, 12 there"),
        ({"activation": "sigmoid", "num_classes": 8}, "scores by"),
    ],
)
def test_wrong_post_processing_fails_the_export(changes, words, tiny, tmp_path):
    from dataclasses import replace

    source = load_source(str(save_folder(tiny("detr"), tmp_path / "folder", EDGES)))
    wrong = replace(source, spec=source.spec.with_decode(**changes))
    with pytest.raises(GateError, match=f"post-processing differs from transformers' DetrImageProcessorPil: .*{words}"):
        export_onnx(wrong, tmp_path / "model.onnx")


def test_trained_shapes_saved_again(tmp_path):
    """The end result of transformers alone, from the folder to boxes, beside a Detector on the same folder."""
    source = load_source("embedded:shapes")
    folder = save_folder(source, tmp_path, {"size": {"max_height": 320, "max_width": 320}, "do_pad": True, "pad_size": 320})
    model, processor = opened(folder)
    images = [draw_scene(index, size_hw=size).image for index, size in enumerate(((240, 320), (360, 250)))]
    with Detector.open(str(folder), threshold=0.0) as detector:
        for image, ours in zip(images, detector(images), strict=True):
            with torch.no_grad():
                outputs = model(**processor(images=image, return_tensors="pt"))
            theirs = processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=torch.tensor([image.shape[:2]]))
            found = match(published._as_detections(theirs[0], image.shape[:2]), ours, SAME)
            assert found.compared >= 2 and (found.missing, found.extra) == (0, 0)
            assert found.box_px < 0.1 and found.score < 1e-4


def test_trained_phrases_saved_again(tmp_path):
    """Its processor of images and text writes processor_config.json alone."""
    source = load_source("embedded:phrases")
    source.module.save_pretrained(tmp_path)
    published.processor_with_text(source, image_processor(source)).save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    both = transformers.AutoProcessor.from_pretrained(tmp_path, backend="pil")
    model = transformers.AutoModelForZeroShotObjectDetection.from_pretrained(tmp_path).eval()
    scene, (caption,) = parity_set(1, 1)[0]
    with Detector.open(str(tmp_path), prompt=caption.prompt, threshold=0.0) as detector:
        (ours,) = detector([scene.image])
    inputs = both(images=scene.image, text=caption.prompt, return_tensors="pt")
    with torch.no_grad():
        outputs = model(**inputs)
    theirs = both.post_process_grounded_object_detection(
        outputs, inputs["input_ids"], threshold=0.3, text_threshold=0.3, target_sizes=[scene.image.shape[:2]]
    )[0]
    assert len(theirs["scores"]) >= 1
    for box, score in zip(theirs["boxes"].numpy(), theirs["scores"].numpy(), strict=True):
        height, width = scene.image.shape[:2]
        apart = np.abs(ours.boxes_xyxy - np.clip(box, 0, [width, height, width, height])).max(-1)
        assert apart.min() < 0.1 and abs(ours.scores[apart.argmin()] - score) < 1e-4


def test_omdet_turbo_ends_as_in_transformers(tiny, exported, tmp_path, monkeypatch):
    """Its own processor from names and pixels to boxes. The NMS is torchvision's there, which is not needed: see `batched_nms`."""
    # The package itself hands out a stand-in without torchvision.
    processing_omdet_turbo = importlib.import_module("transformers.models.omdet_turbo.processing_omdet_turbo")
    source = tiny("omdet_turbo")
    folder = save_folder(source, tmp_path, SQUARE)
    calls = []
    monkeypatch.setattr(
        processing_omdet_turbo,
        "batched_nms",
        lambda *a: calls.append((len(a[0]), batched_nms(*a))) or calls[-1][1],
        raising=False,
    )
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    words = published._tokenizer(source.tokenizer, source.spec.text)
    processor = processing_omdet_turbo.OmDetTurboProcessor(images, words)
    model = transformers.AutoModelForZeroShotObjectDetection.from_pretrained(folder, dtype=torch.float32).eval()
    names, loaded = ["red circle", "striped star", "cat"], load_source(str(folder))
    usual = inspect.signature(processor.post_process_grounded_object_detection).parameters["nms_threshold"].default
    assert loaded.spec.decode.nms_iou == usual
    spec = loaded.spec.with_decode(nms_iou=0.05)  # so that random boxes overlap
    graphed = Detector(exported("omdet_turbo").path, prompt=names, threshold=0.2, spec=spec)
    with Detector(open_torch(loaded, spec=spec), prompt=names, threshold=0.2) as plain, graphed:
        for image in IMAGES:
            inputs = processor(images=image, text=names, return_tensors="pt")
            with torch.no_grad():
                outputs = model(**inputs)
            (found,) = processor.post_process_grounded_object_detection(
                outputs, [names], threshold=0.2, nms_threshold=0.05, target_sizes=[image.shape[:2]]
            )
            theirs = published._as_detections(found, image.shape[:2])
            for detector in (plain, graphed):
                same = match(theirs, detector(image), Gate(threshold=0.2, at_least=5, box_px=0.1, score=1e-4))
                assert same.compared == len(theirs) >= 5 and (same.missing, same.extra) == (0, 0)
                assert same.box_px < 0.1 and same.score < 1e-4
    assert any(before > len(after) for before, after in calls), "NMS had nothing to do"
