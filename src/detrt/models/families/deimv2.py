"""Intellindust-AI-Lab/DEIMv2, with HGNetV2 backbones (Atto, Femto, Pico, N) and with DINOv3 (S, M, L, X).

The module is `detrt.models.layers.deimv2`, which has the authors' decoder; transformers' own class does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import SourceError
from ..checkpoints.assumed import Assumed
from ..checkpoints.key_map import LoadReport
from ..checkpoints.shapes import Shapes, hgnet, levels_of
from .base import DINOV3, SIGMOID_IN_FP16, Format, RandomModel, Upstream, hybrid_row
from .d_fine import COMPUTED, DECODER, ENCODER, block_table, refinement, settle_full_size
from .rt_detr import finish, hgnet_table, hybrid, leave_out, trained_size
from .sizes import TINY_HG

if TYPE_CHECKING:
    from torch import Tensor, nn

# Width of the light encoder -> queries of the published model; no tensor has the number.
LITE_QUERIES = {64: 100, 96: 150, 112: 200}

_BLOCK = (
    ("cv1", "conv1"),
    ("cv2.0", "csp_rep1"),
    ("cv2.1", "csp_rep1.conv2"),
    ("cv3.0", "csp_rep2"),
    ("cv3.1", "csp_rep2.conv2"),
    ("cv4", "conv2"),
)

BLOCKS = tuple(line for name in ("fpn_block", "pan_block", "fpn_blocks.#", "pan_blocks.#") for line in block_table(name, _BLOCK))
DECODER_PROJECTIONS = ("decoder.input_proj.**", "model.decoder_input_proj.**")
TABLE = (
    *hgnet_table("model.conv_encoder.model"),
    # The light encoder projects its inputs itself; the table is completed in `table`.
    *ENCODER,
    ("encoder.down_sample1.1.@", "model.encoder.down_conv1.conv.@"),
    ("encoder.down_sample1.2.@", "model.encoder.down_conv1.norm.@"),
    ("encoder.down_sample2.1.@", "model.encoder.down_conv2.conv.@"),
    ("encoder.down_sample2.2.@", "model.encoder.down_conv2.norm.@"),
    ("encoder.bi_fusion.cv.**", "model.encoder.bi_fusion_conv.**"),
    *BLOCKS,
    DECODER_PROJECTIONS,
    *DECODER,
    ("decoder.decoder.layers.#.gateway.norm.scale", "model.decoder.layers.#.gateway.norm.weight"),
    ("decoder.decoder.layers.#.swish_ffn.w12.@", "model.decoder.layers.#.mlp.{gate,up}_proj.@"),
    ("decoder.decoder.layers.#.swish_ffn.w3.@", "model.decoder.layers.#.mlp.down_proj.@"),
    ("decoder.decoder.layers.#.norm1.scale", "model.decoder.layers.#.self_attn_layer_norm.weight"),
    ("decoder.decoder.layers.#.norm2.scale", "model.decoder.layers.#.encoder_attn_layer_norm.weight"),
    ("decoder.decoder.layers.#.norm3.scale", "model.decoder.layers.#.final_layer_norm.weight"),
)
LITE = (("encoder.input_proj.**", "model.encoder.input_proj.**"),)
HYBRID = (("encoder.input_proj.**", "model.conv_encoder.encoder_input_proj.**"),)
VIT, _ADAPTER = "model.conv_encoder.backbone", "model.conv_encoder.spatial_tuning_adapter"
_LAYER = f"{VIT}.model.layer.#"


def vit_table(prefix: str) -> tuple[tuple[str, str], ...]:
    """Layers and rotary positions of a ViT under `prefix`."""
    block = f"{prefix}blocks.#"
    return (
        (f"{prefix}rope_embed.periods", f"{VIT}.rope_embeddings.inv_freq"),
        (f"{block}.norm#.@", f"{_LAYER}.norm#.@"),
        (f"{block}.attn.qkv.@", f"{_LAYER}.attention.{{q,k,v}}_proj.@"),
        (f"{block}.attn.proj.@", f"{_LAYER}.attention.o_proj.@"),
        (f"{block}.ls#.gamma", f"{_LAYER}.layer_scale#.lambda1"),
        *(
            (f"{block}.mlp.{old}.@", f"{_LAYER}.mlp.{new}_proj.@")
            for old, new in (("fc1", "up"), ("fc2", "down"), ("w1", "gate"), ("w2", "up"), ("w3", "down"))
        ),
    )


def dinov3_table(prefix: str) -> tuple[tuple[str, str], ...]:
    """The ViT under `prefix`, and the adapter and projections beside it."""
    return (
        *vit_table(prefix),
        (f"{prefix}cls_token", f"{VIT}.embeddings.cls_token"),
        (f"{prefix}storage_tokens", f"{VIT}.embeddings.register_tokens"),
        (f"{prefix}patch_embed.proj.@", f"{VIT}.embeddings.patch_embeddings.@"),
        (f"{prefix}norm.@", f"{VIT}.norm.@"),
        ("backbone.sta.stem.0.@", f"{_ADAPTER}.stem_conv.conv.@"),
        ("backbone.sta.stem.1.@", f"{_ADAPTER}.stem_conv.norm.@"),
        ("backbone.sta.conv2.0.@", f"{_ADAPTER}.conv2.conv.@"),
        ("backbone.sta.conv2.1.@", f"{_ADAPTER}.conv2.norm.@"),
        *(
            (f"backbone.sta.conv{n}.{i}.@", f"{_ADAPTER}.conv{n}.{new}.@")
            for n in (3, 4)
            for i, new in ((1, "conv"), (2, "norm"))
        ),
        ("backbone.convs.#.@", "model.conv_encoder.fusion_proj.#.conv.@"),
        ("backbone.norms.#.@", "model.conv_encoder.fusion_proj.#.norm.@"),
    )


SKIPPED = {
    **COMPUTED,
    "backbone.dinov3.mask_token": "for pre-training",
    "backbone.dinov3.blocks.#.attn.qkv.bias_mask": "multiplied into the bias",
}
# The layers of a ViT of 12 that are read: the plain ones of S and M, and DINOv3's own of L and X.
READ_LAYERS = {True: (3, 7, 11), False: (5, 8, 11)}


def recognise(keys: set[str]) -> str | None:
    return "deimv2" if "decoder.decoder.layers.0.swish_ffn.w12.weight" in keys else None


def is_lite(keys: Any) -> bool:
    return "encoder.bi_fusion.cv.conv.weight" in keys


def vit_prefix(shapes: Shapes) -> str | None:
    """Where the ViT is; S and M have theirs inside one module more."""
    prefixes = ("backbone.dinov3._model.", "backbone.dinov3.")
    return next((prefix for prefix in prefixes if f"{prefix}cls_token" in shapes), None)


def table(shapes: Shapes) -> tuple[tuple[str, str], ...]:
    prefix = vit_prefix(shapes)
    if prefix is not None:
        return (*dinov3_table(prefix), *TABLE)
    return (*TABLE, *(LITE if is_lite(shapes) else HYBRID))


def values(shapes: Shapes) -> dict[str, Tensor]:
    """Tensors that are stored in another form than the module has them."""
    prefix = vit_prefix(shapes)
    if prefix is None:
        return {}
    found = frequencies(shapes, prefix)
    for key, mask in shapes.state.items():
        if key.endswith(".qkv.bias_mask"):
            bias = key.removesuffix("_mask")
            shapes.size(bias)
            if shapes.state[bias].shape != mask.shape:
                raise SourceError(f"'{shapes.ref}': '{key}' has another shape than '{bias}'")
            found[bias] = shapes.state[bias] * mask
    return found


def frequencies(shapes: Shapes, prefix: str) -> dict[str, Tensor]:
    """The periods of the rotary positions as the frequencies that transformers has."""
    periods = f"{prefix}rope_embed.periods"
    shapes.size(periods)
    return {periods: 1 / shapes.state[periods].float()}


def prepare(module: nn.Module, shapes: Shapes) -> None:
    """Take out what a file's model does not have, before its weights are filled in."""
    encoder = module.model.conv_encoder  # type: ignore[union-attr]
    prefix = vit_prefix(shapes)
    if prefix is None:
        if not is_lite(shapes):
            leave_out(encoder.encoder_input_proj, shapes)  # type: ignore[union-attr,arg-type]
        return
    from ..layers.deimv2 import keep_plain

    rope = encoder.backbone.rope_embeddings  # type: ignore[union-attr]
    rope.register_buffer("inv_freq", rope.inv_freq)  # a file has its own, so it must be filled like the others
    del encoder.backbone.embeddings.mask_token  # type: ignore[union-attr]
    if prefix.endswith("_model."):
        keep_plain(encoder)  # type: ignore[arg-type]


