"""OmDet-Turbo (Zhao et al., arXiv:2403.06892) on tensors alone: the CLIP text encoder and the detector.

Both work on the weights of transformers' `OmDetTurboForObjectDetection`, whose own forward keeps Python
caches of prompts, loops over images and bakes sizes into tables. The result is the same except for an
image with fewer classes than its neighbours in the batch, which gets the same result as alone. The published code
pads with zeros, which pass through a projection with a bias and then compete in the query selection; here
`class_mask` excludes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import ExportError
from ...text.tensors import CLASS_FEATURES, CLASS_MASK, TASK_FEATURES, TASK_MASK
from ..stock import NameStock
from .grounding_dino import MASKED, PADDED_LOGIT, additive, logit, tensor_backbone
from .trace_scope import inside

if TYPE_CHECKING:
    from ..published import PublishedPrompt


class OmDetText(nn.Module):
    """CLIP's text model.

    input_ids, attention_mask: (n, tokens) int64. Returns text_features (n, tokens, d) float32, 0 at padding,
    for the task, and class_features (n, d'): projected features at the end token, for class names.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        language: Any = detector.language_backbone
        kind = language.model.config.model_type
        if kind != "clip_text_model":
            raise ExportError(f"the text model is {kind!r}; detrt exports OmDet-Turbo with CLIP only")
        # transformers before 5.10 wraps the encoder once more.
        self.clip, self.text_projection = getattr(language.model, "text_model", language.model), language.text_projection

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        x = clip_states(self.clip, input_ids)
        pooled = end_states(x, input_ids)
        return x * attention_mask.unsqueeze(-1).to(x.dtype), pooled @ self.text_projection


def end_states(x: Tensor, input_ids: Tensor) -> Tensor:
    """States (n, d) at the end tokens of CLIP's texts, of states (n, tokens, d)."""
    # The end token has the largest id; the first one is used.
    end = input_ids.argmax(-1)
    return x.gather(1, end.view(-1, 1, 1).expand(-1, -1, x.shape[-1])).squeeze(1)


def clip_states(clip: Any, input_ids: Tensor) -> Tensor:
    """Last hidden states (n, tokens, d) of CLIP's text model for input_ids (n, tokens)."""
    place = torch.arange(input_ids.shape[1], device=input_ids.device)
    words: Any = clip.embeddings
    x = words.token_embedding(input_ids) + words.position_embedding(place)
    # Causal attention, so that padding does not change other tokens.
    bias = additive(place.view(1, -1) <= place.view(-1, 1))
    for layer in clip.encoder.layers:
        with inside(clip.encoder, layer):
            x = x + clip_attention(layer.self_attn, layer.layer_norm1(x), bias)
            x = x + layer.mlp(layer.layer_norm2(x))
    return clip.final_layer_norm(x)


def clip_attention(own: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Self-attention of CLIP's layers over states (n, tokens, d); bias: added to the scores."""
    heads, dim = own.num_heads, own.head_dim
    query, key, value = (linear(x).unflatten(-1, (heads, dim)).transpose(1, 2) for linear in (own.q_proj, own.k_proj, own.v_proj))
    scores = query @ key.transpose(-1, -2) * dim**-0.5
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return own.out_proj((weights @ value).transpose(1, 2).flatten(2))


class OmDetDetector(nn.Module):
    """Image, class features and task features -> one logit for each class, and boxes.

    pixels: (batch, 3, height, width) float32, normalised; both sides multiples of 32.
    class_features: (batch, classes, d'); class_mask: (batch, classes), 1 = a class of this image.
    task_features: (batch, tokens, d); task_mask: (batch, tokens), 1 = token.
    Returns logits (batch, queries, classes), `PADDED_LOGIT` at padded classes, and boxes
    (batch, queries, 4) cxcywh relative to the image.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        config: Any = detector.config
        if config.apply_layernorm_after_vision_backbone:
            raise ExportError("an OmDet-Turbo with norms outside of its backbone; load it with detrt's loader")
        if config.eval_size is not None:
            raise ExportError("an OmDet-Turbo with eval_size, for which the published code has no positions")
        vision: Any = detector.vision_backbone
        self.backbone = tensor_backbone(vision.vision_backbone)
        self.encoder, self.decoder = detector.encoder, detector.decoder
        self.queries = int(config.num_queries)

    def forward(
        self,
        pixels: Tensor,
        class_features: Tensor,
        class_mask: Tensor,
        task_features: Tensor,
        task_mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        decoder: Any = self.decoder
        classes = class_mask > 0
        maps = self.backbone(pixels)
        with inside(self.encoder):
            maps = self._fuse(maps)
        with inside(decoder):
            maps = [project(feature_map) for project, feature_map in zip(decoder.channel_projection_layers, maps, strict=True)]
        shapes = [(feature_map.shape[2], feature_map.shape[3]) for feature_map in maps]
        sizes = torch.stack([torch.stack([torch.as_tensor(s, dtype=torch.int64) for s in shape]) for shape in shapes])
        vision = torch.cat([feature_map.flatten(2).transpose(1, 2) for feature_map in maps], 1)
        x, boxes = self._select(vision, shapes, class_features, classes)

        task = decoder.task_encoder(task_features)
        if getattr(decoder, "task_project", None) is not None:
            task = decoder.task_project(task)
        task = task.transpose(0, 1)  # its layers take (tokens, batch, d)
        seen = torch.cat([torch.ones_like(x[:, :, 0]), task_mask.to(x.dtype)], 1)
        bias = additive(seen)[:, None, None, :]
        last = len(decoder.layers) - 1
        for index, layer in enumerate(decoder.layers):
            with inside(decoder):
                x, task, _, _ = layer(
                    x,
                    task,
                    boxes,
                    vision,
                    sizes,
                    shapes,
                    level_start_index=None,
                    attention_mask=bias,
                    query_position=decoder.query_position_head(boxes),
                )
            boxes = (decoder.decoder_bbox_head[index](x) + logit(boxes)).sigmoid()
        logits = self._similarity(x, decoder.decoder_class_head[last](class_features))
        return torch.where(classes.unsqueeze(1), logits, torch.full_like(logits[:, :1, :1], PADDED_LOGIT)), boxes

    def _fuse(self, maps: list[Tensor]) -> list[Tensor]:
        """The efficient encoder: attention on selected maps, then top-down and bottom-up fusion."""
        encoder: Any = self.encoder
        maps = [project(feature_map) for project, feature_map in zip(encoder.channel_projection_layers, maps, strict=True)]
        for attention, index in zip(encoder.encoder, encoder.encoder_projection_indices, strict=True):
            feature_map = maps[index]
            position = _wide_first_positions(feature_map, encoder.positional_encoding_temperature)
            x = attention(feature_map.flatten(2).transpose(1, 2), pos_embed=position)[0]
            maps[index] = x.transpose(1, 2).reshape(feature_map.shape)
        top_down = [maps[-1]]
        for step, low in enumerate(reversed(maps[:-1])):
            top_down[0] = encoder.lateral_convs[step](top_down[0])
            up = upsample(top_down[0])
            top_down.insert(0, encoder.fpn_blocks[step](torch.cat([up, low], 1)))
        fused = [top_down[0]]
        for step, high in enumerate(top_down[1:]):
            down = encoder.downsample_convs[step](fused[-1])
            fused.append(encoder.pan_blocks[step](torch.cat([down, high], 1)))
        return fused

    def _select(
        self, vision: Tensor, shapes: list[tuple[Any, Any]], class_features: Tensor, classes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries (batch, queries, d) and their boxes: the positions most similar to any class of the image."""
        decoder: Any = self.decoder
        anchors = torch.cat([_anchors(shape, level) for level, shape in enumerate(shapes)], 0)
        inside = ((anchors > 0.01) & (anchors < 0.99)).all(-1, keepdim=True)
        objects = decoder.encoder_vision_features(vision * inside.to(vision.dtype))
        likeness = self._similarity(objects, decoder.encoder_class_head(class_features))
        likeness = torch.where(classes.unsqueeze(1), likeness, torch.full_like(likeness[:, :1, :1], MASKED))
        index = likeness.amax(-1).topk(self.queries, dim=1).indices
        chosen = anchors[index].clamp(0.01, 0.99)  # (batch, queries, 4)
        x = objects.gather(1, index.unsqueeze(-1).expand(-1, -1, objects.shape[-1]))
        boxes = (decoder.encoder_bbox_head(x) + torch.log(chosen / (1 - chosen))).sigmoid()
        # Anchors at the border are infinite in the published code, so that their boxes are all ones.
        boxes = torch.where(inside[index], boxes, torch.ones_like(boxes))
        if decoder.learn_initial_query:
            x = decoder.tgt_embed.weight.unsqueeze(0).expand(boxes.shape[0], -1, -1)
        return x, boxes

    def _similarity(self, x: Tensor, names: Tensor) -> Tensor:
        """(batch, n, classes): cosine similarity over a temperature of 0.07, or dot products."""
        if self.decoder.class_distance_type == "cosine":
            x = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
            names = names / names.norm(dim=-1, keepdim=True).clamp_min(1e-12) / 0.07
        return x @ names.transpose(1, 2)


def upsample(feature_map: Tensor) -> Tensor:
    """(batch, d, h, w) -> (batch, d, 2h, 2w), every pixel four times.

    Equals a nearest Resize, which TensorRT-RTX 1.7 does not support with symbolic height and width.
    """
    wide = torch.stack([feature_map, feature_map], -1).flatten(3)
    return torch.stack([wide, wide], 3).flatten(2, 3)


def _wide_first_positions(feature_map: Tensor, temperature: float) -> Tensor:
    """(1, h * w, d): the published table of sines, in column-major order.

    Its entries are those of a (w, h) grid, added to tokens of an (h, w) map; trained weights depend on it.
    """
    width = feature_map.shape[1] // 4
    rates = 1.0 / temperature ** (torch.arange(width, dtype=torch.float32, device=feature_map.device) / width)
    across, down = (
        torch.arange(side, device=feature_map.device).to(torch.float32) for side in (feature_map.shape[3], feature_map.shape[2])
    )
    across, down = torch.meshgrid(across, down, indexing="ij")
    x, y = (side.flatten().unsqueeze(-1) * rates for side in (across, down))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], -1).unsqueeze(0)


