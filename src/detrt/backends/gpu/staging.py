"""Images of a batch and the tables that resize them, as one block of bytes for one copy to the device. NumPy only.

A block holds, in this order: a row of integers for each image, the resampling tables, the image bytes that are uploaded, and
space for images that are converted to RGB on the device. Rows and tables depend on kinds and sizes only, so a block that stays
on the device needs them once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...data.preprocess import SizeHW
from ...data.raw_image import LoadedImage, YuvImage
from ...data.resample import AxisTable, axis_table, down_first

# Integers that describe one image to the kernel, in this order: sizes in pixels, `source` in bytes from the start of the block,
# offsets of tables in int32 elements. Rows have a fixed length, so that a program can index its own.
FIELDS = (
    "source", "source_height", "source_width", "height", "width",
    "x_first", "x_weights", "x_taps", "y_first", "y_weights", "y_taps", "down_first",
)  # fmt: skip
ROW = 16
_ALIGN = 16
COPY_CHUNK_BYTES = 1 << 20  # one thread copies so much at a time; the caller copies smaller arrays itself
COPY_THREADS = 4  # that copy large arrays, and help to decode files on the device


@dataclass(slots=True)
class StagedImage:
    """An image in a block, stored once even if it is in the batch several times.

    index: of its first appearance in the batch. rgb: offset of its RGB pixels, bytes. planes: (offset, shape) of the planes
    that are converted to RGB. on_host: its pixels or planes are copied from the host.
    """

    index: int
    shapes: tuple[tuple[int, ...], ...]
    on_host: bool
    rgb: int = 0
    planes: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Offsets of everything in a block.

    rows: (images, ROW) int64, see FIELDS. tables: (offset in bytes, table) of both axes. sources: the distinct images.
    header_size: bytes of rows and tables. upload_size: bytes that are copied to the device, header included. block_size: bytes
    of the whole block.
    """

    rows: NDArray[np.int64]
    tables: tuple[tuple[int, AxisTable], ...]
    sources: tuple[StagedImage, ...]
    header_size: int
    upload_size: int
    block_size: int

    def write(
        self, block: NDArray[np.uint8], images: Sequence[LoadedImage], pool: Executor | None = None, *, start: int = 0
    ) -> None:
        """Fill the first `upload_size` bytes of a block.

        Args:
            block: (bytes,) uint8.
            images: those of the layout, or others of the same kinds and sizes.
            pool: threads that share the copying of large images.
            start: `header_size` skips rows and tables.
        """
        if start < self.header_size:
            self.write_header(block)
        chunks = []
        arrays = 0
        for offset, array in self._arrays(images):
            arrays += 1
            target = block[offset : offset + array.size].reshape(array.shape)
            rows = len(array) if pool is None else max(1, COPY_CHUNK_BYTES * len(array) // array.size)
            chunks += [(target[i : i + rows], array[i : i + rows]) for i in range(0, len(array), rows)]
        if pool is None or len(chunks) == arrays:
            for target, array in chunks:
                target[...] = array
        else:
            list(pool.map(lambda pair: np.copyto(*pair), chunks))

    def write_header(self, block: NDArray[np.uint8]) -> None:
        """Write rows and tables only."""
        rows = np.ascontiguousarray(self.rows).view(np.uint8).reshape(-1)
        block[: rows.size] = rows
        for offset, table in self.tables:
            for array in (table.first, table.weights):
                data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
                block[offset : offset + data.size] = data
                offset += data.size

    def _arrays(self, images: Sequence[LoadedImage]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        for source in self.sources:
            image = images[source.index]
            if isinstance(image, np.ndarray):
                yield source.rgb, image
            elif source.on_host:
                assert isinstance(image, YuvImage)
                yield from zip((offset for offset, _ in source.planes), image.planes, strict=True)


@dataclass(slots=True)
class LayoutCache:
    """The last `capacity` layouts, by kinds and sizes of their images."""

    resample: str
    capacity: int = 64
    _entries: dict[Hashable, tuple[BatchLayout, list[int]]] = field(default_factory=dict)

    def get(self, images: Sequence[LoadedImage], sizes: Sequence[SizeHW]) -> tuple[BatchLayout, int]:
        """(`layout` of these images, how often it has been used, this time included)."""
        first = {id(image): index for index, image in reversed(list(enumerate(images)))}
        key = tuple((_layout_key(image), first[id(image)], size) for image, size in zip(images, sizes, strict=True))
        entry = self._entries.pop(key, None)
        if entry is None:
            entry = layout(images, sizes, self.resample), [0]
            if len(self._entries) >= self.capacity:
                self._entries.pop(next(iter(self._entries)))
        self._entries[key] = entry
        entry[1][0] += 1
        return entry[0], entry[1][0]


def layout(images: Sequence[LoadedImage], sizes: Sequence[SizeHW], resample: str) -> BatchLayout:
    """Plan a block.

    Args:
        images: (H, W, 3) uint8, or raw images; an image that comes twice is copied once.
        sizes: (height, width) of each resized image.
        resample: filter, one of `detrt.spec.RESAMPLES`.
    """
    rows = np.zeros((len(images), ROW), np.int64)
    end = _align(rows.nbytes)
    offsets: dict[int, int] = {}
    tables: list[tuple[int, AxisTable]] = []
    sources: dict[int, StagedImage] = {}
    for index, (row, image, (height, width)) in enumerate(zip(rows, images, sizes, strict=True)):
        original = image.shape[0], image.shape[1]
        axes = axis_table(original[1], width, resample), axis_table(original[0], height, resample)
        for table in axes:
            if id(table) not in offsets:  # tables are cached, so equal ones are the same object
                offsets[id(table)] = end
                tables.append((end, table))
                end = _align(end + table.first.nbytes + table.weights.nbytes)
        on_host = isinstance(image, np.ndarray) or (isinstance(image, YuvImage) and not image.on_gpu)
        sources.setdefault(id(image), StagedImage(index, _plane_shapes(image), on_host))
        across, down = (offsets[id(table)] // 4 for table in axes)
        row[: len(FIELDS)] = (
            0, *original, height, width,
            across, across + width, axes[0].taps, down, down + height, axes[1].taps,
            down_first(original, (height, width)),
        )  # fmt: skip
    header_size = end
    # Uploaded bytes come first, then the space that the device writes.
    for source in sources.values():
        if isinstance(images[source.index], np.ndarray):
            source.rgb, end = end, _align(end + images[source.index].size)  # type: ignore[union-attr]
        elif source.on_host:
            end = _assign_planes(source, end)
    upload_size = end
    for source in sources.values():
        image = images[source.index]
        if not source.on_host:
            end = _assign_planes(source, end)
        if not isinstance(image, np.ndarray):
            source.rgb, end = end, _align(end + image.shape[0] * image.shape[1] * 3)
    for row, image in zip(rows, images, strict=True):
        row[0] = sources[id(image)].rgb
    return BatchLayout(rows, tuple(tables), tuple(sources.values()), header_size, upload_size, end)


def _assign_planes(source: StagedImage, end: int) -> int:
    """Give the planes of an image their offsets; the new end of the block."""
    planes = []
    for shape in source.shapes:
        planes.append((end, shape))
        end = _align(end + int(np.prod(shape)))
    source.planes = tuple(planes)
    return end


def _plane_shapes(image: LoadedImage) -> tuple[tuple[int, ...], ...]:
    """Shapes of the planes that are converted to RGB on the device; none for other images."""
    if not isinstance(image, YuvImage):
        return ()
    if not image.on_gpu:
        return tuple(plane.shape for plane in image.planes)
    return (image.height, image.width), (image.height // 2, image.width // 2, 2)


def _layout_key(image: LoadedImage) -> Hashable:
    """Everything about an image that its layout and its conversion on the device depend on."""
    if isinstance(image, YuvImage):
        return image.on_gpu, image.height, image.width, image.colours, image.orientation, image.fields
    return type(image), image.shape


def _align(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
