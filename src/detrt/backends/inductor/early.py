"""Early start (programmatic dependent launch) of the package's own Triton kernels.

PyTorch's compiler starts the kernels it writes while the one before them ends, and has no option for kernels that it is given. What it
writes down for such a kernel is changed here: the argument EARLY, with which the kernel waits for its inputs, and `launch_pdl`, with
which it is launched before they are there. A kernel without that argument starts as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._inductor import config

from .capture import CapturedGraph

# Up to so many pixels of a batch a kernel may start while the one before it ends. It saves a microsecond a kernel, and slows down
# large elementwise kernels: RF-DETR at batch size 4 (1.25 million pixels) takes 1.71 ms with it on an H200, and 1.53 without.
EARLY_PIXELS = 1 << 20
_OFF, _ON = "'EARLY': False", "'EARLY': True"
_META = "triton_meta={"


def starts_early(device: torch.device) -> bool:
    """Whether kernels can start early on a device: Hopper and newer, with PyTorch 2.10 and newer."""
    return device.type == "cuda" and hasattr(config.triton, "enable_pdl") and torch.cuda.get_device_capability(device)[0] >= 9


def pixels_of(captured: CapturedGraph) -> int:
    """Pixels of a batch; of a range of batches the largest: the smaller ones lose less without an early start than it loses with one."""
    images = [(captured.ranges.get("batch", (len(x),))[-1], *x.shape[-2:]) for x in captured.inputs if x.dim() == 4]
    return max(map(math.prod, images), default=0)


@contextmanager
def early_start() -> Iterator[None]:
    """While compiling: kernels with an argument EARLY start early where the option `triton.enable_pdl` is on."""
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.virtualized import V

    define, access = PythonWrapperCodegen.define_kernel, getattr(TritonKernel, "_handle_pdl_before_access", None)
    if access is None:  # PyTorch 2.9 and older
        yield
        return

    def define_kernel(self: Any, name: str, body: str, *args: Any, **kwargs: Any) -> Any:
        if config.triton.enable_pdl and _OFF in body and starts_early(torch.device("cuda")):
            body = with_early_start(body)
        return define(self, name, body, *args, **kwargs)

    def before_access(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The compiler's kernels read without waiting what the kernel before them did not write. It does not see what a given kernel
        # writes, and takes the wait for needless; without a kernel before it takes it for needed.
        scheduler = V.graph.scheduler
        if scheduler is None:
            return access(self, *args, **kwargs)
        with mock.patch.object(scheduler, "previous_node", None):
            return access(self, *args, **kwargs)

    with (
        mock.patch.object(PythonWrapperCodegen, "define_kernel", define_kernel),
        mock.patch.object(TritonKernel, "_handle_pdl_before_access", before_access),
    ):
        yield


def with_early_start(body: str) -> str:
    """The definition of a kernel, as PyTorch's compiler writes it, with an early start if the kernel has the argument for it."""
    if _OFF not in body or _META not in body:
        return body
    return body.replace(_OFF, _ON).replace(_META, f"{_META}'launch_pdl': True, ", 1)
