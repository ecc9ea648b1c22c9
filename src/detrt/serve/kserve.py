"""The tensors of the KServe v2 inference protocol (Open Inference Protocol) with its binary extension.

A request is JSON, or JSON of `Inference-Header-Content-Length` bytes and after it the tensors that say
`binary_data_size`, in order. https://github.com/kserve/open-inference-protocol, and Triton's extension_binary_data.md.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from numpy.typing import NDArray

from ..data.preprocess import check_size
from ..errors import SpecError
from ..spec import PIXEL_VALUES, TensorInfo
from .config import ServeConfig
from .errors import Refused
from .messages import ModelFacts, TensorTask
from .request import Bodies, infer_operation, refusals
from .scheduler import Calls

VERSION = "1"  # of every model
_DTYPES = {
    "BOOL": "bool",
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_KNOWN_PARAMETERS = {"timeout", "priority", "binary_data_output", "triton_enable_empty_final_response"}
_MAX_ELEMENTS = 2**40  # elements; larger numbers are mistakes


@dataclass(frozen=True, slots=True)
class InferRequest:
    """inputs: the tensors by name. outputs: (name, whether as binary), in the order of the response. timeout_ms: None: the default of the server."""

    id: str
    inputs: Mapping[str, NDArray]
    outputs: tuple[tuple[str, bool], ...]
    timeout_ms: float | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


def bad(message: str) -> Refused:
    return Refused(400, "bad_request", message)


def datatype(dtype: str) -> str:
    """Protocol name of a NumPy dtype: "float32" -> "FP32"."""
    return _NAMES[dtype]


def parse_infer(
    body: bytes, header_length: int | None, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]
) -> InferRequest:
    """Read a request for a model with these inputs and outputs.

    Raises:
        Refused: an invalid request.
    """
    if header_length is not None and not 0 < header_length <= len(body):
        raise bad(f"Inference-Header-Content-Length must be from 1 to the {len(body)} bytes of the body; got {header_length}")
    head, tail = (body, b"") if header_length is None else (body[:header_length], body[header_length:])
    try:
        data = json.loads(head, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        text = str(error).partition(";")[0]  # then comes Python's advice
        raise bad(f"the body is not JSON ({text[:200]}); binary tensors need Inference-Header-Content-Length") from None
    if not isinstance(data, dict):
        raise bad("the body must be a JSON object with 'inputs'")
    parameters = _object(data, "parameters", "the request")
    _check_parameters(parameters)
    feeds = _feeds(data, tail, inputs)
    binary = bool(parameters.get("binary_data_output", False))
    wanted = _wanted(data, [info.name for info in outputs], binary)
    identity = data.get("id", "")
    if not isinstance(identity, str):
        raise bad(f"'id' must be text; got {json.dumps(identity)[:60]}")
    return InferRequest(identity, feeds, wanted, _timeout_ms(parameters), parameters)


def build_infer(model: str, request: InferRequest, outputs: Mapping[str, NDArray]) -> tuple[bytes, int | None]:
    """The body of a response, and the length of its JSON if binary tensors follow it.

    Raises:
        Refused: an output with numbers that JSON does not support.
    """
    rows: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for name, binary in request.outputs:
        array = np.ascontiguousarray(outputs[name])
        row: dict[str, Any] = {"name": name, "datatype": datatype(array.dtype.name), "shape": list(array.shape)}
        if binary:
            tail.append(array.tobytes())
            row["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise bad(f"output '{name}' has infinite numbers, which JSON does not have; ask for it with binary_data")
            row["data"] = array.reshape(-1).tolist()
        rows.append(row)
    answer: dict[str, Any] = {"model_name": model, "model_version": VERSION, "outputs": rows}
    if request.id:
        answer["id"] = request.id
    head = json.dumps(answer, separators=(",", ":")).encode()
    return (b"".join([head, *tail]), len(head)) if tail else (head, None)


def _feeds(data: Mapping[str, Any], tail: bytes, infos: Sequence[TensorInfo]) -> dict[str, NDArray]:
    entries = data.get("inputs")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise bad("'inputs' must be a list of objects with name, shape, datatype and data")
    known = {info.name: info for info in infos}
    feeds: dict[str, NDArray] = {}
    offset = 0
    for entry in entries:
        name = entry.get("name")
        if not isinstance(name, str) or name not in known:
            raise bad(f"input {json.dumps(name)[:80]} is not one of the model's: {', '.join(known)}")
        if name in feeds:
            raise bad(f"input '{name}' is given twice")
        shape, dtype = _shape(entry, known[name]), known[name].dtype
        if entry.get("datatype") != datatype(dtype):
            raise bad(f"input '{name}' must be {datatype(dtype)}; got {json.dumps(entry.get('datatype'))[:60]}")
        own = _object(entry, "parameters", f"input '{name}'")
        if any(key.startswith("shared_memory") for key in own):
            raise bad(f"input '{name}': shared memory is not offered; send the tensor in the body")
        size = own.get("binary_data_size")
        if size is None:
            feeds[name] = _from_json(entry.get("data"), shape, dtype, name)
            continue
        feeds[name] = _from_binary(tail, offset, size, shape, dtype, name)
        offset += size
    if missing := [name for name in known if name not in feeds]:
        raise bad(f"the model takes the inputs {', '.join(known)}; missing: {', '.join(missing)}")
    if offset != len(tail):
        raise bad(f"{len(tail)} bytes follow the JSON, but the inputs name {offset}")
    _check_shapes(feeds, infos)
    return feeds


def _shape(entry: Mapping[str, Any], info: TensorInfo) -> tuple[int, ...]:
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(axis) is int and axis >= 0 for axis in shape):
        raise bad(f"input '{info.name}' needs a 'shape' of integers; got {json.dumps(shape)[:100]}")
    if len(shape) != len(info.shape) or math.prod(shape) > _MAX_ELEMENTS:
        raise bad(f"input '{info.name}' must have the shape {list(info.shape)}; got {str(shape)[:100]}")
    if 0 in shape:
        raise bad(f"input '{info.name}' is empty: shape {shape}; every axis must be at least 1")
    return tuple(shape)


def _check_shapes(feeds: Mapping[str, NDArray], infos: Sequence[TensorInfo]) -> None:
    rows = {name: len(array) for name, array in feeds.items()}
    if len(set(rows.values())) > 1:
        raise bad(f"all inputs must have the same number of images, their first axis; got {rows}")
    for info in infos:
        for expected, actual in zip(info.shape[1:], feeds[info.name].shape[1:], strict=True):
            if isinstance(expected, int) and expected != actual:
                raise bad(f"input '{info.name}' must have the shape {list(info.shape)}; got {list(feeds[info.name].shape)}")


def _from_binary(tail: bytes, offset: int, size: Any, shape: tuple[int, ...], dtype: str, name: str) -> NDArray:
    needed = math.prod(shape) * np.dtype(dtype).itemsize
    if type(size) is not int or size != needed:
        raise bad(f"input '{name}' of shape {list(shape)} has {needed} bytes; binary_data_size says {json.dumps(size)[:40]}")
    if offset + size > len(tail):
        raise bad(f"input '{name}' needs {size} bytes behind the JSON, from byte {offset}; there are {len(tail)}")
    # A view of the body: the worker gets a copy anyway.
    return np.frombuffer(tail, dtype, count=math.prod(shape), offset=offset).reshape(shape)


def _from_json(data: Any, shape: tuple[int, ...], dtype: str, name: str) -> NDArray:
    if not isinstance(data, list):
        raise bad(f"input '{name}' needs 'data', a list of numbers, or binary_data_size")
    try:
        found = np.array(data)
    except (ValueError, OverflowError):
        raise bad(f"input '{name}': 'data' must be numbers, flat or nested as the shape {list(shape)}") from None
    if found.size != math.prod(shape) or (found.ndim != 1 and found.shape != shape):
        raise bad(f"input '{name}' of shape {list(shape)} needs {math.prod(shape)} numbers; 'data' has {found.size}")
    target = np.dtype(dtype)
    allowed = {"b": "b", "u": "ui", "i": "ui", "f": "uif"}[target.kind]
    if found.dtype.kind not in allowed:
        raise bad(f"input '{name}' takes {datatype(dtype)}; 'data' holds other values")
    if target.kind in "ui":
        limits = np.iinfo(target)
        if found.min() < limits.min or found.max() > limits.max:
            raise bad(f"input '{name}' takes {datatype(dtype)}, from {limits.min} to {limits.max}; 'data' has values beyond")
    with np.errstate(over="ignore"):
        return found.astype(target).reshape(shape)


def _wanted(data: Mapping[str, Any], names: Sequence[str], binary: bool) -> tuple[tuple[str, bool], ...]:
    entries = data.get("outputs")
    if not entries:
        if entries not in (None, []):
            raise bad("'outputs' must be a list of objects with a name")
        return tuple((name, binary) for name in names)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise bad("'outputs' must be a list of objects with a name")
    wanted: dict[str, bool] = {}
    for entry in entries:
        name = entry.get("name")
        if not isinstance(name, str) or name not in names:
            raise bad(f"output {json.dumps(name)[:80]} is not one of the model's: {', '.join(names)}")
        own = _object(entry, "parameters", f"output '{name}'")
        if own.get("classification") or any(key.startswith("shared_memory") for key in own):
            raise bad(f"output '{name}': classification and shared memory are not offered; take the tensor")
        wanted[name] = bool(own.get("binary_data", binary))
    return tuple(wanted.items())


def _object(data: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    found = data.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise bad(f"'{key}' of {where} must be an object; got {json.dumps(found)[:60]}")
    return found


def _check_parameters(parameters: Mapping[str, Any]) -> None:
    if any(key.startswith("sequence_") and value for key, value in parameters.items()):
        raise bad("this model keeps no state; leave the sequence parameters out")
    unknown = [key for key in parameters if key not in _KNOWN_PARAMETERS and not key.startswith("sequence_")]
    if unknown:
        raise bad(f"parameter '{unknown[0][:60]}' is not known; known are: {', '.join(sorted(_KNOWN_PARAMETERS))}")


def _timeout_ms(parameters: Mapping[str, Any]) -> float | None:
    """Timeout of a request, which Triton gives in microseconds; 0 means none."""
    value = parameters.get("timeout")
    if value is None or (type(value) is int and value == 0):
        return None
    if type(value) is not int or not 0 < value <= 86_400_000_000:
        raise bad(f"'timeout' must be an integer of microseconds; got {json.dumps(value)[:40]}")
    return value / 1e3


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that JSON has")


def binary_length(text: str | None) -> int | None:
    """Value of the header Inference-Header-Content-Length. Raises Refused."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise bad(f"Inference-Header-Content-Length must be a number of bytes; got '{text[:40]}'")
    return int(text)


