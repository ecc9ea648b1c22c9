"""The prompted demo detector: a stock Grounding DINO (arXiv:2303.05499) of a few million parameters.

Also its tokenizer, a forward pass for training that equals the stock class's and takes denoising
queries as well, and the files that ``from_pretrained`` loads.
"""

from __future__ import annotations

import contextlib
import functools
import os
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from demo_model import write_model
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from torch import Tensor, nn
from transformers import BertConfig, GroundingDinoConfig, GroundingDinoForObjectDetection, SwinConfig

from detrt.data.scenes.phrases import COLOR_NAMES, NOUN
from detrt.data.scenes.scene import CLASSES
from detrt.data.scenes.shapes import FILLS
from detrt.models.layers.grounding_dino import sub_sentences

SHORT_PX, LONG_PX = 240, 320  # shortest and longest edge of a resized image
MAX_TOKENS = 256
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NOUNS = (NOUN, "object", "thing")  # stand where a phrase names no shape
TEXT_GAIN, VISION_BIAS, FIRST_LOGIT = 0.15, -0.1, -4.6
PADDED_LOGIT = -20.0  # of tokens that are padding; the stock class has -inf, whose loss is NaN

PREPROCESSOR = {
    "image_processor_type": "GroundingDinoImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": SHORT_PX, "longest_edge": LONG_PX},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": list(MEAN),
    "image_std": list(STD),
    "do_pad": True,
    "do_convert_annotations": True,
    "format": "coco_detection",
}


def vocabulary() -> dict[str, int]:
    """Word pieces to ids.

    The ids of BERT where the stock class relies on them: [PAD] 0, [UNK] 100, [CLS] 101, [SEP] 102,
    [MASK] 103, and from 999 the printable ASCII characters without capitals in their own order, so
    that "." is 1012 and "?" is 1029. Then the words of the scenes, and the characters as they stand
    inside a word, so that any ASCII word can be written.
    """
    special = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
    characters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    shapes = [word for name in CLASSES for word in name.lower().split()]
    words = [*COLOR_NAMES, *FILLS, *shapes, *NOUNS, "an", "the"]
    inner = [f"##{c}" for c in string.ascii_lowercase + string.digits]
    later = list(dict.fromkeys([*characters, *words, *inner]))
    table = special | {piece: 999 + k for k, piece in enumerate(later)}
    taken = set(table.values())
    unused = (k for k in range(max(taken)) if k not in taken)
    table |= {f"[unused{i}]": k for i, k in enumerate(unused)}
    if (table["."], table["?"]) != (1012, 1029):
        raise RuntimeError(f"'.' is {table['.']} and '?' is {table['?']} in the vocabulary, not 1012 and 1029")
    return dict(sorted(table.items(), key=lambda item: item[1]))


