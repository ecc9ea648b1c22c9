"""The text part of a prompted checkpoint: its spec, its tokenizer, and what its loader must set right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..errors import MissingPackageError, SourceError, one_line
from ..spec import DETECTION, INSTANCE_SEGMENTATION, DecodeSpec, InputSpec, ModelSpec, TextSpec
from .families import Family
from .rewrites import modeling_module

if TYPE_CHECKING:
    from torch import nn


def text_spec(family: Family, module: nn.Module, input_spec: InputSpec, tokenizer: bytes, ref: str) -> ModelSpec:
    """ModelSpec of a prompted model; `labels` is empty.

    Raises:
        SourceError: a tokenizer that is not this model's.
    """
    config: Any = module.config
    assert family.text_facts is not None
    facts = family.text_facts(config)
    vocabulary, size = words_of(tokenizer)
    rows = int(config.text_config.vocab_size)
    if size > rows:
        raise SourceError(
            f"the tokenizer of '{ref}' has {size} ids, and the model knows {rows}; it is another model's. "
            "Give the right one with `tokenizer=FILE`"
        )
    separators = [int(i) for i in modeling_module(module).SPECIAL_TOKENS] if facts.marks else []
    found = [vocabulary.get(word) for word in facts.marks]
    if found != separators:
        raise SourceError(
            f"the tokenizer of '{ref}' gives {', '.join(facts.marks)} the ids {found}, and the model "
            f"splits prompts at {separators}; it is another model's. Give the right one with `tokenizer=FILE`"
        )
    text = TextSpec(family.text, facts.max_tokens, facts.features, pad_id(tokenizer), tuple(separators))
    rule = DecodeSpec(
        family.activation,
        family.select,
        facts.queries,
        facts.most,
        facts.queries,
        nms=family.nms,
        nms_iou=family.nms_iou,
        mask_stride=facts.mask_stride,
    )
    task = INSTANCE_SEGMENTATION if facts.mask_stride else DETECTION
    return ModelSpec(family.name, input_spec, rule, {}, text=text, task=task)


# The tokenizer of a prompted checkpoint as one file of the `tokenizers` library.
_LONGEST_TOKENIZER = 256 << 20  # bytes
FILE, VOCABULARY = "tokenizer.json", "vocab.txt"

# Files of tokenizers that transformers can turn into one.
_OTHERS = ("vocab.json", "tokenizer_config.json")


def library() -> Any:
    """The `tokenizers` package.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import tokenizers
    except ImportError:
        raise MissingPackageError("tokenizers", "export", "reading a tokenizer") from None
    return tokenizers


def read_tokenizer(given: Path | str | None, folder: Path | None, ref: str) -> bytes:
    """JSON of a checkpoint's tokenizer, without truncation and padding, which belong to the runtime.

    given: the caller's tokenizer.json, vocab.txt of BERT, or folder with one of them. folder: that of the
    checkpoint.

    Raises:
        SourceError: none is there, or it is damaged.
    """
    if given is not None:
        path = Path(given).expanduser()
        if not path.exists():
            raise SourceError(f"`tokenizer='{given}'` is not there; give a {FILE}, a {VOCABULARY} or a folder with one")
        found = _in_folder(path) if path.is_dir() else path
        if found is None:
            raise SourceError(f"`tokenizer='{given}'`: the folder has no {FILE} and no {VOCABULARY}")
        return _checked(found)
    found = _in_folder(folder) if folder is not None else None
    if found is not None:
        return _checked(found)
    if folder is not None and any((folder / name).is_file() for name in _OTHERS):
        return _from_transformers(folder, ref)
    raise SourceError(
        f"'{ref}' comes without its tokenizer, and cannot read a prompt; give the one it was trained with: "
        f"`tokenizer=FILE` (a {FILE} or a {VOCABULARY}; for Grounding DINO that of "
        "google-bert/bert-base-uncased)"
    )


def _in_folder(folder: Path) -> Path | None:
    return next((folder / name for name in (FILE, VOCABULARY) if (folder / name).is_file()), None)


def _checked(path: Path) -> bytes:
    text = files.read_text(path, "tokenizer", SourceError, most=_LONGEST_TOKENIZER)
    if path.suffix == ".txt":
        return _plain(_bert(files.lines_of(text), path))
    try:
        return _plain(library().Tokenizer.from_str(text))
    except Exception as error:  # the library raises bare Exceptions
        what = one_line(error, 200)
        raise SourceError(f"'{path}' is not a file of the tokenizers library: {what}; give a {FILE} or a {VOCABULARY}") from None


def _from_transformers(folder: Path, ref: str) -> bytes:
    from transformers import AutoTokenizer

    try:
        return _plain(AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer)
    except Exception as error:  # tokenizer code raises what it likes
        what = one_line(error, 200)
        raise SourceError(f"the tokenizer of '{ref}' cannot be read: {what}; give one with `tokenizer=FILE`") from None


def _plain(tokenizer: Any) -> bytes:
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer.to_str().encode()


def _bert(words: Sequence[str], path: Path | str) -> Any:
    vocabulary = {word: index for index, word in enumerate(words) if word}
    missing = [word for word in ("[UNK]", "[CLS]", "[SEP]") if word not in vocabulary]
    if missing:
        raise SourceError(f"'{path}' is not a vocabulary of BERT: it has no {', '.join(missing)}")
    return bert_tokenizer(vocabulary)


def bert_tokenizer(vocabulary: dict[str, int]) -> Any:
    """An uncased WordPiece tokenizer that frames a text with [CLS] and [SEP] (arXiv:1810.04805)."""
    tokenizers = library()
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    made.add_special_tokens([name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if name in vocabulary])
    return made


def words_of(tokenizer: bytes) -> tuple[dict[str, int], int]:
    """(word -> id, number of ids) of a tokenizer file."""
    made = library().Tokenizer.from_str(tokenizer.decode())
    vocabulary = made.get_vocab(with_added_tokens=True)
    return vocabulary, max(vocabulary.values(), default=-1) + 1


def pad_id(tokenizer: bytes) -> int:
    """The id that fills a batch up: of "[PAD]", else of CLIP's end token, else 0."""
    vocabulary, _ = words_of(tokenizer)
    return next((vocabulary[name] for name in ("[PAD]", "<pad>", "<|endoftext|>") if name in vocabulary), 0)
