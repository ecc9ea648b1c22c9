"""ONNX Runtime bound to PyTorch's tensors and stream, so that images are resized and candidates selected on its GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...spec import TensorInfo
from ..base import CAPTURE_AT
from ..gpu.cuda_graph import capture_graph
from ..gpu.runner import Tensors
from .binding import NO_GRAPH, Graphs


def prepare(
    session: Any,
    ort: Any,
    inputs: Tensors,
    infos: tuple[Sequence[TensorInfo], Sequence[TensorInfo]],
    finish: Callable[[Tensors], list[Tensor]],
    stream: Any,
    graphs: Graphs,
) -> tuple[Callable[[], None], list[Tensor]]:
    """As `runner.Prepare`: the session bound to these tensors, followed by `finish`.

    session: an InferenceSession that computes on `stream`. infos: of its inputs and outputs. Both become CUDA graphs at the
    third run of a shape, because images of many sizes would pay for graphs that run once.
    """
    bound = _BoundSession(session, ort, inputs, infos, finish, stream, graphs)
    return bound.run, bound.results


class _BoundSession:
    """A session bound to fixed tensors; keeps the memory alive that ONNX Runtime knows by address only."""

    def __init__(
        self,
        session: Any,
        ort: Any,
        inputs: Tensors,
        infos: tuple[Sequence[TensorInfo], Sequence[TensorInfo]],
        finish: Callable[[Tensors], list[Tensor]],
        stream: Any,
        graphs: Graphs,
    ) -> None:
        self._ort, self._inputs, self._infos, self._stream, self._graphs = ort, inputs, infos, stream, graphs
        first = next(iter(inputs.values()))
        self._index, self._runs, self._finish_graph = first.device.index, 0, None
        self._outputs = {}
        for info in infos[1]:  # models of fixed classes: the batch is the only symbolic axis
            shape = [first.shape[0] if isinstance(axis, str) else axis for axis in info.shape]
            self._outputs[info.name] = torch.zeros(shape, dtype=getattr(torch, info.dtype), device=first.device)
        self._finish = finish
        self.results = finish(self._outputs)
        self._session, self._binding = session, self._bind(session)
        self._options = graphs.options(ort, NO_GRAPH, wait=False)

    def run(self) -> None:
        """Enqueue a run on the stream."""
        self._runs += 1
        if self._runs == CAPTURE_AT:
            self._stream.synchronize()
            self._capture()
            self._finish_graph, _ = capture_graph(self._finish_run, self._stream)
        self._session.run_with_iobinding(self._binding, self._options)
        if self._finish_graph is None:
            self._finish_run()
        else:
            self._finish_graph.replay()

    def _finish_run(self) -> list[Tensor]:
        for result, value in zip(self.results, self._finish(self._outputs), strict=True):
            result.copy_(value)
        return self.results

    def _capture(self) -> None:
        session, number = self._session, self._graphs.next()
        if number == NO_GRAPH:
            shapes = {name: tensor.shape for name, tensor in self._inputs.items()}
            session, number = self._graphs.fixed_session(self._infos[0], shapes), 1
        if session is None:
            return
        binding = self._bind(session)
        try:
            session.run_with_iobinding(binding, self._graphs.options(self._ort, NO_GRAPH))
            session.run_with_iobinding(binding, self._graphs.options(self._ort, number))
        except Exception as error:  # onnxruntime's exceptions share no base class
            self._stream.synchronize()  # a session must not be released while it frees memory after a run
            self._graphs.give_up(error)
            return
        self._session, self._binding = session, binding
        self._options = self._graphs.options(self._ort, number, wait=False)

    def _bind(self, session: Any) -> Any:
        binding = session.io_binding()
        for name, tensor in self._inputs.items():
            binding.bind_input(name, "cuda", self._index, _numpy_type(tensor.dtype), list(tensor.shape), tensor.data_ptr())
        for name, tensor in self._outputs.items():
            binding.bind_output(name, "cuda", self._index, _numpy_type(tensor.dtype), list(tensor.shape), tensor.data_ptr())
        return binding


def _numpy_type(dtype: torch.dtype) -> Any:
    return np.dtype(str(dtype).removeprefix("torch.")).type
