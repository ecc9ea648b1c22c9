"""The target inductor on a CPU: capture, passes, types, one compiled package, and its session."""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch._inductor.config

from detrt.backends.compare import output_differences
from detrt.backends.inductor import compile
from detrt.backends.inductor import session as session_module
from detrt.backends.inductor.build import PackageSource, build_package, check_packages, check_ready, fixed_spec
from detrt.backends.inductor.capture import CapturedGraph, capture, module_of
from detrt.backends.inductor.compile import compile_aoti, compile_artifact, options_for
from detrt.backends.inductor.config import CPU_FLAGS, InductorConfig, package_name
from detrt.backends.inductor.fusing import fuse_attention
from detrt.backends.inductor.nodes import MSDA, Constants, move_constants
from detrt.backends.inductor.package import load_package
from detrt.backends.inductor.passes import prepare, simplify
from detrt.backends.inductor.session import InductorSession
from detrt.backends.inductor.types import low_fraction, lower_types
from detrt.backends.inductor.worker import _require_batches, named
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.open import open_session
from detrt.bench.config import BenchConfig
from detrt.bench.run import bench
from detrt.bundle import Bundle, read_sidecar
from detrt.errors import EngineError, ExportError, GateError, SessionError
from detrt.models.contract import ExportConfig, exported_spec
from detrt.models.example_inputs import example_feeds
from detrt.models.load import load_source
from detrt.spec import Precision


def small(name: str, **choices):
    source = load_source(name)
    return source, exported_spec(source, ExportConfig(height=64, width=96, **choices))


def run(captured):
    with torch.no_grad():
        return captured.graph(*captured.inputs)


class Selecting(torch.fx.Interpreter):
    """Runs a graph and keeps the indices that its TopK nodes select, or makes them select `forced`: nearly equal scores change
    places with FP32's rounding, at the last place for a query that was left out."""

    def __init__(self, graph, forced=()):
        super().__init__(graph)
        self.forced, self.selected = list(forced), []

    def run_node(self, node):
        result = super().run_node(node)
        if node.op == "call_function" and "topk" in str(node.target):
            if self.forced:
                index = self.forced.pop(0)
                result = (self.fetch_args_kwargs_from_env(node)[0][0].gather(-1, index), index)
            self.selected.append(result[1])
        return result


def selecting(captured, forced=()):
    """(outputs, selected indices)."""
    interpreter = Selecting(captured.graph, forced)
    with torch.no_grad():
        return interpreter.run(*captured.inputs), interpreter.selected


def names(captured):
    return [str(node.target) for node in captured.graph.graph.nodes if node.op == "call_function"]


