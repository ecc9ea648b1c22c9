"""A prompt made ready for a runtime without a tokenizer: token ids, masks and text features in one JSON file.

`detrt encode-prompt` writes it, the C++ runtime reads it. It belongs to one bundle, which it names by the digests of
the tokenizer and the text tower, and holds for each part of the prompt the text inputs of the detector for one image.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..bundle import Bundle
from ..errors import PromptError
from ..spec import SCHEMA
from ..text.prompts import Prompt
from ..text.tokenizer import Asked, Part, TokenPart
from .open import open_session
from .prompted import PromptedSession


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """What `encode_prompt` wrote. parts: runs of the model for one batch; tokens: of the longest part (or names).

    unknown: phrases of which the tokenizer knows no part. size: of the file, bytes.
    """

    path: Path
    prompt: Prompt
    parts: int
    tokens: int
    unknown: tuple[str, ...]
    size: int


def encode_prompt(
    folder: str | os.PathLike, prompt: str | Sequence[str] | Prompt, path: str | os.PathLike, *, task: str = ""
) -> EncodedPrompt:
    """Tokenise a prompt for a bundle, run its text tower on the CPU, and write the file for the C++ runtime.

    prompt: phrases with a dot behind each, or a list of class names.

    Raises:
        PromptError: a bundle of fixed classes, or a prompt that its model cannot take.
        SpecError: no bundle. OutputError: the path cannot be written.
    """
    bundle = Bundle.open(folder)
    if bundle.spec.text is None:
        raise PromptError(f"'{bundle.folder}' has fixed classes and takes no prompt; choose among them with --classes")
    files.check_place(path)
    with open_session(folder, backend="onnxruntime") as session:
        assert isinstance(session, PromptedSession)
        asked = session.ask(prompt, task)
        data = encoded(session, asked, bundle)
    text = json.dumps(data, ensure_ascii=False) + "\n"
    files.write_text(path, text)
    longest = max(part.length for part in asked.parts)
    return EncodedPrompt(Path(path), asked.prompt, len(asked.parts), longest, asked.unknown, len(text.encode("utf-8")))


def encoded(session: PromptedSession, asked: Asked, bundle: Bundle) -> dict[str, Any]:
    """The JSON form of a prompt; `feeds` are those of a batch of one image."""
    assert bundle.spec.text is not None
    return {
        "schema": SCHEMA,
        "kind": bundle.spec.text.kind,
        "tokenizer_sha256": _digest(bundle, "tokenizer", bundle.spec.text.tokenizer),
        "tower_sha256": _digest(bundle, "text", bundle.spec.text.tower),
        "prompt": asked.prompt.text,
        "listed": asked.prompt.listed,
        "num_classes": asked.prompt.num_classes,
        "parts": [_part(session, part) for part in asked.parts],
    }


def _part(session: PromptedSession, part: Part) -> dict[str, Any]:
    phrases = [
        {"text": phrase.text, "class_id": class_id, "start": phrase.start, "end": phrase.end}
        for phrase, class_id in zip(part.prompt.phrases, part.prompt.class_ids, strict=True)
    ]
    feeds = {name: _tensor(array) for name, array in session.text_feeds([part]).items()}
    data: dict[str, Any] = {"phrases": phrases, "length": part.length, "feeds": feeds}
    if isinstance(part, TokenPart):
        data["phrase_mask"] = [np.flatnonzero(row).tolist() for row in part.phrase_mask]
    return data


def _tensor(array: NDArray) -> dict[str, Any]:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": base64.b64encode(little.tobytes()).decode("ascii")}


def _digest(bundle: Bundle, kind: str, name: str) -> str:
    """Digest of a file that the model needs; "" where a model of one graph has none."""
    named = [entry for entry in bundle.of_kind(kind) if entry.path == name]
    return (named or bundle.of_kind(kind))[0].sha256 if bundle.of_kind(kind) else ""
