"""Wrong types of Python arguments: one clear error, and nothing that is accepted silently."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from runtime_cases import make_session, make_spec

from detrt.data.arguments import check_device, pixel_size
from detrt.detector import Detector
from detrt.errors import ArgumentError, DetrtError, ImageError

IMAGE = np.zeros((16, 24, 3), np.uint8)
OPTIONS = [
    *({name: value} for name in ("batch_size", "max_detections") for value in ("4", 2.5, True, 0, -1, [1], b"1", np.float32(2))),
    *({"resize_threads": value} for value in ("2", 1.5, True, 0)),
    *({"threads": value} for value in ("2", 2.5, True, 0, -4)),
    *({"streams": value} for value in ("2", 1.5, 0)),
    *({"threshold": value} for value in ("0.5", True, None, float("nan"), 1.5, -0.1)),
    *({"text_threshold": value} for value in ("0.5", True, 2)),
    *({"device": value} for value in (-1, True, 1.0, b"cpu", ["cpu"], {})),
    *({"size": value} for value in ((1,), (1, 2, 3), {}, "x", "12x", (0, 5), ("8", "8"), (1.5, 2), True, b"8")),
    *({"classes": value} for value in ("cat", 0, b"cat", [None], [1.5], [True], [])),
    *({"class_thresholds": {0: value}} for value in ("0.5", True, None, 2)),
    *({"image_decoder": value} for value in ("GPU", None, 1)),
    *({"color": value} for value in ("BGR", None, 1)),
]


def test_there_are_sixty():
    assert len(OPTIONS) >= 60


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_wrong_option_is_refused_by_name(options):
    (name,) = options
    with pytest.raises((DetrtError, ValueError)) as refused:
        Detector(make_session(make_spec()), **options)
    assert name.removesuffix("s")[:5] in str(refused.value), refused.value


@pytest.mark.parametrize("model", [None, 1, b"bundle", ["bundle"], {}, 1.5], ids=repr)
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ArgumentError, match=r"model.*NoneType|model.*got"):
        Detector(model)


@pytest.mark.parametrize(
    "images", [None, 1, 1.5, {"image": "x.png"}, object(), io.StringIO("text")], ids=lambda value: type(value).__name__
)
def test_what_is_no_image_is_refused(images):
    with pytest.raises(ArgumentError, match="image"):
        Detector(make_session(make_spec()))(images)


@pytest.mark.parametrize("images", [b"bytes", IMAGE, io.BytesIO(b""), None, {"a": "b"}], ids=lambda value: type(value).__name__)
def test_a_stream_is_of_several_images(images):
    with pytest.raises(ArgumentError, match="image"):
        list(Detector(make_session(make_spec())).stream(images))


@pytest.mark.parametrize("name", ["v.mp4", Path("photos"), "cams/*.jpg", 63], ids=str)
def test_a_stream_of_what_is_not_there(name):
    with pytest.raises(ImageError, match="there is no (file|camera)|has no images"):
        list(Detector(make_session(make_spec())).stream(name))


def test_devices_of_torch_are_taken():
    torch = pytest.importorskip("torch", reason="needs the 'export' extra")
    assert check_device(torch.device("cuda:1")) == "cuda:1" and check_device(torch.device("cpu")) == "cpu"


def test_what_users_write_is_taken(tmp_path):
    Image.fromarray(IMAGE).save(tmp_path / "x.png")
    detector = Detector(make_session(make_spec()), batch_size=np.int64(2), max_detections=np.int32(3), threshold=np.float32(0.25))
    whole = detector(tmp_path / "x.png")
    with open(tmp_path / "x.png", "rb") as file:
        assert detector(file) == whole
    assert detector(io.BytesIO((tmp_path / "x.png").read_bytes())) == whole
    assert detector([str(tmp_path / "x.png")]) == [whole]
    assert check_device(0) == "cuda:0" and check_device("cpu") == "cpu" and check_device(None) is None
    assert pixel_size(640, "size") == (640, 640) and pixel_size("480x640", "size") == (480, 640)
    assert pixel_size(np.array([8, 12]), "size") == pixel_size([8, 12], "size") == (8, 12)


def test_more_detections_than_the_model_gives_are_said():
    session = make_session(make_spec())
    most = session.spec.decode.max_detections
    with pytest.warns(
        UserWarning, match=f"max_detections {most + 1} changes nothing: this model gives at most {most} for an image"
    ):
        Detector(session, max_detections=most + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Detector(session, max_detections=most)


@pytest.mark.parametrize(
    ("name", "ours"), [("conf", "threshold"), ("imgsz", "size"), ("max_det", "max_detections"), ("treshold", "threshold")]
)
def test_keywords_of_others_are_named(name, ours):
    with pytest.raises(TypeError, match=f"no keyword '{name}'; did you mean {ours}"):
        Detector(make_session(make_spec()), **{name: 1})


@pytest.mark.parametrize("name", ["predict", "infer"])
def test_a_detector_is_called(name):
    with pytest.raises(AttributeError, match=r"a detector is called: detector\(images\)"):
        getattr(Detector(make_session(make_spec())), name)


WRONG = [None, 1, 1.5, b"x", ["a"], {"a": 1}, object(), np.zeros(3)]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_functions_name_what_is_wrong(value, tmp_path, monkeypatch):
    """Every public function with a model, a path, an image or a choice of another type."""
    pytest.importorskip("torch", reason="needs the 'export' extra")
    import detrt

    monkeypatch.chdir(tmp_path)
    image = "x.png" if isinstance(value, list) else value  # a list may be of images
    calls = [
        ("model", lambda: detrt.load_source(value)),
        ("model", lambda: detrt.open_session(value)),
        ("model", lambda: detrt.build(value, "out")),
        ("model", lambda: detrt.verify("bundle", value, ["x.png"])),
        ("folder", lambda: detrt.Bundle.open(value)),
        ("images", lambda: detrt.verify("bundle", "other", image)),
    ]
    if value is not None:  # which stands for the default
        calls += [
            ("model", lambda: detrt.verify(value, "bundle", ["x.png"])),
            ("load", lambda: detrt.load_source("embedded:shapes", value)),
            ("labels", lambda: detrt.load_source("embedded:shapes", labels=value)),
            ("output", lambda: detrt.build("model.onnx", value)),
            ("gate", lambda: detrt.verify("bundle", "other", ["x.png"], gate=value)),
        ]
    if value is not None and not isinstance(value, int):
        calls.append(("batch_size", lambda: detrt.verify("bundle", "other", ["x.png"], batch_size=value)))
    for name, call in calls:
        with pytest.raises(ArgumentError, match=name):
            call()
    assert not list(tmp_path.iterdir())


def test_functions_of_sources_and_references(tmp_path):
    pytest.importorskip("torch", reason="needs the 'export' extra")
    from detrt import export_onnx, open_session

    with pytest.raises(ArgumentError, match="load_source"):
        export_onnx("embedded:shapes", tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ArgumentError, match="model"):
        open_session(None)


@pytest.mark.parametrize("value", ["onnx", b"onnx", {"a": 1}, 5, None], ids=str)
def test_build_takes_lists(value, tmp_path):
    pytest.importorskip("torch", reason="needs the 'export' extra")
    from detrt import build

    with pytest.raises(ArgumentError, match="targets must be a list of"):
        build("embedded:shapes", tmp_path / "out", targets=value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["onnx", 5], ids=str)
def test_lists_of_other_functions(value):
    pytest.importorskip("torch", reason="needs the 'export' extra")
    from detrt import EngineConfig, load_source, verify

    for name, call in {
        "mean": lambda: load_source("embedded:shapes", mean=value),
        "std": lambda: load_source("embedded:shapes", std=value),
        "batches": lambda: verify("bundle", "other", ["x.png"], batches=value),
        "images": lambda: verify("bundle", "other", value),
        "sms": lambda: EngineConfig(sms=value),
        "classes": lambda: Detector(make_session(make_spec()), classes=value),
    }.items():
        with pytest.raises((DetrtError, ArgumentError), match=name):
            call()
