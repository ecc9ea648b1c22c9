"""`config.pbtxt` of Triton Inference Server: the fields that a detector needs, as protobuf text.

The schema is `model_config.proto` of triton-inference-server/common; tests read what is written here with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..backends.base import TensorInfo
from ..errors import SpecError

_DTYPES = {
    "uint8": "TYPE_UINT8",
    "int8": "TYPE_INT8",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "bool": "TYPE_BOOL",
    "bytes": "TYPE_STRING",
}


class Word(str):
    """A name of an enum, which is written without quotes."""


Message = Mapping[str, object]


def render(message: Message, indent: int = 0) -> str:
    """Protobuf text of nested mappings; lists of mappings repeat their field, lists of numbers are written as lists."""
    pad = "  " * indent
    lines = []
    for name, value in message.items():
        if isinstance(value, Mapping):
            lines.append(f"{pad}{name} {{\n{render(value, indent + 1)}{pad}}}\n")
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
            parts = ",\n".join(f"{pad}  {{\n{render(one, indent + 2)}{pad}  }}" for one in value)
            lines.append(f"{pad}{name} [\n{parts}\n{pad}]\n")
        elif isinstance(value, (list, tuple)):
            lines.append(f"{pad}{name}: [ {', '.join(map(_scalar, value))} ]\n")
        else:
            lines.append(f"{pad}{name}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (Word, int)):
        return str(value)
    return json.dumps(str(value), ensure_ascii=True)


def tensor(info: TensorInfo, *, name: str | None = None) -> Message:
    """An input or output of a model with batches: its first axis is not written, a symbolic one is -1.

    A tensor of one number an image becomes a list of one number, because Triton wants a dimension.

    Raises:
        SpecError: a type that Triton does not have, or no axis for the batch.
    """
    if info.dtype not in _DTYPES:
        raise SpecError(f"tensor '{info.name}' has the type {info.dtype}, which Triton does not have")
    if not info.shape:
        raise SpecError(f"tensor '{info.name}' has no axis for the batch")
    dims = [axis if isinstance(axis, int) and axis >= 0 else -1 for axis in info.shape[1:]]
    found: dict[str, object] = {"name": name or info.name, "data_type": Word(_DTYPES[info.dtype]), "dims": dims or [1]}
    return found if dims else {**found, "reshape": {"shape": []}}


@dataclass(frozen=True, slots=True)
class Placement:
    """Copies of a model and where they run. count: for each GPU, or on the CPU; gpus: None lets Triton choose."""

    count: int = 1
    cpu: bool = False
    gpus: tuple[int, ...] | None = None

    def to_message(self) -> Message:
        if self.cpu:
            return {"count": self.count, "kind": Word("KIND_CPU")}
        if self.gpus is None:
            return {"count": self.count, "kind": Word("KIND_AUTO")}
        return {"count": self.count, "kind": Word("KIND_GPU"), "gpus": list(self.gpus)}


@dataclass(frozen=True, slots=True)
class Batching:
    """Requests that run together. max_batch: images at most. delay_us: how long a request may wait for others, microseconds.

    queue: requests that may wait, more are refused; 0 for any number.
    """

    max_batch: int
    delay_us: int = 2000
    preferred: tuple[int, ...] = ()
    queue: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.max_batch <= 4096:
            raise SpecError(f"--max-batch must be from 1 to 4096; got {self.max_batch}")
        if not 0 <= self.delay_us <= 10_000_000:
            raise SpecError(f"--max-delay-ms must be from 0 to 10000; got {self.delay_us / 1000:g}")
        if self.queue < 0:
            raise SpecError(f"--queue must be 0 (any number) or more; got {self.queue}")
        wrong = [size for size in self.preferred if not 1 <= size <= self.max_batch]
        if wrong:
            raise SpecError(f"--preferred-batch must be from 1 to --max-batch {self.max_batch}; got {wrong[0]}")

    def to_message(self) -> Message:
        message: dict[str, object] = {}
        if self.preferred:
            message["preferred_batch_size"] = list(self.preferred)
        message["max_queue_delay_microseconds"] = self.delay_us
        if self.queue:
            message["default_queue_policy"] = {"max_queue_size": self.queue}
        return message


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One `config.pbtxt`. head: name, back end and the like; body: what follows inputs and outputs."""

    name: str
    head: Message
    max_batch: int
    inputs: Sequence[Message]
    outputs: Sequence[Message]
    body: Message = field(default_factory=dict)
    comment: tuple[str, ...] = ()

    def to_text(self) -> str:
        comment = "".join(f"# {line}\n" for line in self.comment)
        message = {
            "name": self.name,
            **self.head,
            "max_batch_size": self.max_batch,
            "input": list(self.inputs),
            "output": list(self.outputs),
            **self.body,
        }
        return comment + render(message)
