"""Random-weight prompted models with a small tokenizer of their own; see `random_models`."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..bundle import Provenance
from .families import BY_NAME, Family
from .hub import refuse_text_choices, versions
from .load import Source
from .preprocessor import read_input_spec
from .random_weights import SEED, keep_variance, spread_variances
from .text import text_spec, with_boolean_masks
from .tokenizer import bert_tokenizer, library, read_tokenizer

# Where BERT's uncased vocabulary has its framing tokens and its printable ASCII.
_FRAME = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
_PLACES = (
    (999, "!\"#$%&'()*+,-./"),
    (1014, "0123456789:;<=>?@"),
    (1031, "[\\]^_`"),
    (1037, "abcdefghijklmnopqrstuvwxyz{|}~"),
)
_WORDS = (
    *(
        "a",
        "an",
        "the",
        "of",
        "and",
        "with",
        "in",
        "on",
        "red",
        "green",
        "blue",
        "yellow",
        "orange",
        "purple",
        "black",
    ),
    *(
        "white",
        "grey",
        "circle",
        "square",
        "triangle",
        "star",
        "striped",
        "dotted",
        "person",
        "cat",
        "dog",
        "car",
        "bus",
    ),
    *(
        "bicycle",
        "remote",
        "control",
        "chair",
        "table",
        "bottle",
        "cup",
        "book",
        "phone",
        "tree",
        "detect",
        "left",
        "right",
    ),
)
TINY_VOCABULARY = 1200
_SWIN_T = {"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "window_size": 7}
_SWIN_B = {
    "embed_dim": 128,
    "depths": [2, 2, 18, 2],
    "num_heads": [4, 8, 16, 32],
    "window_size": 12,
    "image_size": 384,
}
_LEVELS = {"model_type": "swin", "out_features": ["stage2", "stage3", "stage4"]}
_TINY_SWIN = {**_LEVELS, "embed_dim": 16, "depths": [2, 2, 2, 2], "num_heads": [1, 2, 4, 8], "window_size": 4}
_BERT = {"model_type": "bert"}
_TINY_BERT = {
    **{"model_type": "bert", "vocab_size": TINY_VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "intermediate_size": 48},
}
_TINY_GROUNDING = {
    **{"backbone_config": _TINY_SWIN, "text_config": _TINY_BERT, "d_model": 32, "num_queries": 20},
    **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64},
    **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
}


def _clip(size: int, **settings: int) -> dict[str, Any]:
    # The last two ids begin and end a text.
    ends = {"bos_token_id": size - 2, "eos_token_id": size - 1, "pad_token_id": size - 1}
    return {"model_type": "clip_text_model", "vocab_size": size, **ends, **settings}


# name -> (family, full-size settings, tiny settings on top of them)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grounding_dino": (
        "grounding_dino",
        {"backbone_config": {**_LEVELS, **_SWIN_T}, "text_config": _BERT},
        _TINY_GROUNDING,
    ),
    "grounding_dino-swin-b": (
        "grounding_dino",
        {"backbone_config": {**_LEVELS, **_SWIN_B}, "text_config": _BERT},
        {**_TINY_GROUNDING, "backbone_config": {**_TINY_SWIN, "window_size": 6}},
    ),
    "mm_grounding_dino": (
        "mm_grounding_dino",
        {"backbone_config": {**_LEVELS, **_SWIN_T}, "text_config": _BERT},
        _TINY_GROUNDING,
    ),
    "omdet_turbo": (
        "omdet_turbo",
        {
            "backbone_config": {**_LEVELS, **_SWIN_T, "image_size": 640},
            "text_config": _clip(49408),
            "apply_layernorm_after_vision_backbone": False,
        },
        {
            "backbone_config": _TINY_SWIN,
            "text_config": _clip(
                TINY_VOCABULARY,
                hidden_size=24,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                projection_dim=24,
            ),
            **{"d_model": 32, "decoder_hidden_dim": 32, "vision_features_channels": [32, 32, 32]},
            **{
                "encoder_in_channels": [32, 64, 128],
                "encoder_dim_feedforward": 48,
                "encoder_attention_heads": 4,
            },
            **{
                "decoder_dim_feedforward": 48,
                "decoder_num_layers": 2,
                "decoder_num_heads": 4,
                "num_queries": 20,
            },
            **{"text_projection_in_dim": 24, "text_projection_out_dim": 24, "class_embed_dim": 24},
            "task_encoder_hidden_dim": 40,
        },
    ),
}


def load_random_text(ref: str, *, labels: Path | str | None = None, tokenizer: Path | str | None = None) -> Source:
    """A Source for `random:<name>` or `random:<name>/tiny` with a name of `MODELS`."""
    name, _, size = ref.removeprefix("random:").partition("/")
    family_name, full, tiny = MODELS[name]
    family = BY_NAME[family_name]
    refuse_text_choices(family, labels, None)
    settings = {**deepcopy(full), **(deepcopy(tiny) if size == "tiny" else {})}
    words = read_tokenizer(tokenizer, None, ref) if tokenizer is not None else small_tokenizer(family, settings["text_config"])
    module = build(family, settings, settle=size != "tiny")
    spec = text_spec(family, module, read_input_spec(Path("."), family, module.config), words, ref)
    provenance = Provenance(ref, "", sum(p.numel() for p in module.parameters()), versions=versions())
    title = ref.removeprefix("random:").replace("/", "-")
    return Source(module, replace(spec, name=title), family, provenance, tokenizer=words)


def small_tokenizer(family: Family, text_config: dict[str, Any]) -> bytes:
    """A tokenizer of some words, and of letters and digits for all others, as a file.

    WordPiece with BERT's ids for what frames and separates phrases, so that code with those ids agrees; for
    CLIP the same words between its own two tokens.
    """
    vocabulary = dict(_FRAME)
    vocabulary |= {letter: start + i for start, letters in _PLACES for i, letter in enumerate(letters)}
    free = iter(i for i in range(1, TINY_VOCABULARY) if i not in vocabulary.values())
    for letters in ("abcdefghijklmnopqrstuvwxyz0123456789",):
        vocabulary |= {f"##{letter}": next(free) for letter in letters}
    vocabulary |= {word: next(free) for word in _WORDS if word not in vocabulary}
    made = bert_tokenizer(vocabulary)
    if family.text == "classes":
        processors = library().processors
        ends = [
            ("<|startoftext|>", text_config["bos_token_id"]),
            ("<|endoftext|>", text_config["eos_token_id"]),
        ]
        model = library().models.WordPiece(vocabulary | dict(ends), unk_token="[UNK]")
        made = library().Tokenizer(model)
        made.normalizer, made.pre_tokenizer = _bert_parts()
        made.post_processor = processors.TemplateProcessing(single="<|startoftext|> $A <|endoftext|>", special_tokens=ends)
        made.add_special_tokens([name for name, _ in ends])
    return made.to_str().encode()


def _bert_parts() -> tuple[Any, Any]:
    return library().normalizers.BertNormalizer(lowercase=True), library().pre_tokenizers.BertPreTokenizer()


def build(family: Family, settings: dict[str, Any], *, settle: bool = False) -> torch.nn.Module:
    """The family's transformers class with seeded weights, float32, eval mode.

    settle: boxes and samples move by little in each layer, as in trained models; see `random_models.build`.
    """
    from transformers import CONFIG_MAPPING, AutoModelForZeroShotObjectDetection

    settings = dict(settings)
    for part in ("backbone_config", "text_config"):
        given = dict(settings[part])
        settings[part] = CONFIG_MAPPING[given.pop("model_type")](**given)
    config = CONFIG_MAPPING[family.model_type](**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = AutoModelForZeroShotObjectDetection.from_config(config, dtype=torch.float32, attn_implementation="eager")
        generator = torch.Generator().manual_seed(SEED)
        keep_variance(module, generator)
        for name, parameter in module.named_parameters():
            moves = "bbox" in name or "sampling_offsets" in name
            if moves and settle and parameter.ndim == 2:
                parameter.data *= 0.2
            elif name.endswith(("_param", "text_projection")):
                # Fusion is scaled by 1e-4 at the start of training, and the projection may be empty memory.
                parameter.data.normal_(0, 0.5 if parameter.ndim == 1 else parameter.shape[0] ** -0.5, generator=generator)
            elif (parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())) or moves:
                parameter.data += torch.empty_like(parameter).normal_(0, 0.05, generator=generator)
        spread_variances(module, generator)
    with_boolean_masks(module)
    return module.eval().requires_grad_(False)
