"""A bundle with engines of both graphs, on the fake runtime: which engines are taken, lengths, and what is left."""

from __future__ import annotations

import numpy as np
import pytest
from text_cases import (
    colour_image,
    detector_tensors,
    make_prompted,
    model_spec,
    run_detector,
    run_text_encoder,
    tensors,
    text_encoder_outputs,
    tokenizer_json,
)

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
pytest.importorskip("tokenizers", reason="needs the 'text' extra")
from fake_tensorrt import FakeCuda, fake_engine_bytes, fake_trt
from text_models import write_text_model

from detrt import Detector, bundle, files, open_session
from detrt.backends.prompted import PromptedSession
from detrt.backends.tensorrt import TensorRTSession
from detrt.backends.tensorrt import opening as sessions
from detrt.bundle import Bundle, BundleFile, EngineFacts, Provenance
from detrt.errors import EngineError, PromptError, SpecError

VERSION = "1.7.1.116"
SPEC = model_spec()
IMAGES = [colour_image("red", "black", "blue"), colour_image("black", "green", "black")]


def write_engine(path, inputs, outputs, tokens=(4, 32, 64), capabilities=(89,)):
    lengths = {"batch": (1, 1, 4), "tokens": tokens}
    profile = {
        info.name: {
            point: [lengths[axis][k] if isinstance(axis, str) else axis for axis in info.shape]
            for k, point in enumerate(("min", "opt", "max"))
        }
        for info in inputs
    }
    path.write_bytes(fake_engine_bytes(inputs, outputs, profile))
    facts = EngineFacts("tensorrt-rtx", VERSION, capabilities, "fp32", profile, "")
    bundle.write_sidecar(path, SPEC, facts)
    return facts


def text_encoder(feeds):
    made = run_text_encoder(feeds)
    return {info.name: made[info.name] for info in text_encoder_outputs("tokens")}


@pytest.fixture
def shapes(monkeypatch):
    """Opens engines on the fake runtime; the list of what they were run with."""
    seen = []

    def opened(path, device, **options):
        function = text_encoder if path.name.startswith("text") else run_detector

        def run(feeds):
            seen.append((path.name, {name: array.shape for name, array in feeds.items()}))
            return function(feeds)

        cuda = FakeCuda(89)
        return TensorRTSession(path, compare=options.get("compare"), trt=fake_trt("tensorrt-rtx", cuda, run, VERSION), cuda=cuda)

    monkeypatch.setattr(sessions, "open_engine", opened)
    return seen


@pytest.fixture
def folder(tmp_path):
    """A bundle; `left_out`: kinds without an entry; capabilities: of the text encoder's engine."""

    def make(*left_out, capabilities=(89,), tokens=(4, 32, 64)):
        write_text_model(tmp_path)
        made = {
            "model.sm89.engine": write_engine(tmp_path / "model.sm89.engine", *detector_tensors(SPEC), tokens=tokens),
            "text.sm89.engine": write_engine(
                tmp_path / "text.sm89.engine",
                tensors("input_ids", "attention_mask"),
                text_encoder_outputs("tokens"),
                capabilities=capabilities,
            ),
        }
        kinds = {
            "model.onnx": "onnx",
            "text.onnx": "text",
            "tokenizer.json": "tokenizer",
            "model.sm89.engine": "engine",
            "text.sm89.engine": "text-engine",
        }
        rows = [
            BundleFile(kind, name, files.sha256_of(tmp_path / name), (tmp_path / name).stat().st_size, made.get(name))
            for name, kind in kinds.items()
            if kind not in left_out
        ]
        Bundle(tmp_path, SPEC, Provenance("x"), tuple(rows)).save()
        return tmp_path

    return make


def test_both_engines_are_taken(folder, shapes):
    session = open_session(folder())
    assert isinstance(session, PromptedSession) and session.info.name == "tensorrt-rtx" and session.info.note == ""
    assert session.text_encoder.info.name == "tensorrt-rtx" and session.info.max_batch == 4
    prompts = ["red. a remote control.", "a green cat"]
    found = Detector(session)(IMAGES, prompts=prompts)
    plain = Detector(make_prompted())(IMAGES, prompts=prompts)
    for a, b in zip(found, plain, strict=True):
        assert a.labels == b.labels and a.scores.tobytes() == b.scores.tobytes()
    # Both prompts have the length of one bucket, so an engine prepares itself for one shape.
    assert {s["attention_mask"][1] for _, s in shapes} == {16}
    assert sum(name.startswith("text") for name, _ in shapes) == 2
    Detector(session)(IMAGES, prompts=prompts)
    assert sum(name.startswith("text") for name, _ in shapes) == 2


