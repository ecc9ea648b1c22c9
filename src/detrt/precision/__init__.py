"""Precision as types in the graph: FP16, BF16, INT8 and FP8, with the proof of what is computed in what."""

from __future__ import annotations

from .config import PRECISIONS, PrecisionConfig, parse_budget

__all__ = ["PRECISIONS", "PrecisionConfig", "parse_budget"]
