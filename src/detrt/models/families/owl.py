"""OWL-ViT and OWLv2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import SIGMOID_IN_FP16, Family, Processor, RandomModel, TextFacts
from .sizes import TINY_VOCABULARY, clip

if TYPE_CHECKING:
    from torch import nn

    from ...spec import TextSpec
    from ..stock import Stock

_CLIP = {
    "do_normalize": True,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}


def _text_facts(config: Any) -> TextFacts:
    vision = config.vision_config
    patches = (int(vision.image_size) // int(vision.patch_size)) ** 2
    return TextFacts(int(config.text_config.max_position_embeddings), int(config.projection_dim), patches)


def _stock() -> type[Stock]:
    from ..layers.owl import OwlStock

    return OwlStock


def _detector(module: nn.Module) -> nn.Module:
    from ..layers.owl import OwlDetector

    return OwlDetector(module)


def _text_encoder(module: nn.Module, text: TextSpec) -> nn.Module:
    from ..layers.owl import OwlText

    return OwlText(module)


def _query_encoder(module: nn.Module) -> nn.Module:
    from ..layers.owl import OwlQuery

    return OwlQuery(module)


def _row(name: str, title: str, example: str, processor: Processor, vision: dict[str, int], **facts: Any) -> Family:
    kind = {"model_type": f"{name}_text_model", "max_position_embeddings": 16}
    small = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return Family(
        name=name,
        model_type=name,
        title=title,
        activation="sigmoid",
        select="query",
        max_detections=None,
        licence="Apache-2.0",
        example=example,
        dynamic=False,
        fixed_reason="each place of its grid of patches has its weights",
        multiple_of="image",
        size=None,
        text="names",
        processor=processor,
        text_facts=_text_facts,
        text_processor=f"{processor.name}Processor",
        stock=_stock,
        since="5.23.0",
        detector=_detector,
        text_encoder=_text_encoder,
        query_encoder=_query_encoder,
        random=(
            RandomModel(
                name,
                {"text_config": clip(49408, **kind, hidden_size=512), "vision_config": vision},
                {
                    "text_config": clip(TINY_VOCABULARY, **kind, **small, hidden_size=24),
                    "vision_config": {"image_size": 96, "patch_size": 16, "hidden_size": 32, **small},
                    "projection_dim": 24,
                },
            ),
        ),
        engines=frozenset((SIGMOID_IN_FP16,)),
        **facts,
    )


FAMILIES = (
    _row(
        "owlvit",
        "OWL-ViT",
        "google/owlvit-base-patch32",
        Processor("OwlViT", {"size": {"height": 768, "width": 768}, "resample": 3, "do_pad": False, **_CLIP}, rescale_key=True),
        {"image_size": 768, "patch_size": 32},
        rewrites={
            "tensors_only": {
                "OwlViTAttention.forward": ("75e3ad70149a035e",),
                "OwlViTBoxPredictionHead.forward": ("f9b9f1a8710033ec",),
                "OwlViTClassPredictionHead.forward": ("fe96d279c3206ed6",),
                "OwlViTEncoderLayer.forward": ("e1e22017cec41d0f",),
                "OwlViTForObjectDetection.box_predictor": ("4f9f860905d66fcf",),
                "OwlViTForObjectDetection.embed_image_query": ("7c1d67975d5a53f7",),
                "OwlViTForObjectDetection.forward": ("9b08db443a2c4822",),
                "OwlViTForObjectDetection.image_embedder": ("2ecc80558a48ea7b",),
                "OwlViTMLP.forward": ("f01cd51d89941c20",),
                "OwlViTModel.forward": ("e4c195bb4b401ddd",),
                "OwlViTTextTransformer.forward": ("b412f4646bdf70eb",),
                "OwlViTVisionEmbeddings.forward": ("63262fd74e371662",),
                "OwlViTVisionTransformer.forward": ("2e9d3ba4ce481384",),
            }
        },
    ),
    _row(
        "owlv2",
        "OWLv2",
        "google/owlv2-base-patch16-ensemble",
        Processor(
            "Owlv2",
            {"size": {"height": 960, "width": 960}, "do_pad": True, **_CLIP},
            square=True,
            rescale_key=True,
            needs=("scipy",),
        ),
        {"image_size": 960, "patch_size": 16},
        rewrites={
            "tensors_only": {
                "Owlv2Attention.forward": ("75e3ad70149a035e",),
                "Owlv2BoxPredictionHead.forward": ("f9b9f1a8710033ec",),
                "Owlv2ClassPredictionHead.forward": ("fe96d279c3206ed6",),
                "Owlv2EncoderLayer.forward": ("e1e22017cec41d0f",),
                "Owlv2ForObjectDetection.box_predictor": ("4f9f860905d66fcf",),
                "Owlv2ForObjectDetection.embed_image_query": ("4dc4df5eed08750b",),
                "Owlv2ForObjectDetection.forward": ("4eca05e96ff67df2",),
                "Owlv2ForObjectDetection.image_embedder": ("86fedbaa5785815d",),
                "Owlv2MLP.forward": ("f01cd51d89941c20",),
                "Owlv2Model.forward": ("4ee9f96ddabb7448",),
                "Owlv2TextTransformer.forward": ("b412f4646bdf70eb",),
                "Owlv2VisionEmbeddings.forward": ("d96f84ffcd15a72c",),
                "Owlv2VisionTransformer.forward": ("2e9d3ba4ce481384",),
            }
        },
    ),
)
