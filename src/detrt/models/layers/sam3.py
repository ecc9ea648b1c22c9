"""SAM 3 (Carion et al., arXiv:2511.16719) on tensors alone: the text encoder, and the detector of one image and some phrases.

Both work on the weights of transformers' `Sam3Model`, whose own forward takes one phrase an image and bakes sizes into tables. The
differences in the implementation:

* The image encoder runs once for all phrases of an image; a phrase is a row of a batch after it.
* Rotary positions and tables follow the size of the image. As in the library, with `image_size` of its config set to that size, a
  patch of a global layer is a step of window / columns.
* The score of a query is that of transformers' post-processing, sigmoid(logit) * sigmoid(presence), returned as one logit.
* The projection of the pixels before the masks is multiplied into the queries: q (W x + b) is (q W) x + q b.
* The semantic map and the coarsest map, which no box or mask depends on, are not computed; nor is the encoder of example boxes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ...errors import ExportError
from ...text.tensors import PHRASE_FEATURES, PHRASE_MASK
from ..stock import EncoderStock
from .deformable import sine_of_boxes, sine_position
from .dino import inverse_sigmoid
from .grounding_dino import PADDED_LOGIT, additive
from .omdet_turbo import clip_states, upsample
from .trace_scope import inside
from .vit import columns_first_rope, rotate
from .windows import in_windows

if TYPE_CHECKING:
    from ..published import PublishedOutputs, PublishedPrompt

SCALES = (4.0, 2.0, 1.0, 0.5)  # of the maps, by the map of patches
EPS = 1e-3  # of the library's inverse sigmoid of boxes


class Sam3Text(nn.Module):
    """CLIP's text model and its projection.

    input_ids, attention_mask: (n, tokens) int64. Returns text_features (n, tokens, d) float32, 0 at padding.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        language: Any = detector.text_encoder
        self.clip, self.projection = getattr(language, "text_model", language), detector.text_projection

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        features = self.projection(clip_states(self.clip, input_ids))
        return (features * attention_mask.unsqueeze(-1).to(features.dtype),)


