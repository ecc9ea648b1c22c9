"""Checkpoint folders as a training script leaves them: model, image processor and tokenizer, each by its own `save_pretrained`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any


def image_processor(source, **settings: Any):
    """transformers' own image processor for a Source; None for RF-DETR without torchvision, which its class needs."""
    import transformers

    kind = getattr(transformers, f"{source.family.processor.name}ImageProcessorPil", None)
    if kind is None and importlib.util.find_spec("torchvision") is not None:
        kind = getattr(transformers, f"{source.family.processor.name}ImageProcessor")
    return None if kind is None else kind(**{**own_settings(source), **settings})


def own_settings(source) -> dict[str, Any]:
    """Settings that give the preprocessing of a Source."""
    entry = source.spec.input
    if entry.resize == "shortest_edge":
        size = {"shortest_edge": entry.shortest_edge, "longest_edge": entry.longest_edge}
    else:
        size = {"height": entry.height, "width": entry.width}
    pad = {"do_pad": True} if source.family.processor.square or source.family.processor.one_size else {}
    return {"size": size, "do_normalize": any(entry.mean), **pad}


def save_folder(source, folder: Path, settings: dict[str, Any] | None = None, **saving: Any) -> Path:
    """Save a Source's model and its image processor. settings: of the processor; saving: options of the model's `save_pretrained`."""
    source.module.save_pretrained(folder, **saving)
    if source.tokenizer is not None:
        (folder / "tokenizer.json").write_bytes(source.tokenizer)
    save_processor(source, folder, **(settings or {}))
    return folder


def save_processor(source, folder: Path, **settings: Any) -> None:
    processor = image_processor(source, **settings)
    if processor is not None:
        processor.save_pretrained(folder)
        return
    data = {"image_processor_type": f"{source.family.processor.name}ImageProcessor", **own_settings(source), **settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(data))
