"""What a detector returns: detections together with the image that they are of."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..detections import Detections
from ..files import writing
from .images import load_image

WRITTEN_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


@dataclass(frozen=True, slots=True, eq=False)
class ImageDetections(Detections):
    """`Detections` that know their image.

    image: a path, or else the pixels that the detector read, which stay in memory as long as this does. path: of the file, the video
    or the camera; "" of arrays and bytes. frame, time_s: of a video or a camera: index of the frame from 0, and seconds since the
    start; None of others.
    """

    image: Any = field(default=None, repr=False)
    path: str = ""
    frame: int | None = None
    time_s: float | None = None

    @classmethod
    def of(cls, found: Detections, image: Any, path: str, frame: int | None, time_s: float | None) -> ImageDetections:
        """Detections with their image."""
        return cls(
            **{one.name: getattr(found, one.name) for one in fields(Detections)},
            image=image,
            path=path,
            frame=frame,
            time_s=time_s,
        )

    def plot(self, *, font: str | os.PathLike | None = None) -> Image.Image:
        """A copy of the image with masks, boxes, names and scores; see `draw_detections`. `.show()` opens it, `np.asarray` gives RGB pixels.

        Raises:
            ImageError: the file has gone, or the font cannot be read.
        """
        from .draw import draw_detections  # with Pillow's fonts: 1 MiB that no worker of a server needs

        return draw_detections(self.image, self, font=font)

    def save(self, path: str | os.PathLike, *, font: str | os.PathLike | None = None) -> None:
        """Write `plot()` to a file (.jpg, .png, .webp or .bmp; others become PNG).

        Raises:
            ImageError: as `plot`. OutputError: it cannot be written.
        """
        save_image(self.plot(font=font), Path(path))

    def crop(self) -> list[NDArray[np.uint8]]:
        """(h, w, 3) RGB pixels inside the box of each object, at least one pixel."""
        return crops_of(load_image(self.image), self)


def crops_of(pixels: NDArray[np.uint8], found: Detections) -> list[NDArray[np.uint8]]:
    """(h, w, 3) pixels inside the box of each object, at least one pixel. pixels: (H, W, 3) of the image."""
    limit = np.array([pixels.shape[1], pixels.shape[0]] * 2)
    low = np.minimum(np.floor(found.boxes_xyxy[:, :2]).astype(int), limit[:2] - 1)
    high = np.minimum(np.maximum(np.ceil(found.boxes_xyxy[:, 2:]).astype(int), low + 1), limit[2:])
    return [pixels[y0:y1, x0:x1].copy() for (x0, y0), (x1, y1) in zip(low.tolist(), high.tolist(), strict=True)]


def save_image(image: Image.Image, path: Path) -> None:
    """Write an image in the format of its suffix, PNG for others. Raises OutputError."""
    suffix = path.suffix.lower()
    kind = suffix.lstrip(".").replace("jpg", "jpeg") if suffix in WRITTEN_SUFFIXES else "png"
    options = {"quality": 92} if kind in ("jpeg", "webp") else {}
    with writing(path) as temporary:
        image.save(temporary, format=kind, **options)
