"""lyuwenyu/RT-DETR in PyTorch, version 1 and 2 and DEIM on 2, with ResNet-vd backbones (R18 to R101), 2 also with HGNetV2.

Version 2 is version 1 with `num_points_scale` in its cross attention, and two modules that have names
instead of numbers (`enc_output.proj`, `input_proj.0.conv`); one table reads both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import SourceError, number_of
from ..checkpoints.assumed import ACTIVATIONS, Assumed
from ..checkpoints.key_map import LoadReport
from ..checkpoints.shapes import Shapes, hgnet, levels_of, points_of
from .base import BY_ONNX, INT8_CROSS_ATTENTION, Format, RandomModel, hybrid_row
from .sizes import TINY_RT

if TYPE_CHECKING:
    from torch import nn


_STAGE, _TO = "backbone.res_layers.#", "model.backbone.model.encoder.stages.#.layers"
_BLOCK = tuple(
    (f"{_STAGE}.blocks.#.branch2{letter}.{old}.@", f"{_TO}.#.layer.{number}.{new}.@")
    for number, letter in enumerate("abc")
    for old, new in (("conv", "convolution"), ("norm", "normalization"))
)

BACKBONE = (
    *(
        (
            f"backbone.conv1.conv1_{number + 1}.{old}.@",
            f"model.backbone.model.embedder.embedder.{number}.{new}.@",
        )
        for number in range(3)
        for old, new in (("conv", "convolution"), ("norm", "normalization"))
    ),
    *_BLOCK,
    # The first stage keeps its size, so its shortcut has no pooling in front.
    (f"{_STAGE}.blocks.#.short.conv.conv.@", f"{_TO}.#.shortcut.1.convolution.@"),
    (f"{_STAGE}.blocks.#.short.conv.norm.@", f"{_TO}.#.shortcut.1.normalization.@"),
    (f"{_STAGE}.blocks.#.short.conv.@", f"{_TO}.#.shortcut.convolution.@"),
    (f"{_STAGE}.blocks.#.short.norm.@", f"{_TO}.#.shortcut.normalization.@"),
)


def hgnet_table(target: str) -> tuple[tuple[str, str], ...]:
    """The HGNetV2 backbone under `target`, e.g. "model.backbone.model"."""
    lines = []
    for old, new in (("conv", "convolution"), ("bn", "normalization"), ("lab", "lab")):
        lines += [
            (f"backbone.stem.@.{old}.@", f"{target}.embedder.@.{new}.@"),
            (f"backbone.stem.@.{old}.1.@", f"{target}.embedder.@.{new}.@"),
            (f"backbone.stages.#.downsample.{old}.@", f"{target}.encoder.stages.#.downsample.{new}.@"),
            (
                f"backbone.stages.#.blocks.#.layers.#.{old}.@",
                f"{target}.encoder.stages.#.blocks.#.layers.#.{new}.@",
            ),
            (
                f"backbone.stages.#.blocks.#.layers.#.@.{old}.@",
                f"{target}.encoder.stages.#.blocks.#.layers.#.@.{new}.@",
            ),
            (
                f"backbone.stages.#.blocks.#.aggregation.#.{old}.@",
                f"{target}.encoder.stages.#.blocks.#.aggregation.#.{new}.@",
            ),
            # lyuwenyu's port has words where the others have numbers, and padding as a layer of its own.
            *(
                (
                    f"backbone.stages.#.blocks.#.aggregation_{word}_conv.{old}.@",
                    f"{target}.encoder.stages.#.blocks.#.aggregation.{number}.{new}.@",
                )
                for number, word in enumerate(("squeeze", "excitation"))
            ),
        ]
    return tuple(lines)


ENCODER_LAYER = (
    (
        "encoder.encoder.#.layers.#.self_attn.in_proj_@",
        "model.encoder.aifi.#.layers.#.self_attn.{q,k,v}_proj.@",
    ),
    ("encoder.encoder.#.layers.#.self_attn.out_proj.@", "model.encoder.aifi.#.layers.#.self_attn.o_proj.@"),
    ("encoder.encoder.#.layers.#.norm1.@", "model.encoder.aifi.#.layers.#.self_attn_layer_norm.@"),
    ("encoder.encoder.#.layers.#.norm2.@", "model.encoder.aifi.#.layers.#.final_layer_norm.@"),
)
NECK = tuple(
    line
    for name in ("lateral_convs", "fpn_blocks", "pan_blocks")
    for line in ((f"encoder.{name}.**", f"model.encoder.{name}.**"),)
)
PROJECTIONS = tuple(
    (f"{side}.input_proj.#.{old}.@", f"model.{side}_input_proj.#.{new}.@")
    for side in ("encoder", "decoder")
    for old, new in (("conv", "0"), ("norm", "1"), ("0", "0"), ("1", "1"))
)
SELECTION = (
    ("decoder.enc_output.proj.@", "model.enc_output.0.@"),
    ("decoder.enc_output.norm.@", "model.enc_output.1.@"),
    ("decoder.enc_output.#.@", "model.enc_output.#.@"),
    ("decoder.enc_score_head.@", "model.enc_score_head.@"),
    ("decoder.enc_bbox_head.**", "model.enc_bbox_head.**"),
    ("decoder.denoising_class_embed.@", "model.denoising_class_embed.@"),
    ("decoder.query_pos_head.**", "model.decoder.query_pos_head.**"),
    ("decoder.dec_score_head.#.@", "model.decoder.class_embed.#.@"),
    ("decoder.dec_bbox_head.**", "model.decoder.bbox_embed.**"),
)
ATTENTION = (
    ("decoder.decoder.layers.#.self_attn.in_proj_@", "model.decoder.layers.#.self_attn.{q,k,v}_proj.@"),
    ("decoder.decoder.layers.#.self_attn.out_proj.@", "model.decoder.layers.#.self_attn.o_proj.@"),
    (
        "decoder.decoder.layers.#.cross_attn.num_points_scale",
        "model.decoder.layers.#.encoder_attn.num_points_scale",
    ),
    ("decoder.decoder.layers.#.cross_attn.@.@", "model.decoder.layers.#.encoder_attn.@.@"),
)
TABLE = (
    *BACKBONE,
    *hgnet_table("model.backbone.model"),
    *ENCODER_LAYER,
    ("encoder.encoder.#.layers.#.linear1.@", "model.encoder.aifi.#.layers.#.mlp.fc1.@"),
    ("encoder.encoder.#.layers.#.linear2.@", "model.encoder.aifi.#.layers.#.mlp.fc2.@"),
    *NECK,
    ("encoder.downsample_convs.**", "model.encoder.downsample_convs.**"),
    *PROJECTIONS,
    *SELECTION,
    # Before ATTENTION: of the three families with this buffer, transformers renamed this one's.
    (
        "decoder.decoder.layers.#.cross_attn.num_points_scale",
        "model.decoder.layers.#.encoder_attn.n_points_scale",
    ),
    *ATTENTION,
    ("decoder.decoder.layers.#.linear1.@", "model.decoder.layers.#.mlp.fc1.@"),
    ("decoder.decoder.layers.#.linear2.@", "model.decoder.layers.#.mlp.fc2.@"),
    ("decoder.decoder.layers.#.norm1.@", "model.decoder.layers.#.self_attn_layer_norm.@"),
    ("decoder.decoder.layers.#.norm2.@", "model.decoder.layers.#.encoder_attn_layer_norm.@"),
    ("decoder.decoder.layers.#.norm3.@", "model.decoder.layers.#.final_layer_norm.@"),
)
HEADS = 8  # of every published model, in encoder and decoder
SAMPLING = ("default", ("default", "discrete"))
_TABLE_OF_SIZE = "a table for one input size, computed by the module"
TABLES_OF_SIZE = {"decoder.anchors": _TABLE_OF_SIZE, "decoder.valid_mask": _TABLE_OF_SIZE}
SKIPPED = TABLES_OF_SIZE


def recognise(keys: set[str]) -> str | None:
    if "decoder.dec_score_head.0.weight" not in keys or "decoder.pre_bbox_head.layers.0.weight" in keys:
        return None
    if "decoder.decoder.layers.0.cross_attn.num_points_scale" not in keys:
        return "rt_detr"
    return "deim-rt_detr_v2" if "decoder.query_pos_head.layers.2.weight" in keys else "rt_detr_v2"


def last_layer(shapes: Shapes) -> int | None:
    """The decoder layer that the authors take the result from, where it is not the last: `eval_idx` of R50-m."""
    layers = shapes.count("decoder.decoder.layers.#.")
    bottleneck = "backbone.res_layers.0.blocks.0.branch2c.conv.weight" in shapes
    neck = shapes.size(
        "encoder.input_proj.0.0.weight" if "encoder.input_proj.0.0.weight" in shapes else "encoder.input_proj.0.conv.weight"
    )
    narrow = shapes.size("encoder.fpn_blocks.0.conv1.conv.weight") < neck
    return 2 if bottleneck and narrow and layers == 6 else None


def skipped(shapes: Shapes) -> dict[str, str]:
    last = last_layer(shapes)
    if last is None:
        return SKIPPED
    names = ("decoder.decoder.layers.{}.**", "decoder.dec_score_head.{}.@", "decoder.dec_bbox_head.{}.**")
    behind = [name.format(i) for name in names for i in range(last + 1, 6)]
    return {**SKIPPED, **dict.fromkeys(behind, "a decoder layer behind the one that is evaluated")}


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    residual = shapes.any(r"^backbone\.res_layers\.")
    if not residual and "backbone.stem.stem2a.conv.1.weight" not in shapes:
        raise SourceError(
            f"'{shapes.ref}' is an RT-DETR with another backbone than ResNet-vd or HGNetV2 (DLA, RegNet, CSP, timm), which "
            "detrt does not have; it reads the R18 to R101 and the HGNetV2 L, X and H files"
        )
    three = "decoder.query_pos_head.layers.2.weight" in shapes
    if three != variant.startswith("deim"):
        found = "one" if three else "none"
        raise SourceError(
            f"'{shapes.ref}': DEIM on RT-DETRv2 has a third layer in 'decoder.query_pos_head' and RT-DETR has none; this file "
            f"has {found}: it is of another family, leave `family` out"
        )
    found = hybrid(shapes, assumed, decoder_activation="silu" if three else "relu")
    found["family"] = trained_size(shapes, found["feat_strides"])
    backbone = presnet(shapes) if residual else hgnet(shapes, last="aggregation_excitation_conv")
    backbone["out_features"] = levels_of(backbone["hidden_sizes"], found["encoder_in_channels"], shapes.ref)
    found["backbone_config"] = backbone
    found["hidden_expansion"] = shapes.size("encoder.fpn_blocks.0.conv1.conv.weight") / found["encoder_hidden_dim"]
    last = last_layer(shapes)
    if last is not None:
        found["decoder_layers"] = last + 1
        report.notes.append(f"result of decoder layer {last + 1} of 6, as the authors evaluate R50-m")
    levels = found["num_feature_levels"]
    if variant == "rt_detr":
        heads = assumed.number("heads", HEADS)
        points = shapes.points("decoder.decoder.layers.0.cross_attn.attention_weights.weight", heads, levels)
        return {**found, "decoder_attention_heads": heads, "decoder_n_points": points}
    each = set(points_of(shapes.state["decoder.decoder.layers.0.cross_attn.num_points_scale"], shapes.ref))
    if len(each) > 1:
        raise SourceError(f"'{shapes.ref}' has {sorted(each)} points on different levels; transformers' RT-DETRv2 has one number")
    if not three:
        report.notes.append(
            "discrete sampling (`family=rt_detr_v2-discrete`)"
            if variant.endswith("discrete")
            else "bilinear sampling: a 'dsp' file has the same keys and needs `family=rt_detr_v2-discrete`"
        )
    method = "discrete" if variant.endswith("discrete") else assumed.choice("sampling", *SAMPLING)
    return {
        **found,
        "decoder_attention_heads": decoder_heads(shapes),
        "decoder_n_points": each.pop(),
        "decoder_n_levels": levels,
        "decoder_method": method,
    }


def decoder_heads(shapes: Shapes) -> int:
    """Heads of the decoder: the rows of the weights of its cross-attention, which `num_points_scale` has once for each head.

    Raises:
        SourceError: no such number.
    """
    layer = "decoder.decoder.layers.0.cross_attn."
    rows, points = shapes.size(f"{layer}attention_weights.weight"), shapes.size(f"{layer}num_points_scale")
    heads, rest = divmod(rows, points)
    if rest or heads < 1:
        raise SourceError(f"'{shapes.ref}': '{layer}attention_weights' has {rows} rows, which its {points} points do not divide")
    return heads


def hybrid(
    shapes: Shapes, assumed: Assumed, *, queries: int = 300, encoder_activation: str = "gelu", decoder_activation: str = "relu"
) -> dict[str, Any]:
    """What RT-DETR, D-FINE and DEIMv2 share. queries and the activations: of the published model."""
    hidden = shapes.size("decoder.enc_score_head.weight", 1)
    levels = shapes.count("encoder.lateral_convs.#.") + 1
    neck = shapes.size("encoder.lateral_convs.0.conv.weight") if levels > 1 else shapes.size("encoder.input_proj.0.conv.weight")
    # DEIM leaves a projection out where the backbone is as wide as the neck.
    names = [f"encoder.input_proj.{i}.{leaf}.weight" for i in range(levels) for leaf in ("conv", "0")]
    given = {int(name.split(".")[2]): shapes.size(name, 1) for name in names if name in shapes}
    inputs = [given.get(i, neck) for i in range(levels)]
    layers = shapes.count("encoder.encoder.#.")
    scores = "decoder.enc_score_head.weight"
    if shapes.size(scores) == 1 != shapes.size("decoder.dec_score_head.0.weight"):
        raise SourceError(
            f"'{shapes.ref}' selects its queries by one score for all classes (query_select_method agnostic; '{scores}' has one row), and "
            "detrt runs the default selection; export it to ONNX with the authors' code, and build from that file"
        )
    if "decoder.anchors" not in shapes:
        assumed.own("size 640x640", "`size`")
    count = assumed.queries(queries)
    assumed.own("the result of the last decoder layer that is read", "`decoder_layers`")
    assumed.choice("query_selection", "default", ("default",))
    encoder = {}
    if layers:
        encoder = {
            "encoder_attention_heads": assumed.number("encoder_heads", HEADS, divides=neck),
            "encoder_activation_function": assumed.choice("encoder_activation", encoder_activation, ACTIVATIONS),
            "positional_encoding_temperature": assumed.number("temperature", 10000),
        }
    return {
        **encoder,
        "activation_function": assumed.choice("neck_activation", "silu", ACTIVATIONS),
        "decoder_activation_function": assumed.choice("decoder_activation", decoder_activation, ACTIVATIONS),
        "num_labels": shapes.size("decoder.enc_score_head.weight"),
        "num_queries": count,
        "d_model": hidden,
        "encoder_hidden_dim": neck,
        "encoder_in_channels": inputs,
        "decoder_in_channels": [neck] * levels,
        "feat_strides": [8, 16, 32][-levels:],
        "encoder_layers": shapes.count("encoder.encoder.0.layers.#.") if layers else 0,
        "encode_proj_layers": [levels - 1],
        "encoder_ffn_dim": shapes.size("encoder.encoder.0.layers.0.linear1.weight") if layers else 1024,
        "num_feature_levels": levels,
        "decoder_layers": shapes.count("decoder.decoder.layers.#."),
        **(
            {"decoder_ffn_dim": shapes.size("decoder.decoder.layers.0.linear1.weight")}
            if "decoder.decoder.layers.0.linear1.weight" in shapes
            else {}
        ),
        "num_denoising": 100 if "decoder.denoising_class_embed.weight" in shapes else 0,
    }


def trained_size(shapes: Shapes, strides: list[int]) -> dict[str, tuple[int, int]]:
    """`size` (height, width) of the input that the file's table of anchors was made for; empty where it tells none.

    A row of the table is the logit of the centre of a cell, level by level and line by line, or infinite (the largest number) near an edge.

    Raises:
        SourceError: a table of other sides than multiples of the last stride.
    """
    import torch

    if "decoder.anchors" not in shapes or shapes.state["decoder.anchors"].ndim != 3:
        return {}
    rows = shapes.state["decoder.anchors"][0, :, :2].double()
    last = strides[-1]
    cells, rest = divmod(len(rows), sum((last // stride) ** 2 for stride in strides))
    known = (rows.abs() < 20).all(-1)

    def distance(height: int, width: int) -> float:
        centres = [
            torch.stack([x.flatten() / w, y.flatten() / h], -1)
            for h, w in ((height * last // stride, width * last // stride) for stride in strides)
            for y, x in [torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")]
        ]
        # Up to the precision of half a file; a table of other sides is further off by a hundred times.
        return float((torch.cat(centres).double() - rows.sigmoid())[known].abs().amax()) if known.any() else 0.0

    shaped = [(distance(h, cells // h), h) for h in range(1, cells + 1) if cells % h == 0] if not rest else []
    error, height = min(shaped, key=lambda one: (one[0], abs(one[1] ** 2 - cells)), default=(1.0, 0))
    if error > 2e-3:
        raise SourceError(
            f"'{shapes.ref}': 'decoder.anchors' has {number_of(len(rows), 'row')}, which are the cells of no input whose sides are multiples of "
            f"{last} (strides {strides}): it was trained with another eval_spatial_size, which detrt does not run, or is damaged. Save "
            "the file without that key to run it at the published size"
        )
    return {"size": (height * last, cells // height * last)}


def prepare(module: nn.Module, shapes: Shapes) -> None:
    """DEIM's encoder does not project a map that has the neck's width already; transformers' always does."""
    leave_out(module.model.encoder_input_proj, shapes)  # type: ignore[union-attr,arg-type]


