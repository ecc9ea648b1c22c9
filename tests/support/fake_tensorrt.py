"""TensorRT and CUDA without a GPU, for tests of anything built on TensorRTSession.

Only the part of the bindings that detrt uses, under the real names and signatures (a test compares both
with the installed library). Work on a stream waits until it is synchronised, a recorded graph keeps the
shapes and addresses of its recording, and every access outside an allocation is an error, so that code
which forgets one of these rules fails here as well.

    cuda = FakeCuda(compute_capability=89)
    trt = fake_trt("tensorrt-rtx", cuda, lambda feeds: {"logits": ..., "pred_boxes": ...})
    path.write_bytes(fake_engine_bytes(inputs, outputs, profile))
    session = TensorRTSession(path, trt=trt, cuda=cuda)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_cuda import FakeCuda

from detrt.backends.base import Feeds, Outputs
from detrt.backends.tensorrt.bindings import NUMPY_DTYPES, Trt
from detrt.errors import SessionError
from detrt.spec import TensorInfo

__all__ = ["FakeCuda", "fake_engine_bytes", "fake_trt"]

_MAGIC = b"detrt-fake-engine\n"


def fake_engine_bytes(
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    profile: Mapping[str, Mapping[str, Sequence[int]]],
) -> bytes:
    """An engine file that only `fake_trt` opens. A symbolic output axis takes its length from the input axis
    of that name; without one its length is known only after the run. profile: as in EngineFacts."""
    data = {
        "inputs": [[info.name, info.dtype, list(info.shape)] for info in inputs],
        "outputs": [[info.name, info.dtype, list(info.shape)] for info in outputs],
        "profile": {name: [list(shapes[point]) for point in ("min", "opt", "max")] for name, shapes in profile.items()},
    }
    return _MAGIC + json.dumps(data).encode()


# What a fake library calls itself where a test does not say.
VERSIONS = {"tensorrt-rtx": "1.7.1.116", "tensorrt": "10.13.3.9"}
# Names that only TensorRT 8 has.
OF_TENSORRT_8 = {"device_memory", "device_memory_size", "create_execution_context_without_device_memory"}


def fake_trt(target: str, cuda: FakeCuda, function: Callable[[Feeds], Outputs], version: str | None = None) -> Trt:
    """A Trt whose engines compute `function`; open engines with `fake_engine_bytes`."""
    version = version or VERSIONS[target]
    module = SimpleNamespace(__version__=version, ILogger=ILogger, IOutputAllocator=IOutputAllocator, IProfiler=IProfiler)
    for enum in (DataType, TensorIOMode, TensorLocation, ExecutionContextAllocationStrategy):
        setattr(module, enum.__name__, enum)
    if target == "tensorrt-rtx":
        module.CudaGraphStrategy = CudaGraphStrategy
        module.DynamicShapesKernelSpecializationStrategy = DynamicShapesKernelSpecializationStrategy
    registry = PluginRegistry()
    module.get_plugin_registry = lambda: registry
    module.Runtime = type("Runtime", (Runtime,), {"_world": (cuda, function)})
    trt = Trt(module, version, target)
    registry.log = trt.logger.log
    return trt


DataType = Enum("DataType", [*NUMPY_DTYPES, "BF16", "FP8", "INT4", "FP4"])
TensorIOMode = Enum("TensorIOMode", ["NONE", "INPUT", "OUTPUT"])
TensorLocation = Enum("TensorLocation", ["DEVICE", "HOST"])
ExecutionContextAllocationStrategy = Enum("ExecutionContextAllocationStrategy", ["STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED"])
CudaGraphStrategy = Enum("CudaGraphStrategy", ["DISABLED", "WHOLE_GRAPH_CAPTURE"])
DynamicShapesKernelSpecializationStrategy = Enum("DynamicShapesKernelSpecializationStrategy", ["LAZY", "EAGER", "NONE"])


class ILogger:
    Severity = Enum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"])

    def __init__(self) -> None:
        pass

    def log(self, severity: Any, msg: str) -> None:
        raise NotImplementedError


class PluginRegistry:
    """Takes every shared library; `loaded` are their paths in order."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.log = print  # a logger's log

    def load_library(self, plugin_path: str) -> object | None:
        with open(plugin_path, "rb") as file:
            if file.read(4) != b"\x7fELF":
                return None
        if any(Path(held).name == Path(plugin_path).name for held in self.loaded):
            self.log(ILogger.Severity.ERROR, f"Cannot register the library as plugin creator of {plugin_path} exists already.")
            return None
        self.loaded.append(plugin_path)
        return object()


class IProfiler:
    def __init__(self) -> None:
        pass


class IOutputAllocator:
    def __init__(self) -> None:
        pass


class Runtime:
    """Set `_world` through `fake_trt`."""

    _world: tuple[FakeCuda, Callable[[Feeds], Outputs]]

    def __init__(self, logger: ILogger) -> None:
        self.engine_host_code_allowed = False
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        if not serialized_engine.startswith(_MAGIC):
            self._logger.log(
                ILogger.Severity.ERROR,
                "Serialization assertion header.magicTag == kEXPECTED_MAGIC_TAG failed.",
            )
            return None
        return ICudaEngine(json.loads(serialized_engine[len(_MAGIC) :]), self._logger, *self._world)


