"""Intellindust-AI-Lab/EdgeCrafter: ECDet and ECSeg (S, M, L, X). The module is `detrt.models.layers.edgecrafter`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..checkpoints.assumed import Assumed
from ..checkpoints.key_map import LoadReport, Table
from ..checkpoints.shapes import Shapes
from .base import DINOV3, MASK_CLASS, Format, RandomModel, hybrid_row
from .d_fine import COMPUTED, DECODER, ENCODER, FEED_FORWARD, refinement, settle
from .deimv2 import BLOCKS, DECODER_PROJECTIONS, REWRITES, VIT, frequencies, vit, vit_table
from .rf_detr import MASK_BLOCK, MASK_QUERIES
from .rt_detr import finish, hybrid, trained_size
from .sizes import TINY_HYBRID

if TYPE_CHECKING:
    from torch import Tensor

DETECTOR, SEGMENTER = "EcDetForObjectDetection", f"EcDet{MASK_CLASS}"  # classes of detrt
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
        "architectures": [DETECTOR],
        "backbone_config": vit(shapes, _BACKBONE, _READ_LAYERS, "ECDet S, M, L and X", report),
        "projections": _projections(shapes),
        "encoder_has_trailing_conv": False,
        "hidden_expansion": shapes.size("encoder.fpn_blocks.0.cv2.0.conv1.conv.weight") / found["encoder_hidden_dim"],
        "depth_mult": shapes.count("encoder.fpn_blocks.0.cv2.0.bottlenecks.#.") / 3,
    }
    if f"{_MASKS}bias" in shapes:
        found |= {"architectures": [SEGMENTER], "mask_downsample_ratio": _MASK_STRIDE}
    found["family"] |= trained_size(shapes, found["feat_strides"])
    return found


def _detector() -> Any:
    from ..layers.edgecrafter import EcDetForObjectDetection

    return EcDetForObjectDetection


def _with_masks() -> Any:
    from ..layers.edgecrafter import EcDetForInstanceSegmentation

    return EcDetForInstanceSegmentation


def plain_vit(width: int, inner: int) -> dict[str, Any]:
    """A ViT of EdgeCrafter. inner: width of the feed-forward part."""
    return {
        **{"model_type": "dinov3_vit", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 12},
        **{"num_attention_heads": width // 64, "patch_size": 16, "key_bias": True, "layer_norm_eps": 1e-6},
        **{"num_register_tokens": 0, "apply_layernorm": False, "out_features": ["stage11", "stage12"]},
    }


def _published(size: str) -> dict[str, Any]:
    """A published ECDet."""
    # Width and feed-forward part of the ViT; width, expansion and depth of the neck; feed-forward parts of neck and decoder.
    width, inner, neck, expansion, depth, encoder_ffn, decoder_ffn = {
        "s": (192, 768, 192, 0.34, 0.67, 512, 512),
        "m": (256, 1024, 256, 0.75, 0.67, 512, 1024),
        "l": (384, 1536, 256, 0.75, 1.0, 1024, 1024),
        "x": (384, 2304, 256, 1.5, 1.0, 2048, 2048),
    }[size]
    return {
        **{"architectures": [DETECTOR], "backbone_config": plain_vit(width, inner), "projections": 3 if width > neck else 1},
        **{"d_model": neck, "encoder_hidden_dim": neck, "encoder_in_channels": [neck] * 3, "decoder_in_channels": [neck] * 3},
        **{"hidden_expansion": expansion, "depth_mult": depth, "encoder_has_trailing_conv": False, "decoder_layers": 4},
        **{"encoder_ffn_dim": encoder_ffn, "decoder_ffn_dim": decoder_ffn, "decoder_n_points": [3, 6, 3]},
        **{"encoder_activation_function": "silu", "decoder_activation_function": "silu"},
    }


def _published_masks(size: str) -> dict[str, Any]:
    """A published ECSeg."""
    return {**_published(size), "architectures": [SEGMENTER], "mask_downsample_ratio": _MASK_STRIDE}


_TINY = {
    **TINY_HYBRID,
    "encoder_in_channels": [32, 32, 32],
    "backbone_config": {
        **_published("s")["backbone_config"],
        **{"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
        "out_features": ["stage2", "stage3"],
    },
    "projections": 3,
}
FORMAT = Format("ecdet", ("Intellindust ECDet",), recognise, settings, table, skipped, values=values, finish=finish)
FAMILIES = (
    hybrid_row(
        "ecdet",
        "deimv2",
        "ECDet",
        "",
        own=True,
        normalize=True,
        since="5.12.1",
        classes={DETECTOR: _detector, SEGMENTER: _with_masks},
        rewrites=REWRITES,
        random=(
            RandomModel("ecdet", _published("l"), _TINY),
            RandomModel("ecseg", _published_masks("l"), _TINY),
            *(RandomModel(f"ecdet-{size}", _published(size), _TINY, size=True) for size in "smx"),
            *(RandomModel(f"ecseg-{size}", _published_masks(size), _TINY, size=True) for size in "smx"),
        ),
        after_random=settle,
        formats=(FORMAT, replace(FORMAT, name="ecseg", titles=("Intellindust ECSeg",))),
        relatives=(
            ("decoder.keypoint_embedding.weight", "an ECPose of EdgeCrafter, for keypoints; detrt reads ECDet and ECSeg"),
        ),
        engines=frozenset((DINOV3,)),
    ),
)
