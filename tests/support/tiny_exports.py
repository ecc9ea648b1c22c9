"""The exports of tiny models that the quick tests share: one of each family at least, made once a run (`exported`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

SHARED: dict[str, dict[str, Any]] = {
    "co_dino-r50": {"msda": "gridsample"},
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
    "ltdetr_v2": {},
    "lw_detr": {},
    "mask2former": {},
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


def marked(names: Iterable[str], quick: Collection[str] = SHARED) -> list[Any]:
    """Parameters of a test, slow but for those that are `quick`: by default what other quick tests export, too."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]