def test_the_limit_is_that_of_the_profile(folder, shapes):
    detector = Detector.open(folder(tokens=(4, 32, 48)))
    with pytest.raises(PromptError, match=r"has 53 tokens .* at most 48"):
        detector(IMAGES[:1], prompts=["cat " * 50])
    names = [f"{a} {b}" for a in ("red", "green", "blue", "cat", "dog") for b in ("star", "circle", "square", "disk")]
    listed = Detector(detector.session, prompt=names)
    assert listed.session.chunks == 2
    (found,) = listed([colour_image("red", "black", "black")])
    assert found.labels[0].startswith("red ")
    assert all(s["attention_mask"][1] <= 48 for _, s in shapes)


def test_without_an_engine_of_the_text_encoder(folder, shapes):
    session = open_session(folder("text-engine"))
    assert session.info.name == "tensorrt-rtx" and session.text_encoder.info.name == "onnxruntime-cpu"
    assert "the text encoder runs with ONNX Runtime" in session.info.note
    (found,) = Detector(session, prompt="red. blue.")(IMAGES[:1])
    assert sorted(found.labels) == ["blue", "red"]
    # TensorRT could not build it.
    assert "the text encoder runs with ONNX Runtime" in open_session(folder("text-engine"), backend="tensorrt").info.note
    # One for another GPU is none for this one.
    assert "none for the same target and GPUs" in open_session(folder(capabilities=(75,))).info.note
    with pytest.raises(EngineError, match="no engine of the text encoder"):
        open_session(folder(capabilities=(75,)), backend="tensorrt")


def test_a_text_encoder_engine_that_does_not_open(folder, shapes, monkeypatch):
    opened = sessions.open_engine

    def only_detectors(path, device, **options):
        if path.name.startswith("text"):
            raise EngineError("no memory for it")
        return opened(path, device, **options)

    monkeypatch.setattr(sessions, "open_engine", only_detectors)
    assert "text.sm89.engine: no memory for it" in open_session(folder()).info.note


@pytest.mark.parametrize("kind", ["tokenizer", "text"])
def test_parts_that_are_missing(folder, shapes, kind):
    if kind == "text":
        assert open_session(folder("text")).text_encoder.info.name == "tensorrt-rtx"  # not needed beside its engine
        kinds = ("text", "text-engine")
    else:
        kinds = (kind,)
    with pytest.raises(SpecError, match=f"has no {'tokenizer' if kind == 'tokenizer' else 'text encoder'}"):
        open_session(folder(*kinds))


def test_a_damaged_text_encoder_engine_is_an_error(folder, shapes):
    place = folder()
    (place / "text.sm89.engine").write_bytes(b"other")
    with pytest.raises(SpecError, match=r"text.sm89.engine"):
        open_session(place)


def test_an_engine_by_its_path(folder, shapes):
    place = folder()
    session = open_session(place / "model.sm89.engine")
    assert session.text_encoder.info.name == "tensorrt-rtx"
    (place / "text.sm89.engine").unlink()
    session = open_session(place / "model.sm89.engine")
    assert session.text_encoder.info.name == "onnxruntime-cpu"
    (found,) = Detector(session, prompt="red. blue.")(IMAGES[:1])
    assert sorted(found.labels) == ["blue", "red"]
    (place / "tokenizer.json").write_bytes(tokenizer_json()[:100])
    with pytest.raises(SpecError, match="cannot be read"):
        open_session(place / "model.sm89.engine")


def test_onnx_files_of_the_same_bundle(folder):
    session = open_session(folder(), backend="onnxruntime")
    assert session.info.name == session.text_encoder.info.name == "onnxruntime-cpu"
    (found,) = Detector(session, prompt="red. blue.")(IMAGES[:1])
    np.testing.assert_allclose(found.scores, Detector(make_prompted(), prompt="red. blue.")(IMAGES[:1])[0].scores, atol=1e-5)