class ICudaEngine:
    def __init__(self, data: Any, logger: ILogger, cuda: FakeCuda, function: Callable[[Feeds], Outputs]) -> None:
        self._inputs = {name: (dtype, shape) for name, dtype, shape in data["inputs"]}
        self._tensors = self._inputs | {name: (dtype, shape) for name, dtype, shape in data["outputs"]}
        self._profile = data["profile"]
        self._logger, self._cuda, self._function = logger, cuda, function
        self._contexts = 0

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    @property
    def device_memory_size_v2(self) -> int:
        return 4096

    @property
    def device_memory_size(self) -> int:
        return 4096

    def create_execution_context_without_device_memory(self) -> IExecutionContext:
        """Of TensorRT 8."""
        return self.create_execution_context(ExecutionContextAllocationStrategy.USER_MANAGED)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_location(self, name: str) -> Any:
        return TensorLocation.DEVICE

    def get_tensor_dtype(self, name: str) -> Any:
        return next(DataType[key] for key, value in NUMPY_DTYPES.items() if value == self._tensors[name][0])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(length, str) else length for length in self._tensors[name][1])

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        if profile_index != 0:
            raise ValueError(f"fake: profile {profile_index} of 1")
        return [tuple(shape) for shape in self._profile[name]]

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, strategy: Any = ExecutionContextAllocationStrategy.STATIC) -> IExecutionContext:
        # One parameter under two names in the library's overloads: a strategy, or an IRuntimeConfig.
        self._contexts += 1
        return IExecutionContext(self, strategy, first=self._contexts == 1)


class IRuntimeCache:
    def __init__(self) -> None:
        self._content = b""

    def deserialize(self, blob: bytes) -> bool:
        self._content = blob if blob.startswith(b"kernels") else b""
        return bool(self._content)

    def serialize(self) -> bytes:
        return self._content or b"kernels compiled by the fake"

    def reset(self) -> bool:
        self._content = b""
        return True


class IRuntimeConfig:
    __slots__ = ("_cache", "cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy")

    def __init__(self) -> None:
        self._cache: IRuntimeCache | None = None
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache()

    def set_runtime_cache(self, cache: IRuntimeCache | None = None) -> bool:
        self._cache = cache
        return True


class IExecutionContext:
    profiler: Any = None

    def __init__(self, engine: ICudaEngine, strategy: Any, first: bool) -> None:
        self._engine = engine
        self._needs_scratch = strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        self._scratch = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}
        # The library gives profile 0 to the first context only.
        self._profile = 0 if first else -1

    @property
    def active_optimization_profile(self) -> int:
        return self._profile

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._profile = profile_index
        return profile_index == 0

    def _set_memory_of_8(self, memory: int) -> None:
        self.set_device_memory(memory, self._engine.device_memory_size)

    device_memory = property(fset=_set_memory_of_8)

    def set_device_memory(self, memory: int, size: int) -> None:
        self._engine._cuda.memory("device", memory, size)
        self._scratch = memory

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self._engine.get_tensor_profile_shape(name, 0)
        inside = len(shape) == len(low) and all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))
        if not inside or self._profile != 0:
            return self._fail(f"setInputShape: {name} {shape} is outside of profile {self._profile}")
        self._shapes[name] = tuple(shape)
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine._inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._engine._inputs:
            return self._shapes.get(name, self._engine.get_tensor_shape(name))
        lengths: dict[str, int] = {}
        for given, shape in self._shapes.items():
            lengths |= {axis: n for axis, n in zip(self._engine._inputs[given][1], shape, strict=True) if isinstance(axis, str)}
        return tuple(lengths.get(axis, -1) if isinstance(axis, str) else axis for axis in self._engine._tensors[name][1])

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return name in self._engine._tensors

    def set_output_allocator(self, name: str, output_allocator: IOutputAllocator) -> bool:
        self._allocators[name] = output_allocator
        return name not in self._engine._inputs

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine = self._engine
        cuda = engine._cuda
        if self._needs_scratch and not self._scratch:
            return self._fail("enqueueV3: no device memory is set")
        missing = [n for n in engine._tensors if n not in self._addresses and n not in self._allocators]
        if missing or self.infer_shapes():
            return self._fail(f"enqueueV3: the address or shape is not set for {missing or self.infer_shapes()}")
        # By value: a recorded run keeps them, whatever the context is set to later.
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        dynamic = {name: self._allocators[name] for name in self._allocators if name not in addresses}
        expected = {name: self.get_tensor_shape(name) for name in engine._tensors if name not in engine._inputs}

        def compute() -> None:
            feeds = {}
            for name, (dtype, _) in engine._inputs.items():
                nbytes = int(np.prod(shapes[name], dtype=np.int64)) * np.dtype(dtype).itemsize
                feeds[name] = cuda.memory("device", addresses[name], nbytes).view(dtype).reshape(shapes[name]).copy()
            results = engine._function(feeds)
            for name, shape in expected.items():
                array = np.ascontiguousarray(results[name], engine._tensors[name][0])
                if name in dynamic:
                    address = dynamic[name].reallocate_output_async(name, 0, max(1, array.nbytes), 256, stream_handle)
                    dynamic[name].notify_shape(name, array.shape)
                elif array.shape == shape:
                    address = addresses[name]
                else:
                    raise SessionError(f"fake: output '{name}' has shape {array.shape}; the engine says {shape}")
                cuda.memory("device", address, array.nbytes)[:] = array.reshape(-1).view(np.uint8)

        cuda.enqueue(compute, stream_handle)
        if self.profiler is not None:
            for number, name in enumerate(engine._tensors):
                self.profiler.report_layer_time(f"/model/layer.{number}/{name}", 1.0 + number)
        return True

    def _fail(self, text: str) -> bool:
        self._engine._logger.log(ILogger.Severity.ERROR, f"IExecutionContext::{text}")
        return False
