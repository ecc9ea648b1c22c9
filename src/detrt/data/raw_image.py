"""Raw images, whose pixels are not RGB arrays yet: planar frames of a codec, and encoded files.

Both have the `shape` (height, width, 3) of the upright image, and `rgb()` converts them to an array. A GPU takes them
unconverted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Kr and Kb of the standards, by matrix coefficients (ITU-T H.273); all others are treated as BT.601.
_BT601 = (0.299, 0.114)
_WEIGHTS = {1: (0.2126, 0.0722), 4: (0.30, 0.11), 7: (0.212, 0.087), 9: (0.2627, 0.0593)}


@dataclass(frozen=True, slots=True)
class Colours:
    """Conversion of Y, U and V to R, G and B: FFmpeg's arithmetic on x86, in 16-bit integers.

    With y = 8 Y - offset, u = 8 U - 1024, v = 8 V - 1024, every product shifted right by 16 bits on its own:
    R = luma y + red_v v; G = luma y + green_u u + green_v v; B = luma y + blue_u u; each clipped to 0..255.
    """

    offset: int
    luma: int
    red_v: int
    green_u: int
    green_v: int
    blue_u: int

    @classmethod
    @lru_cache(64)
    def of(cls, matrix: int, full_range: bool) -> Colours:
        """matrix: number of H.273, as in the stream. full_range: levels 0..255, not 16..235."""
        red, blue = _WEIGHTS.get(matrix, _BT601)
        green = 1 - red - blue
        # From 224 levels of chroma to 255, in 1/65536; for the full range back again, truncated as FFmpeg does.
        wide = [round(v * 255 / 224 * 65536) for v in (2 * (1 - red), 2 * (1 - blue) * blue / green, 2 * (1 - red) * red / green)]
        wide.append(round(2 * (1 - blue) * 255 / 224 * 65536))
        luma, offset = 65536 * 255 // 219, 16 * 8
        if full_range:
            wide, luma, offset = [v * 224 // 255 for v in wide], 65536, 0
        red_v, green_u, green_v, blue_u = wide
        return cls(offset, *((v * 8192 + 32768) >> 16 for v in (luma, red_v, -green_u, -green_v, blue_u)))


# EXIF orientation -> what makes an image upright: whether rows and columns are exchanged, then whether the new rows and the new
# columns are reversed.
ORIENTATIONS = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}


def upright(image: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """(height, width, 3) as stored -> as seen, contiguous, for an orientation of EXIF; others than 1 to 8 change nothing."""
    exchanged, rows, columns = ORIENTATIONS.get(orientation, ORIENTATIONS[1])
    if exchanged:
        image = image.swapaxes(0, 1)
    return np.ascontiguousarray(image[:: -1 if rows else 1, :: -1 if columns else 1])


class RawImage(ABC):
    """An image that `Detector` takes besides arrays."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(height, width, 3) of the upright image."""

    @abstractmethod
    def rgb(self) -> NDArray[np.uint8]:
        """The upright image, (height, width, 3). Raises ImageError for a damaged file."""


@dataclass(frozen=True, slots=True, eq=False)
class YuvImage(RawImage):
    """A frame in 4:2:0 with 8 bits.

    planes: in memory Y (height, width), U and V (half of that, rounded up) uint8; on a GPU what DLPack reads: Y, and U and V
    interleaved. orientation: 1 to 8, as in EXIF. convert: returns the upright RGB array. fields: interlaced: every other row of
    the chroma belongs to every other row of Y; the height is a multiple of 4. ready: a CUDA event after which planes on a GPU are
    written.
    """

    planes: tuple[Any, ...]
    height: int
    width: int
    colours: Colours
    convert: Callable[[], NDArray[np.uint8]]
    orientation: int = 1
    fields: bool = False
    ready: Any = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.width, self.height, 3) if self.orientation > 4 else (self.height, self.width, 3)

    @property
    def on_gpu(self) -> bool:
        return len(self.planes) == 2

    def rgb(self) -> NDArray[np.uint8]:
        return self.convert()


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage(RawImage):
    """A JPEG file that a GPU may decode. height, width: of the upright image. orientation: 1 to 8, of EXIF. decode: returns
    the upright RGB array on the CPU, or raises ImageError."""

    data: bytes
    height: int
    width: int
    orientation: int
    decode: Callable[[], NDArray[np.uint8]]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.height, self.width, 3

    def rgb(self) -> NDArray[np.uint8]:
        return self.decode()


LoadedImage = NDArray[np.uint8] | RawImage


def yuv_to_rgb(y: NDArray, u: NDArray, v: NDArray, colours: Colours, fields: bool = False) -> NDArray[np.uint8]:
    """Reference of `Colours`: planes and `fields` as in `YuvImage` -> (height, width, 3) uint8."""
    height, width = y.shape
    rows = np.arange(height)
    half = rows // 4 * 2 + rows % 2 if fields else rows // 2
    light = ((y.astype(np.int32) * 8 - colours.offset) * colours.luma) >> 16
    u, v = (np.repeat(plane[half], 2, 1)[:, :width].astype(np.int32) * 8 - 1024 for plane in (u, v))
    green = ((u * colours.green_u) >> 16) + ((v * colours.green_v) >> 16)
    rgb = np.stack((light + ((v * colours.red_v) >> 16), light + green, light + ((u * colours.blue_u) >> 16)), -1)
    return rgb.clip(0, 255).astype(np.uint8)
