"""Train the prompted demo detector on one GPU with scenes and prompts that are drawn while it trains.

    PYTHONPATH=src python training/train_phrases.py --minutes 12 --out /tmp/phrases

OUT/model is a folder in transformers format. A run that stops goes on from ``--checkpoint`` when it is
started again with the same arguments; only time spent training counts towards ``--minutes``, and
``--stop-after`` ends this process early, by its own clock. ``--smoke`` takes a few steps with 64
scenes on the CPU and goes through every later stage as well.
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

os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")  # each of its checks waits for the GPU

import numpy as np
import PIL
import torch
import transformers
from demo_data import VALIDATION_SEED
from evaluate_demo_detector import draw_scenes, write_json
from evaluate_phrases import evaluate
from phrases_data import CHUNK, Batch, PhrasePool
from phrases_loss import AttributeHeads, detection_loss, noised_boxes
from phrases_model import build_model, forward, keep_bf16, save_model
from phrases_msda import fuse
from torch import Tensor, nn

from detrt.scenes import CLASSES
from detrt.scenes_phrases import COLOR_NAMES, HELD_OUT_COLORS, HELD_OUT_FILLS
from detrt.scenes_shapes import FILLS

STARTED = time.perf_counter()
CLIP_NORM = 1.0
WEIGHT_DECAY = 5e-3
BETAS = (0.9, 0.99)
WARMUP_STEPS = 200
EMA_DECAY = 0.999
SMALL_SHARE, SMALL_SCALE, SMALL_BATCH = 0.5, 0.8, 1.25  # of the time; of the sides; of the batch
SIMPLE_SHARE, SIMPLE_TIME = 0.6, 0.3  # of the batches at first; the share of the time after which it is none


@dataclass
class Progress:
    """What a checkpoint holds besides tensors."""

    step: int = 0
    seconds: float = 0.0  # spent training; the schedule runs on this clock
    next_chunk: int = 0
    scenes: int = 0  # seen, with repetition
    losses: list[dict] = field(default_factory=list)
    validation: list[dict] = field(default_factory=list)


class Trainer:
    """Model, its moving average, the optimiser and the schedule."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.model = build_model(args.seed).to(device)
        sizes = (len(COLOR_NAMES), len(FILLS), len(CLASSES))
        self.heads = AttributeHeads(self.model.config.d_model, sizes).to(device)
        self._live = dict(self.model.named_parameters())  # tied weights once
        self.ema = {name: p.detach().clone() for name, p in self._live.items()}
        decayed = [p for p in self._live.values() if p.ndim >= 2]
        plain = [p for p in self._live.values() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [*decayed, *self.heads.parameters()], "weight_decay": WEIGHT_DECAY},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=args.lr,
            betas=BETAS,
            fused=device.type == "cuda",
        )
        if device.type == "cuda":
            fuse(self.model, device)
            keep_bf16(self.model)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            torch.backends.cudnn.benchmark = True
        self.progress = Progress()

    def done(self) -> float:
        """Share of the training time, 0..1."""
        return min(1.0, self.progress.seconds / (60 * self.args.minutes))

    def learning_rate(self) -> float:
        """Warm-up by steps, then a cosine over the training time down to 1 %."""
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * self.done()))
        return self.args.lr * cosine * min(1.0, (self.progress.step + 1) / WARMUP_STEPS)

    def step(self, batch: Batch) -> dict[str, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        noise = noised_boxes(batch.targets, self.model.config.num_queries)
        out = forward(
            self.model,
            batch.pixels,
            batch.mask,
            batch.input_ids,
            batch.attention_mask,
            noise.boxes,
            noise.hidden,
        )
        losses = detection_loss(out, batch.targets, noise, batch.attention_mask.float(), self.heads)
        total = torch.stack(list(losses.values())).sum()
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = nn.utils.clip_grad_norm_(self._live.values(), CLIP_NORM)
        self.optimizer.step()
        self._follow()
        self.progress.step += 1
        return {"total": total, "gradient": norm} | losses

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the average towards the live weights; quickly at first."""
        done = self.progress.step
        rate = 1 - min(EMA_DECAY, (1 + done) / (10 + done))
        torch._foreach_lerp_(list(self.ema.values()), [p.detach() for p in self._live.values()], rate)

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the live weights and their average."""
        for name, live in self._live.items():
            held = live.detach().clone()
            live.copy_(self.ema[name])
            self.ema[name].copy_(held)

    def validate(self, scenes: list) -> dict:
        """AP of the averaged weights, with the arithmetic of training."""

        @torch.no_grad()
        def run(pixels: Tensor, mask: Tensor, ids: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
            out = forward(self.model, pixels, mask, ids, attention)
            return out.logits[-1], out.boxes[-1]

        self._swap()
        try:
            return evaluate(run, scenes, self.device)
        finally:
            self._swap()

    def save_checkpoint(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        torch.save(
            {
                "model": {name: p.detach() for name, p in self._live.items()},
                "ema": self.ema,
                "heads": self.heads.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "progress": vars(self.progress),
                "arguments": self._identity(),
            },
            partial,
        )
        os.replace(partial, path)

    @torch.no_grad()
    def load_checkpoint(self, path: Path) -> None:
        held = torch.load(path, map_location=self.device, weights_only=True)
        if held["arguments"] != self._identity():
            raise SystemExit(
                f"{path} belongs to a run with {held['arguments']}, this one has {self._identity()}; "
                "give the same arguments or another --checkpoint"
            )
        for name, live in self._live.items():
            live.copy_(held["model"][name])
            self.ema[name].copy_(held["ema"][name])
        self.heads.load_state_dict(held["heads"])
        self.optimizer.load_state_dict(held["optimizer"])
        self.progress = Progress(**held["progress"])

    def _identity(self) -> dict[str, object]:
        return {name: getattr(self.args, name) for name in ("seed", "minutes", "batch", "lr")}

    def export(self, folder: Path) -> Path:
        state = {name: tensor for name, tensor in self.model.state_dict().items() if name not in self.ema}
        return save_model(state | self.ema, self.model.config, folder)


def make_record(trainer: Trainer, final: dict | None) -> dict:
    """Everything needed to judge and repeat the run."""
    args, progress = trainer.args, trainer.progress
    cuda = trainer.device.type == "cuda"
    return {
        "what": "the prompted demo detector in src/detrt/default_model/phrases",
        "command": f"python training/train_phrases.py --minutes {args.minutes:g} --seed {args.seed}"
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
            "betas": BETAS,
            "weight_decay": WEIGHT_DECAY,
            "clip_norm": CLIP_NORM,
            "warmup_steps": WARMUP_STEPS,
            "ema_decay": EMA_DECAY,
            "pool_scenes": args.pool,
            "small_pictures": {"share_of_time": SMALL_SHARE, "scale": SMALL_SCALE, "batch": SMALL_BATCH},
            "simple_prompts": {
                "share_of_batches_at_first": SIMPLE_SHARE,
                "none_after_share_of_time": SIMPLE_TIME,
            },
        },
        "never_named_together_in_training": [p.text() for p in (*HELD_OUT_COLORS, *HELD_OUT_FILLS)],
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "steps": progress.step,
        "train_seconds": round(progress.seconds, 1),
        "scenes_seen": progress.scenes,
        "scenes_drawn": progress.next_chunk * CHUNK,
        "loss_curve": progress.losses,
        "validation_curve": progress.validation,
        "final_validation_ap": final,
        "config": trainer.model.config.to_diff_dict(),
    }


def train(args: argparse.Namespace) -> Trainer:
    # Workers are forked, which is only safe before the GPU is in use.
    start_chunk = 0
    if args.checkpoint.exists():
        held = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        start_chunk = held["progress"]["next_chunk"]
    pool = PhrasePool(args.pool, args.workers, args.seed, start_chunk)
    scenes = draw_scenes(VALIDATION_SEED, args.validation_scenes)
    device = torch.device("cpu" if args.smoke else "cuda")
    trainer = Trainer(args, device)
    if args.checkpoint.exists():
        trainer.load_checkpoint(args.checkpoint)
        print(f"resumed at step {trainer.progress.step}", flush=True)
    progress = trainer.progress
    pool.to(device, wait_for=args.wait_for)
    print(f"pool holds {pool.filled} scenes after {time.perf_counter() - STARTED:.0f} s", flush=True)
    rng = np.random.default_rng([args.seed, progress.step])
    torch.manual_seed(args.seed + progress.step)
    clock, saved = time.perf_counter(), progress.seconds
    while progress.seconds < 60 * args.minutes and progress.step < args.steps and time.perf_counter() - STARTED < args.stop_after:
        pool.refresh()
        progress.next_chunk = pool.next_chunk
        small = trainer.done() < SMALL_SHARE
        simple = max(0.0, SIMPLE_SHARE * (1 - trainer.done() / SIMPLE_TIME))
        size, scale = (int(args.batch * SMALL_BATCH), SMALL_SCALE) if small else (args.batch, 1.0)
        progress.scenes += size
        losses = trainer.step(pool.batch(size, rng, scale, simple))
        if progress.step % args.log_every == 0:
            names, values = list(losses), torch.stack([v.detach().float() for v in losses.values()]).tolist()
            line = {name: round(value, 4) for name, value in zip(names, values, strict=True)}
            if not math.isfinite(line["total"]):
                raise SystemExit(f"the loss is {line['total']} at step {progress.step}: {line}")
            line |= {"step": progress.step, "lr": round(trainer.learning_rate(), 7)}
            line |= {"minute": round(progress.seconds / 60, 2), "drawn": progress.next_chunk * CHUNK}
            progress.losses.append(line)
            print(json.dumps(line), flush=True)
        now = time.perf_counter()
        progress.seconds += now - clock
        clock = now
        due = (len(progress.validation) + 1) / args.validations * 60 * args.minutes
        if progress.seconds >= due and len(progress.validation) < args.validations - 1:
            point = trainer.validate(scenes)
            point = {way: {k: v for k, v in found.items() if k != "per_phrase"} for way, found in point.items()}
            point |= {"step": progress.step, "minute": round(progress.seconds / 60, 2), "scenes": len(scenes)}
            progress.validation.append(point)
            print(json.dumps(point), flush=True)
        if progress.seconds - saved > 60 * args.save_every:
            trainer.save_checkpoint(args.checkpoint)
            trainer.export(args.out / "model")
            saved = progress.seconds
            write_json(args.record, make_record(trainer, None))
        clock = time.perf_counter()  # validation and saving are not training time
    pool.close()
    trainer.save_checkpoint(args.checkpoint)
    trainer.export(args.out / "model")
    write_json(args.record, make_record(trainer, None))
    final = trainer.validate(scenes)
    write_json(args.record, make_record(trainer, final))
    print(json.dumps({way: found["ap"] for way, found in final.items()}), flush=True)
    return trainer


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=12.0, help="training time")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds that this process may train")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--record", type=Path, help="JSON record (default: OUT/demo_phrases.json)")
    parser.add_argument("--checkpoint", type=Path, help="default: OUT/checkpoint.pt")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--pool", type=int, default=60000, help="scenes kept on the GPU")
    parser.add_argument("--wait-for", type=int, default=4096, help="scenes before the first step")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) * 3 // 4))
    parser.add_argument("--validations", type=int, default=4)
    parser.add_argument("--validation-scenes", type=int, default=200)
    parser.add_argument("--save-every", type=float, default=2.0, help="minutes between checkpoints")
    parser.add_argument("--log-every", type=int, default=100, help="steps between log lines")
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="stop after so many steps")
    parser.add_argument("--smoke", action="store_true", help="two steps with 64 scenes, CPU")
    args = parser.parse_args(argv)
    if args.minutes <= 0 or args.batch < 1:
        parser.error(f"--minutes and --batch must be above 0, got {args.minutes} and {args.batch}")
    if args.smoke:
        args.batch, args.pool, args.workers = 4, 64, 0
        args.steps = 2 if args.steps == sys.maxsize else args.steps
        args.validation_scenes, args.log_every = 4, 1
    args.out.mkdir(parents=True, exist_ok=True)
    args.record = args.record or args.out / "demo_phrases.json"
    args.checkpoint = args.checkpoint or args.out / "checkpoint.pt"
    return args


if __name__ == "__main__":
    train(parse(sys.argv[1:]))
