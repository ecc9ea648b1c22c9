"""TensorRTSession over the fake runtime, and over the real library on a machine without a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_tensorrt import VERSIONS, FakeCuda, fake_engine_bytes, fake_trt

from detrt import bundle, files
from detrt.backends.base import Session
from detrt.backends.open import open_session
from detrt.backends.tensorrt import TensorRTSession
from detrt.backends.tensorrt.session import default_runtime_cache
from detrt.bundle import EngineFacts, read_sidecar
from detrt.cli.spellings import spelled
from detrt.errors import DetrtError, EngineError, MissingPackageError, SessionError, SpecError
from detrt.models import trust
from detrt.spec import DecodeSpec, InputSpec, ModelSpec, TensorInfo

VERSION = "1.7.1.116"
SPEC = ModelSpec(
    "detr",
    InputSpec("shortest_edge", 64, 96, shortest_edge=64, longest_edge=128, mask=True, dynamic=True),
    DecodeSpec("softmax", "query", num_queries=3, num_classes=2, max_detections=3),
    {0: "cat"},
)
INPUTS = (
    TensorInfo("pixel_values", "uint8", ("batch", 3, "height", "width")),
    TensorInfo("pixel_mask", "int64", ("batch", "height", "width")),
)
OUTPUTS = (
    TensorInfo("logits", "float32", ("batch", 3, 3)),
    TensorInfo("pred_boxes", "float32", ("batch", 3, 4)),
)
PROFILE = {
    "pixel_values": {"min": [1, 3, 32, 32], "opt": [1, 3, 64, 96], "max": [4, 3, 128, 128]},
    "pixel_mask": {"min": [1, 32, 32], "opt": [1, 64, 96], "max": [4, 128, 128]},
}


def model(feeds):
    """Outputs that depend on every input byte and on the shape."""
    pixels = feeds["pixel_values"].astype(np.float32).mean((1, 2, 3)) + feeds["pixel_mask"].sum((1, 2))
    return {
        "logits": np.broadcast_to(pixels[:, None, None], (len(pixels), 3, 3)).astype(np.float32),
        "pred_boxes": np.broadcast_to(pixels[:, None, None] / 2, (len(pixels), 3, 4)).astype(np.float32),
    }


def feeds(batch=1, height=64, width=96, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "pixel_values": rng.integers(0, 256, (batch, 3, height, width), dtype=np.uint8),
        "pixel_mask": rng.integers(0, 2, (batch, height, width), dtype=np.int64),
    }


def write(tmp_path, *, native_inputs=INPUTS, native_outputs=OUTPUTS, spec=SPEC, profile=PROFILE, **changes):
    path = tmp_path / "model.engine"
    path.write_bytes(fake_engine_bytes(native_inputs, native_outputs, profile))
    values = {
        "target": "tensorrt-rtx",
        "runtime_version": VERSIONS.get(changes.get("target", ""), VERSION),
        "compute_capabilities": (86, 89),
        "precision": "fp32",
        "profile": profile,
        "onnx_sha256": "",
    }
    bundle.write_sidecar(path, spec, EngineFacts(**{**values, **changes}))
    return path


def open_fake(path, target="tensorrt-rtx", function=model, cuda=None, version=None, **options):
    cuda = cuda or FakeCuda(89)
    return TensorRTSession(path, trt=fake_trt(target, cuda, function, version), cuda=cuda, **options), cuda


@pytest.mark.parametrize("target", ["tensorrt-rtx", "tensorrt"])
def test_run_equals_the_function_for_changing_shapes(tmp_path, target):
    session, cuda = open_fake(write(tmp_path, target=target), target)
    assert isinstance(session, Session)
    assert session.info.name == target and session.info.max_batch == 4
    assert session.inputs == INPUTS
    for step, shape in enumerate([(1, 64, 96), (4, 128, 128), (1, 64, 96), (2, 32, 128), (1, 64, 96), (1, 64, 96)]):
        given = feeds(*shape, seed=step)
        got = session.run(given)
        for name, expected in model(given).items():
            np.testing.assert_array_equal(got[name], expected)
    session.close()
    session.close()
    assert cuda.alive == 0, "memory, streams or graphs were not given back"


def test_arrays_belong_to_the_caller_and_inputs_may_be_views(tmp_path):
    session, _ = open_fake(write(tmp_path))
    first_feeds = feeds(seed=1)
    first = session.run(first_feeds)
    copy = {name: array.copy() for name, array in first.items()}
    flipped = {name: array[..., ::-1] for name, array in feeds(seed=2).items()}
    second = session.run(flipped)
    for name in copy:
        np.testing.assert_array_equal(first[name], copy[name])
        np.testing.assert_array_equal(second[name], model(flipped)[name])


def test_cuda_graphs_are_recorded_once_a_shape_and_replayed(tmp_path):
    session, cuda = open_fake(write(tmp_path, target="tensorrt"), "tensorrt", max_shapes=2)
    for step in range(6):
        given = feeds(seed=step)
        np.testing.assert_array_equal(session.run(given)["logits"], model(given)["logits"])
    assert cuda.calls["capture"] == 1 and cuda.calls["launch"] == 5
    allocations = cuda.calls["alloc device"]
    session.run(feeds(seed=9))
    assert cuda.calls["alloc device"] == allocations, "a known shape must not allocate"
    # A larger shape moves the buffers: the old recording holds stale addresses and must go.
    session.run(feeds(4, 128, 128))
    given = feeds(seed=10)
    np.testing.assert_array_equal(session.run(given)["logits"], model(given)["logits"])
    # More shapes push recorded ones out, with their graphs.
    for batch in (2, 2, 3, 3, 4):
        session.run(feeds(batch))
    assert len(session._plans) == 2 and cuda.calls["capture"] == 3
    session.close()
    assert cuda.alive == 0


def test_an_engine_that_cannot_be_recorded_runs_without_graphs(tmp_path):
    cuda = FakeCuda(89)
    cuda.fail_capture = True
    session, _ = open_fake(write(tmp_path, target="tensorrt"), "tensorrt", cuda=cuda)
    for step in range(4):
        given = feeds(seed=step)
        np.testing.assert_array_equal(session.run(given)["logits"], model(given)["logits"])
    assert "cannot be recorded" in session.graph_note and cuda.calls["launch"] == 0


def test_a_capture_is_not_tried_in_the_run_that_binds_new_addresses(tmp_path):
    """TensorRT sets a context up in its first run after a change, and that work cannot be recorded."""
    cuda = FakeCuda(89)
    session, _ = open_fake(write(tmp_path, target="tensorrt"), "tensorrt", cuda=cuda)
    for batch in (1, 1, 1, 4):  # the larger batch moves all buffers
        session.run(feeds(batch))
    captures = cuda.calls["capture"]
    session.run(feeds(1))  # binds the moved buffers
    assert cuda.calls["capture"] == captures
    session.run(feeds(1))
    assert cuda.calls["capture"] == captures + 1


def test_a_failed_capture_stops_no_other_shape(tmp_path):
    cuda = FakeCuda(89)
    cuda.fail_capture = True
    session, _ = open_fake(write(tmp_path, target="tensorrt"), "tensorrt", cuda=cuda)
    for _ in range(3):
        session.run(feeds(1))
    assert "1x3x64x96" in session.graph_note and cuda.calls["clear_error"] == 1
    cuda.fail_capture = False
    for _ in range(3):
        session.run(feeds(2))
    assert cuda.calls["capture"] == 1 and cuda.calls["launch"] == 2


@pytest.mark.parametrize(
    ("built", "installed"), [("10.3.0", "10.3.0.26"), ("10.13.3.9.post1", "10.13.3.9"), ("8.5.3", "8.5.3.1")]
)
def test_one_release_has_several_spellings(tmp_path, built, installed):
    path = write(tmp_path, target="tensorrt", runtime_version=built)
    open_fake(path, "tensorrt", version=installed)[0].close()
    with pytest.raises(EngineError, match="runs only on it"):
        open_fake(path, "tensorrt", version="10.3.1.26")


def test_an_engine_of_tensorrt_8_runs_with_int64_feeds(tmp_path):
    """It has no INT64: the engine's tensors are INT32, and the sidecar says what the model has."""
    inputs = tuple(TensorInfo(i.name, "int32" if i.dtype == "int64" else i.dtype, i.shape) for i in INPUTS)
    outputs = (*OUTPUTS, TensorInfo("top", "int32", ("batch",)))
    declared = {
        side: tuple({"name": i.name, "dtype": "int64" if i.dtype == "int32" else i.dtype, "shape": list(i.shape)} for i in infos)
        for side, infos in (("inputs", inputs), ("outputs", outputs))
    }

    def function(given):
        assert given["pixel_mask"].dtype == np.int32
        return {**model(given), "top": given["pixel_mask"].max((1, 2)).astype(np.int32)}

    native = {"native_inputs": inputs, "native_outputs": outputs}
    path = write(tmp_path, target="tensorrt", runtime_version="8.5.3.1", **native, **declared)
    session, cuda = open_fake(path, "tensorrt", function, version="8.5.3.1")
    assert {i.name: i.dtype for i in session.inputs}["pixel_mask"] == "int64"
    for step in range(4):
        given = feeds(1 + step % 2, seed=step)
        got = session.run(given)
        np.testing.assert_array_equal(got["logits"], model(given)["logits"])
        assert got["top"].dtype == np.int64
        assert len(session._plans) == 1, "a second context cannot have the only profile of an engine of symbolic shapes"
    session.close()
    assert cuda.alive == 0


