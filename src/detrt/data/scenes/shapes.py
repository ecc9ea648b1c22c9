"""Shapes, colours and fills that :mod:`detrt.data.scenes.scene` puts into its images.

Every shape is a short list of polygons in a unit frame (x to the right, y down, about
-0.5..0.5 on both axes), each of which adds to or cuts out of the silhouette. The glyphs are
such polygons as well, so no font file is needed and the images are the same everywhere.
All shapes are mirror symmetric: a flipped image is a valid image of the same classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageChops, ImageDraw

Point = tuple[float, float]
Part = tuple[bool, tuple[Point, ...]]  # (adds to the silhouette?, polygon)

FILLS: tuple[str, ...] = ("plain", "striped", "checked", "dotted", "gradient", "outlined")

# Far enough apart to be named by eye; every object jitters its colour around one of them.
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (214, 38, 40),
    "orange": (245, 130, 25),
    "yellow": (246, 218, 50),
    "green": (42, 160, 60),
    "cyan": (50, 200, 215),
    "blue": (36, 84, 205),
    "purple": (132, 58, 180),
    "pink": (246, 130, 185),
    "brown": (125, 76, 40),
    "black": (22, 22, 24),
    "white": (242, 242, 240),
    "gray": (130, 132, 134),
}


def _ellipse(cx: float, cy: float, rx: float, ry: float, steps: int = 48) -> tuple[Point, ...]:
    return tuple(
        (
            cx + rx * math.cos(2 * math.pi * k / steps),
            cy + ry * math.sin(2 * math.pi * k / steps),
        )
        for k in range(steps)
    )


def _regular(corners: int, radius: float = 0.5, inner: float | None = None) -> tuple[Point, ...]:
    """Regular polygon with one corner up; with ``inner`` (a radius) a star."""
    count = corners if inner is None else 2 * corners
    points = []
    for k in range(count):
        r = radius if inner is None or k % 2 == 0 else inner
        angle = 2 * math.pi * k / count - math.pi / 2
        points.append((r * math.cos(angle), r * math.sin(angle)))
    return tuple(points)


def _heart(steps: int = 56) -> tuple[Point, ...]:
    points = []
    for k in range(steps):
        t = 2 * math.pi * k / steps
        x = 16 * math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((x / 34, -(y + 2.5) / 34))
    return tuple(points)


def _plus(arm: float = 0.17) -> tuple[Point, ...]:
    a, h = arm, 0.5
    return (
        (-a, -h), (a, -h), (a, -a), (h, -a), (h, a), (a, a),
        (a, h), (-a, h), (-a, a), (-h, a), (-h, -a), (-a, -a),
    )  # fmt: skip


SHAPES: dict[str, tuple[Part, ...]] = {
    "circle": ((True, _ellipse(0, 0, 0.5, 0.5)),),
    "square": ((True, ((-0.45, -0.45), (0.45, -0.45), (0.45, 0.45), (-0.45, 0.45))),),
    "triangle": ((True, ((0.0, -0.5), (0.5, 0.42), (-0.5, 0.42))),),
    "star": ((True, _regular(5, 0.52, 0.21)),),
    "ring": ((True, _ellipse(0, 0, 0.5, 0.5)), (False, _ellipse(0, 0, 0.29, 0.29))),
    "cross": ((True, _plus()),),
    # Cut from below, not from the side: this keeps the crescent mirror symmetric.
    "crescent": ((True, _ellipse(0, 0, 0.5, 0.5)), (False, _ellipse(0, 0.27, 0.42, 0.42))),
    "heart": ((True, _heart()),),
    "arrow": (
        (
            True,
            (
                (0.0, -0.52), (0.42, -0.06), (0.16, -0.06), (0.16, 0.5),
                (-0.16, 0.5), (-0.16, -0.06), (-0.42, -0.06),
            ),
        ),
    ),
    "hexagon": ((True, _regular(6, 0.52)),),
    "letter A": (
        (
            True,
            (
                (-0.15, -0.5), (0.15, -0.5), (0.47, 0.5), (0.26, 0.5), (0.19, 0.26),
                (-0.19, 0.26), (-0.26, 0.5), (-0.47, 0.5),
            ),
        ),
        (False, ((0.0, -0.3), (0.13, 0.1), (-0.13, 0.1))),
    ),
    "digit 8": (
        (True, _ellipse(0, -0.25, 0.29, 0.25)),
        (True, _ellipse(0, 0.2, 0.35, 0.3)),
        (False, _ellipse(0, -0.25, 0.13, 0.1)),
        (False, _ellipse(0, 0.21, 0.17, 0.135)),
    ),
}  # fmt: skip

# Glyphs are read the right way up; the other shapes may point anywhere.
MAX_ROTATION_DEG: dict[str, float] = {"letter A": 35.0, "digit 8": 35.0}


@dataclass(frozen=True, slots=True)
class Sprite:
    """One rendered object before it is placed.

    ``alpha`` is an L image with the soft silhouette (0..255), ``paint`` an RGB image of the
    same size; ``left``/``top`` place them in the image (integer pixels, may be negative);
    ``box_xyxy`` is the tight box of the whole silhouette in image pixels, before clipping.
    """

    alpha: Image.Image
    paint: Image.Image
    left: int
    top: int
    box_xyxy: tuple[float, float, float, float]


def silhouette(
    name: str, center: Point, size_wh: Point, angle_deg: float
) -> tuple[Image.Image, Image.Image, int, int, tuple[float, float, float, float]]:
    """Draw the silhouette of one shape.

    ``center`` and ``size_wh`` are in pixels of the image, ``angle_deg`` turns clockwise.
    Returns the soft mask and the soft rim (both L, same size), the mask's left and top in
    the image, and the tight box (x0, y0, x1, y1) in pixels of the image.
    """
    cos, sin = math.cos(math.radians(angle_deg)), math.sin(math.radians(angle_deg))
    placed: list[tuple[bool, list[Point]]] = []
    for adds, polygon in SHAPES[name]:
        placed.append(
            (
                adds,
                [
                    (
                        center[0] + x * size_wh[0] * cos - y * size_wh[1] * sin,
                        center[1] + x * size_wh[0] * sin + y * size_wh[1] * cos,
                    )
                    for x, y in polygon
                ],
            )
        )
    xs = [x for _, polygon in placed for x, _ in polygon]
    ys = [y for _, polygon in placed for _, y in polygon]
    left, top = math.floor(min(xs)) - 1, math.floor(min(ys)) - 1
    width, height = math.ceil(max(xs)) + 2 - left, math.ceil(max(ys)) + 2 - top
    # Small objects need the finer grid: a quarter pixel is what box AP at IoU 0.95 can see.
    scale = 4 if max(size_wh) < 90 else 2
    fine = Image.new("L", (width * scale, height * scale), 0)
    rim = Image.new("L", fine.size, 0)
    draw, draw_rim = ImageDraw.Draw(fine), ImageDraw.Draw(rim)
    rim_width = max(2, round(0.13 * min(size_wh) * scale))
    for adds, polygon in placed:
        # Rounded to 1/64 of a fine pixel, so that the last bit of sin/cos never decides.
        points = [(round((x - left) * scale * 64) / 64 - 0.5, round((y - top) * scale * 64) / 64 - 0.5) for x, y in polygon]
        draw.polygon(points, fill=255 if adds else 0)
        draw_rim.line([*points, points[0], points[1]], fill=255, width=rim_width)
    extent = fine.getbbox()
    if extent is None:
        raise RuntimeError(f"the silhouette of {name!r} came out empty at size {size_wh} px; sizes of at least 4 px are drawn")
    box = (
        left + extent[0] / scale,
        top + extent[1] / scale,
        left + extent[2] / scale,
        top + extent[3] / scale,
    )
    rim = ImageChops.darker(rim, fine)
    return fine.reduce(scale), rim.reduce(scale), left, top, box


def _stripes(u: np.ndarray, v: np.ndarray, period: float) -> np.ndarray:
    return np.mod(u, period) < 0.5 * period


def _checks(u: np.ndarray, v: np.ndarray, period: float) -> np.ndarray:
    return (np.mod(u, period) < 0.5 * period) ^ (np.mod(v, period) < 0.5 * period)


def _dots(u: np.ndarray, v: np.ndarray, period: float) -> np.ndarray:
    du = np.mod(u, period) - 0.5 * period
    dv = np.mod(v, period) - 0.5 * period
    return du * du + dv * dv < (0.3 * period) ** 2


_PATTERNS: dict[str, Callable[[np.ndarray, np.ndarray, float], np.ndarray]] = {
    "striped": _stripes,
    "checked": _checks,
    "dotted": _dots,
}


def _contrasting(rgb: tuple[int, int, int]) -> tuple[int, int, int]:
    """A lighter or darker partner of ``rgb``; it keeps some of the hue."""
    luma = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]
    target, keep = (250, 0.22) if luma < 140 else (15, 0.30)
    return tuple(round(keep * c + (1 - keep) * target) for c in rgb)  # type: ignore[return-value]


def paint_sprite(
    name: str,
    center: Point,
    size_wh: Point,
    angle_deg: float,
    rgb: tuple[int, int, int],
    fill: str,
    rng: np.random.Generator,
) -> Sprite:
    """Draw one object of class ``name`` with base colour ``rgb`` and the fill ``fill``."""
    alpha, rim, left, top, box = silhouette(name, center, size_wh, angle_deg)
    width, height = alpha.size
    paint = Image.new("RGB", (width, height), rgb)
    second = _contrasting(rgb)
    turn = float(rng.uniform(0, math.pi))
    if fill in _PATTERNS or fill == "gradient":
        x = np.arange(width, dtype=np.float32) - width / 2
        y = np.arange(height, dtype=np.float32)[:, None] - height / 2
        u = x * math.cos(turn) + y * math.sin(turn)
        v = y * math.cos(turn) - x * math.sin(turn)
        if fill == "gradient":
            t = np.clip(u / (0.8 * max(size_wh)) + 0.5, 0, 1)
            mix = Image.fromarray((t * 200).astype(np.uint8))
        else:
            period = max(5.0, float(rng.uniform(0.2, 0.34)) * min(size_wh))
            mix = Image.fromarray(_PATTERNS[fill](u, v, period).astype(np.uint8) * np.uint8(255))
        paint.paste(second, (0, 0), mix)
    elif fill == "outlined":
        paint.paste(second, (0, 0), rim)
    elif fill != "plain":
        raise ValueError(f"unknown fill: got {fill!r}, allowed are {', '.join(FILLS)}")
    return Sprite(alpha, paint, left, top, box)
