"""mmdetection's MM-Grounding-DINO (Swin-T, B, L) and LLMDet, which is trained on it and runs the same network.

The files hold BERT's weights and not its tokenizer, which is that of bert-base-uncased.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import SourceError
from ..checkpoints.assumed import ACTIVATIONS, Assumed
from ..checkpoints.key_map import LoadReport, Table
from ..checkpoints.shapes import Shapes
from . import dino
from .base import Format, RandomModel
from .grounding_dino import BLOCK, FUSION, HEADS, SWIN, bert, grounding_row, swin
from .sizes import BERT, LEVELS, STAGES, SWIN_T, TINY_GROUNDING, TINY_SWIN, WIDE_SWIN

if TYPE_CHECKING:
    from torch import Tensor, nn

_BERT = "language_model.language_backbone.body.model"
# Of the classifier that the library's Swin is cut from; a backbone does not run it, and the file has none.
_UNUSED_NORM = "backbone.norm"
_FFN = (("ffn.layers.0.0", "fc1"), ("ffn.layers.1", "fc2"))

TABLE: Table = (
    ("backbone.patch_embed.projection.@", f"{SWIN}embeddings.patch_embeddings.projection.@"),
    ("backbone.patch_embed.norm.@", f"{SWIN}embeddings.norm.@"),
    ("backbone.stages.#.blocks.#.norm1.@", f"{BLOCK}layernorm_before.@"),
    ("backbone.stages.#.blocks.#.norm2.@", f"{BLOCK}layernorm_after.@"),
    ("backbone.stages.#.blocks.#.attn.w_msa.qkv.@", f"{BLOCK}attention.{{q,k,v}}_proj.@"),
    ("backbone.stages.#.blocks.#.attn.w_msa.proj.@", f"{BLOCK}attention.o_proj.@"),
    (
        "backbone.stages.#.blocks.#.attn.w_msa.relative_position_bias_table",
        f"{BLOCK}attention.relative_position_bias.relative_position_bias_table",
    ),
    *((f"backbone.stages.#.blocks.#.{old}.@", f"{BLOCK}mlp.{new}.@") for old, new in _FFN),
    ("backbone.stages.#.downsample.@.@", f"{SWIN}encoder.layers.#.downsample.@.@"),
    *((f"backbone.norm{i}.@", f"model.backbone.conv_encoder.model.hidden_states_norms.stage{i + 1}.@") for i in range(4)),
    (f"{_UNUSED_NORM}.@", f"{SWIN}layernorm.@"),
    ("neck.convs.#.conv.@", "model.input_proj_vision.#.0.@"),
    ("neck.convs.#.gn.@", "model.input_proj_vision.#.1.@"),
    (f"{_BERT}.**", "model.text_backbone.**"),
    ("text_feat_map.@", "model.text_projection.@"),
    ("level_embed", "model.level_embed"),
    ("query_embedding.weight", "model.query_position_embeddings.weight"),
    ("memory_trans_fc.@", "model.enc_output.@"),
    ("memory_trans_norm.@", "model.enc_output_norm.@"),
    ("encoder.layers.#.self_attn.@.@", "model.encoder.layers.#.deformable_layer.self_attn.@.@"),
    ("encoder.layers.#.norms.0.@", "model.encoder.layers.#.deformable_layer.self_attn_layer_norm.@"),
    ("encoder.layers.#.norms.1.@", "model.encoder.layers.#.deformable_layer.final_layer_norm.@"),
    *((f"encoder.layers.#.{old}.@", f"model.encoder.layers.#.deformable_layer.{new}.@") for old, new in _FFN),
    *(
        (f"encoder.text_layers.#.{old}", f"model.encoder.layers.#.text_enhancer_layer.{new}")
        for old, new in (
            ("self_attn.attn.in_proj_@", "self_attn.{query,key,value}.@"),
            ("self_attn.attn.out_proj.@", "self_attn.out_proj.@"),
            ("norms.0.@", "layer_norm_before.@"),
            ("norms.1.@", "layer_norm_after.@"),
            *((f"{old}.@", f"{new}.@") for old, new in _FFN),
        )
    ),
    *((f"encoder.fusion_layers.#.{old}", f"model.encoder.layers.#.fusion_layer.{new}") for old, new in FUSION),
    *(
        (f"decoder.layers.#.{old}", f"model.decoder.layers.#.{new}")
        for old, new in (
            ("self_attn.attn.in_proj_@", "self_attn.{query,key,value}.@"),
            ("self_attn.attn.out_proj.@", "self_attn.out_proj.@"),
            ("cross_attn_text.attn.in_proj_@", "encoder_attn_text.{query,key,value}.@"),
            ("cross_attn_text.attn.out_proj.@", "encoder_attn_text.out_proj.@"),
            ("cross_attn.@.@", "encoder_attn.@.@"),
            ("norms.0.@", "self_attn_layer_norm.@"),
            ("norms.1.@", "encoder_attn_text_layer_norm.@"),
            ("norms.2.@", "encoder_attn_layer_norm.@"),
            ("norms.3.@", "final_layer_norm.@"),
            *((f"{old}.@", f"{new}.@") for old, new in _FFN),
        )
    ),
    ("decoder.norm.@", "model.decoder.layer_norm.@"),
    ("decoder.ref_point_head.**", "model.decoder.reference_points_head.**"),
)
_TRAINED_WITH = "of the language model that LLMDet is trained with"
SKIPPED = {
    "backbone.stages.#.blocks.#.attn.w_msa.relative_position_index": "a table, computed by the module",
    f"{_BERT}.embeddings.position_ids": "the numbers 0, 1, 2, ...",
    "dn_query_generator.label_embedding.weight": "labels of the denoising queries",
    **dict.fromkeys(
        ("lmm.**", "connector.**", "region_connector.**", "ref_point_head.**", "image_seperate.weight", "img_sep.weight"),
        _TRAINED_WITH,
    ),
}
# The boxes of mmdetection's heads: every second module is a ReLU.
_HEAD = tuple((2 * i, i) for i in range(3))


def recognise(keys: set[str]) -> str | None:
    marks = {"encoder.fusion_layers.0.gamma_v", "text_feat_map.weight"}
    return "mm_grounding_dino" if marks <= keys else None


def table(shapes: Shapes) -> Table:
    """The rows above, and those that depend on the number of maps and decoder layers."""
    last, maps = shapes.count("decoder.layers.#."), shapes.count("neck.convs.#.")
    extra = range(shapes.count("neck.extra_convs.#."))
    return (
        *TABLE,
        *((f"neck.extra_convs.{i}.{old}.@", f"model.input_proj_vision.{maps + i}.{new}.@") for i in extra
          for old, new in (("conv", "0"), ("gn", "1"))),
        # The heads after those of the decoder layers select the queries.
        (f"bbox_head.cls_branches.{last}.bias", "model.encoder_output_class_embed.bias"),
        *((f"bbox_head.reg_branches.{last}.{old}.@", f"model.encoder_output_bbox_embed.layers.{new}.@") for old, new in _HEAD),
        ("bbox_head.cls_branches.#.bias", "class_embed.#.bias"),
        *((f"bbox_head.reg_branches.#.{old}.@", f"bbox_embed.#.layers.{new}.@") for old, new in _HEAD),
    )  # fmt: skip


def values(shapes: Shapes) -> dict[str, Tensor]:
    """Tensors in the module's form; a bias is a vector of one number in the file and a number in the module."""
    import torch

    width = shapes.size("backbone.norm3.weight")
    return {
        **dino.values(shapes),
        **{key: tensor.reshape(()) for key, tensor in shapes.state.items() if key.startswith("bbox_head.cls_branches.")},
        f"{_UNUSED_NORM}.weight": torch.ones(width),
        f"{_UNUSED_NORM}.bias": torch.zeros(width),
    }


