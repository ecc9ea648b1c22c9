"""Intellindust-AI-Lab/EdgeCrafter: ECDet and ECSeg (S, M, L, X). The module is `detrt.models.arch.edgecrafter`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..source import EC_CLASS, MASK_CLASS
from .assumed import Assumed
from .d_fine import COMPUTED, DECODER, ENCODER, FEED_FORWARD, refinement
from .deimv2 import BLOCKS, DECODER_PROJECTIONS, VIT, frequencies, vit, vit_table
from .key_map import LoadReport, Table
from .rf_detr import MASK_BLOCK, MASK_QUERIES
from .rt_detr import finish as finish
from .rt_detr import hybrid, trained_size
from .shapes import Shapes

if TYPE_CHECKING:
    from torch import Tensor

_BACKBONE, _MASKS = "backbone.backbone.", "decoder.decoder.segmentation_head."
TABLE = (
    *vit_table(_BACKBONE),
    (f"{_BACKBONE}register_token", f"{VIT}.embeddings.cls_token"),
    (f"{_BACKBONE}patch_embed.**", f"{VIT}.embeddings.patch_embeddings.**"),
    *ENCODER,
    *BLOCKS,
    DECODER_PROJECTIONS,
    *DECODER,
    *FEED_FORWARD,
    ("decoder.decoder.layers.#.norm2.@", "model.decoder.layers.#.final_layer_norm.@"),
    *((f"{_MASKS}blocks.0.{old}.@", f"mask_head.block.{new}.@") for old, new in MASK_BLOCK),
    *((f"{_MASKS}{old}", f"mask_head.{new}") for old, new in MASK_QUERIES),
)
_READ_LAYERS = (10, 11)
_MASK_STRIDE = 4


def recognise(keys: set[str]) -> str | None:
    if not {f"{_BACKBONE}register_token", "decoder.pre_bbox_head.layers.0.weight"} <= keys:
        return None
    return "ecseg" if f"{_MASKS}bias" in keys else "ecdet"


def table(shapes: Shapes) -> Table:
    """The projector has a convolution for each level, or one for the coarsest."""
    theirs, ours = ("#", "#") if _projections(shapes) > 1 else ("0", "2")
    return (*TABLE, (f"backbone.projector.{theirs}.@.@", f"model.conv_encoder.fusion_proj.{ours}.@.@"))


def _projections(shapes: Shapes) -> int:
    return shapes.count("backbone.projector.#.")


def skipped(shapes: Shapes) -> dict[str, str]:
    unused = range(1, shapes.count(f"{_MASKS}blocks.#.")) if f"{_MASKS}bias" in shapes else ()
    why = "a block of the mask head that runs in training only"
    return {**COMPUTED, **{f"{_MASKS}blocks.{index}.**": why for index in unused}}


def values(shapes: Shapes) -> dict[str, Tensor]:
    """Tensors that are stored in another form than the module has them."""
    return frequencies(shapes, _BACKBONE)


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    activations = {"encoder_activation": "silu", "decoder_activation": "silu"}
    found = {**hybrid(shapes, assumed, **activations), **refinement(shapes, assumed), "family": {}}
    found |= {
        "architectures": [f"{EC_CLASS}ForObjectDetection"],
        "backbone_config": vit(shapes, _BACKBONE, _READ_LAYERS, "ECDet S, M, L and X", report),
        "projections": _projections(shapes),
        "encoder_has_trailing_conv": False,
        "hidden_expansion": shapes.size("encoder.fpn_blocks.0.cv2.0.conv1.conv.weight") / found["encoder_hidden_dim"],
        "depth_mult": shapes.count("encoder.fpn_blocks.0.cv2.0.bottlenecks.#.") / 3,
    }
    if f"{_MASKS}bias" in shapes:
        found |= {"architectures": [f"{EC_CLASS}{MASK_CLASS}"], "mask_downsample_ratio": _MASK_STRIDE}
    found["family"] |= trained_size(shapes, found["feat_strides"])
    return found