def build_tokenizer() -> Tokenizer:
    """BERT's pipeline (lower case, WordPiece, [CLS] prompt [SEP]) over :func:`vocabulary`."""
    table = vocabulary()
    tokenizer = Tokenizer(WordPiece(table, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", table["[CLS]"]), ("[SEP]", table["[SEP]"])],
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return tokenizer


def phrases_config() -> GroundingDinoConfig:
    """Configuration of the prompted demo detector: 100 queries, three encoder and decoder layers.

    No dropout anywhere: the scenes never repeat, and evaluation and training mode are the same.
    """
    backbone = SwinConfig(
        image_size=LONG_PX,
        embed_dim=32,
        depths=[1, 2, 4, 2],
        num_heads=[2, 4, 8, 16],
        window_size=4,  # 16 tokens: rows of attention that tensor cores take as they are
        drop_path_rate=0.0,
    )
    backbone.out_indices = [2, 3, 4]
    text = BertConfig(
        vocab_size=max(vocabulary().values()) + 1,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=MAX_TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return GroundingDinoConfig(
        backbone_config=backbone,
        text_config=text,
        num_queries=100,
        d_model=128,
        encoder_layers=3,
        encoder_ffn_dim=512,
        encoder_attention_heads=8,
        decoder_layers=3,
        decoder_ffn_dim=512,
        decoder_attention_heads=8,
        encoder_n_points=2,
        dropout=0.0,
        fusion_droppath=0.0,
        max_text_len=MAX_TOKENS,
        disable_custom_kernels=True,
    )


def build_model(seed: int) -> GroundingDinoForObjectDetection:
    """A new model with weights that train from scratch in minutes.

    The class's own initial values are for pretrained towers: logits, which are plain dot products of
    two normalised vectors, start at +-11, and the gates between text and image at 1e-4. Here the
    text's last norm starts small, a constant in both norms gives every logit the bias of a rare
    object, and the gates are open enough to learn at once.
    """
    torch.manual_seed(seed)
    model = GroundingDinoForObjectDetection(phrases_config())
    core = model.model
    for layer in core.encoder.layers:
        nn.init.constant_(layer.fusion_layer.vision_param, 0.2)
        nn.init.constant_(layer.fusion_layer.text_param, 0.2)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not any(
            part in name for part in ("sampling_offsets", "attention_weights", "bbox_embed")
        ):
            nn.init.xavier_uniform_(module.weight)
    # Padding is zero: without a bias, norm after norm of an all-zero vector multiplies its gradient by 300.
    embeddings = core.backbone.conv_encoder.model.swin.embeddings
    nn.init.normal_(embeddings.patch_embeddings.projection.bias, std=0.5)
    last_text = core.encoder.layers[-1].text_enhancer_layer.layer_norm_after
    nn.init.constant_(last_text.weight, TEXT_GAIN)
    nn.init.constant_(last_text.bias, FIRST_LOGIT / (VISION_BIAS * core.config.d_model))
    for norm in (core.decoder.layer_norm, core.enc_output_norm):
        nn.init.constant_(norm.bias, VISION_BIAS)
    with torch.no_grad():
        for layer in core.decoder.layers:
            layer.encoder_attn_text.key.weight.mul_(0.5 / TEXT_GAIN)
            layer.encoder_attn_text.value.weight.mul_(0.5 / TEXT_GAIN)
    nn.init.normal_(core.query_position_embeddings.weight)
    for head in (core.encoder_output_bbox_embed, *model.bbox_embed):
        for linear in head.layers[:-1]:
            nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(head.layers[-1].weight)
        nn.init.zeros_(head.layers[-1].bias)
    return model.eval()


class _ToBfloat16(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)


def keep_bf16(model: GroundingDinoForObjectDetection) -> None:
    """Let backbone and encoder hand bfloat16 on from layer to layer on a GPU.

    Autocast computes norms in float32 and casts around each of them, which is a fifth of a step. The
    weights stay float32, and `forward` widens what leaves the encoder.
    """

    def norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            weight, bias = module.weight.to(x.dtype), module.bias.to(x.dtype)
            return nn.functional.layer_norm(x, module.normalized_shape, weight, bias, module.eps)

    for part in (model.model.backbone, model.model.encoder):
        for module in part.modules():
            if isinstance(module, nn.LayerNorm):
                module.forward = functools.partial(norm, module)  # type: ignore[method-assign]
    for layer in model.model.encoder.layers:
        layer.fusion_layer.drop_path = _ToBfloat16()  # its gates are float32 and would widen the sum


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a training step needs; L decoder layers, N encoder positions, T tokens, D denoising queries.

    ``logits`` (L, B, D + Q, T), ``boxes`` (L, B, D + Q, 4), ``encoder_logits`` (B, N, T) and
    ``encoder_boxes`` (B, N, 4); ``states`` (L, B, D + Q, C) and ``proposals`` (B, N, C) are the features
    behind them; boxes are (cx, cy, w, h) in 0..1 of the image without padding,
    logits of padding tokens are :data:`PADDED_LOGIT`. All float32.
    """

    logits: Tensor
    boxes: Tensor
    encoder_logits: Tensor
    encoder_boxes: Tensor
    states: Tensor
    proposals: Tensor


@functools.lru_cache
def _grids(shapes: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Heights and widths (L, 2) of the levels and where each begins, (L,); a new one waits for the GPU."""
    sizes = torch.tensor(shapes)
    return sizes.to(device), torch.cat([sizes.new_zeros(1), sizes.prod(1).cumsum(0)[:-1]]).to(device)


@contextlib.contextmanager
def _queries(config: GroundingDinoConfig, count: int) -> Iterator[None]:
    """The decoder reads the number of queries from the config to shape its text mask."""
    held = config.num_queries
    config.num_queries = count
    try:
        yield
    finally:
        config.num_queries = held


def forward(
    model: GroundingDinoForObjectDetection,
    pixels: Tensor,
    mask: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor,
    noised: Tensor | None = None,
    hidden: Tensor | None = None,
) -> Outputs:
    """One pass through the submodules of the stock class.

    ``pixels`` (B, 3, H, W) normalised float32, ``mask`` (B, H, W) int64 with 1 for image,
    ``input_ids`` and ``attention_mask`` (B, T) int64. ``noised`` (B, D, 4) boxes are decoded in front
    of the model's own queries, each from a random one of the learned queries; ``hidden`` (D + Q, D + Q)
    bool says which query may not look at which. On a GPU backbone and encoder compute in bfloat16;
    everything that touches box coordinates stays in float32.
    """
    core, config = model.model, model.config
    token_mask = attention_mask.bool()
    with torch.autocast(pixels.device.type, torch.bfloat16, enabled=pixels.is_cuda):
        see, positions = sub_sentences(input_ids, core.special_tokens)
        kinds = torch.zeros_like(input_ids)
        text = core.text_backbone(input_ids, see[:, None], kinds, positions).last_hidden_state
        text = core.text_projection(text)
        features, places = core.backbone(pixels, mask)
        maps = [core.input_proj_vision[k](x) for k, (x, _) in enumerate(features)]
        masks = [m for _, m in features]
        for k in range(len(maps), config.num_feature_levels):
            maps.append(core.input_proj_vision[k](features[-1][0] if k == len(features) else maps[-1]))
            small = nn.functional.interpolate(mask[None].float(), size=maps[-1].shape[-2:]).to(torch.bool)[0]
            masks.append(small)
            places.append(core.backbone.position_embedding(maps[-1], small))
        shapes = [(int(x.shape[-2]), int(x.shape[-1])) for x in maps]
        kind = torch.bfloat16 if pixels.is_cuda else torch.float32
        flat = torch.cat([x.flatten(2).transpose(1, 2) for x in maps], 1).to(kind)
        flat_mask = torch.cat([m.flatten(1) for m in masks], 1)
        place = torch.cat([p.flatten(2).transpose(1, 2) + core.level_embed[k] for k, p in enumerate(places)], 1).to(kind)
        sizes, starts = _grids(tuple(shapes), pixels.device)
        ratios = torch.stack([core.get_valid_ratio(m) for m in masks], 1)
        encoded = core.encoder(
            vision_features=flat,
            vision_attention_mask=~flat_mask,
            vision_position_embedding=place,
            spatial_shapes=sizes,
            spatial_shapes_list=shapes,
            level_start_index=starts,
            valid_ratios=ratios,
            text_features=text,
            text_attention_mask=~token_mask,
            text_self_attention_masks=~see,
            text_position_ids=positions,
        )
    vision, words = encoded.last_hidden_state_vision.float(), encoded.last_hidden_state_text.float()

    def classify(states: Tensor) -> Tensor:
        return (states @ words.transpose(-1, -2)).masked_fill(~token_mask[:, None], PADDED_LOGIT)

    proposals, anchors = core.generate_encoder_output_proposals(vision, ~flat_mask, shapes)
    encoder_logits = classify(proposals)
    encoder_boxes = (core.encoder_output_bbox_embed(proposals) + anchors).sigmoid()
    best = encoder_logits.max(-1)[0].topk(config.num_queries, dim=1)[1]
    reference = encoder_boxes.detach().gather(1, best[..., None].expand(-1, -1, 4))
    content = core.query_position_embeddings.weight
    target = content[None].expand(len(pixels), -1, -1)
    if noised is not None:
        pick = torch.randint(len(content), noised.shape[:2], device=pixels.device)
        target = torch.cat([content[pick], target], 1)
        reference = torch.cat([noised, reference], 1)
    forbidden = None if hidden is None else hidden * -1e9
    with _queries(config, target.shape[1]):
        decoded = core.decoder(
            inputs_embeds=target,
            vision_encoder_hidden_states=vision,
            vision_encoder_attention_mask=flat_mask,
            text_encoder_hidden_states=words,
            text_encoder_attention_mask=~token_mask,
            reference_points=reference,
            spatial_shapes=sizes,
            spatial_shapes_list=shapes,
            level_start_index=starts,
            valid_ratios=ratios,
            self_attn_mask=forbidden,
        )
    logits, boxes = [], []
    for k in range(config.decoder_layers):
        states = decoded.intermediate_hidden_states[:, k]
        logits.append(classify(states))
        boxes.append((model.bbox_embed[k](states) + torch.special.logit(reference, eps=1e-5)).sigmoid())
        reference = decoded.intermediate_reference_points[:, k]
    states = decoded.intermediate_hidden_states.transpose(0, 1)
    return Outputs(torch.stack(logits), torch.stack(boxes), encoder_logits, encoder_boxes, states, proposals)


def save_model(state: dict[str, Tensor], config: GroundingDinoConfig, folder: str | os.PathLike[str]) -> Path:
    """Write config, preprocessor, tokenizer and weights so that ``from_pretrained`` loads them; see `write_model`."""
    tied = ("model.decoder.bbox_embed.", *(f"bbox_embed.{k}." for k in range(1, 10)))  # to bbox_embed.0
    described = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": MAX_TOKENS}
    described |= {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    config.architectures = ["GroundingDinoForObjectDetection"]
    folder = write_model(state, config, folder, tied, {"preprocessor_config": PREPROCESSOR, "tokenizer_config": described})
    build_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
