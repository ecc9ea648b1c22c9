"""Peterande/D-FINE (N to X), ArgoHA/D-FINE-seg, and DEIM on D-FINE and RT-DETRv4, which have the same keys and other activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import SourceError
from ...spec import InputSpec
from ..checkpoints.assumed import Assumed
from ..checkpoints.key_map import LoadReport, Table
from ..checkpoints.shapes import Shapes, hgnet, levels_of, points_of
from .base import MASK_CLASS, SIGMOID_IN_FP16, Family, Format, RandomModel, hybrid_row
from .rt_detr import (
    ATTENTION,
    ENCODER_LAYER,
    PROJECTIONS,
    SAMPLING,
    SELECTION,
    TABLES_OF_SIZE,
    decoder_heads,
    finish,
    hgnet_table,
    hybrid,
    prepare,
    trained_size,
)
from .sizes import TINY_HG


def block_table(name: str, inner: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """A cross-scale fusion block `name`, e.g. "fpn_blocks.#", part by part."""
    return tuple((f"encoder.{name}.{old}.**", f"model.encoder.{name}.{new}.**") for old, new in inner)


_BLOCK = (
    ("cv1", "conv1"),
    ("cv2.0", "csp_rep1"),
    ("cv2.1", "conv2"),
    ("cv3.0", "csp_rep2"),
    ("cv3.1", "conv3"),
    ("cv4", "conv4"),
)
ENCODER = (
    *ENCODER_LAYER,
    ("encoder.encoder.#.layers.#.linear1.@", "model.encoder.aifi.#.layers.#.mlp.layers.0.@"),
    ("encoder.encoder.#.layers.#.linear2.@", "model.encoder.aifi.#.layers.#.mlp.layers.1.@"),
    ("encoder.lateral_convs.**", "model.encoder.lateral_convs.**"),
    ("encoder.downsample_convs.#.0.cv1.**", "model.encoder.downsample_convs.#.conv1.**"),
    ("encoder.downsample_convs.#.0.cv2.**", "model.encoder.downsample_convs.#.conv2.**"),
)
DECODER = (
    *SELECTION,
    *ATTENTION,
    ("decoder.pre_bbox_head.**", "model.decoder.pre_bbox_head.**"),
    ("decoder.decoder.up", "model.decoder.up"),
    ("decoder.decoder.reg_scale", "model.decoder.reg_scale"),
    ("decoder.decoder.lqe_layers.#.**", "model.decoder.lqe_layers.#.**"),
    ("decoder.decoder.layers.#.gateway.gate.@", "model.decoder.layers.#.gateway.gate.@"),
)
FEED_FORWARD = (
    ("decoder.decoder.layers.#.gateway.norm.@", "model.decoder.layers.#.gateway.norm.@"),
    ("decoder.decoder.layers.#.linear1.@", "model.decoder.layers.#.mlp.layers.0.@"),
    ("decoder.decoder.layers.#.linear2.@", "model.decoder.layers.#.mlp.layers.1.@"),
    ("decoder.decoder.layers.#.norm1.@", "model.decoder.layers.#.self_attn_layer_norm.@"),
)
TABLE = (
    *hgnet_table("model.backbone.model"),
    *ENCODER,
    *block_table("fpn_blocks.#", _BLOCK),
    *block_table("pan_blocks.#", _BLOCK),
    *PROJECTIONS,
    *DECODER,
    *FEED_FORWARD,
    ("decoder.decoder.layers.#.norm3.@", "model.decoder.layers.#.final_layer_norm.@"),
)
COMPUTED = {
    **TABLES_OF_SIZE,
    "decoder.up": "the same number as decoder.decoder.up",
    "decoder.reg_scale": "the same number as decoder.decoder.reg_scale",
    "decoder.decoder.project": "computed from up and reg_scale",
}
# Of RT-DETRv4, in its training only.
_DISTILLED = "encoder.feature_projector"
SKIPPED = {
    **COMPUTED,
    f"{_DISTILLED}.#.@": "for the distillation of a teacher's features",
}


# The mask head of D-FINE-seg, whose file holds the detector under D-FINE's names.
_MASK_HEAD = (
    ("decoder.mask_decoder.**", "mask_decoder.**"),
    ("decoder.mask_head.**", "mask_head.**"),
)
_MASK_CONV = "decoder.mask_decoder.up_conv.weight"


def table(shapes: Shapes) -> Table:
    """D-FINE's map, of D-FINE-seg with the mask head."""
    return (*TABLE, *_MASK_HEAD) if _MASK_CONV in shapes else TABLE


