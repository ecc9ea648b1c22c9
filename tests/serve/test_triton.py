"""`detrt triton-repo`: read with Triton's own schema, compared with the model's tensors, and run step by step as Triton does.

Triton itself is not run: its backends are stood in for by ONNX Runtime and by calling the Python models.
"""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
model_config = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="tritonclient[grpc] is not installed")
from cli_support import cli, place, snapshot  # noqa: F401 - fixtures
from google.protobuf import text_format

from detrt import Detector, files
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.tensorrt.config import EngineConfig
from detrt.backends.tensorrt.profile import NetworkTensor, plan_profile
from detrt.bundle import Bundle, BundleFile, EngineFacts
from detrt.errors import EngineError, OutputError, SpecError
from detrt.serve.triton import write_triton_repo
from detrt.serve.triton_config import TritonConfig
from detrt.spec import TextSpec

NUMPY = {"TYPE_UINT8": "uint8", "TYPE_INT64": "int64", "TYPE_FP32": "float32", "TYPE_STRING": "object"}


def read(path):
    return text_format.Parse(Path(path).read_text("utf-8"), model_config.ModelConfig())


def type_of(tensor):
    return model_config.DataType.Name(tensor.data_type)


class PythonBackend(types.ModuleType):
    """What Triton gives to its Python models, as far as ours use it."""

    def __init__(self):
        super().__init__("triton_python_backend_utils")
        backend = self

        class Tensor:
            def __init__(self, name, value):
                self._name, self._value = name, value

            def name(self):
                return self._name

            def as_numpy(self):
                return self._value

        class TritonError:
            def __init__(self, message):
                self.text = message

            def message(self):
                return self.text

        class InferenceResponse:
            def __init__(self, output_tensors, error=None):
                self.tensors, self.error = output_tensors, error

        backend.Tensor, backend.TritonError, backend.InferenceResponse = Tensor, TritonError, InferenceResponse
        backend.get_input_tensor_by_name = lambda request, name: request[name]


