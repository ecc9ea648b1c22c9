"""What an op must know of PyTorch's compiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_traced(tensor: Tensor) -> bool:
    """Whether a compiler is tracing, so that values cannot be read on the host."""
    return type(tensor) not in (Tensor, torch.nn.Parameter)


def kernel_wrapper(tensor: Tensor) -> Any:
    """The wrapper of a Triton kernel for PyTorch's compiler, if it traces this tensor; else None."""
    return torch.library.wrap_triton if is_traced(tensor) else None


def decompose_when_compiled(op: str, run: Any, library: Any) -> None:
    """Decompose the op when a program is compiled, but keep it as one node when a program is exported.

    This is the behaviour of `torch.library.triton_op`, which cannot be used here: it needs Triton at registration, and its
    kernel on every device.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    def rule(mode: Any, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if _exporting():
            return mode.__torch_dispatch__(function, types, args, kwargs or {})
        with mode:
            return run(*args, **(kwargs or {}))

    torch.library.register_torch_dispatch(op, FunctionalTensorMode, rule, lib=library)


def _exporting() -> bool:
    try:
        from torch.export._trace import custom_triton_ops_decomposition_disabled
    except ImportError:  # torch before 2.9 cannot tell exports apart, so that both ops are always kept as nodes
        return True
    return custom_triton_ops_decomposition_disabled()
