"""OpenVINO models: built from ONNX files, opened, run, and compared with ONNX Runtime and PyTorch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
if find_spec("openvino") is None:  # not importorskip, whose import would send telemetry
    pytest.skip("needs the 'openvino' extra", allow_module_level=True)
from cli_support import cli  # noqa: F401 - a fixture
from onnx_models import make_model, make_spec, ranked_model
from serve_support import png

from detrt.backends.compare import output_differences
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.open import open_session
from detrt.backends.openvino import build as builder
from detrt.backends.openvino import runtime, worker
from detrt.backends.openvino.config import OpenVinoConfig, model_name
from detrt.backends.openvino.opening import PREFERRED_ON_CPU
from detrt.backends.openvino.session import OpenVinoSession
from detrt.backends.prompted import PromptedSession
from detrt.bundle import Bundle, CpuSpeed
from detrt.data.images import FAST_FORMATS, open_image
from detrt.detector import Detector
from detrt.errors import EngineError, ExportError, MissingPackageError, SessionError, SpecError
from detrt.pipeline import build
from detrt.precision import PrecisionConfig
from detrt.serve.config import ServedModel
from detrt.serve.messages import ImageTask, Setup
from detrt.serve.worker import Model, decode_image
from detrt.system import processor_name

SPEC = make_spec(dynamic=True)
RED = np.zeros((16, 24, 3), np.uint8)
RED[..., 0] = 255


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A bundle with an ONNX file and its OpenVINO model."""
    place = tmp_path_factory.mktemp("openvino")
    (place / "given.onnx").write_bytes(make_model(SPEC))
    build(place / "given.onnx", place / "bundle", targets=(OpenVinoConfig(),))
    record_speed(place / "bundle", None)  # the faster one of such small models may be either
    return place / "bundle"


def record_speed(folder, speed):
    """Make the bundle one that was built with these times; None: by a version without them."""
    bundle = Bundle.open(folder)
    timed = [
        replace(entry, engine=replace(entry.engine, cpu_speed=speed)) if entry.kind == "openvino" else entry
        for entry in bundle.files
    ]
    path = replace(bundle, files=tuple(timed)).save()
    if speed is None:
        manifest = json.loads(path.read_text())
        for entry in manifest["files"]:
            (entry["engine"] or {}).pop("cpu_speed", None)
        path.write_text(json.dumps(manifest))


def feeds(batch=1, height=8, width=12, seed=0):
    return {"pixel_values": np.random.default_rng(seed).integers(0, 256, (batch, 3, height, width), np.uint8)}


def test_bundle_and_sidecar(folder):
    bundle = Bundle.open(folder)
    (entry,), (weights,) = bundle.of_kind("openvino"), bundle.of_kind("openvino-weights")
    assert (entry.path, weights.path) == ("model.openvino.xml", "model.openvino.bin")
    facts = entry.engine
    assert facts.target == "openvino" and facts.precision == "fp32" and facts.runtime_version == runtime.version()
    assert facts.options["opset"] == 18 and facts.options["weights_sha256"] == weights.sha256
    assert facts.inputs[0]["shape"] == ["batch", 3, "height", "width"]
    sidecar = json.loads((folder / "model.openvino.xml.json").read_text())
    assert sidecar["sha256"] == entry.sha256 and sidecar["spec"] == SPEC.to_dict()
    timed = sidecar["engine"]["cpu_speed"]
    assert (timed["processor"], timed["batch"]) == (processor_name(), 1) and timed["threads"] >= 1
    assert timed["openvino_ms"] > 0 and timed["onnxruntime_ms"] > 0


@pytest.mark.parametrize("shape", [(1, 8, 12), (3, 8, 12), (2, 20, 16)])
def test_any_batch_and_size_equal_onnx_runtime(folder, shape):
    with OpenVinoSession(folder / "model.openvino.xml") as session, OnnxSession(folder / "model.onnx") as reference:
        assert session.info.name == "openvino-cpu" and session.inputs == reference.inputs and session.outputs == reference.outputs
        want, got = (one.run(feeds(*shape)) for one in (reference, session))
        assert max(output_differences(want, got, 1e-6).values()) <= 1e-6


