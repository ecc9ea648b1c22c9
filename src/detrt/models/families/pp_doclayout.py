"""PP-DocLayout V2, V3 and V4: RT-DETR for the parts of documents and their reading order; V3 with masks, V4 with quadrilaterals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...spec import ORDER_LOGITS, PRED_BOXES, QUADS, SUCCESSOR_LOGITS
from .base import Family, Processor, RandomModel, hybrid_row
from .sizes import STAGES, TINY_HG, tiny_hgnet

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_SETTINGS = {
    **{"size": {"height": 800, "width": 800}, "resample": 3, "do_pad": False},
    **{"do_normalize": True, "image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0)},
}
_LABELS = {"num_labels": 25}
_TINY = {**TINY_HG, "global_pointer_head_size": 8}


def _class_order(labels: int) -> dict[str, Any]:
    """What V2 knows of each class: from which score on it is ordered, and its number for the reading order."""
    return {"class_thresholds": [0.3] * labels, "class_order": [(7 * i) % labels % 20 for i in range(labels)]}


def _after_random(module: Any, generator: torch.Generator, full_size: bool) -> None:
    from ..random import draw_scales

    draw_scales(module, generator)


def _after_random_masks(module: Any, generator: torch.Generator, full_size: bool) -> None:
    from ..random import centre, draw_scales

    draw_scales(module, generator)
    centre(module, module.model.encoder.encoder_mask_output.conv, generator)


def _order() -> Any:
    from ..layers.pp_doclayout import ORDER

    return ORDER


def _masks() -> Any:
    from ..layers.pp_doclayout import MASKS

    return MASKS


def _box_of_mask() -> Any:
    from ..layers.pp_doclayout import box_of_mask

    return box_of_mask


def _votes(outputs: Any, queries: int) -> dict[str, Tensor]:
    """Rows are compared with the columns after them; the rest of the matrix is filled with a constant."""
    import torch

    after = outputs.order_logits * torch.ones((queries, queries)).triu(1).to(outputs.order_logits)
    return {ORDER_LOGITS: after - after.transpose(1, 2)}


def _successors_and_corners(outputs: Any, queries: int) -> dict[str, Tensor]:
    import torch

    successors, centre = outputs.successor_order_logits, outputs.pred_boxes[..., None, :2]
    found = {ORDER_LOGITS: outputs.relative_order_logits}
    found[SUCCESSOR_LOGITS] = successors * (1 - torch.eye(queries)).to(outputs.logits)
    corners = centre + (outputs.pred_boxes[..., 2:].unflatten(-1, (4, 2)) - 0.5)
    low, high = corners.amin(-2), corners.amax(-2)
    return {**found, PRED_BOXES: torch.cat([(low + high) / 2, high - low], -1), QUADS: corners}


def _row(version: int, **facts: Any) -> Family:
    name = f"pp_doclayout_v{version}"
    processor = Processor(f"PPDocLayoutV{version}", _SETTINGS, not_antialiased=(3, version < 4))
    base: dict[str, Any] = {"size": (800, 800), "reducible": False, "processor": processor, "since": "5.23.0"}
    base |= {"after_random": _after_random}
    example = f"PaddlePaddle/PP-DocLayoutV{version}_safetensors"
    return hybrid_row(name, name, f"PP-DocLayoutV{version}", example, **{**base, **facts})


FAMILIES = (
    _row(
        2,
        reading_order="votes",
        raw_outputs=_votes,
        own_rewrites={"document_order": _order},
        rewrites={
            "msda": {"MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",)},
            "document_order": {
                "PPDocLayoutV2ForObjectDetection.forward": ("3f5761511238e6a1",),
                "PPDocLayoutV2ReadingOrder.forward": ("246a3407efe25b7e",),
                "PPDocLayoutV2Decoder.forward": ("076193679519d0d7",),
            },
        },
        random=(
            RandomModel(
                "pp_doclayout_v2",
                {**_LABELS, **_class_order(25)},
                {
                    **TINY_HG,
                    **_class_order(7),
                    "reading_order_config": {
                        **{"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48},
                        **{"coordinate_size": 6, "shape_size": 4, "relation_bias_embed_dim": 16, "global_pointer_head_size": 8},
                    },
                },
            ),
        ),
    ),
    _row(
        3,
        reading_order="votes",
        raw_outputs=_votes,
        masks_at=4,
        own_rewrites={"document_masks": _masks},
        by_selections={"mask_to_box_coordinate": _box_of_mask},
        rewrites={
            "msda": {"MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",)},
            "document_masks": {
                "PPDocLayoutV3ForObjectDetection.forward": ("ebe27b7fa1c8dc66",),
                "PPDocLayoutV3Decoder.forward": ("31782d6ef16e9748",),
                "mask_to_box_coordinate": ("5d9adf900bedda9c",),
            },
        },
        random=(
            RandomModel(
                "pp_doclayout_v3",
                _LABELS,
                {
                    **_TINY,
                    "backbone_config": {**tiny_hgnet(), "out_features": STAGES},
                    **{"x4_feat_dim": 16, "mask_feature_channels": [16, 16], "num_prototypes": 8},
                },
            ),
        ),
        after_random=_after_random_masks,
    ),
    _row(
        4,
        reading_order="successors",
        raw_outputs=_successors_and_corners,
        quads=True,
        rewrites={"msda": {"MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",)}},
        random=(
            RandomModel("pp_doclayout_v4", _LABELS, {("hidden_size" if k == "d_model" else k): v for k, v in _TINY.items()}),
        ),
    ),
)
