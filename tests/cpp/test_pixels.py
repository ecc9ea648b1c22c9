"""Pixels of the C++ runtime are those of Pillow: files in, and resized."""

from __future__ import annotations

import struct
import subprocess
import zlib
from contextlib import nullcontext

import numpy as np
import pytest
from PIL import Image, ImageOps
from slow_images import scans

from detrt.data.images import load_image
from detrt.data.preprocess import resize
from detrt.errors import ImageError
from detrt.spec import RESAMPLES


def pixels(build, path, *size):
    done = subprocess.run([str(build / "tests/detrt-pixels"), str(path), *map(str, size)], capture_output=True, timeout=60)
    if done.returncode == 2:
        return done.stderr.decode()
    assert done.returncode == 0, done.stderr
    head, _, body = done.stdout.partition(b"\n")
    height, width = map(int, head.split())
    return np.frombuffer(body, np.uint8).reshape(height, width, 3)


def test_files(sanitized, photos):
    assert len(photos) > 20
    for path in photos:
        expected, got = load_image(path), pixels(sanitized, path)
        assert got.shape == expected.shape, path.name
        # CMYK and a few upsamplings may differ in rounding between versions of libjpeg-turbo.
        assert np.abs(got.astype(int) - expected).max() <= 1, path.name


def exif(*entries: tuple[int, int, int], order="<") -> bytes:
    """An EXIF block with the orientation of each (type, count, value)."""
    head = b"II*\0" if order == "<" else b"MM\0*"
    rows = [struct.pack(order + "HHI", 0x0112, kind, count) + VALUES[kind](value, order) for kind, count, value in entries]
    return head + struct.pack(order + "IH", 8, len(rows)) + b"".join(rows) + bytes(4)


VALUES = {
    1: lambda value, _: bytes([value, 0, 0, 0]),
    3: lambda value, order: struct.pack(order + "HH", value, 0),
    4: lambda value, order: struct.pack(order + "I", value),
    9: lambda value, order: struct.pack(order + "i", value),
}
TURNED, FLIPPED = exif((3, 1, 6)), exif((3, 1, 3))
XMP = b'<x tiff:Orientation="6"/>'
PROFILE = b"Raw profile type exif\0"
DIGITS = b"\nexif\n%8d\n%s\n" % (len(TURNED) + 6, (b"Exif\0\0" + TURNED).hex("\n", 36).encode())
TEXT = b"XML:com.adobe.xmp\0"
# Segments of a JPEG file, each behind "Exif" or the name of XMP, and chunks of a PNG file.
SEGMENTS = {
    "signed": [exif((9, 1, 6))],
    "two values": [exif((3, 2, 6))],
    "a byte": [exif((1, 1, 6))],
    "two entries": [exif((3, 1, 6), (3, 1, 3))],
    "continued": [TURNED[:12], TURNED[12:]],
    "zero before XMP": [exif((3, 1, 0)), XMP],
    "none before XMP": [exif(), XMP],
    "nine, big endian": [exif((4, 1, 9), order=">")],
}
CHUNKS = {
    "prefixed": [(b"eXIf", b"Exif\0\0" + TURNED)],
    "two": [(b"eXIf", TURNED), (b"eXIf", FLIPPED)],
    "profile": [(b"tEXt", PROFILE + DIGITS)],
    "packed profile": [(b"zTXt", PROFILE + b"\0" + zlib.compress(DIGITS))],
    "profile after texts": [*[(b"tEXt", b"exif:Model\0x")] * 20, (b"tEXt", PROFILE + DIGITS)],
    "block before profile": [(b"tEXt", PROFILE + DIGITS), (b"eXIf", FLIPPED)],
    "damaged profile": [(b"zTXt", PROFILE + b"\0" + zlib.compress(DIGITS)[:9])],
    "wrong digits": [(b"tEXt", PROFILE + DIGITS.replace(b"49", b"4x"))],
    "XMP": [(b"iTXt", TEXT + b"\0\0\0\0" + XMP)],
    "packed XMP": [(b"iTXt", TEXT + b"\1\0en\0key\0" + zlib.compress(XMP))],
    "XMP as text": [(b"tEXt", TEXT + XMP)],
    "zero before XMP": [(b"eXIf", exif((3, 1, 0))), (b"iTXt", TEXT + b"\0\0\0\0" + XMP)],
}


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_metadata(folder) -> list:
    """The same image with every form of metadata, in front of the pixels and, for PNG, behind them."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (7, 11, 3), dtype=np.uint8))
    files = {}
    for kind in ("JPEG", "PNG"):
        image.save(folder / kind, kind)
        files[kind] = (folder / kind).read_bytes()
        (folder / kind).unlink()
    jpeg, png = files["JPEG"], files["PNG"]
    for name, parts in SEGMENTS.items():
        named = [(b"http://ns.adobe.com/xap/1.0/\0" if part is XMP else b"Exif\0\0") + part for part in parts]
        segments = b"".join(b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part for part in named)
        (folder / f"{name}.jpg").write_bytes(jpeg[:2] + segments + jpeg[2:])
    for name, parts in CHUNKS.items():
        chunks = b"".join(chunk(*part) for part in parts)
        for place, at in {"before": 33, "behind": len(png) - 12}.items():
            (folder / f"{name} {place}.png").write_bytes(png[:at] + chunks + png[at:])
    return sorted(folder.iterdir())


def test_orientations_in_all_forms_of_metadata(sanitized, tmp_path):
    """A camera's file that lies on its side for one of the two would give other boxes."""
    shapes = set()
    for path in with_metadata(tmp_path):
        expected, got = load_image(path), pixels(sanitized, path)
        if "wrong" not in path.name:  # which Pillow's function does not take
            with Image.open(path) as image:
                assert (np.asarray(ImageOps.exif_transpose(image)) == expected).all(), path.name
        assert np.shape(got) == expected.shape, path.name
        assert (got == expected).all(), path.name
        shapes.add(got.shape)
    assert shapes == {(7, 11, 3), (11, 7, 3)}


