"""The tensors of the KServe v2 inference protocol (Open Inference Protocol) with its binary extension.

A request is JSON, or JSON of `Inference-Header-Content-Length` bytes and after it the tensors that say
`binary_data_size`, in order. https://github.com/kserve/open-inference-protocol, and Triton's extension_binary_data.md.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.worker_process import Bulk
from ..errors import number_of
from ..files import parse_json
from ..spec import TensorInfo
from .errors import bad
from .messages import TensorTask

VERSION = "1"  # of every model
GRAPH = ":graph"  # behind the name of a model: its graph
BYTES = "bytes"  # as a dtype: elements of any length, in arrays of objects
_DTYPES = {
    "BOOL": "bool",
    "BYTES": BYTES,
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()} | {"object": "BYTES"}
_LENGTH = struct.Struct("<I")  # before each element of BYTES in binary form
_KNOWN_PARAMETERS = {"timeout", "priority", "binary_data_output", "triton_enable_empty_final_response"}
_MAX_ELEMENTS = 2**40  # elements; larger numbers are mistakes
_MAX_NUMBERS = 2**20  # of an output in JSON, which takes ten times the memory of its binary form
# Most marks in the JSON of a request. Tensors of numbers need none of them but the brackets of their rows, so that the memory
# of what is parsed is that of its numbers.
_MARKS = {b'"': 10_000, b"{": 1000, b"[": 2**20}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """inputs: the tensors by name. outputs: (name, whether as binary), in the order of the response. timeout_ms: None: the default of the server."""

    id: str
    inputs: Mapping[str, NDArray]
    outputs: tuple[tuple[str, bool], ...]
    timeout_ms: float | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


def datatype(dtype: str) -> str:
    """Protocol name of a NumPy dtype: "float32" -> "FP32"."""
    return _NAMES[dtype]


def config_type(dtype: str) -> str:
    """Its name in a model configuration of Triton: "float32" -> "TYPE_FP32"."""
    return "TYPE_" + datatype(dtype).replace("BYTES", "STRING")


def parse_infer(
    body: bytes | bytearray,
    header_length: int | None,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    *,
    optional: bool = False,
) -> InferRequest:
    """Read a request for a model with these inputs and outputs. optional: inputs may be left out.

    Raises:
        Refused: an invalid request.
    """
    if header_length is not None and not 0 < header_length <= len(body):
        raise bad(f"Inference-Header-Content-Length must be from 1 to the {len(body)} bytes of the body; got {header_length}")
    head, tail = (body, b"") if header_length is None else (body[:header_length], body[header_length:])
    for mark, most in _MARKS.items():
        if head.count(mark) > most:
            raise bad(f"the JSON has more than {most} times {mark.decode()}; send the numbers of a tensor, best as binary data")
    try:
        data = parse_json(head, finite=True, unique=True)
    except ValueError as error:
        raise bad(f"the body is not JSON ({str(error)[:200]}); binary tensors need Inference-Header-Content-Length") from None
    if not isinstance(data, dict):
        raise bad("the body must be a JSON object with 'inputs'")
    parameters = _parameters(data, "the request")
    _check_parameters(parameters)
    feeds = _feeds(data, tail, inputs, optional)
    binary = bool(parameters.get("binary_data_output", False))
    wanted = _wanted(data, [info.name for info in outputs], binary)
    identity = data.get("id", "")
    if not isinstance(identity, str):
        raise bad(f"'id' must be text; got {json.dumps(identity)[:60]}")
    return InferRequest(identity, feeds, wanted, _timeout_ms(parameters), parameters)


def build_infer(model: str, request: InferRequest | TensorTask, outputs: Mapping[str, NDArray]) -> tuple[bytes, int | None]:
    """The body of a response, and the length of its JSON if binary tensors follow it.

    Raises:
        Refused: an output with numbers that JSON does not support, or with too many.
    """
    rows: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for name, binary in request.outputs:
        array = np.ascontiguousarray(outputs[name])
        row: dict[str, Any] = {"name": name, "datatype": datatype(array.dtype.name), "shape": list(array.shape)}
        if binary:
            tail.append(_packed(array) if array.dtype == object else array.tobytes())
            row["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            if array.size > _MAX_NUMBERS:
                raise bad(
                    f"output '{name}' has {array.size} numbers, in JSON at most {_MAX_NUMBERS}; ask for it with binary_data"
                )
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise bad(f"output '{name}' has infinite numbers, which JSON does not have; ask for it with binary_data")
            flat = array.reshape(-1).tolist()
            row["data"] = [one.decode("utf-8", "replace") for one in flat] if array.dtype == object else flat
        rows.append(row)
    answer: dict[str, Any] = {"model_name": model, "model_version": VERSION, "outputs": rows}
    if request.id:
        answer["id"] = request.id
    head = json.dumps(answer, separators=(",", ":")).encode()
    return (b"".join([head, *tail]), len(head)) if tail else (head, None)


def _feeds(data: Mapping[str, Any], tail: bytes | bytearray, infos: Sequence[TensorInfo], optional: bool) -> dict[str, NDArray]:
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
        own = _parameters(entry, f"input '{name}'")
        if any(key.startswith("shared_memory") for key in own):
            raise bad(f"input '{name}': shared memory is not offered; send the tensor in the body")
        size = own.get("binary_data_size")
        if size is None:
            feeds[name] = _from_json(entry.get("data"), shape, dtype, name)
            continue
        feeds[name] = _from_binary(tail, offset, size, shape, dtype, name)
        offset += size
    if missing := [name for name in known if name not in feeds and not optional]:
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
    for info in (info for info in infos if info.name in feeds):
        for expected, actual in zip(info.shape[1:], feeds[info.name].shape[1:], strict=True):
            if isinstance(expected, int) and expected != actual:
                raise bad(f"input '{info.name}' must have the shape {list(info.shape)}; got {list(feeds[info.name].shape)}")


def _from_binary(tail: bytes | bytearray, offset: int, size: Any, shape: tuple[int, ...], dtype: str, name: str) -> NDArray:
    if dtype == BYTES:
        return _unpacked(tail, offset, size, shape, name)
    needed = math.prod(shape) * np.dtype(dtype).itemsize
    if type(size) is not int or size != needed:
        raise bad(f"input '{name}' of shape {list(shape)} has {needed} bytes; binary_data_size says {json.dumps(size)[:40]}")
    if offset + size > len(tail):
        raise bad(f"input '{name}' needs {number_of(size, 'byte')} behind the JSON, from byte {offset}; there are {len(tail)}")
    # A view of the body: the worker gets a copy anyway.
    return np.frombuffer(tail, dtype, count=math.prod(shape), offset=offset).reshape(shape)


def _packed(array: NDArray) -> bytes:
    return b"".join(part for one in array.reshape(-1).tolist() for part in (_LENGTH.pack(len(one)), one))


def _unpacked(tail: bytes | bytearray, offset: int, size: Any, shape: tuple[int, ...], name: str) -> NDArray:
    """The elements of BYTES, each behind its length."""
    if type(size) is not int or not 0 <= size <= len(tail) - offset:
        left = len(tail) - offset
        raise bad(f"input '{name}': binary_data_size says {json.dumps(size)[:40]}; {left} bytes are left behind the JSON")
    count, end, found, view = math.prod(shape), offset + size, [], memoryview(tail)
    while offset + _LENGTH.size <= end and len(found) < count:
        (length,) = _LENGTH.unpack_from(tail, offset)
        offset += _LENGTH.size
        found.append(Bulk(view[offset : min(end, offset + length)]))
        offset += length
    if offset != end or len(found) != count:
        raise bad(f"input '{name}' of shape {list(shape)} needs {number_of(count, 'element')}, each behind its length in 4 bytes")
    return _objects(found, shape)


def _objects(values: Sequence[bytes | Bulk], shape: tuple[int, ...]) -> NDArray:
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(shape)


def _from_json(data: Any, shape: tuple[int, ...], dtype: str, name: str) -> NDArray:
    if not isinstance(data, list):
        raise bad(f"input '{name}' needs 'data', a list of numbers, or binary_data_size")
    count = math.prod(shape)
    numbers = data if len(shape) == 1 or not data or not isinstance(data[0], list) else _flat(data, shape, name)
    if len(numbers) != count:
        raise bad(f"input '{name}' of shape {list(shape)} needs {number_of(count, 'number')}; 'data' has {len(numbers)}")
    kinds = set(map(type, numbers))
    if list in kinds:
        raise bad(f"input '{name}': 'data' must be numbers, flat or nested as the shape {list(shape)}")
    if dtype == BYTES:
        if not kinds <= {str}:
            raise bad(f"input '{name}' takes BYTES, as texts; 'data' holds other values. Send what is no text as binary data")
        return _objects([text.encode("utf-8", "surrogatepass") for text in numbers], shape)
    target = np.dtype(dtype)
    if not kinds <= {"b": {bool}, "u": {int}, "i": {int}, "f": {int, float}}[target.kind]:
        raise bad(f"input '{name}' takes {datatype(dtype)}; 'data' holds other values")
    wide = {"b": bool, "u": np.uint64, "i": np.int64, "f": np.float64}[target.kind]
    limits = np.iinfo(target) if target.kind in "ui" else None
    try:
        found = np.fromiter(numbers, wide, count)
    except OverflowError:
        found = None
    if found is None or (limits is not None and (found.min() < limits.min or found.max() > limits.max)):
        within = "" if limits is None else f", from {limits.min} to {limits.max}"
        raise bad(f"input '{name}' takes {datatype(dtype)}{within}; 'data' has values beyond")
    with np.errstate(over="ignore"):
        return found.astype(target, copy=False).reshape(shape)


def _flat(rows: list[Any], shape: tuple[int, ...], name: str) -> list[Any]:
    """The numbers of nested lists. Raises Refused: lists that are not nested as the shape says."""
    for depth, axis in enumerate(shape):
        if depth:
            if not all(type(row) is list and len(row) == axis for row in rows):
                raise bad(f"input '{name}': 'data' must be numbers, flat or nested as the shape {list(shape)}")
            rows = list(itertools.chain.from_iterable(rows))
        elif len(rows) != axis:
            raise bad(f"input '{name}' of shape {list(shape)} needs {number_of(axis, 'row')}; 'data' has {len(rows)}")
    return rows


def _wanted(data: Mapping[str, Any], names: Sequence[str], binary: bool) -> tuple[tuple[str, bool], ...]:
    entries = data.get("outputs")
    if entries in (None, []):
        return tuple((name, binary) for name in names)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise bad("'outputs' must be a list of objects with a name")
    wanted: dict[str, bool] = {}
    for entry in entries:
        name = entry.get("name")
        if not isinstance(name, str) or name not in names:
            raise bad(f"output {json.dumps(name)[:80]} is not one of the model's: {', '.join(names)}")
        own = _parameters(entry, f"output '{name}'")
        if own.get("classification") or any(key.startswith("shared_memory") for key in own):
            raise bad(f"output '{name}': classification and shared memory are not offered; take the tensor")
        wanted[name] = bool(own.get("binary_data", binary))
    return tuple(wanted.items())


def _parameters(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    found = data.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise bad(f"'parameters' of {where} must be an object; got {json.dumps(found)[:60]}")
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


def binary_length(text: str | None) -> int | None:
    """Value of the header Inference-Header-Content-Length. Raises Refused."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise bad(f"Inference-Header-Content-Length must be a number of bytes; got '{text[:40]}'")
    return int(text)
