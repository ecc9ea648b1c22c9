"""What the OpenAPI document says beyond what FastAPI sees in the code: bodies in several forms, and refusals."""

from __future__ import annotations

from typing import Any

from .request import DetectBody, Options

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
        }
    },
}
_V2_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_REFUSALS = {
    400: "The request cannot be understood, or an image cannot be read.",
    401: "No API key, or a wrong one.",
    404: "No such model.",
    408: "The body came too slowly, or the deadline that the request set has passed.",
    413: "The body or an image is too large, or there are too many images.",
    415: "A form of body that the server does not read.",
    429: "Too many requests wait; Retry-After says how many seconds to wait.",
    500: "The model failed.",
    503: "The server is starting or stopping, or the workers that ran this request ended.",
    504: "The longest time for a request has passed.",
}


def refusals(*, v2: bool = False) -> dict[int | str, dict[str, Any]]:
    schema = _V2_ERROR if v2 else _ERROR
    return {
        status: {"description": text, "content": {"application/json": {"schema": schema}}} for status, text in _REFUSALS.items()
    }


_BINARY = {"schema": {"type": "string", "format": "binary"}}


def detect_operation() -> dict[str, Any]:
    """Parameters and bodies of POST /v1/detect."""
    schema = _inlined(DetectBody.model_json_schema())
    plain = _inlined(Options.model_json_schema())["properties"]
    fields = {name: _text_form(name, part) for name, part in plain.items()}
    files = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
    form = {"type": "object", "required": ["images"], "properties": {"images": files, **fields}, "additionalProperties": False}
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": part, "description": part.get("description", "")}
            for name, part in fields.items()
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": schema},
                "multipart/form-data": {"schema": form},
                "image/jpeg": _BINARY,
                "image/png": _BINARY,
                "application/octet-stream": _BINARY,
            },
        },
    }


def infer_operation() -> dict[str, Any]:
    """Body of POST /v2/models/{model}/infer."""
    tensor = {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": {"type": "string"},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "datatype": {"type": "string"},
            "parameters": {"type": "object"},
            "data": {"type": "array", "items": {}},
        },
    }
    output = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
    }
    body = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {"type": "object"},
            "inputs": {"type": "array", "items": tensor, "minItems": 1},
            "outputs": {"type": "array", "items": output},
        },
    }
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": body}, "application/octet-stream": _BINARY},
        }
    }


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema without references to `$defs`."""
    definitions = schema.pop("$defs", {})

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return walk(definitions[node["$ref"].rsplit("/", 1)[-1]])
            return {key: walk(value) for key, value in node.items()}
        return [walk(value) for value in node] if isinstance(node, list) else node

    found: dict[str, Any] = walk(schema)
    return found


def _text_form(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A field of a form or of a query: lists are text with commas, and null is leaving it out."""
    kinds = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    kind = next((part for part in kinds if part["type"] != "array"), {"type": "string"})
    text = schema.get("description") or kind.get("description") or ""
    return {**kind, "description": f"{text} Commas stand between several." if name == "classes" else text}