def test_results_belong_to_the_caller_and_batches_overlap(folder):
    with OpenVinoSession(folder / "model.openvino.xml", performance="throughput", streams=2, threads=2) as session:
        assert session.info.parallel == session.compiled.get_property("NUM_STREAMS") <= 2
        begun = [session.start(feeds(seed=seed)) for seed in range(4)]
        found = [one.outputs()["logits"] for one in reversed(begun)][::-1]
        for seed, logits in enumerate(found):
            np.testing.assert_array_equal(logits, session.run(feeds(seed=seed))["logits"])
    with pytest.raises(SessionError, match="is closed"):
        session.run(feeds())


def test_detector_keeps_several_batches_on_their_way(folder):
    images = [np.roll(RED, shift, axis=2) for shift in (0, 1, 2, 0, 1)]
    found = {}
    for performance in ("latency", "throughput"):
        with Detector(
            OpenVinoSession(folder / "model.openvino.xml", performance=performance, threads=2), threshold=0.6
        ) as detector:
            assert detector.ahead == detector.session.info.parallel
            found[performance] = [one.labels for one in detector(images)]
    assert (
        found["latency"]
        == found["throughput"]
        == [(name,) * len(found["latency"][0]) for name in ("red", "green", "blue", "red", "green")]
    )


def test_throughput_is_chosen_when_a_model_is_opened(folder, monkeypatch):
    with open_session(folder, threads=2, performance="throughput", streams=2) as session:
        assert session.compiled.get_property("PERFORMANCE_HINT") == "THROUGHPUT"
        assert session.info.parallel == session.compiled.get_property("NUM_STREAMS")
    with Detector(folder / "model.openvino.xml", threads=2, performance="throughput") as detector:
        assert detector.session.compiled.get_property("PERFORMANCE_HINT") == "THROUGHPUT"
    with pytest.raises(SessionError, match=r"`performance` is for OpenVINO.*onnxruntime-cpu"):
        open_session(folder, backend="onnxruntime", performance="latency")
    with pytest.raises(EngineError, match="latency or throughput"):
        open_session(folder, performance="fast")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(SessionError, match=r"`performance` is for OpenVINO.*\[openvino\]"):
        open_session(folder, performance="throughput")


def test_a_worker_of_the_server_divides_a_batch_among_the_streams(folder, monkeypatch):
    images = [png(np.roll(RED, shift, axis=2)) for shift in range(3)]
    found = {}
    for performance, parts in (("latency", [3]), ("throughput", [2, 1])):
        run = {"performance": performance, **({} if performance == "latency" else {"streams": 2})}
        served = ServedModel("colours", str(folder))
        setup = Setup((served,), "cpu", 2, "auto", run, None, 4, 10**6, "cpu", FAST_FORMATS, 8)
        model, ran = Model(served, setup), []
        # OpenVINO may choose fewer streams than it is asked for, where there are fewer cores.
        monkeypatch.setattr(model.session, "_info", replace(model.session.info, parallel=len(parts)))
        tasks = [ImageTask(image, 0.6) for image in images]
        decoded = [decode_image(setup, (task, open_image(task.data))) for task in tasks]
        answers = model.detect(tasks, decoded, ran.append)
        found[performance] = [json.loads(answer.value)["detections"] for answer in answers]
        model.close()
        assert ran == parts
    assert found["latency"] == found["throughput"] and all(found["latency"])


def test_a_cpu_takes_the_openvino_model_and_says_so(folder):
    for device in (None, "cpu"):
        with open_session(folder, device=device) as session:
            assert session.info.name == "openvino-cpu" and session.info.note == PREFERRED_ON_CPU
    with open_session(folder, backend="onnxruntime") as session:
        assert session.info.name == "onnxruntime-cpu" and session.info.note == ""
    with open_session(folder, spec=replace(SPEC, name="other")) as session:
        assert session.info.name == "onnxruntime-cpu" and session.spec.name == "other"
    with open_session(folder / "model.openvino.xml") as session:
        assert session.info.note == ""
    with pytest.raises(SpecError, match="a spec is for the ONNX file"):
        open_session(folder, backend="openvino", spec=SPEC)