def recognise(keys: set[str]) -> str | None:
    """ "d_fine" may also be DEIM on D-FINE, or an RT-DETRv4 without what its distillation needs: the keys are the same."""
    if f"{_DISTILLED}.0.weight" in keys:
        return "rt_detr_v4"
    if _MASK_CONV in keys:
        return "d_fine_seg"
    marks = {"decoder.pre_bbox_head.layers.0.weight", "decoder.decoder.layers.0.linear1.weight"}
    return "d_fine" if marks <= keys and any(key.startswith("backbone.stem.") for key in keys) else None


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    if f"{_DISTILLED}.0.weight" in shapes and variant != "rt_detr_v4":
        raise SourceError(
            f"'{shapes.ref}' is an RT-DETRv4 (it has the key '{_DISTILLED}.0.weight'), not {variant}; leave `family` out or give "
            "`family=rt_detr_v4`"
        )
    silu = variant in ("deim", "rt_detr_v4")
    found = {**hybrid(shapes, assumed, decoder_activation="silu" if silu else "relu"), **refinement(shapes, assumed)}
    found["family"] = trained_size(shapes, found["feat_strides"])
    found["backbone_config"] = hgnet(shapes)
    found["backbone_config"]["out_features"] = levels_of(
        found["backbone_config"]["hidden_sizes"], found["encoder_in_channels"], shapes.ref
    )
    neck = found["encoder_hidden_dim"]
    found["hidden_expansion"] = 2 * shapes.size("encoder.fpn_blocks.0.cv2.0.conv1.conv.weight") / neck
    found["depth_mult"] = shapes.count("encoder.fpn_blocks.0.cv2.0.bottlenecks.#.") / 3
    if _MASK_CONV in shapes:
        levels = len(found["encoder_in_channels"])
        found |= {
            "architectures": [f"DFine{MASK_CLASS}"],
            "mask_dim": shapes.size(_MASK_CONV),
            "mask_downsample_ratio": 32 // 2**levels,  # half the stride of the finest of levels that end at 32
        }
    return found


def input_spec(config: Any, family: Family, *, attend_padding: bool = False) -> InputSpec:
    """The authors' preprocessing. D-FINE-seg resizes with OpenCV's INTER_LINEAR, which does not antialias."""
    from ..preprocessor import read_input_spec

    entry = read_input_spec(None, family, config)
    masks = any(name.endswith(MASK_CLASS) for name in config.architectures or ())
    return replace(entry, antialias=False, dtype="float32") if masks else entry


def refinement(shapes: Shapes, assumed: Assumed) -> dict[str, Any]:
    """Facts of the decoder that D-FINE and DEIMv2 share."""
    scale = "decoder.decoder.layers.0.cross_attn.num_points_scale"
    shapes.size(scale)
    points = points_of(shapes.state[scale], shapes.ref)
    first = "decoder.decoder.lqe_layers.0.reg_conf.layers"
    bins = shapes.size("decoder.pre_bbox_head.layers.2.weight")
    edges = shapes.size("decoder.dec_bbox_head.0.layers.2.weight")
    found: dict[str, Any] = {
        "decoder_n_points": points,
        "decoder_attention_heads": decoder_heads(shapes),
        "decoder_method": assumed.choice("sampling", *SAMPLING),
        "max_num_bins": edges // bins - 1,
        "top_prob_values": shapes.size(f"{first}.0.weight", 1) // 4 - 1,
        "lqe_hidden_dim": shapes.size(f"{first}.0.weight"),
        "lqe_layers": shapes.count(f"{first}.#."),
    }
    for name in ("up", "reg_scale"):
        key = f"decoder.decoder.{name}"
        shapes.size(key)
        found[name] = float(shapes.state[key].flatten()[0])
    return found


def settle(module: Any, generator: Any, full_size: bool) -> None:
    """Statistics for the BatchNorms of a model that selects its queries on the output of the encoder as it is, in place; of a tiny one, too."""
    from ..random import settle_batch_norms

    settle_batch_norms(module, generator)


def settle_full_size(module: Any, generator: Any, full_size: bool) -> None:
    """Statistics for the BatchNorms of a model whose decoder reads the output of the encoder as it is, in place."""
    if full_size:
        settle(module, generator, full_size)


def _deim() -> Any:
    from ..layers.deim import DeimDFine

    return DeimDFine


def _with_masks() -> Any:
    from ..layers.d_fine_seg import DFineForInstanceSegmentation

    return DFineForInstanceSegmentation


REWRITES = {"msda": {"multi_scale_deformable_attention_v2": ("a2f4f35b651aeb36", "a114bb8d455d13e6")}}
FORMAT = Format("d_fine", ("Peterande D-FINE",), recognise, settings, table, SKIPPED, prepare=prepare, finish=finish)
_TINY = {**TINY_HG, "decoder_n_points": [3, 4, 2]}
FAMILIES = (
    hybrid_row(
        "d_fine",
        "d_fine",
        "D-FINE",
        "ustc-community/dfine-large-coco",
        classes={f"DFine{MASK_CLASS}": _with_masks},
        rewrites=REWRITES,
        authors_input=input_spec,
        random=(
            RandomModel("d_fine", {}, _TINY),
            RandomModel(
                "d_fine-seg",
                {"architectures": [f"DFine{MASK_CLASS}"], "mask_dim": 256, "mask_downsample_ratio": 4},
                {**_TINY, "mask_dim": 32},
            ),
        ),
        after_random=settle_full_size,
        formats=(
            replace(
                FORMAT,
                also="D-FINE, DEIM on D-FINE or RT-DETRv4: the keys are the same, and D-FINE computes another function (ReLU, "
                "the others SiLU). Say which with `family=d_fine`, deim or rt_detr_v4",
            ),
            replace(FORMAT, name="d_fine_seg", titles=("ArgoHA D-FINE-seg",)),
            replace(FORMAT, name="deim", titles=("DEIM on D-FINE",), model=_deim),
            replace(FORMAT, name="rt_detr_v4", titles=("RT-DETRs RT-DETRv4",), model=_deim),
        ),
        engines=frozenset((SIGMOID_IN_FP16,)),
    ),
)
