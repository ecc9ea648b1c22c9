"""Every TensorRT and CUDA name that detrt uses, compared with the installed bindings.

The runtime is tested against a fake; these tests keep the fake and the code honest about names,
signatures and enum members. The list of used names is read from the source by its syntax tree.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import fake_cuda
import fake_tensorrt as fake
import pytest

from detrt.backends.tensorrt import cuda as cuda_module

ENGINE = Path(cuda_module.__file__).parent
SOURCES = sorted(ENGINE.glob("*.py"))

# Expression in the source -> class of the bindings. A module-wide name is given without its file.
OWNERS = {
    "worker.py": {
        "builder": "Builder",
        "network": "INetworkDefinition",
        "parser": "OnnxParser",
        "parser_error": "ParserError",
        "builder_config": "IBuilderConfig",
        "optimization_profile": "IOptimizationProfile",
        "host_memory": "IHostMemory",
        "timing_cache": "ITimingCache",
        "layer": "ILayer",
        "native": "ITensor",
    },
    "bindings.py": {"builder": "Builder", "builder_config": "IBuilderConfig"},
    "dialect.py": {
        "builder": "Builder",
        "builder_config": "IBuilderConfig",
        "engine": "ICudaEngine",
        "context": "IExecutionContext",
    },
    "session.py": {
        "runtime": "Runtime",
        "engine": "ICudaEngine",
        "self._engine": "ICudaEngine",
        "native": "IExecutionContext",
        "context": "IExecutionContext",
        "plan.context.native": "IExecutionContext",
        "runtime_config": "IRuntimeConfig",
        "runtime_cache": "IRuntimeCache",
        "self._runtime_cache": "IRuntimeCache",
    },
}
# Attributes of detrt's own objects that share a variable name with a native one, by file.
OWN = {"session.py": {"context": {"state", "native"}}}


@pytest.fixture(scope="module")
def bindings():
    return pytest.importorskip("tensorrt_rtx_bindings", reason="needs detrt[rtx]: the real bindings are compared")


def uses(path: Path):
    """(class, attribute, call or None, line) for every native attribute in one source file."""
    tree = ast.parse(path.read_text("utf-8"))
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    owners, own = OWNERS.get(path.name, {}), OWN.get(path.name, {})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            expression = ast.unparse(node.value)
            if expression in owners and node.attr not in own.get(expression, set()):
                yield owners[expression], node.attr, calls.get(id(node)), f"{path.name}:{node.lineno}"


def signatures(attribute) -> list[list[tuple[str, bool]]]:
    """[(parameter, has a default)] for each overload in a pybind11 docstring, without self."""
    found = []
    for match in re.finditer(r"^(?:\d+\. )?\w+\((.*)\) -> ", attribute.__doc__ or "", re.MULTILINE):
        parts, depth, current = [], 0, ""
        for character in match.group(1):
            depth += (character in "[(<{") - (character in "])>}")
            if character == "," and depth == 0:
                parts.append(current)
                current = ""
            else:
                current += character
        parts = [part.strip() for part in (*parts, current) if part.strip()]
        if parts and re.match(r"(self|arg0)\b", parts[0]):
            parts = parts[1:]
        found.append([(part.partition(":")[0].strip(), "=" in part) for part in parts])
    return found


def accepts(overload: list[tuple[str, bool]], positional: int, keywords: set[str]) -> bool:
    names = [name for name, _ in overload]
    required = {name for name, default in overload[positional:] if not default}
    return positional <= len(names) and keywords <= set(names[positional:]) and required <= keywords


def test_the_scan_finds_what_the_code_uses():
    found = {(owner, name) for path in SOURCES for owner, name, _, _ in uses(path)}
    # One of every kind of use: if the scan goes blind, these vanish first.
    assert {
        ("Builder", "build_serialized_network"),
        ("IBuilderConfig", "num_compute_capabilities"),
        ("ParserError", "node_name"),
        ("ICudaEngine", "get_tensor_profile_shape"),
        ("IExecutionContext", "execute_async_v3"),
        ("IRuntimeConfig", "cuda_graph_strategy"),
    } <= found
    assert len(found) > 55


def test_every_used_name_and_call_exists(bindings):
    wrong = []
    for path in SOURCES:
        for owner, name, call, where in uses(path):
            attribute = getattr(getattr(bindings, owner), name, None)
            if attribute is None and not hasattr(getattr(bindings, owner), name):
                wrong.append(f"{where}: {owner}.{name} does not exist")
            elif call is not None:
                overloads = signatures(attribute)
                positional, keywords = len(call.args), {keyword.arg for keyword in call.keywords}
                if not any(accepts(overload, positional, keywords) for overload in overloads):
                    wrong.append(f"{where}: {owner}.{name} takes {overloads}, called with {positional} and {keywords}")
    assert not wrong, "\n".join(wrong)


def test_every_module_attribute_exists(bindings):
    wrong, seen = [], set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute):
                chain = ast.unparse(node)
                match = re.match(r"(?:self\._trt\.|self\.|trt\.)?module\.([\w.]+)$", chain)
                if match and path.name in ("bindings.py", "worker.py", "session.py"):
                    seen.add(match.group(1))
                    value = bindings
                    for part in match.group(1).split("."):
                        value = getattr(value, part, None)
                    if value is None:
                        wrong.append(f"{path.name}:{node.lineno}: {chain} does not exist")
    assert not wrong, "\n".join(wrong)
    assert {"Runtime", "BuilderFlag.TF32", "TensorIOMode.INPUT", "IProgressMonitor.__init__"} <= seen


@pytest.mark.parametrize(
    "cls",
    [
        fake.Runtime,
        fake.ICudaEngine,
        fake.IExecutionContext,
        fake.IRuntimeConfig,
        fake.IRuntimeCache,
    ],
    ids=lambda cls: cls.__name__,
)
def test_the_fake_invents_nothing(bindings, cls):
    real = getattr(bindings, cls.__name__)
    names = [name for name in (*vars(cls), *getattr(cls, "__slots__", ())) if not name.startswith("_")]
    names = [name for name in names if name not in fake.OF_TENSORRT_8]
    assert names
    for name in names:
        assert hasattr(real, name), f"the real {cls.__name__} has no {name}"
        ours, theirs = getattr(cls, name), getattr(real, name)
        if inspect.isfunction(ours):
            parameters = [p.name for p in list(inspect.signature(ours).parameters.values())[1:]]
            assert parameters in [[n for n, _ in overload] for overload in signatures(theirs)], f"{cls.__name__}.{name}"
        else:
            assert isinstance(theirs, property), f"{cls.__name__}.{name} is a method in the real bindings"


def test_the_fake_has_what_the_session_uses():
    for path in (ENGINE / "session.py",):
        for owner, name, _, where in uses(path):
            cls = getattr(fake, owner)
            known = set(dir(cls)) | {"engine_host_code_allowed"}
            assert name in known, f"{where}: the fake {owner} has no {name}"


@pytest.mark.parametrize(
    "enum",
    [
        fake.DataType,
        fake.TensorIOMode,
        fake.TensorLocation,
        fake.ExecutionContextAllocationStrategy,
        fake.CudaGraphStrategy,
        fake.DynamicShapesKernelSpecializationStrategy,
        fake.ILogger.Severity,
    ],
    ids=lambda enum: enum.__name__,
)
def test_enum_members_of_the_fake_are_real(bindings, enum):
    real = bindings.ILogger.Severity if enum is fake.ILogger.Severity else getattr(bindings, enum.__name__)
    assert set(enum.__members__) <= set(real.__members__)


def test_callbacks_have_the_documented_signatures(bindings):
    ours = {
        node.name: [argument.arg for argument in node.args.args[1:]]
        for node in ast.walk(ast.parse((ENGINE / "bindings.py").read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    documented = re.findall(r"def (\w+)\(self, (.*?)\):", bindings.IOutputAllocator.__doc__)
    assert {name for name, _ in documented} == {
        "reallocate_output",
        "reallocate_output_async",
        "notify_shape",
    }
    for name, parameters in documented:
        assert ours[name] == parameters.split(", ")
    for name in ("phase_start", "phase_finish", "step_complete"):
        (real,) = signatures(getattr(bindings.IProgressMonitor, name))
        assert ours[name] == [parameter for parameter, _ in real]


def test_fake_cuda_has_the_methods_of_cuda():
    def public(cls):
        methods = {n: m for n, m in vars(cls).items() if inspect.isfunction(m) and n[0] != "_"}
        return {n: list(inspect.signature(m).parameters) for n, m in methods.items()}

    real, ours = public(cuda_module.Cuda), public(fake_cuda.FakeCuda)
    for extra in ("enqueue", "memory"):  # what the fake's own TensorRT needs
        del ours[extra]
    assert ours == real


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="needs detrt[gpu]: the real CUDA bindings are compared",
)
def test_every_cuda_name_and_call_exists():
    from cuda.bindings import runtime

    tree = ast.parse((ENGINE / "cuda.py").read_text("utf-8"))
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    checked = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (
            "self._runtime",
            "self._runtime.cudaMemcpyKind",
        ):
            owner = runtime if ast.unparse(node.value) == "self._runtime" else runtime.cudaMemcpyKind
            assert hasattr(owner, node.attr), node.attr
            call = calls.get(id(node))
            if call is not None:
                line = getattr(owner, node.attr).__doc__.splitlines()[0]
                inside = line.partition("(")[2].rpartition(")")[0]
                assert len(call.args) == len([p for p in inside.split(",") if p.strip()]), line
                checked += 1
    assert checked >= 18
    assert runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal is not None
    assert runtime.cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor is not None
    assert runtime.cudaDeviceAttr.cudaDevAttrComputeCapabilityMinor is not None


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="needs detrt[gpu]: the real CUDA bindings are asked for their devices",
)
def test_real_cuda_without_a_gpu_is_an_error_message():
    from detrt.errors import EngineError

    real = cuda_module.Cuda()
    if real.device_count():
        pytest.skip("this machine has a GPU")
    with pytest.raises(EngineError, match="no CUDA device"):
        real.check_device(0)


def test_an_old_driver_is_told_apart_from_no_gpu(monkeypatch):
    from detrt.errors import EngineError

    cuda = object.__new__(cuda_module.Cuda)

    def answers(status, driver):
        counted = staticmethod(lambda: (status, None))
        cuda._runtime = type(
            "Runtime", (), {"cudaGetDeviceCount": counted, "cudaDriverGetVersion": staticmethod(lambda: (0, driver))}
        )

    answers(35, 12040)
    with pytest.raises(EngineError, match=r"driver 580.*cuda-python<13"):
        cuda.device_count()
    for status, driver in ((35, 0), (100, 13000)):  # no driver at all, as CUDA 13.4 answers on a machine without a GPU
        answers(status, driver)
        assert cuda.device_count() == 0
