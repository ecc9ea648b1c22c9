"""ONNX Runtime on PyTorch's tensors and stream, so that pictures are resized and candidates chosen where the model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...spec import TensorInfo
from ..gpu.cuda_graph import captured
from ..gpu.runner import Tensors
from .binding import CAPTURE_AT, NO_GRAPH, Graphs


def stream_for(index: int) -> Any:
    """A CUDA stream for a session on GPU `index`, or None where this PyTorch has no such GPU."""
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    return torch.cuda.Stream(torch.device("cuda", index))


def prepare(
    session: Any,
    ort: Any,
    inputs: Tensors,
    infos: tuple[Sequence[TensorInfo], Sequence[TensorInfo]],
    then: Callable[[Tensors], list[Tensor]],
    stream: Any,
    graphs: Graphs,
) -> tuple[Callable[[], None], list[Tensor]]:
    """As `runner.Prepare`: the session bound to these tensors, and `then` behind it.

    session: an InferenceSession that computes on `stream`. infos: of its inputs and outputs. Both become CUDA graphs at the
    third run of the shape: pictures of many sizes would pay for graphs that run once.
    """
    bound = _Bound(session, ort, inputs, infos, then, stream, graphs)
    return bound.run, bound.results


class _Bound:
    """Sessions bound to fixed tensors. What only ONNX Runtime knows by its address lives as long as this object."""

    def __init__(
        self,
        session: Any,
        ort: Any,
        inputs: Tensors,
        infos: tuple[Sequence[TensorInfo], Sequence[TensorInfo]],
        then: Callable[[Tensors], list[Tensor]],
        stream: Any,
        graphs: Graphs,
    ) -> None:
        self._ort, self._inputs, self._infos, self._stream, self._graphs = ort, inputs, infos, stream, graphs
        first = next(iter(inputs.values()))
        self._index, self._runs, self._after = first.device.index, 0, None
        self._found = {}
        for info in infos[1]:  # of models of fixed classes, whose outputs are symbolic in the batch only
            shape = [first.shape[0] if isinstance(axis, str) else axis for axis in info.shape]
            self._found[info.name] = torch.zeros(shape, dtype=getattr(torch, info.dtype), device=first.device)
        self._then = then
        self.results = then(self._found)
        self._session, self._binding = session, self._bind(session)
        self._options = graphs.options(ort, NO_GRAPH, wait=False)

    def run(self) -> None:
        """Begin a run on the stream."""
        self._runs += 1
        if self._runs == CAPTURE_AT:
            self._stream.synchronize()
            self._capture()
            self._after, _ = captured(self._choose, self._stream)
        self._session.run_with_iobinding(self._binding, self._options)
        if self._after is None:
            self._choose()
        else:
            self._after.replay()

    def _choose(self) -> list[Tensor]:
        for kept, fresh in zip(self.results, self._then(self._found), strict=True):
            kept.copy_(fresh)
        return self.results

    def _capture(self) -> None:
        session, number = self._session, self._graphs.next()
        if number == NO_GRAPH:
            shapes = {name: tensor.shape for name, tensor in self._inputs.items()}
            session, number = self._graphs.fixed(self._infos[0], shapes), 1
        if session is None:
            return
        binding = self._bind(session)
        try:
            session.run_with_iobinding(binding, self._graphs.options(self._ort, NO_GRAPH))
            session.run_with_iobinding(binding, self._graphs.options(self._ort, number))
        except Exception as error:  # onnxruntime's exceptions share no base class
            self._stream.synchronize()  # a session must not go while it frees memory behind a run
            self._graphs.given_up(error)
            return
        self._session, self._binding = session, binding
        self._options = self._graphs.options(self._ort, number, wait=False)

    def _bind(self, session: Any) -> Any:
        binding = session.io_binding()
        for name, tensor in self._inputs.items():
            binding.bind_input(name, "cuda", self._index, _numpy_type(tensor.dtype), list(tensor.shape), tensor.data_ptr())
        for name, tensor in self._found.items():
            binding.bind_output(name, "cuda", self._index, _numpy_type(tensor.dtype), list(tensor.shape), tensor.data_ptr())
        return binding


def _numpy_type(dtype: torch.dtype) -> Any:
    return np.dtype(str(dtype).removeprefix("torch.")).type