def test_cuda_graph_off(tmp_path):
    session, cuda = open_fake(write(tmp_path, target="tensorrt"), "tensorrt", cuda_graph=False)
    for _ in range(3):
        session.run(feeds())
    assert cuda.calls["capture"] == 0 and session.graph_note == "switched off"


def test_output_whose_shape_depends_on_the_data(tmp_path):
    outputs = (*OUTPUTS, TensorInfo("kept", "int64", ("found",)))

    def function(given):
        return {**model(given), "kept": np.arange(int(given["pixel_values"][0, 0, 0, 0]) % 7 * 300)}

    for target in ("tensorrt-rtx", "tensorrt"):
        session, cuda = open_fake(write(tmp_path, native_outputs=outputs, target=target), target, function)
        for step in range(5):
            given = feeds(seed=step)
            np.testing.assert_array_equal(session.run(given)["kept"], function(given)["kept"])
        session.close()
        assert cuda.alive == 0 and cuda.calls["capture"] == 0


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((5, 64, 96), ["pixel_values", "batch 5", "1 to 4", "`batch=MIN,OPT,MAX`"]),
        ((1, 16, 96), ["height 16", "32 to 128", "`height=MIN,OPT,MAX`"]),
        ((1, 64, 256), ["width 256", "32 to 128", "`width=MIN,OPT,MAX`"]),
    ],
)
def test_shape_outside_the_profile(tmp_path, shape, parts):
    session, _ = open_fake(write(tmp_path))
    with pytest.raises(SessionError) as caught:
        session.run(feeds(*shape))
    for part in parts:
        assert part in str(caught.value)
    session.run(feeds())  # and it still works


