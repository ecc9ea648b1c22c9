"""The text part of a prompted checkpoint: its spec, its tokenizer, and what its loader must set right."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import SourceError
from ..spec import DecodeSpec, InputSpec, ModelSpec, TextSpec
from . import tokenizer as tokenizers
from .families import Family

if TYPE_CHECKING:
    from torch import nn

# Names that one run of a model with a list of classes takes; its head has no limit of its own.
MOST_CLASSES = 1000
# What ends a phrase or frames a prompt (the paper's section 3.4, and both published implementations).
SEPARATORS = ("[CLS]", "[SEP]", ".", "?")


def with_boolean_masks(module: nn.Module) -> None:
    """Give BERT an attention that understands masks of True and False, in place.

    Grounding DINO hands it such a mask. transformers' "eager" attention adds it as 1 and 0 and so hides
    nothing; "sdpa" hides what is False, as the authors' code does.
    """
    text: Any = getattr(getattr(module, "model", None), "text_backbone", None)
    if text is not None:
        text.set_attn_implementation("sdpa")


def text_spec(family: Family, module: nn.Module, input_spec: InputSpec, tokenizer: bytes, ref: str) -> ModelSpec:
    """ModelSpec of a prompted model; `labels` is empty.

    Raises:
        SourceError: a tokenizer that is not this model's.
    """
    config: Any = module.config
    vocabulary, size = tokenizers.facts(tokenizer)
    rows = int(config.text_config.vocab_size)
    if size > rows:
        raise SourceError(
            f"the tokenizer of '{ref}' has {size} ids, and the model knows {rows}; it is another model's. "
            "Give the right one with --tokenizer FILE"
        )
    queries = int(config.num_queries)
    pad = tokenizers.pad_id(tokenizer)
    if family.text == "tokens":
        wanted = [int(i) for i in module.model.special_tokens.tolist()]  # type: ignore[union-attr]
        found = [vocabulary.get(word) for word in SEPARATORS]
        if found != wanted:
            raise SourceError(
                f"the tokenizer of '{ref}' gives {', '.join(SEPARATORS)} the ids {found}, and the model "
                f"splits prompts at {wanted}; it is another model's. Give the right one with --tokenizer FILE"
            )
        longest = min(int(config.max_text_len), int(config.text_config.max_position_embeddings))
        text = TextSpec("tokens", longest, int(config.d_model), pad, tuple(wanted))
        classes = longest
    else:
        text = TextSpec(
            "classes",
            int(config.text_config.max_position_embeddings),
            int(config.text_config.hidden_size),
            pad,
        )
        classes = MOST_CLASSES
    rule = DecodeSpec(family.activation, family.select, queries, classes, queries)
    if family.nms_iou is not None:
        rule = replace(rule, nms="nms", nms_iou=family.nms_iou)
    return ModelSpec(family.name, input_spec, rule, {}, text=text)
