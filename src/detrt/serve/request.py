"""`POST /v1/detect`: parsing of three forms of body into a `DetectRequest`, with limits.

Limits are compared before the work that they limit: the number of values before JSON is parsed, lengths of lists before their
elements are looked at. Checks end with the first error.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import re
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError
from python_multipart.exceptions import FormParserError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from ..backends.worker_process import Bulk
from ..class_names import split_classes
from ..errors import SpecError, number_of
from ..files import parse_json
from ..spec import LARGEST_SIDE
from .config import MIB
from .errors import Refused, bad
from .messages import MAX_DETECTIONS, MAX_NAME, MAX_NAMES, MAX_PROMPT

_MOST_FIELDS = 64
_MOST_VALUES = 100_000  # of a JSON body; the longest lists and texts that are allowed have fewer commas and colons
_LONGEST_SHOWN = 60  # characters of a text in a message
_DATA_URI = re.compile(r"data:[\w.+/-]*(?:;[\w=.+-]+)*;base64,", re.ASCII)
_QUERY_FIELDS = ("query_image", "query_images")
_CURLS_OWN = "application/x-www-form-urlencoded"  # the type that curl --data-binary gives by itself
_ADDRESS = re.compile(r"(?:https?|ftp|file|s3|gs)://", re.IGNORECASE)


def _number(value: Any) -> Any:
    if isinstance(value, bool):  # which pydantic takes as 1 or 0
        raise PydanticCustomError("number", "no number")
    return value


_NUMBER = BeforeValidator(_number)  # behind the limits: before them it would keep them out of the schema
Threshold = Annotated[float, Field(ge=0, le=1, description="Keep scores above it."), _NUMBER]
MaxDetections = Annotated[int, Field(ge=1, le=MAX_DETECTIONS, description="Keep at most so many in an image."), _NUMBER]
Tile = Annotated[
    int,
    Field(ge=1, le=LARGEST_SIDE, description="Detect in tiles of so many pixels of the image, and in the whole image."),
    _NUMBER,
]
Overlap = Annotated[
    float, Field(ge=0, le=0.9, description="Part of a tile's side that neighbours share (0.2); needs tile."), _NUMBER
]
TimeoutMs = Annotated[int, Field(ge=1, le=86_400_000, description="Give up after so many milliseconds (408)."), _NUMBER]
Name = Annotated[str, Field(max_length=MAX_NAME)]
PromptText = Annotated[str, Field(max_length=MAX_PROMPT)]
ClassNames = Annotated[list[Name], Field(min_length=1, max_length=MAX_NAMES, fail_fast=True)]
_ClassId = Annotated[int, Field(strict=True, ge=0, lt=10**9)]
ClassIds = Annotated[list[Name | _ClassId], Field(min_length=1, max_length=MAX_NAMES, fail_fast=True)]


Made = TypeVar("Made")
# (name, content of the file) of each.
Files = tuple[tuple[str | None, Bulk], ...]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Options(_Strict):
    """Options of a request: in the query, or as fields of the body."""

    model: Name | None = Field(None, description="Name of the model; needed where several are served.")
    threshold: Threshold | None = None
    classes: ClassIds | None = Field(None, description="Keep these classes: names or ids.")
    max_detections: MaxDetections | None = None
    tile: Tile | None = None
    overlap: Overlap | None = None
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

    images: list[str | NamedImage] = Field(
        min_length=1, fail_fast=True, description="Image files in base64; addresses and paths are not opened."
    )
    query_images: list[str | NamedImage] = Field(
        [],
        fail_fast=True,
        description="What to find, as images that it fills, instead of a prompt; for models with takes_query_images.",
    )


@dataclass(frozen=True, slots=True)
class DetectRequest:
    """query_images: of what to find."""

    options: Options
    images: Files
    query_images: Files = ()


def options_of(pairs: Sequence[tuple[str, str]], where: str) -> dict[str, Any]:
    """Options from a query or from form fields, as text; classes are comma-separated.

    Raises:
        Refused: unknown names, or a name given twice.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name not in Options.model_fields:
            raise _unknown_field(where, name, Options)
        if name in found:
            raise bad(f"{where} gives '{name}' twice; give it once")
        if name == "classes":
            try:
                found[name] = list(split_classes(value))
            except SpecError as error:
                raise bad(f"{where}, 'classes': {error}") from None
        elif value != "":
            found[name] = value
    return found


