"""Routes of the KServe v2 inference protocol, so that clients such as tritonclient work unchanged; `kserve` has its tensors.

A model NAME detects: images and options in, detections out, with the tensors of `detection_tensors`, as in a repository of
`detrt triton-repo`. NAME:graph has the tensors of its graph: pixels to logits and boxes (or decoded boxes).
Supported extensions of the protocol are `_EXTENSIONS`; of the model repository, the index and the loading of models that are served.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from numpy.typing import NDArray

from ..backends.worker_process import Bulk
from ..data.preprocess import check_size
from ..errors import SpecError
from ..files import parse_json
from ..spec import PIXEL_VALUES, TensorInfo
from .bodies import Bodies
from .config import ServeConfig
from .detection_tensors import detection_inputs, detection_outputs, detection_tensors, image_tasks
from .errors import Refused, bad
from .hosts import is_loopback
from .kserve import GRAPH, VERSION, InferRequest, binary_length, build_infer, config_type, datatype
from .messages import Answer, ImageTask, ModelFacts, TensorTask
from .openapi import infer_operation, refusals
from .reader import Readers, ReadInfer
from .request import check_count
from .scheduler import Calls

_EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository"]

# Memory of attention grows faster than the image; limit of the input size relative to that of the model.
_AREA_FACTOR = 4
_LOAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Face:
    """A model of the protocol: a served one, or its graph."""

    name: str
    facts: ModelFacts
    inputs: Sequence[TensorInfo]
    outputs: Sequence[TensorInfo]

    @classmethod
    def of(cls, facts: ModelFacts, graph: bool) -> _Face:
        if graph:
            return cls(facts.name + GRAPH, facts, facts.inputs, facts.outputs)
        return cls(facts.name, facts, detection_inputs(**facts.takes), detection_outputs(facts.spec))

    @property
    def is_graph(self) -> bool:
        return self.name.endswith(GRAPH)


def add_kserve(app: FastAPI, calls: Calls, bodies: Bodies, readers: Readers) -> None:
    config = calls.config
    may_load = config.api_key is not None or is_loopback(config.host)  # it takes the memory and the time of a start
    short = {status: refusals(v2=True)[status] for status in (401, 404, 503)}

    @app.get("/v2", summary="The server", responses={401: short[401]})
    async def server() -> dict[str, Any]:
        return {"name": "detrt", "version": app.version, "extensions": _EXTENSIONS}

    @app.get("/v2/health/live", summary="Whether the server runs")
    async def live() -> Response:
        return Response(status_code=200)

    @app.get("/v2/health/ready", summary="Whether requests are answered", responses={503: short[503]})
    async def ready() -> Response:
        return Response(status_code=200 if calls.pool.ready_workers and not calls.stopping else 503)

    @app.post("/v2/repository/index", summary="Names of the models", responses={401: short[401]})
    async def index() -> list[dict[str, str]]:
        names = [name + face for name in calls.pool.models for face in ("", GRAPH)]
        return [{"name": name, "version": VERSION, "state": "READY", "reason": ""} for name in names]

    @app.post(
        "/v2/repository/models/{model}/load",
        summary="Open a model again, whose files have changed",
        responses={status: refusals(v2=True)[status] for status in (400, 401, 403, 404, 429, 503)},
        openapi_extra=_with_path({}, "/v2/repository/models/{model}/load"),
    )
    async def load(request: Request) -> Response:
        if not may_load:
            raise Refused(
                403,
                "no_loading",
                "models are loaded for those who show a key or are on the server's machine; start it with `api_key_file`, or send SIGHUP",
            )
        name = calls.model(request.path_params["model"]).name
        async with bodies.reading(request) as held:
            _check_load(held.take())
        if calls.pool.loading:
            raise Refused(429, "loading", "models are being loaded already; try again when they are", retry_after=5)
        await calls.pool.load([name])
        return Response(status_code=200)

    def model_routes(prefix: str, shown: bool) -> None:
        """Routes with and without a version."""

        def face_of(request: Request) -> _Face:
            version, name = request.path_params.get("version", VERSION), request.path_params["model"]
            face = _Face.of(calls.model(name.removesuffix(GRAPH)), name.endswith(GRAPH))
            if version != VERSION:
                raise Refused(404, "no_model", f"model '{face.name}' has the version {VERSION} only; got '{version[:40]}'")
            return face

        async def about(request: Request) -> Response:
            return _json(metadata_of(face_of(request)))

        async def model_ready(request: Request) -> Response:
            face_of(request)
            return Response(status_code=200 if calls.pool.ready_workers else 503)

        async def model_config(request: Request) -> Response:
            return _json(config_of(face_of(request)))

        async def infer(request: Request) -> Response:
            face = face_of(request)
            length = binary_length(request.headers.get("inference-header-content-length"))
            async with bodies.reading(request) as held:
                calls.metrics.body_bytes.inc(len(held.data))
                reading = ReadInfer(held.take(), length, face.inputs, face.outputs, optional=not face.is_graph)
                infer_request = await readers.read(reading)
                del reading
                held.hold(sum(map(_held, infer_request.inputs.values())))
                tasks: Any = [_task(infer_request, face.facts)] if face.is_graph else _image_tasks(infer_request, config)
                answers, _ = await calls.run(request, face.facts, tasks, infer_request.timeout_ms)
            value, head = (answers[0].value, answers[0].head_length) if face.is_graph else _detected(face, infer_request, answers)
            headers = {} if head is None else {"Inference-Header-Content-Length": str(head)}
            kind = "application/json" if head is None else "application/octet-stream"
            return Response(memoryview(value), headers=headers, media_type=kind)

        options: dict[str, Any] = {"include_in_schema": shown}
        asking: dict[str, Any] = {"responses": short, "openapi_extra": _with_path({}, prefix), **options}
        app.add_api_route(prefix, about, summary="Tensors of a model", **asking)
        app.add_api_route(f"{prefix}/ready", model_ready, summary="Whether a model answers", **asking)
        app.add_api_route(f"{prefix}/config", model_config, summary="A model as Triton describes it", **asking)
        app.add_api_route(
            f"{prefix}/infer",
            infer,
            methods=["POST"],
            summary="Run a model on tensors",
            responses=refusals(v2=True),
            openapi_extra=_with_path(infer_operation(), prefix),
            **options,
        )

    model_routes("/v2/models/{model}", True)
    model_routes("/v2/models/{model}/versions/{version}", False)


def _check_load(body: Bulk) -> None:
    """Raise Refused for parameters, with which a client of Triton gives another configuration or other files."""
    if len(body) > _LOAD_BYTES:
        raise Refused(413, "too_large", f"a request to load takes at most {_LOAD_BYTES} bytes")
    try:
        asked = parse_json(body) if body.strip() else {}
    except ValueError as error:
        raise bad(f"the body is not JSON: {error}") from None
    if not isinstance(asked, dict) or asked.get("parameters"):
        raise bad("a model is loaded from where it was served from, and takes no 'parameters'; send an empty body")


def metadata_of(face: _Face) -> dict[str, Any]:
    return {
        "name": face.name,
        "versions": [VERSION],
        "platform": f"detrt_{face.facts.backend}",
        "inputs": [_tensor(info) for info in face.inputs],
        "outputs": [_tensor(info) for info in face.outputs],
    }


def config_of(face: _Face) -> dict[str, Any]:
    """Triton's model configuration: axes without the batch, which is `max_batch_size`."""

    def row(info: TensorInfo, **more: Any) -> dict[str, Any]:
        return {"name": info.name, "data_type": config_type(info.dtype), "dims": _tensor(info)["shape"][1:], **more}

    optional = {} if face.is_graph else {"optional": True}
    return {
        "name": face.name,
        "platform": f"detrt_{face.facts.backend}",
        "backend": "detrt",
        "max_batch_size": face.facts.max_batch,
        "input": [row(info, **optional) for info in face.inputs],
        "output": [row(info) for info in face.outputs],
        "dynamic_batching": {"preferred_batch_size": [face.facts.max_batch]},
    }


