"""SAM 3, its detector of phrases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import ONE_PHRASE, Family, Processor, RandomModel, TextFacts
from .sizes import TINY_VOCABULARY, clip

if TYPE_CHECKING:
    from torch import nn

    from ...spec import TextSpec
    from ..stock import Stock

# Phrases that one run takes: each has attentions of its own over the map of the image, 0.9 GB for a layer at 1008x1008 in FP32.
MOST_PHRASES = 4
_HALF = (0.5, 0.5, 0.5)
PROCESSOR = Processor(
    "Sam3",
    {
        "size": {"height": 1008, "width": 1008},
        "do_normalize": True,
        "do_pad": False,
        "image_mean": _HALF,
        "image_std": _HALF,
    },
)
_TINY = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_TRACKER = (
    "it follows objects that points, boxes or masks show, and detrt exports the detector of SAM 3, which a text prompts "
    "(model_type sam3, or sam3_video, of which the detector is read)"
)


def _text_facts(config: Any) -> TextFacts:
    vision, queries = config.vision_config, int(config.detr_decoder_config.num_queries)
    stride = int(vision.backbone_config.patch_size) / float(vision.scale_factors[0])
    width, longest = int(config.detr_encoder_config.hidden_size), int(config.text_config.max_position_embeddings)
    return TextFacts(longest, width, queries, MOST_PHRASES, mask_stride=stride)


def _stock() -> type[Stock]:
    from ..layers.sam3 import Sam3Stock

    return Sam3Stock


def _detector(module: nn.Module) -> nn.Module:
    from ..layers.sam3 import Sam3Detector

    return Sam3Detector(module)


def _text_encoder(module: nn.Module, text: TextSpec) -> nn.Module:
    from ..layers.sam3 import Sam3Text

    return Sam3Text(module)


FAMILIES = (
    Family(
        name="sam3",
        model_type="sam3",
        title="SAM 3",
        activation="sigmoid",
        select="topk",
        max_detections=None,
        licence="SAM License",
        example="facebook/sam3",
        multiple_of="patch",
        size=None,
        text="phrases",
        processor=PROCESSOR,
        text_facts=_text_facts,
        text_processor="Sam3Processor",
        stock=_stock,
        since="5.23.0",
        auto="AutoModel",
        inside=("sam3_video",),  # with its tracker of videos, as facebook/sam3 is published
        not_read={
            "sam3_tracker": _TRACKER,
            "sam3_tracker_video": _TRACKER,
            "sam3_lite_text": "its text encoder is MobileCLIP, and detrt exports SAM 3 with CLIP's",
        },
        detector=_detector,
        text_encoder=_text_encoder,
        rewrites={
            "tensors_only": {
                "Sam3Attention.forward": ("e0c34163480260a9",),
                "Sam3DetrDecoder._get_rpb_matrix": ("61f9c43f7860494e",),
                "Sam3DetrDecoder.forward": ("631e43cfe1d8efed",),
                "Sam3DetrDecoderLayer.forward": ("fa62a2203512e5bd",),
                "Sam3DetrEncoder.forward": ("bb3ed842a79e63de",),
                "Sam3DetrEncoderLayer.forward": ("7b96fbf2bd29ef6d",),
                "Sam3DotProductScoring.forward": ("13d704283e6ea816",),
                "Sam3FPNLayer.forward": ("f86244796fdf267d",),
                "Sam3MaskDecoder._embed_pixels": ("53fdbf8ee135d60d",),
                "Sam3MaskDecoder.forward": ("285fa331eef85b59",),
                "Sam3MaskEmbedder.forward": ("fd3da360c0d5750a",),
                "Sam3Model.forward": ("8bed57deb27e277d",),
                "Sam3Model.get_text_features": ("384d27ed38efd6e1",),
                "Sam3PixelDecoder.forward": ("95e72075d5f7c25b",),
                "Sam3SinePositionEmbedding.build_sine_position_embedding": ("a2511c630b773cba",),
                "Sam3SinePositionEmbedding.encode_boxes": ("b2d9a5b05972ebc4",),
                "Sam3ViTEmbeddings.forward": ("97aad4d7a07cc838",),
                "Sam3ViTLayer.forward": ("5449ccf4bf55f7df",),
                "Sam3ViTLayer.precompute_positions": ("08886689bf85cdaa",),
                "Sam3ViTModel.forward": ("5b44aaf88795f60d",),
                "Sam3ViTRoPEAttention.forward": ("0b30c18372b61845",),
                "Sam3ViTRotaryEmbedding.forward": ("1b00ebed857605fa",),
                "Sam3VisionModel.forward": ("c1b55f764991c761",),
                "Sam3VisionNeck.forward": ("2916670e662b1514",),
            }
        },
        random=(
            RandomModel(
                "sam3",
                {
                    "text_config": clip(
                        49408,
                        **{"hidden_size": 1024, "intermediate_size": 4096, "projection_dim": 512, "num_hidden_layers": 24},
                        **{"num_attention_heads": 16, "max_position_embeddings": 32, "hidden_act": "gelu"},
                    )
                },
                {
                    "vision_config": {
                        "backbone_config": {
                            **{
                                "model_type": "sam3_vit_model",
                                "hidden_size": 32,
                                "intermediate_size": 48,
                                "num_hidden_layers": 3,
                            },
                            **{"num_attention_heads": 4, "window_size": 3, "global_attn_indexes": [1]},
                            **{"image_size": 112, "pretrain_image_size": 56},
                        },
                        "fpn_hidden_size": 32,
                    },
                    "text_config": clip(
                        TINY_VOCABULARY,
                        **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
                        **{"projection_dim": 24, "max_position_embeddings": 32, "hidden_act": "gelu"},
                    ),
                    "geometry_encoder_config": _TINY,
                    "detr_encoder_config": _TINY,
                    "detr_decoder_config": {**_TINY, "num_queries": 20},
                    "mask_decoder_config": {"hidden_size": 32, "num_attention_heads": 4},
                },
            ),
        ),
        engines=frozenset((ONE_PHRASE,)),
    ),
)
