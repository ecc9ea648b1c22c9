"""The only door to `tensorrt` (10.3 and newer, 11) and `tensorrt_rtx_bindings`; their differences end here.

The TensorRT logger is global to the process: a second logger object is ignored. So there is one for each
library, and `Trt.capture` collects what one operation logs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...bundle import EngineFacts
from ...errors import EngineError, MissingPackageError, check_one_of
from . import kernels
from .config import RTX_SMS, TARGETS, EngineConfig
from .dialect import Dialect
from .rows import Version
from .versions import OLDEST, row_of, version_tuple

# target -> (module, extra of detrt)
_DISTRIBUTIONS = {"tensorrt-rtx": "tensorrt-rtx-cu13-bindings", "tensorrt": "tensorrt"}
_LIBRARIES = {"tensorrt-rtx": ("tensorrt_rtx_bindings", "rtx"), "tensorrt": ("tensorrt", "trt")}

# TensorRT DataType name -> NumPy dtype name. BF16, FP8, INT4 and FP4 have no NumPy type.
NUMPY_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}

# Lines that accompany every error on a machine without a driver, or mean nothing to a caller.
_NOISE = ("checkMacros.cpp::catchCudaError", "Thread context has not been set!")
_KEPT_MESSAGES = 2000


@dataclass(slots=True)
class Messages:
    """What TensorRT logged during one operation: distinct (severity, text) in order, severity e.g. "ERROR"."""

    entries: dict[tuple[str, str], None] = field(default_factory=dict)

    def add(self, severity: str, text: str) -> None:
        """Keep a message. Of too many the oldest remarks go: what a build needs is said at its end."""
        entry = severity, text.strip()
        if entry in self.entries or any(noise in text for noise in _NOISE):
            return
        self.entries[entry] = None
        if len(self.entries) > _KEPT_MESSAGES:
            oldest = next((held for held in self.entries if held[0] == "INFO"), entry)
            del self.entries[oldest]

    def of(self, *severities: str) -> list[str]:
        """Distinct texts of these severities in order, without known noise."""
        return [text for severity, text in self.entries if severity in severities]

    @property
    def errors(self) -> list[str]:
        return self.of("ERROR", "INTERNAL_ERROR")

    @property
    def warnings(self) -> list[str]:
        return self.of("WARNING")


@dataclass(slots=True)
class Trt:
    """One loaded library.

    module: the Python bindings; version: e.g. "1.7.1.116". heard_s: when it logged something, by `time.monotonic`. timed: whether a builder
    has timed a kernel. layers: its last list of kernels (`kernels.parse`).
    """

    module: Any
    version: str
    target: str
    logger: Any = None
    heard_s: float = field(default_factory=time.monotonic)
    timed: bool = False
    layers: str = ""
    _captures: list[Messages] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.Lock)
    _plugins: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.logger = _make_logger(self.module, self._note)

    @property
    def is_rtx(self) -> bool:
        return self.target == "tensorrt-rtx"

    @property
    def row(self) -> Version:
        """What this version reads and computes."""
        return row_of(self.target, self.version)

    @property
    def dialect(self) -> Dialect:
        """How it reads graphs, builds engines and makes contexts."""
        return self.row.spoken()

    def _note(self, severity: str, text: str) -> None:
        self.heard_s = time.monotonic()
        if severity == "VERBOSE":
            self.timed = self.timed or "Timing Runner" in text
            if text.startswith(kernels.HEAD):
                self.layers = text
            return
        with self._lock:
            for messages in self._captures:
                messages.add(severity, text)

    @contextlib.contextmanager
    def capture(self) -> Iterator[Messages]:
        """Collect what is logged inside the block. The logger is global: with two operations at once in
        one process, each also sees the other's messages."""
        messages = Messages()
        with self._lock:
            self._captures.append(messages)
        try:
            yield messages
        finally:
            with self._lock:
                # By identity: two captures with equal content are still two captures.
                self._captures[:] = [held for held in self._captures if held is not messages]

    def create_builder(self) -> Any:
        """A builder. Raises EngineError where the library cannot use this machine."""
        return self._created(self.module.Builder)

    def create_runtime(self) -> Any:
        """A runtime. Raises EngineError where the library cannot use this machine."""
        return self._created(self.module.Runtime)

    def _created(self, kind: Any) -> Any:
        with self.capture() as messages:
            try:
                return kind(self.logger)
            except TypeError:  # what pybind11 raises where the library's factory function gives no object
                reason = "; ".join(messages.errors[:3]) or "the library gave no reason"
        raise EngineError(
            f"TensorRT {self.version} made no {kind.__name__} on this machine: {reason}. Its files are incomplete, or it does not support this GPU "
            "or driver; `detrt doctor` shows what was found"
        )

    def create_network(self, builder: Any) -> Any:
        """A network: TensorRT 10 must be asked for a strongly typed one, 11 and RTX know no other kind."""
        flag = getattr(self.module.NetworkDefinitionCreationFlag, self.dialect.network_flag)
        return builder.create_network(1 << int(flag))

    def load_plugins(self, paths: Sequence[str | os.PathLike]) -> None:
        """Make TensorRT's own plugins and those of the libraries at `paths` known, each once in a process.

        Raises:
            EngineError: TensorRT-RTX, which has no plugin layers; no such file; or a library that TensorRT refuses.
        """
        if self.is_rtx:
            if paths:
                raise EngineError(f"TensorRT-RTX has no plugin layers; leave '{paths[0]}' out and export with `msda=gather`")
            return
        for path in map(Path, paths):
            if not path.is_file():
                raise EngineError(
                    f"there is no plugin library '{path}'; the engine needs it. Copy or build it (docs/guide/plugin.md) and name its "
                    "place in the environment variable DETRT_PLUGINS"
                )
        with self._lock:
            wanted = [str(Path(path).resolve()) for path in paths]
            new = [path for path in dict.fromkeys(wanted) if path not in self._plugins]
        with self.capture() as messages:
            if (shipped := getattr(self.module, "init_libnvinfer_plugins", None)) is not None:
                shipped(self.logger, "")
            for path in new:
                if not self._load_library(path) and not any("exists already" in text for text in messages.errors):
                    # "exists already": another copy of the library, or the program around, has registered its creators.
                    reason = "; ".join(messages.errors[:3]) or "TensorRT gave no reason"
                    raise EngineError(
                        f"TensorRT {self.version} did not load the plugin library '{path}': {reason}. It must be built against "
                        "the headers of this TensorRT (docs/guide/plugin.md)"
                    )
                with self._lock:
                    self._plugins.add(path)

    def _load_library(self, path: str) -> bool:
        """Load one plugin library; before TensorRT 8.6 it registers its creators itself when the system opens it."""
        registry = self.module.get_plugin_registry()
        if hasattr(registry, "load_library"):
            return registry.load_library(path) is not None
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        return True

    def set_compute_capabilities(self, builder_config: Any, sms: Sequence[int]) -> None:
        """Ask for one TensorRT-RTX engine that runs on all of `sms`; one that NVIDIA does not list must be that of this machine's GPU.

        Raises:
            EngineError: this version of the library does not know one of them.
        """
        module = self.module
        known = dict(module.ComputeCapability.__members__)
        if len(sms) == 1 and sms[0] not in RTX_SMS:
            known[f"SM{sms[0]}"] = known["CURRENT"]
        for sm in sms:
            if f"SM{sm}" not in known:
                allowed = ", ".join(name[2:] for name in known if name.startswith("SM"))
                raise EngineError(f"TensorRT-RTX {self.version} cannot build for sm {sm}; allowed: {allowed}")
        builder_config.num_compute_capabilities = len(sms)
        for index, sm in enumerate(sms):
            if not builder_config.set_compute_capability(known[f"SM{sm}"], index):
                raise EngineError(f"TensorRT-RTX {self.version} refused compute capability {sm}; leave it out of `sms`")

    def set_hardware_compatibility(self, builder_config: Any, level: str) -> None:
        """Raises EngineError where this version does not have the level."""
        module = self.module
        known = module.HardwareCompatibilityLevel.__members__
        if level.upper() not in known:
            allowed = ", ".join(name.lower() for name in known)
            raise EngineError(f"TensorRT {self.version} has no hardware_compatibility {level!r}; allowed: {allowed}")
        builder_config.hardware_compatibility_level = known[level.upper()]

    def numpy_dtype(self, data_type: Any, tensor_name: str) -> str:
        """NumPy name of a TensorRT DataType.

        Raises:
            EngineError: a type that NumPy does not have.
        """
        try:
            return NUMPY_DTYPES[data_type.name]
        except KeyError:
            raise EngineError(
                f"tensor '{tensor_name}' has the type {data_type.name}, which NumPy does not have; export "
                "the model with float32 or float16 inputs and outputs"
            ) from None

    def make_progress_monitor(self, report: Callable[[float, str], None]) -> Any:
        """An IProgressMonitor that calls report(fraction 0..1, phase)."""
        return _make_progress_monitor(self.module, report)

    def make_output_allocator(self, reallocate: Callable[[int], int]) -> Any:
        """An IOutputAllocator for one output whose shape depends on the data; see `_make_output_allocator`."""
        return _make_output_allocator(self.module, reallocate)

    def make_profiler(self, report: Callable[[str, float], None]) -> Any:
        """An IProfiler that calls report(layer, milliseconds) for each layer of a run."""
        return _make_profiler(self.module, report)


TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"


def build_environment(config: EngineConfig) -> dict[str, str]:
    """Variables of the process that builds an engine, and of each that runs it.

    TensorRT-RTX 1.6.1 compiles FP32 products to TF32 on the device, whatever the builder's flag says, unless NVIDIA's variable forbids it
    (on an H200 the largest error of RT-DETRv2 is 6e-4 instead of 9e-6). An engine that was built with the variable opens only with it,
    and one that was built without it only without it.
    """
    return {} if config.target != "tensorrt-rtx" or config.tf32 else {TF32_OVERRIDE: "0"}


_environment_lock = threading.Lock()


@contextlib.contextmanager
def environment_of(facts: EngineFacts) -> Iterator[None]:
    """The environment that a TensorRT-RTX engine was built in, while a context is made.

    NVIDIA_TF32_OVERRIDE=0 stays set afterwards, for kernels that are compiled when a new shape comes.
    """
    if facts.target != "tensorrt-rtx":
        yield
        return
    with _environment_lock:
        if TF32_OVERRIDE in facts.environment:
            os.environ[TF32_OVERRIDE] = facts.environment[TF32_OVERRIDE]
            yield
            return
        before = os.environ.pop(TF32_OVERRIDE, None)
        try:
            yield
        finally:
            if before is not None:
                os.environ[TF32_OVERRIDE] = before