@pytest.fixture(autouse=True, scope="module")
def _no_trial_compilations():
    """PyTorch believes the processor's flags instead of compiling a program for each, and a package is loaded by what compiled it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # of the builder's process
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}):
            yield


@functools.cache
def simplified(name):
    """(captured graph after `simplify`, before it its outputs and selections, and its number of nodes); do not change them."""
    captured = capture(*small(f"random:{name}/tiny"), (2, 2))
    before, count = selecting(captured), len(captured.graph.graph.nodes)
    simplify(captured.graph)
    return captured, before, count


@pytest.mark.skipif(not hasattr(torch._inductor.config.triton, "enable_pdl"), reason="this PyTorch has no such option")
@pytest.mark.parametrize(
    ("batch", "ranges", "early"),
    [(1, {}, True), (2, {}, True), (4, {}, False), (1, {"batch": (1, 2)}, True), (1, {"batch": (1, 8)}, False)],
)
def test_kernels_start_early_for_batches_of_few_pixels(tmp_path, monkeypatch, batch, ranges, early):
    """Up to 1 048 576 pixels of the largest batch."""
    given = {}
    monkeypatch.setattr(compile, "compile_artifact", lambda captured, path, options: given.update(options))
    image = torch.empty(batch, 3, 640, 640, device="meta")
    compile.compile_package(CapturedGraph(None, (image,), ("x",), ("y",), {}, ranges), tmp_path / "package.pt2", form="artifact")
    assert given["triton.enable_pdl"] is early


def test_an_option_that_pytorch_does_not_have_is_left_out(monkeypatch):
    """PyTorch 2.8 refuses `triton.enable_pdl`."""
    monkeypatch.setattr(compile, "config", SimpleNamespace(triton=SimpleNamespace()))
    assert "triton.enable_pdl" not in options_for("cuda")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["detr", "rt_detr_v2"])
def test_passes_keep_the_function(name):
    captured, (before, selected), count = simplified(name)
    assert bool(selected) == (name == "rt_detr_v2")
    after, _ = selecting(captured, selected)
    assert max(output_differences(named(captured.outputs, before), named(captured.outputs, after), 1e-4).values()) <= 1e-4
    assert len(captured.graph.graph.nodes) < count * 0.8
    assert not any("batch_norm" in target for target in names(captured)), "BatchNorm belongs into the convolutions"


@pytest.mark.slow
def test_a_full_image_needs_no_mask():
    source, spec = small("random:detr/tiny", mask=False)
    captured = capture(source, spec, (1, 1))
    simplify(captured.graph)
    attention = [n for n in captured.graph.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert len(attention) == 6 and all(len(n.args) < 4 or n.args[3] is None for n in attention)
    assert not any("cumsum" in target or "sin" in target for target in names(captured)), "positions are constants at one size"


def test_written_out_attention_is_fused():
    class Plain(torch.nn.Module):
        def forward(self, q, k, v, bias):
            return ((q * 0.5) @ k.transpose(-2, -1) + bias).softmax(-1) @ v

    inputs = tuple(torch.randn(2, 3, 5, 4) for _ in range(3)) + (torch.randn(1, 3, 5, 5),)
    graph = module_of(torch.export.export(Plain(), inputs).run_decompositions({}))
    want = graph(*inputs)
    fuse_attention(graph)
    graph.recompile()
    assert any("scaled_dot_product" in str(n.target) for n in graph.graph.nodes)
    assert torch.allclose(want, graph(*inputs), atol=1e-5)


@pytest.mark.slow
def test_types_keep_positions_exact():
    captured = copy.deepcopy(simplified("rt_detr_v2")[0])
    want = run(captured)
    lower_types(captured.graph, Precision.BF16)
    assert low_fraction(captured.graph, Precision.BF16) > 0.9
    nodes = [n for n in captured.graph.graph.nodes if n.target == MSDA]
    assert nodes
    for node in nodes:
        assert node.args[0].meta["val"].dtype == torch.bfloat16
        assert node.args[2].meta["val"].dtype == torch.float32, "sampling locations"
    got = run(captured)
    assert [t.dtype for t in got] == [torch.float32, torch.float32]
    assert all(t.isfinite().all() for t in got)
    assert float((want[0] - got[0]).norm() / want[0].norm()) < 0.2


class _Assigned(torch.nn.Module):
    """A number assigned to elements, as PP-DocLayoutV2 marks the tokens of its reading order."""

    def forward(self, x):
        found = x.clone()
        found[x > 1] = 5
        return found


def test_assigned_numbers_are_on_the_device_of_the_graph():
    x = torch.arange(4)
    graph = module_of(torch.export.export(_Assigned(), (x,), strict=False).run_decompositions({}))
    constants = Constants(graph)
    held = lambda: [tensor for node in graph.graph.nodes if (tensor := constants.get(node)) is not None]  # noqa: E731
    assert [tensor.item() for tensor in held()] == [5]
    move_constants(graph, torch.device("cpu"))
    assert graph(x).tolist() == [0, 1, 5, 5]
    move_constants(graph, torch.device("meta"))
    assert [tensor.device.type for tensor in held()] == ["meta"]
    assert [node.meta["val"].device.type for node in graph.graph.nodes if node.op == "get_attr"] == ["meta"]


class _Split(torch.nn.Module):
    """A stack of hidden states that is taken apart again, as RF-DETR's mask head does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)

    def forward(self, x):
        low, high = torch.stack([self.first(x), self.first(x + 1)]).unbind()
        return self.last(self.norm(low) + high)


