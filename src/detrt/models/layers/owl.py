"""OWL-ViT (Minderer et al., arXiv:2205.06230) and OWLv2 (arXiv:2306.09683) on tensors alone: the text encoder and the detector.

Both work on the weights of transformers' `OwlViTForObjectDetection` and `Owlv2ForObjectDetection`, whose own forward takes token ids and
pixels together. Every patch of the image has one box, and one logit for each name. OWLv2's objectness takes no part in that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ExportError
from ...text.tensors import CLASS_FEATURES, CLASS_MASK
from ..stock import NameStock
from .grounding_dino import PADDED_LOGIT
from .omdet_turbo import clip_attention, clip_states, end_states
from .trace_scope import inside

EPS = 1e-6  # of the library's normalisation in the class head
COVERING = 0.8  # of the best IoU with the whole image, of the boxes that a query image may mean


class OwlText(nn.Module):
    """CLIP's text model.

    input_ids, attention_mask: (n, tokens) int64. Returns class_features (n, d) float32 of length 1, 0 of a text without tokens.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        base: Any = detector.base_model
        self.clip, self.projection = base.text_model, base.text_projection

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        features = self.projection(end_states(clip_states(self.clip, input_ids), input_ids))
        return (features / features.norm(dim=-1, keepdim=True) * attention_mask[:, :1].to(features.dtype),)


class OwlPatches(nn.Module):
    """Pixels (batch, 3, height, width) float32, normalised -> states of the patches (batch, patches, d).

    Raises:
        ExportError: another size than that of the position table.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.vision, self.layer_norm = detector.base_model.vision_model, detector.layer_norm
        self.side = int(self.vision.config.image_size)  # type: ignore[union-attr, arg-type]

    def forward(self, pixels: Tensor) -> Tensor:
        if (int(pixels.shape[2]), int(pixels.shape[3])) != (self.side, self.side):
            raise ExportError(f"this model takes {self.side}x{self.side} only, the size of its position table; leave `size` out")
        vision: Any = self.vision
        with inside(vision):
            x = vision.pre_layernorm(vision.embeddings(pixels))
            for layer in vision.encoder.layers:
                with inside(vision.encoder, layer):
                    x = x + clip_attention(layer.self_attn, layer.layer_norm1(x))
                    x = x + layer.mlp(layer.layer_norm2(x))
            x = vision.post_layernorm(x)
        # The token of the whole image scales those of its patches.
        return self.layer_norm(x[:, 1:] * x[:, :1])


class OwlDetector(nn.Module):
    """Image and features of names -> a logit for each patch and name, and a box for each patch.

    pixels: (batch, 3, height, width) float32, normalised, of the one size of the model.
    class_features: (batch, classes, d) of any length; class_mask: (batch, classes), 1 = a name of this image.
    Returns logits (batch, patches, classes), `PADDED_LOGIT` at padded names, and boxes (batch, patches, 4) cxcywh relative to the
    tensor.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.patches = OwlPatches(detector)
        self.box_head, self.class_head = detector.box_head, detector.class_head
        self.register_buffer("box_bias", detector.box_bias, persistent=False)

    def forward(self, pixels: Tensor, class_features: Tensor, class_mask: Tensor) -> tuple[Tensor, Tensor]:
        head: Any = self.class_head
        x = self.patches(pixels)
        boxes = (self.box_head(x) + self.box_bias).sigmoid()
        with inside(head):
            patches, names = _unit(head.dense0(x)), _unit(class_features)
            scale = head.logit_scale(x)
            scale = (
                scale.relu() + scale.clamp(max=0.0).exp()
            )  # ELU and 1, of which not every TensorRT version is known to have the first
            logits = (patches @ names.transpose(1, 2) + head.logit_shift(x)) * scale
        return torch.where(class_mask.unsqueeze(1) > 0, logits, torch.full_like(logits[:, :1, :1], PADDED_LOGIT)), boxes


class OwlQuery(nn.Module):
    """Image of an object -> the feature that finds others like it.

    pixels: as `OwlDetector` takes them. Returns class_features (batch, d) of any length: those of one patch, as the library chooses it. Of
    OWLv2 it is the one with the largest objectness; of OWL-ViT, among the patches whose boxes cover the image nearly as well as the best
    does, the one that is least like the mean of all patches. The library's fallback for boxes outside of the image is left out: the centre
    of every box is inside.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.patches, self.box_head = OwlPatches(detector), detector.box_head
        self.dense: Any = detector.class_head.dense0  # type: ignore[union-attr]
        self.objectness: Any = getattr(detector, "objectness_head", None)
        self.register_buffer("box_bias", detector.box_bias, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels)
        features = self.dense(x)
        if self.objectness is not None:
            best = self.objectness(x).squeeze(-1).argmax(-1)
        else:
            boxes = (self.box_head(x) + self.box_bias).sigmoid()
            centre, half = boxes[..., :2], boxes[..., 2:] * 0.5
            low, high = centre - half, centre + half
            inner = (high.clamp(max=1.0) - low.clamp(min=0.0)).prod(-1)
            iou = inner / (1.0 + (high - low).prod(-1) - inner)  # with the whole image
            unlikeness = -(features @ features.mean(1).unsqueeze(-1)).squeeze(-1)
            covers = iou >= iou.amax(-1, keepdim=True) * COVERING
            best = torch.where(covers, unlikeness, torch.full_like(unlikeness, -torch.inf)).argmax(-1)
        return features.gather(1, best.view(-1, 1, 1).expand(-1, -1, features.shape[-1])).squeeze(1)


def _unit(x: Tensor) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + EPS)


class OwlStock(NameStock):
    """transformers' OWL-ViT and OWLv2."""

    def forward(self, model: Any, pixels: Tensor, mask: Tensor | None, feeds: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        grid = model.image_embedder(pixels)[0]
        patches, seen = grid.flatten(1, 2), feeds[CLASS_MASK]
        logits = model.class_predictor(patches, feeds[CLASS_FEATURES], seen)[0]
        return logits.masked_fill(seen[:, None, :] == 0, PADDED_LOGIT), model.box_predictor(patches, grid)

    def encode(self, model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        features = model.base_model.get_text_features(ids, mask, return_dict=True).pooler_output
        return (features / features.norm(dim=-1, keepdim=True),)