def finish(module: nn.Module) -> None:
    """These weights are trained with mmdetection's clamps, of which that of the last box is another."""
    from ..layers.grounding_dino import take_authors_clamps

    take_authors_clamps(module, 1e-3, 1e-5)


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    if "bbox_head.cls_branches.0.bias" not in shapes:
        raise SourceError(
            f"'{shapes.ref}' has no 'bbox_head.cls_branches.0.bias': it is mmdetection's copy of a Grounding DINO, not "
            "MM-Grounding-DINO; detrt reads that model as IDEA-Research publishes it"
        )
    report.format = "iSEE-Laboratory LLMDet" if shapes.any(r"^(lmm|connector)\.") else "mmdetection MM-Grounding-DINO"
    levels = shapes.size("level_embed")
    attention = "attention_weights.weight"
    heads = assumed.number("heads", HEADS)
    return {
        "backbone_config": swin(shapes, "backbone.stages", "attn.w_msa", "backbone.patch_embed.projection.weight"),
        "text_config": bert(shapes, assumed, _BERT, "text_feat_map.weight"),
        "d_model": shapes.size("memory_trans_fc.weight"),
        "num_queries": shapes.size("query_embedding.weight"),
        "num_feature_levels": levels,
        "encoder_layers": shapes.count("encoder.layers.#."),
        "decoder_layers": shapes.count("decoder.layers.#."),
        "encoder_ffn_dim": shapes.size("encoder.layers.0.ffn.layers.0.0.weight"),
        "decoder_ffn_dim": shapes.size("decoder.layers.0.ffn.layers.0.0.weight"),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "positional_embedding_temperature": assumed.temperature("MM-Grounding-DINO", 20),
        "activation_function": assumed.choice("activation", "relu", ACTIVATIONS, "transformer_activation"),
        "encoder_n_points": shapes.points(f"encoder.layers.0.self_attn.{attention}", heads, levels),
        "decoder_n_points": shapes.points(f"decoder.layers.0.cross_attn.{attention}", heads, levels),
        # Each layer has heads of its own.
        "decoder_bbox_embed_share": False,
        "decoder_cls_embed_share": False,
    }


