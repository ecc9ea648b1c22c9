"""Run an ONNX file with ONNX Runtime. The only module that imports `onnxruntime`."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ... import files
from ...bundle import MANIFEST, Bundle
from ...errors import GraphError, MissingPackageError, SessionError, SpecError, one_line
from ...graph.io import SPEC_KEY
from ...graph.operators import named_in
from ...spec import ModelSpec, TensorInfo, read_spec_file, spec_beside
from ...system import CPU, SATURATES, has_driver, saturates_int8, usable_cores
from ..base import BaseSession, Choices, Feeds, Outputs, SessionInfo, check_feeds, check_spec
from .binding import Binding, Graphs
from .rtx import BACKEND as RTX
from .rtx import rtx_device

if TYPE_CHECKING:
    from onnx import ModelProto

    from ...graph.view import GraphView
    from ..gpu.runner import GpuRunner


_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
_DTYPES = {
    "float": "float32",
    "float16": "float16",
    "double": "float64",
    "uint8": "uint8",
    "int8": "int8",
    "int32": "int32",
    "int64": "int64",
    "bool": "bool",
}


# Sessions on a GPU that nobody closed: their memory must go before CUDA does, or ONNX Runtime aborts the process.
_OPEN: weakref.WeakSet[OnnxSession] = weakref.WeakSet()
atexit.register(lambda: [session.close() for session in list(_OPEN)])


class NoSpecError(SpecError):
    """Nothing says what an ONNX file is."""


class OnnxSession(BaseSession):
    """A Session over an ONNX file.

    model: path of the file, or its bytes (without external data).
    spec: what the file's own spec is replaced by; needed for files that detrt did not write.
    provider: "cpu", "cuda", "tensorrt" or "rtx" (see `rtx.py`), with an optional device number ("cuda:1").
    threads: threads inside one operation; default: as many as this process may use.
    fused: the same graph with the attention of `graph.fuse_attention`, which runs in its place.
    emulate_low_precision: on the CPU, a file's values are rounded to 16 bits and FP8 as it says; see `graph.emulate_low_precision`.
    in_order: run the nodes in the order of the graph. Outputs are otherwise computed last, and what they are computed from is kept.

    The spec is taken from, in this order: `spec`, the file's metadata, `<model>.onnx.json` beside it
    (a spec, or an object with the field "spec"), `detrt.json` beside it.

    Raises:
        SpecError: no spec, or a damaged one.
        SessionError: no such file, a damaged one, one with nodes that were not lowered, tensors that
            do not belong to the spec, or a provider that does not exist.
        MissingPackageError: onnxruntime is not installed.
    """

    def __init__(
        self,
        model: str | os.PathLike | bytes,
        spec: ModelSpec | None = None,
        *,
        provider: str = "cpu",
        threads: int | None = None,
        fused: Path | None = None,
        emulate_low_precision: bool = False,
        in_order: bool = False,
    ) -> None:
        onnxruntime = _package("running ONNX files")
        self.path = None if isinstance(model, bytes) else Path(model)
        self._graph = self.path if fused is None else fused  # the file that runs
        self.name = f"the ONNX model ({len(model)} bytes)" if isinstance(model, bytes) else f"'{os.fspath(model)}'"
        providers, backend = _providers(provider, onnxruntime.get_available_providers())
        on_cuda = backend == "onnxruntime-cuda"
        self._ort, self._stream, self._graphs = onnxruntime, None, Graphs(on_cuda)
        self._told: tuple[list[str], list[str] | None] | None = None  # outputs that are selections and cuts
        self._chosen: tuple[list[str], dict[str, str] | None] | None = None
        self._emulates = emulate_low_precision
        self._followers: dict[tuple[str, ...], tuple[OnnxSession, dict[str, str], dict[str, str]]] = {}
        self._notes: tuple[str, ...] = ()
        if self._graphs.enabled:
            self._stream = _shared_stream(onnxruntime, providers)
        options = _options(onnxruntime, _threads(threads))
        if in_order:
            options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
            # The last level changes layouts, which every output would change back; it takes 40 % of the time to open a graph of 6000 nodes.
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        source = model if isinstance(model, bytes) else str(_existing(Path(model)))
        source = source if fused is None else str(_existing(fused))
        if (
            emulate_low_precision
            and backend == "onnxruntime-cpu"
            and isinstance(source, str)
            and (emulated := _emulated(Path(source)))
        ):
            source = emulated
            self._notes = ("16-bit values are FP32 rounded after every operation: this CPU has no kernels for them",)
        wanted = providers[0] if isinstance(providers[0], str) else providers[0][0]
        if backend == RTX:
            device = rtx_device(onnxruntime, int(providers[0][1]["device_id"]))
            options.add_provider_for_devices([device], {})
            wanted = device.ep_name
        session = self._open(source, options, None if backend == RTX else providers)
        if wanted not in session.get_providers():
            raise SessionError(
                f"ONNX Runtime could not start the provider '{provider}' and fell back to "
                f"{session.get_providers()}; install the CUDA and cuDNN versions that this onnxruntime-gpu "
                "needs, or use `device=cpu`"
            )
        self._session = session
        if backend == "onnxruntime-cpu" and saturates_int8() and named_in(source, ("QuantizeLinear",)):
            self._notes += (SATURATES,)
        self._info = SessionInfo(
            "onnxruntime",
            backend,
            "cpu" if backend == "onnxruntime-cpu" else f"cuda:{providers[0][1]['device_id']}",
            tuple(map(_tensor_info, session.get_inputs())),
            tuple(map(_tensor_info, session.get_outputs())),
            path=self.path,
            runs_graph=True,
            notes=self._notes,
        )
        self.spec = spec or self._find_spec(None if isinstance(model, bytes) else Path(model))
        check_spec(self.name, self.spec, self.inputs, self.outputs)
        self._binding: Binding | None = None
        self._runner: GpuRunner | None = None
        if on_cuda:
            _OPEN.add(self)
            index = int(providers[0][1]["device_id"])
            self._binding = Binding(session, onnxruntime, "cuda", index, self.inputs, self.outputs, self._graphs)

    def _open(self, source: Any, options: Any, providers: list[Any] | None) -> Any:
        """An InferenceSession; on CUDA one that captures a graph for each shape, where ONNX Runtime can with this model.

        providers: None: `options` names them.
        """
        if self._graphs.enabled and providers is not None:
            with_graphs = [(providers[0][0], {**providers[0][1], "enable_cuda_graph": "1"}), *providers[1:]]

            def open_fixed(lengths: Mapping[str, int]) -> Any:
                # A size that is known turns shapes, which ONNX Runtime computes on the CPU, into constants.
                fixed_session = _options(self._ort, options.intra_op_num_threads)
                for axis, length in lengths.items():
                    fixed_session.add_free_dimension_override_by_name(axis, length)
                return self._ort.InferenceSession(source, fixed_session, providers=with_graphs)

            self._graphs = Graphs(True, open_fixed)
            try:
                return self._ort.InferenceSession(source, options, providers=with_graphs)
            except Exception as error:  # onnxruntime's exceptions share no base class
                self._graphs.failed(error)
        try:
            session = self._ort.InferenceSession(source, options, providers=providers)
            session._model_bytes = None  # it would hold the bytes as long as it lives, for providers that are changed later
            return session
        except Exception as error:  # as above
            lowered = _without_plugins(source)
            if lowered is None:
                raise _load_error(self.name, error) from None
        self._notes = ("deformable attention runs as standard operators here: its nodes are those of a TensorRT plugin",)
        return self._open(lowered, options, providers)

    @property
    def info(self) -> SessionInfo:
        """With what this session cannot do here, which may show only when it runs."""
        if not self._graphs.why:
            return self._info
        why = f"ONNX Runtime runs this graph without a CUDA graph: {self._graphs.why}"
        return replace(self._info, notes=(*self._info.notes, why))

    @property
    def image_runner(self) -> GpuRunner | None:
        """None on a CPU, and without PyTorch, which resizes and selects."""
        if self._stream is None or self._session is None or self._forked or self.spec.text is not None:
            return None
        if self._runner is None:
            from ..gpu.runner import GpuRunner
            from .gpu import prepare

            stream, session = self._stream, self._session
            self._runner = GpuRunner(
                self.spec,
                self.inputs,
                self.outputs,
                stream.device,
                lambda tensors, finish: prepare(
                    session, self._ort, tensors, (self.inputs, self.outputs), finish, stream, self._graphs
                ),
                stream,
            )
        return self._runner

    def _find_spec(self, path: Path | None) -> ModelSpec:
        text = self._session.get_modelmeta().custom_metadata_map.get(SPEC_KEY)
        if text:
            return ModelSpec.from_json(text)
        if path is not None:
            if (sidecar := spec_beside(path)) is not None:
                return read_spec_file(sidecar)
            if (path.parent / MANIFEST).is_file():
                return Bundle.open(path.parent).spec
        raise NoSpecError(
            f"{self.name} holds no detrt spec (its inputs are {[i.name for i in self.inputs]}, its outputs "
            f"{[o.name for o in self.outputs]}), so it is not known how images go in and boxes come out. "
            "Give one with `spec=FILE`, or export the checkpoint with: detrt export"
        )

    @property
    def tells_selections(self) -> bool:
        return self._told is not None or self.path is not None

    @property
    def takes_selections(self) -> bool:
        return self.path is not None

    @classmethod
    def telling(cls, model: ModelProto, spec: ModelSpec) -> OnnxSession:
        """A session of a graph in memory that tells what it selects with every run; `model` is as it was afterwards."""
        from ...graph.clean import serialized
        from ...graph.selections import cut_outputs, topk_outputs

        names, cuts = topk_outputs(model), cut_outputs(model, spec)
        session = cls(serialized(model, [*names, *(cuts or ())]), spec)
        session._told = names, None if cuts is None else list(cuts)
        return session

    def selections(self, feeds: Feeds) -> tuple[Outputs, Choices]:
        """Of a file, read from a second session of it, which is closed after the run. Values of 16 bits are rounded on the CPU."""
        from ...graph.emulate_low_precision import emulate, has_16_bit
        from ...graph.msda_plugin import runnable

        if self._told is None:
            view = self._view()
            model = emulate(view.model, view.types) if self.info.device == CPU and has_16_bit(view.types) else view.model
            with OnnxSession.telling(runnable(model), self.spec) as session:
                return session.selections(feeds)
        names, cuts = self._told
        outputs = self.run(feeds)
        chosen = [outputs.pop(name) for name in names]
        return outputs, Choices(chosen, None if cuts is None else [outputs.pop(name) for name in cuts])

    def _forced(self, feeds: Feeds, force: Choices) -> Outputs:
        """Of the integers, those that a number may be cut to by rounding alone are forced."""
        from ...tasks.reading_order import near_cuts

        names, cuts = self._choices()
        for what, own, given in (
            ("top-k selections", names, force.selections),
            ("cuts to integers", cuts or (), force.cuts or ()),
        ):
            if len(own) != len(given):
                raise SessionError(f"the reference has {len(own)} {what}, the candidate {len(given)}")
        forced = dict(zip(names, force.selections, strict=True))
        if cuts and force.cuts:
            values = self._following(forced, [*cuts, *cuts.values()])(feeds, forced)
            for (name, number), own_cut in zip(cuts.items(), force.cuts, strict=True):
                forced[name] = np.where(near_cuts(values[number], own_cut), own_cut, values[name])
        return self._following(forced)(feeds, forced)

    def _choices(self) -> tuple[list[str], dict[str, str] | None]:
        """What the graph selects and cuts, see `topk_outputs` and `cut_outputs`."""
        from ...graph.selections import cut_outputs, topk_outputs

        if self._chosen is None:
            view = self._view()
            self._chosen = topk_outputs(view.model), cut_outputs(view.model, self.spec)
        return self._chosen

    def _following(self, given: Mapping[str, NDArray], returned: Sequence[str] = ()) -> Callable[..., Outputs]:
        """Runs the file with what it is given, in a session that stays open until a run chooses by itself."""
        from ...graph.io import to_bytes
        from ...graph.msda_plugin import runnable
        from ...graph.selections import take_selections

        key = (*given, "", *returned)
        if key not in self._followers:
            view = self._view()
            model = (_rounding(view) if self._emulates else None) or runnable(view.model)
            copy, inputs, outputs = take_selections(model, given, returned)
            session = OnnxSession(to_bytes(copy), self.spec)
            self._followers[key] = session, inputs, outputs
        session, inputs, outputs = self._followers[key]

        def run(feeds: Feeds, values: Mapping[str, NDArray]) -> Outputs:
            found = session.run({**feeds, **{inputs[name]: array for name, array in values.items()}})
            return {**found, **{name: found[output] for name, output in outputs.items()}}

        return run

    def _view(self) -> GraphView:
        from ... import graph
        from ...graph.view import GraphView

        if self._graph is None:
            raise SessionError(f"{self.name} is not a file, so its selections cannot be read or given")
        return GraphView(graph.load(self._graph))

    def _stop_following(self) -> None:
        for session, *_ in self._followers.values():
            session.close()
        self._followers.clear()

    def run(self, feeds: Feeds, force: Choices | None = None) -> Outputs:
        """Run one batch. force: with another session of the file, which tells the scores of what it is given, too.

        Raises:
            SessionError: feeds that do not fit, a failure inside the model, another number of selections, or a closed session.
        """
        if self._session is None or self._forked:
            raise self._unusable()
        if force is not None:
            return self._forced(feeds, force)
        self._stop_following()
        check_feeds(self.inputs, feeds)
        names, arrays = [info.name for info in self.outputs], {name: np.ascontiguousarray(a) for name, a in feeds.items()}
        try:
            if self._binding is not None:
                return self._binding.run(arrays)
            values = self._session.run(names, arrays)
        except Exception as error:  # as above
            shapes = {name: a.shape for name, a in feeds.items()}
            if few := re.search(r"k argument \[(\d+)\] should not be greater than .* dim value \[(\d+)\]", str(error)):
                raise SessionError(
                    f"{self.name} chooses the best {few[1]} of an image's positions, and inputs of shape {shapes} have {few[2]}; "
                    "give a larger image size"
                ) from error
            raise SessionError(f"{self.name} failed on inputs of shape {shapes}: {one_line(error, 600)}") from error
        return dict(zip(names, values, strict=True))

    def close(self) -> None:
        """Release the model's memory; closing twice is fine."""
        self._stop_following()
        # ONNX Runtime frees memory after each run, in a thread where its last owner must not go.
        if self._session is not None and self._stream is not None:
            self._stream.synchronize()
        elif self._binding is not None:
            self._binding.wait()
        self._session = self._binding = self._runner = None