def finish(module: nn.Module) -> None:
    """These weights are trained with the authors' position embedding."""
    from ..layers.hybrid import take_authors_positions

    take_authors_positions(module)


def leave_out(projections: nn.ModuleList, shapes: Shapes) -> None:
    """Make nothing of the projections that a file does not have; `hybrid` has checked the widths."""
    from torch import nn

    for index in range(len(projections)):
        if not any(f"encoder.input_proj.{index}.{leaf}.weight" in shapes for leaf in ("conv", "0")):
            projections[index] = nn.Identity()


def presnet(shapes: Shapes) -> dict[str, Any]:
    """transformers RT-DETR ResNet settings."""
    stages = shapes.count("backbone.res_layers.#.")
    bottleneck = "backbone.res_layers.0.blocks.0.branch2c.conv.weight" in shapes
    last = "branch2c" if bottleneck else "branch2b"
    return {
        "model_type": "rt_detr_resnet",
        "embedding_size": shapes.size("backbone.conv1.conv1_3.conv.weight"),
        "hidden_sizes": [shapes.size(f"backbone.res_layers.{i}.blocks.0.{last}.conv.weight") for i in range(stages)],
        "depths": [shapes.count(f"backbone.res_layers.{i}.blocks.#.") for i in range(stages)],
        "layer_type": "bottleneck" if bottleneck else "basic",
    }


FORMAT = Format("rt_detr", ("lyuwenyu RT-DETR",), recognise, settings, TABLE, skipped, prepare=prepare, finish=finish)
FAMILIES = (
    hybrid_row(
        "rt_detr",
        "rt_detr",
        "RT-DETR",
        "PekingU/rtdetr_r50vd",
        rewrites={"msda": {"MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",)}},
        layouts=("ultralytics",),
        random=(RandomModel("rt_detr", {}, TINY_RT),),
        relatives=(
            ("decoder.tgt_embed.weight", f"an RT-DETR with learned queries (learn_query_content); {BY_ONNX}"),
            ("encoder.encoder.1.**", f"an RT-DETR whose encoder attends on several levels (use_encoder_idx); {BY_ONNX}"),
        ),
        formats=(FORMAT,),
        engines=frozenset((INT8_CROSS_ATTENTION,)),
    ),
)
