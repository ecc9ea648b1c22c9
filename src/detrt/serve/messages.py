"""What the front process and its workers say to each other: pickled messages behind their length, on a socket pair.

Pickle is safe here, as nobody but the two ends of the pair, parent and child, can write to it.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ..spec import ModelSpec, TensorInfo
from .config import ServedModel

_LENGTH = struct.Struct("<Q")
HEAD_SIZE = _LENGTH.size


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a worker: what to open, and where."""

    models: tuple[ServedModel, ...]
    device: str
    threads: int
    backend: str
    size_hw: tuple[int, int] | None
    max_batch: int
    max_pixels: int
    image_decoder: str = "cpu"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a worker tells about a model that it opened. max_batch: of the server and of the model together."""

    name: str
    spec: ModelSpec
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    backend: str
    max_batch: int
    size_hw: tuple[int, int]
    takes_prompt: bool
    takes_task: bool
    note: str


@dataclass(frozen=True, slots=True)
class ImageTask:
    """An image file to detect in. prompt: a text, or a list of class names; classes: names or ids to keep."""

    data: bytes
    threshold: float
    classes: tuple[str, ...] | None = None
    max_detections: int | None = None
    prompt: str | tuple[str, ...] | None = None
    task: str = ""


@dataclass(frozen=True, slots=True)
class TensorTask:
    """Inputs of the model as they are; `rows` images."""

    feeds: Mapping[str, NDArray]
    rows: int


@dataclass(frozen=True, slots=True)
class Batch:
    number: int
    model: str
    tasks: tuple[ImageTask | TensorTask, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a task. value: JSON of an image's detections, or the outputs of the model by name."""

    value: bytes | dict[str, NDArray]
    decode_ms: float = 0.0
    model_ms: float = 0.0
    found: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a task has no answer. status: of HTTP."""

    status: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Ready:
    models: tuple[ModelFacts, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker that cannot start. bug: the traceback of an error that is none of the user's."""

    message: str
    bug: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """Results of a batch, in the order of its tasks. runs: images in each run of the model."""

    number: int
    results: tuple[Answer | Refusal, ...]
    runs: tuple[int, ...] = ()


def packed(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(body)) + body


def length_of(head: bytes) -> int:
    return int(_LENGTH.unpack(head)[0])


def unpacked(body: bytes | bytearray) -> Any:
    return pickle.loads(body)


def send(sock: socket.socket, message: Any) -> None:
    sock.sendall(packed(message))


def receive(sock: socket.socket) -> Any:
    """The next message; raises EOFError when the other end has gone."""
    return unpacked(_exactly(sock, length_of(bytes(_exactly(sock, HEAD_SIZE)))))


def _exactly(sock: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return buffer