class Sam3Detector(nn.Module):
    """Image and features of phrases -> a logit, a box and a mask for each query of each phrase.

    pixels: (batch, 3, height, width) float32, normalised; both sides multiples of the patch.
    phrase_features: (batch, phrases, tokens, d); phrase_mask: (batch, phrases, tokens), 1 = token; a phrase without tokens is padding.
    Returns logits (batch, phrases, queries), `PADDED_LOGIT` at padded phrases, boxes (batch, phrases, queries, 4) cxcywh relative to
    the image, and mask logits (batch, phrases, queries, mask height, mask width).
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        vision: Any = detector.vision_encoder
        kind = vision.config.backbone_config.model_type
        if kind != "sam3_vit_model":
            raise ExportError(f"the image encoder is {kind!r}; detrt exports SAM 3 with its own ViT only")
        if list(vision.config.scale_factors) != list(SCALES):
            raise ExportError(
                f"the image encoder has maps of scales {vision.config.scale_factors}; detrt exports SAM 3 with {SCALES} only"
            )
        self.backbone, self.neck = vision.backbone, vision.neck
        self.side = isqrt(vision.backbone.embeddings.patch_embeddings.num_patches)
        self.encoder, self.decoder = detector.detr_encoder, detector.detr_decoder
        self.masks, self.scoring = detector.mask_decoder, detector.dot_product_scoring

    def forward(self, pixels: Tensor, phrase_features: Tensor, phrase_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, phrases = phrase_features.shape[0], phrase_features.shape[1]
        maps = self._maps(pixels)
        text, real = phrase_features.flatten(0, 1), phrase_mask.flatten(0, 1) > 0
        bias = additive(real)[:, None, None, :]
        size = (maps[-1].shape[2], maps[-1].shape[3])
        position = sine_position(torch.ones_like(maps[-1][:1, 0]), maps[-1].shape[1], temperature=10000.0)
        x = _for_each(maps[-1].flatten(2).transpose(1, 2), phrases)
        for layer in self.encoder.layers:
            with inside(self.encoder):
                x = layer(x, prompt_feats=text, vision_pos_encoding=position, prompt_cross_attn_mask=bias)
        queries, boxes, presence = self._decode(x, text, position, bias, size)
        scores = self.scoring(queries.unsqueeze(0), text, real).squeeze(-1)[0]
        logits = both(scores, presence)
        logits = torch.where(real.any(-1, keepdim=True), logits, torch.full_like(logits[:1, :1], PADDED_LOGIT))
        masks = self._mask_logits(queries, maps, x, text, bias, phrases)
        parts = (logits, boxes, masks)
        return tuple(part.unflatten(0, (batch, phrases)) for part in parts)  # type: ignore[return-value]

    def _maps(self, pixels: Tensor) -> list[Tensor]:
        """Maps of the image encoder, finest first; the last has the stride of a patch."""
        backbone: Any = self.backbone
        with inside(backbone, backbone.embeddings):
            x = backbone.embeddings.patch_embeddings.projection(pixels).permute(0, 2, 3, 1)
        height, width = x.shape[1], x.shape[2]
        table = backbone.embeddings.position_embeddings[0]
        rows, columns = (torch.arange(count, device=x.device) % self.side for count in (height, width))  # the table is repeated
        x = backbone.layer_norm(x + table[rows[:, None] * self.side + columns])
        window, head_dim = backbone.config.window_size, backbone.layers[0].attention.head_dim
        step = torch.as_tensor(window, dtype=torch.float32) / torch.as_tensor(width, dtype=torch.float32)
        whole, inner = columns_first_rope(height, width, head_dim, step), columns_first_rope(window, window, head_dim)
        for layer in backbone.layers:
            with inside(backbone, layer):
                angles = tuple(part.to(x) for part in (inner if layer.window_size else whole))
                y = in_windows(layer.layer_norm1(x), layer.window_size, lambda groups: _attend(layer.attention, groups, angles))  # noqa: B023
                x = x + y
                x = x + layer.mlp(layer.layer_norm2(x))
        x = x.permute(0, 3, 1, 2)
        with inside(self.neck):
            return [level(x) for level in self.neck.fpn_layers[:-1]]

    def _decode(
        self, vision: Tensor, text: Tensor, position: Tensor, bias: Tensor, size: tuple[Any, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Last states of the queries (rows, queries, d), their boxes, and the logit of presence (rows, 1)."""
        decoder: Any = self.decoder
        x = torch.cat([decoder.presence_token.weight, decoder.query_embed.weight])
        x = x.unsqueeze(0).expand(vision.shape[0], -1, -1)
        boxes = decoder.reference_points.weight.sigmoid().unsqueeze(0).expand(vision.shape[0], -1, -1)
        for layer in decoder.layers:
            with inside(decoder):
                places = decoder.ref_point_head(sine_of_boxes(boxes, x.shape[-1]))
                # The presence token attends to the whole map.
                near = nn.functional.pad(self._box_bias(boxes, size), (0, 0, 1, 0))
                x = layer(
                    x,
                    query_pos=places,
                    text_features=text,
                    vision_features=vision,
                    vision_pos_encoding=position,
                    text_cross_attn_mask=bias,
                    vision_cross_attn_mask=near,
                )
                queries = decoder.output_layer_norm(x[:, 1:])
                boxes = (decoder.box_head(queries) + inverse_sigmoid(boxes, EPS)).sigmoid()
        with inside(decoder):
            presence = decoder.presence_head(decoder.presence_layer_norm(x[:, :1])).squeeze(-1)
        most = decoder.clamp_presence_logit_max_val
        return queries, boxes, presence.clamp(-most, most)

    def _box_bias(self, boxes: Tensor, size: tuple[Any, Any]) -> Tensor:
        """(rows, heads, queries, h * w): bias of attention by the distances of a pixel to the sides of a query's box, log-scaled."""
        decoder: Any = self.decoder
        centre, half = boxes[..., :2], boxes[..., 2:] * 0.5
        corners = torch.stack([centre - half, centre + half], -1)  # (rows, queries, xy, 2)
        sides = []
        for axis, (count, embed) in enumerate(((size[1], decoder.box_rpb_embed_x), (size[0], decoder.box_rpb_embed_y))):
            place = torch.arange(count, device=boxes.device).to(boxes.dtype) / torch.as_tensor(count, dtype=boxes.dtype)
            away = (place[:, None] - corners[:, :, axis].unsqueeze(2)) * 8  # (rows, queries, count, 2)
            away = away.sign() * (away.abs() + 1.0).log2() / 3  # log2 of 8
            sides.append(embed(away).permute(0, 3, 1, 2))
        return (sides[1].unsqueeze(-1) + sides[0].unsqueeze(-2)).flatten(3)

    def _mask_logits(self, queries: Tensor, maps: list[Tensor], x: Tensor, text: Tensor, bias: Tensor, phrases: Any) -> Tensor:
        head: Any = self.masks
        with inside(head):
            normed = head.prompt_cross_attn_norm(x)
            x = x + head.prompt_cross_attn(query=normed, key=text, value=text, attention_mask=bias)[0]
        coarse = maps[-1]
        x = x.transpose(1, 2).unflatten(2, (coarse.shape[2], coarse.shape[3]))
        pixel: Any = head.pixel_decoder
        with inside(head, pixel):
            for index, feature_map in enumerate(reversed(maps[:-1])):
                x = upsample(x) + _for_each(feature_map, phrases)
                x = pixel.norms[index](pixel.conv_layers[index](x)).relu()
        with inside(head):
            wanted = head.mask_embedder(queries)
        project = head.instance_projection
        shift = wanted @ project.bias  # (rows, queries)
        flat = (wanted @ project.weight.flatten(1)) @ x.flatten(2) + shift.unsqueeze(-1)
        return flat.unflatten(2, (x.shape[2], x.shape[3]))


