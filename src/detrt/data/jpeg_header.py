"""What the header of a JPEG file says, where it is of the kind that every decoder turns to the same picture."""

from __future__ import annotations

import io
import warnings

from PIL import Image

# The first and last bytes of a file, and how far from its end the last may be: some cameras append data.
_START, _END, _TAIL = b"\xff\xd8\xff", b"\xff\xd9", 4096
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive, all with Huffman codes
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN, _EXIF, _MULTI, _ADOBE = 0xDA, 0xE1, 0xE2, 0xEE
_YCBCR = (b"\x01\x02\x03", b"\x00\x01\x02")  # ids of components; others may be RGB
_ORIENTATION_TAG = 0x0112


def common_jpeg(data: bytes) -> tuple[int, int, int] | None:
    """(width, height, EXIF orientation) of a whole JPEG file in grey or YCbCr with 8 bits; None: it is none, or another
    kind. Sizes are those of the pixels as they are stored."""
    if not data.startswith(_START) or _END not in data[-_TAIL:]:
        return None
    size = None
    place, adobe, exif = 2, 1, False
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        body = place + 4
        if marker == _SCAN:
            if size is None or adobe != 1:
                return None
            return *size, _orientation(data) if exif else 1
        if marker in _FRAMES:
            size = _frame(data[body : body + 15])
        if marker in _OTHER_FRAMES or (marker == _MULTI and data.startswith(b"MPF", body)) or (marker in _FRAMES and not size):
            return None
        if marker == _ADOBE and data.startswith(b"Adobe", body):
            adobe = data[body + 11] if body + 11 < len(data) else 0
        exif |= marker == _EXIF
        place += 2 + int.from_bytes(data[place + 2 : body], "big")
    return None


def _frame(body: bytes) -> tuple[int, int] | None:
    if len(body) < 6 or body[0] != 8:
        return None
    height, width, count = int.from_bytes(body[1:3], "big"), int.from_bytes(body[3:5], "big"), body[5]
    ids = body[6 : 6 + 3 * count : 3]
    return (width, height) if width and height and (count == 1 or (count == 3 and ids in _YCBCR)) else None


def _orientation(data: bytes) -> int:
    """Of EXIF or XMP, as Pillow reads it."""
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
            warnings.simplefilter("ignore")
            return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # what is damaged there says nothing about the pixels: the image is as it is stored
        return 1
