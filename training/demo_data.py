"""Scenes for training: worker processes draw without end, a pool keeps the latest ones."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import queue
import time
from dataclasses import dataclass

import numpy as np
import torch
from demo_loss import Targets
from demo_model import INPUT_PX
from PIL import Image
from torch import Tensor

from detrt.scenes import Scene, draw_scene

# Seeds of the three uses never meet; data sets written by detrt.scenes use those below 2**40.
VALIDATION_SEED = 2**41
HELD_OUT_SEED = 2**42
TRAIN_SEED = 2**43
MAX_OBJECTS = 12
CHUNK = 64


def resize(image: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 to (INPUT_PX, INPUT_PX, 3) uint8, plain bilinear as at run time."""
    small = Image.fromarray(image).resize((INPUT_PX, INPUT_PX), Image.Resampling.BILINEAR)
    return np.asarray(small)


def label_rows(scene: Scene) -> np.ndarray:
    """(n, 5) float32 rows of class id and (cx, cy, w, h) in 0..1."""
    height, width = scene.image.shape[:2]
    rows = np.zeros((len(scene.objects), 5), dtype=np.float32)
    for k, item in enumerate(scene.objects):
        x0, y0, x1, y1 = item.box_xyxy
        rows[k] = (
            item.class_id,
            (x0 + x1) / 2 / width,
            (y0 + y1) / 2 / height,
            (x1 - x0) / width,
            (y1 - y0) / height,
        )
    return rows


@dataclass(frozen=True, slots=True)
class _Shared:
    """Memory that workers and trainer share: ``slots`` chunks of CHUNK scenes."""

    images: np.ndarray  # (slots, CHUNK, INPUT_PX, INPUT_PX, 3) uint8
    rows: np.ndarray  # (slots, CHUNK, MAX_OBJECTS, 5) float32
    counts: np.ndarray  # (slots, CHUNK) int64

    @classmethod
    def allocate(cls, slots: int) -> _Shared:
        def block(shape: tuple[int, ...], dtype: type) -> np.ndarray:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return np.frombuffer(mmap.mmap(-1, size), dtype=dtype).reshape(shape)

        return cls(
            block((slots, CHUNK, INPUT_PX, INPUT_PX, 3), np.uint8),
            block((slots, CHUNK, MAX_OBJECTS, 5), np.float32),
            block((slots, CHUNK), np.int64),
        )

    def draw(self, slot: int, first_seed: int) -> None:
        for k in range(CHUNK):
            scene = draw_scene(first_seed + k, max_objects=MAX_OBJECTS)
            rows = label_rows(scene)
            self.images[slot, k] = resize(scene.image)
            self.rows[slot, k, : len(rows)] = rows
            self.counts[slot, k] = len(rows)


