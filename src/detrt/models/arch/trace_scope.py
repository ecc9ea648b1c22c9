"""Names of what is traced in the parts of a module that is not itself called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def inside(*modules: nn.Module) -> Iterator[None]:
    """Name what is traced in here as a call of the modules, the outermost first, would: "/encoder/layers.0/...".

    A trace names operations by the modules whose forward it is in. detrt's own forwards call the parts of the library's
    encoders and decoders one by one, so that these would be missing in the names. Does nothing outside of a trace.
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
