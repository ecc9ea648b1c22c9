"""IDEA-Research/GroundingDINO: `groundingdino_swint_ogc.pth` and `groundingdino_swinb_cogcoor.pth`.

The file holds BERT's weights and not its tokenizer, which is that of bert-base-uncased.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import SourceError
from ..checkpoints.assumed import ACTIVATIONS, Assumed
from ..checkpoints.key_map import LoadReport
from ..checkpoints.shapes import Shapes
from .base import EDGES, SAMPLING_ENCODER, Family, Format, Processor, RandomModel, TextFacts
from .sizes import BERT, LEVELS, SWIN_B, SWIN_T, TINY_GROUNDING, TINY_SWIN

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...spec import TextSpec
    from ..stock import Stock

# No tensor has this number; every published model has it.
HEADS = 8
TEMPERATURE = 20  # of the position embedding
# What ends a phrase or frames a prompt (the paper's section 3.4, and both published implementations).
MARKS = ("[CLS]", "[SEP]", ".", "?")
SWIN = "model.backbone.conv_encoder.model.swin."
BLOCK = f"{SWIN}encoder.layers.#.blocks.#."
# Of the classifier that the library's Swin is cut from; a backbone does not run it, and the file has none.
_UNUSED_NORM = "backbone.0.norm"

# Image-text fusion; mmdetection has the same names in it.
FUSION = (
    ("gamma_v", "vision_param"),
    ("gamma_l", "text_param"),
    ("layer_norm_v.@", "layer_norm_vision.@"),
    ("layer_norm_l.@", "layer_norm_text.@"),
    ("attn.v_proj.@", "attn.vision_proj.@"),
    ("attn.l_proj.@", "attn.text_proj.@"),
    ("attn.values_v_proj.@", "attn.values_vision_proj.@"),
    ("attn.values_l_proj.@", "attn.values_text_proj.@"),
    ("attn.out_v_proj.@", "attn.out_vision_proj.@"),
    ("attn.out_l_proj.@", "attn.out_text_proj.@"),
)
TABLE = (
    ("backbone.0.patch_embed.proj.@", f"{SWIN}embeddings.patch_embeddings.projection.@"),
    ("backbone.0.patch_embed.norm.@", f"{SWIN}embeddings.norm.@"),
    ("backbone.0.layers.#.blocks.#.norm1.@", f"{BLOCK}layernorm_before.@"),
    ("backbone.0.layers.#.blocks.#.norm2.@", f"{BLOCK}layernorm_after.@"),
    ("backbone.0.layers.#.blocks.#.attn.qkv.@", f"{BLOCK}attention.{{q,k,v}}_proj.@"),
    ("backbone.0.layers.#.blocks.#.attn.proj.@", f"{BLOCK}attention.o_proj.@"),
    (
        "backbone.0.layers.#.blocks.#.attn.relative_position_bias_table",
        f"{BLOCK}attention.relative_position_bias.relative_position_bias_table",
    ),
    ("backbone.0.layers.#.blocks.#.mlp.@.@", f"{BLOCK}mlp.@.@"),
    ("backbone.0.layers.#.downsample.@.@", f"{SWIN}encoder.layers.#.downsample.@.@"),
    *((f"backbone.0.norm{i}.@", f"model.backbone.conv_encoder.model.hidden_states_norms.stage{i + 1}.@") for i in range(4)),
    (f"{_UNUSED_NORM}.@", f"{SWIN}layernorm.@"),
    ("input_proj.#.#.@", "model.input_proj_vision.#.#.@"),
    ("bert.**", "model.text_backbone.**"),
    ("feat_map.@", "model.text_projection.@"),
    ("transformer.level_embed", "model.level_embed"),
    ("transformer.tgt_embed.weight", "model.query_position_embeddings.weight"),
    ("transformer.enc_output.@", "model.enc_output.@"),
    ("transformer.enc_output_norm.@", "model.enc_output_norm.@"),
    ("transformer.enc_out_bbox_embed.**", "model.encoder_output_bbox_embed.**"),
    *(
        (f"transformer.encoder.layers.#.{old}.**", f"model.encoder.layers.#.deformable_layer.{new}.**")
        for old, new in (
            ("self_attn", "self_attn"),
            ("norm1", "self_attn_layer_norm"),
            ("linear1", "fc1"),
            ("linear2", "fc2"),
            ("norm2", "final_layer_norm"),
        )
    ),
    *(
        (f"transformer.encoder.text_layers.#.{old}", f"model.encoder.layers.#.text_enhancer_layer.{new}")
        for old, new in (
            ("self_attn.in_proj_@", "self_attn.{query,key,value}.@"),
            ("self_attn.out_proj.@", "self_attn.out_proj.@"),
            ("linear1.@", "fc1.@"),
            ("linear2.@", "fc2.@"),
            ("norm1.@", "layer_norm_before.@"),
            ("norm2.@", "layer_norm_after.@"),
        )
    ),
    *((f"transformer.encoder.fusion_layers.#.{old}", f"model.encoder.layers.#.fusion_layer.{new}") for old, new in FUSION),
    *(
        (f"transformer.decoder.layers.#.{old}", f"model.decoder.layers.#.{new}")
        for old, new in (
            # Numbered in the order of Deformable DETR: the image first, then the queries among themselves.
            ("norm1.@", "encoder_attn_layer_norm.@"),
            ("norm2.@", "self_attn_layer_norm.@"),
            ("norm3.@", "final_layer_norm.@"),
            ("catext_norm.@", "encoder_attn_text_layer_norm.@"),
            ("cross_attn.@.@", "encoder_attn.@.@"),
            ("self_attn.in_proj_@", "self_attn.{query,key,value}.@"),
            ("self_attn.out_proj.@", "self_attn.out_proj.@"),
            ("ca_text.in_proj_@", "encoder_attn_text.{query,key,value}.@"),
            ("ca_text.out_proj.@", "encoder_attn_text.out_proj.@"),
            ("linear1.@", "fc1.@"),
            ("linear2.@", "fc2.@"),
        )
    ),
    ("transformer.decoder.norm.@", "model.decoder.layer_norm.@"),
    ("transformer.decoder.ref_point_head.**", "model.decoder.reference_points_head.**"),
    ("transformer.decoder.bbox_embed.**", "model.decoder.bbox_embed.**"),
    ("bbox_embed.**", "bbox_embed.**"),
)
SKIPPED = {
    "backbone.0.layers.#.blocks.#.attn.relative_position_index": "a table, computed by the module",
    "bert.embeddings.position_ids": "the numbers 0, 1, 2, ...",
    "bert.pooler.dense.@": "the detector reads all tokens, not the pooled one",
    "label_enc.weight": "labels of the denoising queries",
}


def recognise(keys: set[str]) -> str | None:
    marks = {"transformer.encoder.fusion_layers.0.gamma_v", "feat_map.weight"}
    return "grounding_dino" if marks <= keys else None


def values(shapes: Shapes) -> dict[str, Tensor]:
    """What the module has and the file does not; see `_UNUSED_NORM`."""
    import torch

    width = shapes.size("backbone.0.norm3.weight")
    return {f"{_UNUSED_NORM}.weight": torch.ones(width), f"{_UNUSED_NORM}.bias": torch.zeros(width)}


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    if "transformer.tgt_embed.weight" not in shapes:
        raise SourceError(f"'{shapes.ref}' has no learned queries, as every published Grounding DINO has")
    levels = shapes.size("transformer.level_embed")
    heads = assumed.number("heads", HEADS, "nheads")
    title = "Grounding DINO"
    assumed.need(
        title,
        max_text_len=256,
        sub_sentence_present=True,
        pre_norm=False,
    )
    attention = "attention_weights.weight"
    return {
        "backbone_config": swin(shapes, "backbone.0.layers", "attn", "backbone.0.patch_embed.proj.weight"),
        "text_config": bert(shapes, assumed, "bert", "feat_map.weight"),
        "d_model": shapes.size("transformer.enc_output.weight"),
        "num_queries": shapes.size("transformer.tgt_embed.weight"),
        "num_feature_levels": levels,
        "encoder_layers": shapes.count("transformer.encoder.layers.#."),
        "decoder_layers": shapes.count("transformer.decoder.layers.#."),
        "encoder_ffn_dim": shapes.size("transformer.encoder.layers.0.linear1.weight"),
        "decoder_ffn_dim": shapes.size("transformer.decoder.layers.0.linear1.weight"),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "positional_embedding_temperature": assumed.temperature(title, TEMPERATURE),
        "activation_function": assumed.choice("activation", "relu", ACTIVATIONS, "transformer_activation"),
        "encoder_n_points": shapes.points(f"transformer.encoder.layers.0.self_attn.{attention}", heads, levels),
        "decoder_n_points": shapes.points(f"transformer.decoder.layers.0.cross_attn.{attention}", heads, levels),
    }


def finish(module: nn.Module) -> None:
    """These weights are trained with the authors' clamps."""
    from ..layers.grounding_dino import take_authors_clamps

    take_authors_clamps(module, 1e-3, 1e-3)


