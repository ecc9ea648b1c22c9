"""Arguments of Python functions: what has another type, or is out of range, gives one error that names it, what was given and what is allowed."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any

from .. import files
from ..class_names import parse_class_thresholds
from ..errors import ArgumentError, ImageError, SpecError, is_finite, one_line
from ..spec import parse_size
from ..system import IMAGE_DECODERS

# Metadata of the option `image_decoder`, whose default is the first of IMAGE_DECODERS.
IMAGE_DECODER = {"help": "Decode images on the cpu, or JPEG files and videos on the gpu that runs the model."}
# Of the option `size` of what runs models, and of `threshold` of what answers requests.
INPUT_SIZE = {"help": "Input size: 640 or HEIGHTxWIDTH.", "panel": "Size", "parse": parse_size}
REQUEST_THRESHOLD = {"help": "Lowest score to report, for requests that give none.", "flag": "threshold t"}
_LONGEST_VALUE = 200  # characters, in a message
_IMAGE = "a path, an address (https://...), bytes, an open file, a PIL image, a tensor, or an array (H, W, 3) of uint8"


def refuse(name: str, allowed: str, value: object) -> ArgumentError:
    """The error of an argument. allowed: what it must be."""
    return ArgumentError(f"{name} must be {allowed}; got {one_line(repr(value), _LONGEST_VALUE)} ({type(value).__name__})")


def check_integer(value: Any, name: str) -> int | None:
    """An integer of at least 1, of Python or NumPy, or None."""
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise refuse(name, "an integer of at least 1, or None", value)
    return number


def check_image_decoder(value: Any) -> None:
    """Raise ArgumentError for what is not in IMAGE_DECODERS."""
    if value not in IMAGE_DECODERS:
        raise refuse("`image_decoder`", " or ".join(IMAGE_DECODERS), value)


def check_device(value: Any) -> str | None:
    """A device as text, from a text, the number of a GPU, or a `torch.device`; None stays."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return f"cuda:{value}"
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "type") and hasattr(value, "index"):
        return str(value)
    raise refuse("device", "'cpu', 'cuda:0', the number of a GPU, or None", value)


def pixel_size(value: Any, name: str) -> tuple[int, int] | None:
    """(height, width) in pixels, from a pair, one number for both, or a text such as "480x640"; None stays."""
    if value is None:
        return None
    if isinstance(value, str):
        return parse_size(value, name)
    sides = list(value) if isinstance(value, Iterable) and not isinstance(value, (bytes, Mapping)) else [value, value]
    try:
        height, width = (check_integer(side, name) for side in sides)
    except (ArgumentError, ValueError):
        height = width = None
    if height is None or width is None:
        raise refuse(f"`{name}`", "(height, width) in pixels, one number for both, or '480x640'", value)
    return height, width


def read_class_thresholds(text: str) -> tuple[tuple[str, float], ...]:
    """As `parse_class_thresholds`, also from a JSON file, `{"person": 0.6}`, as `detrt eval` writes it.

    Raises:
        SpecError: as there; or a file that is not there, or holds something else.
    """
    if not text.strip().lower().endswith(".json") or "=" in text:
        return parse_class_thresholds(text)
    found = files.read_json(text.strip(), "file of thresholds", SpecError, unique=True)
    numbers = found.values() if isinstance(found, dict) else [None]
    if not found or not all(is_finite(value) and 0 <= value <= 1 for value in numbers):
        raise SpecError(f"the file of thresholds '{text}' must hold names with scores from 0 to 1, such as {{\"person\": 0.6}}")
    return tuple((name, float(value)) for name, value in found.items())


def check_model(value: Any, *, sessions: bool = False) -> None:
    """Raise ArgumentError for what is no reference to a model. sessions: an open session is taken, too."""
    if isinstance(value, (str, os.PathLike)) or (sessions and hasattr(value, "run") and hasattr(value, "info")):
        return
    more = ", or an open session" if sessions else ""
    raise refuse("model", f"a path or reference, such as 'bundle/' or 'hf:org/name'{more}", value)


def check_path(value: Any, name: str, *, needed: bool = False) -> None:
    """Raise ArgumentError for what is no path. needed: None is none either."""
    if (value is not None or needed) and not isinstance(value, (str, os.PathLike)):
        raise refuse(name, "a path", value)


def check_kind(value: Any, name: str, kind: type) -> None:
    """Raise ArgumentError for an object of another class; None is none."""
    if value is not None and not isinstance(value, kind):
        raise refuse(name, f"a {kind.__name__}, such as {kind.__name__}()", value)


def check_list(value: Any, name: str, what: str) -> None:
    """Raise ArgumentError for one object, or one text, where several are wanted. what: what the list is of, e.g. "of devices"."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise refuse(name, f"a list {what}", value)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of PyTorch, which is not imported here."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach") and hasattr(value, "numpy")


def read_open_file(file: Any) -> bytes:
    """The content of an open file. Raises ArgumentError where it is text, ImageError where it cannot be read."""
    try:
        data = file.read()
    except UnicodeDecodeError:
        data = ""
    except (OSError, ValueError) as error:  # ValueError: it is closed
        raise ImageError(f"the open file {getattr(file, 'name', file)!r} cannot be read: {error}") from None
    if not isinstance(data, bytes):
        raise refuse("an image file", "opened in binary mode, as open(path, 'rb')", file)
    return data


def one_image(value: Any) -> Any:
    """One image, of an open file its content; None: it may be many.

    Raises:
        ArgumentError: what is no image and no iterable of images.
    """
    from .images import ImageSource  # NumPy and Pillow, which help does without

    if getattr(value, "ndim", None) == 4:  # arrays and tensors: a batch of images
        return None
    if isinstance(value, ImageSource) or is_tensor(value):
        return value
    if callable(getattr(value, "read", None)):
        return read_open_file(value)
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise refuse("images", f"{_IMAGE}, or a list of them", value)
    return None


def many_images(value: Any) -> Iterable[Any]:
    """Several images. Raises ArgumentError for one, or for what is no iterable of images."""
    if one_image(value) is not None:
        raise refuse(
            "the source of a stream",
            "a folder, a pattern, a video, a camera, or a list or another iterable of images; one image goes to the detector itself",
            value if isinstance(value, (bytes, str)) else type(value),
        )
    return value