# Routes of the KServe v2 inference protocol, so that clients such as tritonclient work unchanged.
#
# Models have the tensors of their graphs: pixels to logits and boxes (or decoded boxes); `/v1/detect` takes image files.
# Supported extensions of the protocol are `_EXTENSIONS`; of the model repository, the index only.
_EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository"]
_IN_THREAD = 256 * 1024  # bytes; a larger body is parsed in a thread

# Memory of attention grows faster than the image; limit of the input size relative to that of the model.
_AREA_FACTOR = 4


def add_kserve(app: FastAPI, calls: Calls, bodies: Bodies, config: ServeConfig) -> None:
    reading = asyncio.Semaphore(2)  # JSON numbers take twenty times their size in memory while parsed
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
        """Routes with and without a version."""

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
            length = binary_length(request.headers.get("inference-header-content-length"))
            async with bodies.reading(request) as body:
                calls.metrics.body_bytes.inc(len(body))
                if len(body) > _IN_THREAD and length is None:
                    async with reading:
                        infer_request = await asyncio.to_thread(parse_infer, body, length, facts.inputs, facts.outputs)
                else:
                    infer_request = parse_infer(body, length, facts.inputs, facts.outputs)
                task = _task(infer_request, facts)
                answers, _ = await calls.run(request, facts, [task], infer_request.timeout_ms)
            value = answers[0].value
            assert isinstance(value, dict)
            data, head = build_infer(facts.name, infer_request, value)
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
    """Triton's model configuration: axes without the batch, which is `max_batch_size`."""

    def row(info: TensorInfo) -> dict[str, Any]:
        dtype = datatype(info.dtype)
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
    return {"name": info.name, "datatype": datatype(info.dtype), "shape": shape}


def _task(infer_request: InferRequest, facts: ModelFacts) -> TensorTask:
    """The task of a request. Raises Refused for tensors that are too large."""
    rows = len(next(iter(infer_request.inputs.values())))
    if rows > facts.max_batch:
        raise Refused(400, "bad_request", f"the request has a batch of {rows}; this model takes at most {facts.max_batch}")
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
    return TensorTask(infer_request.inputs, rows)


def _json(data: dict[str, Any]) -> Response:
    return Response(json.dumps(data).encode(), media_type="application/json")


def _with_path(operation: dict[str, Any], prefix: str) -> dict[str, Any]:
    names = [part[1:-1] for part in prefix.split("/") if part.startswith("{")]
    rows = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    return {**operation, "parameters": rows}
