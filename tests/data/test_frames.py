"""The warning about image files of which only the first frame is read."""

from __future__ import annotations

import contextlib
import io
import warnings

import numpy as np
import pytest
from cli_support import cli  # noqa: F401 - a fixture
from PIL import Image, features

from detrt.data.frames import FramesWarning, show_frames_once
from detrt.data.images import load_encoded, load_image
from detrt.errors import ImageError

PAGES = [Image.fromarray(np.full((32, 48, 3), shade, np.uint8)) for shade in (10, 90, 200)]


def encode(kind, pages=PAGES, **options):
    file, pages = io.BytesIO(), [page.copy() for page in pages]  # an encoder leaves its settings in them
    pages[0].save(file, kind, **({"save_all": True, "append_images": pages[1:]} if len(pages) > 1 else {}), **options)
    return file.getvalue()


def pyramid():
    """A TIFF file of one image, with a smaller copy that says so, and a thumbnail that does not."""
    from PIL import TiffImagePlugin

    small, marked = PAGES[0].resize((24, 16)), TiffImagePlugin.ImageFileDirectory_v2()
    marked[254] = 1
    file = io.BytesIO()
    with TiffImagePlugin.AppendingTiffWriter(file) as writer:
        for page, tags in ((PAGES[0], {}), (PAGES[1], marked), (small, {})):
            page.copy().save(writer, "TIFF", tiffinfo=tags)
            writer.newFrame()
    return file.getvalue()


@pytest.mark.parametrize("load", [load_image, load_encoded])
@pytest.mark.parametrize(
    ("kind", "words"), [("gif", "3 frames"), ("png", "3 frames"), ("webp", "3 frames"), ("tiff", "3 pages"), ("avif", "3 frames")]
)
def test_the_first_of_several_frames_is_warned_of(tmp_path, load, kind, words):
    if kind in ("webp", "avif") and not features.check(kind):
        pytest.skip(f"this Pillow has no {kind}")
    path = tmp_path / f"several.{kind}"
    path.write_bytes(encode(kind))
    with pytest.warns(FramesWarning, match=rf"several\.{kind}' has {words}, and only the first is read; "):
        pixels = load(path)
    assert abs(int(pixels[0, 0, 0]) - 10) < 3
    with pytest.warns(FramesWarning, match=words):
        load(path.read_bytes())


@pytest.mark.parametrize("data", [encode("mpo"), encode("tiff", PAGES[:1]), encode("gif", PAGES[:1]), pyramid()])
def test_one_image_with_others_that_belong_to_it_is_no_warning(data):
    """Photographs of phones (MPO), thumbnails and pyramids."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_image(data).shape == (32, 48, 3)


def test_a_damaged_page_is_no_error_and_no_warning_of_pillow():
    """The first page is whole; the entries of the second are cut off."""
    data = encode("tiff", PAGES[:2])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for length in range(len(encode("tiff", PAGES[:1])), len(data)):
            with contextlib.suppress(ImageError):  # the first page is not all there
                assert load_image(data[:length]).shape == (32, 48, 3)
    assert {one.category for one in said} <= {FramesWarning}


def test_a_run_says_it_once(capsys, tmp_path):
    with pytest.warns(UserWarning, match="another"):
        show_frames_once()
        for name in "aabbcc":
            (tmp_path / f"{name}.gif").write_bytes(encode("gif"))
            load_image(tmp_path / f"{name}.gif")
        warnings.warn("another", stacklevel=1)
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"warning: '{tmp_path}/a.gif' has 3 frames, and only the first is read; " + first.partition("; ")[2]
    assert second.startswith("warning: other files have several frames")


def test_the_command_line_says_it(cli, tmp_path):
    pytest.importorskip("onnxruntime", reason="needs a model")
    from cli_support import write_onnx

    write_onnx(tmp_path / "m.onnx")
    (tmp_path / "a.tif").write_bytes(encode("tiff"))
    lines = cli("detect", tmp_path / "m.onnx", tmp_path / "a.tif").err.splitlines()
    assert [line for line in lines if "3 pages" in line] == [
        f"warning: '{tmp_path}/a.tif' has 3 pages, and only the first is read; save the others as files of their own"
    ]
