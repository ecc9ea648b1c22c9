"""Trace scopes for submodules that are called outside of the forward of their parent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def inside(*modules: nn.Module) -> Iterator[None]:
    """Name traced operators as in a call of these modules, the outermost first: "/encoder/layers.0/...".

    A trace names operators by the modules whose forward is running. detrt calls submodules of the library's encoders and decoders
    directly, so that their parents would be missing in the names. Does nothing outside of a trace.
    """
    state = torch._C._get_tracing_state()
    known = getattr(torch.jit._trace, "_trace_module_map", None) or {}
    names = [known[module] for module in modules if module in known] if state is not None else []
    for name in names:
        state.push_scope(name)
    try:
        yield
    finally:
        for _ in names:
            state.pop_scope()
