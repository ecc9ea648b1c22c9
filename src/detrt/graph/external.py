"""Which files an ONNX file keeps values in, read from its bytes alone: runtimes need no `onnx`."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

# Message -> number of a field -> its message, in onnx.proto: the ways from a model to the values of its tensors.
_FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "external"},
}
_KEY, _VALUE = 1, 2  # of an entry of `external_data`
_FIXED = {1: 8, 5: 4}  # wire type -> bytes
_LENGTH = 2  # wire type


def data_locations(path: str | os.PathLike) -> list[str]:
    """Names of the files, relative to the folder of an ONNX file, that hold values of its tensors, in subgraphs and functions too.

    Raises:
        ValueError: not an ONNX file, or one that is damaged.
    """
    if not Path(path).stat().st_size:
        return []
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b"location") < 0:  # the key of every name
            return []
        found: set[str] = set()
        waiting = [("model", 0, len(content))]
        while waiting:
            kind, at, end = waiting.pop()
            if kind == "external":
                values = dict[int, bytes]()
                for number, start, stop in _fields(content, at, end):
                    values[number] = content[start:stop]
                if values.get(_KEY) == b"location":
                    found.add(values.get(_VALUE, b"").decode())
                continue
            inner = _FIELDS[kind]
            waiting += [(inner[number], start, stop) for number, start, stop in _fields(content, at, end) if number in inner]
    return sorted(found)


def _fields(content: mmap.mmap, at: int, end: int) -> list[tuple[int, int, int]]:
    """(number, start, end) of the fields of a message that have a length."""
    found = []
    while at < end:
        tag, at = _varint(content, at, end)
        wire = tag & 7
        if wire == 0:
            _, at = _varint(content, at, end)
        elif wire in _FIXED:
            at += _FIXED[wire]
        elif wire == _LENGTH:
            length, at = _varint(content, at, end)
            found.append((tag >> 3, at, at + length))
            at += length
        else:
            raise ValueError(f"a field of type {wire} at byte {at}")
        if at > end:
            raise ValueError(f"a field ends at byte {at}, its message at {end}")
    return found


def _varint(content: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError(f"a number without an end at byte {at}")