FAMILIES = (
    grounding_row(
        "mm_grounding_dino",
        "mm-grounding-dino",
        "MM-Grounding-DINO, LLMDet",
        "openmmlab-community/mm_grounding_dino_tiny_o365v1_goldg_v3det",
        rewrites={
            "msda": {"MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",)},
            "tensors_only": {
                "MMGroundingDinoBiMultiHeadAttention.forward": ("c507df1174244169",),
                "MMGroundingDinoContrastiveEmbedding.forward": ("82f51d0e10c303c2",),
                "MMGroundingDinoDecoder.forward": ("d77576e97d04c6f9",),
                "MMGroundingDinoDecoderLayer.forward": ("a5185625fd96876f",),
                "MMGroundingDinoEncoder.forward": ("9db52133bb3e43b6",),
                "MMGroundingDinoEncoderLayer.forward": ("a963f431f0cc710c",),
                "MMGroundingDinoForObjectDetection.forward": ("945a35630c387dcc",),
                "MMGroundingDinoFusionLayer.forward": ("b84492259bf9fa21",),
                "MMGroundingDinoModel.forward": ("3587b20d679e5332",),
                "MMGroundingDinoModel.generate_encoder_output_proposals": ("2b255212d86a9d3d",),
                "MMGroundingDinoSinePositionEmbedding.forward": ("abe6096f121e046c",),
                "MMGroundingDinoTextEnhancerLayer.forward": ("12413c7db7995736",),
                "encode_sinusoidal_position_embedding": ("e3a8c1761b2bdfac",),
                "generate_masks_with_special_tokens_and_transfer_map": ("4d5a66f1e93c4477",),
            },
        },
        random=(
            RandomModel("mm_grounding_dino", {"backbone_config": {**LEVELS, **SWIN_T}, "text_config": BERT}, TINY_GROUNDING),
            RandomModel(
                "mm_grounding_dino-swin-l",
                {
                    "backbone_config": {**LEVELS, **WIDE_SWIN, "out_features": STAGES},
                    "text_config": BERT,
                    "num_feature_levels": 5,
                },
                {**TINY_GROUNDING, "backbone_config": {**TINY_SWIN, "out_features": STAGES}},
            ),
        ),
        formats=(
            Format(
                "mm_grounding_dino",
                ("mmdetection MM-Grounding-DINO", "iSEE-Laboratory LLMDet"),
                recognise,
                settings,
                table,
                SKIPPED,
                values=values,
                finish=finish,
            ),
        ),
    ),
)
