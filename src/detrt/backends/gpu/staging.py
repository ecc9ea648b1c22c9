"""Pictures of a batch and the tables that resize them, as one block of bytes for one copy to the device. NumPy only.

A block holds, in this order: a row of integers for each picture, the tables, what is copied of the pictures, and room
for pictures that become RGB on the device. The first two depend on forms and sizes alone, so that a block that stays on the
device needs them once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...data.raw_image import RawImage, YuvImage
from ...data.resample import AxisTable, axis_table, down_first

SizeHW = tuple[int, int]
Image = NDArray[np.uint8] | RawImage
# Integers that describe one picture to the kernel, in this order; sizes in pixels, `source` in bytes from the start
# of the block, the places of tables in int32 from there. Rows have a fixed length, so that a program finds its own.
FIELDS = (
    "source", "source_height", "source_width", "height", "width",
    "x_first", "x_weights", "x_taps", "y_first", "y_weights", "y_taps", "down_first",
)  # fmt: skip
ROW = 16
_ALIGN = 16
PIECE = 1 << 20  # bytes that one thread copies at a time; a picture below is copied by the caller


@dataclass(slots=True)
class Source:
    """A picture in a block, once however often it is in the batch. index: of its first appearance. rgb: place of its RGB, in
    bytes. planes: (place, shape) of what comes before that. here: the planes are copied from the host."""

    index: int
    shapes: tuple[tuple[int, ...], ...]
    here: bool
    rgb: int = 0
    planes: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies in a block.

    rows: (pictures, ROW) int64, see FIELDS. tables: (place in bytes, table) of both axes. sources: the pictures. head: bytes
    of rows and tables; size: bytes that are copied, these included; room: of the whole block.
    """

    rows: NDArray[np.int64]
    tables: tuple[tuple[int, AxisTable], ...]
    sources: tuple[Source, ...]
    head: int
    size: int
    room: int

    def write(self, block: NDArray[np.uint8], images: Sequence[Image], pool: Executor | None = None, *, start: int = 0) -> None:
        """Fill `block`, of at least `size` bytes. images: those of the layout, or others of the same forms and sizes.
        pool: threads that share the copying of large pictures. start: `head` leaves rows and tables out."""
        if start < self.head:
            self.write_head(block)
        pieces = []
        arrays = 0
        for place, array in self._arrays(images):
            arrays += 1
            target = block[place : place + array.size].reshape(array.shape)
            rows = len(array) if pool is None else max(1, PIECE * len(array) // array.size)
            pieces += [(target[i : i + rows], array[i : i + rows]) for i in range(0, len(array), rows)]
        if pool is None or len(pieces) == arrays:
            for target, array in pieces:
                target[...] = array
        else:
            list(pool.map(lambda pair: np.copyto(*pair), pieces))

    def write_head(self, block: NDArray[np.uint8]) -> None:
        """Rows and tables alone."""
        whole = np.ascontiguousarray(self.rows).view(np.uint8).reshape(-1)
        block[: whole.size] = whole
        for place, table in self.tables:
            for part in (table.first, table.weights):
                data = np.ascontiguousarray(part).view(np.uint8).reshape(-1)
                block[place : place + data.size] = data
                place += data.size

    def _arrays(self, images: Sequence[Image]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        for source in self.sources:
            image = images[source.index]
            if isinstance(image, np.ndarray):
                yield source.rgb, image
            elif source.here:
                assert isinstance(image, YuvImage)
                yield from zip((place for place, _ in source.planes), image.planes, strict=True)


@dataclass(slots=True)
class Layouts:
    """Layouts that were planned before, by what they depend on: the last `kept` of them."""

    resample: str
    kept: int = 64
    _known: dict[Hashable, tuple[Layout, list[int]]] = field(default_factory=dict)

    def get(self, images: Sequence[Image], sizes: Sequence[SizeHW]) -> tuple[Layout, int]:
        """As `layout`, and how often it was asked for."""
        first = {id(image): index for index, image in reversed(list(enumerate(images)))}
        key = tuple((_form(image), first[id(image)], size) for image, size in zip(images, sizes, strict=True))
        found = self._known.pop(key, None)
        if found is None:
            found = layout(images, sizes, self.resample), [0]
            if len(self._known) >= self.kept:
                self._known.pop(next(iter(self._known)))
        self._known[key] = found
        found[1][0] += 1
        return found[0], found[1][0]


def layout(images: Sequence[Image], sizes: Sequence[SizeHW], resample: str) -> Layout:
    """Plan a block. images: (H, W, 3) uint8, or other pictures; the same one twice is copied once. sizes: of the resized
    pictures."""
    rows = np.zeros((len(images), ROW), np.int64)
    end = _aligned(rows.nbytes)
    places: dict[int, int] = {}
    tables: list[tuple[int, AxisTable]] = []
    sources: dict[int, Source] = {}
    for index, (row, image, (height, width)) in enumerate(zip(rows, images, sizes, strict=True)):
        original = image.shape[0], image.shape[1]
        both = axis_table(original[1], width, resample), axis_table(original[0], height, resample)
        for table in both:
            if id(table) not in places:  # tables are kept, so equal ones are the same object
                places[id(table)] = end
                tables.append((end, table))
                end = _aligned(end + table.first.nbytes + table.weights.nbytes)
        here = isinstance(image, np.ndarray) or (isinstance(image, YuvImage) and not image.on_gpu)
        sources.setdefault(id(image), Source(index, _shapes(image), here))
        across, down = (places[id(table)] // 4 for table in both)
        row[: len(FIELDS)] = (
            0, *original, height, width,
            across, across + width, both[0].taps, down, down + height, both[1].taps,
            down_first(original, (height, width)),
        )  # fmt: skip
    head = end
    # First what is copied, then what is made there.
    for source in sources.values():
        if isinstance(images[source.index], np.ndarray):
            source.rgb, end = end, _aligned(end + images[source.index].size)  # type: ignore[union-attr]
        elif source.here:
            end = _place_planes(source, end)
    size = end
    for source in sources.values():
        image = images[source.index]
        if not source.here:
            end = _place_planes(source, end)
        if not isinstance(image, np.ndarray):
            source.rgb, end = end, _aligned(end + image.shape[0] * image.shape[1] * 3)
    for row, image in zip(rows, images, strict=True):
        row[0] = sources[id(image)].rgb
    return Layout(rows, tuple(tables), tuple(sources.values()), head, size, end)


def _place_planes(source: Source, end: int) -> int:
    planes = []
    for shape in source.shapes:
        planes.append((end, shape))
        end = _aligned(end + int(np.prod(shape)))
    source.planes = tuple(planes)
    return end


def _shapes(image: Image) -> tuple[tuple[int, ...], ...]:
    """Of the planes of a picture that becomes RGB on the device."""
    if not isinstance(image, YuvImage):
        return ()
    if not image.on_gpu:
        return tuple(plane.shape for plane in image.planes)
    return (image.height, image.width), (image.height // 2, image.width // 2, 2)


def _form(image: Image) -> Hashable:
    """What a layout depends on, and what is made of it on the device."""
    if isinstance(image, YuvImage):
        return image.on_gpu, image.height, image.width, image.colours, image.turns, image.fields
    return type(image), image.shape


def _aligned(place: int) -> int:
    return -(-place // _ALIGN) * _ALIGN