def test_a_cpu_takes_the_backend_that_was_faster_on_it(folder, tmp_path, cli):
    timed = tmp_path / "timed"
    shutil.copytree(folder, timed)
    here = CpuSpeed(processor_name(), 3, 1, 20.25, 10.5, "1.31.1")
    for speed, opened, words in (
        (
            here,
            "onnxruntime-cpu",
            r"ONNX file.*on this processor.*OpenVINO 20.25 ms, ONNX Runtime 10.5 ms, 3 threads.*`backend=openvino`",
        ),
        (
            replace(here, onnxruntime_ms=30.0),
            "openvino-cpu",
            r"OpenVINO model.*OpenVINO 20.25 ms, ONNX Runtime 30 ms.*`backend=onnxruntime`",
        ),
        (
            replace(here, processor="Another CPU"),
            "openvino-cpu",
            r"another processor \(Another CPU.*build\(BUNDLE, targets=openvino\)`",
        ),
    ):
        record_speed(timed, speed)
        with open_session(timed) as session:
            assert session.info.name == opened and re.search(words, session.info.note)
    record_speed(timed, here)
    with open_session(timed, performance="latency") as session:
        assert session.info.name == "openvino-cpu" and "`performance`" in session.info.note
    with open_session(timed, backend="openvino") as session:
        assert session.info.name == "openvino-cpu" and session.info.note == ""
    shown = json.loads(cli("info", timed, "--json", "-").out)
    assert [row["engine"]["cpu_speed"] for row in shown["files"] if row["kind"] == "openvino"] == [asdict(here)]
    assert "20.25 ms on " in cli("info", timed).out
    path = timed / "detrt.json"
    path.write_text(path.read_text().replace('"threads": 3', '"threads": "three"'))
    with pytest.raises(SpecError, match="cpu_speed: threads"):
        open_session(timed)


@pytest.mark.slow
def test_an_added_model_is_timed_beside_the_fused_graph(exported, tmp_path, monkeypatch):
    bundle = tmp_path / "bundle"
    build(exported("embedded:shapes").path, bundle, targets=["onnx"])
    asked = []
    monkeypatch.setattr(builder, "run_child", lambda command, request, **options: asked.append(request) or 1 / 0)
    for choices, timed in ((OpenVinoConfig(), True), (OpenVinoConfig(performance="throughput"), False)):
        with pytest.raises(ZeroDivisionError):
            build(bundle, targets=(choices,))
        assert asked[-1]["timed"] is timed and asked[-1]["fused"] == str(bundle / "model.onnxruntime.onnx")


@pytest.mark.slow
def test_a_graph_that_onnx_runtime_cannot_run_is_compared(exported, tmp_path):
    path = exported("rt_detr_v2").path
    build(path, tmp_path, targets=(OpenVinoConfig(),), precision=PrecisionConfig("bf16"))
    with pytest.raises(SessionError, match="its CPU has none for BF16"):
        open_session(tmp_path, backend="onnxruntime")
    assert Bundle.open(tmp_path).of_kind("openvino")[0].engine.cpu_speed is None
    with open_session(tmp_path, backend="onnxruntime", emulate_low_precision=True) as session:
        assert "rounded after every operation" in session.info.note
        assert all(np.isfinite(one).all() for one in session.run(feeds(height=64, width=64)).values())


def test_without_the_package_the_onnx_file_runs(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with open_session(folder) as session:
        assert session.info.name == "onnxruntime-cpu" and "[openvino]" in session.info.note
    with pytest.raises(EngineError, match=r"no OpenVINO model of the bundle.*\[openvino\]"):
        open_session(folder, backend="openvino")
    with pytest.raises(MissingPackageError, match=r"\[openvino\]"):
        open_session(folder / "model.openvino.xml")


@pytest.mark.parametrize("device", ["npu", "xpu:3", "cuda:0"])
def test_a_device_that_is_not_there(folder, device):
    if device.partition(":")[0].replace("xpu", "gpu").upper() in {name.partition(".")[0] for name in runtime.devices()}:
        pytest.skip(f"OpenVINO finds {device} here")
    with pytest.raises((EngineError, SessionError), match=device):
        open_session(folder, backend="openvino", device=device)


def test_damaged_files(folder, tmp_path):
    for name in ("model.openvino.xml", "model.openvino.bin"):
        copy = tmp_path / name.replace(".", "-")
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes() + b"\0" * (file.name == name))
        with pytest.raises((EngineError, SpecError), match=f"{name}.*build"):
            open_session(copy, backend="openvino")


