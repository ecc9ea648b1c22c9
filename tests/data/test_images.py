from __future__ import annotations

import io
import os
import struct
import warnings

import numpy as np
import pytest
from PIL import Image, ImageCms
from slow_images import png_chunk, scans

from detrt.data.frames import FramesWarning
from detrt.data.images import MAX_PIXELS, Input, common_jpeg, expand_inputs, load_encoded, load_image
from detrt.errors import ImageError

RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)


def encode(image: Image.Image, kind="png", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def path(tmp_path):
    def write(data: bytes, name="image.png"):
        target = tmp_path / name
        target.write_bytes(data)
        return target

    return write


def test_all_sources_give_the_same_pixels(path):
    data = encode(Image.fromarray(RGB))
    file = path(data)
    for source in (file, str(file), data, bytearray(data), memoryview(data), Image.fromarray(RGB), RGB):
        found = load_image(source)
        assert found.dtype == np.uint8 and found.flags.c_contiguous
        np.testing.assert_array_equal(found, RGB)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(RGB)
    data = encode(image, exif=exif.tobytes())
    from PIL import ImageOps

    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(load_image(data), np.asarray(expected.convert("RGB")))
    assert load_image(data).shape == ((5, 7, 3) if orientation < 5 else (7, 5, 3))


def test_damaged_exif_is_ignored():
    data = encode(Image.fromarray(RGB), exif=b"Exif\0\0II*\0\xff\xff\xff\xff broken")
    np.testing.assert_array_equal(load_image(data), RGB)


def test_palette_with_transparency_keeps_stored_colours():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load_image(encode(image, transparency=0))
    assert found.tolist() == [[[10, 20, 30], [200, 100, 50]]]


@pytest.mark.parametrize(
    ("image", "pixel"),
    [
        (Image.new("RGBA", (2, 1), (10, 20, 30, 0)), [10, 20, 30]),
        (Image.new("LA", (2, 1), (77, 0)), [77, 77, 77]),
        (Image.new("L", (2, 1), 77), [77, 77, 77]),
        (Image.new("1", (2, 1), 1), [255, 255, 255]),
        (Image.fromarray(np.full((1, 2), 0x1234, np.uint16)), [0x12] * 3),
    ],
    ids=["RGBA", "LA", "L", "1", "I;16"],
)
def test_modes(image, pixel):
    assert load_image(image)[0, 1].tolist() == pixel
    assert load_image(encode(image))[0, 1].tolist() == pixel


@pytest.mark.parametrize("mode", ["1", "L", "LA", "La", "P", "PA", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"])
def test_modes_of_8_bits_become_what_pillow_makes_of_them(mode):
    rgb = Image.fromarray(RGB)
    if mode == "LAB":
        profiles = [ImageCms.createProfile(name) for name in ("sRGB", "LAB")]
        image = ImageCms.profileToProfile(rgb, *profiles, outputMode="LAB")
    else:
        between = {"La": "LA", "PA": "LA", "RGBa": "RGBA"}.get(mode, "RGB")
        image = rgb.convert(between).convert(mode)
    assert image.mode == mode
    expected = image.convert("LA") if mode == "La" else image
    np.testing.assert_array_equal(load_image(image), np.asarray(expected.convert("RGB")))


def grey_tiff(bits, data, *more):
    """A TIFF of grey pixels in one row. more: (tag, value)."""
    tags = {256: len(data) * 8 // bits, 257: 1, 258: bits, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: len(data), **dict(more)}
    rows = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + rows + bytes(4)


def test_grey_of_more_than_8_bits_keeps_the_upper_8():
    """12 bits were taken for 16, so that the image was nearly black."""
    twelve = grey_tiff(12, bytes.fromhex("123abcfff000"))
    sixteen = grey_tiff(16, np.array([0x1234, 0xABCD], "<u2").tobytes())
    assert [load_image(data)[0, :, 0].tolist() for data in (twelve, sixteen)] == [[0x12, 0xAB, 0xFF, 0], [0x12, 0xAB]]
    negative = grey_tiff(16, np.array([0x1234, 0xABCD], "<u2").tobytes(), (262, 0))
    assert load_image(negative)[0, :, 0].tolist() == [255 - 0x12, 255 - 0xAB]
    maps = [f"P5\n2 1\n{most}\n".encode() + np.array([most, most // 2], ">u2").tobytes() for most in (4095, 65535)]
    assert [load_image(data)[0, :, 0].tolist() for data in maps] == [[255, 127]] * 2
    assert load_image(Image.open(io.BytesIO(maps[0])))[0, :, 0].tolist() == [255, 127]


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(np.full((1, 2), 255, np.int32)),
        Image.fromarray(np.full((1, 2), 65535, np.int32)),
        Image.fromarray(np.full((1, 2), 255, np.float32)),
        grey_tiff(32, np.array([255, 200], "<u4").tobytes()),
        grey_tiff(16, np.array([255, 200], "<i2").tobytes(), (339, 2)),
        grey_tiff(32, np.array([255, 200], "<f4").tobytes(), (339, 3)),
    ],
    ids=["I", "I of 16 bits", "F", "32-bit TIFF", "signed TIFF", "floating point TIFF"],
)
def test_pixels_without_an_agreed_range_are_refused(image):
    """Values of 0 to 255 in mode I were taken for 16 bits, so that the image was black. What the message says to type is right."""
    with pytest.raises(ImageError, match=r"no agreed range; save it with 8 or 16 bits, or .*\.convert\('L'\)"):
        load_image(image)
    opened = image if isinstance(image, Image.Image) else Image.open(io.BytesIO(image))
    largest = np.asarray(opened).max()
    assert load_image(opened.point(lambda value: value * (255 / largest)).convert("L"))[0, 0].tolist() == [255] * 3


def test_cmyk_jpeg():
    data = encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "jpeg", quality=100)
    found = load_image(data)[4, 4]
    assert found[0] > 240 and found[1] < 15 and found[2] < 15


def test_one_pixel_and_first_frame():
    assert load_image(Image.new("RGB", (1, 1), (1, 2, 3))).tolist() == [[[1, 2, 3]]]
    frames = [Image.new("RGB", (3, 2), c) for c in ((255, 0, 0), (0, 0, 255))]
    data = encode(frames[0], "gif", save_all=True, append_images=frames[1:])
    with pytest.warns(FramesWarning, match="2 frames"):
        assert load_image(data)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("channels", [(), (1,), (3,), (4,)], ids=str)
def test_arrays(channels):
    array = RNG.integers(0, 256, (4, 6, *channels), dtype=np.uint8)
    found = load_image(array[:, ::-1])  # a view that is not contiguous
    assert found.shape == (4, 6, 3) and found.flags.c_contiguous
    np.testing.assert_array_equal(found[..., 0], array.reshape(4, 6, -1)[:, ::-1, 0])


def header(width: int, height: int) -> bytes:
    """A PNG that says how large it is and holds no pixels."""

    ihdr = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", ihdr) + png_chunk(b"IDAT", b"") + png_chunk(b"IEND", b"")


JPEG = encode(Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)), "jpeg")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["0 bytes"]),
        (b"this is not an image", ["20 bytes", "not an image"]),
        (JPEG[: len(JPEG) // 2], ["damaged or truncated"]),
        (JPEG[:20], ["20 bytes"]),
        (header(20000, 20000), ["400000000", str(MAX_PIXELS), "smaller"]),
        (header(5, 5), ["damaged or truncated"]),
        (header(0, 5), []),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, []),
        (b"GIF89a", []),
        (b"II*\0\x08\0\0\0\xff\xff", []),
    ],
    ids=["empty", "text", "half", "stub", "bomb", "no pixels", "zero", "png noise", "gif stub", "tiff stub"],
)
def test_bad_bytes(data, words, path):
    for source in (data, path(data, "bad.png")):
        with pytest.raises(ImageError) as caught:
            load_image(source)
        for word in words:
            assert word in str(caught.value) or (word.endswith(" bytes") and source is not data)
        if source is not data:
            assert "bad.png" in str(caught.value)


