"""Early start (programmatic dependent launch) inside a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait for the kernel before this one, and let the one behind it start, which waits likewise.

    EARLY: of the kernel; launched with True only by packages, see `detrt.backends.inductor.early`. Without it nothing is done.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
