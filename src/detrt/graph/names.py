"""Module paths in node names. Needs no onnx."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

# The leaf of a node's name: an operator, perhaps numbered ("MatMul_3", "Unsqueeze.2").
_LEAF = re.compile(r"^/?(.*)/[^/]+$")


def module_path(name: str) -> str:
    """ "/model/encoder/layers.0/self_attn/MatMul" -> "model.encoder.layers.0.self_attn"; "" at the top.

    A trace writes the members of a Sequential as "layer/layer.0"; the checkpoint's key is "layer.0".
    """
    match = _LEAF.match(name) if name.startswith("/") else None
    parts = match[1].strip("/").split("/") if match else []
    shown = [
        part
        for i, part in enumerate(parts)
        if i + 1 == len(parts) or not re.match(re.escape(part) + r"\.\d+(_\d+)?$", parts[i + 1])
    ]
    return ".".join(shown)


def matches(node: str, patterns: Iterable[str]) -> bool:
    """Whether a node is inside a module path, or matches a glob pattern over its path."""
    full = node.strip("/").replace("/", ".")
    # A trace writes the names of a Sequential twice; either spelling is right.
    paths = {module_path("/" + node.strip("/")), full.rpartition(".")[0]}
    return any(
        fnmatch.fnmatchcase(full, p) or any(q == p or q.startswith(p + ".") or fnmatch.fnmatchcase(q, p) for q in paths)
        for p in patterns
    )
