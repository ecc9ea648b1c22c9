"""Pictures of a batch and the tables that resize them, as one block of bytes for one copy to the device. NumPy only.

Behind what is copied, the block has room for pictures that become RGB on the device: frames, and what was decoded there.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..pictures import Picture, YuvPicture
from ..resampling import AxisTable, axis_table, down_first

SizeHW = tuple[int, int]
# Whole numbers that describe one picture to the kernel, in this order; sizes in pixels, `source` in bytes from the start
# of the block, the places of tables in int32 from there. Rows have a fixed length, so that a program finds its own.
FIELDS = (
    "source", "source_height", "source_width", "height", "width",
    "x_first", "x_weights", "x_taps", "y_first", "y_weights", "y_taps", "down_first",
)  # fmt: skip
ROW = 16
_ALIGN = 16
PIECE = 1 << 20  # bytes that one thread copies at a time; a picture below is copied by the caller


@dataclass(frozen=True, slots=True)
class Made:
    """A picture that becomes RGB on the device. place: of its RGB, in bytes. planes: places of those that were copied."""

    picture: Picture
    place: int
    planes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies in a block.

    rows: (pictures, ROW) int64, see FIELDS. tables: (place in bytes, table) of both axes. sources: (place in bytes,
    array), pictures and planes of frames, each once. made: what the device makes. size: bytes that are copied; room: of
    the whole block.
    """

    rows: NDArray[np.int64]
    tables: tuple[tuple[int, AxisTable], ...]
    sources: tuple[tuple[int, NDArray[np.uint8]], ...]
    size: int
    made: tuple[Made, ...] = ()
    room: int = 0

    def write(self, block: NDArray[np.uint8], pool: Executor | None = None) -> None:
        """Fill `block`, of at least `size` bytes. pool: threads that share the copying of large pictures."""
        whole = np.ascontiguousarray(self.rows).view(np.uint8).reshape(-1)
        block[: whole.size] = whole
        for place, table in self.tables:
            for part in (table.first, table.weights):
                data = np.ascontiguousarray(part).view(np.uint8).reshape(-1)
                block[place : place + data.size] = data
                place += data.size
        pieces = []
        for place, image in self.sources:
            target = block[place : place + image.size].reshape(image.shape)
            rows = len(image) if pool is None else max(1, PIECE * len(image) // image.size)
            pieces += [(target[i : i + rows], image[i : i + rows]) for i in range(0, len(image), rows)]
        if pool is None or len(pieces) == len(self.sources):
            for target, image in pieces:
                target[...] = image
        else:
            list(pool.map(lambda pair: np.copyto(*pair), pieces))


def layout(images: Sequence[NDArray[np.uint8] | Picture], sizes: Sequence[SizeHW], resample: str) -> Layout:
    """Plan a block. images: (H, W, 3) uint8, or other pictures; the same one twice is copied once. sizes: of the resized
    pictures."""
    rows = np.zeros((len(images), ROW), np.int64)
    end = _aligned(rows.nbytes)
    places: dict[int, int] = {}
    tables: list[tuple[int, AxisTable]] = []
    sources: list[tuple[int, NDArray[np.uint8]]] = []
    made: list[tuple[Picture, tuple[int, ...]]] = []
    for row, image, (height, width) in zip(rows, images, sizes, strict=True):
        original = image.shape[0], image.shape[1]
        both = axis_table(original[1], width, resample), axis_table(original[0], height, resample)
        for table in both:
            if id(table) not in places:  # tables are kept, so equal ones are the same object
                places[id(table)] = end
                tables.append((end, table))
                end = _aligned(end + table.first.nbytes + table.weights.nbytes)
        if id(image) not in places:
            copied = []
            for array in [image] if isinstance(image, np.ndarray) else _planes(image):
                copied.append(end)
                sources.append((end, array))
                end = _aligned(end + array.size)
            if isinstance(image, np.ndarray):
                places[id(image)] = copied[0]
            else:  # its place is known when all that is copied has one
                places[id(image)] = -1 - len(made)
                made.append((image, tuple(copied)))
        across, down = (places[id(table)] // 4 for table in both)
        row[: len(FIELDS)] = (
            places[id(image)], *original, height, width,
            across, across + width, both[0].taps, down, down + height, both[1].taps,
            down_first(original, (height, width)),
        )  # fmt: skip
    size, kept = end, []
    for number, (picture, planes) in enumerate(made):
        rows[rows[:, 0] == -1 - number, 0] = end
        kept.append(Made(picture, end, planes))
        end = _aligned(end + picture.shape[0] * picture.shape[1] * 3)
    return Layout(rows, tuple(tables), tuple(sources), size, tuple(kept), end)


def _planes(picture: Picture) -> tuple[NDArray[np.uint8], ...]:
    """What has to be copied of a picture that becomes RGB on the device."""
    return picture.planes if isinstance(picture, YuvPicture) and not picture.on_gpu else ()


def _aligned(place: int) -> int:
    return -(-place // _ALIGN) * _ALIGN