def dinov3(shapes: Shapes, prefix: str, report: LoadReport) -> dict[str, Any]:
    """transformers DINOv3 settings."""
    plain = prefix.endswith("_model.")
    found = vit(shapes, prefix, READ_LAYERS[plain], "DEIMv2 S, M, L and X", report)
    found["patch_size"] = shapes.size(f"{prefix}patch_embed.proj.weight", 2)
    if not plain:
        found |= {
            "layer_norm_eps": 1e-5,
            "apply_layernorm": True,
            "num_register_tokens": shapes.size(f"{prefix}storage_tokens", 1),
        }
    return found


def vit(shapes: Shapes, prefix: str, taken: tuple[int, ...], models: str, report: LoadReport) -> dict[str, Any]:
    """transformers DINOv3 settings of a ViT of 12 layers, with the norms and tokens of a plain one.

    Args:
        taken: the layers that are read. models: the published ones, for the message.
    """
    layers = shapes.count(f"{prefix}blocks.#.")
    width = shapes.size(f"{prefix}blocks.0.norm1.weight")
    gated = f"{prefix}blocks.0.mlp.w1.weight" in shapes
    if layers != 12:
        raise SourceError(f"'{shapes.ref}' has a ViT of {layers} layers; detrt reads {models}, with 12")
    report.notes.append(f"layers {', '.join(map(str, taken))} of the ViT are read, as published for its kind")
    return {
        "model_type": "dinov3_vit",
        "hidden_size": width,
        "intermediate_size": shapes.size(f"{prefix}blocks.0.mlp.{'w1' if gated else 'fc1'}.weight"),
        "num_hidden_layers": layers,
        # A head has four numbers for each period: sine and cosine of two axes.
        "num_attention_heads": max(1, width // (4 * shapes.size(f"{prefix}rope_embed.periods"))),
        "hidden_act": "silu" if gated else "gelu",
        "use_gated_mlp": gated,
        "key_bias": True,
        "layer_norm_eps": 1e-6,
        "apply_layernorm": False,
        "num_register_tokens": 0,
        "out_features": [f"stage{layer + 1}" for layer in taken],
    }


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    lite = is_lite(shapes)
    width = shapes.size("decoder.enc_score_head.weight", 1)
    if lite and width not in LITE_QUERIES:
        report.notes.append(f"no published light model is {width} wide")
    queries = LITE_QUERIES.get(width, 300) if lite else 300
    found = {**hybrid(shapes, assumed, queries=queries, decoder_activation="silu"), **refinement(shapes, assumed), "family": {}}
    neck = found["encoder_hidden_dim"]
    levels = len(found["decoder_n_points"])
    block = "encoder.fpn_block" if lite else "encoder.fpn_blocks.0"
    prefix = vit_prefix(shapes)
    if prefix is not None:
        backbone, strides = dinov3(shapes, prefix, report), [8, 16, 32]
        found["spatial_tuning_adapter_inplanes"] = shapes.size("backbone.sta.stem.0.weight")
        found["family"]["normalize"] = True  # of all DEIMv2, these alone take normalised pixels
    else:
        backbone = hgnet(shapes)
        backbone["out_features"] = levels_of(backbone["hidden_sizes"], found["encoder_in_channels"], shapes.ref)
        last = 4 * 2 ** (len(backbone["hidden_sizes"]) - 1)
        strides = [16, 32] if lite else [last // 2**i for i in range(levels)][::-1]
    found |= {
        "backbone_config": backbone,
        "encoder_type": "lite" if lite else "hybrid",
        "num_feature_levels": levels,
        "decoder_in_channels": [neck] * levels,
        "feat_strides": strides,
        "decoder_ffn_dim": shapes.size("decoder.decoder.layers.0.swish_ffn.w12.weight"),
        "use_gateway": "decoder.decoder.layers.0.gateway.gate.weight" in shapes,
        "encoder_has_trailing_conv": f"{block}.cv2.1.conv.weight" in shapes,
        # Its heads may be copies of one; their values are read one by one, which is the same function.
        "share_bbox_head": False,
        # The module rounds this down to the width that the tensor has.
        "hidden_expansion": shapes.size(f"{block}.cv2.0.conv1.conv.weight") / neck,
        "depth_mult": shapes.count(f"{block}.cv2.0.bottlenecks.#.") / 3,
    }
    found["family"] |= trained_size(shapes, strides)
    return found


REWRITES = {"msda": {"multi_scale_deformable_attention_v2": ("a2f4f35b651aeb36",)}}


def _published() -> Any:
    from ..layers.deimv2 import PublishedDeimv2

    return PublishedDeimv2


FAMILIES = (
    # Its small models have 100 and 150 queries, and its authors still keep the 300 best (query, class) pairs;
    # as many as queries costs Atto 0.002 AP and Femto 0.004 on COCO images.
    hybrid_row(
        "deimv2",
        "deimv2",
        "DEIMv2",
        "Intellindust/DEIMv2_HGNetv2_N_COCO",
        max_detections=300,
        licence="Apache-2.0; backbones of S to X: DINOv3 License",
        normalize_differs=True,
        since="5.12.1",
        rewrites=REWRITES,
        upstream=Upstream("deimv2-upstream", "DEIMv2", _published),
        random=(RandomModel("deimv2", {}, TINY_HG),),
        after_random=settle_full_size,
        formats=(
            Format(
                "deimv2",
                ("Intellindust DEIMv2",),
                recognise,
                settings,
                table,
                SKIPPED,
                model=_published,
                values=values,
                prepare=prepare,
                finish=finish,
            ),
        ),
        engines=frozenset((DINOV3, SIGMOID_IN_FP16)),
    ),
)