def test_feeds_are_checked(folder):
    with OpenVinoSession(folder / "model.openvino.xml") as session:
        with pytest.raises(SessionError, match="must be uint8"):
            session.run({"pixel_values": np.zeros((1, 3, 8, 12), np.float32)})
        with pytest.raises(SessionError, match="missing"):
            session.run({})


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"performance": "fast"}, "latency or throughput"),
        ({"streams": 2}, "without `performance=throughput`"),
        ({"performance": "throughput", "streams": 0}, "from 1 to"),
        ({"timeout_seconds": 0}, "more than 0"),
        ({"timeout_seconds": "60"}, "more than 0"),
    ],
)
def test_choices_are_checked(choices, words):
    with pytest.raises(EngineError, match=words):
        OpenVinoConfig(**choices)


def test_names():
    assert [model_name(), model_name("int8"), model_name(part="text")] == [
        "model.openvino.xml",
        "model.openvino.int8.xml",
        "text.openvino.xml",
    ]


def test_types_follow_the_processor(monkeypatch):
    class Device:
        """A processor with these capabilities."""

        def __init__(self, *capabilities):
            self.capabilities = capabilities

        def get_property(self, device, name):
            return list(self.capabilities) if name == "OPTIMIZATION_CAPABILITIES" else "Some CPU"

    monkeypatch.setattr(runtime, "core", lambda: Device("FP32", "INT8"))
    assert runtime.inference_type("fp32", "CPU") == ("f32", "")
    kind, note = runtime.inference_type("bf16", "CPU")
    assert kind == "f32" and "Some CPU has no BF16" in note
    monkeypatch.setattr(runtime, "core", lambda: Device("FP32", "INT8", "BF16", "FP16"))
    # Never by itself: an FP32 model, and what an INT8 model does not quantize, stays FP32 where the processor has BF16.
    assert [runtime.inference_type(kind, "CPU")[0] for kind in ("fp32", "bf16", "fp16", "int8")] == ["f32", "bf16", "f16", "f32"]


def test_fp32_is_set_explicitly(folder):
    with OpenVinoSession(folder / "model.openvino.xml") as session:
        assert session.compiled.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"


