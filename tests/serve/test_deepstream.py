"""What `detrt deepstream` writes, run as NVIDIA's manual says that nvinfer runs it (tests/support/nvinfer.py), against `detect`."""

from __future__ import annotations

import configparser
from dataclasses import replace

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
pytest.importorskip("cv2", reason="OpenCV, which stands for nvinfer's scaling, is not installed")
from cli_support import cli, place  # noqa: F401 - fixtures
from nvinfer import NvInfer
from onnx_models import make_model, make_spec
from text_models import write_text_bundle

from detrt.data.images import load_image
from detrt.data.scenes.scene import draw_scene
from detrt.detector import Detector
from detrt.errors import SpecError
from detrt.graph import io
from detrt.graph.lower_msda import sampled_sums
from detrt.graph.view import GraphView
from detrt.precision import PrecisionConfig
from detrt.precision.apply import apply_precision
from detrt.serve.deepstream import CONFIG, MODEL, DeepStreamConfig, write_deepstream


def distances(detector, nvinfer, images, most=20):
    """Largest difference of a corner, in pixels, between each box of `detect` and the nearest one of nvinfer with its label."""
    found = []
    for image in images:
        theirs = nvinfer(image)
        ours = detector(image)
        for box, label in zip(ours.boxes_xyxy[:most], ours.labels, strict=False):
            same = [np.abs(np.array(other) - box).max() for name, _, other in theirs if name == label]
            found.append(min(same, default=np.inf))
    return np.array(found)


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("rt_detr_v2", {}, None),  # pairs of query and class, sigmoid
        ("detr", {}, (96, 128)),  # softmax and the best class of a query, with a mask
        ("yolos", {}, (96, 128)),  # no mask
        ("rf_detr-seg", {}, None),  # with masks, whose queries follow the pairs
    ],
)
def test_frames_of_the_size_of_the_network(exported, tmp_path, name, options, size):
    """Where nothing is resized, the numbers are those of detrt."""
    path = exported(name, **options).path
    with Detector(path, threshold=0.0, size=size) as detector:
        height, width = size or detector.spec.input.size_hw
        app = write_deepstream(path, tmp_path / "app", DeepStreamConfig((height, width), size, threshold=0.0))
        assert any(note.startswith("masks are ") for note in app.notes) is detector.spec.has_masks
        graph = onnx.load(tmp_path / "app" / MODEL).graph
        read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
        assert all(read.intersection(node.output) for node in graph.node), "nodes that nothing reads"
        nvinfer = NvInfer(tmp_path / "app" / CONFIG)
        assert tuple(nvinfer.input.shape[2:]) == (height, width) and nvinfer.labels[1] == detector.spec.label(1)
        image = draw_scene(3, size_hw=(height, width)).image
        ours, theirs = detector(image), nvinfer(image)
    big = (np.ptp(ours.boxes_xyxy.reshape(-1, 2, 2), axis=1) >= 1).all(1)  # the parser drops boxes below a pixel
    ours = ours[big]
    assert len(ours) > 5 and len(theirs) == len(ours)
    np.testing.assert_allclose([score for _, score, _ in theirs], ours.scores, atol=1e-5)
    steps = np.abs(np.diff(ours.scores)) > 1e-5
    alone = np.append(steps, True) & np.append(True, steps)  # equal scores may change their order
    assert alone.sum() > 5
    np.testing.assert_allclose(np.array([box for _, _, box in theirs])[alone], ours.boxes_xyxy[alone], atol=1e-2)
    assert [label for (label, _, _), one in zip(theirs, alone, strict=True) if one] == [
        label for label, one in zip(ours.labels, alone, strict=True) if one
    ]


def mask_iou(nvinfer, box, values, mask):
    """Of a mask of nvinfer with one of `detect`, of which the part inside the box counts: nvinfer knows no other."""
    theirs, inside = nvinfer.drawn(box, values, mask.shape), nvinfer.drawn(box, np.ones_like(values), mask.shape)
    return (theirs & mask).sum() / max((theirs | (mask & inside)).sum(), 1)


