"""LW-DETR."""

from __future__ import annotations

from .base import AS_FOLDER, ATTENDS_BY_MASK, Family, RandomModel
from .deformable_detr import PROCESSOR
from .sizes import TINY_LW

FAMILIES = (
    Family(
        name="lw_detr",
        model_type="lw_detr",
        title="LW-DETR",
        activation="sigmoid",
        select="topk",
        max_detections=100,
        example="AnnaZhang/lwdetr_small_60e_coco",
        licence="Apache-2.0",
        relatives=(("backbone.0.encoder.blocks.#.**", f"an LW-DETR {AS_FOLDER}AnnaZhang/lwdetr_small_60e_coco"),),
        no_mask=ATTENDS_BY_MASK,
        processor=PROCESSOR,
        multiple_of="windows of image",
        deformable=True,
        rewrites={
            "msda": {"MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",)},
            "symbolic_shapes": {
                "LwDetrModel.forward": (
                    "6842be7061f6eb63",
                    "f56dbcaf6500fb1e",
                    "18f4df54eb572f2a",
                    "8de02514b5f8b87a",
                    "e838e7ef7efeb7ed",
                ),
                "LwDetrModel.gen_encoder_output_proposals": (
                    "3bdc32ee4500d2ff",
                    "b47d9e3449d032de",
                    "3c241682d72698d7",
                    "525e003946ce095e",
                ),
            },
        },
        random=(
            RandomModel("lw_detr", {"projector_scale_factors": [1.0]}, TINY_LW),
            RandomModel("lw_detr-two-scales", {"projector_scale_factors": [2.0, 0.5]}, TINY_LW),
        ),
    ),
)
