"""Run an OpenVINO model: any batch and size, several batches at a time where it is opened for throughput."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ... import files
from ...bundle import EngineFacts, check_digest, read_sidecar
from ...errors import EngineError, SessionError, SpecError
from ...spec import ModelSpec, Precision, TensorInfo
from ...system import SATURATES, saturates_int8, usable_cores
from ..base import BaseSession, Choices, Feeds, Outputs, PendingOutputs, SessionInfo, check_feeds, check_spec
from .config import PERFORMANCE, OpenVinoConfig
from .runtime import cache_folder, core, device_name, inference_type, package, short


class OpenVinoSession(BaseSession):
    """A Session over a model of `detrt build --target openvino`. Several threads may call it at once.

    path: the `.xml` file; its weights lie beside it. spec, facts: from the bundle; None: from the sidecar beside the file.
    device: "cpu", or "xpu:N" and "npu" where OpenVINO finds one. threads: of the CPU; default: as many as this process may
    use. performance, streams: as `OpenVinoRun`; None: as the model was built. model_cache: folder of compiled models;
    None: that of the environment variable DETRT_OPENVINO_CACHE, or none. graph: the ONNX file that the model was written from, which tells what it selects.

    Raises:
        EngineError: the files are damaged, or OpenVINO cannot compile them here.
        SessionError: a device that is not there. MissingPackageError: openvino is not installed.
    """

    def __init__(
        self,
        path: Path | str,
        spec: ModelSpec | None = None,
        facts: EngineFacts | None = None,
        *,
        device: str | None = None,
        threads: int | None = None,
        performance: str | None = None,
        streams: int | None = None,
        model_cache: Path | str | None = None,
        graph: Path | None = None,
    ) -> None:
        path = Path(path)
        package(f"running '{path.name}'")
        if spec is None or facts is None:
            spec, facts = read_sidecar(path)
        if threads is not None and threads < 1:
            raise SessionError(f"threads must be at least 1; got {threads}")
        built = OpenVinoConfig.from_dict(facts.options)
        config = OpenVinoConfig(
            performance=performance or built.performance, streams=streams or (built.streams if performance is None else None)
        )
        name = device_name(device)
        kind, note = inference_type(facts.precision, name)
        notes = [note] if note else []
        if name == "CPU" and Precision.INT8 in facts.precision.lower().split("+") and saturates_int8():
            notes.append(SATURATES)
        _check_weights(path, facts)
        self.path, self.spec, self._graph = path, spec, graph
        properties: dict[str, Any] = {
            "PERFORMANCE_HINT": (config.performance or PERFORMANCE[0]).upper(),
            "INFERENCE_PRECISION_HINT": kind,
        }
        if name == "CPU":
            # Pinned threads of several processes, such as the server's workers, would share the first cores.
            properties |= {"INFERENCE_NUM_THREADS": threads or usable_cores(), "ENABLE_CPU_PINNING": False}
        if config.streams is not None:
            properties["NUM_STREAMS"] = str(config.streams)
        folder = Path(model_cache) if model_cache is not None else cache_folder()
        if folder is not None:
            properties["CACHE_DIR"] = str(folder)
        try:
            self._compiled: Any = core().compile_model(str(path), name, properties)
            self._parallel = int(self._compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        except Exception as error:  # what OpenVINO raises shares no base class
            raise EngineError(f"'{path.name}' cannot be opened by OpenVINO on {name}: {short(error)}") from None
        self._idle: list[Any] = []
        self._lock = threading.Lock()
        inputs = tuple(TensorInfo(i["name"], i["dtype"], tuple(i["shape"])) for i in facts.inputs)
        outputs = tuple(TensorInfo(o["name"], o["dtype"], tuple(o["shape"])) for o in facts.outputs)
        self._info = SessionInfo(
            "openvino",
            f"openvino-{name.partition('.')[0].lower()}",
            (device or "cpu").lower(),
            inputs,
            outputs,
            path=path,
            facts=facts,
            parallel=self._parallel,
            notes=tuple(notes),
        )
        check_spec(f"'{path.name}'", spec, inputs, outputs)

    @property
    def compiled(self) -> Any:
        """OpenVINO's CompiledModel. Raises ClosedSessionError."""
        if self._compiled is None or self._forked:
            raise self._unusable()
        return self._compiled

    def run(self, feeds: Feeds, force: Choices | None = None) -> Outputs:
        """Run one batch.

        Raises:
            SessionError: feeds that do not fit, a failure inside the model, or a closed session.
        """
        self._refuse(force)
        return self.start(feeds).outputs()

    @property
    def tells_selections(self) -> bool:
        return self._graph is not None

    def selections(self, feeds: Feeds) -> tuple[Outputs, Choices]:
        """Read from the graph that the model was written from, in FP32 on the CPU; it is released after the run."""
        from ... import graph
        from ...graph.clean import with_outputs
        from ...graph.selections import topk_outputs

        if self._graph is None:
            raise SessionError(f"'{self.path.name}' cannot say what it selects")
        model = graph.load(self._graph)
        names = topk_outputs(model)
        with files.scratch() as folder:
            path = folder / self._graph.name
            graph.save(with_outputs(model, names), path)
            compiled = core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        found = compiled(dict(feeds))
        outputs = {name: found[compiled.output(name)].copy() for name in (*(info.name for info in self.outputs), *names)}
        return outputs, Choices([outputs.pop(name) for name in names])

    def start(self, feeds: Feeds) -> _Pending:
        """Begin one batch; its outputs are in `outputs()` of what is returned.

        Raises:
            SessionError: as `run`.
        """
        compiled = self.compiled
        check_feeds(self.inputs, feeds)
        with self._lock:
            request = self._idle.pop() if self._idle else compiled.create_infer_request()
        arrays = {info.name: np.ascontiguousarray(feeds[info.name]) for info in self.inputs}
        pending = _Pending(self, request, arrays)
        try:
            request.start_async(arrays, share_inputs=True)
        except Exception as error:  # as above
            raise pending.failure(error) from error
        return pending

    def release(self, request: Any) -> None:
        """Take back a request whose outputs are read."""
        with self._lock:
            if self._compiled is not None:
                self._idle.append(request)

    def close(self) -> None:
        """Release the model's memory; closing twice is fine."""
        with self._lock:
            self._compiled, self._idle = None, []


class _Pending(PendingOutputs):
    """A batch that OpenVINO works on. arrays: its inputs, which must live as long."""

    def __init__(self, session: OpenVinoSession, request: Any, arrays: Mapping[str, np.ndarray]) -> None:
        self._session, self._request, self._arrays = session, request, arrays

    def outputs(self) -> Outputs:
        """Wait for them. Raises SessionError: the model failed."""
        try:
            self._request.wait()
            # Copies: the memory of the request is written again by the next batch.
            found = {info.name: np.array(self._request.get_output_tensor(i).data) for i, info in enumerate(self._session.outputs)}
        except Exception as error:  # as above
            raise self.failure(error) from error
        self._session.release(self._request)
        return found

    def failure(self, error: Exception) -> SessionError:
        shapes = {name: array.shape for name, array in self._arrays.items()}
        return SessionError(f"'{self._session.path.name}' failed on inputs of shape {shapes}: {short(error)}")


def _check_weights(path: Path, facts: EngineFacts) -> None:
    """Compare the weights beside a model with what was written. Raises EngineError."""
    try:
        check_digest(path.with_suffix(".bin"), str(facts.options["weights_sha256"]))
    except KeyError:
        raise EngineError(f"the facts of '{path.name}' do not name its weights; build it again with detrt build") from None
    except SpecError as error:
        raise EngineError(str(error)) from None
