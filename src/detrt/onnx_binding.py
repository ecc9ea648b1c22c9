"""ONNX Runtime's inputs and outputs in device memory: copied once each way, at addresses that stay, as CUDA graphs need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .session import Outputs, TensorInfo

# Bindings of so many input shapes are kept; each holds the memory of its tensors. CUDA graphs stay with their session, so
# that shapes beyond these run without one.
BINDINGS = 8
NO_GRAPH = -1


class Graphs:
    """Numbers of the CUDA graphs of one session, and why there are none any more."""

    def __init__(self, enabled: bool) -> None:
        self.enabled, self.why = enabled, ""
        self._count = 0

    def next(self) -> int:
        """A number for a new graph, or NO_GRAPH."""
        if not self.enabled or self._count >= 2 * BINDINGS:
            return NO_GRAPH
        self._count += 1
        return self._count

    def failed(self, error: Exception) -> None:
        self.enabled, self.why = False, " ".join(str(error).split())[:300]

    def options(self, ort: Any, number: int, *, wait: bool = True) -> Any:
        """RunOptions of one run. wait: for the device."""
        options = ort.RunOptions()
        if self._count:
            options.add_run_config_entry("gpu_graph_id", str(number))
        if not wait:
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return options


class Binding:
    """Runs an InferenceSession through IO binding.

    session: of `ort`, the package onnxruntime. device, index: where its tensors live ("cuda", 0). outputs: of the session.
    graphs: whether the session captures CUDA graphs, one for each shape of its inputs.
    """

    def __init__(
        self, session: Any, ort: Any, device: str, index: int, outputs: Sequence[TensorInfo], graphs: Graphs | None = None
    ) -> None:
        self._session, self._ort = session, ort
        self._device, self._index = device, index
        self._outputs = outputs
        self._graphs = graphs or Graphs(False)
        self._kept: dict[tuple[tuple[int, ...], ...], tuple[Any, dict[str, Any], Any]] = {}

    def run(self, feeds: Mapping[str, np.ndarray]) -> Outputs:
        """One batch; the arrays belong to the caller."""
        key = tuple(feeds[name].shape for name in sorted(feeds))
        if key in self._kept:
            binding, values, options = self._kept[key]
            for name, array in feeds.items():
                values[name].update_inplace(array)
            self._session.run_with_iobinding(binding, options)
        else:
            if len(self._kept) >= BINDINGS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = self._first(feeds)
            binding = self._kept[key][0]
        arrays = binding.copy_outputs_to_cpu()
        return dict(zip((info.name for info in self._outputs), arrays, strict=True))

    def _first(self, feeds: Mapping[str, np.ndarray]) -> tuple[Any, dict[str, Any], Any]:
        """The first run of a shape, after which it is known which memory the results need."""
        values = {n: self._ort.OrtValue.ortvalue_from_numpy(array, self._device, self._index) for n, array in feeds.items()}
        number = self._graphs.next()
        plain = self._graphs.options(self._ort, NO_GRAPH)
        binding = self._bound(values, None)
        self._session.run_with_iobinding(binding, plain)
        if number == NO_GRAPH:
            return binding, values, plain
        shapes = [value.shape() for value in binding.get_outputs()]
        captured, options = self._bound(values, shapes), self._graphs.options(self._ort, number)
        try:
            self._session.run_with_iobinding(captured, options)
        except Exception as error:  # onnxruntime's exceptions share no base class
            self._graphs.failed(error)
            self._session.run_with_iobinding(binding, plain)
            return binding, values, plain
        return captured, values, options

    def _bound(self, values: Mapping[str, Any], shapes: Sequence[Sequence[int]] | None) -> Any:
        binding = self._session.io_binding()
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