@pytest.mark.parametrize(
    "options", [["--frame", "240x320"], ["--frame", "240x320", "--resize", "nvinfer"]], ids=["graph", "nvinfer"]
)
def test_masks_of_drawn_scenes(cli, exported, tmp_path, options):
    """A trained model: nvinfer's masks are those of `detect` inside their boxes."""
    path = exported("embedded:shapes").path
    done = cli("deepstream", path, "-o", tmp_path / "app", "-t", 0.5, *options, "--json", "-").json
    assert done["notes"][0].startswith("masks are 60x80" if len(options) == 2 else "masks are 80x80")
    nvinfer, found = NvInfer(tmp_path / "app" / CONFIG), []
    with Detector(path, threshold=0.5) as detector:
        for seed in range(4):
            image = draw_scene(seed, size_hw=(240, 320)).image
            ours = detector(image)
            masks = ours.masks.to_array()
            for label, _, box, values in nvinfer.objects(image):
                assert values.min() >= 0 and values.max() <= 1, "probabilities"
                near = [i for i in range(len(ours)) if ours.labels[i] == label and np.abs(ours.boxes_xyxy[i] - box).max() < 2]
                if not near:
                    continue
                found.append(mask_iou(nvinfer, box, values, masks[near[0]]))
    assert len(found) > 10 and np.median(found) > 0.98 and min(found) > 0.95, (len(found), np.median(found), min(found))


def test_masks_of_a_letterboxed_frame(cli, tmp_path):
    """The map covers the padding, too, and a box only the frame; boxes of the whole frame, of halves and of a corner."""
    spec, frame = make_spec(masks=True, resize="fit", mask=True, height=64, width=96), (128, 96)
    model = onnx.load_from_string(make_model(spec))
    (maps,) = (one for one in model.graph.initializer if one.name == "maps")
    row, column = np.mgrid[:32, :48] / 8
    smooth = [np.sin(row + number) + np.cos(column * (number + 1) / 2) - 0.3 for number in range(4)]
    maps.CopyFrom(onnx.numpy_helper.from_array(np.array(smooth, np.float32)[None], "maps"))
    onnx.save(model, tmp_path / "model.onnx")
    image = np.full((*frame, 3), (200, 100, 0), np.uint8)
    with Detector(tmp_path / "model.onnx", threshold=0.0) as detector:
        ours = detector(image)
    masks = ours.masks.to_array()
    for options in ([], ["--resize", "nvinfer"]):
        cli("deepstream", tmp_path / "model.onnx", "-o", tmp_path / "app", "--frame", "128x96", "-t", 0, *options)
        nvinfer = NvInfer(tmp_path / "app" / CONFIG)
        assert nvinfer.keys.getint("maintain-aspect-ratio") == bool(options)
        theirs = nvinfer.objects(image)
        assert len(theirs) == len(ours) == 12
        for i, (label, score, box, values) in enumerate(theirs):
            assert label == ours.labels[i] and score == pytest.approx(ours.scores[i], abs=1e-5)
            np.testing.assert_allclose(box, ours.boxes_xyxy[i], atol=1e-3)
            assert 0 < masks[i].sum() < masks[i].size and mask_iou(nvinfer, box, values, masks[i]) > 0.97


def test_masks_that_are_left_out_or_have_no_room(cli, tmp_path):
    spec = make_spec(masks=True)
    (tmp_path / "model.onnx").write_bytes(make_model(spec))
    cli.refused(
        "deepstream", tmp_path / "model.onnx", "-o", tmp_path / "app", "--frame", "2x8", names="at least 4x4", advice="--no-masks"
    )
    done = cli("deepstream", tmp_path / "model.onnx", "-o", tmp_path / "app", "--frame", "2x8", "--no-masks", "--json", "-").json
    assert done["notes"] == ["masks are left out"]
    assert not NvInfer(tmp_path / "app" / CONFIG).masks


