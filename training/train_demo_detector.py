"""Train the demo detector on one GPU with scenes that are drawn while it trains.

    PYTHONPATH=src python training/train_demo_detector.py --minutes 22 --out /tmp/demo_detector

A run that stops resumes from ``--checkpoint`` when it is started again with the same
arguments; only time spent training counts towards ``--minutes``. ``--smoke`` takes two steps
with eight scenes on the CPU and goes through every later stage as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from demo_data import CHUNK, VALIDATION_SEED, DemoPool
from demo_loss import Targets, denoising_queries, detection_loss
from demo_model import build_model, run_in_bf16, save_model
from evaluate_demo_detector import average_precision, predict, score_model
from evaluation import draw_scenes
from options import parse_options, run_program, training_options
from torch import Tensor
from trainer import Recipe, Trainer, move
from trainer import train as run
from transformers import RTDetrV2Config
from transformers.models.rt_detr_v2 import modeling_rt_detr_v2

from detrt.data.scenes.scene import Scene


class DemoTrainer(Trainer[DemoPool]):
    config: RTDetrV2Config
    recipe = Recipe(
        what="the demo detector in src/detrt/models/embedded/shapes",
        script="train_demo_detector.py",
        chunk=CHUNK,
        clip_norm=0.5,
        warmup_steps=600,
        ema_decay=0.9995,
        optimizer={"weight_decay": 1e-3},
    )

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        model = build_model(args.seed)
        move(model, device, torch.channels_last)
        core = model.model
        modeling_rt_detr_v2.get_contrastive_denoising_training_group = denoising_queries
        if device.type == "cuda":
            run_in_bf16(core.backbone)
            run_in_bf16(core.encoder)
        super().__init__(args, device, core, model.config, core.state_dict())  # with the statistics of its norms

    def fill(self, pool: DemoPool) -> None:
        pool.to(self.device, wait_for=4096)
        print(f"pool holds {pool.filled} scenes", flush=True)

    def batch(self, pool: DemoPool, rng: np.random.Generator) -> tuple[Tensor, Targets]:
        return pool.batch(self.args.batch, rng)

    def scenes_seen(self) -> int:
        return self.progress.step * self.args.batch

    def losses(self, batch: tuple[Tensor, Targets]) -> dict[str, Tensor]:
        pixels, targets = batch
        self.core.train()
        return detection_loss(self.core(pixels, labels=targets), targets)

    def evaluate(self, scenes: list[Scene]) -> dict:
        """In float32."""
        self.core.eval()

        def forward(pixels: Tensor) -> tuple[Tensor, Tensor]:
            out = self.core(pixels.contiguous(memory_format=torch.channels_last))
            return out.intermediate_logits[:, -1], out.intermediate_reference_points[:, -1]

        return average_precision(scenes, predict(forward, scenes, self.device))

    def headline(self, final: dict) -> dict:
        return {"final_validation_ap": final}

    def export(self, folder: Path) -> Path:
        state = {f"model.{name}": tensor for name, tensor in self.ema.items()}
        return save_model(state, self.config, folder)


def train(args: argparse.Namespace) -> Trainer[DemoPool]:
    return run(args, DemoPool, DemoTrainer)


def check_saved(folder: Path, scenes: int) -> None:
    """Load what was written the way a user would, and run it."""
    model = transformers.AutoModelForObjectDetection.from_pretrained(folder).eval()
    scores = score_model(model, draw_scenes(VALIDATION_SEED, scenes))
    size = (folder / "model.safetensors").stat().st_size
    line = {"saved": str(folder), "bytes": size, "dtype": str(model.dtype), "scenes": scenes}
    print(json.dumps(line | {"ap": scores["ap"]}), flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = training_options(__doc__.splitlines()[0], "demo_detector.json", "two steps, eight scenes, CPU")
    parser.set_defaults(minutes=22.0, pool=40000, workers=max(1, (os.cpu_count() or 2) - 1))
    parser.set_defaults(validations=6, validation_scenes=500)
    return parse_options(parser, argv, "demo_detector.json", smoke_pool=8)


def main() -> None:
    args = parse(sys.argv[1:])
    trainer = train(args)
    folder = trainer.export(args.out / "model")
    check_saved(folder, 4 if args.smoke else 100)


if __name__ == "__main__":
    run_program(main)
