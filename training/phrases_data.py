"""Scenes for training the prompted detector, drawn while it trains.

Images keep their aspect ratio: they are drawn in a size of their own, resized as at run time and
laid into the upper left corner of a landscape or a portrait canvas, so padding is trained as well.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from demo_data import MAX_OBJECTS
from phrases_captions import draw_phrases, held_out, numbers, token_targets, write
from phrases_loss import Targets
from phrases_model import LONG_PX, MEAN, SHORT_PX, STD
from PIL import Image
from scene_pool import ScenePool, boxes_of, shared_array
from torch import Tensor

from detrt.data.preprocess import shortest_edge_size
from detrt.data.scenes.phrases import Phrase
from detrt.data.scenes.scene import Scene, draw_scene

TRAIN_SEED = 2**45  # far from the seeds of validation, of held-out scenes and of written data sets
CHUNK = 32
CANVASES = ((SHORT_PX, LONG_PX), (LONG_PX, SHORT_PX))  # (height, width): landscape, portrait
_BYTES = SHORT_PX * LONG_PX * 3


def resize(image: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 to the size in which the model sees it, aspect ratio kept."""
    height, width = shortest_edge_size(image.shape[:2], SHORT_PX, LONG_PX)
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR))


def label_rows(scene: Scene) -> np.ndarray:
    """(n, 7) float32 rows of colour, fill, shape and (cx, cy, w, h) in 0..1."""
    words = [numbers(Phrase(item.color, item.fill, item.label)) for item in scene.objects]
    return np.concatenate([np.array(words, np.float32).reshape(-1, 3), boxes_of(scene)], 1)


def draw_in(orientation: int, seed: int) -> Scene:
    """The training scene of ``seed``: landscape (0) or portrait (1), sizes distributed as in `draw_scene`."""
    rng = np.random.default_rng([seed, 1])
    long_side = int(rng.integers(300, 641))
    short_side = int(rng.integers(max(240, math.ceil(long_side * 9 / 16)), long_side + 1))
    size = (short_side, long_side) if orientation == 0 else (long_side, short_side)
    return draw_scene(seed, size_hw=size, max_objects=MAX_OBJECTS)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Memory that workers and trainer share: ``slots`` chunks of CHUNK scenes of one orientation."""

    images: np.ndarray  # (slots, CHUNK, _BYTES) uint8
    rows: np.ndarray  # (slots, CHUNK, MAX_OBJECTS, 7) float32
    sizes: np.ndarray  # (slots, CHUNK, 3) int64: objects, height, width

    @classmethod
    def allocate(cls, slots: int) -> _Shared:
        return cls(
            shared_array((slots, CHUNK, _BYTES), np.uint8),
            shared_array((slots, CHUNK, MAX_OBJECTS, 7), np.float32),
            shared_array((slots, CHUNK, 3), np.int64),
        )

    def draw(self, slot: int, first_seed: int, number: int) -> None:
        orientation = number % 2
        height, width = CANVASES[orientation]
        for k in range(CHUNK):
            scene = draw_in(orientation, first_seed + k)
            small, rows = resize(scene.image), label_rows(scene)
            canvas = self.images[slot, k].reshape(height, width, 3)
            canvas[...] = 0
            canvas[: small.shape[0], : small.shape[1]] = small
            self.rows[slot, k, : len(rows)] = rows
            self.sizes[slot, k] = (len(rows), *small.shape[:2])


@dataclass(frozen=True, slots=True)
class Batch:
    """B images of one canvas (H, W) and their prompts of T tokens, on the model's device.

    ``pixels`` (B, 3, H, W) normalised float32, zero in the padding; ``mask`` (B, H, W) int64;
    ``input_ids`` and ``attention_mask`` (B, T) int64.
    """

    pixels: Tensor
    mask: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    targets: Targets


class _Half:
    """The pool's scenes of one orientation: images on the device, labels on the host."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.images = torch.zeros((size, _BYTES), dtype=torch.uint8, device=device)
        self.rows = np.zeros((size, MAX_OBJECTS, 7), np.float32)
        self.sizes = np.zeros((size, 3), np.int64)
        self.filled, self.position = 0, 0

    def store(self, shared: _Shared, slot: int, pinned: bool) -> None:
        at = slice(self.position, self.position + CHUNK)
        self.images[at].copy_(torch.from_numpy(shared.images[slot]), non_blocking=pinned)
        self.rows[at], self.sizes[at] = shared.rows[slot], shared.sizes[slot]
        self.position = (self.position + CHUNK) % len(self.images)
        self.filled = min(len(self.images), self.filled + CHUNK)


