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
    outputs: Sequence[TensorInfo],
    then: Callable[[Tensors], list[Tensor]],
    stream: Any,
    graphs: Graphs,
) -> tuple[Callable[[], None], list[Tensor]]:
    """As `runner.Prepare`: the session bound to these tensors, and `then` as a CUDA graph behind it.

    session: an InferenceSession that computes on `stream`.
    """
    first = next(iter(inputs.values()))
    count, index = first.shape[0], first.device.index
    binding = session.io_binding()
    for name, tensor in inputs.items():
        binding.bind_input(name, "cuda", index, _numpy_type(tensor.dtype), list(tensor.shape), tensor.data_ptr())
    found = {}
    for info in outputs:  # of models of fixed classes, whose outputs are symbolic in the batch only
        shape = [count if isinstance(axis, str) else axis for axis in info.shape]
        found[info.name] = torch.zeros(shape, dtype=getattr(torch, info.dtype), device=first.device)
        binding.bind_output(info.name, "cuda", index, np.dtype(info.dtype).type, shape, found[info.name].data_ptr())
    plain = graphs.options(ort, NO_GRAPH, wait=False)
    stream.synchronize()
    number, options = graphs.next(), plain
    session.run_with_iobinding(binding, graphs.options(ort, NO_GRAPH))
    if number != NO_GRAPH:
        try:
            session.run_with_iobinding(binding, graphs.options(ort, number))
            options = graphs.options(ort, number, wait=False)
        except Exception as error:  # onnxruntime's exceptions share no base class
            graphs.failed(error)
            options = plain
    stream.synchronize()
    graph, results = captured(lambda: then(found), stream)

    def run() -> None:
        session.run_with_iobinding(binding, options)
        graph.replay()

    # What only ONNX Runtime knows by its address must live as long as the function.
    run.kept = (inputs, found, binding)  # type: ignore[attr-defined]
    return run, results


def _numpy_type(dtype: torch.dtype) -> Any:
    return np.dtype(str(dtype).removeprefix("torch.")).type
