"""Backbones, text models and decoders of random models that several families share: published sizes, and tiny ones for tests."""

from __future__ import annotations

from typing import Any

STAGES = ["stage1", "stage2", "stage3", "stage4"]


def resnet(name: str) -> dict[str, Any]:
    from ..checkpoints.timm import resnet_config

    return resnet_config({"backbone": name, "out_indices": [1, 2, 3, 4]})


def tiny_resnet() -> dict[str, Any]:
    config = resnet("resnet18")
    return {**config, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 48], "embedding_size": 16}


def tiny_hgnet() -> dict[str, Any]:
    return {
        "model_type": "hgnet_v2",
        "embedding_size": 8,
        "hidden_sizes": [16, 32, 48, 64],
        "depths": [1, 1, 1, 1],
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 16, 32, 48],
        "stage_mid_channels": [8, 16, 16, 24],
        "stage_out_channels": [16, 32, 48, 64],
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [1, 1, 1, 1],
        "out_features": STAGES[1:],
    }


TINY_DETR = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_queries": 12,
}
TINY_HYBRID = {
    "d_model": 32,
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [24, 32, 48],
    "decoder_in_channels": [32, 32, 32],
    "feat_strides": [8, 16, 32],
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "num_queries": 20,
}
TINY_RT = {
    **TINY_HYBRID,
    "backbone_config": {
        "model_type": "rt_detr_resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 24, 32, 48],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
        "out_features": STAGES[1:],
    },
}
TINY_HG = {**TINY_HYBRID, "backbone_config": tiny_hgnet(), "encoder_in_channels": [32, 48, 64]}
TINY_LW = {
    "num_queries": 12,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_ffn_dim": 48,
    "decoder_self_attention_heads": 4,
    "decoder_cross_attention_heads": 4,
    "backbone_config": {
        "model_type": "lw_detr_vit",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 256,
        "pretrain_image_size": 64,
        "num_windows": 16,
        "window_block_indices": [0, 2],
        "out_indices": [2, 4],
    },
}

TINY_VOCABULARY = 1200
SWIN_T = {"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "window_size": 7}
SWIN_B = {
    "embed_dim": 128,
    "depths": [2, 2, 18, 2],
    "num_heads": [4, 8, 16, 32],
    "window_size": 12,
    "image_size": 384,
}
WIDE_SWIN = {**SWIN_B, "embed_dim": 192, "num_heads": [6, 12, 24, 48]}
LEVELS = {"model_type": "swin", "out_features": ["stage2", "stage3", "stage4"]}
TINY_SWIN = {**LEVELS, "embed_dim": 16, "depths": [2, 2, 2, 2], "num_heads": [1, 2, 4, 8], "window_size": 4}
BERT = {"model_type": "bert"}
TINY_BERT = {
    **{"model_type": "bert", "vocab_size": TINY_VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "intermediate_size": 48},
}
TINY_GROUNDING = {
    **{"backbone_config": TINY_SWIN, "text_config": TINY_BERT, "d_model": 32, "num_queries": 20},
    **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64},
    **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
}


def clip(size: int, **settings: int | str) -> dict[str, Any]:
    """A text model of CLIP. size: of its vocabulary, whose last two ids begin and end a text."""
    ends = {"bos_token_id": size - 2, "eos_token_id": size - 1, "pad_token_id": size - 1}
    return {"model_type": "clip_text_model", "vocab_size": size, **ends, **settings}
