"""Train the demo detector on one GPU with scenes that are drawn while it trains.

    PYTHONPATH=src python training/train_demo_detector.py --minutes 22 --out /tmp/demo_detector

A run that stops goes on from ``--checkpoint`` when it is started again with the same
arguments; only time spent training counts towards ``--minutes``. ``--smoke`` takes two steps
with eight scenes on the CPU and goes through every later stage as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL
import torch
import transformers
from demo_data import VALIDATION_SEED, ScenePool
from demo_loss import Targets, denoising_queries, detection_loss
from demo_model import build_model, run_in_bf16, save_model
from evaluate_demo_detector import average_precision, draw_scenes, predict
from torch import Tensor, nn
from transformers.models.rt_detr_v2 import modeling_rt_detr_v2

CLIP_NORM = 0.5
WEIGHT_DECAY = 1e-3
WARMUP_STEPS = 600
EMA_DECAY = 0.9995


@dataclass
class Progress:
    """What a checkpoint holds besides tensors."""

    step: int = 0
    seconds: float = 0.0  # spent training; the schedule runs on this clock
    next_chunk: int = 0
    losses: list[dict] = field(default_factory=list)
    validation: list[dict] = field(default_factory=list)


class Trainer:
    """Model, its moving average, the optimiser and the schedule."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.model = build_model(args.seed).to(device, memory_format=torch.channels_last)
        self.core: nn.Module = self.model.model
        self.config = self.model.config
        state = self.core.state_dict()
        self.ema = {name: tensor.detach().clone() for name, tensor in state.items()}
        decayed = [p for p in self.core.parameters() if p.ndim >= 2]
        plain = [p for p in self.core.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}],
            lr=args.lr,
            fused=device.type == "cuda",
        )
        modeling_rt_detr_v2.get_contrastive_denoising_training_group = denoising_queries
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            torch.backends.cudnn.benchmark = True
            run_in_bf16(self.core.backbone)
            run_in_bf16(self.core.encoder)
        self._live = list(self.core.state_dict().values())
        self._mean = list(self.ema.values())
        self.progress = Progress()

    def learning_rate(self) -> float:
        """Warm-up by steps, then a cosine over the training time down to 1 %."""
        done = min(1.0, self.progress.seconds / (60 * self.args.minutes))
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))
        return self.args.lr * cosine * min(1.0, (self.progress.step + 1) / WARMUP_STEPS)

    def step(self, pixels: Tensor, targets: Targets) -> dict[str, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.core.train()
        losses = detection_loss(self.core(pixels, labels=targets), targets)
        total = torch.stack(list(losses.values())).sum()
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = nn.utils.clip_grad_norm_(self.core.parameters(), CLIP_NORM)
        self.optimizer.step()
        self._follow()
        self.progress.step += 1
        return {"total": total, "gradient": norm} | losses

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the average towards the live weights; quickly at first."""
        done = self.progress.step
        rate = 1 - min(EMA_DECAY, (1 + done) / (10 + done))
        pairs = [(m, w) for m, w in zip(self._mean, self._live, strict=True) if m.is_floating_point()]
        torch._foreach_lerp_([m for m, _ in pairs], [w for _, w in pairs], rate)

    def validate(self, scenes: list) -> dict:
        """AP of the averaged weights in float32."""
        live = {name: tensor.clone() for name, tensor in self.core.state_dict().items()}
        self.core.load_state_dict(self.ema)
        self.core.eval()

        def forward(pixels: Tensor) -> tuple[Tensor, Tensor]:
            out = self.core(pixels.contiguous(memory_format=torch.channels_last))
            return out.intermediate_logits[:, -1], out.intermediate_reference_points[:, -1]

        try:
            return average_precision(scenes, predict(forward, scenes, self.device))
        finally:
            self.core.load_state_dict(live)

    def save_checkpoint(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        torch.save(
            {
                "model": self.core.state_dict(),
                "ema": self.ema,
                "optimizer": self.optimizer.state_dict(),
                "progress": vars(self.progress),
                "arguments": self._identity(),
            },
            partial,
        )
        os.replace(partial, path)

    def load_checkpoint(self, path: Path) -> None:
        held = torch.load(path, map_location=self.device, weights_only=True)
        if held["arguments"] != self._identity():
            raise SystemExit(
                f"{path} belongs to a run with {held['arguments']}, this one has {self._identity()}; "
                "give the same arguments or another --checkpoint"
            )
        self.core.load_state_dict(held["model"])
        for name, tensor in held["ema"].items():
            self.ema[name].copy_(tensor)
        self.optimizer.load_state_dict(held["optimizer"])
        self.progress = Progress(**held["progress"])

    def _identity(self) -> dict[str, object]:
        return {name: getattr(self.args, name) for name in ("seed", "minutes", "batch", "lr")}

    def export(self, folder: Path) -> Path:
        state = {f"model.{name}": tensor for name, tensor in self.ema.items()}
        return save_model(state, self.config, folder)


def make_record(trainer: Trainer, final: dict | None) -> dict:
    """Everything needed to judge and repeat the run."""
    args, progress = trainer.args, trainer.progress
    cuda = trainer.device.type == "cuda"
    return {
        "what": "the demo detector in src/detrt/default_model",
        "command": f"python training/train_demo_detector.py --minutes {args.minutes:g} --seed {args.seed}"
        f" --batch {args.batch} --lr {args.lr:g}",
        "seed": args.seed,
        "machine": {
            "gpu": torch.cuda.get_device_name() if cuda else None,
            "cpu_cores": os.cpu_count(),
            "system": platform.system(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
            "pillow": PIL.__version__,
        },
        "settings": {
            "minutes": args.minutes,
            "batch": args.batch,
            "lr": args.lr,
            "weight_decay": WEIGHT_DECAY,
            "clip_norm": CLIP_NORM,
            "warmup_steps": WARMUP_STEPS,
            "ema_decay": EMA_DECAY,
            "pool_scenes": args.pool,
        },
        "parameters": sum(p.numel() for p in trainer.core.parameters()),
        "steps": progress.step,
        "train_seconds": round(progress.seconds, 1),
        "scenes_seen": progress.step * args.batch,
        "scenes_drawn": progress.next_chunk * 64,
        "loss_curve": progress.losses,
        "validation_curve": progress.validation,
        "final_validation_ap": final,
        "config": trainer.config.to_diff_dict(),
    }


def train(args: argparse.Namespace) -> Trainer:
    # Workers are forked, which is only safe before the GPU is in use.
    start_chunk = 0
    if args.checkpoint.exists():
        held = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        start_chunk = held["progress"]["next_chunk"]
    pool = ScenePool(args.pool, args.workers, args.seed, start_chunk)
    scenes = draw_scenes(VALIDATION_SEED, args.validation_scenes)
    device = torch.device("cpu" if args.smoke else "cuda")
    trainer = Trainer(args, device)
    if args.checkpoint.exists():
        trainer.load_checkpoint(args.checkpoint)
        print(f"resumed at step {trainer.progress.step}", flush=True)
    progress = trainer.progress
    pool.to(device, wait_for=4096)
    print(f"pool holds {pool.filled} scenes", flush=True)
    rng = np.random.default_rng([args.seed, progress.step])
    torch.manual_seed(args.seed + progress.step)
    clock, saved = time.perf_counter(), progress.seconds
    checks = max(1, args.validations)
    while progress.seconds < 60 * args.minutes and progress.step < args.steps:
        pool.refresh()
        progress.next_chunk = pool.next_chunk
        losses = trainer.step(*pool.batch(args.batch, rng))
        if progress.step % args.log_every == 0:
            values = {name: round(float(v.detach()), 4) for name, v in losses.items()}
            if not math.isfinite(values["total"]):
                raise SystemExit(f"the loss is {values['total']} at step {progress.step}: {values}")
            values |= {"step": progress.step, "lr": round(trainer.learning_rate(), 7)}
            values["minute"] = round(progress.seconds / 60, 2)
            progress.losses.append(values)
            print(json.dumps(values), flush=True)
        now = time.perf_counter()
        progress.seconds += now - clock
        clock = now
        due = (len(progress.validation) + 1) / checks * 60 * args.minutes
        if progress.seconds >= due and len(progress.validation) < checks - 1:
            point = trainer.validate(scenes) | {"step": progress.step}
            point |= {"minute": round(progress.seconds / 60, 2), "scenes": len(scenes)}
            progress.validation.append(point)
            print(json.dumps(point), flush=True)
        if progress.seconds - saved > 60 * args.save_every:
            trainer.save_checkpoint(args.checkpoint)
            saved = progress.seconds
            progress_now = make_record(trainer, None)
            args.record.write_text(json.dumps(progress_now, indent=2) + "\n", encoding="utf-8")
        clock = time.perf_counter()  # validation and saving are not training time
    pool.close()
    trainer.save_checkpoint(args.checkpoint)
    final = trainer.validate(scenes)
    args.record.write_text(json.dumps(make_record(trainer, final), indent=2) + "\n", encoding="utf-8")
    print(json.dumps({"final_validation_ap": final}), flush=True)
    return trainer


def check_saved(folder: Path, scenes: int) -> None:
    """Load what was written the way a user would, and run it."""
    model = transformers.AutoModelForObjectDetection.from_pretrained(folder).eval()

    def forward(pixels: Tensor) -> tuple[Tensor, Tensor]:
        out = model(pixels)
        return out.logits, out.pred_boxes

    drawn = draw_scenes(VALIDATION_SEED, scenes)
    scores = average_precision(drawn, predict(forward, drawn, torch.device("cpu"), batch=10))
    size = (folder / "model.safetensors").stat().st_size
    line = {"saved": str(folder), "bytes": size, "dtype": str(model.dtype), "scenes": scenes}
    print(json.dumps(line | {"ap": scores["ap"]}), flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=22.0, help="training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--record", type=Path, help="JSON record (default: OUT/demo_detector.json)")
    parser.add_argument("--checkpoint", type=Path, help="default: OUT/checkpoint.pt")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--pool", type=int, default=40000, help="scenes kept on the GPU")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--validations", type=int, default=6)
    parser.add_argument("--validation-scenes", type=int, default=500)
    parser.add_argument("--save-every", type=float, default=2.0, help="minutes between checkpoints")
    parser.add_argument("--log-every", type=int, default=100, help="steps between log lines")
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="stop after so many steps")
    parser.add_argument("--smoke", action="store_true", help="two steps, eight scenes, CPU")
    args = parser.parse_args(argv)
    if args.minutes <= 0 or args.batch < 1:
        parser.error(f"--minutes and --batch must be above 0, got {args.minutes} and {args.batch}")
    if args.smoke:
        args.steps, args.batch, args.pool, args.workers = 2, 4, 8, 0
        args.validation_scenes, args.log_every = 4, 1
    args.out.mkdir(parents=True, exist_ok=True)
    args.record = args.record or args.out / "demo_detector.json"
    args.checkpoint = args.checkpoint or args.out / "checkpoint.pt"
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    trainer = train(args)
    folder = trainer.export(args.out / "model")
    check_saved(folder, 4 if args.smoke else 100)


if __name__ == "__main__":
    main()