def test_wrong_feeds(tmp_path):
    session, _ = open_fake(write(tmp_path))
    good = feeds()
    for bad in (
        {"pixel_values": good["pixel_values"]},
        {**good, "pixel_values": good["pixel_values"].astype(np.float32)},
        {**good, "pixel_mask": good["pixel_mask"][:, :32]},
        {**good, "pixel_values": good["pixel_values"][:, :2]},
        {**good, "pixel_values": good["pixel_values"][0]},
    ):
        with pytest.raises(SessionError):
            session.run(bad)
    session.close()
    with pytest.raises(SessionError, match="closed"):
        session.run(good)


def test_a_profile_of_one_size_makes_fixed_axes(tmp_path):
    one = {name: dict.fromkeys(("min", "opt", "max"), shapes["opt"]) for name, shapes in PROFILE.items()}
    session, _ = open_fake(write(tmp_path, profile=one))
    assert session.inputs[0].shape == (1, 3, 64, 96)
    with pytest.raises(SessionError, match="takes 64 "):
        session.run(feeds(1, 96, 96))


def test_runtime_cache_is_written_and_read(tmp_path):
    cache = tmp_path / "cache" / "kernels.bin"
    with open_fake(write(tmp_path), runtime_cache=cache)[0] as session:
        session.run(feeds())
    assert cache.read_bytes().startswith(b"kernels")
    cache.write_bytes(b"of another GPU")
    with open_fake(write(tmp_path), runtime_cache=cache, specialization="eager")[0] as session:
        session.run(feeds())
    assert cache.read_bytes().startswith(b"kernels")
    with pytest.raises(EngineError, match="runtime_cache"):
        open_fake(write(tmp_path, target="tensorrt"), "tensorrt", runtime_cache=cache)


