"""`POST /v1/detect`: what a request may say, in three forms of body, as one `DetectRequest`."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from python_multipart.exceptions import FormParserError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from .config import MIB, ServeConfig
from .errors import Refused

_MOST_FIELDS = 64
_DATA_URI = re.compile(r"data:[\w.+/-]*(?:;[\w=.+-]+)*;base64,", re.ASCII)
_ADDRESS = re.compile(r"(?:https?|ftp|file|s3|gs)://", re.IGNORECASE)

Threshold = Annotated[float, Field(ge=0, le=1, description="Keep scores above it.")]
MaxDetections = Annotated[int, Field(ge=1, le=100_000, description="Keep at most so many in an image.")]
TimeoutMs = Annotated[int, Field(ge=1, le=86_400_000, description="Give up after so many milliseconds (408).")]
Name = Annotated[str, Field(max_length=1000)]
PromptText = Annotated[str, Field(max_length=20_000)]
ClassNames = Annotated[list[Name], Field(min_length=1, max_length=5000)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Options(_Strict):
    """Options of a request; in the query for every form of body, or in the body of the forms that have fields."""

    model: Name | None = Field(None, description="Name of the model; needed where several are served.")
    threshold: Threshold | None = None
    classes: ClassNames | None = Field(None, description="Keep these classes: names or ids.")
    max_detections: MaxDetections | None = None
    prompt: PromptText | ClassNames | None = Field(
        None, description="What to find, for models that take a prompt: a text such as 'a cat. a dog.', or a list of class names."
    )
    task: PromptText | None = Field(None, description="Sentence for models that take one.")
    timeout_ms: TimeoutMs | None = None


class NamedImage(_Strict):
    data: str = Field(description="Content of an image file in base64.")
    name: Name | None = Field(None, description="Comes back in the answer.")


class DetectBody(Options):
    """The JSON form. An image is base64, a data: URI, or an object with data and name."""

    images: list[str | NamedImage] = Field(min_length=1, description="Image files in base64; addresses and paths are not opened.")


@dataclass(frozen=True, slots=True)
class DetectRequest:
    """images: (name, content of the file)."""

    options: Options
    images: tuple[tuple[str | None, bytes], ...]


def options_of(pairs: list[tuple[str, str]], where: str) -> dict[str, Any]:
    """Options from a query or from form fields, as text; classes have commas between them.

    Raises:
        Refused: unknown names, or a name given twice.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name not in Options.model_fields:
            known = ", ".join(Options.model_fields)
            raise Refused(400, "bad_request", f"{where} has an unknown field '{name[:60]}'; known are: {known}")
        if name in found:
            raise Refused(400, "bad_request", f"{where} gives '{name}' twice; give it once")
        if name == "classes":
            found[name] = [part.strip() for part in value.split(",") if part.strip()]
        elif value != "":
            found[name] = value
    return found


async def detect_request(headers: Headers, query: list[tuple[str, str]], body: bytes, config: ServeConfig) -> DetectRequest:
    """Read a request of any form.

    Raises:
        Refused: an unknown form, a wrong value, no image or too many.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    options = options_of(query, "the address")
    if kind == "multipart/form-data":
        images, more = await _multipart(headers, body, config)
        made = _checked(Options, _joined(options, more))
    elif kind == "application/json" or kind.endswith("+json"):
        # Beside the event loop, where it takes longer than a moment.
        made, images = await asyncio.to_thread(_json, body, options) if len(body) > MIB else _json(body, options)
    elif kind.startswith("image/") or kind in ("application/octet-stream", ""):
        images = [(None, body)]
        made = _checked(Options, options)
    else:
        raise Refused(
            415,
            "bad_content_type",
            f"Content-Type must be multipart/form-data, application/json, image/... or application/octet-stream; got '{kind[:60]}'",
        )
    if not images or (len(images) == 1 and not images[0][1]):
        raise Refused(400, "no_image", "there is no image; send the content of at least one image file")
    if len(images) > config.max_images:
        raise Refused(413, "too_many_images", f"the request has {len(images)} images; at most {config.max_images} are taken")
    return DetectRequest(made, tuple(images))


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    if both := sorted(set(first) & set(second)):
        raise Refused(400, "bad_request", f"'{both[0]}' is in the address and in the body; give it once")
    return first | second


async def _multipart(headers: Headers, body: bytes, config: ServeConfig) -> tuple[list[tuple[str | None, bytes]], dict[str, Any]]:
    async def stream() -> Any:
        yield body

    parser = MultiPartParser(headers, stream(), max_files=config.max_images + 1, max_fields=_MOST_FIELDS, max_part_size=MIB)
    parser.spool_max_size = config.max_body + 1  # in memory, where the body is already
    try:
        form = await parser.parse()
    except (MultiPartException, FormParserError, ValueError, LookupError, AssertionError) as error:
        text = getattr(error, "message", None) or str(error)
        raise Refused(400, "bad_request", f"the multipart body cannot be read: {text[:200]}") from None
    try:
        images: list[tuple[str | None, bytes]] = []
        fields: list[tuple[str, str]] = []
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                images.append((value.filename, value.file.read()))
            elif name in ("image", "images", "file", "files"):
                raise Refused(
                    400, "bad_request", f"the field '{name}' is text; send an image as a file (curl: -F {name}=@photo.jpg)"
                )
            else:
                fields.append((name, value))
        return images, options_of(fields, "the form")
    finally:
        await form.close()


def _json(body: bytes, options: dict[str, Any]) -> tuple[Options, list[tuple[str | None, bytes]]]:
    try:
        found = DetectBody.model_validate_json(body)
    except ValidationError as error:
        raise _worded(error) from None
    given = found.model_dump(exclude={"images"}, exclude_none=True)
    made = _checked(Options, _joined(options, given))
    images: list[tuple[str | None, bytes]] = []
    for number, image in enumerate(found.images):
        name, data = (None, image) if isinstance(image, str) else (image.name, image.data)
        images.append((name, _from_base64(data, f"images[{number}]")))
    return made, images


def _from_base64(text: str, where: str) -> bytes:
    if _ADDRESS.match(text[:10]):
        raise Refused(
            400, "bad_request", f"{where} is an address, and the server opens none; send the content of the file in base64"
        )
    if match := _DATA_URI.match(text[:200]):
        text = text[match.end() :]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(400, "bad_request", f"{where} is not base64 ({error}); send the content of an image file") from None


def _checked(kind: type[Options], values: dict[str, Any]) -> Options:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _worded(error) from None


def _worded(error: ValidationError) -> Refused:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part)[:60] for part in first["loc"]) or "the body"
    got = error.errors(include_url=False)[0].get("input")
    shown = "" if isinstance(got, (dict, list, bytes)) or got is None else f"; got {json.dumps(str(got)[:60])}"
    return Refused(400, "bad_request", f"{where[:200]}: {first['msg'][:300]}{shown}")