def test_scans_are_counted_before_decoding(path):
    most, more = scans(100, side=40), scans(101)
    np.testing.assert_array_equal(load_image(most), Image.open(io.BytesIO(most)).convert("RGB"))
    assert common_jpeg(most) and common_jpeg(more) is None
    for load in (load_image, load_encoded):  # decoding it takes seconds
        for source in (more, path(more, "bad.jpg")):
            with pytest.raises(ImageError, match="more than 100 scans"):
                load(source)


def test_size_is_checked_before_decoding():
    with pytest.raises(ImageError, match=r"7x5 = 35 pixels; allowed are 34"):
        load_image(header(7, 5), max_pixels=34)
    with warnings.catch_warnings():  # between Pillow's warning and its error
        warnings.simplefilter("error")
        with pytest.raises(ImageError, match="damaged or truncated"):
            load_image(header(10_000, 12_000))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (np.zeros((4, 4, 3), np.float32), ["float32 (4, 4, 3)", "uint8"]),
        (np.zeros((4, 4, 2), np.uint8), ["(4, 4, 2)"]),
        (np.zeros((3,), np.uint8), ["(3,)"]),
        (np.zeros((0, 4, 3), np.uint8), ["(0, 4, 3)", "pixels"]),
        (Image.fromarray(np.ones((2, 2), np.float32)), ["floating point", "8 or 16 bits"]),
        (Image.fromarray(np.full((2, 2), 70000, np.int32)), ["32-bit"]),
        (17, ["int"]),
        (None, ["NoneType"]),
        ("https://example.com/a.jpg", ["https://example.com/a.jpg", "download"]),
        ("no/such.jpg", ["no/such.jpg"]),
        ("a\0b.jpg", ["no file"]),
        ("", ["'' (empty)"]),
        ("x" * 5000, []),
    ],
    ids=lambda v: str(v)[:20] if isinstance(v, (str, list)) else type(v).__name__,
)
def test_bad_sources(source, words):
    with pytest.raises(ImageError) as caught:
        load_image(source)
    for word in words:
        assert word in str(caught.value)


