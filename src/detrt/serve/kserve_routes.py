"""Routes of the KServe v2 inference protocol, so that clients such as tritonclient work unchanged.

A model is what its graph is: pixels in, logits and boxes (or decoded boxes) out; `/v1/detect` takes image files.
Of the protocol's extensions there are `_EXTENSIONS`; of the model repository only its index.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import FastAPI, Request, Response

from ..backends.base import TensorInfo
from ..spec import PIXEL_VALUES
from . import kserve
from .body import Bodies
from .calls import Calls
from .config import ServeConfig
from .errors import Refused
from .kserve import VERSION
from .messages import ModelFacts, TensorTask
from .openapi import infer_operation, refusals

_EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository"]
_IN_THREAD = 256 * 1024  # bytes; a larger body is read beside the event loop
# Memory of attention grows faster than the picture; no photograph needs more than this many times the model's size.
_AREA_FACTOR = 4


def add_kserve(app: FastAPI, calls: Calls, bodies: Bodies, config: ServeConfig) -> None:
    reading = asyncio.Semaphore(2)  # JSON of numbers takes twenty times its size in memory while it is read
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
        return [{"name": name, "version": VERSION, "state": "READY", "reason": ""} for name in calls.pool.models]

    def model_routes(prefix: str, shown: bool) -> None:
        """Each route twice, with a version and without."""

        def facts_of(request: Request) -> ModelFacts:
            version = request.path_params.get("version", VERSION)
            facts = calls.model(request.path_params["model"])
            if version != VERSION:
                raise Refused(404, "no_model", f"model '{facts.name}' has the version {VERSION} only; got '{version[:40]}'")
            return facts

        async def about(request: Request) -> Response:
            return _json(metadata_of(facts_of(request)))

        async def model_ready(request: Request) -> Response:
            facts_of(request)
            return Response(status_code=200 if calls.pool.ready_workers else 503)

        async def model_config(request: Request) -> Response:
            return _json(config_of(facts_of(request)))

        async def infer(request: Request) -> Response:
            facts = facts_of(request)
            length = kserve.binary_length(request.headers.get("inference-header-content-length"))
            async with bodies.reading(request) as body:
                calls.metrics.body_bytes.inc(len(body))
                if len(body) > _IN_THREAD and length is None:
                    async with reading:
                        asked = await asyncio.to_thread(kserve.parse_infer, body, length, facts.inputs, facts.outputs)
                else:
                    asked = kserve.parse_infer(body, length, facts.inputs, facts.outputs)
                task = _task(asked, facts)
                answers, _ = await calls.run(request, facts, [task], asked.timeout_ms)
            value = answers[0].value
            assert isinstance(value, dict)
            data, head = kserve.build_infer(facts.name, asked, value)
            headers = {} if head is None else {"Inference-Header-Content-Length": str(head)}
            return Response(data, headers=headers, media_type="application/json" if head is None else "application/octet-stream")

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


def metadata_of(facts: ModelFacts) -> dict[str, Any]:
    return {
        "name": facts.name,
        "versions": [VERSION],
        "platform": f"detrt_{facts.backend}",
        "inputs": [_tensor(info) for info in facts.inputs],
        "outputs": [_tensor(info) for info in facts.outputs],
    }


def config_of(facts: ModelFacts) -> dict[str, Any]:
    """Triton's model configuration: axes without the batch, which `max_batch_size` stands for."""

    def row(info: TensorInfo) -> dict[str, Any]:
        dtype = kserve.datatype(info.dtype)
        return {"name": info.name, "data_type": f"TYPE_{dtype}", "dims": _tensor(info)["shape"][1:]}

    return {
        "name": facts.name,
        "platform": f"detrt_{facts.backend}",
        "backend": "detrt",
        "max_batch_size": facts.max_batch,
        "input": [row(info) for info in facts.inputs],
        "output": [row(info) for info in facts.outputs],
        "dynamic_batching": {"preferred_batch_size": [facts.max_batch]},
    }


def _tensor(info: TensorInfo) -> dict[str, Any]:
    shape = [axis if isinstance(axis, int) else -1 for axis in info.shape]
    return {"name": info.name, "datatype": kserve.datatype(info.dtype), "shape": shape}


def _task(asked: kserve.InferRequest, facts: ModelFacts) -> TensorTask:
    """The task of a request. Raises Refused where its tensors are larger than the server takes."""
    rows = len(next(iter(asked.inputs.values())))
    if rows > facts.max_batch:
        raise Refused(400, "bad_request", f"the request has a batch of {rows}; this model takes at most {facts.max_batch}")
    pixels = asked.inputs.get(PIXEL_VALUES)
    if pixels is not None and pixels.ndim == 4:
        height, width = pixels.shape[2:]
        given = facts.spec.input
        side = max(*facts.size_hw, given.longest_edge or 0)
        if height * width > _AREA_FACTOR * side * side:
            raise Refused(
                413, "too_large", f"'{PIXEL_VALUES}' has {height}x{width} pixels; at most {_AREA_FACTOR * side * side} are taken"
            )
    return TensorTask(asked.inputs, rows)


def _json(data: dict[str, Any]) -> Response:
    return Response(json.dumps(data).encode(), media_type="application/json")


def _with_path(operation: dict[str, Any], prefix: str) -> dict[str, Any]:
    names = [part[1:-1] for part in prefix.split("/") if part.startswith("{")]
    rows = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    return {**operation, "parameters": rows}
