"""Images to candidates, asynchronously: upload, resize, forward and selection on one device and stream.

`GpuRunner.submit` enqueues the work of one batch and returns at once, so that the next batch is decoded and packed while the
device works. All memory is reused: pinned on the host, at fixed addresses on the device, as CUDA graphs need.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.postprocess import Candidates
from ...data.preprocess import BatchPlan, SizeHW
from ...data.raw_image import LoadedImage, RawImage
from ...errors import ImageError
from ...spec import LOGITS, PIXEL_MASK, PIXEL_VALUES, PRED_BOXES, TARGET_SIZES, ModelSpec, TensorInfo
from ...system import usable_cores
from ...tasks import extra_outputs
from ..base import Feeds, Outputs
from .cuda_graph import LayoutGraph, LayoutGraphCache, capture_graph, recordable
from .decoder import GpuDecoder
from .resize import resize_batch
from .staging import COPY_THREADS, BatchLayout, LayoutCache
from .top_k import can_select, select, unpack
from .yuv import convert_to_rgb, copy_to_block

# Input shapes whose memory and graphs are cached; batches in flight.
SLOTS = 8
DEPTH = 3
WARM_UP = 4  # batches before those that are timed: CUDA graphs are captured at the third of a shape
Tensors = Mapping[str, Tensor]
# prepare(inputs, finish) -> (run, results): `run` runs the model on these tensors and `finish` on its outputs, and writes
# `results`, whose memory is fixed.
Prepare = Callable[[Tensors, Callable[[Tensors], list[Tensor]]], tuple[Callable[[], None], list[Tensor]]]


def stream_for(index: int) -> Any:
    """A CUDA stream for the model of a session on GPU `index`, or None where this PyTorch has no such GPU.

    It has a priority of its own, because streams of one priority share hardware queues: an image decoder, which has streams of
    priority 0, would wait there for a whole graph of the model.
    """
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    return torch.cuda.Stream(torch.device("cuda", index), priority=-1)


class Pending:
    """A batch in flight. names: of its outputs; selected: the first array is that of `select`, the names those of the others."""

    def __init__(self, download: _Download, count: int, names: Sequence[str], selected: bool) -> None:
        self._download, self._count, self._names, self._selected = download, count, names, selected

    def outputs(self) -> Outputs | Candidates:
        """Wait for the outputs, in the form that post-processing takes."""
        arrays = self._download.arrays()
        if self._selected:
            return unpack(arrays[0], self._count, dict(zip(self._names, arrays[1:], strict=True)))
        return {name: array[: self._count] for name, array in zip(self._names, arrays, strict=True)}


class GpuRunner:
    """Runs a model on images. Not thread-safe.

    Args:
        spec: of the session.
        inputs: of the session.
        outputs: of the session.
        device: a CUDA device; the CPU works too, without overlap.
        prepare: binds the model to fixed tensors, see `Prepare`.
        stream: CUDA stream that the model runs on; None creates one.
        lock: held while a batch is enqueued: other threads may capture what they enqueue on the same stream.
    """

    def __init__(
        self,
        spec: ModelSpec,
        inputs: Sequence[TensorInfo],
        outputs: Sequence[TensorInfo],
        device: torch.device,
        prepare: Prepare,
        stream: Any = None,
        lock: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        self.spec, self.device = spec, device
        self._lock = lock or contextlib.nullcontext()
        self._inputs = {info.name: info for info in inputs}
        self._outputs = [info.name for info in outputs]
        self._prepare = prepare
        self._cuda = device.type == "cuda"
        self._stream = stream if stream is not None or not self._cuda else stream_for(device.index or 0)
        self._slots: dict[tuple[int, SizeHW], _Slot] = {}
        self._hosts: list[_HostBuffers] = [_HostBuffers(self._cuda) for _ in range(DEPTH)]
        self._layouts, self._layout_graphs = LayoutCache(spec.input.resample), LayoutGraphCache()
        self._block = torch.empty(0, dtype=torch.uint8, device=device)
        self._pool = ThreadPoolExecutor(COPY_THREADS, "detrt-copy")
        self._turn = 0

    def submit(self, images: Sequence[LoadedImage], plan: BatchPlan, text: Feeds | None = None) -> Pending:
        """Enqueue a batch. At most DEPTH batches are in flight: waits for the oldest otherwise.

        Args:
            images: (H, W, 3) uint8 RGB, raw images, or images that `GpuDecoder` decoded on this device.
            plan: their sizes.
            text: the text inputs of a prompted model; not copied again if it is the same object as before.

        Raises:
            ImageError: an array that is not an image.
        """
        for index, image in enumerate(images):
            _check_image(index, image)
        with self._lock, torch.inference_mode(), self._on_stream():
            return self._enqueue(images, plan, text, lambda step: None)

    def stage_times(
        self, images: Sequence[LoadedImage], plan: BatchPlan, repeats: int, text: Feeds | None = None
    ) -> dict[str, list[float]]:
        """Milliseconds of the steps of a batch, each waited for, in `repeats` runs. images, plan, text: as in `submit`.

        Returns:
            "upload" (packing and copying to the device), "resize" (with padding and normalisation), "forward", "selection" and
            "download", in this order.
        """
        times: dict[str, list[float]] = {step: [] for step in ("upload", "resize", "forward", "selection", "download")}
        for _ in range(WARM_UP):
            self.submit(images, plan, text).outputs()
        with self._lock, torch.inference_mode(), self._on_stream():
            select = self._slot(len(images), plan.tensor_hw).selection(self._stream)
            for _ in range(repeats):
                last = time.perf_counter()

                def mark(step: str) -> None:
                    nonlocal last
                    if self._cuda:
                        self._stream.synchronize()
                    now = time.perf_counter()
                    times[step].append((now - last) * 1e3)
                    last = now

                self._enqueue(images, plan, text, mark).outputs()
                mark("download")
                select()
                mark("selection")
        # The model and the selection are one CUDA graph.
        times["forward"] = [both - alone for both, alone in zip(times["forward"], times["selection"], strict=True)]
        return times

    def _enqueue(
        self, images: Sequence[LoadedImage], plan: BatchPlan, text: Feeds | None, mark: Callable[[str], None]
    ) -> Pending:
        """As `submit`. mark: called with the name of each step that was enqueued."""
        layout, uses = self._layouts.get(images, plan.resized_hw)
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % DEPTH
        slot = self._slot(len(images), plan.tensor_hw)
        graph = (
            self._layout_graphs.get(layout, uses, slot, lambda: self._record(layout, images, slot))
            if recordable(images)
            else None
        )
        block, start = (self._shared_block(layout), 0) if graph is None else (graph.block, layout.header_size)
        layout.write(host.block(layout.upload_size), images, self._pool, start=start)
        if start < layout.upload_size:
            block[start : layout.upload_size].copy_(host.bytes[start : layout.upload_size], non_blocking=True)
        on_device = copy_to_block(block, layout, images)
        mark("upload")
        if graph is not None:
            graph.fill()
        else:
            convert_to_rgb(block, layout, images)
            slot.fill(block, layout.rows, self.spec)
        mark("resize")
        slot.set_text(text)
        slot.run()
        mark("forward")
        download = host.download(slot.results, on_device)
        names = [*extra_outputs(self.spec)] if slot.selects else self._outputs
        return Pending(download, len(images), names, slot.selects)

    def _shared_block(self, plan: BatchLayout) -> Tensor:
        """The block of all layouts without a graph."""
        if self._block.numel() < plan.block_size:
            self._block = torch.empty(plan.block_size * 5 // 4 // 16 * 16 + 16, dtype=torch.uint8, device=self.device)
        return self._block

    def _record(self, plan: BatchLayout, images: Sequence[LoadedImage], slot: _Slot) -> LayoutGraph:
        def fill(block: Tensor) -> None:
            convert_to_rgb(block, plan, images)
            slot.fill(block, plan.rows, self.spec)

        return LayoutGraph(plan, self.device, fill, self._stream if self._cuda else None)

    def decoder(self) -> GpuDecoder:
        """A decoder of JPEG files and videos on this device."""
        return GpuDecoder(self.device, min(COPY_THREADS, usable_cores()))

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._cuda else contextlib.nullcontext()  # the device with it

    def _slot(self, count: int, canvas: SizeHW) -> _Slot:
        key = count, canvas
        if key not in self._slots:
            if len(self._slots) >= SLOTS:
                self._slots.pop(next(iter(self._slots)))
            self._slots[key] = _Slot(self.spec, self._inputs, count, canvas, self.device, self._prepare)
        return self._slots[key]


def _check_image(index: int, image: LoadedImage) -> None:
    if isinstance(image, np.ndarray) and (image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape):
        raise ImageError(
            f"image {index} of the batch must be an array (height, width, 3) of uint8 RGB; got {image.dtype} {image.shape}"
        )


class _Slot:
    """Input tensors of one shape, at fixed addresses, with the model bound to them."""

    def __init__(
        self,
        spec: ModelSpec,
        inputs: Mapping[str, TensorInfo],
        count: int,
        canvas: SizeHW,
        device: torch.device,
        prepare: Prepare,
    ) -> None:
        height, width = canvas
        pixels = torch.zeros((count, 3, height, width), dtype=getattr(torch, spec.input.dtype), device=device)
        self.tensors = {PIXEL_VALUES: pixels}
        if PIXEL_MASK in inputs:
            self.tensors[PIXEL_MASK] = torch.ones((count, height, width), dtype=torch.int64, device=device)
        if TARGET_SIZES in inputs:
            self.tensors[TARGET_SIZES] = torch.full((count, 2), height, dtype=torch.int64, device=device)
        for name in inputs.keys() - self.tensors.keys():  # text inputs; their only symbolic axis is the batch
            info = inputs[name]
            shape = [count if isinstance(axis, str) else axis for axis in info.shape]
            self.tensors[name] = torch.zeros(shape, dtype=getattr(torch, info.dtype), device=device)
        self._text: Feeds | None = None
        self.selects = can_select(spec)

        def finish(outputs: Tensors) -> list[Tensor]:
            self._outputs = outputs
            if not self.selects:
                return list(outputs.values())
            extras = [outputs[name].float() for name in extra_outputs(spec)]
            return [select(outputs[LOGITS], outputs[PRED_BOXES], spec), *extras]

        self._finish = finish
        self.run, self.results = prepare(self.tensors, finish)

    def fill(self, block: Tensor, rows: NDArray[np.int64], spec: ModelSpec) -> None:
        count = len(rows)
        resize_batch(block, count, self.tensors[PIXEL_VALUES], self.tensors.get(PIXEL_MASK), spec.input)
        if TARGET_SIZES in self.tensors:
            sizes = block[: rows.nbytes].view(torch.int64).view(count, -1)[:, 1:3]
            self.tensors[TARGET_SIZES].copy_(sizes)

    def selection(self, stream: Any) -> Callable[[], Any]:
        """The selection on the last outputs of the model, without the model; as a CUDA graph where there is a stream."""
        outputs = self._outputs
        if stream is None:
            return lambda: self._finish(outputs)
        graph, _ = capture_graph(lambda: self._finish(outputs), stream)
        return graph.replay  # type: ignore[no-any-return]

    def set_text(self, text: Feeds | None) -> None:
        if text is not None and text is not self._text:
            for name, array in text.items():
                self.tensors[name].copy_(torch.from_numpy(np.ascontiguousarray(array)))
            self._text = text


class _HostBuffers:
    """Host memory of one batch: the bytes to upload, and the downloaded results."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._results: list[Tensor] = []
        self._last: _Download | None = None

    def block(self, size: int) -> NDArray[np.uint8]:
        """At least `size` bytes, after waiting for the batch that used them."""
        if self._last is not None:
            self._last.arrays()
        if self.bytes.numel() < size:
            self.bytes = torch.empty(size * 5 // 4, dtype=torch.uint8, pin_memory=self._pinned)
        return self.bytes.numpy()

    def download(self, results: Sequence[Tensor], images: Sequence[RawImage]) -> _Download:
        """Start to copy results on the current stream. images: referenced until the copy is done."""
        if [t.shape for t in self._results] != [t.shape for t in results]:
            self._results = [torch.empty(t.shape, dtype=t.dtype, pin_memory=self._pinned) for t in results]
        for mine, theirs in zip(self._results, results, strict=True):
            mine.copy_(theirs, non_blocking=True)
        self._last = _Download(self._results, self._pinned, images)
        return self._last


class _Download:
    """An asynchronous download of results."""

    def __init__(self, results: Sequence[Tensor], cuda: bool, images: Sequence[RawImage]) -> None:
        self._results, self._images = results, images
        self._event: Any = torch.cuda.Event() if cuda else None
        if self._event is not None:
            self._event.record()
        self._arrays: list[NDArray] | None = None

    def arrays(self) -> list[NDArray]:
        """Wait for the results; the arrays are copies, which the next batch does not overwrite."""
        if self._arrays is None:
            if self._event is not None:
                self._event.synchronize()
            self._arrays = [t.numpy().copy() for t in self._results]
            self._images = ()
        return self._arrays
