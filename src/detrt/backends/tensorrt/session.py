"""TensorRTSession: run an engine on a GPU.

Threads may share a session: one lock is held for a whole `run`, because an execution context and the
buffers belong to one run at a time. For runs at the same time open one session for each thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import files
from ...bundle import EngineFacts, open_sidecar
from ...errors import EngineError, OutputError, SessionError, check_one_of
from ...models import trust
from ...spec import ModelSpec, TensorInfo
from ...system import check_driver
from ..base import BaseSession, Choices, Feeds, Outputs, SessionInfo, check_feeds, check_spec
from ..gpu.staging import COPY_THREADS
from . import diagnose as explain
from .bindings import Trt, environment_of, load_trt
from .config import RTX_SMS, TARGETS
from .cuda import Cuda, IoBuffer, nbytes_of
from .profile import axis_names, check_shapes
from .versions import same_version, version_tuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...graph.view import GraphView
    from ..gpu.runner import GpuRunner

SPECIALIZATIONS = ("lazy", "eager", "none")
Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Context:
    """A native execution context, and the shapes and addresses that it is set to; None while they are incomplete."""

    native: Any
    state: tuple[Shapes, Hashable] | None = None


@dataclass(slots=True)
class _Plan:
    """All that belongs to one combination of input shapes, in the session's own memory or in a caller's (`bound`)."""

    context: _Context
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    allocators: dict[str, Any] = field(default_factory=dict)
    graph: Any = None
    no_graph: bool = False  # recording failed
    runs: int = 0  # with the present shapes and addresses


class TensorRTSession(BaseSession):
    """A Session over an engine file and its sidecar.

    engine: the file; `<engine>.json` must lie beside it where `spec` and `facts`, those of its bundle, are not given.
    compare: compares the file with what was built, by default with the sidecar where that is read. It is called once version and GPU suit,
        as libdetrt does: a file that cannot run here is not read.
    device: "cuda", "cuda:1" or the index.
    cuda_graph: replay each combination of input shapes as one CUDA graph, from its third run on. With
        TensorRT-RTX the library records the graphs itself.
    max_shapes: combinations of input shapes that are kept ready; the one unused for longest goes.
    runtime_cache: TensorRT-RTX only: file of compiled kernels, read here and written after some runs and by `close`. None: a file
        for this engine and GPU, see `default_runtime_cache`. keep_kernels: false for no such file, of an engine that is not opened again.
    specialization: TensorRT-RTX only: compile kernels for each new shape "lazy" (in the background),
        "eager" (before its first run) or "none".
    trt, cuda: replace the libraries, for tests (see `fake`).

    `graph_note` says why CUDA graphs are not used, or is empty.

    Raises:
        EngineError: no engine or sidecar, a file that is not the one that was built, another TensorRT
            version, no GPU or one that the engine was not built for.
        MissingPackageError: the bindings or cuda-python are not installed.
        SpecError: the tensors of the engine are not those of its spec.
    """

    def __init__(
        self,
        engine: str | os.PathLike,
        spec: ModelSpec | None = None,
        facts: EngineFacts | None = None,
        *,
        compare: Callable[[], object] | None = None,
        device: str | int = "cuda:0",
        cuda_graph: bool = True,
        max_shapes: int = 4,
        runtime_cache: str | os.PathLike | None = None,
        keep_kernels: bool = True,
        specialization: str = "lazy",
        trt: Trt | None = None,
        cuda: Any = None,
    ) -> None:
        self.path = Path(engine)
        if max_shapes < 1:
            raise EngineError(f"max_shapes must be at least 1; got {max_shapes}")
        check_one_of("specialization", specialization, SPECIALIZATIONS, EngineError)
        self._lock = threading.RLock()
        self._closing = contextlib.ExitStack()
        self._device = device_index(device)
        if spec is None or facts is None:
            spec, facts, beside = open_sidecar(self.path)
            compare = compare or beside
        self.spec, self.facts = spec, facts
        target = check_target(self.path, self.facts)
        if runtime_cache is not None and target != "tensorrt-rtx":
            raise EngineError("runtime_cache is for tensorrt-rtx engines; leave it out for this one")
        if trt is None and cuda is None:
            check_driver(f"the engine '{self.path}'", EngineError, "run the ONNX file: `backend=onnxruntime`")
        self._trt = trt or load_trt(target)
        check_version(self.path, self.facts, self._trt)
        self._cuda: Any = cuda or Cuda()
        self._cuda.check_device(self._device)
        capability: int = self._cuda.compute_capability(self._device)
        gpu_name: str = self._cuda.device_name(self._device)
        check_gpu(self.path, self.facts, capability, gpu_name)
        if compare is not None:
            compare()
        self._info = SessionInfo(
            "tensorrt",
            target,
            f"cuda:{self._device}",
            inputs=(),  # these, the profile and the largest batch come from the engine
            outputs=(),
            path=self.path,
            facts=self.facts,
            gpu_name=gpu_name,
            compute_capability=capability,
            few_lengths=True,
        )
        self.graph_note = "" if cuda_graph else "switched off"
        self._cache_path = None if runtime_cache is None else Path(runtime_cache)
        self._cache_given = runtime_cache is not None
        if self._trt.is_rtx and runtime_cache is None and keep_kernels:
            self._cache_path = default_runtime_cache(self.path, self.facts, gpu_name)
        self._runs = 0
        self._last_shapes: Shapes | None = None  # of `run`
        self._runtime_cache: Any = None
        # Before TensorRT 10 a second context of a symbolic engine cannot share the only profile.
        self._max_shapes = max_shapes if self._trt.dialect.many_contexts else 1
        self._plans: OrderedDict[Hashable, _Plan] = OrderedDict()
        self._shared: _Context | None = None
        self._runtime_configs: list[Any] = []
        self._generation = 0
        self._scratch = 0
        self._copiers = ThreadPoolExecutor(COPY_THREADS, "detrt-copy")
        self._closing.callback(self._copiers.shutdown)
        self._runner: GpuRunner | None = None
        self._runner_sought = False
        self._open = False
        try:
            self._start(specialization)
        except BaseException:
            self._release()
            raise

    def _start(self, specialization: str) -> None:
        cuda, trt = self._cuda, self._trt
        cuda.use_device(self._device)
        self._runtime = trt.create_runtime()
        self._engine = deserialize(self.path, self.facts, trt, self._runtime)
        self._stream: int = cuda.create_stream()
        self._closing.callback(cuda.destroy_stream, self._stream)
        self._read_tensors()
        check_spec(f"the engine '{self.path}'", self.spec, self.inputs, self.outputs)
        self._buffers = {info.name: IoBuffer(cuda) for info in (*self.inputs, *self.outputs)}
        for buffer in self._buffers.values():
            self._closing.callback(buffer.free)
        if trt.is_rtx:
            self._shared = _Context(self._rtx_context(specialization))
        self._records = self._shared is None and not self.graph_note
        self._open = True

    def _read_tensors(self) -> None:
        """Fill the tensors, the largest batch and the profile of `info` from the engine itself, not from the sidecar."""
        module, engine = self._trt.module, self._engine
        inputs: list[TensorInfo] = []
        outputs: list[TensorInfo] = []
        profile: dict[str, Shapes] = {}
        self.tensor_dtypes: dict[str, str] = {}  # of the engine's own tensors; TensorRT 8 has int32 where `inputs` says int64
        declared = {tensor["name"]: tensor["dtype"] for tensor in (*self.facts.inputs, *self.facts.outputs)}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            if engine.get_tensor_location(name) == module.TensorLocation.HOST:
                raise EngineError(
                    f"tensor '{name}' of '{self.path}' lies in host memory (its values are shapes), which "
                    "detrt does not support; export the model with detrt export"
                )
            dtype = self.tensor_dtypes[name] = self._trt.numpy_dtype(engine.get_tensor_dtype(name), name)
            if dtype == "int32" and declared.get(name) == "int64":  # TensorRT 8 has no INT64; callers need not know
                dtype = "int64"
            native = tuple(engine.get_tensor_shape(name))
            shape: list[int | str] = [
                axis if length < 0 else length for axis, length in zip(axis_names(name, len(native)), native, strict=True)
            ]
            if engine.get_tensor_mode(name) == module.TensorIOMode.INPUT:
                shapes = tuple(tuple(dims) for dims in engine.get_tensor_profile_shape(name, 0))
                profile[name] = shapes
                # An axis whose profile has one length is a fixed one to a caller.
                for axis, (low, high) in enumerate(zip(shapes[0], shapes[2], strict=True)):
                    if low == high:
                        shape[axis] = int(low)
                inputs.append(TensorInfo(name, dtype, tuple(shape)))
            else:
                outputs.append(TensorInfo(name, dtype, tuple(shape)))
        largest = min((int(shapes[2][0]) for shapes in profile.values() if shapes[2]), default=None)
        self._info = replace(self._info, inputs=tuple(inputs), outputs=tuple(outputs), profile=profile, max_batch=largest)

    def _rtx_context(self, specialization: str, *, graphs: bool = True) -> Any:
        """TensorRT-RTX compiles kernels on the device; how is decided before the context is made.

        graphs: false for a context whose layers are timed, which the library must not record.
        """
        module = self._trt.module
        runtime_config = self._engine.create_runtime_config()
        strategies = module.CudaGraphStrategy
        recorded = graphs and not self.graph_note
        runtime_config.cuda_graph_strategy = strategies.WHOLE_GRAPH_CAPTURE if recorded else strategies.DISABLED
        known = module.DynamicShapesKernelSpecializationStrategy.__members__
        runtime_config.dynamic_shapes_kernel_specialization_strategy = known[specialization.upper()]
        if self._runtime_cache is not None:
            runtime_config.set_runtime_cache(self._runtime_cache)
        elif self._cache_path is not None:
            runtime_cache = runtime_config.create_runtime_cache()
            # A cache of another GPU or version is refused by the library, and rewritten by `close`.
            if (kernels := self._kept_kernels(self._cache_path)) and not runtime_cache.deserialize(kernels):
                runtime_cache.reset()
            runtime_config.set_runtime_cache(runtime_cache)
            self._runtime_cache = runtime_cache
        self._runtime_configs.append(runtime_config)  # which must outlive its context
        with environment_of(self.facts):
            return self._checked_context(self._engine.create_execution_context(runtime_config))

    def _kept_kernels(self, path: Path) -> bytes:
        """Content of the file of compiled kernels; empty where there is none yet, or where detrt chose it and it cannot be read."""
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            if not self._cache_given:
                return b""
            raise EngineError(f"the runtime_cache '{path}' cannot be read: {error.strerror}; give another file") from None

    def _own_context(self) -> Any:
        """TensorRT: a context for each combination of shapes, since a recorded graph belongs to the state of
        its context. They share one scratch memory, as only one runs at a time."""
        trt, engine = self._trt, self._engine
        context = self._checked_context(trt.dialect.create_context(trt, engine))
        nbytes = trt.dialect.scratch_bytes(engine)
        if not self._scratch:
            self._scratch = self._cuda.alloc(max(1, nbytes))
            self._closing.callback(self._cuda.free, self._scratch)
        trt.dialect.set_scratch(context, self._scratch, nbytes)
        if context.active_optimization_profile != 0:
            context.set_optimization_profile_async(0, self._stream)
        return context

    def _checked_context(self, context: Any) -> Any:
        if context is None:
            raise EngineError(
                f"TensorRT could not prepare '{self.path}' for running, most likely for lack of GPU "
                "memory; build it with a smaller max of `batch`, `height` and `width`"
            )
        return context

    def run(self, feeds: Feeds, force: Choices | None = None) -> Outputs:
        """Run one batch; the arrays that come back belong to the caller.

        Raises:
            SessionError: feeds of another name, dtype or shape, a shape outside the engine's profile, a
                failure on the GPU, or a closed session.
        """
        self._refuse(force)
        with self._lock:
            self._check_open()
            check_feeds(self._takes(), feeds)
            shapes: Shapes = tuple(tuple(feeds[info.name].shape) for info in self.inputs)
            self._check_shapes(shapes)
            self._cuda.use_device(self._device)
            plan = self._plan(shapes)
            self._bind(plan, shapes)
            for info in self.inputs:
                self._buffers[info.name].upload(feeds[info.name], self.tensor_dtypes[info.name], self._stream, self._copiers)
            self._execute(plan)
            plan.runs += 1
            self._last_shapes = shapes
            outputs = self._download(plan)
            self._runs += 1
            # Also here, because a server that is killed never closes its sessions.
            if self._runs == _RUNS_BEFORE_SAVING:
                self.save_runtime_cache()
            return outputs

    def forward_times(self, repeats: int) -> list[float]:
        """Milliseconds of `repeats` forward passes at the shapes of the last run, without copies of inputs and outputs.

        Raises:
            SessionError: nothing was run before, a failure on the GPU, or a closed session.
        """
        with self._last_plan() as plan:
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                self._execute(plan)
                self._cuda.synchronize(self._stream)
                times.append((time.perf_counter() - start) * 1e3)
                plan.runs += 1
            return times

    def probed(self, view: GraphView, feeds: Feeds) -> Callable[[Sequence[str]], Mapping[str, NDArray]]:
        from .probing import engine_fetch

        return engine_fetch(
            view,
            self.spec,
            feeds,
            self.facts,
            compute_capability=self.info.compute_capability,
            open_engine=lambda path: TensorRTSession(path, device=self._device, keep_kernels=False),
        )

    def layer_times(self, repeats: int) -> dict[str, float]:
        """Median milliseconds of each layer in `repeats` runs at the shapes of the last one, in the engine's order.

        TensorRT waits for every layer then and replays no CUDA graph, so that they add up to more than a forward pass. A fused node
        of TensorRT 8 ("ForeignNode") is one layer.

        Raises:
            SessionError: nothing was run before, a failure on the GPU, or a closed session.
        """
        found: dict[str, list[float]] = {}
        profiler = self._trt.make_profiler(lambda layer, ms: found.setdefault(layer, []).append(ms))
        with self._last_plan() as plan:
            if self._trt.is_rtx and self._last_shapes is not None:
                plan = _Plan(_Context(self._rtx_context("eager", graphs=False)))
                self._bind(plan, self._last_shapes)
            plan.context.native.profiler = profiler
            try:
                for _ in range(repeats):
                    self._enqueue(plan)
                    self._cuda.synchronize(self._stream)
            finally:
                # A context cannot be rid of its profiler, which also reaches into recorded graphs.
                for old in self._plans.values():
                    self._drop_graph(old)
                self._plans.clear()
        return {layer: statistics.median(times) for layer, times in found.items()}

    @contextlib.contextmanager
    def _last_plan(self) -> Iterator[_Plan]:
        """Hold the session, set to the shapes of the last `run`."""
        with self._lock:
            self._check_open()
            if self._last_shapes is None:
                raise SessionError(f"the session of '{self.path}' has run nothing yet; call run first")
            self._cuda.use_device(self._device)
            plan = self._plan(self._last_shapes)
            self._bind(plan, self._last_shapes)
            yield plan

    @property
    def image_runner(self) -> GpuRunner | None:
        """None for a model that takes a prompt, and without a PyTorch that has CUDA, which resizes and selects."""
        if self._forked:
            return None
        with self._lock:
            if self._open and self.spec.text is None and not self._runner_sought:
                self._runner_sought = True
                self._runner = self._open_runner()
            return self._runner

    def _open_runner(self) -> GpuRunner | None:
        try:
            from ..gpu.runner import GpuRunner, stream_for
            from .gpu import prepare

            stream = stream_for(self._device)
        except (ImportError, OSError):
            stream = None
        if stream is None:
            self.add_note("images are resized on the CPU: on the GPU, PyTorch resizes them, and there is none with CUDA here")
            return None
        shapes = self.output_shapes(tuple(self._info.profile[info.name][1] for info in self.inputs))
        if any(min(shape, default=0) < 0 for shape in shapes.values()):
            self.add_note("images are resized on the CPU: the sizes of this engine's outputs are known only after a run")
            return None
        # One stream for all work, because all contexts share one scratch memory.
        self._cuda.synchronize(self._stream)
        self._stream = stream.cuda_stream
        return GpuRunner(
            self.spec,
            self.inputs,
            self.outputs,
            stream.device,
            lambda tensors, finish: prepare(self, tensors, finish, stream),
            stream,
            self._lock,
        )

    @property
    def records(self) -> bool:
        """Whether its work on a stream may be captured as a CUDA graph; TensorRT-RTX records graphs itself."""
        return self._records

    def output_shapes(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Shapes of the outputs for shapes of the inputs, in the order of `inputs`; -1: known only after a run.

        Raises:
            SessionError: shapes outside the engine's profile, or a closed session.
        """
        with self._lock:
            self._check_open()
            self._check_shapes(shapes)
            self._cuda.use_device(self._device)
            context = (next(reversed(self._plans.values()), None) or self._plan(shapes)).context
            context.state = None
            return self._set_shapes(context.native, shapes)

    @contextlib.contextmanager
    def bound(self, shapes: Shapes, addresses: Mapping[str, int]) -> Iterator[tuple[Callable[[], None], bool]]:
        """Hold the session, set to a caller's device memory.

        Args:
            shapes: of the inputs, in their order.
            addresses: of the memory of every input and output, in the types of `tensor_dtypes`.

        Yields:
            (function that enqueues a run on the session's stream; whether shapes and addresses had to be set, so that no CUDA graph of
            earlier runs may be replayed).

        Raises:
            SessionError: TensorRT refuses the shapes or the memory, or a closed session.
        """
        with self._lock:
            self._check_open()
            self._cuda.use_device(self._device)
            state = shapes, tuple(addresses.items())
            plan = self._plan(state)
            rebound = plan.context.state != state
            if rebound:
                plan.context.state = None
                self._set_shapes(plan.context.native, shapes)
                for name, address in addresses.items():
                    self._set_address(plan.context.native, name, address)
                plan.context.state = state
            yield lambda: self._enqueue(plan), rebound

    def _check_open(self) -> None:
        if not self._open or self._forked:
            raise self._unusable()

    def _check_shapes(self, shapes: Shapes) -> None:
        check_shapes({info.name: shape for info, shape in zip(self.inputs, shapes, strict=True)}, self._info.profile)

    def _takes(self) -> tuple[TensorInfo, ...]:
        """Inputs with every profiled axis symbolic: the profile checks lengths, and its errors say more."""
        return tuple(TensorInfo(i.name, i.dtype, tuple(axis_names(i.name, len(i.shape)))) for i in self.inputs)

    def _plan(self, key: Hashable) -> _Plan:
        """The plan of input shapes, or of the `_Context.state` of memory that a caller gave."""
        plan = self._plans.get(key)
        if plan is None:
            context = self._shared
            while len(self._plans) >= self._max_shapes:
                oldest = self._plans.popitem(last=False)[1]
                self._drop_graph(oldest)
                context = oldest.context
                context.state = None
            plan = self._plans[key] = _Plan(context or _Context(self._own_context()))
        self._plans.move_to_end(key)
        return plan

    def _bind(self, plan: _Plan, shapes: Shapes) -> None:
        """Give the context its shapes and the addresses of the session's buffers, where they are not already set."""
        context = plan.context
        if plan.outputs and context.state == (shapes, self._generation):
            return
        native = context.native
        # Until all is set, the context is in no state that a later run may rely on.
        context.state = None
        self._drop_graph(plan)
        plan.outputs = self._set_shapes(native, shapes)
        sizes = {i.name: nbytes_of(shape, self.tensor_dtypes[i.name]) for i, shape in zip(self.inputs, shapes, strict=True)}
        for info in self.outputs:
            if min(plan.outputs[info.name], default=0) >= 0:
                sizes[info.name] = nbytes_of(plan.outputs[info.name], self.tensor_dtypes[info.name])
        self._make_room(sizes)
        for name in sizes:
            self._set_address(native, name, self._buffers[name].device)
        for info in self.outputs:
            if info.name not in sizes and info.name not in plan.allocators:
                plan.allocators[info.name] = self._trt.make_output_allocator(self._reallocator(info.name))
            if info.name in plan.allocators:
                native.set_output_allocator(info.name, plan.allocators[info.name])
        context.state = shapes, self._generation
        plan.runs = 0  # the next run initialises the context again, which must not be recorded

    def _set_shapes(self, native: Any, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Set the shapes of the inputs; returns those of the outputs."""
        for info, shape in zip(self.inputs, shapes, strict=True):
            if not native.set_input_shape(info.name, shape):
                raise SessionError(f"TensorRT refused the shape {shape} of input '{info.name}'; build the engine again")
        try:
            missing = native.infer_shapes()
        except RuntimeError as error:
            raise SessionError(f"TensorRT cannot tell the output shapes for {shapes}: {error}") from None
        if missing:
            raise SessionError(f"TensorRT cannot tell the output shapes: the inputs {list(missing)} are not set")
        return {info.name: tuple(native.get_tensor_shape(info.name)) for info in self.outputs}

    def _set_address(self, native: Any, name: str, address: int) -> None:
        if not native.set_tensor_address(name, address):
            raise SessionError(f"TensorRT refused the memory of tensor '{name}'; build the engine again")

    def _reallocator(self, name: str) -> Any:
        def reallocate(nbytes: int) -> int:
            self._buffers[name].ensure(nbytes)
            return self._buffers[name].device

        return reallocate

    def _make_room(self, sizes: dict[str, int]) -> None:
        """Grow buffers. Recorded graphs still hold the old addresses, also when growing failed half-way."""
        moved = True
        try:
            grown = [self._buffers[name].ensure(nbytes) for name, nbytes in sizes.items()]
            moved = any(grown)
        finally:
            if moved:
                self._generation += 1
                for plan in self._plans.values():
                    self._drop_graph(plan)

    def _drop_graph(self, plan: _Plan) -> None:
        graph, plan.graph = plan.graph, None
        if graph is not None:
            self._cuda.destroy_graph(graph)

    def _execute(self, plan: _Plan) -> None:
        if plan.graph is not None:
            self._cuda.launch(plan.graph, self._stream)
            return
        # The first run of a context still sets it up, which must not be recorded.
        if self._records and not plan.no_graph and not plan.allocators and plan.runs > 0:
            self._record(plan)
        if plan.graph is not None:
            self._cuda.launch(plan.graph, self._stream)
        else:
            self._enqueue(plan)

    def _enqueue(self, plan: _Plan) -> None:
        with self._trt.capture() as messages:
            started = plan.context.native.execute_async_v3(self._stream)
        if not started:
            reason = "; ".join(messages.errors[:3]) or "TensorRT gave no reason"
            raise SessionError(f"the engine '{self.path}' could not be run: {reason}")

    def note_no_graph(self, shapes: Shapes, error: Exception) -> None:
        """Say in `graph_note` that runs of these input shapes cannot be captured."""
        words = ", ".join("x".join(map(str, shape)) for shape in shapes)
        self.graph_note = f"this engine cannot be recorded as a CUDA graph at {words}: {error}"

    def _record(self, plan: _Plan) -> None:
        """Record one run. Shapes that cannot be recorded run without a graph from then on."""
        cuda, graph = self._cuda, None
        try:
            cuda.begin_capture(self._stream)
            try:
                self._enqueue(plan)
            finally:
                graph = cuda.end_capture(self._stream)
        except SessionError as error:
            if graph is not None:
                cuda.destroy_graph(graph)
            cuda.clear_error()
            plan.no_graph = True
            self.note_no_graph(plan.context.state[0] if plan.context.state else (), error)
            return
        plan.graph = graph

    def _download(self, plan: _Plan) -> Outputs:
        cuda, shapes = self._cuda, dict(plan.outputs)
        if plan.allocators:
            cuda.synchronize(self._stream)
            shapes |= {name: allocator.shape for name, allocator in plan.allocators.items()}
        for info in self.outputs:
            self._buffers[info.name].start_download(nbytes_of(shapes[info.name], self.tensor_dtypes[info.name]), self._stream)
        cuda.synchronize(self._stream)
        got = {i.name: self._buffers[i.name].downloaded(shapes[i.name], self.tensor_dtypes[i.name]) for i in self.outputs}
        return {info.name: got[info.name].astype(info.dtype, copy=False) for info in self.outputs}

    def save_runtime_cache(self) -> None:
        """Write the kernels that TensorRT-RTX compiled so far to `runtime_cache`, atomically.

        Raises:
            OutputError: a file that the caller named cannot be written; the default one is left out then.
        """
        with self._lock:
            kernels = None if self._runtime_cache is None else self._runtime_cache.serialize()
            if kernels is None or self._cache_path is None:
                return
            with contextlib.nullcontext() if self._cache_given else contextlib.suppress(OutputError):
                files.write_bytes(self._cache_path, bytes(kernels))

    def close(self) -> None:
        """Write the runtime cache and release all GPU memory; closing twice is fine."""
        with self._lock:
            if not self._open:
                return
            try:
                self.save_runtime_cache()
            finally:
                self._release()

    def _release(self) -> None:
        self._open = False
        self._cuda.use_device(self._device)
        if self._runner is not None:  # its last batch may still run
            self._cuda.synchronize(self._stream)
            self._runner = None
        for plan in self._plans.values():
            self._drop_graph(plan)
        self._plans.clear()
        # Contexts before the engine, the engine before its runtime, and all before their memory.
        self._shared = self._runtime_cache = None
        self._runtime_configs.clear()
        self._engine = self._runtime = None
        self._closing.close()


# Kernels of the usual shapes are compiled by then.
_RUNS_BEFORE_SAVING = 50


def default_runtime_cache(path: Path, facts: EngineFacts, gpu_name: str) -> Path | None:
    """The file that keeps TensorRT-RTX's kernels of an engine on a GPU, so that only the first process compiles them.

    It lies in the folder that the environment variable DETRT_RUNTIME_CACHE names, by default `detrt` in XDG_CACHE_HOME or
    ~/.cache; None where the variable is "off", or the user has no home folder. Engines share it where the library compiles the same kernels for
    them: another build of one graph for one GPU, but not one with TF32, which has the same size.
    """
    chosen = os.environ.get("DETRT_RUNTIME_CACHE", "")
    if chosen == "off":
        return None
    folder = Path(chosen) if chosen else files.folder_of_user("XDG_CACHE_HOME", "~/.cache")
    if folder is None:
        return None
    # cpp/src/kernel_file.cpp names the same file: its JSON library writes like this.
    compiled_by = json.dumps(
        [facts.onnx_sha256, facts.runtime_version, dict(facts.environment), dict(facts.options)],
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
    )
    gpu = "-".join("".join(c if c.isalnum() else " " for c in gpu_name).split())
    return folder / f"{hashlib.sha256(compiled_by.encode()).hexdigest()[:16]}-{path.stat().st_size}-{gpu}.rtxcache"


# What must be true before an engine is handed to TensorRT, and the reason when it is not. cpp/src/engine_fit.cpp has the same rule for
# libdetrt, in the same words.
_REBUILD = "build the engine again here: `build(MODEL, output=OUT)`"


def device_index(device: str | int) -> int:
    """ "cuda", "cuda:1" or 1 -> index of the GPU.

    Raises:
        EngineError: another device.
    """
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    kind, colon, number = str(device).partition(":")
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise EngineError(f"TensorRT runs on an NVIDIA GPU: device must be cuda or cuda:N; got {device!r}")
    return int(number or 0)


def check_target(engine: Path, facts: EngineFacts) -> str:
    if facts.target not in TARGETS:
        raise EngineError(
            f"'{engine}' was built for the target {facts.target!r}; this detrt knows {', '.join(TARGETS)}; {_REBUILD}"
        )
    return facts.target


def check_version(engine: Path, facts: EngineFacts, trt: Trt) -> None:
    """An engine runs on the TensorRT that built it; a version compatible one on newer ones, too.

    Raises:
        EngineError: the versions do not suit each other.
    """
    if facts.runtime_version == trt.version or same_version(facts.runtime_version, trt.version):
        return
    compatible = bool(facts.options.get("version_compatible"))
    if compatible and version_tuple(trt.version) >= version_tuple(facts.runtime_version):
        return
    name = "TensorRT-RTX" if trt.is_rtx else "TensorRT"
    limit = " (or newer)" if compatible else ""
    raise EngineError(
        f"'{engine}' was built with {name} {facts.runtime_version} and runs only on it{limit}; installed: "
        f"{trt.version}. Install that version, or {_REBUILD}"
    )


def check_gpu(engine: Path, facts: EngineFacts, capability: int, gpu_name: str) -> None:
    """Raises EngineError where the engine was not built for this compute capability."""
    allowed = facts.compute_capabilities
    if capability in allowed:
        return
    if facts.options.get("hardware_compatibility") == "ampere_plus" and capability >= 80:
        return
    if facts.target != "tensorrt-rtx":
        todo = "on this GPU"
    elif capability in RTX_SMS:
        todo = f"for it with `sms={capability}`"
    else:
        todo = "on it with `sms=current`, which TensorRT-RTX may refuse, or with `targets=tensorrt`"
    raise EngineError(
        f"'{engine}' was built for compute capability {', '.join(map(str, allowed)) or '(none)'}; this "
        f"GPU, {gpu_name}, has {capability}. Build the engine again {todo}, or run the ONNX file: `backend=onnxruntime`"
    )


def plugins_of(facts: EngineFacts) -> list[str]:
    """Plugin libraries that an engine needs: from the environment variable DETRT_PLUGINS (paths like those of PATH), else where
    they were when it was built."""
    given = [path for path in os.environ.get("DETRT_PLUGINS", "").split(os.pathsep) if path]
    return given or [str(path) for path in facts.options.get("plugins") or ()]


def deserialize(path: Path, facts: EngineFacts, trt: Trt, runtime: Any) -> Any:
    """The ICudaEngine in a file whose digest was checked.

    Raises:
        EngineError: the file cannot be read, or TensorRT refused it.
    """
    # Libraries that the user names are those of the user.
    plugins = () if os.environ.get("DETRT_PLUGINS") else facts.options.get("plugins")
    trust.require(path, trust.native_code({**facts.options, "plugins": plugins}))
    if not trt.is_rtx:
        trt.load_plugins(plugins_of(facts))
    if facts.options.get("version_compatible"):
        # Such engines carry their own runtime code, which is loaded only when that is allowed.
        runtime.engine_host_code_allowed = True
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EngineError(f"'{path}' cannot be read: {error.strerror}") from None
    with trt.capture() as messages:
        native = runtime.deserialize_cuda_engine(data)
    if native is None:
        raise EngineError(explain.open_failure(str(path), messages.errors, trt.version))
    return native