def test_types_of_tensors_taken_from_a_list_are_known():
    # A GPU's LayerNorm refuses input and weights of two types, which a CPU's takes.
    x = torch.rand(2, 3, 8)
    graph = module_of(torch.export.export(_Split(), (x,), strict=False).run_decompositions({}))
    assert any(node.target == torch.ops.aten.unbind.int for node in graph.graph.nodes)
    lower_types(graph, Precision.FP16)

    class Checked(torch.fx.Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            if isinstance(result, torch.Tensor):
                assert result.dtype == n.meta["val"].dtype, n.name
            return result

    with torch.no_grad():
        Checked(graph).run(x)
    norms = [node for node in graph.graph.nodes if "layer_norm" in str(node.target)]
    assert norms and all(len({source.meta["val"].dtype for source in node.all_input_nodes}) == 1 for node in norms)


@pytest.mark.slow
def test_the_batch_can_stay_symbolic():
    source, spec = small("random:rt_detr_v2/tiny")
    captured = prepare(source, spec, (1, 4))
    assert str(MSDA) not in names(captured), "plain operators on a CPU"
    program = captured.exported().module()
    module = prepare(load_source("random:rt_detr_v2/tiny"), spec, (3, 3))
    feeds = example_feeds(spec, 3, (64, 96), seed=5)
    inputs = tuple(torch.from_numpy(feeds[name]) for name in captured.names)
    with torch.no_grad():
        for a, b in zip(program(*inputs), module.graph(*inputs), strict=True):
            assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.slow
def test_a_symbolic_batch_is_never_where_channels_are():
    """PyTorch's rule for resizing on a GPU asks whether channels are fewer than 4, and the range would end there."""
    source, spec = small("random:detr/tiny")
    captured = capture(source, spec, (1, 8))
    resized = [node for node in captured.graph.graph.nodes if "upsample" in str(node.target)]
    assert resized and all(isinstance(node.args[0].meta["val"].shape[1], int) for node in resized)


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"device": "tpu"}, "cpu or cuda"),
        ({"tune": "much"}, "default or max"),
        ({"tune": "max"}, "is for `device=cuda`"),
        ({"batch": (4, 2, 1)}, "rising"),
        ({"batch": (0, 1, 1)}, "from 1 to"),
        ({"height": (480, 640, 800), "width": (640, 640, 640)}, "one size"),
        ({"height": (640, 640, 640)}, "both height and width"),
        ({"timeout_seconds": 0}, "more than 0"),
        ({"timeout_seconds": "60"}, "more than 0"),
    ],
)
def test_choices_are_checked(choices, says):
    with pytest.raises(EngineError, match=says):
        InductorConfig(**choices)


def test_config_survives_json():
    config = InductorConfig(device="cuda", batch=(1, 2, 4), height=(64, 64, 64), width=(96, 96, 96), tune="max")
    assert InductorConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.batches == (1, 4) and InductorConfig(device="cuda").batches == (1, 1)
    assert package_name("cuda", 90, "fp16") == "model.inductor-sm90.fp16.pt2"


def test_what_cannot_be_built_is_refused_first(monkeypatch):
    packages = (InductorConfig(),)
    with pytest.raises(EngineError, match="give the checkpoint itself"):
        check_packages(packages, "model.onnx", ExportConfig(), "fp32")
    with pytest.raises(ExportError, match="`nms=graph`"):
        check_packages(packages, "embedded:shapes", ExportConfig(nms="graph", decode="graph"), "fp32")
    with pytest.raises(EngineError, match="int8"):
        check_packages(packages, "embedded:shapes", ExportConfig(), "int8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match="finds none; build on the machine that runs the model"):
        check_ready(InductorConfig(device="cuda"))
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EngineError, match=r"C\+\+ compiler"):
        check_ready(InductorConfig())


def test_one_size_of_a_symbolic_model():
    spec = exported_spec(load_source("random:rt_detr_v2/tiny"), ExportConfig())
    fixed = fixed_spec(spec, InductorConfig(height=(64, 64, 64), width=(96, 96, 96)))
    assert fixed.input.size_hw == (64, 96) and not fixed.input.dynamic
    with pytest.raises(EngineError, match="multiples of 32"):
        fixed_spec(spec, InductorConfig(height=(65, 65, 65), width=(96, 96, 96)))
    padded = exported_spec(load_source("random:detr/tiny"), ExportConfig())
    assert fixed_spec(padded, InductorConfig(height=(64, 64, 64), width=(96, 96, 96))).input.resize == "fit"
    whole = exported_spec(load_source("random:yolos/tiny"), ExportConfig())
    with pytest.raises(EngineError, match="give `size=64x96`"):
        fixed_spec(whole, InductorConfig(height=(64, 64, 64), width=(96, 96, 96)))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """One compiled package: a tiny model at a small size, because compiling is what takes the time."""
    from detrt.backends.inductor.cpp_compiler import compiler
    from detrt.pipeline import build

    try:
        compiler()
    except EngineError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("inductor") / "bundle"
    config = InductorConfig(batch=(1, 1, 2), height=(64, 64, 64), width=(96, 96, 96))
    seen = []
    temporary = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        build(
            "random:yolos/tiny", folder, export=ExportConfig(height=64, width=96, check=False), targets=(config,),
            progress=lambda *step: seen.append(step),
        )  # fmt: skip
    assert any("compiling" in text and text.endswith(" s, waiting for the C++ compiler") for _, _, text in seen), seen
    assert not list(temporary.rglob("precompiled_headers")), "150 MB for each form of a header"
    return folder


