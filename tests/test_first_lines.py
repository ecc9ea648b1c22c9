"""First lines that users of ultralytics, rf-detr, supervision, transformers and inference type: each works, or gets the line to type."""

from __future__ import annotations

import functools
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from runtime_cases import make_session, make_spec, red
from web_support import web

import detrt
from detrt.data import given
from detrt.data.result import ImageDetections
from detrt.detector import Detector
from detrt.errors import ImageError

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
IMAGE = red(16, 24, 200)
WORKS = True

# (line, WORKS or what the answer says to type). `d` is a detector, `r` the detections of an image, `many` those of two.
LINES = [
    # how a model is opened
    ("from detrt import YOLO", r"Detector\('bundle'\)"),
    ("from detrt import RTDETR", r"Detector\('bundle'\)"),
    ("from detrt import RFDETRBase", r"Detector\('bundle'\)"),
    ("from detrt import AutoModelForObjectDetection", r"Detector\('bundle'\)"),
    ("from detrt import get_model", r"Detector\('bundle'\)"),
    ("detrt.InferencePipeline", r"detector.stream\('rtsp"),
    ("detrt.ByteTrack", "track=True"),
    ("Detector(session, conf=0.4)", "threshold"),
    ("Detector(session, imgsz=640)", "size"),
    ("Detector(session, batch=4)", "batch_size"),
    ("Detector(session, confidence=0.4)", "threshold"),
    ("Detector(session, providers=['CUDAExecutionProvider'])", "device"),
    ("Detector(session, half=True)", r"build\(checkpoint, 'bundle', precision='fp16'\)"),
    ("Detector(session, precision='fp16')", r"precision='fp16'\)"),
    ("Detector(session, names={0: 'cat'})", "labels"),
    ("detrt.load('bundle')", r"Detector\('bundle'\)"),
    ("detrt.predict('street.png')", r"detector\('street.jpg'\)"),
    ("Detector('PekingU/rtdetr_v2_r18vd')", "hf:PekingU/rtdetr_v2_r18vd"),
    ("Detector('yolo11n.pt')", "no bundle|there is no|ckpt:"),
    # what goes in
    ("d('street.png')", WORKS),
    ("d(Path('street.png'))", WORKS),
    ("d(open('street.png', 'rb'))", WORKS),
    ("d(io.BytesIO(open('street.png', 'rb').read()))", WORKS),
    ("d(open('street.png', 'rb').read())", WORKS),
    ("d(Image.open('street.png'))", WORKS),
    ("d(image)", WORKS),
    ("d(image[..., ::-1])", WORKS),
    ("d(url)", WORKS),
    ("d(torch.from_numpy(image))", WORKS),
    ("d(torch.from_numpy(image).permute(2, 0, 1))", WORKS),
    ("d(torch.from_numpy(image).permute(2, 0, 1).float() / 255)", WORKS),
    ("d(torch.from_numpy(image).permute(2, 0, 1)[None])[0]", WORKS),
    ("d(np.stack([image, image]))[1]", WORKS),
    ("d(['street.png', image, Path('street.png')])[2]", WORKS),
    ("d([open('street.png', 'rb'), url])[1]", WORKS),
    ("d(i for i in [image])[0]", WORKS),
    ("d((torch.from_numpy(image).permute(2, 0, 1).float() / 255 - 0.5) / 0.2)", "before any normalisation"),
    ("d(image.astype('float32') / 255)", "uint8"),
    ("d('photos')", r"detector.stream\('photos'\)"),
    ("d('drive.mp4')", r"detector.stream\('drive.mp4'\)"),
    ("d('rtsp://cam/live')", r"detector.stream\('rtsp"),
    ("d(0)", "a path"),
    ("d.predict('street.png')", r"detector\(images\)"),
    ("d.infer('street.png')", r"detector\(images\)"),
    # options of a call
    ("d(image, threshold=0.3)", WORKS),
    ("d(image, classes=['cat'])", WORKS),
    ("d(image, classes=[0, 1])", WORKS),
    ("d(image, class_thresholds={'cat': 0.1})", WORKS),
    ("d(image, max_detections=1)", WORKS),
    ("d(image, conf=0.3)", "threshold"),
    ("d(image, 0.3)", "threshold=0.3"),
    ("d(image, class_thresholds='best.json')", WORKS),
    ("d(image, class_thresholds=[0.1])", r"\{'person': 0.6\}"),
    ("d(image, slice_wh=640)", "tile="),
    ("d(image, retina_masks=True)", "size of the image"),
    ("d({'image': np.zeros((90, 90, 3))})", r"\.\.\. \(dict\)"),
    ("d(image, confidence=0.3)", "threshold"),
    ("d(image, iou=0.5)", "no NMS"),
    ("d(image, imgsz=640)", r"Detector\(model, size"),
    ("d(image, device=0)", r"Detector\(model, device"),
    ("d(image, max_det=3)", "max_detections"),
    ("d(image, candidate_labels=['cat'])", "prompt="),
    ("d(image, save=True)", r"found.save\("),
    ("d(image, verbose=False)", "prints nothing"),
    ("d(image, stream=True)", r"detector.stream\("),
    ("d(image, augment=True)", "no test-time augmentation"),
    ("d(image, prompt='a cat.')", "fixed classes"),
    # many images
    ("next(d.stream('photos'))", WORKS),
    ("next(d.stream('photos/*.png'))", WORKS),
    ("next(d.stream(Path('photos'), skip_bad=True))", WORKS),
    ("next(d.stream(['street.png'], every=2))", WORKS),
    ("next(d.stream(url))", WORKS),
    ("next(d.stream(i for i in [image]))", WORKS),
    ("d.track('drive.mp4')", r"stream\(source, track=True\)"),
    ("d(image, persist=True)", r"stream\(source, track=True\)"),
    ("d(image, vid_stride=2)", "every"),
    # what comes out
    ("r.boxes.xyxy", "boxes_xyxy"),
    ("r.xyxy", "boxes_xyxy"),
    ("r.boxes_xyxy", WORKS),
    ("r.confidence", "scores"),
    ("r.class_id", "class_ids"),
    ("r.tracker_id", "track_ids"),
    ("r.xywh", r"to_coco\(\)"),
    ("r.to_csv('x.csv')", r"to_dataframe\(\)"),
    ("r.filter(0.5)", r"found\[found.scores > 0.5\]"),
    ("r[0].confidence", "score"),
    ("r[0].xyxy", "box"),
    ("r[0].class_name", "label"),
    ("r.labels", WORKS),
    ("r[0].box", WORKS),
    ("r[0].score, r[0].label, r[0].mask", WORKS),
    ("[(x.box, x.score, x.label) for x in r]", WORKS),
    ("r[r.scores > 0.5]", WORKS),
    ("r[:1]", WORKS),
    ("r[r.labels == 'cat']", "label == 'person' for label in"),
    ("len(r)", WORKS),
    ("r.plot()", WORKS),
    ("r.save('out.jpg')", WORKS),
    ("r.crop()[0]", WORKS),
    ("r.show()", r"plot\(\).show\(\)"),
    ("r.to_supervision()", WORKS),
    ("sv.BoxAnnotator().annotate(image.copy(), r.to_supervision())", WORKS),
    ("r.to_dataframe()", WORKS),
    ("r.to_df()", "to_dataframe"),
    ("r.to_coco()", WORKS),
    ("r.to_yolo()", WORKS),
    ("r.save_txt('x.txt')", "to_yolo"),
    ("r.tojson()", "to_list"),
    ("r.to_list()", WORKS),
    ("r.path, r.image_size_hw", WORKS),
    ("r.orig_img", "image"),
    ("r.cpu()", "NumPy"),
    ("r.with_nms(0.5)", "no NMS"),
    ("d.names[0]", WORKS),
    ("d.class_names", "detector.names"),
    ("d.device", "detector.session"),
    ("d.set_classes(['cat'])", r"classes=\["),
    ("detrt.build('x', 'y', format='engine')", "targets"),
    ("detrt.build('x', 'y', half=True)", "precision"),
    ("detrt.build('x', 'y', imgsz=640)", r"export=ExportConfig\(height=\.\.\.\)"),
    ("detrt.build('x', 'y', opset=17)", r"export=ExportConfig\(opset=\.\.\.\)"),
    ("detrt.build('x', 'y', calibration='photos')", r"precision=PrecisionConfig\(calibration=\.\.\.\)"),
    ("detrt.build('x', 'y', precision='fp17')", "fp16"),
    ("detrt.build('x', 'y', precision=16)", r"PrecisionConfig\(\)"),
    ("d.val(data='coco.yaml')", "detrt eval"),
    ("d.export(format='engine')", "build"),
    ("d.train(data='coco.yaml')", "trains nothing"),
    ("d.to('cuda')", "device="),
    ("d.optimize_for_inference()", "build"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    Image.fromarray(IMAGE).save(folder / "street.png")
    (folder / "best.json").write_text('{"cat": 0.1}')
    (folder / "photos").mkdir()
    for name in "ab":
        Image.fromarray(IMAGE).save(folder / "photos" / f"{name}.png")
    with web(folder) as address:
        yield folder, address


def test_there_are_sixty():
    assert len(LINES) >= 60 and len({line for line, _ in LINES}) == len(LINES)


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line for line, _ in LINES])
def test_a_first_line(line, expected, place, monkeypatch):
    folder, address = place
    monkeypatch.chdir(folder)
    if "to_dataframe" in line and expected is WORKS:
        pytest.importorskip("pandas", reason="needs the 'pandas' extra")
    scope = {
        "detrt": detrt,
        "Detector": Detector,
        "session": make_session(make_spec()),
        "image": IMAGE,
        "url": f"{address}/street.png",
    }
    scope |= {
        "torch": torch,
        "np": np,
        "io": io,
        "Path": Path,
        "Image": Image,
        "d": Detector(make_session(make_spec()), threshold=0.2),
    }
    if "supervision" in line:
        scope["sv"] = pytest.importorskip("supervision", reason="needs the 'supervision' extra")
    scope["r"] = scope["d"]("street.png")
    if expected is not WORKS:
        with pytest.raises((detrt.DetrtError, TypeError, AttributeError, ImportError), match=expected):
            exec(line, scope)
        return
    value = eval(line, scope)
    if line.startswith(("d(", "next(")):  # the same object wherever the image came from, but where the red channel was exchanged
        assert isinstance(value, ImageDetections) and len(value) == ("::-1" not in line)
        assert not len(value) or value == scope["r"]