class PhrasePool(ScenePool[_Shared]):
    """Half of the scenes landscape, half portrait."""

    def __init__(self, size: int, workers: int, seed: int, first_chunk: int = 0) -> None:
        slots = 4 * workers
        shared = _Shared.allocate(max(1, slots))
        super().__init__(shared, slots, CHUNK, size, workers, TRAIN_SEED + seed * 2**34, first_chunk)

    @property
    def filled(self) -> int:
        return sum(half.filled for half in self._halves)

    def _allocate(self, device: torch.device) -> int:
        self.device = device
        half = -(-self.size // (2 * CHUNK)) * CHUNK
        self._halves = (_Half(half, device), _Half(half, device))
        return 2 * half

    def _store(self, slot: int, number: int) -> None:
        self._halves[number % 2].store(self._shared, slot, self._pinned)

    def _holds(self, scenes: int) -> bool:
        return super()._holds(scenes) and all(half.filled for half in self._halves)

    def refresh(self, limit: int = 8) -> None:
        """As in `ScenePool`, but few chunks before one step."""
        super().refresh(limit)

    def batch(self, size: int, rng: np.random.Generator, scale: float = 1.0, simple: float = 0.0) -> Batch:
        """A batch of one orientation with new prompts; images are mirrored at random.

        They are made smaller by ``scale``. ``simple``: see :func:`phrases_captions.draw_phrases`.
        """
        orientation = int(rng.integers(2))
        half, (height, width) = self._halves[orientation], CANVASES[orientation]
        pick = rng.integers(0, half.filled, size=size)
        counts, (heights, widths) = half.sizes[pick, 0], half.sizes[pick, 1:].T
        rows = half.rows[pick].copy()  # always as many columns: the same shapes in every step
        flip = rng.random(size) < 0.5  # every shape is mirror symmetric
        rows[..., 3] = np.where(flip[:, None], 1 - rows[..., 3], rows[..., 3])
        objects = rows[..., :3].astype(np.int64)
        prompts = write(*draw_phrases(objects, counts, rng, simple), rng, multiple=16)
        tokens = token_targets(prompts, objects, counts)
        named = tokens.any(-1)
        pure = ~np.logical_or(*held_out(objects)) & (np.arange(MAX_OBJECTS) < counts[:, None])
        order = np.argsort(~named, axis=1, kind="stable")  # named objects first, the others are background
        total = named.sum(1)
        images = np.arange(size)[:, None]
        valid = np.arange(order.shape[1]) < total[:, None]

        def there(x: np.ndarray) -> Tensor:
            tensor = torch.from_numpy(np.ascontiguousarray(x))
            return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

        targets = Targets(
            there(rows[images, order, 3:]),
            there(tokens[images, order].astype(np.float32)),
            there(valid),
            there(objects[images, order]),
            there(pure[images, order]),
        )
        gain = there((1 + 0.16 * (rng.random((size, 1, 1, 1)) - 0.5)).astype(np.float32))
        pixels = half.images[there(pick)].view(size, height, width, 3)
        across = np.arange(width)[None]
        across = np.where(flip[:, None] & (across < widths[:, None]), widths[:, None] - 1 - across, across)
        pixels = pixels.gather(2, there(across)[:, None, :, None].expand(-1, height, -1, 3))
        mask = _inside(there(heights), there(widths), height, width)
        pixels = normalize(pixels, mask, gain)
        if scale != 1:
            height, width = round(height * scale), round(width * scale)
            pixels = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
            mask = _inside(there((heights * scale).round()), there((widths * scale).round()), height, width)
            pixels = (pixels * mask[:, None]).contiguous()
        return Batch(pixels, mask.long(), there(prompts.input_ids), there(prompts.attention_mask), targets)


def _inside(heights: Tensor, widths: Tensor, height: int, width: int) -> Tensor:
    """(B, height, width) bool: the upper left ``heights`` x ``widths`` of each image."""
    rows = torch.arange(height, device=heights.device) < heights[:, None]
    columns = torch.arange(width, device=widths.device) < widths[:, None]
    return rows[:, :, None] & columns[:, None]


@functools.lru_cache
def _mean_and_std(device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept, as a new tensor waits for the GPU."""
    mean, std = (torch.tensor(x).view(3, 1, 1).to(device) for x in (MEAN, STD))
    return mean, std


def normalize(pixels: Tensor, mask: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    """(B, H, W, 3) uint8 and (B, H, W) bool to (B, 3, H, W) normalised float32, zero in the padding."""
    mean, std = _mean_and_std(pixels.device)
    scaled = (pixels.permute(0, 3, 1, 2).float() / 255 * gain).clamp(0, 1)
    return ((scaled - mean) / std * mask[:, None]).contiguous()


def stack(images: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Resized images of one orientation on a canvas, (B, H, W, 3) uint8, and the (B, H, W) bool mask."""
    wide = all(image.shape[1] >= image.shape[0] for image in images)
    pixels = np.zeros((len(images), *CANVASES[0 if wide else 1], 3), np.uint8)
    mask = np.zeros(pixels.shape[:3], bool)
    for k, image in enumerate(images):
        pixels[k, : image.shape[0], : image.shape[1]] = image
        mask[k, : image.shape[0], : image.shape[1]] = True
    return pixels, mask
