"""LTDETRv2 of lightly-train (S, M, L, X): a plain ViT of EdgeCrafter, the neck of RT-DETR and the decoder of D-FINE.

The authors' files hold the settings of the model: class names, image size and normalisation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import SourceError
from ..checkpoints.assumed import Assumed
from ..checkpoints.key_map import LoadReport, Table
from ..checkpoints.shapes import Shapes
from .base import DINOV3, IMAGENET_MEAN, IMAGENET_STD, Format, RandomModel, hybrid_row
from .d_fine import COMPUTED, DECODER, FEED_FORWARD, REWRITES, refinement, settle
from .deimv2 import frequencies, vit, vit_table
from .ecdet import plain_vit
from .rt_detr import ENCODER_LAYER, NECK, PROJECTIONS, finish, hybrid
from .sizes import TINY_HYBRID

if TYPE_CHECKING:
    from torch import Tensor

CLASS = "VitDFineForObjectDetection"  # of detrt
_WRAPPER = "backbone._model_wrapper."
_BACKBONE, _VIT, _OURS = f"{_WRAPPER}backbone.", "model.backbone.backbone", "model.conv_encoder.backbone"
_READ_LAYERS = (10, 11)
TABLE: Table = (
    *((theirs, ours.replace(_OURS, _VIT)) for theirs, ours in vit_table(_BACKBONE)),
    (f"{_BACKBONE}register_token", f"{_VIT}.embeddings.cls_token"),
    (f"{_BACKBONE}patch_embed.**", f"{_VIT}.embeddings.patch_embeddings.**"),
    *ENCODER_LAYER,
    ("encoder.encoder.#.layers.#.linear1.@", "model.encoder.aifi.#.layers.#.mlp.fc1.@"),
    ("encoder.encoder.#.layers.#.linear2.@", "model.encoder.aifi.#.layers.#.mlp.fc2.@"),
    *NECK,
    ("encoder.downsample_convs.**", "model.encoder.downsample_convs.**"),
    *PROJECTIONS,
    *DECODER,
    *FEED_FORWARD,
    ("decoder.decoder.layers.#.norm3.@", "model.decoder.layers.#.final_layer_norm.@"),
)


def recognise(keys: set[str]) -> str | None:
    marks = {f"{_BACKBONE}register_token", "decoder.pre_bbox_head.layers.0.weight"}
    return "ltdetr_v2" if marks <= keys else None


def _projections(shapes: Shapes) -> int:
    return shapes.count(f"{_WRAPPER}projector.#.")


def table(shapes: Shapes) -> Table:
    """The projector has a convolution for each level, or one for the coarsest."""
    theirs, ours = ("#", "#") if _projections(shapes) > 1 else ("0", "2")
    return (*TABLE, (f"{_WRAPPER}projector.{theirs}.@.@", f"model.backbone.fusion_proj.{ours}.@.@"))


def values(shapes: Shapes) -> dict[str, Tensor]:
    """Tensors that are stored in another form than the module has them."""
    return frequencies(shapes, _BACKBONE)


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    found = {**hybrid(shapes, assumed), **refinement(shapes, assumed), "family": _input(assumed)}
    backbone = vit(shapes, _BACKBONE, _READ_LAYERS, "LTDETRv2 S, M, L and X", report)
    return {
        **found,
        "architectures": [CLASS],
        "backbone_config": {**backbone, "out_features": ["stage10", *backbone["out_features"]]},
        "projections": _projections(shapes),
        "hidden_expansion": shapes.size("encoder.fpn_blocks.0.conv1.conv.weight") / found["encoder_hidden_dim"],
        "depth_mult": shapes.count("encoder.fpn_blocks.0.bottlenecks.#.") / 3,
    }


def _input(assumed: Assumed) -> dict[str, Any]:
    """Fields of the row that the file's settings have.

    Raises:
        SourceError: a normalisation that is neither none nor ImageNet's.
    """
    found: dict[str, Any] = {}
    if size := assumed.args.get("image_size"):
        found["size"] = (int(size[0]), int(size[1]))
    if told := assumed.args.get("image_normalize"):
        stated = tuple(tuple(round(float(one), 3) for one in told[name]) for name in ("mean", "std"))
        if stated not in (((0.0,) * 3, (1.0,) * 3), (IMAGENET_MEAN, IMAGENET_STD)):
            raise SourceError(
                f"'{assumed.ref}' normalises images by mean {stated[0]} and standard deviation {stated[1]}; detrt reads LTDETRv2 with "
                "pixels from 0 to 1, or normalised by ImageNet"
            )
        found["normalize"] = stated[0] == IMAGENET_MEAN
    return found


def _detector() -> Any:
    from ..layers.vit_pyramid import VitDFineForObjectDetection

    return VitDFineForObjectDetection


def _published(size: str) -> dict[str, Any]:
    """A published LTDETRv2."""
    # Width and feed-forward part of the ViT; width, expansion and depth of the neck.
    width, inner, neck, expansion, depth = {
        "s": (192, 768, 192, 0.34, 0.67),
        "m": (256, 1024, 256, 0.67, 1.0),
        "l": (384, 1536, 256, 0.67, 1.0),
        "x": (384, 2304, 256, 0.67, 1.0),
    }[size]
    return {
        "architectures": [CLASS],
        "backbone_config": {**plain_vit(width, inner), "out_features": ["stage10", "stage11", "stage12"]},
        **{"projections": 3 if width > neck else 1, "d_model": neck, "encoder_hidden_dim": neck},
        **{"encoder_in_channels": [neck] * 3, "decoder_in_channels": [neck] * 3, "decoder_n_points": [3, 6, 3]},
        **{"hidden_expansion": expansion, "depth_mult": depth, "decoder_layers": 4},
        **{"encoder_ffn_dim": 512, "decoder_ffn_dim": 512},
    }


_TINY = {
    **TINY_HYBRID,
    "encoder_in_channels": [32, 32, 32],
    "backbone_config": {
        **_published("s")["backbone_config"],
        **{"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
        "out_features": ["stage1", "stage2", "stage3"],
    },
    "projections": 3,
}
FAMILIES = (
    hybrid_row(
        "ltdetr_v2",
        "d_fine",
        "LTDETRv2",
        "",
        own=True,
        licence="AGPL-3.0 or commercial; backbones: EdgeCrafter, DINOv3 License",
        normalize_differs=True,
        since="5.12.1",
        classes={CLASS: _detector},
        rewrites=REWRITES,
        random=(
            RandomModel("ltdetr_v2", _published("l"), _TINY),
            *(RandomModel(f"ltdetr_v2-{size}", _published(size), _TINY, size=True) for size in "smx"),
        ),
        after_random=settle,
        formats=(
            Format("ltdetr_v2", ("lightly-train LTDETRv2",), recognise, settings, table, COMPUTED, values=values, finish=finish),
        ),
        engines=frozenset((DINOV3,)),
    ),
)