def test_a_picture_of_what_was_found(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place[0])
    detector = Detector(make_session(make_spec()), color="bgr")
    blue = np.ascontiguousarray(IMAGE[..., ::-1])
    for source in ("street.png", blue, torch.from_numpy(IMAGE)):
        found = detector(source)
        found.save(tmp_path / "out.png")
        assert np.array_equal(np.asarray(Image.open(tmp_path / "out.png")), np.asarray(found.plot()))
        (crop,) = found.crop()
        assert np.array_equal(crop, IMAGE[4:12, 6:18])  # the fake model's box is the middle half
    assert detector("street.png").path == "street.png" and found.path == ""


def test_names_frames_and_tracks(tmp_path):
    pytest.importorskip("av", reason="needs the 'video' extra")
    pytest.importorskip("trackers", reason="needs the 'track' extra")
    from detrt.data.video import video_writer

    with video_writer(tmp_path / "v.mp4", fps=10, size=(32, 48)) as write:
        for _ in range(6):
            write(red(32, 48, 200))
    detector = Detector(make_session(make_spec()), threshold=0.2, batch_size=2)
    found = list(detector.stream(tmp_path / "v.mp4", every=2, track=True))
    assert [one.frame for one in found] == [0, 2, 4] and [one.time_s for one in found] == pytest.approx([0, 0.2, 0.4])
    assert {one.path for one in found} == {str(tmp_path / "v.mp4")} and found[-1][0].track_id is not None
    frames = list(detector.stream([red(32, 48, 200)] * 4, track=True))
    assert frames[-1][0].track_id is not None and frames[-1].frame is None
    Image.fromarray(IMAGE).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"x")
    assert [Path(one.path).name for one in detector.stream(tmp_path, skip_bad=True) if not isinstance(one, ImageError)][::6] == [
        "a.png",
        "v.mp4",
    ]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/none.png", "cannot be fetched: .*[Nn]ot found"),
        ("/endless", "larger than 300000 bytes"),
        ("/slow", "within 0.3 s"),
        ("/elsewhere", "not allowed|http or https"),
        ("/", "not an image"),
    ],
)
def test_what_an_address_may_not_do(place, path, why, monkeypatch):
    monkeypatch.setattr(given, "fetch", functools.partial(given.fetch, max_bytes=300_000, timeout_s=0.3))
    detector = Detector(make_session(make_spec()))
    with pytest.raises(ImageError, match=why):
        detector(place[1] + path)
    bad, good = detector([place[1] + path, IMAGE], skip_bad=True)
    assert isinstance(bad, ImageError) and len(good) == 1