def test_folder_is_not_an_image(tmp_path):
    with pytest.raises(ImageError, match="is a folder"):
        load_image(tmp_path)


@pytest.fixture
def tree(tmp_path):
    for name in (
        "img10.jpg", "img2.jpg", "IMG1.PNG", "notes.txt", ".hidden.jpg", "clip.mp4", "sub/deep/a.webp",
        ".git/b.jpg", "empty/readme.md", "odd[1].jpg",
    ):  # fmt: skip
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    return tmp_path


def names(inputs, tree):
    return [source.path.relative_to(tree).as_posix() for source in inputs]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_what_blocks_is_left_out_of_a_folder(tmp_path):
    os.mkfifo(tmp_path / "fifo.jpg")
    with pytest.raises(ImageError, match="has no images"):
        expand_inputs(tmp_path)
    (tmp_path / "gone.jpg").symlink_to("nothing.jpg")
    (tmp_path / "a.jpg").write_bytes(b"")
    assert [entry.path.name for entry in expand_inputs(tmp_path)] == ["a.jpg", "gone.jpg"]


def test_expand_folder(tree):
    found = expand_inputs([str(tree)])
    assert names(found, tree) == [
        "clip.mp4", "IMG1.PNG", "img2.jpg", "img10.jpg", "odd[1].jpg", "sub/deep/a.webp"
    ]  # fmt: skip
    assert [source.kind for source in found] == ["video"] + ["image"] * 5


def test_a_folder_has_each_format_that_photographs_come_in(tmp_path):
    """What Pillow cannot read is then told and skipped, not left out in silence."""
    for name in ("a.jp2", "b.heic", "c.QOI", "d.tga", "favicon.ico"):
        (tmp_path / name).write_bytes(encode(Image.fromarray(RGB), "jpeg2000") if name == "a.jp2" else b"?")
    found = expand_inputs([tmp_path])
    assert names(found, tmp_path) == ["a.jp2", "b.heic", "c.QOI", "d.tga"]
    np.testing.assert_array_equal(load_image(found[0].path), RGB)
    with pytest.raises(ImageError, match="b.heic' is not an image in one of the formats JPEG") as caught:
        load_image(found[1].path)
    assert ("HEIF" in str(caught.value)) == ("HEIF" in Image.OPEN)


def test_expand_patterns_files_and_duplicates(tree):
    assert names(expand_inputs([f"{tree}/img*.jpg"]), tree) == ["img2.jpg", "img10.jpg"]
    assert names(expand_inputs([f"{tree}/**/*.webp"]), tree) == ["sub/deep/a.webp"]
    assert names(expand_inputs([f"{tree}/odd[1].jpg"]), tree) == ["odd[1].jpg"]
    found = expand_inputs([f"{tree}/img10.jpg", str(tree), f"{tree}/notes.txt"])
    assert names(found, tree)[0] == "img10.jpg" and names(found, tree).count("img10.jpg") == 1
    assert found[-1] == Input(tree / "notes.txt", "image")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], ["no inputs"]),
        (["missing.jpg"], ["missing.jpg"]),
        (["{tree}/empty"], ["empty", "no images"]),
        (["{tree}/*.bmp"], ["*.bmp", "no images"]),
        (["{tree}/img2.jpg", "{tree}/gone.jpg"], ["gone.jpg"]),
        ([""], ["''"]),
        (["a\0b"], ["no file"]),
        (["s3://bucket/a.jpg"], ["s3://bucket/a.jpg", "download"]),
    ],
    ids=lambda v: "+".join(v)[:20],
)
def test_bad_inputs(inputs, words, tree):
    with pytest.raises(ImageError) as caught:
        expand_inputs([name.format(tree=tree) for name in inputs])
    for word in words:
        assert word in str(caught.value)


def test_loading_is_lazy(tree):
    source = expand_inputs([tree / "img2.jpg"])[0]
    with pytest.raises(ImageError, match=r"img2.jpg' is empty"):
        load_image(source.path)