def _package(purpose: str) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise MissingPackageError("onnxruntime", "", purpose) from None
    return onnxruntime


def available_providers() -> tuple[str, ...]:
    """Those of detrt's providers that this build of ONNX Runtime has; a GPU may still be missing."""
    have = _package("running ONNX files").get_available_providers()
    return tuple(name for name, full in _PROVIDERS.items() if full in have)


def require_provider(provider: str) -> None:
    """Raise SessionError where ONNX Runtime has no such provider here, MissingPackageError where it is missing."""
    _providers(provider, _package("running ONNX files").get_available_providers())


# Optimisations that quantize biases, and repeat Q/DQ pairs on the other side of a Reshape.
_QUANTIZES_MORE = ("WeightBiasQuantization", "QDQPropagationTransformer")


def optimize_basic(model: bytes) -> bytes:
    """ONNX Runtime's basic graph optimisation: standard operators only, the same function, the same quantized tensors.

    Raises:
        SessionError: ONNX Runtime refuses the graph.
    """
    onnxruntime = _package("simplifying a graph")
    with files.scratch() as folder:
        target = folder / "optimized.onnx"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(target)
        try:
            onnxruntime.InferenceSession(
                model, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(_QUANTIZES_MORE)
            )
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise _load_error("the traced graph", error) from None
        return target.read_bytes()


