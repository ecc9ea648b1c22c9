"""ONNX Runtime on real files, and the choice of a session; the models are made in `onnx_models`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from onnx_models import CLASSES, QUERIES, make_model, make_spec

from detrt import files
from detrt.backends.base import Session
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.open import kind_of, open_session
from detrt.backends.search import FileSearch, SessionOptions
from detrt.backends.tensorrt import opening as sessions
from detrt.bundle import Bundle, BundleFile, EngineFacts, Provenance
from detrt.detector import Detector
from detrt.errors import EngineError, MissingPackageError, SessionError, SpecError
from detrt.spec import read_spec_file

SPEC = make_spec()
MODEL = make_model(SPEC)
AUTHORS = Path(__file__).parents[4] / "shared/data/weights/deimv2/deimv2_hgnetv2_atto_coco.onnx"


@pytest.fixture
def path(tmp_path):
    target = tmp_path / "model.onnx"
    target.write_bytes(MODEL)
    return target


def feeds(n=1, value=204):
    return {"pixel_values": np.full((n, 3, 8, 12), value, np.uint8)}


def test_runs_from_path_and_bytes(path):
    for source in (path, str(path), MODEL):
        with OnnxSession(source) as session:
            assert isinstance(session, Session)
            assert session.spec == SPEC and session.info.name == "onnxruntime-cpu" and session.info.max_batch is None
            assert session.inputs[0].shape == ("batch", 3, 8, 12) and session.inputs[0].dtype == "uint8"
            found = session.run(feeds(3))
            assert list(found) == ["logits", "pred_boxes"]
            assert found["logits"].shape == (3, QUERIES, CLASSES)
            np.testing.assert_allclose(found["logits"][2, :, 1], [1.5, 0.5, -0.5, -1.5], atol=1e-5)


def test_results_belong_to_the_caller(path):
    session = OnnxSession(path)
    first = session.run(feeds())["logits"]
    kept = first.copy()
    session.run(feeds(value=0))
    np.testing.assert_array_equal(first, kept)
    first[:] = 7
    np.testing.assert_array_equal(session.run(feeds())["logits"], kept)


def test_not_contiguous_feeds(path):
    pixels = np.zeros((1, 8, 12, 3), np.uint8)
    pixels[..., 0] = 102
    found = OnnxSession(path).run({"pixel_values": pixels.transpose(0, 3, 1, 2)})
    np.testing.assert_allclose(found["logits"][0, 0], [-0.5, -2.5, -2.5], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pixel_values": np.zeros((1, 3, 8, 13), np.uint8)}, ["(1, 3, 8, 13)", "must be 12"]),
        ({"pixel_values": np.zeros((1, 3, 8, 12), np.float32)}, ["uint8", "float32"]),
        ({"pixel_mask": np.zeros((1, 8, 12), np.int64)}, ["pixel_mask"]),
    ],
)
def test_bad_feeds(changes, words):
    with pytest.raises(SessionError) as caught:
        OnnxSession(MODEL).run({**feeds(), **changes})
    assert all(word in str(caught.value) for word in words)


def test_closed():
    session = OnnxSession(MODEL)
    session.close()
    session.close()
    with pytest.raises(SessionError, match="closed"):
        session.run(feeds())


@pytest.mark.parametrize("keep", [0, 4, 50, len(MODEL) // 2, len(MODEL) - 1])
def test_cut_off_file(tmp_path, keep):
    path = tmp_path / "cut.onnx"
    path.write_bytes(MODEL[:keep])
    with pytest.raises(SessionError, match=r"cut.onnx"):
        OnnxSession(path)


@pytest.mark.parametrize("noise", [b"hello world", b"\0" * 1000, b"PK\3\4" + b"x" * 99], ids=["text", "zeros", "zip"])
def test_not_onnx(noise):
    with pytest.raises((SessionError, SpecError)) as caught:
        OnnxSession(noise)
    assert str(len(noise)) in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(SessionError, match=r"no ONNX file '.*gone.onnx'"):
        OnnxSession(tmp_path / "gone.onnx")
    with pytest.raises(SessionError, match="is a folder"):
        OnnxSession(tmp_path)


def test_nodes_that_were_not_lowered():
    with pytest.raises(SessionError, match=r"nodes detrt::ms_deform_attn.*lower"):
        OnnxSession(make_model(SPEC, node="ms_deform_attn", domain="detrt"))
    with pytest.raises(SessionError, match=r"operators.*acme"):
        OnnxSession(make_model(SPEC, node="Foo", domain="acme"))


def test_types_that_the_cpu_cannot_run():
    """BF16 convolutions: a line that says what runs them, and not ONNX Runtime's own text."""
    model = onnx.load_from_string(make_model(SPEC))
    model.opset_import[0].version, model.ir_version = 22, 10  # the first with BF16 convolutions
    weights = onnx.helper.make_tensor("bf16", onnx.TensorProto.BFLOAT16, [1, 1, 1, 1], [1.0])
    model.graph.initializer.extend([weights, onnx.helper.make_tensor("bf16_x", onnx.TensorProto.BFLOAT16, [1, 1, 1, 1], [1.0])])
    model.graph.node.append(onnx.helper.make_node("Conv", ["bf16_x", "bf16"], ["bf16_y"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("bf16_y", onnx.TensorProto.BFLOAT16, [1, 1, 1, 1]))
    with pytest.raises(
        SessionError, match=r"no Conv here .*none for BF16.*precision=bf16, targets=tensorrt.*`precision=fp16`"
    ) as caught:
        OnnxSession(model.SerializeToString())
    assert "Could not find an implementation" not in str(caught.value)


@pytest.mark.parametrize(
    ("provider", "words"),
    [("tpu", ["'tpu'", "cpu, cuda"]), ("cuda:x", ["'cuda:x'"]), ("", ["''"])],
)
def test_bad_provider(provider, words):
    with pytest.raises(SessionError) as caught:
        OnnxSession(MODEL, provider=provider)
    assert all(word in str(caught.value) for word in words)


def test_provider_that_is_not_there(monkeypatch):
    import onnxruntime

    monkeypatch.setattr("detrt.backends.onnxruntime.session.has_driver", lambda: True)
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    with pytest.raises(SessionError, match=r"'cuda'.*available: .*cpu.*onnxruntime-gpu"):
        OnnxSession(MODEL, provider="cuda:0")


def test_threads():
    assert OnnxSession(MODEL, threads=1).run(feeds())
    with pytest.raises(SessionError, match="got 0"):
        OnnxSession(MODEL, threads=0)


def test_spec_sources(tmp_path):
    path = tmp_path / "bare.onnx"
    path.write_bytes(make_model(None))
    other = make_spec(dynamic=True)
    with pytest.raises(SpecError, match=r"bare.onnx' holds no detrt spec.*pixel_values.*logits.*`spec=FILE`"):
        OnnxSession(path)
    assert OnnxSession(path, other).spec == other
    sidecar = tmp_path / "bare.onnx.json"
    for text in (other.to_json(), json.dumps({"spec": other.to_dict(), "more": 1})):
        sidecar.write_text(text)
        assert OnnxSession(path).spec == other == read_spec_file(sidecar)
    sidecar.write_text("{")
    with pytest.raises(SpecError, match=r"bare.onnx.json' cannot be read as JSON"):
        OnnxSession(path)
    sidecar.write_text('{"schema": 1, "family": "x"}')
    with pytest.raises(SpecError, match=r"bare.onnx.json' is not usable.*'input'"):
        OnnxSession(path)
    sidecar.unlink()
    Bundle(tmp_path, other, Provenance("x"), ()).save()
    assert OnnxSession(path).spec == other


def test_spec_of_another_model():
    with pytest.raises(SpecError, match="height 8, its spec says 16"):
        OnnxSession(MODEL, make_spec(height=16))
    with pytest.raises(SpecError, match="pixel_mask"):
        OnnxSession(MODEL, make_spec(mask=True))


@pytest.mark.skipif(not AUTHORS.is_file(), reason="the authors' ONNX files are not there")
def test_foreign_file():
    with pytest.raises(SpecError, match=r"'images', 'orig_target_sizes'"):
        OnnxSession(AUTHORS)
    with pytest.raises(SpecError, match=r"\['labels', 'boxes', 'scores'\]; its spec promises \['pixel_values'\]"):
        OnnxSession(AUTHORS, SPEC)


@pytest.mark.parametrize("batch", ["n", 2])
def test_detector(batch):
    spec = make_spec()
    image = np.zeros((16, 24, 3), np.uint8)
    image[..., 2] = 255
    with Detector(OnnxSession(make_model(spec, batch=batch)), threshold=0.7) as detector:
        found = detector([image] * 3)
    assert [d.labels for d in found] == [("blue", "blue")] * 3
    assert found[2].boxes_xyxy.tolist() == [[0, 0, 24, 16], [0, 0, 12, 16]]


def test_kind_of(tmp_path, path):
    assert kind_of(path) == "onnx" and kind_of("x/y.engine") == "engine" and kind_of("hf:a/b") == "checkpoint"
    assert kind_of("embedded:shapes") == "checkpoint"
    (tmp_path / "config.json").touch()
    assert kind_of(tmp_path) == "checkpoint"
    (tmp_path / "detrt.json").touch()
    assert kind_of(tmp_path) == "bundle"
    (tmp_path / "model.txt").touch()
    (tmp_path / "empty").mkdir()
    for ref in (tmp_path / "model.txt", tmp_path / "empty", "nothing/here", "C:\\x", ""):
        with pytest.raises(SessionError, match=r"model|folder"):
            kind_of(ref)


@pytest.mark.parametrize(
    ("ref", "backend", "words"),
    [
        ("m.onnx", "tensorrt", ["m.onnx", "onnxruntime", "'tensorrt'"]),
        ("m.engine", "onnxruntime", ["m.engine", "'onnxruntime'"]),
        ("hf:a/b", "onnxruntime", ["hf:a/b", "torch", "detrt build"]),
        ("m.onnx", "cuda", ["'cuda'", "auto"]),
    ],
)
def test_backend_must_suit(ref, backend, words):
    with pytest.raises(SessionError) as caught:
        open_session(ref, backend=backend)
    assert all(word in str(caught.value) for word in words)


def test_spec_for_what_has_one():
    with pytest.raises(SpecError, match=r"hf:a/b"):
        open_session("hf:a/b", spec=SPEC)


@pytest.fixture
def bundle(tmp_path):
    def make(*kinds, onnx=MODEL):
        facts = EngineFacts("tensorrt-rtx", "1.2.3", (86,), "fp32", {}, "ab" * 32)
        rows = []
        for kind in kinds:
            file = tmp_path / f"model.{kind}"
            file.write_bytes(onnx if kind == "onnx" else b"engine")
            digest = files.sha256_of(file)
            rows.append(BundleFile(kind, file.name, digest, file.stat().st_size, facts if kind == "engine" else None))
        Bundle(tmp_path, SPEC, Provenance("x"), tuple(rows)).save()
        return tmp_path

    return make


def no_gpu(path, device, **options):
    raise EngineError("no GPU in this test")


def test_bundle_without_an_engine(bundle):
    session = open_session(bundle("onnx"))
    assert session.info.name == "onnxruntime-cpu" and session.info.note == ""  # it was built so
    assert open_session(bundle("onnx"), backend="onnxruntime").info.note == ""
    with pytest.raises(EngineError, match="holds none. Build one with: `build\(.*, targets=tensorrt"):
        open_session(bundle("onnx"), backend="tensorrt")


def test_an_engine_that_cannot_run_is_not_built_again(bundle, monkeypatch):
    """Its reason says what to do, such as a package to install."""

    def no_package(path, device, **options):
        raise MissingPackageError("cuda-python", "gpu", "running TensorRT engines")

    monkeypatch.setattr("detrt.backends.tensorrt.opening.open_engine", no_package)
    with pytest.raises(EngineError, match=r"can run here: .*cuda-python.*pip install") as caught:
        open_session(bundle("onnx", "engine"), backend="tensorrt")
    assert "Build one with" not in str(caught.value)


def test_a_next_step_of_several_files_is_said_once(bundle):
    search = FileSearch(Bundle.open(bundle("onnx", "engine")), SessionOptions(), lambda: pytest.fail("the graph is not opened"))
    assert search.why == ""
    step = "; this is 1.7.1. Install that version, or build it again"
    for name in ("a", "b"):
        search.reject(search.bundle.files[1], EngineError(f"'{name}' is of 1.6.1{step}"))
        search.reject(search.bundle.files[1], EngineError(f"'{name}' is of 1.5.0{step}"))
    assert search.why == "; ".join(f"model.engine: '{n}' is of {v}" for n in "ab" for v in ("1.6.1", "1.5.0")) + step
    search.reject(search.bundle.files[1], EngineError("there is no GPU"))
    assert search.why.count(step) == 4 and search.why.endswith("there is no GPU")


def test_what_does_not_run_says_one_next_step(bundle):
    """For each kind of file that a bundle may hold: what is built again is named once."""
    for name, count in (("tensorrt", 1), ("inductor", 1), ("openvino", 1)):
        with pytest.raises(EngineError) as caught:
            open_session(bundle("onnx"), backend=name)
        assert str(caught.value).count("uild one with") == count


def test_where_a_gpu_is_named_the_engine_for_it_says_the_next_step(bundle, monkeypatch):
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has a GPU")
    monkeypatch.setattr("detrt.backends.onnxruntime.session.has_driver", lambda: True)
    folder = bundle("onnx")
    with pytest.raises(SessionError, match="cannot run on cuda:0: .* Install onnxruntime-gpu"):
        open_session(folder, device="cuda:0")
    monkeypatch.setattr(sessions, "open_engine", no_gpu)
    with pytest.raises(SessionError) as caught:
        open_session(bundle("onnx", "engine"), device="cuda:0")
    assert str(caught.value).endswith("cannot run on cuda:0: model.engine: no GPU in this test")


def test_one_device_means_the_same_for_every_kind(bundle, monkeypatch):
    """A GPU is never replaced by the CPU, and the CPU is what runs where it is named."""
    import onnxruntime

    folder = bundle("onnx")
    for ref in (folder, folder / "model.onnx"):
        assert open_session(ref, device="cpu").info.name == "onnxruntime-cpu"
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            for driver, words in (
                (True, "provider 'cuda' is not in this build.*Install onnxruntime-gpu"),
                (False, "not in this build.*no NVIDIA GPU.*: use `device=cpu`"),
            ):
                monkeypatch.setattr("detrt.backends.onnxruntime.session.has_driver", lambda driver=driver: driver)
                with pytest.raises(SessionError, match=words):
                    open_session(ref, device="cuda:0")


def test_bundle_falls_back_with_a_reason(bundle, monkeypatch):
    monkeypatch.setattr(sessions, "open_engine", no_gpu)
    folder = bundle("onnx", "engine")
    session = open_session(folder)
    assert session.info.name == "onnxruntime-cpu" and "model.engine: no GPU in this test" in session.info.note
    with pytest.raises(EngineError, match="no GPU in this test"):
        open_session(folder, backend="tensorrt")


def test_bundle_prefers_the_engine(bundle, monkeypatch):
    opened = []

    def open_engine(path, device, **options):
        opened.append((path.name, device))
        return OnnxSession(path.parent / "model.onnx")

    monkeypatch.setattr(sessions, "open_engine", open_engine)
    folder = bundle("onnx", "engine")
    open_session(folder, device="cuda:1").close()
    assert opened == [("model.engine", "cuda:1")]
    assert open_session(folder, backend="onnxruntime").info.name == "onnxruntime-cpu"


def test_damaged_bundle_is_no_reason_to_fall_back(bundle, monkeypatch):
    folder = bundle("onnx", "engine")
    (folder / "model.engine").write_bytes(b"other!")

    def suits(path, device, *, compare, **options):
        compare()

    monkeypatch.setattr(sessions, "open_engine", suits)
    with pytest.raises(SpecError, match=r"model.engine.*SHA-256"):
        open_session(folder)
    (folder / "model.engine").unlink()
    with pytest.raises(SpecError, match=r"model.engine' is missing"):
        open_session(folder)


def test_bundle_without_anything(bundle, monkeypatch):
    monkeypatch.setattr(sessions, "open_engine", no_gpu)
    with pytest.raises(SessionError, match=r"no ONNX file.*no GPU in this test"):
        open_session(bundle("engine"))


def test_detector_open_closes_on_failure(bundle, monkeypatch):
    closed = []
    monkeypatch.setattr(OnnxSession, "close", lambda self: closed.append(self))
    with pytest.raises(SpecError, match="'horse'"):
        Detector.open(bundle("onnx"), classes=["horse"])
    assert len(closed) == 1
