from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageFont

from detrt.data.draw import class_colour, draw_detections
from detrt.detections import Detections
from detrt.errors import ImageError


def found(boxes, size, labels=None):
    n = len(boxes)
    return Detections(boxes, np.linspace(0.9, 0.4, n), range(n), tuple(labels or ["thing"] * n), size)


def test_draws_on_a_copy_in_the_colour_of_the_class():
    image = np.full((200, 300, 3), 128, np.uint8)
    source = draw_detections(image, found([[50, 80, 250, 180]], (200, 300)))
    assert isinstance(source, Image.Image) and source.size == (300, 200) and source.mode == "RGB"
    assert (image == 128).all()
    pixels = np.asarray(source)
    assert tuple(pixels[130, 50]) == class_colour(0) and tuple(pixels[179, 150]) == class_colour(0)
    assert (pixels[100:170, 60:240] == 128).all() and (pixels[190:] == 128).all()
    assert (pixels[60:80, 50:120] != 128).any()  # the label above the box


def test_nothing_to_draw():
    image = np.full((20, 30, 3), 7, np.uint8)
    np.testing.assert_array_equal(np.asarray(draw_detections(image, found([], (20, 30)))), image)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (8, 8), (30, 20), (5, 400), (400, 5), (900, 1600)])
def test_any_size(size):
    height, width = size
    boxes = [
        [0, 0, width, height],
        [0, 0, 0, 0],
        [width, height, width, height],
        [width / 3, 0, width / 2, height / 2],
    ]
    source = draw_detections(np.zeros((*size, 3), np.uint8), found(boxes, size))
    assert source.size == (width, height)
    assert np.asarray(source).any()


@pytest.mark.parametrize("label", ["人", "naïve café", "", "a\nb\tc", "x" * 500, "😀", "\udc80", "<b>[red]"], ids=ascii)
def test_any_label(label):
    draw_detections(np.zeros((60, 80, 3), np.uint8), found([[5, 20, 70, 50]], (60, 80), [label]))


def test_labels_stay_inside_and_apart():
    image = np.zeros((120, 400, 3), np.uint8)
    boxes = [[0, 0, 40, 110], [380, 100, 400, 120], [200, 60, 260, 100], [201, 61, 261, 101]]
    source = np.asarray(draw_detections(image, found(boxes, (120, 400), ["one", "two", "three", "four"])))
    filled = []
    for class_id in range(4):
        rows, columns = np.nonzero((source == class_colour(class_id)).all(-1))
        filled.append(len(rows))
        assert rows.min() >= 0 and columns.max() < 400
    # Every label has an area in its own colour; one under another would have only its line left.
    assert min(filled) > 250, filled


def test_colours_are_stable_and_differ():
    colours = [class_colour(i) for i in range(80)]
    assert len(set(colours)) == 80 and colours == [class_colour(i) for i in range(80)]
    assert class_colour(80) == class_colour(0) and class_colour(np.int64(3)) == colours[3]
    assert all(0 <= c <= 255 and isinstance(c, int) for colour in colours for c in colour)


@pytest.mark.parametrize("own_font", [False, True])
@pytest.mark.parametrize(
    "label", ["猫 and dog", "مرحبا", "e\u0301clair", "👩‍🚀", "\udc80 lone", "two\nlines\t.", "\u200b", "", "x" * 500]
)
def test_labels_of_any_script(tmp_path, label, own_font):
    """Phrases of a prompt are labels, also where the font has no letter for them."""
    font = None
    if own_font:
        font = tmp_path / "font.ttf"
        font.write_bytes(ImageFont.load_default(20).font_bytes)
    one = Detections([[20, 40, 200, 120]], [0.5], [3], (label,), (200, 300))
    source = np.asarray(draw_detections(np.zeros((200, 300, 3), np.uint8), one, font=font))
    assert (source == class_colour(3)).all(-1).sum() > 500  # the box, and the area of its label


def test_bad_input(tmp_path):
    image = np.zeros((20, 30, 3), np.uint8)
    with pytest.raises(ValueError, match=r"\(30, 20\).*\(20, 30\)"):
        draw_detections(image, found([], (30, 20)))
    with pytest.raises(ImageError, match=r"no/font.ttf"):
        draw_detections(image, found([[0, 0, 9, 9]], (20, 30)), font="no/font.ttf")
    with pytest.raises(ImageError, match=r"float32"):
        draw_detections(image.astype(np.float32), found([], (20, 30)))