def test_model_cache(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(runtime.CACHE_VARIABLE, str(tmp_path / "cache"))
    OpenVinoSession(folder / "model.openvino.xml").close()
    with OpenVinoSession(folder / "model.openvino.xml") as session:
        assert session.compiled.get_property("LOADED_FROM_CACHE")
        assert list((tmp_path / "cache").glob("*.blob"))
        want = OnnxSession(folder / "model.onnx").run(feeds())
        assert max(output_differences(want, session.run(feeds()), 1e-6).values()) <= 1e-6


def test_compressed_weights(folder, tmp_path):
    built = builder.build_openvino(folder / "model.onnx", tmp_path / "half.xml", OpenVinoConfig(compress_weights=True), SPEC)
    assert built.facts.options["compress_weights"]
    with OpenVinoSession(built.path) as half, OnnxSession(folder / "model.onnx") as reference:
        assert max(output_differences(reference.run(feeds()), half.run(feeds()), 1e-3).values()) <= 1e-3


def test_refused_before_and_during_the_build(tmp_path):
    from detrt.models.contract import ExportConfig

    (tmp_path / "bad.onnx").write_bytes(make_model(SPEC, node="Strange", domain="somewhere"))
    with pytest.raises(EngineError, match=r"OpenVINO \d+.* cannot read 'bad.onnx'.*Strange"):
        builder.build_openvino(tmp_path / "bad.onnx", tmp_path / "bad.xml", OpenVinoConfig(), SPEC)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.onnx"]
    with pytest.raises(ExportError, match="choose `msda=gather` for OpenVINO"):
        build(
            "random:rt_detr_v2/tiny",
            tmp_path / "out",
            targets=(OpenVinoConfig(),),
            export=ExportConfig(msda="plugin"),
        )


def test_scores_that_tie_are_no_difference(tmp_path):
    """OpenVINO and ONNX Runtime order equal scores otherwise, and LW-DETR gives each rank an embedding of its own."""
    (tmp_path / "tied.onnx").write_bytes(ranked_model(SPEC, (0.5, 0.0, 0.0, 0.5)))
    built = builder.build_openvino(tmp_path / "tied.onnx", tmp_path / "tied.xml", OpenVinoConfig(), SPEC)
    assert max(built.errors.values()) < 1e-5
    feeds = {"pixel_values": np.full((1, 3, 8, 12), 100, np.uint8)}
    with OpenVinoSession(built.path) as session, OnnxSession(tmp_path / "tied.onnx") as reference:
        assert max(output_differences(reference.run(feeds), session.run(feeds), 1e-3).values()) > 0.1, "no other order"
    (tmp_path / "other.onnx").write_bytes(ranked_model(SPEC, (0.5, 0.0, 0.0, 0.5), 1.5))
    found = worker._compare(tmp_path / "other.onnx", built.path, SPEC, built.facts, False)
    assert max(found.values()) > 0.1, "the model of another graph"


def test_import_sends_no_telemetry(tmp_path):
    """OpenVINO's own import writes an identifier into the home folder and sends an event."""
    code = "from detrt.backends.openvino import runtime; import sys; runtime.core(); print('openvino_telemetry' in sys.modules)"
    environment = {"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False" and not list(tmp_path.iterdir())


def test_prompted_model_has_two(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the 'text' extra")
    from text_cases import colour_image
    from text_models import write_text_model

    path = write_text_model(tmp_path / "given")
    build(path, tmp_path / "bundle", targets=(OpenVinoConfig(),))
    assert [entry.path for entry in Bundle.open(tmp_path / "bundle").of_kind("text-openvino")] == ["text.openvino.xml"]
    images, found = [colour_image("red", "black", "blue")], {}
    for ref, backend in ((tmp_path / "bundle", "openvino"), (tmp_path / "bundle/model.openvino.xml", "auto"), (path, "auto")):
        session = open_session(ref, backend=backend)
        assert isinstance(session, PromptedSession)
        name = session.text_encoder.info.name
        with Detector(session, prompt="red. blue.", threshold=0.3) as detector:
            found[f"{Path(ref).name} {name}"] = [(one.labels, one.scores.round(4).tolist()) for one in detector(images)]
    assert list(found) == ["bundle openvino-cpu", "model.openvino.xml openvino-cpu", "model.onnx onnxruntime-cpu"]
    assert len({str(one) for one in found.values()}) == 1 and next(iter(found.values()))[0][0]
    with (tmp_path / "bundle" / "text.openvino.bin").open("r+b") as weights:
        weights.write(b"\xff")
    with pytest.raises(SpecError, match=r"text.openvino.bin.*SHA-256"):
        open_session(tmp_path / "bundle", backend="openvino")


@pytest.mark.parametrize("name", ["detr", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rt_detr_v2", "lw_detr"))])
def test_families_equal_pytorch(name, tiny, exported, tmp_path):
    from detrt.backends.torch.session import TorchSession

    report = exported(name)
    built = builder.build_openvino(report.path, tmp_path / "model.openvino.xml", OpenVinoConfig(), report.spec)
    side = max(report.spec.input.height, 64) // 2 // 32 * 32 or 32
    batch = {"pixel_values": np.random.default_rng(0).integers(0, 256, (2, 3, side, side * 2), np.uint8)}
    if report.spec.input.mask:
        batch["pixel_mask"] = np.ones((2, side, side * 2), np.int64)
        batch["pixel_mask"][1, :, side:] = 0
    with OpenVinoSession(built.path) as session, TorchSession(tiny(name), spec=report.spec) as reference:
        assert max(output_differences(reference.run(batch), session.run(batch), 1e-3).values()) <= 1e-3


def test_signed_activations_behind_a_concat(tmp_path):
    """Of a signed pair behind a Concat OpenVINO 2026.4 computes something else; as unsigned numbers it is right."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from detrt import graph
    from detrt.graph.unsigned import unsigned_activations

    random = np.random.default_rng(0)
    constants = {
        "scale": np.array(0.05, np.float32),
        "zero": np.array(0, np.int8),
        # Without VNNI two products of a larger weight are clipped to 16 bits, whatever the zero point (docs/results/cpu.md).
        "weights": random.integers(-64, 65, (8, 8, 3, 3), np.int8),
        "weight_scale": np.full(8, 0.01, np.float32),
        "weight_zero": np.zeros(8, np.int8),
    }
    nodes = [
        helper.make_node("Relu", ["x"], ["positive"]),
        helper.make_node("Concat", ["positive", "x"], ["joined"], axis=1),
        helper.make_node("QuantizeLinear", ["joined", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["rounded"]),
        helper.make_node("DequantizeLinear", ["weights", "weight_scale", "weight_zero"], ["w"], axis=0),
        helper.make_node("Conv", ["rounded", "w"], ["y"], pads=[1, 1, 1, 1]),
    ]
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    value = lambda name, channels: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", channels, 12, 12])  # noqa: E731
    model = helper.make_model(
        helper.make_graph(nodes, "test", [value("x", 4)], [value("y", 8)], tensors),
        opset_imports=[helper.make_opsetid("", 19)],
        ir_version=9,
    )
    onnx.checker.check_model(model)
    signed = model.SerializeToString()
    assert unsigned_activations(model) == 1 and unsigned_activations(model) == 0
    graph.save(model, tmp_path / "unsigned.onnx")
    x = random.normal(0, 2, (2, 4, 12, 12)).astype(np.float32)
    import onnxruntime

    want = onnxruntime.InferenceSession(signed, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    shifted = onnxruntime.InferenceSession(str(tmp_path / "unsigned.onnx"), providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )
    np.testing.assert_allclose(shifted[0], want, atol=1e-4)
    compiled = runtime.core().compile_model(str(tmp_path / "unsigned.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    got = compiled.create_infer_request().infer({"x": x})[0]
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()
    kernels = [str(op.get_rt_info()["primitiveType"].astype(str)) for op in compiled.get_runtime_model().get_ordered_ops()]
    assert any(kernel.endswith("I8") for kernel in kernels), "no integer kernel runs, so this compares nothing"


def test_commands(folder, tmp_path, cli):
    """build into a bundle that is there, info, bench and detect."""
    from PIL import Image

    grown = tmp_path / "grown"
    build(folder / "model.onnx", grown)
    done = cli("build", grown, "--target", "openvino", "--performance", "throughput")
    assert done.code == 0, done.err
    assert Bundle.open(grown).of_kind("openvino")[0].engine.options["performance"] == "throughput"
    shown = json.loads(cli("info", grown / "model.openvino.xml", "--json", "-").out)
    assert shown["target"] == "openvino" and shown["version"] == runtime.version()
    rows = json.loads(cli("bench", grown, "--repeats", "1", "--warmup", "0", "--json", "-").out)["rows"]
    assert {row["backend"] for row in rows} == {"openvino-cpu", "onnxruntime-cpu"}
    Image.fromarray(RED).save(tmp_path / "red.png")
    lines = {}
    for backend in ("openvino", "onnxruntime"):
        lines[backend] = cli("detect", grown, tmp_path / "red.png", "--backend", backend, "--json", "-").out
    assert lines["openvino"] and lines["openvino"] == lines["onnxruntime"]
    several = ("--performance", "throughput", "--streams", "2")
    assert cli("detect", grown, tmp_path / "red.png", *several, "--json", "-").out == lines["openvino"]
    refused = cli("build", grown, "--target", "onnx", "--streams", "2", code=2)
    assert refused.code == 2 and "--streams" in refused.err
    refused = cli("detect", grown, tmp_path / "red.png", "--streams", "2", code=2)
    assert "--streams 2 has no effect without --performance throughput" in refused.err
    refused = cli("detect", grown, tmp_path / "red.png", "--backend", "onnxruntime", "--performance", "latency", code=2)
    assert "--performance is for OpenVINO" in refused.err
