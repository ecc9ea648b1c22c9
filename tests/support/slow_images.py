"""Small image files that take decoders long, within the limits of size and pixels."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image


def markers(size: int) -> bytes:
    """A JPEG file with a segment of no content for every four bytes."""
    return b"\xff\xd8" + b"\xff\xe0\x00\x02" * (size // 4) + b"\xff\xd9"


def scans(count: int, side: int = 7000) -> bytes:
    """A progressive JPEG file of a grey area with so many scans, the last of which say that nothing changes in all of its pixels."""
    file = io.BytesIO()
    Image.new("L", (side, side), 128).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    starts = [at for at in range(len(data) - 1) if data[at : at + 2] == b"\xff\xda"]
    last = data[starts[-1] : -2]
    return data[:-2] + last * (count - len(starts)) + data[-2:]


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def chunks(size: int) -> bytes:
    """A PNG file with an empty chunk that nobody knows for every twelve bytes."""
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + png_chunk(b"abCd", b"") * (size // 12)


def pixel_chunks(size: int) -> bytes:
    """A PNG file whose pixels come in chunks of one byte."""
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 7000, 7000, 8, 0, 0, 0, 0))
    packed = zlib.compress(bytes(7000 * 7001), 0)[: size // 13]
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(png_chunk(b"IDAT", packed[i : i + 1]) for i in range(len(packed)))


def strips(size: int) -> bytes:
    """A TIFF file of one column with a strip for every row."""
    count = size // 9
    tags = [
        (256, 4, 1, 1),  # width
        (257, 4, 1, count),
        (258, 3, 1, 8),
        (259, 3, 1, 1),  # not compressed
        (262, 3, 1, 1),
        (273, 4, count, 8 + 2 + 12 * 8 + 4),  # offsets of the strips
        (278, 4, 1, 1),  # rows of a strip
        (279, 4, count, 8 + 2 + 12 * 8 + 4 + 4 * count),
    ]
    table = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    pixels = 8 + len(table) + 8 * count
    offsets = struct.pack(f"<{count}I", *range(pixels, pixels + count))
    return b"II*\0" + struct.pack("<I", 8) + table + offsets + struct.pack("<I", 1) * count + bytes(count)


def packed_strips(size: int) -> bytes:
    """The same, compressed: libtiff reads it."""
    data = bytearray(strips(size))
    at = data.index(struct.pack("<HHI", 259, 3, 1))
    data[at + 8 : at + 10] = struct.pack("<H", 32773)  # PackBits
    return bytes(data)


def frames(size: int) -> bytes:
    """A GIF file with an empty comment for every four bytes before its image."""
    return b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0, 0, 0) + b"\x21\xfe\x00" * (size // 3)


def qoi(width: int = 5000, height: int = 5000) -> bytes:
    """A QOI file; Pillow decodes them in Python."""
    return b"qoif" + struct.pack(">IIBB", width, height, 3, 0) + b"\x55" * (width * height) + bytes(7) + b"\x01"


SLOW = {
    "JPEG of segments": markers,
    "PNG of chunks": chunks,
    "PNG of chunks of pixels": pixel_chunks,
    "TIFF of strips": strips,
    "TIFF of packed strips": packed_strips,
    "GIF of comments": frames,
}