def query_options(text: bytes) -> tuple[tuple[str, str], ...]:
    """The options of an address, from the bytes behind its question mark.

    Raises:
        Refused: more fields than there are options.
    """
    try:
        return tuple(parse_qsl(text.decode("latin-1"), keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError:
        raise bad(f"the address has more than {_MOST_FIELDS} options; send each once") from None


def read_detect(content_type: str, query: Sequence[tuple[str, str]], body: Bulk, max_images: int) -> DetectRequest:
    """Read a request of any form.

    Raises:
        Refused: an unknown form, a wrong value, no image or too many.
    """
    kind = content_type.partition(";")[0].strip().lower()
    options = options_of(query, "the address")
    queries: Files = ()
    if kind == "multipart/form-data":
        images, queries, more = _multipart(content_type, body, max_images)
        made = _validate(Options, _join(options, more))
    elif kind == "application/json" or kind.endswith("+json"):
        made, images, queries = _json(body, options, max_images)
    elif is_one_file(content_type):
        images = ((None, body),)
        made = _validate(Options, options)
    else:
        raise Refused(
            415,
            "bad_content_type",
            f"Content-Type must be multipart/form-data, application/json, image/... or application/octet-stream; got '{kind[:60]}'"
            + ("; with curl --data-binary add: -H 'Content-Type: application/octet-stream'" if kind == _CURLS_OWN else ""),
        )
    if not images or (len(images) == 1 and not images[0][1]):
        raise Refused(400, "no_image", "there is no image; send the content of at least one image file")
    check_count("images", images, max_images)
    check_count("query images", queries, max_images)
    return DetectRequest(made, images, queries)


def is_one_file(content_type: str) -> bool:
    """Whether a body is an image file as it is, so that nothing has to be parsed."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind.startswith("image/") or kind in ("application/octet-stream", "")


def check_count(what: str, files: Sequence[Any], max_images: int) -> None:
    """Raise Refused for more images than a request may have."""
    if len(files) > max_images:
        raise Refused(413, "too_many_images", f"the request has {len(files)} {what}; at most {max_images} are taken")


def _join(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    if both := sorted(set(first) & set(second)):
        raise bad(f"'{both[0]}' is in the address and in the body; give it once")
    return first | second


class _Form(MultiPartParser):
    """A parser that knows whether the form is complete; without its end the last part would be missing."""

    ended = False

    def on_end(self) -> None:
        self.ended = True


def _multipart(content_type: str, body: Bulk, max_images: int) -> tuple[Files, Files, dict[str, Any]]:
    async def stream() -> Any:
        yield bytes(body)

    headers = Headers({"content-type": content_type})
    parser = _Form(headers, stream(), max_files=2 * max_images + 1, max_fields=_MOST_FIELDS, max_part_size=MIB)
    parser.spool_max_size = len(body) + 1  # in memory, as the body
    try:
        form = _finished(parser.parse())
    except (MultiPartException, FormParserError, ValueError, LookupError, AssertionError) as error:
        text = getattr(error, "message", None) or str(error)
        raise bad(
            f"the multipart body cannot be read: {text[:200].rstrip('.')}; leave its Content-Type to the program that writes it "
            "(curl: -F images=@photo.jpg)",
        ) from None
    try:
        if not parser.ended:
            raise bad("the multipart body is cut off: its closing boundary is missing; send all of it")
        images: list[tuple[str | None, Bulk]] = []
        queries: list[tuple[str | None, Bulk]] = []
        fields: list[tuple[str, str]] = []
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name in Options.model_fields:
                    raise bad(f"the field '{name}' is a file; send its content as text (curl: -F '{name}=<FILE')")
                (queries if name in _QUERY_FIELDS else images).append((value.filename, Bulk(value.file.read())))
            elif name in ("image", "images", "file", "files", *_QUERY_FIELDS):
                raise bad(
                    f"the field '{name}' is text; send an image as a file, with a filename (curl: -F {name}=@photo.jpg)",
                )
            else:
                fields.append((name, value))
        return tuple(images), tuple(queries), options_of(fields, "the form")
    finally:
        _finished(form.close())


def _finished(work: Coroutine[Any, Any, Made]) -> Made:
    """The result of a coroutine that never waits: everything is in memory."""
    try:
        work.send(None)
    except StopIteration as end:
        made: Made = end.value
        return made
    work.close()
    raise RuntimeError("a form in memory was to be read, and its parser waits")


def _json(body: Bulk, options: dict[str, Any], max_images: int) -> tuple[Options, Files, Files]:
    if sum(body.count(mark) for mark in (b",", b":", b"[", b"{")) > _MOST_VALUES:
        raise Refused(
            413, "too_many_values", f"the JSON has more than {_MOST_VALUES} commas, colons and brackets; send fewer values"
        )
    try:
        data = parse_json(body, finite=True, unique=True)
    except ValueError as error:
        advice = """send {"images": ["..."]} with files in base64, or a file itself with Content-Type: image/jpeg"""
        raise bad(f"the body is not JSON: {str(error)[:200]}; {advice}") from None
    _check_shape(data, max_images)
    try:
        found = DetectBody.model_validate(data)
    except ValidationError as error:
        raise _error_text(error) from None
    del data
    given = found.model_dump(exclude={"images", "query_images"}, exclude_none=True)
    made = _validate(Options, _join(options, given))
    files: dict[str, list[tuple[str | None, Bulk]]] = {"images": [], "query_images": []}
    for field, read in files.items():
        for number, image in enumerate(getattr(found, field)):
            name, data = (None, image) if isinstance(image, str) else (image.name, image.data)
            read.append((name, _from_base64(data, f"{field}[{number}]")))
    return made, tuple(files["images"]), tuple(files["query_images"])


def _check_shape(data: Any, max_images: int) -> None:
    """Refuse what pydantic would describe with an error for each key, or look at in every element.

    Raises:
        Refused: no object, an unknown field, or too many images.
    """
    if not isinstance(data, dict):
        advice = """send {"images": ["..."]} with files in base64"""
        raise bad(f"the body must be a JSON object; got {_JSON_TYPES[type(data)]}; {advice}")
    _check_names(data, "the body", DetectBody)
    for field, what in (("images", "images"), ("query_images", "query images")):
        if isinstance(files := data.get(field), list):
            check_count(what, files, max_images)
            for number, file in enumerate(files):
                if isinstance(file, dict):
                    _check_names(file, f"{field}[{number}]", NamedImage)


_JSON_TYPES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _check_names(given: dict[str, Any], where: str, kind: type[BaseModel]) -> None:
    if unknown := next((name for name in given if name not in kind.model_fields), None):
        raise _unknown_field(where, unknown, kind)


def _from_base64(text: str, where: str) -> Bulk:
    if _ADDRESS.match(text[:10]):
        raise bad(f"{where} is an address, and the server opens none; send the content of the file in base64")
    if match := _DATA_URI.match(text[:200]):
        text = text[match.end() :]
    try:
        # MIME breaks the lines: base64.encodebytes, Java's and Android's encoders by default.
        return Bulk(base64.b64decode(text.replace("\r", "").replace("\n", ""), validate=True))
    except (binascii.Error, ValueError) as error:
        raise bad(f"{where} is not base64 ({error}); send the content of an image file") from None


def _validate(kind: type[Options], values: dict[str, Any]) -> Options:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _error_text(error) from None


def _error_text(error: ValidationError) -> Refused:
    """The first error as detrt says it: the place, what it may be by the schema, and what it is."""
    # Where a value may be of several types there is an error for each; the deepest is that of the type which was meant.
    first = max(error.errors(include_url=False, include_context=False), key=lambda row: len(row["loc"]))
    where, schema = "", _body_schema()
    for part in first["loc"]:  # among them are names of types
        kinds = schema.get("anyOf", [schema])
        if isinstance(part, int):
            inner = next((kind["items"] for kind in kinds if kind.get("type") == "array"), None)
        else:
            inner = next((kind["properties"][part] for kind in kinds if part in kind.get("properties", ())), None)
        if inner is not None:
            schema, where = inner, where + (f"[{part}]" if isinstance(part, int) else f".{part}")
    got = "nothing" if first["type"] == "missing" else _shown(first["input"])
    return bad(f"'{where.removeprefix('.')}' must be {_allowed(schema)}; got {got}")


@functools.cache
def _body_schema() -> dict[str, Any]:
    return inline_refs(DetectBody.model_json_schema())


def _allowed(schema: dict[str, Any]) -> str:
    """What a JSON schema takes, in words."""
    if "anyOf" in schema:
        return " or ".join(_allowed(kind) for kind in schema["anyOf"] if kind["type"] != "null")
    kind = schema["type"]
    if kind == "object":
        return "an object with " + " and ".join(schema["properties"])
    if kind == "string":
        return "a text" + (f" of at most {schema['maxLength']} characters" if "maxLength" in schema else "")
    if kind == "array":
        count = f"{schema['minItems']} to {schema['maxItems']}" if "maxItems" in schema else "at least 1"
        return f"a list of {count}, each {_allowed(schema['items'])}"
    most = schema["maximum"] if "maximum" in schema else schema["exclusiveMaximum"] - 1
    return f"{'an integer' if kind == 'integer' else 'a number'} from {schema['minimum']} to {most}"


def _shown(value: Any) -> str:
    """A value of JSON in a message."""
    if isinstance(value, str) and len(value) > _LONGEST_SHOWN:
        return f"a text of {number_of(len(value), 'character')}"
    if isinstance(value, (list, dict)):
        return f"{_JSON_TYPES[type(value)]} of {len(value)}"
    return json.dumps(value)


def _unknown_field(where: str, name: str, kind: type[BaseModel]) -> Refused:
    known = ", ".join(kind.model_fields)
    return bad(f"{where} has an unknown field '{name[:60]}'; known are: {known}")


def inline_refs(schema: dict[str, Any]) -> dict[str, Any]:
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
