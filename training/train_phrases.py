"""Train the prompted demo detector on one GPU with scenes and prompts that are drawn while it trains.

    PYTHONPATH=src python training/train_phrases.py --minutes 12 --out /tmp/phrases

OUT/model is a folder in transformers format. A run that stops resumes from ``--checkpoint`` when it is
started again with the same arguments; only time spent training counts towards ``--minutes``, and
``--stop-after`` ends this process early, by its own clock. ``--smoke`` takes a few steps with 64
scenes on the CPU and goes through every later stage as well.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")  # each of its checks waits for the GPU

import numpy as np
import torch
from evaluate_phrases import evaluate
from options import parse_options, run_program, training_options
from phrases_data import CHUNK, Batch, PhrasePool
from phrases_loss import AttributeHeads, detection_loss, noised_boxes
from phrases_model import build_model, forward, keep_bf16, save_model
from phrases_msda import fuse
from torch import Tensor
from trainer import Progress, Recipe, Trainer, move
from trainer import train as run
from transformers import GroundingDinoConfig

from detrt.data.scenes.phrases import COLOR_NAMES, HELD_OUT_COLORS, HELD_OUT_FILLS
from detrt.data.scenes.scene import CLASSES, Scene
from detrt.data.scenes.shapes import FILLS

STARTED = time.perf_counter()
SMALL_SHARE, SMALL_SCALE, SMALL_BATCH = 0.5, 0.8, 1.25  # of the time; of the sides; of the batch
SIMPLE_SHARE, SIMPLE_TIME = 0.6, 0.3  # of the batches at first; the share of the time after which it is none


@dataclass
class PhraseProgress(Progress):
    scenes: int = 0  # seen, with repetition


class PhraseTrainer(Trainer[PhrasePool]):
    config: GroundingDinoConfig
    progress: PhraseProgress
    recipe = Recipe(
        what="the prompted demo detector in src/detrt/models/embedded/phrases",
        script="train_phrases.py",
        chunk=CHUNK,
        clip_norm=1.0,
        warmup_steps=200,
        ema_decay=0.999,
        optimizer={"betas": (0.9, 0.99), "weight_decay": 5e-3},
        settings={
            "small_pictures": {"share_of_time": SMALL_SHARE, "scale": SMALL_SCALE, "batch": SMALL_BATCH},
            "simple_prompts": {"share_of_batches_at_first": SIMPLE_SHARE, "none_after_share_of_time": SIMPLE_TIME},
        },
        notes={"never_named_together_in_training": [p.text() for p in (*HELD_OUT_COLORS, *HELD_OUT_FILLS)]},
    )

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.model = build_model(args.seed)
        move(self.model, device)
        sizes = (len(COLOR_NAMES), len(FILLS), len(CLASSES))
        self.heads = AttributeHeads(self.model.config.d_model, sizes).to(device)
        if device.type == "cuda":
            fuse(self.model, device)
            keep_bf16(self.model)
        live = {name: p.detach() for name, p in self.model.named_parameters()}  # tied weights once
        super().__init__(args, device, self.model, self.model.config, live, {"heads": self.heads})
        self.progress = PhraseProgress()

    def finished(self) -> bool:
        return super().finished() or time.perf_counter() - STARTED >= self.args.stop_after

    def fill(self, pool: PhrasePool) -> None:
        pool.to(self.device, wait_for=self.args.wait_for)
        print(f"pool holds {pool.filled} scenes after {time.perf_counter() - STARTED:.0f} s", flush=True)

    def batch(self, pool: PhrasePool, rng: np.random.Generator) -> Batch:
        """More images of smaller size and simpler prompts at first."""
        size, scale = self.args.batch, 1.0
        if self.done() < SMALL_SHARE:
            size, scale = int(size * SMALL_BATCH), SMALL_SCALE
        simple = max(0.0, SIMPLE_SHARE * (1 - self.done() / SIMPLE_TIME))
        self.progress.scenes += size
        return pool.batch(size, rng, scale, simple)

    def scenes_seen(self) -> int:
        return self.progress.scenes

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        noise = noised_boxes(batch.targets, self.config.num_queries)
        prompt = (batch.input_ids, batch.attention_mask)
        out = forward(self.model, batch.pixels, batch.mask, *prompt, noise.boxes, noise.hidden)
        return detection_loss(out, batch.targets, noise, batch.attention_mask.float(), self.heads)

    def logged(self) -> dict:
        return {"drawn": self.scenes_drawn()}

    def evaluate(self, scenes: list[Scene]) -> dict:
        """With the arithmetic of training."""

        @torch.no_grad()
        def answer(pixels: Tensor, mask: Tensor, ids: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
            out = forward(self.model, pixels, mask, ids, attention)
            return out.logits[-1], out.boxes[-1]

        return evaluate(answer, scenes, self.device)

    def curve_point(self, found: dict) -> dict:
        return {way: {k: v for k, v in scores.items() if k != "per_phrase"} for way, scores in found.items()}

    def headline(self, final: dict) -> dict:
        return {way: found["ap"] for way, found in final.items()}

    def save(self) -> None:
        """The model as well, as a run may be ended from outside."""
        super().save()
        self.export(self.args.out / "model")

    def export(self, folder: Path) -> Path:
        state = {name: tensor for name, tensor in self.model.state_dict().items() if name not in self.ema}
        return save_model(state | self.ema, self.config, folder)


def train(args: argparse.Namespace) -> Trainer[PhrasePool]:
    return run(args, PhrasePool, PhraseTrainer)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = training_options(__doc__.splitlines()[0], "demo_phrases.json", "two steps with 64 scenes, CPU")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds that this process may train")
    parser.add_argument("--wait-for", type=int, default=4096, help="scenes before the first step")
    parser.set_defaults(minutes=12.0, pool=60000, workers=max(1, (os.cpu_count() or 2) * 3 // 4))
    parser.set_defaults(validations=4, validation_scenes=200)
    return parse_options(parser, argv, "demo_phrases.json", smoke_pool=64)


if __name__ == "__main__":
    run_program(lambda: train(parse(sys.argv[1:])))
