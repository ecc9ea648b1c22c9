"""ONNX Runtime on PyTorch's tensors and stream, so that pictures are resized and candidates chosen where the model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..onnx_binding import NO_GRAPH, Graphs
from ..session import TensorInfo
from .capture import captured
from .runner import Tensors


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
    """As `runner.Prepare`: the session bound to these tensors, and `then` as a CUDA graph behind it.

    session: an InferenceSession that computes on `stream`. infos: of its inputs and outputs. A session that cannot capture
    graphs is replaced by one of this shape when the shape is run again and again (see `Graphs.fixed`).
    """
    bound = _Bound(session, ort, inputs, infos, stream, graphs)
    graph, results = captured(lambda: then(bound.found), stream)

    def run() -> None:
        bound.run()
        graph.replay()

    return run, results


class _Bound:
    """Sessions bound to fixed tensors. What only ONNX Runtime knows by its address lives as long as this object."""

    def __init__(
        self,
        session: Any,
        ort: Any,
        inputs: Tensors,
        infos: tuple[Sequence[TensorInfo], Sequence[TensorInfo]],
        stream: Any,
        graphs: Graphs,
    ) -> None:
        self._ort, self._inputs, self._infos, self._stream, self._graphs = ort, inputs, infos, stream, graphs
        first = next(iter(inputs.values()))
        self._index, self._runs = first.device.index, 1
        self.found = {}
        for info in infos[1]:  # of models of fixed classes, whose outputs are symbolic in the batch only
            shape = [first.shape[0] if isinstance(axis, str) else axis for axis in info.shape]
            self.found[info.name] = torch.zeros(shape, dtype=getattr(torch, info.dtype), device=first.device)
        stream.synchronize()
        self._session, self._binding = session, self._bind(session)
        self._options = graphs.options(ort, NO_GRAPH, wait=False)
        session.run_with_iobinding(self._binding, graphs.options(ort, NO_GRAPH))
        number = graphs.next()
        self._graph = number != NO_GRAPH and self._capture(session, self._binding, number)
        stream.synchronize()

    def run(self) -> None:
        self._runs += 1
        if not self._graph:
            shapes = {name: tensor.shape for name, tensor in self._inputs.items()}
            session = self._graphs.fixed(self._infos[0], shapes, self._runs)
            if session is not None:
                self._stream.synchronize()
                binding = self._bind(session)
                session.run_with_iobinding(binding, self._graphs.options(self._ort, NO_GRAPH))
                self._graph = self._capture(session, binding, 1)
        self._session.run_with_iobinding(self._binding, self._options)

    def _capture(self, session: Any, binding: Any, number: int) -> bool:
        try:
            session.run_with_iobinding(binding, self._graphs.options(self._ort, number))
        except Exception as error:  # onnxruntime's exceptions share no base class
            self._graphs.failed(error)
            return False
        self._session, self._binding = session, binding
        self._options = self._graphs.options(self._ort, number, wait=False)
        return True

    def _bind(self, session: Any) -> Any:
        binding = session.io_binding()
        for name, tensor in self._inputs.items():
            binding.bind_input(name, "cuda", self._index, _numpy_type(tensor.dtype), list(tensor.shape), tensor.data_ptr())
        for name, tensor in self.found.items():
            binding.bind_output(name, "cuda", self._index, _numpy_type(tensor.dtype), list(tensor.shape), tensor.data_ptr())
        return binding


def _numpy_type(dtype: torch.dtype) -> Any:
    return np.dtype(str(dtype).removeprefix("torch.")).type
