"""The one seam of the runtime: a Session runs a model on NumPy arrays.

PyTorch, ONNX Runtime and TensorRT sessions have the same interface, so that detect, verify, bench
and serve do not know what they run. `FakeSession` ships for tests of anything built on a Session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import SessionError, SpecError
from ..spec import (
    BOXES,
    LABELS,
    LOGITS,
    NUM_DETECTIONS,
    PIXEL_MASK,
    PIXEL_VALUES,
    PRED_BOXES,
    SCORES,
    TARGET_SIZES,
    TOWER_INPUTS,
    TOWER_OUTPUTS,
    ModelSpec,
    TensorInfo,
    is_tower,
    text_inputs,
)

Feeds = Mapping[str, NDArray]
Outputs = dict[str, NDArray]


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


def check_spec(name: str, spec: ModelSpec, inputs: tuple[TensorInfo, ...], outputs: tuple[TensorInfo, ...]) -> None:
    """Compare the tensors of a model with what its spec promises; more outputs than that are fine.

    A model with a text part may be its detector or its text tower.

    Raises:
        SpecError: other names, another dtype of the pixels, or a fixed size that the spec does not allow.
    """
    decoded = spec.decode.in_graph
    wants_in = [PIXEL_VALUES] + [PIXEL_MASK] * spec.input.mask + [TARGET_SIZES] * decoded + text_inputs(spec)
    wants_out = [BOXES, SCORES, LABELS, NUM_DETECTIONS] if decoded else [LOGITS, PRED_BOXES]
    has_in, has_out = [i.name for i in inputs], [o.name for o in outputs]
    if spec.text is not None and is_tower(inputs):
        wants_in, wants_out = list(TOWER_INPUTS), list(TOWER_OUTPUTS[spec.text.kind])
    if set(has_in) != set(wants_in) or not set(wants_out) <= set(has_out):
        raise SpecError(
            f"{name} has the inputs {has_in} and outputs {has_out}; its spec promises {wants_in} and "
            f"{wants_out}. Give the spec that belongs to this file, or export it with: detrt export"
        )
    if PIXEL_VALUES not in has_in:
        return
    pixels = inputs[has_in.index(PIXEL_VALUES)]
    if pixels.dtype != spec.input.dtype:
        raise SpecError(f"{name} takes '{PIXEL_VALUES}' as {pixels.dtype}, its spec says {spec.input.dtype}; give the right spec")
    fixed = pixels.shape[2:]
    for axis, side in zip(("height", "width"), fixed, strict=False):
        if isinstance(side, int) and not spec.input.dynamic and side != getattr(spec.input, axis):
            raise SpecError(
                f"{name} takes images of {axis} {side}, its spec says {getattr(spec.input, axis)}; give the right spec"
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


def relative_error(expected: NDArray, actual: NDArray) -> float:
    """Largest absolute difference over the largest absolute expected value; inf where finiteness differs."""
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(actual)):
        return float("inf")
    if not finite.any():
        return 0.0
    a, b = expected[finite].astype(np.float64), actual[finite].astype(np.float64)
    return float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-6))
