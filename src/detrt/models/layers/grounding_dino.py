"""Grounding DINO (Liu et al., arXiv:2303.05499) and MM-Grounding-DINO (arXiv:2401.02361) on tensors alone.

Two modules over the weights of transformers' classes: the text encoder, which runs once for a prompt, and the
detector. Tokenization is separate. Both compute the same as `GroundingDinoForObjectDetection`, with these
differences in the implementation:

* Masks and position ids of the sub-sentences are comparisons of all pairs of tokens (`sub_sentences`).
* Image-text fusion multiplies the text side into the weights first. The stock order projects every one of
  the 20 000 image tokens to 1024 channels three times per layer; (v W) k is v (W k), and W k has only
  heads * tokens columns. The published shift by the largest score of the whole batch and the clamp at
  50 000 are left out: a softmax does not change by a shift, and whatever the clamp changes has probability 0.
* Position embeddings are separable, boxes are refined for the selected queries only, and heads of the
  decoder layers before the last are not computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...errors import ExportError
from ...text.tensors import ATTENTION_MASK, INPUT_IDS
from ..stock import TokenStock
from .dino import inverse_sigmoid
from .swin import from_transformers_swin
from .trace_scope import inside

if TYPE_CHECKING:
    from ..published import PublishedOutputs, PublishedPrompt

# Scores of masked positions: exp() of it is 0 in float32, and float16 can represent it.
MASKED = -6e4
# Logits of padded tokens: sigmoid gives 0. transformers has -inf there.
PADDED_LOGIT = -1e4
_CLAMP = "box_clamp"  # attribute of modules, see `take_authors_clamps`


def sub_sentences(input_ids: Tensor, separators: Tensor) -> tuple[Tensor, Tensor]:
    """Self-attention mask and position ids of the sub-sentences of a prompt.

    input_ids: (batch, tokens) int64. separators: (n,) ids that end a phrase or frame the prompt.
    A token belongs to the block that ends with the next separator, inclusive. Tokens of one block attend to
    each other, unless the block ends at the first or at the last position of the row (the framing tokens) or
    not at all (padding); then a token attends to itself only and has position 0. Positions count from 0 after
    the previous separator.
    Returns (batch, tokens, tokens) bool and (batch, tokens) int64. Section 3.4 of the paper; the rule of
    `generate_masks_with_special_tokens_and_transfer_map`. A prompt without a final "." depends on the
    padding of its batch under this rule, which is why prompts get one.
    """
    length = input_ids.shape[1]
    place = torch.arange(length, device=input_ids.device)
    special = (input_ids.unsqueeze(-1) == separators).any(-1).unsqueeze(1)  # (batch, 1, tokens)
    column, row = place.view(1, 1, -1), place.view(1, -1, 1)
    none_after, none_before = place.new_full((), 1 << 20), place.new_full((), -1)
    following = torch.where(special & (column >= row), column, none_after).amin(-1)
    previous = torch.where(special & (column < row), column, none_before).amax(-1)
    valid = (following > 0) & (following < place[-1])
    together = (following.unsqueeze(2) == following.unsqueeze(1)) & valid.unsqueeze(1)
    mask = together | (row == column)
    return mask, torch.where(valid, place - previous - 1, torch.zeros_like(previous))


def additive(mask: Tensor) -> Tensor:
    """0 where a mask is 1, `MASKED` where it is 0; float32."""
    return (mask.to(torch.float32) - 1.0) * -MASKED


def sine_embedding(coordinates: Tensor, width: int) -> Tensor:
    """(..., n) -> (..., n * width): sines and cosines, interleaved; of several coordinates, y comes before x."""
    return torch.cat([_sines(c * (2 * math.pi), width, 10000.0) for c in _y_first(coordinates)], -1)


def _y_first(coordinates: Tensor) -> list[Tensor]:
    parts = list(coordinates.unbind(-1))
    return [parts[1], parts[0], *parts[2:]] if len(parts) > 1 else parts


def _sines(angles: Tensor, width: int, temperature: float) -> Tensor:
    """(...) -> (..., width): sin and cos of angle / temperature^(2i/width), interleaved."""
    rates = temperature ** (2 * torch.arange(width // 2, dtype=torch.float32, device=angles.device) / width)
    scaled = angles.unsqueeze(-1) / rates
    return torch.stack([scaled.sin(), scaled.cos()], -1).flatten(-2)


def nearest_rows(mask: Tensor, size: tuple[Any, Any]) -> Tensor:
    """(batch, H, W) -> (batch, *size): torch's nearest interpolation, in single precision."""
    for axis, target in ((1, size[0]), (2, size[1])):
        source = mask.shape[axis]
        place = torch.arange(target, device=mask.device)
        step = torch.as_tensor(source, dtype=torch.float32) / torch.as_tensor(target, dtype=torch.float32)
        mask = mask.index_select(axis, (place.to(torch.float32) * step).floor().to(torch.int64))
    return mask