def _work(shared: _Shared, free: multiprocessing.Queue, ready: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    parent = os.getppid()
    while os.getppid() == parent:  # ends with the trainer, also if that was killed
        try:
            slot, seed = free.get(timeout=2)
        except queue.Empty:
            continue
        shared.draw(slot, seed)
        ready.put(slot)


class ScenePool:
    """The latest ``size`` scenes on ``device``, renewed by ``workers`` processes.

    Build it before anything touches the GPU: the workers are forked. ``workers`` 0 draws
    ``size`` scenes once, in this process.
    """

    def __init__(self, size: int, workers: int, seed: int, first_chunk: int = 0) -> None:
        self.size, self.filled, self.position = size, 0, 0
        self.next_chunk = first_chunk
        self._seed = TRAIN_SEED + seed * 2**32
        self._workers: list[multiprocessing.Process] = []
        self._in_flight: list[tuple[int, torch.cuda.Event]] = []
        self._shared = _Shared.allocate(max(1, 3 * workers))
        if workers:
            context = multiprocessing.get_context("fork")
            self._free, self._ready = context.Queue(), context.Queue()
            for slot in range(3 * workers):
                self._order(slot)
            for _ in range(workers):
                args = (self._shared, self._free, self._ready)
                process = context.Process(target=_work, args=args, daemon=True)
                process.start()
                self._workers.append(process)

    def _order(self, slot: int) -> None:
        self._free.put((slot, self._seed + self.next_chunk * CHUNK))
        self.next_chunk += 1

    def to(self, device: torch.device, wait_for: int) -> None:
        """Put the pool on ``device`` and wait until it holds ``wait_for`` scenes."""
        size = -(-self.size // CHUNK) * CHUNK
        self.images = torch.zeros((size, INPUT_PX, INPUT_PX, 3), dtype=torch.uint8, device=device)
        self.rows = torch.zeros((size, MAX_OBJECTS, 5), device=device)
        self.counts = np.zeros(size, dtype=np.int64)
        self._pinned = False
        if device.type == "cuda":
            block = self._shared.images
            self._pinned = torch.cuda.cudart().cudaHostRegister(block.ctypes.data, block.nbytes, 0) == 0
        if not self._workers:
            for start in range(0, size, CHUNK):
                self._shared.draw(0, self._seed + start)
                self._store(0)
            self.filled = self.size
            return
        while self.filled < min(wait_for, size):
            self.refresh()
            time.sleep(0.02)

    def _store(self, slot: int) -> None:
        at = slice(self.position, self.position + CHUNK)
        source = torch.from_numpy(self._shared.images[slot])
        self.images[at].copy_(source, non_blocking=self._pinned)
        self.rows[at].copy_(torch.from_numpy(self._shared.rows[slot]))
        self.counts[at] = self._shared.counts[slot]
        self.position = (self.position + CHUNK) % len(self.images)
        self.filled = min(len(self.images), self.filled + CHUNK)

    def refresh(self) -> None:
        """Take in what the workers have finished; never waits for them."""
        while self._in_flight and self._in_flight[0][1].query():
            self._order(self._in_flight.pop(0)[0])
        while self._workers:
            try:
                slot = self._ready.get_nowait()
            except queue.Empty:
                return
            self._store(slot)
            if self._pinned:
                event = torch.cuda.Event()
                event.record()
                self._in_flight.append((slot, event))
            else:
                self._order(slot)

    def batch(self, size: int, rng: np.random.Generator) -> tuple[Tensor, Targets]:
        """Augmented pixels (B, 3, INPUT_PX, INPUT_PX) float32 in 0..1, and their targets."""
        device = self.images.device
        pick = rng.integers(0, self.filled, size=size)
        counts = self.counts[pick]
        index = torch.from_numpy(pick).to(device, non_blocking=True)
        objects = max(1, int(counts.max()))
        rows = self.rows[index, :objects]
        valid = torch.arange(objects)[None] < torch.from_numpy(counts)[:, None]
        pixels = self.images[index].permute(0, 3, 1, 2).float() / 255

        flip = torch.rand(size, device=device) < 0.5  # every shape is mirror symmetric
        pixels = torch.where(flip[:, None, None, None], pixels.flip(3), pixels)
        boxes = rows[..., 1:].clone()
        boxes[..., 0] = torch.where(flip[:, None], 1 - boxes[..., 0], boxes[..., 0])
        # Classes do not depend on colour, so channels may trade places and gains.
        order = torch.rand(size, 3, device=device).argsort(1)
        keep = torch.rand(size, 1, device=device) < 0.5
        order = torch.where(keep, torch.arange(3, device=device), order)
        pixels = pixels.gather(1, order[:, :, None, None].expand_as(pixels))
        gain = 1 + 0.25 * (torch.rand(size, 3, 1, 1, device=device) - 0.5)
        lift = 0.1 * (torch.rand(size, 1, 1, 1, device=device) - 0.5)
        pixels = (pixels * gain + lift).clamp(0, 1).contiguous(memory_format=torch.channels_last)
        targets = Targets(rows[..., 0].long(), boxes, valid.to(device, non_blocking=True), counts.tolist())
        return pixels, targets

    def close(self) -> None:
        for process in self._workers:
            process.terminate()
        self._workers = []
