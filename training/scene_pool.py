"""Worker processes draw chunks of scenes without end; a pool on the device keeps the latest ones."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import queue
import sys
import time
from abc import ABC, abstractmethod
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from detrt.data.scenes.scene import Scene


class Shared(Protocol):
    """Memory that workers and trainer share, in slots of one chunk each."""

    @property
    def images(self) -> np.ndarray: ...

    def draw(self, slot: int, first_seed: int, number: int) -> None:
        """Draw the chunk of this number, whose scenes have the seeds from `first_seed` on, into a slot."""


Memory = TypeVar("Memory", bound=Shared)


def boxes_of(scene: Scene) -> np.ndarray:
    """(n, 4) float32 of (cx, cy, w, h) in 0..1, of the objects of a scene."""
    height, width = scene.image.shape[:2]
    corners = np.array([item.box_xyxy for item in scene.objects], np.float32).reshape(-1, 4)
    low, high = corners[:, :2], corners[:, 2:]
    return np.concatenate([(low + high) / 2, high - low], 1) / np.array([width, height] * 2, np.float32)


def shared_array(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Zeros that processes forked from this one share."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype=dtype).reshape(shape)


def _work(shared: Shared, free: multiprocessing.Queue, ready: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    parent = os.getppid()
    while os.getppid() == parent:  # ends with the trainer, also if that was killed
        try:
            slot, seed, number = free.get(timeout=2)
        except queue.Empty:
            continue
        shared.draw(slot, seed, number)
        ready.put((slot, number))


class ScenePool(ABC, Generic[Memory]):
    """The latest ``size`` scenes, renewed by ``workers`` processes.

    Build it before anything touches the GPU: the workers are forked. ``workers`` 0 draws ``size`` scenes
    once, in this process. ``shared`` holds ``slots`` chunks of ``chunk`` scenes. The seeds of the scenes of
    chunk 0 begin at ``first_seed``; workers begin with chunk ``first_chunk``.
    """

    def __init__(
        self, shared: Memory, slots: int, chunk: int, size: int, workers: int, first_seed: int, first_chunk: int
    ) -> None:
        self.size, self.next_chunk = size, first_chunk
        self._shared, self._chunk, self._seed = shared, chunk, first_seed
        self._workers: list[BaseProcess] = []
        self._in_flight: list[tuple[int, torch.cuda.Event]] = []
        self._pinned = False
        if workers:
            context = multiprocessing.get_context("fork")
            self._free, self._ready = context.Queue(), context.Queue()
            for slot in range(slots):
                self._order(slot)
            for _ in range(workers):
                args = (self._shared, self._free, self._ready)
                process = context.Process(target=_work, args=args, daemon=True)
                process.start()
                self._workers.append(process)

    def _order(self, slot: int) -> None:
        self._free.put((slot, self._seed + self.next_chunk * self._chunk, self.next_chunk))
        self.next_chunk += 1

    @property
    @abstractmethod
    def filled(self) -> int:
        """Scenes that the pool holds."""

    @abstractmethod
    def _allocate(self, device: torch.device) -> int:
        """Make room on the device and return for how many scenes, in whole chunks."""

    @abstractmethod
    def _store(self, slot: int, number: int) -> None:
        """Copy the chunk of this number from its slot over the oldest one."""

    @abstractmethod
    def batch(self, size: int, rng: np.random.Generator) -> Any:
        """A random choice of the scenes, changed at random."""

    def _holds(self, scenes: int) -> bool:
        """Whether training may start with so many."""
        return self.filled >= scenes

    def to(self, device: torch.device, wait_for: int) -> None:
        """Put the pool on ``device`` and wait until it holds ``wait_for`` scenes."""
        room = self._allocate(device)
        if device.type == "cuda":  # copies from other memory would wait for all work on the GPU
            block = self._shared.images
            self._pinned = torch.cuda.cudart().cudaHostRegister(block.ctypes.data, block.nbytes, 0) == 0
        if not self._workers:
            for number in range(room // self._chunk):
                self._shared.draw(0, self._seed + number * self._chunk, number)
                self._store(0, number)
            return
        while not self._holds(min(wait_for, self.size)):
            self.refresh(limit=1000)
            time.sleep(0.02)

    def refresh(self, limit: int = sys.maxsize) -> None:
        """Take in what the workers have finished, at most ``limit`` chunks; never waits for them."""
        while self._in_flight and self._in_flight[0][1].query():
            self._order(self._in_flight.pop(0)[0])
        for _ in range(limit if self._workers else 0):
            try:
                slot, number = self._ready.get_nowait()
            except queue.Empty:
                return
            self._store(slot, number)
            if self._pinned:
                event = torch.cuda.Event()
                event.record()
                self._in_flight.append((slot, event))
            else:
                self._order(slot)

    def close(self) -> None:
        for process in self._workers:
            process.terminate()
        self._workers = []
