"""IO binding of ONNX Runtime: inputs and outputs in device memory at fixed addresses, as CUDA graphs need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import one_line
from ...spec import TensorInfo
from ..base import CAPTURE_AT, Outputs

# Number of input shapes with a binding; each holds the memory of its tensors. A session never frees a CUDA graph, so
# further shapes run without one.
BINDINGS = 8
NO_GRAPH = -1
# A model that can be captured at fixed shapes only gets one session per shape, with its own copy of the weights, for at most so
# many shapes: opening takes seconds.
MAX_FIXED = 2


class Graphs:
    """CUDA graphs of one ONNX file: how they are captured, and why not.

    enabled: whether the session captures a graph for each shape. open_fixed: opens a session of one shape that captures,
    from {name of a symbolic axis: its length}.
    """

    def __init__(self, enabled: bool, open_fixed: Callable[[Mapping[str, int]], Any] | None = None) -> None:
        self.enabled, self.why = enabled, ""
        self._open_fixed = open_fixed
        self._count = self._fixed_count = 0

    def next(self) -> int:
        """The id of a new graph of the shared session, or NO_GRAPH."""
        if not self.enabled or self._count >= 2 * BINDINGS:
            return NO_GRAPH
        self._count += 1
        return self._count

    def failed(self, error: Exception) -> None:
        """The shared session cannot capture; not worth a message while sessions of one shape may."""
        self.enabled = False
        if self._open_fixed is None:
            self.why = one_line(error, 300)

    def fixed_session(self, inputs: Sequence[TensorInfo], shapes: Mapping[str, Sequence[int]]) -> Any:
        """A session for one shape; None if it cannot be opened or there are MAX_FIXED of them."""
        if self.enabled or self._open_fixed is None or self._fixed_count >= MAX_FIXED:
            return None
        names = {
            axis: int(length)
            for info in inputs
            for axis, length in zip(info.shape, shapes[info.name], strict=True)
            if isinstance(axis, str)
        }
        self._fixed_count += 1
        try:
            session = self._open_fixed(names)
        except Exception as error:  # onnxruntime's exceptions share no base class
            self.give_up(error)
            return None
        return session

    def give_up(self, error: Exception) -> None:
        """No shape can be captured."""
        self.enabled, self._open_fixed, self.why = False, None, one_line(error, 300)

    @staticmethod
    def options(ort: Any, number: int, *, wait: bool = True) -> Any:
        """RunOptions of one run. wait: for the device."""
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(number))
        if not wait:
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return options


@dataclass
class _ShapeBinding:
    """The binding of one input shape, and how often it has run."""

    session: Any
    binding: Any
    values: dict[str, Any]
    options: Any
    runs: int = 1


class Binding:
    """Runs an InferenceSession through IO binding.

    session: of `ort`, the package onnxruntime. device, index: of its tensors, e.g. ("cuda", 0). inputs, outputs: of the
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
        self._bindings: dict[tuple[tuple[int, ...], ...], _ShapeBinding] = {}

    def run(self, feeds: Mapping[str, np.ndarray]) -> Outputs:
        """Run one batch; the arrays belong to the caller."""
        key = tuple(feeds[name].shape for name in sorted(feeds))
        bound = self._bindings.get(key)
        if bound is not None:
            bound.runs += 1
            for name, array in feeds.items():
                bound.values[name].update_inplace(array)
            if bound.runs == CAPTURE_AT:
                bound = self._bindings[key] = self._capture(bound, {name: array.shape for name, array in feeds.items()})
            bound.session.run_with_iobinding(bound.binding, bound.options)
        else:
            if len(self._bindings) >= BINDINGS:
                self._bindings.pop(next(iter(self._bindings)))
            bound = self._bindings[key] = self._first(feeds)
        arrays = bound.binding.copy_outputs_to_cpu()
        return dict(zip((info.name for info in self._outputs), arrays, strict=True))

    def wait(self) -> None:
        """Wait until the device has finished."""
        for bound in self._bindings.values():
            bound.binding.synchronize_outputs()

    def _first(self, feeds: Mapping[str, np.ndarray]) -> _ShapeBinding:
        values = {n: self._ort.OrtValue.ortvalue_from_numpy(array, self._device, self._index) for n, array in feeds.items()}
        binding = self._bind(self._session, values, None)
        bound = _ShapeBinding(self._session, binding, values, self._graphs.options(self._ort, NO_GRAPH))
        self._session.run_with_iobinding(bound.binding, bound.options)
        return bound

    def _capture(self, bound: _ShapeBinding, shapes: Mapping[str, Sequence[int]]) -> _ShapeBinding:
        """Capture a shape that has run as a CUDA graph; its present binding if it cannot be captured."""
        session, number = bound.session, self._graphs.next()
        if number == NO_GRAPH:
            session, number = self._graphs.fixed_session(self._inputs, shapes), 1
        if session is None:
            return bound
        # The memory of the results is that of the last run, so their shapes are known.
        binding = self._bind(session, bound.values, [value.shape() for value in bound.binding.get_outputs()])
        options = self._graphs.options(self._ort, number)
        try:
            session.run_with_iobinding(binding, self._graphs.options(self._ort, NO_GRAPH))
            session.run_with_iobinding(binding, options)
        except Exception as error:  # onnxruntime's exceptions share no base class
            binding.synchronize_outputs()  # a session must not be released while it frees memory after a run
            self._graphs.give_up(error)
            return bound
        return _ShapeBinding(session, binding, bound.values, options, bound.runs)

    def _bind(self, session: Any, values: Mapping[str, Any], shapes: Sequence[Sequence[int]] | None) -> Any:
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for index, info in enumerate(self._outputs):
            if shapes is None:
                binding.bind_output(info.name, self._device, self._index)
            else:
                memory = self._ort.OrtValue.ortvalue_from_shape_and_type(
                    list(shapes[index]), np.dtype(info.dtype), self._device, self._index
                )
                binding.bind_ortvalue_output(info.name, memory)
        return binding
