"""OpenAPI of what FastAPI cannot derive: the forms of a body, parameters, and refusals."""

from __future__ import annotations

from typing import Any

from .request import DetectBody, Options, inline_refs

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
    403: "A page of another server asks, or somebody elsewhere wants to load a model without a key.",
    404: "No such model.",
    408: "The body came too slowly, or the deadline that the request set has passed.",
    413: "The body or an image is too large, or there are too many images.",
    415: "A form of body that the server does not read.",
    429: "Too many requests wait; Retry-After says how many seconds to wait.",
    500: "The model failed.",
    503: "The server is starting or stopping, or the processes that read or ran this request ended.",
    504: "The longest time for a request has passed.",
}


def refusals(*, v2: bool = False) -> dict[int | str, dict[str, Any]]:
    schema = _V2_ERROR if v2 else _ERROR
    return {
        status: {"description": text, "content": {"application/json": {"schema": schema}}} for status, text in _REFUSALS.items()
    }


_BINARY = {"schema": {"type": "string", "format": "binary"}}


def detect_operation() -> dict[str, Any]:
    """OpenAPI of POST /v1/detect: parameters, the forms of its body, and errors, which FastAPI cannot derive."""
    schema = inline_refs(DetectBody.model_json_schema())
    plain = inline_refs(Options.model_json_schema())["properties"]
    fields = {name: _text_form(name, part) for name, part in plain.items()}
    files = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
    shown = {"query_images": {**files, "description": schema["properties"]["query_images"]["description"]}}
    properties = {"images": files, **shown, **fields}
    form = {"type": "object", "required": ["images"], "properties": properties, "additionalProperties": False}
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


def _text_form(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A field of a form or of a query: lists are comma-separated text, and null means that it is left out."""
    kinds = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    kind = next((part for part in kinds if part["type"] != "array"), {"type": "string"})
    text = schema.get("description") or kind.get("description") or ""
    return {**kind, "description": f"{text} Commas stand between several." if name == "classes" else text}