def test_a_package_equals_onnx_runtime(bundle):
    with open_session(bundle) as session, OnnxSession(bundle / "model.onnx") as onnx:
        assert session.info.name == "inductor-cpu" and session.info.max_batch == 2
        for batch in (1, 2):
            feeds = example_feeds(session.spec, batch, session.inputs[0].shape[2:], seed=batch)
            got, want = session.run(feeds), onnx.run(feeds)
            assert set(got) == set(want)
            for name in want:
                assert np.abs(got[name] - want[name]).max() <= 1e-3 * np.abs(want[name]).max()
        with pytest.raises(SessionError, match="from 1 to 2"):
            session.run(example_feeds(session.spec, 3, session.inputs[0].shape[2:]))


def test_opening_a_package_needs_neither_the_compiler_nor_its_python_code(bundle):
    code = "import sys; from detrt.backends.open import open_session; s = open_session(sys.argv[1], backend='inductor'); "
    code += "print(s.info.name, sorted(m for m in ('torch._dynamo', 'torch._inductor') if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(bundle)], env={**os.environ, "PATH": "", "CXX": ""}, capture_output=True, text=True
    )
    assert done.stdout == "inductor-cpu []\n" and done.stderr == ""


def test_a_package_of_another_version_is_not_opened(bundle, tmp_path, monkeypatch):
    other = tmp_path / "copy"
    shutil.copytree(bundle, other)
    entry = Bundle.open(other).of_kind("inductor")[0]
    assert entry.engine is not None and entry.engine.options["format"] == "aoti"
    monkeypatch.setattr(torch, "__version__", "1.0.0")
    with pytest.raises(EngineError, match=r"compiled by PyTorch .*build it again"):
        InductorSession(other / entry.path)
    (other / entry.path).write_bytes(b"other")  # what cannot run here is not read
    session = open_session(other)
    assert session.info.name == "onnxruntime-cpu" and "compiled by PyTorch" in session.info.note
    session.close()
    with pytest.raises(EngineError, match="targets=inductor"):
        open_session(other, backend="inductor")


def test_a_package_of_another_cpu_is_not_opened(bundle, monkeypatch):
    """PyTorch has the C++ compiler use all that the CPU has, and an instruction that a CPU has not ends the process."""
    entry = Bundle.open(bundle).of_kind("inductor")[0]
    flags = entry.engine.options["cpu_flags"]
    assert set(flags) == {flag for flag in session_module.cpu_flags() if CPU_FLAGS.fullmatch(flag)}
    if not flags:
        pytest.skip("this system does not tell what its CPU has")
    monkeypatch.setattr(session_module, "cpu_flags", lambda: frozenset(flags[:-1]))
    with pytest.raises(EngineError, match=f"a CPU with {flags[-1]}, which this one has not; build it again"):
        InductorSession(bundle / entry.path)
    with open_session(bundle) as session:
        assert session.info.name == "onnxruntime-cpu" and f"with {flags[-1]}" in session.info.note
        assert session.info.note.count(entry.path) == 1, session.info.note
    for known in (flags, []):  # no system that tells nothing refuses
        monkeypatch.setattr(session_module, "cpu_flags", lambda known=known: frozenset(known))
        InductorSession(bundle / entry.path).close()


