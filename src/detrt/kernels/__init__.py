"""Multi-scale deformable attention as PyTorch ops, with a Triton kernel for NVIDIA GPUs; see docs/kernel.md."""

from __future__ import annotations

from .ops import FUSED_OP, OP, ms_deform_attn, ms_deform_attn_fused, triton_available

__all__ = ["FUSED_OP", "OP", "ms_deform_attn", "ms_deform_attn_fused", "triton_available"]