def _anchors(shape: tuple[Any, Any], level: int) -> Tensor:
    """(h * w, 4) cxcywh: a box of 0.05 * 2^level around every pixel."""
    y, x = ((torch.arange(side).to(torch.float32) + 0.5) / torch.as_tensor(side, dtype=torch.float32) for side in shape)
    y, x = torch.meshgrid(y, x, indexing="ij")
    centres = torch.stack([x.flatten(), y.flatten()], -1)
    return torch.cat([centres, torch.full_like(centres, 0.05 * 2.0**level)], -1)


class OmDetStock(NameStock):
    """transformers' OmDet-Turbo."""

    def forward(self, model: Any, pixels: Tensor, mask: Tensor | None, feeds: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Image by image if counts differ: in the library, padded classes take part in the selection."""
        features, task, seen = (feeds[name] for name in (CLASS_FEATURES, TASK_FEATURES, TASK_MASK))
        counts = feeds[CLASS_MASK].sum(1).tolist()
        maps = model.encoder(model.vision_backbone(pixels), return_dict=True).extracted_states
        alone = [slice(i, i + 1) for i in range(len(counts))]
        groups = [slice(None)] if len(set(counts)) == 1 else alone
        parts = []
        for rows in groups:
            names = features[rows, : counts[rows][0]].transpose(0, 1)
            outputs = model.decoder(
                [level[rows] for level in maps],
                names,
                task[rows].transpose(0, 1),
                seen[rows],
                return_dict=True,
            )
            missing = features.shape[1] - names.shape[0]
            logits = torch.nn.functional.pad(outputs.decoder_classes[-1], (0, missing), value=PADDED_LOGIT)
            parts.append((logits, outputs.decoder_coords[-1]))
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def encode(self, model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        language = model.language_backbone
        features = language(ids, mask=torch.ones_like(mask), encode_type="task")[0].transpose(0, 1)
        return features * mask.unsqueeze(-1).to(features.dtype), language(ids, encode_type="class")

    def task(self, prompt: PublishedPrompt, count: int) -> dict[str, list[str]]:
        return {"task": [prompt.task] * count} if prompt.task else {}