def photographs(real_data):
    paths = sorted((real_data / "images/coco_permissive/val2017").glob("*.jpg"))
    assert len(paths) >= 22
    images = [load_image(path) for path in paths[:22]]
    return [image[: image.shape[0] // 2 * 2, : image.shape[1] // 2 * 2] for image in images]  # frames of video have even sides


@pytest.mark.slow
def test_a_stretching_family_on_photographs(cli, real_data, tmp_path):
    """DEIMv2-Atto as its authors export it, with its published weights; the graph resizes, then nvinfer does."""
    authors = real_data / "weights/deimv2/deimv2_hgnetv2_atto_coco.onnx"
    if not authors.is_file():
        pytest.skip("the authors' ONNX files are not there")
    path, images = tmp_path / "atto.onnx", photographs(real_data)[:6]
    cli("export", authors, "-o", path, "--preprocess", "family-default")
    exact, plain = [], []
    with Detector(path, threshold=0.4) as detector:
        for image in images:
            config = DeepStreamConfig(image.shape[:2], threshold=0.35)
            write_deepstream(path, tmp_path / "app", config)
            exact += [*distances(detector, NvInfer(tmp_path / "app" / CONFIG), [image])]
        write_deepstream(path, tmp_path / "app", DeepStreamConfig(threshold=0.2, resize="nvinfer"))
        plain = distances(detector, NvInfer(tmp_path / "app" / CONFIG), images)
    assert len(exact) > 15 and np.median(exact) < 0.1 and np.mean(np.array(exact) > 2) < 0.05
    assert np.median(plain) < 4, "nvinfer's scaling does not filter, which costs a small network some pixels"


def test_a_letterboxing_family_on_photographs(exported, real_data, tmp_path):
    """DETR in one size: the aspect ratio is kept, the rest is padding; a graph for each size of a photograph."""
    path, found, apps = exported("detr").path, [], {}
    with Detector(path, threshold=0.0, size=(320, 320)) as detector:
        for image in photographs(real_data):
            frame = image.shape[:2]
            if frame not in apps:
                folder = tmp_path / "x".join(map(str, frame))
                done = write_deepstream(path, folder, DeepStreamConfig(frame, (320, 320), threshold=0.0))
                assert done.box.padded == (frame[0] != frame[1]) and done.box.network_hw == frame
                apps[frame] = NvInfer(folder / CONFIG)
            found += [*distances(detector, apps[frame], [image])]
    assert len(apps) > 5 and len(found) > 200 and np.median(found) < 0.1


def test_letterboxes_of_nvinfer(tmp_path):
    """Where nvinfer pads, boxes are in the part that the frame covers; what it cannot do is refused."""
    spec = make_spec(resize="fit", mask=True)
    (tmp_path / "model.onnx").write_bytes(make_model(spec))
    for frame, content in (((16, 12), (8, 6)), ((6, 24), (3, 12)), ((8, 12), (8, 12))):
        done = write_deepstream(
            tmp_path / "model.onnx", tmp_path / "app", DeepStreamConfig(frame, threshold=0.0, resize="nvinfer")
        )
        assert done.box.content_hw == content
        nvinfer = NvInfer(tmp_path / "app" / CONFIG)
        assert nvinfer.keys.getint("maintain-aspect-ratio") == (content != (8, 12))
        widest = np.array([box for _, _, box in nvinfer(np.full((*frame, 3), 200, np.uint8))]).max(0)
        assert widest[2:].tolist() == [frame[1], frame[0]], "boxes end where the frame ends"


def test_decoding_and_normalisation(tmp_path):
    """A graph whose caller normalises: nvinfer does not, so the written one does; padding stays zero behind it."""
    spec = make_spec(
        resize="fit",
        mask=True,
        dtype="float32",
        normalize_in_graph=False,
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.3, 0.4),
        rescale=1 / 255,
    )
    (tmp_path / "model.onnx").write_bytes(make_model(spec))
    write_deepstream(tmp_path / "model.onnx", tmp_path / "app", DeepStreamConfig((16, 12), threshold=0.0, resize="nvinfer"))
    image = np.full((16, 12, 3), (10, 20, 250), np.uint8)
    with Detector(tmp_path / "model.onnx", threshold=0.0) as detector:
        ours = detector(image)
    theirs = NvInfer(tmp_path / "app" / CONFIG)(image)
    np.testing.assert_allclose(sorted(score for _, score, _ in theirs), sorted(ours.scores), atol=1e-5)
    np.testing.assert_allclose(sorted(box for _, _, box in theirs), sorted(map(tuple, ours.boxes_xyxy)), atol=1e-3)


def test_the_files(cli, place):
    result = cli("deepstream", "bundle", "-o", "app", "-t", 0.4, "--class-thresholds", "blue=0.7", "--batch", 4, "--json", "-")
    assert result.json["files"] == ["model.onnx", "labels.txt", "deepstream_app_config.txt", "config_infer_primary.txt"]
    assert (place / "app/labels.txt").read_text() == "red\ngreen\nblue\n"
    keys, app = configparser.ConfigParser(), configparser.ConfigParser()
    keys.read(place / "app/config_infer_primary.txt")
    app.read(place / "app/deepstream_app_config.txt")
    assert keys["property"]["batch-size"] == app["streammux"]["batch-size"] == "4"
    frame = onnx.load(place / "app/model.onnx").graph.input[0].type.tensor_type.shape.dim[2:]
    mux = [int(app["streammux"][side]) for side in ("height", "width")]
    assert [side.dim_value for side in frame] == mux == [1080, 1920], "the graph takes the frames of the written application"
    assert app["primary-gie"]["config-file"] == "config_infer_primary.txt"
    assert keys["class-attrs-all"]["pre-cluster-threshold"] == "0.4" and keys["class-attrs-2"]["pre-cluster-threshold"] == "0.7"
    labels = [
        label for label, _, _ in NvInfer(place / "app/config_infer_primary.txt")(np.full((1080, 1920, 3), (0, 0, 255), np.uint8))
    ]
    assert labels == ["blue", "blue"], "0.92 and 0.82, and not 0.62"


@pytest.mark.parametrize(
    ("spec", "options", "names", "advice"),
    [
        ({"resize": "fit"}, [], "keeps the aspect ratio", "--frame HEIGHTxWIDTH"),
        ({"resample": "hamming"}, ["--resize", "nvinfer"], "'hamming'", "--resize graph"),
        ({}, ["--frame", "9x8"], "even numbers", "--frame"),
        ({}, ["--resize", "none"], "'none'", "graph or nvinfer"),
        ({}, ["--frame", "1x1"], "1x1", "from 2x2"),
        ({}, ["--batch", "0"], "got 0", "at least 1"),
        ({}, ["--size", "9x9"], "9x9", "leave --size out"),
        ({}, ["--class-thresholds", "bleu=0.5"], "'bleu'", "did you mean blue"),
        (
            {"resize": "max_size", "max_height": 4, "max_width": 4, "pad": True, "mask": True},
            ["--frame", "8x8", "--resize", "nvinfer"],
            "pads to 8x12",
            "--resize graph",
        ),
    ],
)
def test_refused(cli, tmp_path, monkeypatch, spec, options, names, advice):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").write_bytes(make_model(make_spec(**spec)))
    cli.refused("deepstream", "model.onnx", "-o", "app", *options, names=names, advice=advice)
    assert not (tmp_path / "app").exists()


def test_models_that_nvinfer_cannot_run(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = make_spec()
    (tmp_path / "soft.onnx").write_bytes(make_model(replace(spec, decode=replace(spec.decode, nms="soft_nms"))))
    write_text_bundle(tmp_path / "prompted")
    cli.refused("deepstream", "soft.onnx", "-o", "app", names="soft-NMS", advice="cannot run in DeepStream")
    cli.refused("deepstream", "prompted", "-o", "app", names="takes a prompt", advice="fixed classes")
    cli.refused("deepstream", "nothing", "-o", "app", names="'nothing'", advice="check the path")
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "fp8"])
def test_types_that_nvinfer_cannot_build_are_refused(precision, exported, tmp_path):
    report = exported("rt_detr_v2")
    config = PrecisionConfig(precision, calibration="x", min_fraction=0.0, quantize_fraction=1.0)
    height, width = report.spec.input.size_hw
    images = [draw_scene(seed, size_hw=(height, width)).image for seed in (1, 2)]
    typed, _ = apply_precision(io.load(report.path), report.spec, config, images)
    path = tmp_path / "typed.onnx"
    io.save(io.with_spec(typed, report.spec), path)
    if precision != "fp16":
        with pytest.raises(SpecError, match=precision):
            write_deepstream(path, tmp_path / "app", DeepStreamConfig((height, width)))
        assert not (tmp_path / "app").exists()
        return
    app = write_deepstream(path, tmp_path / "app", DeepStreamConfig((height, width), batch=2))
    read = configparser.ConfigParser()
    read.read(app.folder / CONFIG)
    assert read["property"]["network-mode"] == "2" and read["property"]["model-engine-file"] == "model_b2_gpu0_fp16.engine"
    assert any("model_b2_gpu0_fp16.engine" in note and "--stronglyTyped" in note for note in app.notes)


def test_the_graph_sums_samples_as_tensorrt_fuses_them(exported, tmp_path):
    report = exported("deformable_detr")
    write_deepstream(report.path, tmp_path / "app", DeepStreamConfig((96, 128), (96, 128)))
    sampled = [sampled_sums(GraphView(onnx.load(path)))[0] for path in (report.path, tmp_path / "app" / MODEL)]
    assert sampled[0] and not sampled[1]
    assert "CumSum" not in {node.op_type for node in onnx.load(tmp_path / "app" / MODEL).graph.node}
