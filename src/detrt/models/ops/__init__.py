"""Multi-scale deformable attention as PyTorch ops, with a Triton kernel for NVIDIA GPUs; see docs/reference/kernel.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .msda import FUSED_OP, OP, ms_deform_attn, ms_deform_attn_fused, triton_available

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FUSED_OP", "OP", "install", "ms_deform_attn", "ms_deform_attn_fused", "triton_available"]


def install(model: nn.Module, *, everywhere: bool = False) -> int:
    """See `detrt.models.ops.replace.install`."""
    from .replace import install  # knows the models, which know the ops

    return install(model, everywhere=everywhere)