def test_damaged_metadata_before_the_pixels_is_refused_by_both(sanitized, tmp_path):
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    png, text = (tmp_path / "a.png").read_bytes(), bytearray(chunk(b"tEXt", b"key\0text"))
    text[-1] ^= 1
    for at, refused in ((33, True), (len(png) - 12, False)):
        (tmp_path / "b.png").write_bytes(png[:at] + text + png[at:])
        assert isinstance(pixels(sanitized, tmp_path / "b.png"), str) == refused
        with pytest.raises(ImageError) if refused else nullcontext():
            load_image(tmp_path / "b.png")


@pytest.mark.parametrize(
    "head",
    [
        b"P6 2 1 255 ",
        b"P6\n# x\n2 #y\r1\n255\n",
        b"P6 2 1 2#x\n55\n",
        b"P6 2 1 255#x\n ",
        b"P6\v2\f1\r255\n",
        b"P6#x\n2 1 255\n",
        b"P6\0002 1 255\n",
        b"P6 2 1 255x",
        b"P6 2 1 ",
    ],
)
def test_heads_of_pnm(sanitized, tmp_path, head):
    """A comment ends no number, so that none of it is read as pixels."""
    path = tmp_path / "a.ppm"
    path.write_bytes(head + b"abcdef")
    try:
        expected = load_image(path)
    except ImageError:
        assert isinstance(pixels(sanitized, path), str)
    else:
        assert (pixels(sanitized, path) == expected).all()
        assert expected.tobytes() == b"abcdef"


@pytest.mark.parametrize("resample", RESAMPLES)
def test_resize(sanitized, tmp_path, resample):
    rng = np.random.default_rng(RESAMPLES.index(resample))
    sizes = [((97, 131), (23, 31)), ((64, 48), (41, 43)), ((30, 50), (64, 20)), ((20, 20), (64, 64)), ((90, 31), (9, 31))]
    for number, (before, after) in enumerate(sizes):
        path = tmp_path / f"{number}.png"
        Image.fromarray(rng.integers(0, 256, (*before, 3), dtype=np.uint8)).save(path)
        expected = resize(load_image(path), after, resample)
        got = pixels(sanitized, path, *after, RESAMPLES.index(resample))
        assert np.abs(got.astype(int) - expected).max() <= 1, (before, after)


def test_real_photographs(sanitized, real_data):
    paths = sorted((real_data / "images/coco_permissive").rglob("*.jpg"))[:12]
    assert paths
    for path in paths:
        expected = resize(load_image(path), (416, 416), "bilinear")
        got = pixels(sanitized, path, 416, 416, RESAMPLES.index("bilinear"))
        assert np.abs(got.astype(int) - expected).max() <= 1, path.name


def test_scans_are_counted_before_decoding(sanitized, tmp_path):
    """A hundred of them are read, as in Python; a file of one more takes seconds."""
    path = tmp_path / "scans.jpg"
    path.write_bytes(scans(100, side=40))
    assert (pixels(sanitized, path) == load_image(path)).all()
    path.write_bytes(scans(101))
    assert "more than 100 scans" in pixels(sanitized, path)


def test_damaged_files_are_refused_by_both(sanitized, photos, tmp_path):
    refused = 0
    for path in photos:
        content = path.read_bytes()
        for cut in (len(content) // 3, len(content) * 2 // 3):
            part = tmp_path / path.name
            part.write_bytes(content[:cut])
            got = pixels(sanitized, part)
            with pytest.raises(ImageError):
                load_image(part)
            assert isinstance(got, str) and "damaged or truncated" in got, path.name
            refused += 1
    assert refused > 40
