"""ONNX Runtime's inputs and outputs in device memory: copied once each way, at addresses that stay, as CUDA graphs need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...spec import TensorInfo
from ..base import Outputs

# Bindings of so many input shapes are kept; each holds the memory of its tensors. CUDA graphs stay with their session, so
# that shapes beyond these run without one.
BINDINGS = 8
NO_GRAPH = -1
# Capturing takes longer than some runs, so a shape is captured at its third run. What can be captured at a fixed shape only
# gets a session of its own, with its own copy of the weights, for so many shapes: opening takes seconds.
CAPTURE_AT, FIXED = 3, 2


class Graphs:
    """CUDA graphs of one ONNX file: how they can be had, and why not.

    enabled: whether the session captures a graph for each shape. open_fixed: opens a session of one shape that captures,
    from {name of a symbolic axis: its length}.
    """

    def __init__(self, enabled: bool, open_fixed: Callable[[Mapping[str, int]], Any] | None = None) -> None:
        self.enabled, self.why = enabled, ""
        self._open_fixed = open_fixed
        self._count = self._fixed = 0

    def next(self) -> int:
        """A number for a new graph of the one session, or NO_GRAPH."""
        if not self.enabled or self._count >= 2 * BINDINGS:
            return NO_GRAPH
        self._count += 1
        return self._count

    def failed(self, error: Exception) -> None:
        """The one session cannot capture; no reason to speak of while sessions of one shape may."""
        self.enabled = False
        if self._open_fixed is None:
            self.why = _short(error)

    def fixed(self, inputs: Sequence[TensorInfo], shapes: Mapping[str, Sequence[int]]) -> Any:
        """A session for one shape, or None where there cannot be one or are enough."""
        if self.enabled or self._open_fixed is None or self._fixed >= FIXED:
            return None
        names = {
            axis: int(length)
            for info in inputs
            for axis, length in zip(info.shape, shapes[info.name], strict=True)
            if isinstance(axis, str)
        }
        self._fixed += 1
        try:
            session = self._open_fixed(names)
        except Exception as error:  # onnxruntime's exceptions share no base class
            self.given_up(error)
            return None
        return session

    def given_up(self, error: Exception) -> None:
        """No shape can be captured."""
        self.enabled, self._open_fixed, self.why = False, None, _short(error)

    @staticmethod
    def options(ort: Any, number: int, *, wait: bool = True) -> Any:
        """RunOptions of one run. wait: for the device."""
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(number))
        if not wait:
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return options


@dataclass
class _Kept:
    """One shape: what is bound to which session, and how often it has run."""

    session: Any
    binding: Any
    values: dict[str, Any]
    options: Any
    runs: int = 1


class Binding:
    """Runs an InferenceSession through IO binding.

    session: of `ort`, the package onnxruntime. device, index: where its tensors live ("cuda", 0). inputs, outputs: of the
    session. graphs: how CUDA graphs are captured, one for each shape of the inputs.
    """

    def __init__(
        self,
        session: Any,
        ort: Any,
        device: str,
        index: int,
        inputs: Sequence[TensorInfo],
        outputs: Sequence[TensorInfo],
        graphs: Graphs | None = None,
    ) -> None:
        self._session, self._ort = session, ort
        self._device, self._index = device, index
        self._inputs, self._outputs = inputs, outputs
        self._graphs = graphs or Graphs(False)
        self._kept: dict[tuple[tuple[int, ...], ...], _Kept] = {}

    def run(self, feeds: Mapping[str, np.ndarray]) -> Outputs:
        """One batch; the arrays belong to the caller."""
        key = tuple(feeds[name].shape for name in sorted(feeds))
        kept = self._kept.get(key)
        if kept is not None:
            kept.runs += 1
            for name, array in feeds.items():
                kept.values[name].update_inplace(array)
            if kept.runs == CAPTURE_AT:
                kept = self._kept[key] = self._captured(kept, {name: array.shape for name, array in feeds.items()})
            kept.session.run_with_iobinding(kept.binding, kept.options)
        else:
            if len(self._kept) >= BINDINGS:
                self._kept.pop(next(iter(self._kept)))
            kept = self._kept[key] = self._first(feeds)
        arrays = kept.binding.copy_outputs_to_cpu()
        return dict(zip((info.name for info in self._outputs), arrays, strict=True))

    def wait(self) -> None:
        """Until the device has finished."""
        for kept in self._kept.values():
            kept.binding.synchronize_outputs()

    def _first(self, feeds: Mapping[str, np.ndarray]) -> _Kept:
        values = {n: self._ort.OrtValue.ortvalue_from_numpy(array, self._device, self._index) for n, array in feeds.items()}
        binding = self._bound(self._session, values, None)
        kept = _Kept(self._session, binding, values, self._graphs.options(self._ort, NO_GRAPH))
        self._session.run_with_iobinding(kept.binding, kept.options)
        return kept

    def _captured(self, kept: _Kept, shapes: Mapping[str, Sequence[int]]) -> _Kept:
        """A shape that has run, as a CUDA graph; the same where it cannot be one."""
        session, number = kept.session, self._graphs.next()
        if number == NO_GRAPH:
            session, number = self._graphs.fixed(self._inputs, shapes), 1
        if session is None:
            return kept
        # The memory of the results is that of the last run, so their shapes are known.
        binding = self._bound(session, kept.values, [value.shape() for value in kept.binding.get_outputs()])
        options = self._graphs.options(self._ort, number)
        try:
            session.run_with_iobinding(binding, self._graphs.options(self._ort, NO_GRAPH))
            session.run_with_iobinding(binding, options)
        except Exception as error:  # onnxruntime's exceptions share no base class
            binding.synchronize_outputs()  # a session must not go while it frees memory behind a run
            self._graphs.given_up(error)
            return kept
        return _Kept(session, binding, kept.values, options, kept.runs)

    def _bound(self, session: Any, values: Mapping[str, Any], shapes: Sequence[Sequence[int]] | None) -> Any:
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for place, info in enumerate(self._outputs):
            if shapes is None:
                binding.bind_output(info.name, self._device, self._index)
            else:
                memory = self._ort.OrtValue.ortvalue_from_shape_and_type(
                    list(shapes[place]), np.dtype(info.dtype), self._device, self._index
                )
                binding.bind_ortvalue_output(info.name, memory)
        return binding


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