def test_comparisons_wait_for_all_kernels(tmp_path, monkeypatch):
    """Until its kernels are compiled, TensorRT-RTX runs slower ones, whose rounding differs."""
    from detrt.evaluation.models import open_side

    chosen = []

    def opened(path, *of_bundle, **options):
        chosen.append(options["specialization"])
        return open_fake(path, **options)[0]

    monkeypatch.setattr("detrt.backends.tensorrt.session.TensorRTSession", opened)
    open_session(write(tmp_path)).close()
    open_side(str(write(tmp_path))).session.close()
    assert chosen == ["lazy", "eager"]


def test_kernels_are_kept_by_default_per_engine_and_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("DETRT_RUNTIME_CACHE", str(tmp_path / "kernels"))
    with open_fake(write(tmp_path))[0] as session:
        for _ in range(50):
            session.run(feeds())
        (kept,) = (tmp_path / "kernels").iterdir()  # before `close`: a server may be killed
        assert kept.read_bytes().startswith(b"kernels") and kept.suffix == ".rtxcache"
    with open_fake(write(tmp_path, target="tensorrt"), "tensorrt")[0] as session:
        session.run(feeds())
    assert list((tmp_path / "kernels").iterdir()) == [kept]
    kept.unlink()
    (tmp_path / "kernels").rmdir()
    (tmp_path / "kernels").write_text("a file, so that nothing can be written")
    with open_fake(write(tmp_path))[0] as session:
        session.run(feeds())


UNREADABLE = {"a folder": "folder", "a name that is too long": "n" * 300, "a link to itself": "link"}


@pytest.mark.parametrize("where", UNREADABLE)
def test_kernels_that_cannot_be_read_stop_nothing_but_where_they_are_asked_for(tmp_path, monkeypatch, where):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("link")
    file = tmp_path / UNREADABLE[where]
    engine = write(tmp_path)
    with pytest.raises(EngineError, match="runtime_cache .* cannot be read: .*; give another file"):
        open_fake(engine, runtime_cache=file)
    monkeypatch.setattr("detrt.backends.tensorrt.session.default_runtime_cache", lambda *_: file)
    with open_fake(engine)[0] as session:
        session.run(feeds())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root becomes another user")
