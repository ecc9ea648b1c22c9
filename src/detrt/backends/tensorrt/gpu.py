"""An engine bound to PyTorch's tensors and stream, so that images are resized and candidates selected on its GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import SessionError
from ..base import CAPTURE_AT
from ..gpu.cuda_graph import capture_graph
from ..gpu.runner import Tensors

if TYPE_CHECKING:
    from .session import TensorRTSession


def prepare(
    session: TensorRTSession, inputs: Tensors, finish: Callable[[Tensors], list[Tensor]], stream: Any
) -> tuple[Callable[[], None], list[Tensor]]:
    """As `runner.Prepare`: the engine bound to these tensors, followed by `finish`.

    session: enqueues on `stream`. stream: None on a CPU, where nothing is captured. The engine and `finish` are one CUDA graph from the third run of a
    shape on.
    """
    bound = _BoundEngine(session, inputs, finish, stream)
    return bound.run, bound.results


class _BoundEngine:
    """An engine bound to fixed tensors; keeps the memory alive that TensorRT knows by address only."""

    def __init__(self, session: TensorRTSession, inputs: Tensors, finish: Callable[[Tensors], list[Tensor]], stream: Any) -> None:
        self._session, self._given, self._finish, self._stream = session, inputs, finish, stream
        dtypes = {name: getattr(torch, dtype) for name, dtype in session.tensor_dtypes.items()}
        self._shapes = tuple(tuple(inputs[info.name].shape) for info in session.inputs)
        # TensorRT 8 has no int64, which pixel_mask and the sizes of images have.
        self._inputs = {name: tensor.to(dtypes[name]) for name, tensor in inputs.items()}
        device = next(iter(inputs.values())).device
        self._outputs = {
            name: torch.zeros(shape, dtype=dtypes[name], device=device)
            for name, shape in session.output_shapes(self._shapes).items()
        }
        self._addresses = {name: tensor.data_ptr() for name, tensor in (self._inputs | self._outputs).items()}
        self.results = [result.clone() for result in self._finished()]
        self._graph: Any = None
        self._records, self._runs = session.records and stream is not None, 0

    def run(self) -> None:
        """Enqueue a run on the stream."""
        with self._session.bound(self._shapes, self._addresses) as (enqueue, rebound):
            if rebound:
                self._graph, self._runs = None, 0
            self._runs += 1
            if self._records and self._graph is None and self._runs == CAPTURE_AT:
                self._capture(enqueue)
            if self._graph is None:
                self._step(enqueue)
            else:
                self._graph.replay()

    def _step(self, enqueue: Callable[[], None]) -> list[Tensor]:
        for name, tensor in self._inputs.items():
            if tensor is not self._given[name]:
                tensor.copy_(self._given[name])
        enqueue()
        for result, value in zip(self.results, self._finished(), strict=True):
            result.copy_(value)
        return self.results

    def _finished(self) -> list[Tensor]:
        declared = {info.name: getattr(torch, info.dtype) for info in self._session.outputs}
        return self._finish({name: self._outputs[name].to(dtype) for name, dtype in declared.items()})

    def _capture(self, enqueue: Callable[[], None]) -> None:
        try:
            self._graph, _ = capture_graph(lambda: self._step(enqueue), self._stream)
        except (RuntimeError, SessionError) as error:
            self._records = False
            self._session.note_no_graph(self._shapes, error)