def _tensor(info: TensorInfo) -> dict[str, Any]:
    shape = [axis if isinstance(axis, int) else -1 for axis in info.shape]
    return {"name": info.name, "datatype": datatype(info.dtype), "shape": shape}


def _task(infer_request: InferRequest, facts: ModelFacts) -> TensorTask:
    """The task of a request. Raises Refused for tensors that are too large."""
    rows = len(next(iter(infer_request.inputs.values())))
    if rows > facts.max_batch:
        raise bad(f"the request has a batch of {rows}; this model takes at most {facts.max_batch}")
    pixels = infer_request.inputs.get(PIXEL_VALUES)
    if pixels is not None and pixels.ndim == 4:
        height, width = pixels.shape[2:]
        given = facts.spec.input
        try:
            check_size(given, (height, width))
        except SpecError as error:
            raise bad(f"'{PIXEL_VALUES}': {error}") from None
        side = max(*facts.size_hw, given.longest_edge or 0)
        if height * width > _AREA_FACTOR * side * side:
            raise Refused(
                413, "too_large", f"'{PIXEL_VALUES}' has {height}x{width} pixels; at most {_AREA_FACTOR * side * side} are taken"
            )
    return TensorTask(infer_request.inputs, rows, infer_request.outputs, infer_request.id)


def _image_tasks(infer_request: InferRequest, config: ServeConfig) -> list[ImageTask]:
    """The tasks of a request for detections. Raises Refused."""
    tasks = image_tasks(infer_request.inputs, config.threshold)
    check_count("images", tasks, config.max_images)
    return tasks


def _detected(face: _Face, infer_request: InferRequest, answers: Sequence[Answer]) -> tuple[bytes, int | None]:
    found = [answer.detections for answer in answers if answer.detections is not None]
    return build_infer(face.name, infer_request, detection_tensors(found, face.facts.spec))


def _held(array: NDArray) -> int:
    """Bytes of an input in memory."""
    return sum(map(len, array.reshape(-1))) if array.dtype == object else array.nbytes


def _json(data: dict[str, Any]) -> Response:
    return Response(json.dumps(data).encode(), media_type="application/json")


def _with_path(operation: dict[str, Any], prefix: str) -> dict[str, Any]:
    names = [part[1:-1] for part in prefix.split("/") if part.startswith("{")]
    rows = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    return {**operation, "parameters": rows}