class GroundingText(nn.Module):
    """The text encoder: BERT under the sub-sentence mask, and its projection.

    input_ids, attention_mask: (batch, tokens) int64. Returns text_features (batch, tokens, d_model) float32,
    0 at padding; text_self_mask (batch, tokens, tokens) int64; text_position_ids (batch, tokens) int64.
    """

    def __init__(self, detector: nn.Module, separators: Sequence[int]) -> None:
        super().__init__()
        model: Any = detector.model
        kind = model.config.text_config.model_type
        if kind != "bert":
            raise ExportError(f"the text model is {kind!r}; detrt exports Grounding DINO with BERT only")
        self.bert, self.projection = model.text_backbone, model.text_projection
        self.register_buffer("separators", torch.tensor(list(separators), dtype=torch.int64), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask, position_ids = sub_sentences(input_ids, self.separators)
        words: Any = self.bert.embeddings
        x = words.word_embeddings(input_ids) + words.token_type_embeddings.weight[0]
        x = words.LayerNorm(x + words.position_embeddings(position_ids))
        bias = additive(mask).unsqueeze(1)
        for layer in self.bert.encoder.layer:
            with inside(self.bert.encoder, layer):
                x = _bert_layer(layer, x, bias)
        features = self.projection(x) * attention_mask.unsqueeze(-1).to(torch.float32)
        return features, mask.to(torch.int64), position_ids


def _bert_layer(layer: Any, x: Tensor, bias: Tensor) -> Tensor:
    own = layer.attention.self
    heads, dim = own.num_attention_heads, own.attention_head_size
    with inside(layer.attention, own):
        query, key, value = (linear(x).unflatten(-1, (heads, dim)).transpose(1, 2) for linear in (own.query, own.key, own.value))
        weights = (query @ key.transpose(-1, -2) * dim**-0.5 + bias).softmax(-1)
    x = layer.attention.output((weights @ value).transpose(1, 2).flatten(2), x)
    return layer.output(layer.intermediate(x), x)


class GroundingDetector(nn.Module):
    """Image and text features -> logits for each token, and boxes.

    pixels: (batch, 3, height, width) float32, normalised, 0 in padding; any height and width.
    pixel_mask: (batch, height, width), 1 = image, a rectangle at the top left.
    text_features, attention_mask, text_self_mask, text_position_ids: see `GroundingText`.
    Returns logits (batch, queries, tokens), `PADDED_LOGIT` at padded tokens, and boxes
    (batch, queries, 4) cxcywh relative to the unpadded image.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        config: Any = detector.config
        for name, wanted in (("two_stage", True), ("embedding_init_target", True), ("query_dim", 4)):
            if getattr(config, name, wanted) != wanted:
                raise ExportError(f"a Grounding DINO with {name} = {getattr(config, name)!r}; detrt exports {wanted!r}")
        if config.position_embedding_type != "sine":
            raise ExportError(f"position_embedding_type {config.position_embedding_type!r}; detrt exports 'sine'")
        model: Any = detector.model
        self.width, self.queries = int(config.d_model), int(config.num_queries)
        self.temperature = float(config.positional_embedding_temperature)
        self.backbone = tensor_backbone(model.backbone.conv_encoder.model)
        self.input_proj_vision, self.level_embed = model.input_proj_vision, model.level_embed
        self.encoder, self.decoder = model.encoder, model.decoder
        self.enc_output, self.enc_output_norm = model.enc_output, model.enc_output_norm
        self.proposal_class, self.proposal_box = (
            model.encoder_output_class_embed,
            model.encoder_output_bbox_embed,
        )
        self.query_embed = model.query_position_embeddings
        self.class_embed, self.bbox_embed = detector.class_embed[-1], detector.bbox_embed
        # Of the inverse sigmoid between decoder layers and in the last box; None: as transformers, see `take_authors_clamps`.
        self.clamps = tuple(getattr(part, _CLAMP, None) for part in (model.decoder, detector))

    def forward(
        self,
        pixels: Tensor,
        pixel_mask: Tensor,
        text_features: Tensor,
        attention_mask: Tensor,
        text_self_mask: Tensor,
        text_position_ids: Tensor,
    ) -> tuple[Tensor, Tensor]:
        levels = self._levels(pixels)
        shapes = [(level.shape[2], level.shape[3]) for level in levels]
        masks = [nearest_rows(pixel_mask, shape).to(torch.float32) for shape in shapes]
        vision = torch.cat([level.flatten(2).transpose(1, 2) for level in levels], 1)
        valid = torch.cat([mask.flatten(1) for mask in masks], 1) > 0
        positions = torch.cat([self._position(mask, i) for i, mask in enumerate(masks)], 1)
        ratios = torch.stack([_valid_ratio(mask) for mask in masks], 1)
        sizes = torch.stack([torch.stack([torch.as_tensor(s, dtype=torch.int64) for s in shape]) for shape in shapes])
        places = {"spatial_shapes": sizes, "spatial_shapes_list": shapes, "level_start_index": None}
        tokens = attention_mask > 0

        references = torch.cat([_centres(mask) for mask in masks], 1)[:, :, None] * ratios[:, None]
        text = text_features
        enhance = additive(text_self_mask).unsqueeze(1)
        order = sine_embedding(text_position_ids.unsqueeze(-1).to(torch.float32), self.width)
        for layer in self.encoder.layers:
            with inside(self.encoder, layer):
                with inside(layer.fusion_layer):
                    vision, text = fuse(layer.fusion_layer, vision, text, valid, tokens)
                with inside(layer.text_enhancer_layer):
                    text = _enhance(layer.text_enhancer_layer, text, enhance, order)
                vision, _ = layer.deformable_layer(
                    hidden_states=vision,
                    attention_mask=valid,
                    position_embeddings=positions,
                    reference_points=references,
                    **places,
                )
        boxes = self._select(vision, text, masks, valid, tokens)
        return self._decode(vision, text, boxes, ratios, valid, tokens, places)

    def _levels(self, pixels: Tensor) -> list[Tensor]:
        maps = self.backbone(pixels)
        levels = [project(found) for project, found in zip(self.input_proj_vision, maps, strict=False)]
        # Levels beyond the backbone's: strided convolutions, the first of them on its last map.
        for index, project in enumerate(self.input_proj_vision[len(maps) :]):
            levels.append(project(maps[-1] if index == 0 else levels[-1]))
        return levels

    def _position(self, mask: Tensor, level: int) -> Tensor:
        """(batch, h * w, d): sine embedding of the position in the image, plus the level embedding.

        The first row and column of a mask are sufficient: the image is a rectangle at the top left. Values in the
        padding are never read.
        """
        parts = []
        for line in (mask[:, :, 0], mask[:, 0, :]):
            steps = line.cumsum(1)
            angles = steps / (steps[:, -1:] + 1e-6) * (2 * math.pi)
            parts.append(_sines(angles, self.width // 2, self.temperature))
        height, width = mask.shape[1], mask.shape[2]
        y = parts[0].unsqueeze(2).expand(-1, -1, width, -1)
        x = parts[1].unsqueeze(1).expand(-1, height, -1, -1)
        return torch.cat([y, x], -1).flatten(1, 2) + self.level_embed[level]

    def _select(self, vision: Tensor, text: Tensor, masks: list[Tensor], valid: Tensor, tokens: Tensor) -> Tensor:
        """(batch, queries, 4): boxes of the positions that are most similar to any token (section 3.2)."""
        proposals = torch.cat([_proposals(mask, level) for level, mask in enumerate(masks)], 1)
        inside = ((proposals > 0.01) & (proposals < 0.99)).all(-1) & valid
        objects = self.enc_output_norm(self.enc_output(vision * inside.unsqueeze(-1).to(vision.dtype)))
        best = self._similarity(self.proposal_class, objects, text, tokens).amax(-1)
        index = best.topk(self.queries, dim=1).indices
        chosen = proposals.gather(1, index.unsqueeze(-1).expand(-1, -1, 4)).clamp(0.01, 0.99)
        logits = torch.log(chosen / (1 - chosen))
        objects = objects.gather(1, index.unsqueeze(-1).expand(-1, -1, objects.shape[-1]))
        boxes = (self.proposal_box(objects) + logits).sigmoid()
        # Positions outside have infinite logits in the published code, so that their boxes are all ones.
        return torch.where(inside.gather(1, index).unsqueeze(-1), boxes, torch.ones_like(boxes))

    def _decode(
        self,
        vision: Tensor,
        text: Tensor,
        boxes: Tensor,
        ratios: Tensor,
        valid: Tensor,
        tokens: Tensor,
        places: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        scale = torch.cat([ratios, ratios], -1).unsqueeze(1)
        bias = additive(tokens)[:, None, None, :]
        x = self.query_embed.weight.unsqueeze(0).expand(boxes.shape[0], -1, -1)
        last = len(self.decoder.layers) - 1
        with inside(self.decoder):
            for index, layer in enumerate(self.decoder.layers):
                references = boxes.unsqueeze(2) * scale
                position = self.decoder.reference_points_head(sine_embedding(references[:, :, 0], self.width // 2))
                x = layer(
                    hidden_states=x,
                    position_embeddings=position,
                    reference_points=references,
                    vision_encoder_hidden_states=vision,
                    vision_encoder_attention_mask=valid,
                    text_encoder_hidden_states=text,
                    text_encoder_attention_mask=bias,
                    **places,
                )[0]
                if index < last:
                    boxes = (self.decoder.bbox_embed[index](x) + self._logit(boxes)).sigmoid()
            x = self.decoder.layer_norm(x)
        logits = self._similarity(self.class_embed, x, text, tokens)
        return logits, (self.bbox_embed[last](x) + self._logit(boxes, last=True)).sigmoid()

    def _logit(self, boxes: Tensor, *, last: bool = False) -> Tensor:
        eps = self.clamps[last]
        return logit(boxes) if eps is None else inverse_sigmoid(boxes, eps)

    def _similarity(self, head: Any, x: Tensor, text: Tensor, tokens: Tensor) -> Tensor:
        """(batch, n, tokens): dot products; MM-Grounding-DINO scales them and adds a bias."""
        logits = x @ text.transpose(1, 2)
        if hasattr(head, "bias"):
            logits = logits * self.width**-0.5 + head.bias
        return torch.where(tokens.unsqueeze(1), logits, torch.full_like(logits[:, :1, :1], PADDED_LOGIT))


class _InverseSigmoid(TorchFunctionMode):
    """Within it, `torch.special.logit` is the authors' inverse sigmoid."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.special.logit:
            return inverse_sigmoid(args[0], self.eps)
        return func(*args, **(kwargs or {}))


def take_authors_clamps(detector: nn.Module, between: float, last: float) -> None:
    """Have a model of transformers, and `GroundingDetector` of it, refine boxes as the authors do, who clamp x and 1 - x each; in place.

    between, last: what they clamp to between decoder layers, and in the last box. transformers clamps x to 1e-5 to 1 - 1e-5 in both.
    """
    _clamp(detector.model.decoder, between)  # type: ignore[union-attr,arg-type]
    _clamp(detector, last)


def _clamp(module: Any, eps: float) -> None:
    """Give a module a class whose forward has another clamp. It has the name of the stock class, by which transformers looks it up."""
    stock = type(module)

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        with _InverseSigmoid(eps):
            return stock.forward(self, *args, **options)

    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    module.__class__ = type(stock.__name__, (stock,), {**names, "forward": wraps(stock.forward)(forward), _CLAMP: eps})


def tensor_backbone(backbone: Any) -> nn.Module:
    """The backbone as a module from pixels to maps, with symbolic sizes.

    transformers' Swin branches on sizes in Python, which a trace turns into constants; detrt's does not.
    """
    if type(backbone).__name__ != "SwinBackbone":
        return _Maps(backbone)
    return from_transformers_swin(backbone)


class _Maps(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, pixels: Tensor) -> list[Tensor]:
        return list(self.backbone(pixels, return_dict=True).feature_maps)


def fuse(layer: Any, vision: Tensor, text: Tensor, valid: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Image-to-text and text-to-image attention in both directions (section 3.2), with the text side multiplied into the weights first.

    vision: (batch, n, d). text: (batch, t, d). valid: (batch, n) and tokens: (batch, t), True = real.
    """
    attention = layer.attn
    heads, dim, width = attention.num_heads, attention.head_dim, vision.shape[-1]
    vision, text = layer.layer_norm_vision(vision), layer.layer_norm_text(text)

    def by_head(linear: nn.Linear) -> Tensor:  # (batch, heads, t, head_dim)
        return linear(text).unflatten(-1, (heads, dim)).transpose(1, 2)

    keys = by_head(attention.text_proj) * attention.scale
    query = attention.vision_proj
    columns = (keys @ query.weight.view(heads, dim, width)).flatten(1, 2)  # (batch, heads * t, d)
    shift = (keys @ query.bias.view(heads, dim, 1)).flatten(1, 3)  # (batch, heads * t)
    scores = vision @ columns.transpose(1, 2) + shift.unsqueeze(1)  # (batch, n, heads * t)

    by_token = scores.unflatten(-1, (heads, -1)) + additive(tokens)[:, None, None, :]
    out = attention.out_vision_proj
    values = by_head(attention.values_text_proj) @ out.weight.view(width, heads, dim).permute(1, 2, 0)
    values = (values * layer.vision_param).flatten(1, 2)  # (batch, heads * t, d)
    to_vision = by_token.softmax(-1).flatten(2) @ values + out.bias * layer.vision_param

    by_position = (scores.transpose(1, 2) + additive(valid).unsqueeze(1)).softmax(-1)  # (batch, heads * t, n)
    attended = (by_position @ vision).unflatten(1, (heads, -1))  # (batch, heads, t, d)
    linear = attention.values_vision_proj
    attended = attended @ linear.weight.view(heads, dim, width).transpose(1, 2) + linear.bias.view(heads, 1, dim)
    to_text = attention.out_text_proj(attended.transpose(1, 2).flatten(2))
    return vision + to_vision, text + layer.text_param * to_text


def _enhance(layer: Any, x: Tensor, bias: Tensor, position: Tensor) -> Tensor:
    place = x + position
    x = layer.layer_norm_before(x + layer.self_attn(queries=place, keys=place, values=x, attention_mask=bias)[0])
    return layer.layer_norm_after(x + layer.fc2(layer.activation(layer.fc1(x))))


def logit(x: Tensor, eps: float = 1e-5) -> Tensor:
    """`torch.logit` in basic operators: log(x / (1 - x)) of x clamped to eps..1 - eps."""
    x = x.clamp(eps, 1 - eps)
    return torch.log(x / (1 - x))


def _valid_ratio(mask: Tensor) -> Tensor:
    """(batch, 2): fraction of the map that is image, width before height."""
    height, width = (torch.as_tensor(side, dtype=torch.float32) for side in mask.shape[1:])
    return torch.stack([mask[:, 0].sum(1) / width, mask[:, :, 0].sum(1) / height], -1)


def _grid(mask: Tensor) -> Tensor:
    """(h * w, 2) float32: x and y of the pixel centres of a map, row-major."""
    y = torch.arange(mask.shape[1], device=mask.device).to(torch.float32) + 0.5
    x = torch.arange(mask.shape[2], device=mask.device).to(torch.float32) + 0.5
    y, x = torch.meshgrid(y, x, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], -1)


def _image_sides(mask: Tensor) -> Tensor:
    """(batch, 1, 2): width and height of the image on a map, in pixels."""
    return torch.stack([mask[:, 0].sum(1), mask[:, :, 0].sum(1)], -1).unsqueeze(1)


def _centres(mask: Tensor) -> Tensor:
    """(batch, h * w, 2): pixel centres of a map relative to the image."""
    return _grid(mask).unsqueeze(0) / _image_sides(mask)


def _proposals(mask: Tensor, level: int) -> Tensor:
    """(batch, h * w, 4) cxcywh: a box of 0.05 * 2^level around every pixel."""
    centres = _centres(mask)
    return torch.cat([centres, torch.full_like(centres, 0.05 * 2.0**level)], -1)


class GroundingStock(TokenStock):
    """transformers' Grounding DINO."""

    def forward(self, model: Any, pixels: Tensor, mask: Tensor | None, feeds: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        ids, attention = feeds[INPUT_IDS], feeds[ATTENTION_MASK]
        outputs = model(pixel_values=pixels, pixel_mask=mask, input_ids=ids, attention_mask=attention, return_dict=True)
        # transformers pads to the longest prompt, with infinity.
        logits = outputs.logits[:, :, : ids.shape[1]]
        return logits.masked_fill(attention[:, None, :] == 0, PADDED_LOGIT), outputs.pred_boxes

    def feeds(self, both: Any, images: Sequence[Any], prompt: PublishedPrompt) -> Any:
        return both(images=list(images), text=[prompt.text] * len(images), return_tensors="pt", padding=True)

    def usual(self, both: Any, outputs: Any, feeds: Any, prompt: PublishedPrompt, sizes: Any, masks: bool) -> Any:
        return both.post_process_grounded_object_detection(
            outputs, feeds["input_ids"], threshold=0.25, text_threshold=0.25, target_sizes=sizes
        )

    def found(self, both: Any, outputs: PublishedOutputs, prompt: PublishedPrompt, most: int) -> dict[str, Tensor]:
        """A class is a phrase: the library's post-processing gets the logits of one phrase after the other, so that what it calls the
        score of a box, the best over all tokens, is that of the phrase."""
        offsets = both.tokenizer(prompt.text, return_offsets_mapping=True)["offset_mapping"]
        assert len(offsets) == outputs.feeds[0]["input_ids"].shape[1]
        phrases = []
        for first, last in prompt.spans:
            only = torch.tensor([first <= start < end <= last for start, end in offsets])
            # A threshold below every score, so that all phrases keep all queries.
            phrases.append(self._grounded(both, outputs, threshold=-1.0, only=only))
        scores, best = torch.stack([one["scores"].float() for one in phrases]).max(0)
        return {"scores": scores, "boxes": phrases[0]["boxes"], "labels": torch.tensor(list(prompt.names))[best]}

    def by_tokens(self, both: Any, outputs: PublishedOutputs, text_threshold: float) -> Any:
        return self._grounded(both, outputs, threshold=0.0, text_threshold=text_threshold)

    def _grounded(self, both: Any, outputs: PublishedOutputs, *, only: Tensor | None = None, **thresholds: float) -> Any:
        """The library's post-processing of token scores. only: (tokens,), the tokens that count."""
        (tensors,), (feeds,) = outputs.tensors, outputs.feeds
        if only is not None:
            columns = torch.zeros(tensors.logits.shape[-1], dtype=torch.bool)
            columns[: len(only)] = only
            tensors = SimpleNamespace(logits=tensors.logits.masked_fill(~columns, -torch.inf), pred_boxes=tensors.pred_boxes)
        return both.post_process_grounded_object_detection(
            tensors, feeds["input_ids"], target_sizes=[outputs.size_hw], **thresholds
        )[0]
