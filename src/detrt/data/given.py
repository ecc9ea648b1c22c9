"""What callers of Python give as images beside files and arrays: addresses, open files and tensors; and as sources of many images.

An address is fetched only where a caller wrote it: nothing in a file, an annotation or a request leads here.
"""

from __future__ import annotations

import hashlib
import math
import os
import queue
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from ..errors import ImageError, one_line
from .addresses import is_web_address, without_secrets
from .arguments import is_tensor, read_open_file
from .images import VIDEO_SUFFIXES, ImageSource, Input, expand_inputs, load_image
from .live import LiveSource, live_source
from .raw_image import LoadedImage

MAX_BYTES = 64 * 2**20  # of a fetched file
TIMEOUT_S = 30.0  # for all of it
_CHUNK = 1 << 16
_IN_ADDRESSES = "%/:?@!$&'()*+,;=~[]"  # what stays as it is, beside letters and digits
_CHANNELS = (1, 3, 4)


class TensorLike(Protocol):
    """A tensor of PyTorch, which is not imported here."""

    ndim: int

    def detach(self) -> Any: ...


AnyImage = ImageSource | BinaryIO | TensorLike


def fetch(address: str, *, max_bytes: int = MAX_BYTES, timeout_s: float = TIMEOUT_S) -> bytes:
    """The content at an http or https address.

    Raises:
        ImageError: it cannot be reached, answers with an error, is larger than `max_bytes`, or takes longer than `timeout_s`.
    """
    name = without_secrets(address)
    done: queue.SimpleQueue[bytes | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put(_fetched(address, name, max_bytes, timeout_s))
        except BaseException as error:
            done.put(error)

    # A thread of its own: looking up a name and reading a header have no limit of time in the standard library.
    threading.Thread(target=work, name="detrt-fetch", daemon=True).start()
    try:
        found = done.get(timeout=timeout_s)
    except queue.Empty:
        raise _too_slow(name, timeout_s) from None
    if isinstance(found, BaseException):
        raise found
    return found


def _too_slow(name: str, timeout_s: float) -> ImageError:
    return ImageError(f"'{name}' did not arrive within {timeout_s:g} s; download it first, and give the file")


def _fetched(address: str, name: str, max_bytes: int, timeout_s: float) -> bytes:
    import http.client
    import urllib.request

    until = time.monotonic() + timeout_s
    opener = urllib.request.OpenerDirector()  # without the handlers of files and FTP, to which a server could redirect
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
    ):
        opener.add_handler(handler())
    parts: list[bytes] = []
    size = 0
    try:
        place = urllib.parse.urlsplit(address)
        if "@" in place.netloc:
            raise ImageError(
                f"'{name}' has a user name or a password in it, which are not sent; download it first, and give the file"
            )
        # As browsers do it: blanks and letters that no request may have.
        path, query = (urllib.parse.quote(part, safe=_IN_ADDRESSES) for part in (place.path, place.query))
        address = place._replace(path=path, query=query, fragment="").geturl()
        request = urllib.request.Request(address, headers={"User-Agent": "detrt", "Accept": "image/*,*/*;q=0.5"})
        answer = opener.open(request, timeout=timeout_s + 1)  # after `fetch`
        if answer is None:
            raise ImageError(f"'{name}' leads to an address that is not http or https; download the image first")
        with answer:
            while part := answer.read1(_CHUNK):
                parts.append(part)
                size += len(part)
                if size > max_bytes:
                    raise ImageError(f"'{name}' is larger than {max_bytes} bytes; download it first, and give the file")
                if time.monotonic() > until:
                    raise _too_slow(name, timeout_s)
            if answer.length:  # what was announced and did not come
                raise ImageError(
                    f"'{name}' broke off after {size} of {size + answer.length} bytes; try again, or download it first"
                )
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no host in it
        code = getattr(error, "code", "")
        why = one_line(f"{code} {getattr(error, 'reason', None) or error}", 200)
        if code in range(300, 400):  # not the reason, which shows the other address
            why = f"{code}, and it leads to no http or https address, or in a circle"
        raise ImageError(f"'{name}' cannot be fetched: {why}; check the address, or download it first") from None
    return b"".join(parts)


def as_image(value: Any) -> Any:
    """An image, not at an address, as `load_image` takes it. Paths, bytes, arrays and PIL images stay.

    Raises:
        ImageError: a tensor that is no image, or a name of many images.
    """
    if isinstance(value, (str, os.PathLike)):
        name = os.fspath(value)
        what = "a folder" if os.path.isdir(name) else "a video" if Path(name).suffix.lower() in VIDEO_SUFFIXES else ""
        if isinstance(value, str) and not what and live_source(value) is not None:
            what = "a camera"
        if what:
            raise ImageError(f"'{without_secrets(name)}' is {what}, not an image; for its images: detector.stream({name!r})")
        return value
    if callable(getattr(value, "read", None)) and not isinstance(value, np.ndarray):
        return read_open_file(value)
    return tensor_pixels(value).cpu().numpy() if is_tensor(value) else value