def test_a_home_folder_of_another_user_holds_no_kernels(tmp_path, monkeypatch):
    """A container whose image says HOME=/root, and which runs as another user."""
    (tmp_path / "home").mkdir(mode=0o700)
    for variable in ("DETRT_RUNTIME_CACHE", "XDG_CACHE_HOME", "XDG_DATA_HOME", trust.STORE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    engine, copied = write(tmp_path), tempfile.mkdtemp(prefix="detrt-test-")
    try:
        os.chmod(copied, 0o755)
        for path in (engine, engine.with_name(engine.name + ".json")):
            shutil.copy(path, copied)
        os.seteuid(65534)
        with open_fake(Path(copied) / engine.name)[0] as session:
            session.run(feeds())
        assert not trust.is_built_here(Path(copied) / engine.name)
    finally:
        os.seteuid(0)
        shutil.rmtree(copied)


def test_a_user_without_a_home_folder_keeps_no_kernels(tmp_path, monkeypatch):
    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    for variable in ("DETRT_RUNTIME_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    with open_fake(write(tmp_path))[0] as session:
        session.run(feeds())


def test_kernels_with_tf32_have_a_file_of_their_own(tmp_path, monkeypatch):
    """Engines with TF32 and without have the same size; their kernels do not compute the same."""
    monkeypatch.setenv("DETRT_RUNTIME_CACHE", str(tmp_path / "kernels"))
    choices = ({"environment": {"NVIDIA_TF32_OVERRIDE": "0"}}, {"options": {"tf32": True}}, {"options": {"tf32": True}})
    for count, facts in zip((1, 2, 2), choices, strict=True):
        with open_fake(write(tmp_path, **facts))[0] as session:
            session.run(feeds())
        assert len(list((tmp_path / "kernels").iterdir())) == count


def cases(name):
    return json.loads((Path(__file__).parents[2] / "data" / name).read_text("utf-8"))["cases"]


@pytest.mark.parametrize("case", cases("engine_refusals.json"), ids=lambda case: case["message"][:70] or "runs")
def test_an_engine_is_refused_by_the_rule_of_libdetrt_in_its_words(tmp_path, monkeypatch, case):
    facts = case["facts"]
    engine = write(tmp_path, **facts)
    if case["message"]:
        engine.write_bytes(b"of another build")  # which is not read, as it cannot run here
    cuda = FakeCuda(case["capability"])
    monkeypatch.setattr(cuda, "device_name", lambda device: case["gpu"])
    error = contextlib.nullcontext() if not case["message"] else pytest.raises(EngineError)
    with trust.allowing(True), error as caught:  # engines that bring code of their own
        open_fake(engine, facts["target"], cuda=cuda, version=case["installed"])[0].close()
    if case["message"]:
        assert spelled(str(caught.value)).replace(str(engine), "model.engine") == case["message"]


@pytest.mark.parametrize(("version", "message"), [(VERSION, "SHA-256"), ("1.6.1.120", "runs only on it")])
def test_a_bundle_compares_the_content_of_an_engine_that_can_run_here(tmp_path, monkeypatch, version, message):
    path = write(tmp_path, runtime_version=version)
    spec, facts = read_sidecar(path)
    entry = bundle.BundleFile("engine", path.name, files.sha256_of(path), path.stat().st_size, facts)
    bundle.Bundle(tmp_path, spec, bundle.Provenance("random:detr"), (entry,)).save()
    path.write_bytes(path.read_bytes()[:-1] + b" ")

    def opened(path, spec, facts, *, device, **options):
        return open_fake(path, spec=spec, facts=facts, **options)[0]

    monkeypatch.setattr("detrt.backends.tensorrt.session.TensorRTSession", opened)
    with pytest.raises(DetrtError, match=message):
        open_session(tmp_path, backend="tensorrt")


def test_facts_of_a_bundle_are_those_of_its_manifest(tmp_path):
    """As in libdetrt, which reads no sidecars."""
    engine = write(tmp_path)
    facts = replace(read_sidecar(engine)[1], runtime_version="1.6.1.120")
    with pytest.raises(EngineError, match="built with TensorRT-RTX 1.6.1.120 and runs only on it"):
        open_fake(engine, spec=SPEC, facts=facts)


@pytest.mark.parametrize("case", cases("kernel_files.json"), ids=lambda case: case["gpu"])
def test_kernels_have_the_name_that_libdetrt_gives_them(tmp_path, monkeypatch, case):
    monkeypatch.setenv("DETRT_RUNTIME_CACHE", str(tmp_path))
    facts = EngineFacts(target="tensorrt-rtx", compute_capabilities=(89,), precision="fp32", profile={}, **case["facts"])
    engine = tmp_path / "model.engine"
    with open(engine, "wb") as file:
        file.truncate(case["size"])
    assert default_runtime_cache(engine, facts, case["gpu"]) == tmp_path / case["name"]


def test_threads_share_one_session(tmp_path):
    session, _ = open_fake(write(tmp_path, target="tensorrt"), "tensorrt")
    wrong = []

    def work(seed):
        for step in range(10):
            given = feeds(1 + (seed + step) % 4, seed=seed)
            if not np.array_equal(session.run(given)["logits"], model(given)["logits"]):
                wrong.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_out_of_gpu_memory_leaves_a_session_that_works(tmp_path):
    cuda = FakeCuda(89, memory_limit=200_000)
    session, _ = open_fake(write(tmp_path, target="tensorrt"), "tensorrt", cuda=cuda)
    for step in range(3):
        session.run(feeds(1, 32, 32, seed=step))
    with pytest.raises(SessionError, match="out of memory"):
        session.run(feeds(4, 128, 128))
    for step in range(4):
        given = feeds(1, 32, 32, seed=step)
        np.testing.assert_array_equal(session.run(given)["logits"], model(given)["logits"])
    session.close()
    assert cuda.alive == 0


def test_a_failing_model_is_a_session_error(tmp_path):
    session, _ = open_fake(write(tmp_path), function=lambda given: {**model(given), "logits": np.zeros((1, 1))})
    with pytest.raises(SessionError, match="shape"):
        session.run(feeds())


@pytest.mark.parametrize(
    ("changes", "options", "parts"),
    [
        ({"runtime_version": "1.6.0.1"}, {}, ["1.6.0.1", VERSION, "`build(MODEL"]),
        ({"compute_capabilities": (120,)}, {}, ["120", "89", "`sms=89`", "Fake GPU"]),
        ({}, {"cuda": FakeCuda(90)}, ["has 90", "`targets=tensorrt`"]),
        ({"target": "openvino"}, {}, ["openvino"]),
        ({}, {"cuda": FakeCuda(89, devices=0)}, ["no CUDA device"]),
        ({}, {"device": "cuda:3"}, ["no CUDA device 3"]),
        ({}, {"device": "cpu"}, ["cpu"]),
        ({}, {"specialization": "fast"}, ["lazy, eager, none"]),
        ({}, {"max_shapes": 0}, ["max_shapes"]),
    ],
)
def test_refusals(tmp_path, changes, options, parts):
    path = write(tmp_path, **changes)
    with pytest.raises(EngineError) as caught:
        open_fake(path, **options)
    for part in parts:
        assert part in str(caught.value)


def test_version_compatible_engines_run_on_newer_versions_only(tmp_path):
    path = write(tmp_path, target="tensorrt", runtime_version="10.9.0.34", options={"version_compatible": True})
    with pytest.raises(EngineError, match="holds native code"):
        open_fake(path, "tensorrt", version="11.1.0.2")
    with trust.allowing(True):
        open_fake(path, "tensorrt", version="11.1.0.2")[0].close()
    with pytest.raises(EngineError, match="newer"):
        open_fake(path, "tensorrt", version="10.3.0")


def test_ampere_plus_engines_run_on_newer_gpus(tmp_path):
    path = write(
        tmp_path,
        target="tensorrt",
        options={"hardware_compatibility": "ampere_plus"},
        compute_capabilities=(80,),
    )
    open_fake(path, "tensorrt")[0].close()
    with pytest.raises(EngineError, match="75"):
        open_fake(path, "tensorrt", cuda=FakeCuda(75))


def test_damaged_stale_and_missing_files(tmp_path):
    path = write(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(EngineError, match="truncated"):
        open_fake(path)
    path.write_bytes(content[:-1] + b" ")
    with pytest.raises(EngineError, match="SHA-256"):
        open_fake(path)
    path.write_bytes(b"something else entirely")
    bundle.write_sidecar(path, SPEC, bundle.EngineFacts("tensorrt-rtx", VERSION, (89,), "fp32", PROFILE, ""))
    with pytest.raises(EngineError, match="refused the engine"):
        open_fake(path)
    bundle.sidecar_path(path).unlink()
    with pytest.raises(EngineError, match="no sidecar"):
        open_fake(path)
    with pytest.raises(EngineError, match="no engine"):
        open_fake(tmp_path / "none.engine")


def test_an_engine_of_another_model_is_refused_and_leaks_nothing(tmp_path):
    cuda = FakeCuda(89)
    with pytest.raises(SpecError, match="promises"):
        open_fake(write(tmp_path, spec=SPEC.with_decode(in_graph=True)), cuda=cuda)
    assert cuda.alive == 0


@pytest.mark.parametrize("kind", ["Builder", "Runtime"])
def test_a_library_that_gives_no_object_is_named(kind):
    trt = fake_trt("tensorrt", FakeCuda(), model)

    def nothing(logger):
        logger.log(SimpleNamespace(name="ERROR"), "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")  # its words, of TensorRT 8.5.3

    nothing.__name__ = kind
    setattr(trt.module, kind, nothing)
    with pytest.raises(EngineError) as caught:
        trt.create_builder() if kind == "Builder" else trt.create_runtime()
    for part in (f"made no {kind}", "CUDA initialization failure with error: 35", "detrt doctor"):
        assert part in str(caught.value)


def test_the_real_library_without_a_gpu(tmp_path):
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs detrt[rtx]")
    from detrt.backends.tensorrt.bindings import load_trt
    from detrt.backends.tensorrt.cuda import Cuda

    if importlib.util.find_spec("cuda") is not None and Cuda().device_count():
        pytest.skip("this machine has a GPU")
    trt = load_trt("tensorrt-rtx")
    path = write(tmp_path, runtime_version=trt.version)
    # A fake device, so that the library itself is asked and says what it does not like.
    with pytest.raises(EngineError, match="refused the engine"):
        TensorRTSession(path, trt=trt, cuda=FakeCuda(89))


@pytest.mark.skipif(importlib.util.find_spec("cuda") is not None, reason="cuda-python is installed")
def test_without_cuda_python(tmp_path, monkeypatch):
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs detrt[rtx]")
    from detrt.backends.tensorrt.bindings import load_trt

    monkeypatch.setattr("detrt.system.has_driver", lambda: True)
    path = write(tmp_path, runtime_version=load_trt("tensorrt-rtx").version)
    with pytest.raises(MissingPackageError, match=r"\.\[gpu\]"):
        TensorRTSession(path)


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="tensorrt is installed")
def test_without_tensorrt(tmp_path, monkeypatch):
    monkeypatch.setattr("detrt.system.has_driver", lambda: True)
    with pytest.raises(MissingPackageError, match=r"\.\[trt\]"):
        TensorRTSession(write(tmp_path, target="tensorrt"))


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx"])
def test_without_a_driver_no_package_is_asked_for(tmp_path, monkeypatch, target):
    monkeypatch.setattr("detrt.system.has_driver", lambda: False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(EngineError, match="there is no CUDA device.*no driver for it; run the ONNX file: `backend=onnxruntime`$"):
        TensorRTSession(write(tmp_path, target=target))
