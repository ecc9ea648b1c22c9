"""roboflow/rf-detr: checkpoints of detectors (nano to 2XL, base) and of RF-DETR-Seg (nano to 2xlarge)."""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING, Any

from ...errors import SourceError
from ..checkpoints.assumed import Assumed
from ..checkpoints.key_map import LoadReport, Table
from ..checkpoints.shapes import Shapes
from .base import ATTENDS_BY_MASK, EDGES, MASK_CLASS, Family, Format, Processor, RandomModel
from .lw_detr import CROSS_HEAD, DECODER, SELF_HEAD, projector_table
from .sizes import TINY_LW

if TYPE_CHECKING:
    from torch import nn

    from ..checkpoints.state_file import StateFile


_ENCODER, _LAYER = "backbone.0.encoder.encoder", "model.backbone.backbone.encoder.layer.#"
_ATTENTION = (
    ("attention.attention.query", "q_proj"),
    ("attention.attention.key", "k_proj"),
    ("attention.attention.value", "v_proj"),
    ("attention.output.dense", "o_proj"),
)
_PROJECTOR, _SCALE = "backbone.0.projector.stages.0", "model.backbone.projector"

TABLE = (
    *((f"{_ENCODER}.encoder.layer.#.{old}.@", f"{_LAYER}.attention.{new}.@") for old, new in _ATTENTION),
    (f"{_ENCODER}.encoder.layer.#.**", f"{_LAYER}.**"),
    (f"{_ENCODER}.embeddings.**", "model.backbone.backbone.embeddings.**"),
    (f"{_ENCODER}.layernorm.@", "model.backbone.backbone.layernorm.@"),
    *projector_table(_PROJECTOR, _SCALE),
    *DECODER,
)
SKIPPED = {"_kp_active_mask": "which keypoints a class has; a model with keypoints has more tensors"}  # rfdetr since 1.8
# (patch size, side of the position table) -> windows along a side, where other models of that patch size have others.
WINDOWS = {(20, 35): 1, (12, 26): 1}  # XL, Seg nano
MASK_BLOCK = (("dwconv", "depthwise_conv"), ("norm", "layernorm"), ("pwconv1", "pointwise_conv"))
MASK_QUERIES = (
    ("query_features_block.norm_in.@", "query_features_block.norm.@"),
    ("query_features_block.layers.0.@", "query_features_block.mlp.fc1.@"),
    ("query_features_block.layers.2.@", "query_features_block.mlp.fc2.@"),
    ("query_features_proj.@", "query_features_proj.@"),
    ("spatial_features_proj.@", "spatial_features_proj.@"),
    ("bias", "segmentation_bias"),
)
_MASK_HEAD = (
    *((f"segmentation_head.blocks.#.{old}.@", f"blocks.#.{new}.@") for old, new in MASK_BLOCK),
    *((f"segmentation_head.{old}", new) for old, new in MASK_QUERIES),
)


def table(shapes: Shapes) -> Table:
    """The detector's map; of RF-DETR-Seg with the mask head, whose module holds the detector."""
    if not _has_masks(shapes):
        return TABLE
    return (*((theirs, f"model.{ours}") for theirs, ours in TABLE), *_MASK_HEAD)


def _has_masks(shapes: Shapes) -> bool:
    return shapes.any(r"^segmentation_head\.")


def recognise(keys: set[str]) -> str | None:
    marks = {f"{_ENCODER}.embeddings.cls_token", "refpoint_embed.weight"}
    return "rf_detr" if marks <= keys else None


