"""RT-DETRv2, and DEIM on it; files as of RT-DETR, with points of each level."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .base import INT8_CROSS_ATTENTION, MASK_CLASS, RandomModel, hybrid_row
from .rt_detr import FORMAT
from .sizes import TINY_RT


def _deim() -> Any:
    from ..layers.deim import DeimRtDetrV2

    return DeimRtDetrV2


def _with_masks() -> Any:
    from ..layers.rt_detr_v2_seg import RTDetrV2ForInstanceSegmentation

    return RTDetrV2ForInstanceSegmentation


FAMILIES = (
    hybrid_row(
        "rt_detr_v2",
        "rt_detr_v2",
        "RT-DETRv2",
        "PekingU/rtdetr_v2_r18vd",
        classes={f"RTDetrV2{MASK_CLASS}": _with_masks},
        rewrites={"msda": {"multi_scale_deformable_attention_v2": ("a2f4f35b651aeb36", "a114bb8d455d13e6")}},
        random=(
            RandomModel("rt_detr_v2", {}, TINY_RT),
            RandomModel("rt_detr_v2-discrete", {"decoder_method": "discrete"}, TINY_RT),
        ),
        formats=(
            replace(FORMAT, name="rt_detr_v2", titles=("lyuwenyu RT-DETRv2",)),
            replace(FORMAT, name="rt_detr_v2-discrete", titles=("lyuwenyu RT-DETRv2, discrete sampling",)),
            replace(FORMAT, name="deim-rt_detr_v2", titles=("DEIM on RT-DETRv2",), model=_deim),
        ),
        engines=frozenset((INT8_CROSS_ATTENTION,)),
    ),
)