def both(logit: Tensor, presence: Tensor) -> Tensor:
    """The logit of sigmoid(logit) * sigmoid(presence): -log(exp(-a) + exp(-b) + exp(-a - b)), in half precision as well."""
    parts = torch.stack([-logit, (-presence).expand_as(logit), -logit - presence])
    largest = parts.amax(0)
    return -(largest + (parts - largest).exp().sum(0).log())


def _attend(own: Any, x: Tensor, angles: tuple[Tensor, ...]) -> Tensor:
    """Self-attention with rotary positions. x: (groups, tokens, dim)."""
    heads, dim = own.num_attention_heads, own.head_dim
    query, key, value = (linear(x).unflatten(-1, (heads, dim)).transpose(1, 2) for linear in (own.q_proj, own.k_proj, own.v_proj))
    query, key = rotate(query, *angles), rotate(key, *angles)
    weights = (query * dim**-0.5 @ key.transpose(-1, -2)).softmax(-1)
    return own.o_proj((weights @ value).transpose(1, 2).flatten(2))


def _for_each(x: Tensor, phrases: Any) -> Tensor:
    """(batch, ...) -> (batch * phrases, ...): every image once for each of its phrases."""
    return x.unsqueeze(1).expand(-1, phrases, *([-1] * (x.ndim - 1))).flatten(0, 1)


class Sam3Stock(EncoderStock):
    """transformers' SAM 3, which takes one phrase an image."""

    one_size = True

    def forward(self, model: Any, pixels: Tensor, mask: Tensor | None, feeds: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """One phrase of every image after the other."""
        with _positions_of(model.vision_encoder.backbone, pixels.shape[-2:]):
            maps = model.get_vision_features(pixels)
        found = []
        for features, seen in zip(feeds[PHRASE_FEATURES].unbind(1), feeds[PHRASE_MASK].unbind(1), strict=True):
            text = BaseModelOutputWithPooling(pooler_output=features)
            outputs = model(vision_embeds=maps, text_embeds=text, attention_mask=seen, return_dict=True)
            # The score of its post-processing, as a logit.
            scores = outputs.pred_logits.double().sigmoid() * outputs.presence_logits.double().sigmoid()
            logits = scores.logit().to(torch.float32).masked_fill(seen.sum(1, keepdim=True) == 0, PADDED_LOGIT)
            first, last = outputs.pred_boxes[..., :2], outputs.pred_boxes[..., 2:]
            found.append((logits, torch.cat([(first + last) / 2, last - first], -1), outputs.pred_masks))
        return tuple(torch.stack(parts, 1) for parts in zip(*found, strict=True))

    def encode(self, model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        features = model.base_model.get_text_features(ids, mask, return_dict=True).pooler_output
        return (features * mask.unsqueeze(-1).to(features.dtype),)

    def feeds(self, both: Any, images: Sequence[Any], prompt: PublishedPrompt) -> Any:
        """An image for each phrase, as its documentation asks for several."""
        names = list(prompt.names.values())
        texts = [name for name in names for _ in images]
        found = both(images=[*images] * len(names), text=texts, return_tensors="pt")
        return {name: tensor for name, tensor in found.items() if name != "original_sizes"}

    def runs(self, both: Any, image: Any, prompt: PublishedPrompt) -> list[Any]:
        return [self.feeds(both, [image], replace(prompt, names={i: name})) for i, name in prompt.names.items()]

    def usual(self, both: Any, outputs: Any, feeds: Any, prompt: PublishedPrompt, sizes: Any, masks: bool) -> Any:
        find = both.post_process_instance_segmentation if masks else both.post_process_object_detection
        return find(outputs, threshold=0.5, target_sizes=[*sizes] * len(prompt.names))

    def found(self, both: Any, outputs: PublishedOutputs, prompt: PublishedPrompt, most: int) -> dict[str, Tensor]:
        """The best of all phrases."""
        target = [outputs.size_hw]
        parts = [both.post_process_object_detection(one, threshold=0.0, target_sizes=target)[0] for one in outputs.tensors]
        counts = torch.tensor([len(part["scores"]) for part in parts])
        found = {name: torch.cat([part[name] for part in parts]) for name in ("scores", "boxes")}
        found["labels"] = torch.tensor(list(prompt.names)).repeat_interleave(counts)
        best = found["scores"].argsort(descending=True, stable=True)[:most]
        return {name: values[best] for name, values in found.items()}


@contextlib.contextmanager
def _positions_of(backbone: Any, size_hw: Sequence[int]) -> Iterator[None]:
    """Rotary positions of SAM 3's global layers for images of a size, by the library's own function, inside the block."""
    config = copy(backbone.config)
    config.image_size = [int(size_hw[1]), int(size_hw[0])]
    layers = [layer for layer in backbone.layers if not layer.window_size]
    usual = [layer.position_ids for layer in layers]
    try:
        for layer in layers:
            layer.position_ids = layer.precompute_positions(config, 0).to(layer.position_ids.device)
        yield
    finally:
        for layer, positions in zip(layers, usual, strict=True):
            layer.position_ids = positions