def names_start(file: StateFile) -> int:
    """Column of the head that `class_names[0]` is for.

    rfdetr up to 1.4 trains on the category ids of a Roboflow export, which start at 1 behind a category of all; 1.5 numbers the
    categories from 0, 1.6 writes its settings as a dictionary, 1.7 its version. YOLO data sets always count from 0. Of an object of
    argparse, nothing tells 1.5 from 1.4.
    """
    if file.plain_args or "rfdetr_version" in file.words or "pytorch-lightning_version" in file.words:
        return 0
    return 0 if file.args.get("dataset_file") == "yolo" else 1


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    if shapes.count("backbone.0.projector.stages.#.") != 1:
        raise SourceError(
            f"'{shapes.ref}' has a projector of several scales (the first RF-DETR large); transformers' RF-DETR has one"
        )
    if shapes.any(r"\.register_tokens$"):
        raise SourceError(f"'{shapes.ref}' has a backbone with register tokens, which transformers' RF-DETR does not have")
    embeddings = f"{_ENCODER}.embeddings"
    patch = shapes.size(f"{embeddings}.patch_embeddings.projection.weight", 2)
    width = shapes.size(f"{embeddings}.cls_token", 2)
    layers = shapes.count(f"{_ENCODER}.encoder.layer.#.")
    side = isqrt(shapes.size(f"{embeddings}.position_embeddings", 1) - 1)
    groups = shapes.count("transformer.enc_output.#.")
    hidden = shapes.size("query_feat.weight", 1)
    queries = shapes.size("query_feat.weight") // max(groups, 1)
    # Published: patch 14 has 4 windows and 560 pixels, the others have 2 windows and the size of their position table.
    first = patch == 14
    taken = assumed.numbers("levels", [2, 5, 8, 11] if first else [3, 6, 9, 12], "out_feature_indexes")
    resolution = assumed.number("resolution", 560 if first else side * patch, "resolution")
    windows = assumed.number("windows", WINDOWS.get((patch, side), 4 if first else 2), "num_windows")
    self_heads = assumed.number("self_heads", max(1, hidden // SELF_HEAD), "sa_nheads", divides=hidden)
    cross_heads = assumed.number("cross_heads", max(1, hidden // CROSS_HEAD), "ca_nheads", divides=hidden)
    detections = assumed.number("detections", queries, "num_select")
    masks: dict[str, Any] = {}
    if _has_masks(shapes):
        masks = {
            "architectures": [f"RfDetr{MASK_CLASS}"],
            "intermediate_size": shapes.size("segmentation_head.query_features_block.layers.0.weight"),
            "mask_downsample_ratio": assumed.number("mask_stride", 4, "mask_downsample_ratio"),
        }
    return {
        **masks,
        "backbone_config": {
            "model_type": "rf_detr_dinov2",
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": max(1, width // 64),
            "mlp_ratio": shapes.size(f"{_ENCODER}.encoder.layer.0.mlp.fc1.weight") // width,
            "image_size": side * patch,
            "patch_size": patch,
            "num_windows": windows,
            "num_register_tokens": 0,
            "out_features": [f"stage{i}" for i in taken],
        },
        "num_labels": shapes.size("class_embed.weight"),
        "num_queries": queries,
        "group_detr": groups,
        "d_model": hidden,
        "decoder_layers": shapes.count("transformer.decoder.layers.#."),
        "decoder_ffn_dim": shapes.size("transformer.decoder.layers.0.linear1.weight"),
        "decoder_self_attention_heads": self_heads,
        "decoder_cross_attention_heads": cross_heads,
        "decoder_n_points": shapes.size("transformer.decoder.layers.0.cross_attn.attention_weights.weight") // cross_heads,
        "num_feature_levels": 1,
        "family": {"size": (resolution, resolution), "max_detections": None if detections == queries else detections},
    }


def finish(module: nn.Module) -> None:
    """The authors' selection, and their epsilon 1e-6 of the projector's norms; transformers 5.23 gives them the decoder's 1e-5.

    On random weights either difference reorders the selected queries.
    """
    from ..layers.lw_detr import take_authors_selection

    take_authors_selection(module)
    inner: Any = module.model
    while not hasattr(inner, "backbone"):  # RF-DETR-Seg holds a detector
        inner = inner.model
    for norm in inner.backbone.projector.modules():
        if hasattr(norm, "eps"):
            norm.eps = 1e-6


_WIDE = {
    **{"d_model": 512, "decoder_layers": 5, "decoder_n_points": 4},
    **{"decoder_self_attention_heads": 16, "decoder_cross_attention_heads": 32, "num_labels": 366},
}


def _published(side: int, patch: int, windows: int, **settings: int) -> dict[str, Any]:
    """A published RF-DETR, trained at `side` pixels: a ViT-S, or a ViT-B below a wide decoder."""
    wide = settings.get("d_model", 256) > 256
    backbone = {
        **{"model_type": "rf_detr_dinov2", "num_hidden_layers": 12, "image_size": side, "patch_size": patch},
        **{"hidden_size": 768 if wide else 384, "num_attention_heads": 12 if wide else 6, "num_windows": windows},
        "out_features": ["stage3", "stage6", "stage9", "stage12"],
    }
    return {"backbone_config": backbone, "decoder_n_points": 2, **settings}


def _tiny(patch: int, windows: int) -> dict[str, Any]:
    backbone = {
        **{"model_type": "rf_detr_dinov2", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"image_size": 8 * patch, "patch_size": patch, "num_windows": windows, "out_indices": [2, 4]},
    }
    return {**TINY_LW, "intermediate_size": 48, "backbone_config": backbone}


def _published_masks(side: int, *, layers: int, queries: int, windows: int = 2) -> dict[str, Any]:
    """A published RF-DETR-Seg, trained at `side` pixels."""
    full = _published(side, 12, windows, decoder_layers=layers, num_queries=queries)
    return {**full, "architectures": [f"RfDetr{MASK_CLASS}"]}


# The authors antialias, the processor of transformers does not.
PROCESSOR = Processor(
    "RfDetr",
    EDGES,
    not_antialiased=(2, False),
    authors_antialias=True,
    antialiased_in=("5.12.1", "5.15.1"),
    like="DeformableDetr",
)
FAMILIES = (
    Family(
        name="rf_detr",
        model_type="rf_detr",
        title="RF-DETR",
        activation="sigmoid",
        select="topk",
        max_detections=None,
        example="Roboflow/rf-detr-medium",
        no_mask=ATTENDS_BY_MASK,
        dynamic=False,
        fixed_reason=(
            "its backbone resizes the position table with an antialiased bicubic filter, which no TensorRT version "
            "has; detrt computes that table for one size before the export"
        ),
        multiple_of="windows",
        size=None,
        processor=PROCESSOR,
        reducible=True,
        licence="Apache-2.0; XL and 2XL: Roboflow Platform Model License 1.0 (PML-1.0)",
        deformable=True,
        since="5.12.1",
        rewrites={
            "msda": {"MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",)},
            "symbolic_shapes": {
                "RfDetrModel.forward": ("9058633959d0bb28", "d3cdf546e76068ee"),
                "RfDetrModel.gen_encoder_output_proposals": ("3bdc32ee4500d2ff", "525e003946ce095e"),
            },
            "frozen_positions": {"RfDetrDinov2Embeddings.interpolate_pos_encoding": ("aad1b5dd93675339",)},
        },
        layouts=("rf-detr",),
        random=(
            RandomModel("rf_detr", {}, _tiny(14, 2)),
            RandomModel("rf_detr-large", _published(704, 16, 2, decoder_layers=4), _tiny(16, 2)),
            RandomModel("rf_detr-xlarge", _published(700, 20, 1, **_WIDE), _tiny(20, 1)),
            RandomModel("rf_detr-2xlarge", _published(880, 20, 2, **_WIDE), _tiny(20, 2)),
            RandomModel("rf_detr-seg", _published_masks(432, layers=5, queries=200), _tiny(14, 2)),  # the published medium
            *(
                RandomModel(f"rf_detr-seg-{name}", full, _tiny(14, 2), size=True)
                for name, full in (
                    ("nano", _published_masks(312, windows=1, layers=4, queries=100)),
                    ("small", _published_masks(384, layers=4, queries=100)),
                    ("large", _published_masks(504, layers=5, queries=200)),
                    ("xlarge", _published_masks(624, layers=6, queries=300)),
                    ("2xlarge", _published_masks(768, layers=6, queries=300)),
                )
            ),
        ),
        formats=(
            Format("rf_detr", ("Roboflow RF-DETR",), recognise, settings, table, SKIPPED, finish=finish, names_start=names_start),
        ),
    ),
)