def fetch_image(address: str, load: Callable[[bytes], LoadedImage] = load_image) -> LoadedImage:
    """The image at an http or https address, read by `load`. Raises ImageError, which names the address."""
    data = fetch(address)
    try:
        return load(data)
    except ImageError as error:
        raise ImageError(f"'{without_secrets(address)}': {error}") from None


def read_input(source: Input) -> LoadedImage:
    """The image of an input, fetched where that is an address. Raises ImageError."""
    return fetch_image(source.address) if source.address else load_image(source.path)


def typed_inputs(names: Sequence[str]) -> list[Input]:
    """As `expand_inputs`, for names that a person typed: an http or https address of an image is one more input.

    Raises:
        ImageError: as `expand_inputs`, or the address of a video.
    """
    groups = [[] if is_web_address(name) else expand_inputs([name]) for name in names]
    taken = {source.path: "" for group in groups for source in group}
    for name, group in zip(names, groups, strict=True):
        if is_web_address(name):
            path = _path_of(name)
            if taken.setdefault(path, name) != name:  # they differ in what the path leaves out
                path = path.with_name(f"{path.stem}-{hashlib.sha256(name.encode()).hexdigest()[:8]}{path.suffix}")
            group.append(Input(path, "image", name))
    return list(dict.fromkeys(source for group in groups for source in group)) or expand_inputs([])


def _path_of(address: str) -> Path:
    """The host and path of an address as a relative path."""
    try:
        parts = urllib.parse.urlsplit(address)
    except ValueError as error:  # brackets of IPv6
        raise ImageError(f"'{without_secrets(address)}' is no address: {error}; check it") from None
    steps = [parts.hostname or "", *urllib.parse.unquote(parts.path).split("/")]
    path = Path(*(re.sub(r"[^\w.-]+", "_", step) for step in steps if step.strip(".")))
    if not (parts.hostname or "").strip("."):
        raise ImageError(f"'{without_secrets(address)}' is no address: it names no host; check it")
    if path.suffix.lower() in VIDEO_SUFFIXES:
        raise ImageError(f"'{without_secrets(address)}' is the address of a video; download it first, and give the file")
    return path


def tensor_pixels(tensor: Any) -> Any:
    """A tensor (3, H, W) or (H, W, 3), uint8 or floats from 0 to 1, as one of (H, W, channels) uint8 on the same device.

    Two sides of 3: the first is the channels.

    Raises:
        ImageError: another shape, type or range.
    """
    pixels = tensor.detach()
    if (form := "without values (meta)" if pixels.is_meta else str(pixels.layout).removeprefix("torch.")) != "strided":
        raise ImageError(f"a tensor of an image is dense, with a value for each pixel; got one that is {form}")
    shape = tuple(pixels.shape)
    if pixels.ndim == 3 and shape[0] in _CHANNELS and (shape[2] not in _CHANNELS or shape[0] == 3):
        pixels = pixels.permute(1, 2, 0)
    elif pixels.ndim == 2:
        pixels = pixels[..., None]
    elif not (pixels.ndim == 3 and shape[2] in _CHANNELS):
        raise ImageError(f"a tensor of an image has the shape (3, H, W) or (H, W, 3), and of several (n, 3, H, W); got {shape}")
    kind = str(pixels.dtype).removeprefix("torch.")
    if kind == "uint8":
        return pixels
    low, high = (float(pixels.min()), float(pixels.max())) if pixels.numel() and not pixels.is_complex() else (0.0, math.nan)
    if not pixels.is_floating_point() or not (low >= 0 and high <= 1):
        span = f"{low:g} to {high:g}" if pixels.numel() else "no pixels"
        raise ImageError(
            f"a tensor of an image is uint8 (0 to 255) or float (0 to 1), before any normalisation; got {kind}, {span}"
        )
    return (pixels.float() * 255).round().byte()


def media_of(source: Any) -> list[Input] | LiveSource | None:
    """What a name of many images stands for: the files of a folder, a pattern or a video; a camera. None: it is no such name.

    source: a path, an address, or the number of a camera.

    Raises:
        ImageError: there is no such file.
    """
    if isinstance(source, int) and not isinstance(source, bool) and source >= 0:
        source = f"/dev/video{source}"
    if not isinstance(source, (str, os.PathLike)) or (is_web_address(source) and live_source(str(source)) is None):
        return None
    camera = live_source(source) if isinstance(source, str) else None
    return camera or expand_inputs([source])
