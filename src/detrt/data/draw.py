"""Masks, boxes and labels on images, with Pillow and its bundled font."""

from __future__ import annotations

import functools
import math
import os
import unicodedata
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..detections import Detections
from ..errors import ImageError
from ..tasks import TASKS
from .images import ImageSource, load_image
from .raw_image import RawImage

RGB = tuple[int, int, int]
Box = tuple[int, int, int, int]

# Far apart from their neighbours in hue and all bright enough to be seen on a dark image.
_PALETTE = "ff4d4d 2e9bff 3ddc4b ffb300 b45cff 00d5d5 ff5cc0 b3e000 ff7a1a 5b6bff 00c78a f2e205 e0409a 7fd1ff c98a5b 9be08f"
_TINTS = ((0, 0.0), (255, 0.45), (0, 0.35), (128, 0.5), (255, 0.7))  # (grey to mix in, fraction)
_MAX_NAME_LETTERS = 100  # letters of a class name
_COLOURS = tuple((int(c[:2], 16), int(c[2:4], 16), int(c[4:], 16)) for c in _PALETTE.split())


def class_colour(class_id: int) -> RGB:
    """The colour of a class: the same in every image; 16 hues in 5 tints."""
    turn, index = divmod(int(class_id), len(_COLOURS))
    towards, fraction = _TINTS[turn % len(_TINTS)]
    red, green, blue = (round(c + (towards - c) * fraction) for c in _COLOURS[index])
    return red, green, blue


def draw_detections(
    image: ImageSource | RawImage, detections: Detections, *, font: str | os.PathLike | None = None
) -> Image.Image:
    """A copy of the image with boxes, class names, track ids and scores, and masks in the colours of their classes.

    image: the image of the detections, any form that `load_image` takes. Lines and text scale with it. A
    label is inside the image and, if possible, not on another label; one that does not fit into a small
    image is shortened or left out. Best scores are drawn last.
    font: a TrueType file for class names in other scripts. The bundled font has the letters of ASCII;
    with it, accents are dropped and other letters become "?".

    Raises:
        ImageError: the image or the font cannot be read.
        ValueError: the image has another size than the detections.
    """
    pixels = load_image(image)
    if pixels.shape[:2] != tuple(detections.image_size_hw):
        raise ValueError(
            f"the detections are of an image of {detections.image_size_hw} (height, width); got an image of {pixels.shape[:2]}"
        )
    colours = [class_colour(i) for i in detections.class_ids]
    for task in TASKS:
        if (values := getattr(detections, task.field)) is not None:
            pixels = task.draw(pixels, values, colours)
    canvas = Image.fromarray(pixels)
    pen = ImageDraw.Draw(canvas)
    scale = math.sqrt(canvas.width * canvas.height)
    line = max(1, round(scale / 280))
    letters = _font(max(10, round(scale / 40)), None if font is None else os.fspath(font))
    order = range(len(detections) - 1, -1, -1)
    # In pixels, at least one each, inside the image.
    first, last = np.split(np.floor(detections.boxes_xyxy.astype(np.float64) + 0.5).astype(int), 2, axis=1)
    first = np.clip(first, 0, np.array(canvas.size) - 1)
    boxes: list[Box] = [tuple(box) for box in np.hstack([first, np.clip(last - 1, first, np.array(canvas.size) - 1)]).tolist()]
    for i in order:
        colour = class_colour(detections.class_ids[i])
        if line > 1:  # a dark rim keeps the line visible on objects of its colour
            pen.rectangle(_grow(boxes[i], 1), outline=_darker(colour), width=line + 2)
        pen.rectangle(boxes[i], outline=colour, width=line)
    # The best label is placed first and painted last.
    occupied: list[Box] = []
    labels = []
    for i in reversed(order):
        name = detections.labels[i] if font is not None else _to_ascii(detections.labels[i])
        if detections.track_ids is not None and detections.track_ids[i] >= 0:
            name = f"{name[:_MAX_NAME_LETTERS]} #{detections.track_ids[i]}"
        label = _position_label(pen, letters, boxes[i], name, float(detections.scores[i]), line, canvas.size, occupied)
        if label is not None:
            occupied.append(label[1])
            labels.append((class_colour(detections.class_ids[i]), *label))
    for colour, text, area, origin in reversed(labels):
        pen.rectangle(area, fill=colour)
        pen.text(origin, text, fill=_text_colour(colour), font=letters)
    return canvas


def _position_label(
    pen: ImageDraw.ImageDraw,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    box: Box,
    label: str,
    score: float,
    line: int,
    size_wh: tuple[int, int],
    occupied: list[Box],
) -> tuple[str, Box, tuple[float, float]] | None:
    """(text, area of its background, position of its first letter); None if nothing fits."""
    width, height = size_wh
    pad = max(2, line)
    for text in _texts(label, score):
        # The height of fixed letters, so that all labels of an image have the same height.
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
        _, high, _, low = pen.textbbox((0, 0), "Ag|", font=font)
        top, bottom = min(top, high), max(bottom, low)
        w, h = math.ceil(right - left) + 2 * pad, math.ceil(bottom - top) + 2 * pad
        if w <= width and h <= height:
            break
    else:
        return None
    positions = []
    for x in (box[0], box[2] - w + 1):
        x = min(max(0, x), width - w)
        # Above the box, inside at its top, below it, inside at its bottom.
        for y in (box[1] - h, box[1], box[3] + 1, box[3] - h + 1):
            if 0 <= y <= height - h:
                positions.append((x, y, x + w - 1, y + h - 1))
    if not positions:
        x, y = min(max(0, box[0]), width - w), min(max(0, box[1]), height - h)
        positions = [(x, y, x + w - 1, y + h - 1)]
    area = next((p for p in positions if not any(_overlap(p, other) for other in occupied)), positions[0])
    return text, area, (area[0] + pad - left, area[1] + pad - top)


def _texts(label: str, score: float) -> Iterator[str]:
    """Forms of the label, from long to short."""
    label = " ".join("".join(c if c.isprintable() else " " for c in label[: _MAX_NAME_LETTERS + 20]).split())
    yield f"{label} {score:.2f}".strip()
    yield label
    for length in range(len(label) - 1, 1, -1):
        yield label[:length].rstrip() + "."


@functools.lru_cache(maxsize=16)
def _font(size: int, path: str | None) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    if path is None:
        return ImageFont.load_default(size)
    try:
        return ImageFont.truetype(path, size)
    except OSError as error:
        raise ImageError(f"'{path}' cannot be read as a font: {error}; give a TrueType or OpenType file") from None


def _to_ascii(text: str) -> str:
    plain = (c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return "".join(plain).encode("ascii", "replace").decode("ascii")


def _grow(box: Box, by: int) -> Box:
    return box[0] - by, box[1] - by, box[2] + by, box[3] + by


def _overlap(a: Box, b: Box) -> bool:
    return a[0] <= b[2] and b[0] <= a[2] and a[1] <= b[3] and b[1] <= a[3]


def _darker(colour: RGB) -> RGB:
    red, green, blue = (c // 4 for c in colour)
    return red, green, blue


def _text_colour(colour: RGB) -> RGB:
    red, green, blue = colour
    return (0, 0, 0) if 0.299 * red + 0.587 * green + 0.114 * blue > 120 else (255, 255, 255)
