"""JSON schemas of detrt's files, from the dataclasses that read them. `python tests/support/json_schemas.py` writes them."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from detrt.bundle import BundleFile, EngineFacts, Provenance
from detrt.graph.layouts import LAYOUTS
from detrt.models.families import BY_NAME
from detrt.models.foreign import FAMILY_DEFAULT, OnnxSidecar
from detrt.spec import (
    ACTIVATIONS,
    DTYPES,
    READING_ORDERS,
    RESAMPLES,
    RESIZE_MODES,
    SCHEMA,
    SELECTIONS,
    SUPPRESSIONS,
    TASKS,
    DecodeSpec,
    InputSpec,
    ModelSpec,
    TextSpec,
)  # fmt: skip
from detrt.text.kinds import KINDS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference" / "schemas"
BASE = "https://json-schema.org/draft/2020-12/schema"
# Values that a field may have, where its type does not say it.
ALLOWED: dict[tuple[type, str], tuple[str, ...]] = {
    (InputSpec, "resize"): RESIZE_MODES,
    (InputSpec, "resample"): RESAMPLES,
    (InputSpec, "dtype"): DTYPES,
    (DecodeSpec, "activation"): ACTIVATIONS,
    (DecodeSpec, "select"): SELECTIONS,
    (DecodeSpec, "nms"): SUPPRESSIONS,
    (DecodeSpec, "reading_order"): READING_ORDERS,
    (TextSpec, "kind"): tuple(KINDS),
    (ModelSpec, "task"): TASKS,
    (OnnxSidecar, "layout"): tuple(LAYOUTS),
    (OnnxSidecar, "family"): tuple(BY_NAME),
    (OnnxSidecar, "preprocess"): (FAMILY_DEFAULT,),
    (OnnxSidecar, "resample"): RESAMPLES,
}
PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"}, int: {"type": "integer"}, float: {"type": "number"}, bool: {"type": "boolean"},
    type(None): {"type": "null"}, Any: {},
}  # fmt: skip


def of_type(hint: Any) -> dict[str, Any]:
    """The schema of a type hint."""
    if hint in PLAIN:
        return PLAIN[hint]
    if is_dataclass(hint):
        return of_class(hint)
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return {"anyOf": [of_type(one) for one in arguments]}
    if kind is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": of_type(arguments[0])}
    if kind is tuple:
        return {"type": "array", "items": of_type(arguments[0]), "minItems": len(arguments), "maxItems": len(arguments)}
    if kind is list:
        return {"type": "array", "items": of_type(arguments[0])}
    assert kind is Mapping, hint
    inner = of_type(arguments[1])
    if arguments[0] is int:  # JSON has text as keys
        return {"type": "object", "propertyNames": {"pattern": "^[0-9]+$"}, "additionalProperties": inner}
    return {"type": "object", "additionalProperties": inner}


def of_class(kind: type, **more: Any) -> dict[str, Any]:
    """The schema of a dataclass. more: properties that the file has beside its fields; all are required."""
    hints = get_type_hints(kind)
    properties = dict(more)
    for one in fields(kind):
        schema = of_type(hints[one.name])
        if allowed := ALLOWED.get((kind, one.name)):
            optional = type(None) in get_args(hints[one.name])
            schema = {"enum": [*allowed, *([None] if optional else [])]}
        properties[one.name] = schema
    needed = [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]
    return {"type": "object", "properties": properties, "required": [*more, *needed], "additionalProperties": False}


def schemas() -> dict[str, dict[str, Any]]:
    """File name -> schema."""
    version = {"const": SCHEMA}
    spec = of_class(ModelSpec, schema=version)
    digest = {"sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"}, "size": {"type": "integer"}}

    def whole(**properties: Any) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}

    files = {"type": "array", "items": of_class(BundleFile)}
    found = {
        "spec": ("The spec of a model", spec),
        "bundle": (
            "detrt.json, the manifest of a bundle",
            whole(schema=version, spec=spec, provenance=of_class(Provenance), files=files),
        ),
        "engine": (
            "Sidecar of an engine or of a compiled package",
            whole(schema=version, spec=spec, engine=of_class(EngineFacts), **digest),
        ),
        "onnx-sidecar": ("Sidecar of an ONNX file of another exporter", of_class(OnnxSidecar)),
    }
    return {f"{name}.schema.json": {"$schema": BASE, "title": title, **schema} for name, (title, schema) in found.items()}


def text(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (FOLDER / name).write_text(text(schema), "utf-8")
    sys.exit(0)