def test_a_build_that_takes_too_long_is_advised_in_its_own_terms(tmp_path):
    """TensorRT's levels and profiles have no effect on packages, and detrt build refuses them there."""
    _, spec = small("random:yolos/tiny")
    given = PackageSource("random:yolos/tiny", {}, tmp_path, spec, "fp32", "")
    config = InductorConfig(height=(64, 64, 64), width=(96, 96, 96), timeout_seconds=0.1)
    with pytest.raises(EngineError, match=r"took longer than 0\.1 seconds .* `timeout_seconds`, or use a smaller size or batch$"):
        build_package(given, config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("ref", ["package", "random:yolos/tiny"])
def test_threads(bundle, ref, count):
    """In a thread that has not called PyTorch before, as in a server; OpenMP keeps the number for each thread."""
    from concurrent.futures import ThreadPoolExecutor

    def threads_of_a_run() -> str:
        session.run(feeds)
        return torch.__config__.parallel_info()

    before = torch.get_num_threads()
    try:
        with open_session(bundle if ref == "package" else ref, threads=count) as session:
            feeds = example_feeds(session.spec, 1, (64, 96))
            with ThreadPoolExecutor(1) as pool:
                told = pool.submit(threads_of_a_run).result()
    finally:
        torch.set_num_threads(before)
    assert f"at::get_num_threads() : {count}\n" in told and f"omp_get_max_threads() : {count}\n" in told


def test_the_code_of_a_package_has_no_number_of_threads(tmp_path):
    """Else a package that was compiled with 64 threads would run with 64 on two cores, and one of one thread with one everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 + (os.cpu_count() or 1))
    try:
        example = torch.rand(64, 4096)
        program = torch.export.export(Wide(), (example,))
        captured = CapturedGraph(module_of(program), (example,), ("x",), ("y",), {}, {})
        compile_aoti(captured, tmp_path / "package.pt2", options_for("cpu"))
    finally:
        torch.set_num_threads(before)
    with zipfile.ZipFile(tmp_path / "package.pt2") as archive:
        code = b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".cpp"))
    assert b"#pragma omp parallel\n" in code and b"num_threads(" not in code
    (found,) = load_package(tmp_path / "package.pt2")(example)
    assert torch.equal(found, Wide()(example)[0])


class Wide(torch.nn.Module):
    def forward(self, x):
        return (torch.relu(x - 0.5) * 2,)


def test_a_damaged_package_is_an_error(bundle, tmp_path):
    other = tmp_path / "copy"
    shutil.copytree(bundle, other)
    path = other / Bundle.open(other).of_kind("inductor")[0].path
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(EngineError, match="truncated or replaced"):
        InductorSession(path)
    assert read_sidecar(bundle / path.name)[1].target == "inductor-cpu"


def test_a_package_runs_on_its_own_device_only(bundle):
    path = bundle / Bundle.open(bundle).of_kind("inductor")[0].path
    with pytest.raises(SessionError, match="compiled for cpu"):
        InductorSession(path, device="cuda:0")


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 6).reshape(3, 2))

    def forward(self, x):
        return (torch.relu(x @ self.weight),)


def test_an_artifact_of_a_range_runs_at_every_batch_of_it(tmp_path):
    """The form of GPU packages; the compiler would fix the batch of the examples."""
    example = torch.arange(6.0).reshape(2, 3)
    program = torch.export.export(Scaled(), (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=4)},))
    captured = CapturedGraph(module_of(program), (example,), ("x",), ("y",), {"x": {0: "batch"}}, {"batch": (1, 4)})
    compile_artifact(captured, tmp_path / "package.pt2", options_for("cuda"))
    run = load_package(tmp_path / "package.pt2")
    for batch in (1, 2, 4):
        x = torch.arange(3.0 * batch).reshape(batch, 3) - 2
        assert torch.equal(run(x)[0], Scaled()(x)[0])
    want = [Scaled()(example)[0].detach()]
    _require_batches(run, captured, want, (1, 4), Precision.FP32)

    def static(x):
        raise AssertionError(f"expected size {len(x)}==2")

    with pytest.raises(GateError, match=r"does not run at batch (1|4) of the range 1 to 4"):
        _require_batches(static, captured, want, (1, 4), Precision.FP32)


@pytest.mark.slow
def test_bench_measures_a_package_beside_onnx_runtime(bundle):
    config = BenchConfig(batches=(1, 4), repeats=2, warmup=0, devices=("cpu", "cuda"), providers=("cpu",), parts=True)
    report = bench([str(bundle)], config)
    rows = [(row["backend"], row["scope"], row["batch"]) for row in report["rows"]]
    assert rows == [
        *[("inductor-cpu", scope, 1) for scope in ("forward", "end_to_end")],
        *[("onnxruntime-cpu", scope, batch) for batch in (1, 4) for scope in ("forward", "end_to_end")],
    ]
    facts = Bundle.open(bundle).of_kind("inductor")[0].engine
    assert facts is not None and report["rows"][0]["build_s"] == facts.build_seconds > 1
    why = {(skip["backend"], skip["why"]) for skip in report["skipped"]}
    assert ("inductor-cpu", "batch 4: it takes 1 to 2") in why and any("compiled for cpu" in text for _, text in why)
    # Compiled code calls few operators that have a name.
    assert report["parts"][0]["kinds"]["compiled code"] > 0.3