def test_an_address_is_no_file_of_others(place):
    """What is read from files and requests goes through `load_image`, which fetches nothing."""
    from detrt.data.images import load_image

    with pytest.raises(ImageError, match="is an address"):
        load_image(f"{place[1]}/street.png")


MIGRATING = Path(__file__).parents[1] / "docs/guide/migrating.md"


def lines_of_migrating() -> list[str]:
    """The lines of detrt in the table of Python, of every row."""
    section = MIGRATING.read_text("utf-8").split("\n## Python: ")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [re.search(r"\| `([^`]+)` \|[^|]*\|$", row)[1] for row in rows]


def test_lines_of_migrating(exported, place, tmp_path, monkeypatch):
    """Every line of the page, in its order, with the graph of the embedded model for the bundle, which takes longer to build."""
    for package, extra in (
        ("pycocotools", "eval"),
        ("yaml", "eval"),
        ("pandas", "pandas"),
        ("supervision", "supervision"),
        ("trackers", "track"),
        ("av", "video"),
    ):
        pytest.importorskip(package, reason=f"needs the '{extra}' extra")
    from detrt.data.scenes.scene import CLASSES, draw_scene
    from detrt.data.video import video_writer
    from detrt.evaluation.coco import evaluate_coco
    from detrt.evaluation.curves import confusion_of

    graph = repr(str(exported("embedded:shapes").path))
    monkeypatch.chdir(tmp_path)
    scene = draw_scene(3, size_hw=(320, 320))
    for name in ("photos/a.jpg", "street.jpg"):
        Path(name).parent.mkdir(exist_ok=True)
        Image.fromarray(scene.image).save(name)
    with video_writer(Path("drive.mp4"), fps=10, size=(320, 320)) as write:
        for _ in range(4):
            write(scene.image)
    labels = [(one.class_id, *one.box_xyxy) for one in scene.objects]
    Path("photos/a.txt").write_text(
        "".join(f"{k} {(a + c) / 640} {(b + d) / 640} {(c - a) / 320} {(d - b) / 320}\n" for k, a, b, c, d in labels)
    )
    Path("data.yaml").write_text(f"val: photos\nnames: [{', '.join(CLASSES)}]\n")
    scope = {
        "Detector": Detector,
        "image": scene.image,
        "url": f"{place[1]}/street.png",
        "evaluate_coco": evaluate_coco,
        "confusion_of": confusion_of,
    }
    made = []
    scope["build"] = lambda *given: made.append(given)  # tests of build run it
    lines = lines_of_migrating()
    assert len(lines) >= 25
    for line in (line.replace('"bundle"', graph) for line in lines):
        if "found.track_ids" not in line and line.startswith("found.boxes_xyxy"):
            scope["found"] = scope["model"](scene.image)
        if line.startswith("confusion_of"):
            scope["report"] = evaluate_coco(scope["model"].session, "data.yaml")
        try:
            exec(f"value = {line}" if " = " not in line else line, scope)
        except Exception as error:
            raise AssertionError(f"{line}: {error!r}") from error
        if line.startswith("found = "):
            assert isinstance(scope["found"], ImageDetections)
    assert made and Path("out.jpg").is_file() and 0 < scope["report"].metrics["AP"] <= 1
