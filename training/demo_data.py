"""Scenes for training the demo detector, drawn while it trains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from demo_loss import Targets
from demo_model import INPUT_PX
from PIL import Image
from scene_pool import ScenePool, boxes_of, shared_array
from torch import Tensor

from detrt.data.scenes.scene import Scene, draw_scene

# Seeds of the three uses never meet; data sets written by detrt.data.scenes.scene use those below 2**40.
VALIDATION_SEED = 2**41
HELD_OUT_SEED = 2**42
TRAIN_SEED = 2**43
MAX_OBJECTS = 12
CHUNK = 64


def resize(image: np.ndarray, size: int = INPUT_PX) -> np.ndarray:
    """(H, W, 3) uint8 to (size, size, 3) uint8, plain bilinear as at run time."""
    small = Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(small)


def label_rows(scene: Scene) -> np.ndarray:
    """(n, 5) float32 rows of class id and (cx, cy, w, h) in 0..1."""
    classes = np.array([item.class_id for item in scene.objects], np.float32)
    return np.concatenate([classes[:, None], boxes_of(scene)], 1)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Memory that workers and trainer share: ``slots`` chunks of CHUNK scenes."""

    images: np.ndarray  # (slots, CHUNK, INPUT_PX, INPUT_PX, 3) uint8
    rows: np.ndarray  # (slots, CHUNK, MAX_OBJECTS, 5) float32
    counts: np.ndarray  # (slots, CHUNK) int64

    @classmethod
    def allocate(cls, slots: int) -> _Shared:
        return cls(
            shared_array((slots, CHUNK, INPUT_PX, INPUT_PX, 3), np.uint8),
            shared_array((slots, CHUNK, MAX_OBJECTS, 5), np.float32),
            shared_array((slots, CHUNK), np.int64),
        )

    def draw(self, slot: int, first_seed: int, number: int) -> None:
        for k in range(CHUNK):
            scene = draw_scene(first_seed + k, max_objects=MAX_OBJECTS)
            rows = label_rows(scene)
            self.images[slot, k] = resize(scene.image)
            self.rows[slot, k, : len(rows)] = rows
            self.counts[slot, k] = len(rows)


class DemoPool(ScenePool[_Shared]):
    """Images and boxes on the device, the numbers of objects on the host."""

    def __init__(self, size: int, workers: int, seed: int, first_chunk: int = 0) -> None:
        slots = 3 * workers
        shared = _Shared.allocate(max(1, slots))
        super().__init__(shared, slots, CHUNK, size, workers, TRAIN_SEED + seed * 2**32, first_chunk)
        self._stored = 0

    @property
    def filled(self) -> int:
        return min(self._stored, self.size)

    def _allocate(self, device: torch.device) -> int:
        room = -(-self.size // CHUNK) * CHUNK
        self.images = torch.zeros((room, INPUT_PX, INPUT_PX, 3), dtype=torch.uint8, device=device)
        self.rows = torch.zeros((room, MAX_OBJECTS, 5), device=device)
        self.counts = np.zeros(room, dtype=np.int64)
        return room

    def _store(self, slot: int, number: int) -> None:
        first = self._stored % len(self.images)
        at = slice(first, first + CHUNK)
        self.images[at].copy_(torch.from_numpy(self._shared.images[slot]), non_blocking=self._pinned)
        self.rows[at].copy_(torch.from_numpy(self._shared.rows[slot]))
        self.counts[at] = self._shared.counts[slot]
        self._stored += CHUNK

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
