"""An encoded prompt for a runtime without a tokenizer: token ids, masks and text features in one JSON file.

`detrt encode-prompt` writes it, the C++ runtime reads it. It belongs to one bundle, which it names by the digests of
the tokenizer and the text encoder, and holds for each chunk of the prompt the text inputs of the detector for one image.
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
from ..text.kinds import Chunk, EncodedPrompt
from ..text.prompts import Prompt
from .base import no_prompt
from .open import open_prompted
from .prompted import PromptedSession
from .targets import GRAPH


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The file that `encode_prompt` wrote.

    Attributes:
        chunks: runs of the model for one batch. tokens: of the longest chunk, or where each name is encoded alone its names.
        unknown: phrases whose tokens are all unknown to the tokenizer. size: of the file, in bytes.
    """

    path: Path
    prompt: Prompt
    chunks: int
    tokens: int
    unknown: tuple[str, ...]
    size: int


def encode_prompt(
    folder: str | os.PathLike, prompt: str | Sequence[str] | Prompt, path: str | os.PathLike, *, task: str = ""
) -> PromptFile:
    """Tokenise a prompt for a bundle, run its text encoder on the CPU, and write the file for the C++ runtime.

    prompt: phrases with a dot behind each, or a list of class names.

    Raises:
        PromptError: a bundle of fixed classes, or a prompt that its model cannot take.
        SpecError: no bundle. OutputError: the path cannot be written.
    """
    bundle = Bundle.open(folder)
    if bundle.spec.text is None:
        raise no_prompt(f"'{bundle.folder}'")
    if not bundle.spec.text.prompt_kind.native:
        raise PromptError(
            f"'{bundle.folder}' is of family {bundle.spec.family}, which the C++ runtime does not run; use detrt detect"
        )
    files.check_place(path)
    with open_prompted(folder, backend=GRAPH.name) as session:
        encoded = session.encode(prompt, task)
        data = to_json(session, encoded, bundle)
    text = json.dumps(data, ensure_ascii=False) + "\n"
    files.write_text(path, text)
    longest = max(chunk.length for chunk in encoded.chunks)
    return PromptFile(Path(path), encoded.prompt, len(encoded.chunks), longest, encoded.unknown, len(text.encode("utf-8")))


def to_json(session: PromptedSession, encoded: EncodedPrompt, bundle: Bundle) -> dict[str, Any]:
    """The JSON form of a prompt; `feeds` are those of a batch of one image."""
    assert bundle.spec.text is not None
    return {
        "schema": SCHEMA,
        "kind": bundle.spec.text.kind,
        "tokenizer_sha256": _digest(bundle, "tokenizer", bundle.spec.text.tokenizer),
        "tower_sha256": _digest(bundle, "text", bundle.spec.text.encoder),
        "prompt": encoded.prompt.text,
        "listed": encoded.prompt.listed,
        "num_classes": encoded.prompt.num_classes,
        "parts": [_chunk(session, chunk) for chunk in encoded.chunks],
    }


def _chunk(session: PromptedSession, chunk: Chunk) -> dict[str, Any]:
    phrases = [
        {"text": phrase.text, "class_id": class_id, "start": phrase.start, "end": phrase.end}
        for phrase, class_id in zip(chunk.prompt.phrases, chunk.prompt.class_ids, strict=True)
    ]
    feeds = {name: _tensor(array) for name, array in session.text_feeds([chunk]).items()}
    return {"phrases": phrases, "length": chunk.length, "feeds": feeds, **chunk.to_json()}


def _tensor(array: NDArray) -> dict[str, Any]:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": base64.b64encode(little.tobytes()).decode("ascii")}


def _digest(bundle: Bundle, kind: str, name: str) -> str:
    """Digest of a file that the model needs; "" where a model of one graph has none."""
    named = [entry for entry in bundle.of_kind(kind) if entry.path == name]
    return (named or bundle.of_kind(kind))[0].sha256 if bundle.of_kind(kind) else ""
