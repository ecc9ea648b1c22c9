"""The one seam of the runtime: a Session runs a model on NumPy arrays.

PyTorch, ONNX Runtime and TensorRT sessions have the same interface, so that detect, verify, bench
and serve do not know what they run. `FakeSession` ships for tests of anything built on a Session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .errors import SessionError
from .spec import ModelSpec

Feeds = Mapping[str, NDArray]
Outputs = dict[str, NDArray]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, NumPy dtype name and shape of an input or output; a symbolic axis is its name."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@runtime_checkable
class Session(Protocol):
    """Runs one model. The arrays that `run` returns belong to the caller."""

    spec: ModelSpec
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    backend: str  # "torch", "onnxruntime-cpu", "tensorrt-rtx", ...
    max_batch: int | None  # largest batch that the model takes, None = any

    def run(self, feeds: Feeds) -> Outputs: ...

    def close(self) -> None: ...


def check_feeds(inputs: tuple[TensorInfo, ...], feeds: Feeds) -> None:
    """Compare feeds with a session's inputs.

    Raises:
        SessionError: a missing or unknown name, another dtype, rank or fixed axis length; symbolic
            axes of one name with different lengths.
    """
    names = [info.name for info in inputs]
    missing, unknown = sorted(set(names) - set(feeds)), sorted(set(feeds) - set(names))
    if missing or unknown:
        raise SessionError(f"the model takes the inputs {names}; missing: {missing}, unknown: {unknown}")
    lengths: dict[str, int] = {}
    for info in inputs:
        array = feeds[info.name]
        if array.dtype != np.dtype(info.dtype):
            raise SessionError(f"input '{info.name}' must be {info.dtype}; got {array.dtype}")
        if array.ndim != len(info.shape):
            raise SessionError(f"input '{info.name}' must have shape {info.shape}; got {array.shape}")
        for axis, (expected, actual) in enumerate(zip(info.shape, array.shape, strict=True)):
            if isinstance(expected, str):
                expected = lengths.setdefault(expected, actual)
            if expected != actual:
                raise SessionError(
                    f"input '{info.name}' must have shape {info.shape}; got {array.shape} (axis {axis} must be {expected})"
                )


class FakeSession:
    """A Session over a function, for tests: `FakeSession(spec, inputs, outputs, lambda feeds: {...})`."""

    backend = "fake"

    def __init__(
        self,
        spec: ModelSpec,
        inputs: tuple[TensorInfo, ...],
        outputs: tuple[TensorInfo, ...],
        function: Callable[[Feeds], Outputs],
        max_batch: int | None = None,
    ) -> None:
        self.spec, self.inputs, self.outputs = spec, inputs, outputs
        self.max_batch = max_batch
        self._function = function
        self.closed = False

    def run(self, feeds: Feeds) -> Outputs:
        if self.closed:
            raise SessionError("the session is closed")
        check_feeds(self.inputs, feeds)
        return self._function(feeds)

    def close(self) -> None:
        self.closed = True