class Ensemble:
    """Runs an ensemble by its configuration, and compares every tensor with what the configurations promise."""

    def __init__(self, repo, name, monkeypatch):
        self.backend = PythonBackend()
        monkeypatch.setitem(sys.modules, "triton_python_backend_utils", self.backend)
        for module in ("detrt.serve.triton_models.preprocess", "detrt.serve.triton_models.postprocess"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        self.repo, self.config = Path(repo), read(Path(repo) / name / "config.pbtxt")
        self.configs = {step.model_name: read(self.repo / step.model_name / "config.pbtxt") for step in self.steps}
        self.models = {name: self._open(name, config) for name, config in self.configs.items()}

    @property
    def steps(self):
        return self.config.ensemble_scheduling.step

    def _open(self, name, config):
        version = self.repo / name / "1"
        if config.backend == "onnxruntime":
            return OnnxSession(version / config.default_model_filename, threads=1)
        spec = importlib.util.spec_from_file_location(f"triton_{name}", version / "model.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.TritonPythonModel()
        values = {key: {"string_value": value.string_value} for key, value in config.parameters.items()}
        given = {
            "model_repository": str(self.repo / name),
            "model_version": "1",
            "model_config": json.dumps({"parameters": values}),
        }
        model.initialize(given)
        return model

    def __call__(self, encoded):
        pool = {"image": np.array(encoded, object).reshape(-1, 1)}
        self.check(self.config.input, pool, self.config.max_batch_size)
        for step in self.steps:
            config, model = self.configs[step.model_name], self.models[step.model_name]
            given = {inner: pool[outer] for inner, outer in step.input_map.items()}
            self.check(config.input, given, config.max_batch_size)
            if isinstance(model, OnnxSession):
                # Triton's "reshape" gives a tensor of one number per image without that axis.
                found = {name: value.reshape(-1, 1) if value.ndim == 1 else value for name, value in model.run(given).items()}
            else:
                tensors = {name: self.backend.Tensor(name, value) for name, value in given.items()}
                (response,) = model.execute([tensors])
                if response.error is not None:
                    raise RuntimeError(response.error.message())
                found = {tensor.name(): tensor.as_numpy() for tensor in response.tensors}
            self.check(config.output, found, config.max_batch_size)
            pool |= {outer: found[inner] for inner, outer in step.output_map.items()}
        results = {tensor.name: pool[tensor.name] for tensor in self.config.output}
        self.check(self.config.output, results, self.config.max_batch_size)
        return results

    @staticmethod
    def check(promised, given, largest):
        assert {tensor.name for tensor in promised} <= set(given)
        for tensor in promised:
            value = given[tensor.name]
            assert value.dtype == NUMPY[type_of(tensor)], tensor.name
            assert 1 <= value.shape[0] <= largest and len(value.shape) == 1 + len(tensor.dims), tensor.name
            wrong = [(a, b) for a, b in zip(tensor.dims, value.shape[1:], strict=True) if a not in (-1, b)]
            assert not wrong, (tensor.name, list(tensor.dims), value.shape)


def encoded(*colours, size=(24, 16)):
    found = []
    for colour in colours:
        target = io.BytesIO()
        Image.new("RGB", size, colour).save(target, "PNG")
        found.append(target.getvalue())
    return found


def same(results, detections):
    for index, one in enumerate(detections):
        count = len(one)
        assert results["num_detections"][index].tolist() == [count]
        np.testing.assert_allclose(results["boxes"][index, :count], one.boxes_xyxy, atol=1e-4)
        np.testing.assert_allclose(results["scores"][index, :count], one.scores, atol=1e-6)
        assert results["labels"][index, :count].tolist() == one.class_ids.tolist()
        assert [name.decode() for name in results["names"][index, :count]] == list(one.labels)
        assert not results["scores"][index, count:].any() and not results["boxes"][index, count:].any()


def test_the_ensemble_gives_what_the_detector_gives(place, monkeypatch):
    done = write_triton_repo("bundle", "repo", TritonConfig(threshold=0.7, max_batch=4))
    assert sorted(path.name for path in Path("repo").iterdir()) == sorted(done.models)
    ensemble = Ensemble("repo", "bundle", monkeypatch)
    images = encoded("blue", "black", (0, 0, 200)) + encoded("blue", size=(9, 31))
    results = ensemble(images)
    with Detector.open("bundle", threshold=0.7) as detector:
        found = detector(images)
    assert [len(one) for one in found] == [2, 0, 1, 2] or sum(map(len, found)) > 2
    same(results, found)
    with pytest.raises(RuntimeError, match="not an image"):
        ensemble([b"text"])


@pytest.mark.parametrize(
    "name, decode",
    [
        ("detr", "raw"),
        ("yolos", "graph"),
        pytest.param("rt_detr_v2", "graph", marks=pytest.mark.slow),
        pytest.param("rt_detr_v2", "raw", marks=pytest.mark.slow),
        pytest.param("detr", "graph", marks=pytest.mark.slow),
    ],
)
def test_real_architectures(cli, tmp_path, monkeypatch, name, decode):
    """Square input, shortest edge with a mask, and shortest edge without one; boxes by the graph and outside."""
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    monkeypatch.chdir(tmp_path)
    cli("build", f"random:{name}/tiny", "-o", "b", "--target", "onnx", "--decode", decode, "--no-check", "--json", "-")
    write_triton_repo("b", "repo", TritonConfig(threshold=0.1, max_batch=4, name="net"))
    ensemble = Ensemble("repo", "net", monkeypatch)
    rng = np.random.default_rng(0)
    images = []
    for height, width in ((60, 80), (60, 80), (90, 70)):
        target = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(target, "PNG")
        images.append(target.getvalue())
    with Detector.open("b", threshold=0.1, batch_size=3) as detector:
        if name in ("detr", "yolos"):  # images of other sizes would be padded as neither of them is alone
            with pytest.raises(RuntimeError, match="one size"):
                ensemble(images)
            images = images[:2]
        found = detector(images)
        assert sum(map(len, found)) > 0
        same(ensemble(images), found)
    # Zeros in a mask would be a division by nothing.
    warm = read("repo/net_model/config.pbtxt").model_warmup
    assert [one.batch_size for one in warm] == ([] if name == "detr" else [1, 4])


def test_the_configuration_says_what_the_model_has(place):
    write_triton_repo("bundle", "repo")
    session, config = OnnxSession("model.onnx", threads=1), read("repo/bundle_model/config.pbtxt")
    assert [(t.name, NUMPY[type_of(t)]) for t in config.input] == [(i.name, i.dtype) for i in session.inputs]
    assert [(t.name, NUMPY[type_of(t)]) for t in config.output] == [(i.name, i.dtype) for i in session.outputs]
    for promised, info in zip([*config.input, *config.output], [*session.inputs, *session.outputs], strict=True):
        assert list(promised.dims) == [axis if isinstance(axis, int) else -1 for axis in info.shape[1:]]
    assert config.name == "bundle_model" and config.backend == "onnxruntime" and config.max_batch_size == 16
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    assert (Path("repo/bundle_model/1") / config.default_model_filename).read_bytes() == Path("bundle/model.onnx").read_bytes()


def test_choices(cli, place):
    options = ["--name", "net.v1", "--max-batch", 8, "--max-delay-ms", 0.5, "--preferred-batch", "4,8", "--queue", 100]
    out = cli("triton-repo", "bundle", "-o", "repo", *options, "--instances", 2, "--device", "0,1", "--model-only", "--json", "-")
    assert out.json["models"] == ["net.v1_model"] and out.json["command"] == "tritonserver --model-repository=repo"
    config = read("repo/net.v1_model/config.pbtxt")
    batching, (group,) = config.dynamic_batching, config.instance_group
    assert list(batching.preferred_batch_size) == [4, 8] and batching.max_queue_delay_microseconds == 500
    assert batching.default_queue_policy.max_queue_size == 100
    assert (group.count, list(group.gpus), group.kind) == (2, [0, 1], group.KIND_GPU)
    cli("triton-repo", "bundle", "-o", "repo", "--device", "cpu", "--no-warmup", "--plugin", "/lib/x.so", "-t", 0.25)
    config = read("repo/bundle_model/config.pbtxt")
    assert config.instance_group[0].kind == config.instance_group[0].KIND_CPU and not config.model_warmup
    assert read("repo/bundle_postprocess/config.pbtxt").parameters["threshold"].string_value == "0.25"
    assert "--backend-config=tensorrt,plugins=/lib/x.so\n" in Path("repo/bundle_model/config.pbtxt").read_text()
    assert len(list(Path("repo").iterdir())) == 5


def engines(*facts):
    """The bundle with empty engine files, whose facts are what the builder writes: EngineConfig's options and plan_profile's profile."""
    bundle = Bundle.open("bundle")
    session, entries = OnnxSession("model.onnx", threads=1), []
    described = [
        [{"name": i.name, "dtype": i.dtype, "shape": list(i.shape)} for i in side] for side in (session.inputs, session.outputs)
    ]
    tensors = [NetworkTensor(i.name, i.dtype, tuple(n if isinstance(n, int) else -1 for n in i.shape)) for i in session.inputs]
    for target, sm, batch, plugins in facts:
        path = bundle.folder / f"model.{target}-sm{sm}.engine"
        path.write_bytes(f"engine {sm}".encode())
        config = EngineConfig(target, batch=batch, plugins=plugins)
        profile = plan_profile(tensors, config, bundle.spec)
        engine = EngineFacts(
            target, "10.13.0", (sm,), "fp32", profile, "", options=config.to_dict(), inputs=tuple(described[0]), outputs=tuple(described[1])
        )  # fmt: skip
        entries.append(BundleFile("engine", path.name, files.sha256_of(path), path.stat().st_size, engine))
    replace(bundle, files=(*bundle.files, *entries)).save()


def test_engines(place):
    engines(("tensorrt", 90, (1, 1, 8), ()), ("tensorrt", 89, (1, 4, 4), ()), ("tensorrt-rtx", 86, (1, 1, 8), ()))
    done = write_triton_repo("bundle", "repo")
    config = read("repo/bundle_model/config.pbtxt")
    assert config.backend == "tensorrt" and config.max_batch_size == 4
    assert dict(config.cc_model_filenames) == {"9.0": "model.plan", "8.9": "model.sm89.plan"}
    assert Path("repo/bundle_model/1/model.sm89.plan").read_bytes() == b"engine 89"
    assert any("tensorrt-rtx are left out" in note for note in done.notes) and any("10.13.0" in note for note in done.notes)
    with pytest.raises(SpecError, match="at most 4"):
        write_triton_repo("bundle", "other", TritonConfig(max_batch=5))
    write_triton_repo("bundle", "other", TritonConfig(backend="onnxruntime", max_batch=5))
    assert read("other/bundle_model/config.pbtxt").backend == "onnxruntime"
    write_triton_repo("bundle", "cpu", TritonConfig(devices=("cpu",)))
    assert read("cpu/bundle_model/config.pbtxt").backend == "onnxruntime"


def test_an_engine_with_a_plugin(place):
    library = place / "libdetrt_plugin.so"
    library.write_bytes(b"")
    engines(("tensorrt", 90, (1, 1, 8), (library,)))
    with pytest.raises(SpecError, match=r"libdetrt_plugin\.so.*libdetrt_plugin_triton\.so: --plugin"):
        write_triton_repo("bundle", "repo")
    with pytest.raises(SpecError, match=r"only opens it; give libdetrt_plugin_triton\.so"):
        write_triton_repo("bundle", "repo", TritonConfig(plugin="/opt/libdetrt_plugin.so"))
    done = write_triton_repo("bundle", "repo", TritonConfig(plugin="/opt/plugin.so"))
    assert done.command == "tritonserver --model-repository=repo --backend-config=tensorrt,plugins=/opt/plugin.so"


def test_a_graph_with_plugin_nodes_is_not_for_onnx_runtime(place):
    onnx = pytest.importorskip("onnx")
    bundle = Bundle.open("bundle")
    model = onnx.load("bundle/model.onnx")
    node = onnx.helper.make_node("MSDeformAttn", [], [], domain="detrt")
    with_nodes = onnx.ModelProto()
    with_nodes.CopyFrom(model)
    with_nodes.graph.node.append(node)
    path = bundle.folder / "model.onnx"
    path.write_bytes(with_nodes.SerializeToString())
    entry = BundleFile("onnx", path.name, files.sha256_of(path), path.stat().st_size)
    replace(bundle, files=(entry,)).save()
    with pytest.raises(SpecError, match="MSDeformAttn.*--msda auto"):
        write_triton_repo("bundle", "repo")


def test_an_engine_without_single_images_is_refused(place):
    engines(("tensorrt", 90, (4, 4, 4), ()))
    with pytest.raises(SpecError, match=r"batches of 4.*--batch 1,4,4"):
        write_triton_repo("bundle", "repo")


def test_refusals(cli, place):
    before = snapshot(place)
    for options, names, advice in (
        (["--backend", "openvino"], "'openvino'", "onnxruntime"),
        (["--backend", "tensorrt"], "no engine", "--target tensorrt"),
        (["--name", "a/b"], "'a/b'", "letters"),
        (["--max-batch", 0], "0", "1 to 4096"),
        (["--max-delay-ms", -1], "-1", "0 to 10000"),
        (["--preferred-batch", "4,x"], "'4,x'", "4,8"),
        (["--preferred-batch", "32"], "32", "--max-batch"),
        (["--device", "0,cpu"], "'cuda:0,cpu'", "not on both"),
        (["--device", "0,xpu"], "not on xpu", "NVIDIA GPUs or on the CPU"),
        (["--device", "npu"], "'npu'", "NVIDIA GPUs or on the CPU"),
        (["--threshold", 0.3, "--model-only"], "--threshold 0.3", "leave it out"),
        (["--threshold", 2], "2", "0 to 1"),
        (["--instances", 0], "0", "at least 1"),
    ):
        cli.refused("triton-repo", "bundle", "-o", "repo", *options, names=names, advice=advice)
    cli.refused("triton-repo", "in", "-o", "repo", names="'in'", advice="detrt build")
    cli.refused("triton-repo", "bundle", "-o", "model.onnx", names="model.onnx", advice="file|give another")
    assert snapshot(place) == before
    Path("bundle/model.onnx").write_bytes(b"changed")
    cli.refused("triton-repo", "bundle", "-o", "repo", names="model.onnx", advice="build it again")


def test_what_is_there_stays(place):
    write_triton_repo("bundle", "repo")
    before = snapshot(place / "repo")
    with pytest.raises(OutputError, match="there already"):
        write_triton_repo("bundle", "repo")
    assert snapshot(place / "repo") == before
    with pytest.raises(EngineError):
        write_triton_repo("bundle", "repo", TritonConfig(name="more", backend="tensorrt"))
    assert snapshot(place / "repo") == before


def test_a_model_with_masks(cli, place):
    bundle = Bundle.open("bundle")
    decode = replace(bundle.spec.decode, mask_stride=4)
    replace(bundle, spec=replace(bundle.spec, task="instance-segmentation", decode=decode)).save()
    cli.refused("triton-repo", "bundle", "-o", "repo", names="with masks", advice="detrt serve bundle")
    assert not Path("repo").exists()


def test_a_model_that_takes_a_prompt(cli, place):
    bundle = Bundle.open("bundle")
    replace(bundle, spec=replace(bundle.spec, text=TextSpec("tokens", 256, 256), labels={})).save()
    cli.refused("triton-repo", "bundle", "-o", "repo", names="'bundle'", advice="detrt serve bundle")
    assert not Path("repo").exists()