_loaded: dict[str, Trt] = {}
_load_lock = threading.Lock()


def is_installed(target: str) -> bool:
    """Whether the target's package is there; it is not imported."""
    return importlib.util.find_spec(_LIBRARIES[target][0]) is not None


def check_installed(target: str) -> None:
    """Say what to install without importing the library.

    Raises:
        MissingPackageError: the target's package is not installed.
    """
    check_one_of("`target`", target, TARGETS, EngineError)
    if not is_installed(target):
        name, extra = _LIBRARIES[target]
        raise MissingPackageError(name, extra, f"the target '{target}'")


def load_trt(target: str) -> Trt:
    """Import one library, once in a process.

    Raises:
        MissingPackageError: it is not installed.
        EngineError: it cannot be loaded, or it is too old.
    """
    check_installed(target)
    name, _ = _LIBRARIES[target]
    with _load_lock:
        if target not in _loaded:
            try:
                module = importlib.import_module(name)
            except (ImportError, OSError, RuntimeError) as error:
                raise EngineError(
                    f"the package '{name}' is installed but cannot be loaded: {error}; run: pip install "
                    f"--force-reinstall {_DISTRIBUTIONS[target]}"
                ) from None
            version = _version_of(module)
            oldest = OLDEST[target]
            if version_tuple(version)[: len(oldest)] < oldest:
                wanted = ".".join(map(str, oldest))
                raise EngineError(
                    f"detrt needs {name} {wanted} or newer; installed: {version}; run: pip install -U {_DISTRIBUTIONS[target]}"
                )
            _loaded[target] = Trt(module, version, target)
        return _loaded[target]


def _version_of(module: Any) -> str:
    """`__version__`, or what libnvinfer says: bindings that were built without their package have no such name."""
    if (version := getattr(module, "__version__", None)) is not None:
        return str(version)
    try:
        number = int(ctypes.CDLL("libnvinfer.so.8").getInferLibVersion())
    except (OSError, AttributeError) as error:
        raise EngineError(f"the installed tensorrt does not say its version ({error}); install NVIDIA's package") from None
    return f"{number // 1000}.{number // 100 % 10}.{number % 100}"


def _make_logger(module: Any, note: Callable[[str, str], None]) -> Any:
    class Log(module.ILogger):
        def __init__(self) -> None:
            # pybind11 needs the explicit call; super() leaves the native part unset.
            module.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            note(severity.name, msg)

    return Log()


def _make_progress_monitor(module: Any, report: Callable[[float, str], None]) -> Any:
    class Monitor(module.IProgressMonitor):
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)
            self.phases: dict[str, list[Any]] = {}  # name -> [parent, steps, done]
            self.best = 0.0

        def fraction_of(self, name: str) -> float:
            _, steps, done = self.phases[name]
            inside = [self.fraction_of(child) for child, (parent, *_) in self.phases.items() if parent == name]
            return min(1.0, (done + (max(inside) if inside else 0.0)) / max(1, steps))

        def tell(self, phase: str) -> None:
            roots = [name for name, (parent, *_) in self.phases.items() if parent not in self.phases]
            if roots:
                self.best = max(self.best, self.fraction_of(roots[0]))
            report(self.best, phase)

        def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None:
            self.phases[phase_name] = [parent_phase, num_steps, 0]
            self.tell(phase_name)

        def phase_finish(self, phase_name: str) -> None:
            self.phases.pop(phase_name, None)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.phases:
                self.phases[phase_name][2] = step + 1
                self.tell(phase_name)
            return True

    return Monitor()


def _make_output_allocator(module: Any, reallocate: Callable[[int], int]) -> Any:
    class Allocator(module.IOutputAllocator):
        """reallocate(size in bytes) returns a device address; `shape` is set when the run has ended."""

        def __init__(self) -> None:
            module.IOutputAllocator.__init__(self)
            self.shape: tuple[int, ...] = ()

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            return reallocate(size)

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return reallocate(size)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self.shape = tuple(shape)

    return Allocator()


def _make_profiler(module: Any, report: Callable[[str, float], None]) -> Any:
    class Profiler(module.IProfiler):
        def __init__(self) -> None:
            module.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            report(layer_name, ms)

    return Profiler()