def run_graph(model: bytes | Path, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run a graph of any inputs and outputs once on the CPU; output name -> array.

    Raises:
        SessionError: ONNX Runtime refuses the graph or the feeds.
    """
    onnxruntime = _package("running ONNX files")
    try:
        session = onnxruntime.InferenceSession(
            model if isinstance(model, bytes) else str(model),
            _options(onnxruntime, _threads(None)),
            providers=["CPUExecutionProvider"],
        )
        names = [info.name for info in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise _load_error("the graph", error) from None


def profiled_run(
    model: bytes | Path, feeds: Feeds, folder: Path, *, optimise: bool = False, runs: int = 1, threads: int | None = None
) -> Path:
    """Run a graph and return the profiler's JSON file in `folder`.

    optimise: as a session runs it; otherwise as it is written. runs: how often; all are in the file.

    Raises:
        SessionError: ONNX Runtime refuses the graph or the feeds.
    """
    onnxruntime = _package("running ONNX files")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if optimise:
        options.intra_op_num_threads = _threads(threads)
    else:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "run")
    try:
        source = model if isinstance(model, bytes) else str(model)
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        for _ in range(runs):
            session.run(None, {name: np.ascontiguousarray(array) for name, array in feeds.items()})
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise _load_error("the graph", error) from None
    return Path(session.end_profiling())


def _existing(path: Path) -> Path:
    if path.is_dir():
        raise SessionError(f"'{path}' is a folder, not an ONNX file")
    if not path.is_file():
        raise SessionError(f"there is no ONNX file '{path}'; check the path, or make one with: detrt export")
    if path.stat().st_size == 0:
        raise SessionError(f"'{path}' is empty (0 bytes); export it again")
    return path


def _providers(provider: str, available: list[str]) -> tuple[list[Any], str]:
    kind, _, number = provider.strip().lower().partition(":")
    if kind == "rtx" and (not number or number.isdigit()):
        return [(kind, {"device_id": number or "0"})], RTX
    if kind not in _PROVIDERS:
        raise SessionError(f"a device of ONNX Runtime is one of {', '.join(_PROVIDERS)}, e.g. cuda:0; got {provider!r}")
    if number and not number.isdigit():
        raise SessionError(f"the device number of a provider must be an integer; got {provider!r}")
    if _PROVIDERS[kind] not in available:
        here = [name for name, full in _PROVIDERS.items() if full in available]
        raise SessionError(
            f"provider '{kind}' is not in this build of ONNX Runtime; available: {', '.join(here)}. "
            + ("Install onnxruntime-gpu, or use" if has_driver() else "This machine has no NVIDIA GPU, or no driver for it: use")
            + " `device=cpu`"
        )
    if kind == "cpu":
        return [_PROVIDERS["cpu"]], "onnxruntime-cpu"
    options: dict[str, str] = {"device_id": number or "0"}
    if kind == "cuda":
        options["use_tf32"] = "0"  # the default rounds float32 inputs of matmuls to 10 bits
        # The default tries all ways for every new size, seconds each, and in FP16 chose ones without tensor cores (docs/results/gpu.md).
        options["cudnn_conv_algo_search"] = "HEURISTIC"
    return [(_PROVIDERS[kind], options), _PROVIDERS["cpu"]], f"onnxruntime-{kind}"


def _options(onnxruntime: Any, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is raised, so it need not be printed as well
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return options


def _shared_stream(onnxruntime: Any, providers: list[Any]) -> Any:
    """The stream of PyTorch that ONNX Runtime computes on, so that neither waits for the other; None without PyTorch.

    PyTorch is loaded first in any case: it brings the CUDA libraries that ONNX Runtime's own package leaves out.
    """
    onnxruntime.set_default_logger_severity(4)  # what cuDNN refuses goes to standard error otherwise, and another way is taken
    try:
        from ..gpu.runner import stream_for

        stream = stream_for(int(providers[0][1]["device_id"]))
    except (ImportError, OSError):
        stream = None
    if stream is not None:
        providers[0][1]["user_compute_stream"] = str(stream.cuda_stream)
    elif hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find
            onnxruntime.preload_dlls()
    return stream


def _threads(threads: int | None) -> int:
    if threads is not None:
        if threads < 1:
            raise SessionError(f"threads must be at least 1; got {threads}")
        return threads
    # The default of ONNX Runtime counts the machine's cores, also those a container may not use.
    return usable_cores()


def _tensor_info(node: Any) -> TensorInfo:
    match = re.fullmatch(r"tensor\((\w+)\)", node.type)
    dtype = _DTYPES.get(match[1]) if match else None
    if dtype is None:
        raise SessionError(f"tensor '{node.name}' has the type {node.type}, which no detector uses")
    shape = tuple(axis if isinstance(axis, (int, str)) else f"{node.name}_{index}" for index, axis in enumerate(node.shape))
    return TensorInfo(node.name, dtype, shape)


def _without_plugins(source: str | bytes) -> bytes | None:
    """The graph of a file with the nodes of TensorRT plugins lowered; None if it has none, or cannot be read here."""
    try:
        from ... import graph
        from ...graph.msda_plugin import plugin_nodes, runnable

        if isinstance(source, bytes) or not plugin_nodes(model := graph.load(Path(source))):
            return None
        return runnable(model).SerializeToString()
    except (ImportError, GraphError):
        return None


def _emulated(path: Path) -> bytes | None:
    """The graph of a file with its roundings spelled out, see `graph.emulate_low_precision`; None if it has none."""
    from ... import graph
    from ...graph.view import GraphView

    model = _rounding(GraphView(graph.load(path)))
    return None if model is None else model.SerializeToString()


def _rounding(view: GraphView) -> ModelProto | None:
    from ...graph.emulate_low_precision import emulate, has_16_bit, needs_emulation
    from ...graph.msda_plugin import runnable

    if not (has_16_bit(view.types) or needs_emulation(view.model)):
        return None
    return runnable(emulate(view.model, view.types))


def _load_error(name: str, error: Exception) -> SessionError:
    text = one_line(error, 600)
    if match := re.search(r"\bdetrt:(?::)?(\w+)", text):
        return SessionError(
            f"{name} has nodes detrt::{match[1]}, which only detrt's own passes and plugins know; "
            "lower them to standard operators first (detrt export does, unless told not to)"
        )
    if match := re.search(r"Could not find an implementation for (\w+)\(\d+\)", text):
        return SessionError(
            f"ONNX Runtime has no {match[1]} here for the types of {name}; its CPU has none for BF16. Run an engine or a package of "
            "the model instead (`build(MODEL, output=OUT, precision=bf16, targets=tensorrt)`, or `targets=inductor`), or build it "
            "with `precision=fp16` or fp32 for ONNX Runtime"
        )
    # The last one: ONNX Runtime 1.31 with CUDA, for a type that no provider has the operator in.
    unknown = r"opset|ai\.onnx\.ml|IR version|is not a registered function|NOT_IMPLEMENTED|Provider type for \w+ node"
    if re.search(unknown, text, re.IGNORECASE):
        return SessionError(f"{name} needs operators that this ONNX Runtime does not have: {text}")
    if "protobuf" in text.lower() or "INVALID_PROTOBUF" in text:
        return SessionError(f"{name} is not an ONNX file, or it is damaged or truncated; copy or export it again")
    return SessionError(f"{name} cannot be loaded; export it again, or copy it again with the weights that lie beside it: {text}")
