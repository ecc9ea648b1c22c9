"""Files, folders, globs, bytes, arrays and PIL images -> RGB arrays, safely.

An image is converted by `PIL.Image.convert("RGB")`, as in training code, with these additional rules:

- EXIF orientation is applied.
- Transparency is dropped, not composed on a background: a transparent pixel keeps its stored colour.
- Grey of 12 and 16 bits keeps its upper 8 bits (Pillow would clip instead). Other integers and floats have no agreed range and are refused.
- The first frame or page of a file is used, and the others are warned of (`frames.py`).
- The size in the header is compared with MAX_PIXELS, and the scans of a JPEG file are counted, before a pixel is decoded.
- Files in other formats than those of an allow-list are refused (`IMAGE_FORMATS`; `detrt serve` has a shorter one). Pillow reads
  some forty, among them PostScript, which it runs in Ghostscript, and formats whose decoders are slow or had security faults.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, UnidentifiedImageError

from ..errors import ImageError
from ..spec import comma_separated
from .addresses import without_secrets
from .frames import warn_of_frames
from .raw_image import EncodedImage, RawImage, upright

# The size at which Pillow itself refuses an image: 0.5 GB of RGB pixels.
MAX_PIXELS = 178_956_970
# Formats of Pillow that are read, by name. Those of the first list are decoded by C code, at millions of pixels a second.
FAST_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "AVIF", "JPEG2000")
IMAGE_FORMATS = (*FAST_FORMATS, "DIB", "PPM", "TGA", "ICO", "PCX", "SGI", "QOI", "HEIF")
_UNSAFE_FORMATS = ("EPS",)  # a program, which Pillow gives to Ghostscript
_DECODED_AT_A_TIME = 4096  # bytes; between them a decoder of a stream can be stopped
_MOST_SCANS = (
    100  # of a JPEG file, as in libtiff and GDAL: each of some ten bytes goes through all pixels. Encoders write some ten scans
)
_SCAN_HEADER = b"\xff\xda\0"  # coded pixels have no such bytes
# Not of formats that folders of photographs hold as something else: icons, textures. HEIC is told where no plugin reads it.
_IMAGE = ".avif .bmp .dib .gif .heic .heif .hif .j2k .jfif .jp2 .jpe .jpeg .jpg .jpx .pbm .pgm .png .pnm .ppm .qoi .tga .tif .tiff .webp"
_VIDEO = ".3gp .avi .flv .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .ogv .ts .webm .wmv .y4m"
IMAGE_SUFFIXES = frozenset(_IMAGE.split())
VIDEO_SUFFIXES = frozenset(_VIDEO.split())
ImageSource = str | os.PathLike | bytes | bytearray | memoryview | np.ndarray | Image.Image
_ORIENTATION_TAG, _BITS_PER_SAMPLE, _PHOTOMETRIC = 0x0112, 258, 262


@dataclass(frozen=True, slots=True)
class Input:
    """What to detect in, not opened yet. kind: "image" or "video".

    address: of an image that is fetched; path then consists of its host and path, which name the outputs.
    """

    path: Path
    kind: str = "image"
    address: str = ""

    @property
    def name(self) -> str:
        """The path, or the address without secrets, for records and messages."""
        return without_secrets(self.address) or str(self.path)


def load_image(source: ImageSource | RawImage, *, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """An image as (H, W, 3) uint8 RGB.

    source: a path; the bytes of an image file; a PIL image; or a uint8 array (H, W), (H, W, 1),
        (H, W, 3) RGB or (H, W, 4) RGBA. Arrays from OpenCV are BGR: pass `array[..., ::-1]`. A `RawImage` is converted.

    Raises:
        ImageError: missing, empty, damaged, truncated or too large file, not an image, or an array
            of another form.
    """
    if isinstance(source, RawImage):
        return source.rgb()
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, Image.Image):
        return OpenedImage(source, "the PIL image", max_pixels).load()
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _first_frame(open_image(bytes(source), max_pixels=max_pixels))
    if not isinstance(source, (str, os.PathLike)):
        raise ImageError(f"an image must be a path, bytes, a PIL image or a NumPy array; got {type(source).__name__}")
    path = Path(source)
    try:
        with open(source, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0 and path.is_file():
                raise ImageError(f"'{path}' is empty (0 bytes); copy or download it again")
            return _first_frame(_opened(file, f"'{path}'", max_pixels))
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise ImageError(_why_not_opened(source, error)) from error


def load_encoded(
    source: ImageSource, *, max_pixels: int = MAX_PIXELS, opened: OpenedImage | None = None
) -> NDArray[np.uint8] | EncodedImage:
    """As `load_image`, but a JPEG file that a GPU can decode stays encoded.

    opened: the same file, where its header was read already.

    That is a complete file in 8-bit grey or YCbCr; all others are decoded here, so that damaged files raise the same errors.
    """
    if isinstance(source, (np.ndarray, Image.Image)):
        return load_image(source, max_pixels=max_pixels)
    if isinstance(source, (bytes, bytearray, memoryview)):
        data, name = bytes(source), f"the image ({len(source)} bytes)"
    elif isinstance(source, (str, os.PathLike)):
        name = f"'{Path(source)}'"
        try:
            with open(source, "rb") as file:
                data = file.read()
        except (OSError, ValueError):
            data = b""
        if not data:
            return load_image(source, max_pixels=max_pixels)  # for its error
    else:
        return load_image(source, max_pixels=max_pixels)

    def decode() -> NDArray[np.uint8]:
        if opened is not None:
            return opened.load()
        return _first_frame(_opened(io.BytesIO(data), name, max_pixels)) if data else load_image(data)

    header = common_jpeg(data)
    if header is None or header[0] * header[1] > max_pixels:
        return decode()
    width, height, orientation = header
    if orientation > 4:  # height and width are swapped
        height, width = width, height
    return EncodedImage(data, height, width, orientation, decode)


def _why_not_opened(source: str | os.PathLike, error: OSError | ValueError) -> str:
    if not os.fspath(source):
        return "the image path is '' (empty); give the path of an image file"
    if os.path.isdir(source):
        return f"'{Path(source)}' is a folder, not an image; give an image file"
    if isinstance(error, (FileNotFoundError, NotADirectoryError, ValueError)):
        return _missing(str(source))
    return f"'{Path(source)}' cannot be read: {getattr(error, 'strerror', None) or error}"


def _missing(name: str) -> str:
    if re.match(r"[a-z][a-z0-9+.-]+://", name, re.IGNORECASE):
        return f"'{name}' is an address; detrt opens local files only: download it first"
    if name.isdigit():
        return f"there is no file '{name}'; a camera is written by its device, /dev/video{name}"
    return f"there is no file '{name}'; check the path"


@dataclass(frozen=True, slots=True)
class OpenedImage:
    """An image whose header is read, and the name that messages give it.

    `image.width` and `image.height` are those of the stored image, before its EXIF orientation is applied.
    """

    image: Image.Image
    name: str
    max_pixels: int

    def load(self) -> NDArray[np.uint8]:
        """Decode the pixels: (H, W, 3) uint8 RGB, as `load_image`.

        Raises:
            ImageError: no pixels, too many, or a damaged image.
        """
        image, name = self.image, self.name
        width, height = image.size
        if width < 1 or height < 1:
            raise ImageError(f"{name} has no pixels: {width}x{height}")
        if width * height > self.max_pixels:
            raise ImageError(
                f"{name} is too large: {width}x{height} = {width * height} pixels; allowed are {self.max_pixels}. Make it smaller"
            )
        try:
            with warnings.catch_warnings():
                _ignore_warnings()
                image.load()
                rgb = image if image.mode == "RGB" else _to_rgb(image, name)
                return upright(np.array(rgb), orientation_of(image))
        except ImageError:
            raise
        except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, ...
            raise ImageError(f"{name} is damaged or truncated: {error}; copy it again") from error


def _first_frame(opened: OpenedImage) -> NDArray[np.uint8]:
    """The pixels of a file that the caller named, with a warning where it has more frames. Raises ImageError."""
    pixels = opened.load()
    warn_of_frames(opened.image, opened.name)
    return pixels


class _Stoppable(io.BytesIO):
    """The bytes of a file that cannot be read any more once `stopped()` is true.

    So ends the decoding of an image that nobody waits for: decoders ask for more bytes all the time.
    """

    def __init__(self, data: bytes, stopped: Callable[[], bool]) -> None:
        super().__init__(data)
        self._stopped = stopped

    def read(self, size: int | None = -1, /) -> bytes:
        if self._stopped():
            raise ImageError("reading the image was stopped")
        return super().read(size)


def open_image(
    data: bytes,
    *,
    max_pixels: int = MAX_PIXELS,
    formats: Sequence[str] = IMAGE_FORMATS,
    stopped: Callable[[], bool] | None = None,
) -> OpenedImage:
    """Read the header of an image file.

    formats: names of Pillow that are allowed. stopped: asked between steps of reading and decoding; true ends them with an ImageError.

    Raises:
        ImageError: empty, not an image, not in one of the formats, or a damaged header.
    """
    if not data:
        raise ImageError("the image is empty (0 bytes); give the content of an image file")
    file = io.BytesIO(data) if stopped is None else _Stoppable(data, stopped)
    opened = _opened(file, f"the image ({len(data)} bytes)", max_pixels, formats)
    if stopped is not None and isinstance(opened.image, ImageFile.ImageFile):
        opened.image.decodermaxblock = _DECODED_AT_A_TIME
    return opened


def _opened(file: Any, name: str, max_pixels: int, formats: Sequence[str] = IMAGE_FORMATS) -> OpenedImage:
    try:
        with warnings.catch_warnings():
            _ignore_warnings()
            image = _open_in_stages(file, tuple(formats))
            if image.format in ("JPEG", "MPO"):
                file.seek(0)
                if _has_too_many_scans(file.read()):
                    raise ImageError(
                        f"{name} has more than {_MOST_SCANS} scans, each of which goes through all pixels; save it again"
                    )
    except UnidentifiedImageError:
        raise ImageError(
            f"{name} is not an image in one of the formats {', '.join(available(tuple(formats)))}, or it is damaged; save it as PNG or JPEG"
        ) from None
    except Image.DecompressionBombError as error:  # "Image size (400 pixels) exceeds limit ...": Pillow's, which may not be ours
        pixels = re.findall(r"\d+|$", str(error))[0]
        raise ImageError(f"{name} is too large: {pixels} pixels; allowed are {max_pixels}. Make it smaller") from None
    except ImageError:
        raise
    except Exception as error:  # Pillow's parsers raise nearly anything for a hostile header
        raise ImageError(f"{name} has a damaged header: {error!r}; save it again") from error
    return OpenedImage(image, name, max_pixels)


def _has_too_many_scans(data: bytes) -> bool:
    """Whether a JPEG file takes its decoder seconds whatever its size is."""
    return data.count(_SCAN_HEADER) > _MOST_SCANS


def _open_in_stages(file: Any, formats: tuple[str, ...]) -> Image.Image:
    """As Pillow does it: the formats of the usual plugins first, as the others take 0.1 s and 2 MiB to import."""
    Image.preinit()
    if usual := [name for name in formats if name in Image.OPEN]:
        with contextlib.suppress(UnidentifiedImageError):
            return Image.open(file, formats=usual)
    return Image.open(file, formats=available(formats))


@functools.cache
def available(formats: tuple[str, ...]) -> tuple[str, ...]:
    """Those that this Pillow and its plugins read: AVIF and HEIF may be missing."""
    Image.init()
    return tuple(name for name in formats if name in Image.OPEN)


def parse_image_formats(text: str) -> tuple[str, ...]:
    """ "jpeg,png" -> ("JPEG", "PNG"): names of Pillow, or suffixes of files.

    Raises:
        ImageError: no name, or one that is not a format which is read here.
    """
    Image.init()
    suffixes = Image.registered_extensions()
    names = (suffixes.get(f".{name.lower().lstrip('.')}", name.upper()) for name in comma_separated(text))
    formats = tuple(dict.fromkeys(names))
    known = sorted(set(Image.OPEN) - set(_UNSAFE_FORMATS))
    if wrong := [name for name in formats if name not in known]:
        raise ImageError(f"'{wrong[0]}' is not an image format that is read here; known are: {', '.join(known)}")
    if not formats:
        raise ImageError(f"no image format is named; give some of: {', '.join(known)}")
    return formats


def _ignore_warnings() -> None:
    """Ignore Pillow's warnings: sizes are checked here, and broken metadata does not affect pixels."""
    for category in (Image.DecompressionBombWarning, UserWarning):
        warnings.simplefilter("ignore", category)


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    """An image of another mode in RGB. Raises ImageError: pixels without an agreed range."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):  # which Pillow scales to 16 bits
        bits = 12 if getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE) == (12,) else 16  # which it does not scale
        upper = (np.asarray(image) >> (bits - 8)).astype(np.uint8)
        if getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0:  # white is zero, which Pillow reads so for 8 bits and fewer only
            upper = ~upper
        return Image.fromarray(upper).convert("RGB")
    if image.mode in ("I", "F"):
        kind = "floating point" if image.mode == "F" else "32-bit"
        raise ImageError(
            f"{name} has {kind} pixels (mode {image.mode}), which have no agreed range; save it with 8 or 16 bits, or convert it in Python: "
            "image.point(lambda value: value * (255 / largest)).convert('L'), with the value that is white as largest"
        )
    if image.mode == "La":  # grey times its transparency, which Pillow converts to LA alone
        image = image.convert("LA")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")  # direct P to RGB warns and may change a colour
    return image.convert("RGB")


def _from_array(array: NDArray) -> NDArray[np.uint8]:
    given = array
    if array.dtype != np.uint8:
        advice = "; floats from 0 to 1 become it by (array * 255).round().astype(np.uint8)" if array.dtype.kind == "f" else ""
        raise ImageError(f"an image array must be uint8 with values 0..255; got {_form(given)}{advice}")
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4):
        raise ImageError(f"an image array must have shape (H, W), (H, W, 3) or (H, W, 4); got {_form(given)}")
    if 0 in array.shape:
        raise ImageError(f"an image array must have pixels; got {_form(given)}")
    if array.shape[2] == 1:
        array = np.repeat(array, 3, axis=2)
    return np.ascontiguousarray(array[..., :3])


def _form(array: NDArray) -> str:
    return f"{array.dtype} {array.shape}"


def expand_inputs(names: Sequence[str | os.PathLike]) -> list[Input]:
    """Files, folders and glob patterns -> images and videos, without duplicates, in the order given.

    A file may have any suffix (video suffixes are videos). A folder stands for the images and videos
    below it at any depth, without hidden ones, in natural order (img2 before img10). A pattern (`*`, `?`,
    `[...]`, `**`) stands for the images and videos that it matches, in natural order.

    Raises:
        ImageError: no names; a path that does not exist; a folder or pattern without images.
    """
    if isinstance(names, (str, os.PathLike)):
        names = [names]
    if not names:
        raise ImageError("no inputs: give image or video files, folders or glob patterns")
    found: dict[Path, Input] = {}
    for name in names:
        for path in _expand(os.fspath(name)):
            kind = "video" if path.suffix.lower() in VIDEO_SUFFIXES else "image"
            found.setdefault(path, Input(path, kind))
    return list(found.values())


def _expand(name: str) -> list[Path]:
    if not name:  # an unset shell variable; Path would make it the current folder
        raise ImageError("an input name is '' (empty); give a file, a folder or a pattern")
    path = Path(name)
    try:
        if path.is_dir():
            return _sorted_media(path, (Path(folder, file) for folder, file in _walk(path)), "folder")
        if name and path.exists():
            return [path]
    except (OSError, ValueError) as error:
        raise ImageError(f"'{name}' cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if any(c in name for c in "*?["):
        import glob

        matches = (Path(match) for match in glob.glob(name, recursive=True))
        return _sorted_media(path, (match for match in matches if match.is_file()), "pattern")
    raise ImageError(_missing(name))


def _walk(folder: Path):
    for current, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".")]
        yield from ((current, name) for name in names if not name.startswith("."))


def _sorted_media(path: Path, paths, what: str) -> list[Path]:
    # A FIFO, a socket or a device would block the run. A link to nothing stays, and is named as one that cannot be read.
    media = [p for p in paths if p.suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES and (p.is_file() or not p.exists())]
    if not media:
        raise ImageError(
            f"the {what} '{path}' has no images or videos; known suffixes: {' '.join(sorted(IMAGE_SUFFIXES | VIDEO_SUFFIXES))}"
        )
    return sorted(media, key=natural_key)


def natural_key(path: Path) -> tuple:
    """Sort key of natural order: img2 before img10; the path breaks ties."""
    parts = re.split(r"(\d+)", path.as_posix().lower())
    return [int(p) if i % 2 else p for i, p in enumerate(parts)], path.as_posix()


# First and last bytes of a JPEG file, and largest distance of the last from the end: some cameras append data.
_START, _END, _TAIL = b"\xff\xd8\xff", b"\xff\xd9", 4096
_MOST_SEGMENTS = 1000  # before the pixels; large profiles have some two hundred
_PNG = b"\x89PNG\r\n\x1a\n"
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive, all with Huffman codes
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN, _EXIF, _MULTI, _ADOBE = 0xDA, 0xE1, 0xE2, 0xEE
_YCBCR = (b"\x01\x02\x03", b"\x00\x01\x02")  # ids of components; others may be RGB


def common_jpeg(data: bytes) -> tuple[int, int, int] | None:
    """(width, height, EXIF orientation) of a complete JPEG file in 8-bit grey or YCbCr, whose pixels do not depend on the
    decoder; None for other files. Sizes are those of the stored image."""
    found = _jpeg_header(data)
    return None if found is None or _has_too_many_scans(data) else (*found[0], _exif_orientation(data) if found[1] else 1)


def stored_size(data: bytes | bytearray) -> tuple[int, int] | None:
    """(height, width) of a JPEG or PNG file as it is stored, before its EXIF orientation is applied; None for others.

    A hint that takes microseconds, whatever the file says; decoders check what is there.
    """
    if data.startswith(_PNG) and data[12:16] == b"IHDR" and len(data) >= 24:
        size = int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")
        return size if all(size) else None
    found = _jpeg_header(data)
    return None if found is None else found[0][::-1]


def _jpeg_header(data: bytes | bytearray) -> tuple[tuple[int, int], bool] | None:
    """The size (width, height) of a common JPEG file, and whether it has EXIF data."""
    if not data.startswith(_START) or _END not in data[-_TAIL:]:
        return None
    size = None
    at, adobe, exif = 2, 1, False
    for _ in range(_MOST_SEGMENTS):
        if at + 4 > len(data) or data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        body = at + 4
        if marker == _SCAN:
            return None if size is None or adobe != 1 else (size, exif)
        if marker in _FRAMES:
            size = _frame(data[body : body + 15])
        if marker in _OTHER_FRAMES or (marker == _MULTI and data.startswith(b"MPF", body)) or (marker in _FRAMES and not size):
            return None
        if marker == _ADOBE and data.startswith(b"Adobe", body):
            adobe = data[body + 11] if body + 11 < len(data) else 0
        exif |= marker == _EXIF
        at += 2 + int.from_bytes(data[at + 2 : body], "big")
    return None


def _frame(body: bytes) -> tuple[int, int] | None:
    if len(body) < 6 or body[0] != 8:
        return None
    height, width, count = int.from_bytes(body[1:3], "big"), int.from_bytes(body[3:5], "big"), body[5]
    ids = body[6 : 6 + 3 * count : 3]
    return (width, height) if width and height and (count == 1 or (count == 3 and ids in _YCBCR)) else None


def _exif_orientation(data: bytes) -> int:
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
            warnings.simplefilter("ignore")
            return orientation_of(image)
    except Exception:  # Pillow's parsers raise nearly anything
        return 1


def orientation_of(image: Image.Image) -> int:
    """Orientation from EXIF or XMP, as Pillow reads it; 1 where there is none, or damaged metadata."""
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:
        return 1
