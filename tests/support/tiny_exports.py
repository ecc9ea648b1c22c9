"""The exports of tiny models that the quick tests share: one of each family but Co-DINO, which is DINO to an export, made once a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

SHARED: dict[str, dict[str, Any]] = {
    "conditional_detr": {},
    "d_fine": {},
    "dab_detr": {},
    "deformable_detr": {},
    "deimv2": {},
    "detr": {},
    "dino": {},
    "ecseg": {},
    "eomt": {},
    "eomt_dinov3": {},
    "grounding_dino": {},
    "lw_detr": {},
    "mm_grounding_dino": {"single_graph": True, "height": 96, "width": 128, "msda": "gridsample", "decode": "graph"},
    "omdet_turbo": {},
    "owlv2": {"image_queries": True},
    "owlvit": {"image_queries": True},
    "pp_doclayout_v2": {},
    "pp_doclayout_v3": {},
    "pp_doclayout_v4": {},
    "rf_detr": {},
    "rf_detr-seg": {},
    "rt_detr": {"msda": "gridsample", "height": 128, "width": 160},
    "rt_detr_v2": {},
    "sam3": {},
    "table-transformer": {},
    "yolos": {},
}


def marked(names: Iterable[str]) -> list[Any]:
    """Parameters of a test; those that no other quick test exports are slow."""
    return [pytest.param(name, marks=[] if name in SHARED else pytest.mark.slow) for name in names]
