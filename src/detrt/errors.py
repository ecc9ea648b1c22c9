"""The exception tree of detrt. Only these leave the public functions for bad input.

DetrtError                 exit code 2
├── SourceError            a checkpoint, its config or its family
├── SpecError              a ModelSpec, its JSON or its labels
├── ExportError            PyTorch -> ONNX
├── GraphError             an ONNX file or a pass over it
├── EngineError            ONNX -> TensorRT engine, or a wrong or stale engine
├── SessionError           running a model
├── PromptError            what to look for: a prompt, a list of class names
├── ImageError             an image, a video or a list of them
├── ArgumentError          an argument of a Python function: its type or range
├── OutputError            a place that cannot be written
├── MissingPackageError    an optional package that is not installed
└── GateError              exit code 3: the work was done, and the result failed its check
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from numbers import Real
from typing import Any

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: object, keep: str = "") -> str:
    """A text for a terminal, in one line: control characters, line breaks and characters that change the direction of writing are
    written as escapes, since names of files and labels come from anyone. keep: characters that stay."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], str(text))


def one_line(text: object, most: int) -> str:
    """A text of another library, or of a caller, in one line of at most `most` characters and an ellipsis."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else line[:most] + " ..."


def number_of(count: int, noun: str) -> str:
    """ "1 image", "2 images": a number with its noun, which is given in the singular and may have words before it."""
    if count != 1:
        noun += "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
        noun = re.sub(r"(?<![aeiou])ys$", "ies", noun)
    return f"{count} {noun}"


class DetrtError(Exception):
    """Bad input or a missing package; the message says what was wrong, got, allowed and what to do."""

    exit_code = 2


class ArgumentError(DetrtError, TypeError, ValueError):
    pass


class SourceError(DetrtError):
    pass


class SpecError(DetrtError):
    pass


class ExportError(DetrtError):
    pass


class GraphError(DetrtError):
    pass


class EngineError(DetrtError):
    pass


class SessionError(DetrtError):
    pass


class ClosedSessionError(SessionError):
    """A session that is closed, or that another process opened before it forked this one."""


class PromptError(DetrtError):
    pass


class ImageError(DetrtError):
    pass


class OutputError(DetrtError):
    pass


class MissingPackageError(DetrtError):
    """An optional package that is not installed.

    Args:
        package: name of the package, or several comma-separated.
        extra: extra of detrt that brings it, or several comma-separated; "": none does.
        purpose: what needs it.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        what = f"the packages '{package}', which are" if ", " in package else f"the package '{package}', which is"
        super().__init__(f"{purpose} needs {what} not installed; {install_hint(extra, package)}")
        self.package = package
        self.extra = extra
        self.purpose = purpose

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.package, self.extra, self.purpose)  # from one process to another


class GateError(DetrtError):
    exit_code = 3


# Extra of detrt -> import names of its packages. A name that two extras bring stands in the smaller one.
EXTRAS: dict[str, tuple[str, ...]] = {
    "export": ("torch", "transformers", "safetensors", "huggingface_hub", "onnx", "onnxscript", "onnxslim"),
    "rtx": ("tensorrt_rtx_libs", "tensorrt_rtx_bindings"),
    "trt": ("tensorrt",),
    "onnxruntime-rtx": ("onnxruntime_ep_nv_tensorrt_rtx",),
    "openvino": ("openvino",),
    "gpu": ("cuda",),
    "text": ("tokenizers",),
    "video": ("av",),
    "decode": ("nvidia",),
    "eval": ("pycocotools", "yaml"),
    "bench": ("matplotlib",),
    "supervision": ("supervision",),
    "pandas": ("pandas",),
    "track": ("trackers",),
    "serve": (
        "fastapi",
        "fastapi_offline",
        "starlette",
        "uvicorn",
        "httptools",
        "uvloop",
        "prometheus_client",
        "python_multipart",
        "multipart",
    ),
    "ray": ("ray", "pyarrow", "fsspec"),
}


def install_hint(extra: str, package: str = "") -> str:
    """What to type for an extra of detrt, or for a package that no extra brings; `detrt` itself is on no package index."""
    if not extra:
        return f"run: pip install {package}"
    return f"run: pip install -e '.[{extra}]' in a clone of detrt, or add [{extra}] to how detrt was installed"


def missing_package(error: ModuleNotFoundError, purpose: str) -> MissingPackageError | None:
    """The error for a failed import of an optional package; None where the module is none, which is a bug."""
    package = (error.name or "").partition(".")[0]
    for extra, names in EXTRAS.items():
        if package in names:
            return MissingPackageError(package, extra, purpose)
    return None


def is_finite(value: object) -> bool:
    """Whether it is a number to compute with; an integer of hundreds of digits, which JSON may have, is none."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def check_range(
    name: str, value: Any, low: float, high: float, error: type[DetrtError], *, integer: bool = False, more: str = ""
) -> None:
    """Raise `error` where a value is no number, or no integer, from `low` to `high`. more: what is allowed besides."""
    if not (is_finite(value) and low <= value <= high and (isinstance(value, int) or not integer)):
        kind = "an integer" if integer else "a number"
        raise error(f"{name} must be {kind} from {low} to {high}{more}; got {value!r}")


def check_timeout(seconds: object, error: type[DetrtError]) -> None:
    """Raise `error` where a limit of time is neither None nor a positive number."""
    if seconds is not None and not (is_finite(seconds) and seconds > 0):  # type: ignore[operator]
        raise error(f"`timeout_seconds` must be a number of seconds of more than 0, or left out; got {seconds!r}")


def no_attribute(owner: object, name: str, instead: str = "") -> AttributeError:
    """The error of an attribute that is not there. instead: what to do, "" for nothing."""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}" + (f"; {instead}" if instead else ""))


def check_one_of(name: str, value: object, allowed: Collection[object], error: type[DetrtError]) -> None:
    """Raise `error` where a choice is none of those allowed."""
    if value not in allowed:
        raise error(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}")
