"""ONNX Runtime's inputs and outputs in device memory: copied once each way, at addresses that stay, as CUDA graphs need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .session import Outputs, TensorInfo

# Bindings of so many input shapes are kept; each holds the memory of its tensors.
BINDINGS = 8


def is_fixed(tensors: Sequence[TensorInfo]) -> bool:
    """Whether every axis is a number: CUDA graphs replay one shape."""
    return all(isinstance(axis, int) for tensor in tensors for axis in tensor.shape)


class Binding:
    """Runs an InferenceSession through IO binding.

    session: of onnxruntime. ort_value: its class `OrtValue`. device, index: where its tensors live ("cuda", 0).
    outputs: of the session; with `fixed` they get memory that stays, otherwise ONNX Runtime makes it for each run.
    """

    def __init__(
        self, session: Any, ort_value: Any, device: str, index: int, outputs: Sequence[TensorInfo], *, fixed: bool
    ) -> None:
        self._session, self._ort_value = session, ort_value
        self._device, self._index = device, index
        self._outputs, self._fixed = outputs, fixed
        self._kept: dict[tuple[tuple[int, ...], ...], tuple[Any, dict[str, Any]]] = {}

    def run(self, feeds: Mapping[str, np.ndarray]) -> Outputs:
        """One batch; the arrays belong to the caller."""
        key = tuple(feeds[name].shape for name in sorted(feeds))
        if key in self._kept:
            binding, values = self._kept[key]
            for name, array in feeds.items():
                values[name].update_inplace(array)
        else:
            if len(self._kept) >= BINDINGS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = binding, values = self._bound(feeds)
        self._session.run_with_iobinding(binding)
        arrays = binding.copy_outputs_to_cpu()
        return dict(zip((info.name for info in self._outputs), arrays, strict=True))

    def _bound(self, feeds: Mapping[str, np.ndarray]) -> tuple[Any, dict[str, Any]]:
        binding = self._session.io_binding()
        values = {name: self._ort_value.ortvalue_from_numpy(array, self._device, self._index) for name, array in feeds.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for info in self._outputs:
            if self._fixed:
                place = self._ort_value.ortvalue_from_shape_and_type(
                    list(info.shape), np.dtype(info.dtype), self._device, self._index
                )
                binding.bind_ortvalue_output(info.name, place)
            else:
                binding.bind_output(info.name, self._device, self._index)
        return binding, values