def swin(shapes: Shapes, layers: str, attention: str, patches: str) -> dict[str, Any]:
    """transformers Swin settings. layers, attention, patches: the authors' names of the stages, of an attention in a block, and of
    the patch embedding's weight. The norms of the maps that are read lie beside the stages."""
    stages = shapes.count(f"{layers}.#.")
    table = f"{layers}.{{}}.blocks.0.{attention}.relative_position_bias_table"
    root = layers.rpartition(".")[0]
    return {
        "model_type": "swin",
        "embed_dim": shapes.size(patches),
        "depths": [shapes.count(f"{layers}.{stage}.blocks.#.") for stage in range(stages)],
        "num_heads": [shapes.size(table.format(stage), 1) for stage in range(stages)],
        "window_size": shapes.window(table.format(0)),
        "out_features": [f"stage{i + 1}" for i in range(stages) if f"{root}.norm{i}.weight" in shapes],
    }


def bert(shapes: Shapes, assumed: Assumed, root: str, projection: str) -> dict[str, Any]:
    """transformers BERT settings. root: prefix of its keys. projection: the weight behind it."""
    width = shapes.size(projection, 1)
    return {
        "model_type": "bert",
        "vocab_size": shapes.size(f"{root}.embeddings.word_embeddings.weight"),
        "hidden_size": width,
        "num_hidden_layers": shapes.count(f"{root}.encoder.layer.#."),
        "num_attention_heads": assumed.number("text_heads", max(1, width // 64), divides=width),
        "intermediate_size": shapes.size(f"{root}.encoder.layer.0.intermediate.dense.weight"),
        "max_position_embeddings": shapes.size(f"{root}.embeddings.position_embeddings.weight"),
    }


def _with_boolean_masks(module: Any) -> None:
    """Give BERT an attention that understands masks of True and False, which it is handed.

    transformers' "eager" attention adds them as 1 and 0 and so hides nothing; "sdpa" hides what is False, as the authors' code does.
    """
    module.model.text_backbone.set_attn_implementation("sdpa")


def grounding_row(name: str, model_type: str, title: str, example: str, **facts: Any) -> Family:
    """A row of Grounding DINO or a model of its kind."""
    return Family(
        name=name,
        model_type=model_type,
        title=title,
        example=example,
        activation="sigmoid",
        select="query",
        max_detections=None,
        mask=True,
        shortest_edge=True,
        deformable=True,
        text="tokens",
        processor=PROCESSOR,
        text_facts=_text_facts,
        text_processor="GroundingDinoProcessor",
        stock=_stock,
        licence="Apache-2.0",
        since="5.23.0",
        detector=_detector,
        text_encoder=_text_encoder,
        made=_with_boolean_masks,
        engines=frozenset((SAMPLING_ENCODER,)),
        **facts,
    )


def _text_facts(config: Any) -> TextFacts:
    longest = min(int(config.max_text_len), int(config.text_config.max_position_embeddings))
    return TextFacts(longest, int(config.d_model), int(config.num_queries), longest, MARKS)


def _stock() -> type[Stock]:
    from ..layers.grounding_dino import GroundingStock

    return GroundingStock


def _detector(module: nn.Module) -> nn.Module:
    from ..layers.grounding_dino import GroundingDetector

    return GroundingDetector(module)


def _text_encoder(module: nn.Module, text: TextSpec) -> nn.Module:
    from ..layers.grounding_dino import GroundingText

    return GroundingText(module, text.separators)


PROCESSOR = Processor("GroundingDino", EDGES)
FAMILIES = (
    grounding_row(
        "grounding_dino",
        "grounding-dino",
        "Grounding DINO",
        "IDEA-Research/grounding-dino-tiny",
        rewrites={
            "msda": {"MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",)},
            "tensors_only": {
                "GroundingDinoBiMultiHeadAttention.forward": ("c507df1174244169",),
                "GroundingDinoContrastiveEmbedding.forward": ("e8c53ae7708cf614",),
                "GroundingDinoDecoder.forward": ("e25ad1e5a4421fb5",),
                "GroundingDinoDecoderLayer.forward": ("a5185625fd96876f",),
                "GroundingDinoEncoder.forward": ("d700f1b32990ac44",),
                "GroundingDinoEncoderLayer.forward": ("a963f431f0cc710c",),
                "GroundingDinoForObjectDetection.forward": ("f1da304deebfd9a5",),
                "GroundingDinoFusionLayer.forward": ("b84492259bf9fa21",),
                "GroundingDinoModel.forward": ("39f19cc64b4458d0",),
                "GroundingDinoModel.generate_encoder_output_proposals": ("2b255212d86a9d3d",),
                "GroundingDinoSinePositionEmbedding.forward": ("abe6096f121e046c",),
                "GroundingDinoTextEnhancerLayer.forward": ("f87ba221bda41700",),
                "encode_sinusoidal_position_embedding": ("e3a8c1761b2bdfac",),
                "generate_masks_with_special_tokens_and_transfer_map": ("4d5a66f1e93c4477",),
            },
        },
        random=(
            RandomModel("grounding_dino", {"backbone_config": {**LEVELS, **SWIN_T}, "text_config": BERT}, TINY_GROUNDING),
            RandomModel(
                "grounding_dino-swin-b",
                {"backbone_config": {**LEVELS, **SWIN_B}, "text_config": BERT},
                {**TINY_GROUNDING, "backbone_config": {**TINY_SWIN, "window_size": 6}},
            ),
        ),
        formats=(
            Format(
                "grounding_dino",
                ("IDEA-Research Grounding DINO",),
                recognise,
                settings,
                TABLE,
                SKIPPED,
                values=values,
                finish=finish,
            ),
        ),
    ),
)
