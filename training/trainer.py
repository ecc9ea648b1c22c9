"""What the training runs of the demo detectors share: the schedule, checkpoints, the record and the loop.

A script derives from `Trainer` what is its own (the model, its losses, its batches, its files) and calls `train`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import PIL
import torch
import transformers
from demo_data import VALIDATION_SEED
from evaluation import draw_scenes, write_json
from scene_pool import ScenePool
from torch import Tensor, nn

from detrt.data.scenes.scene import Scene


@dataclass
class Progress:
    """What a checkpoint holds besides tensors."""

    step: int = 0
    seconds: float = 0.0  # spent training; the schedule runs on this clock
    next_chunk: int = 0
    losses: list[dict] = field(default_factory=list)
    validation: list[dict] = field(default_factory=list)


@dataclass(frozen=True)
class Recipe:
    """Constants of a script's runs; all of them stand in the record."""

    what: str  # the model that a run makes
    script: str
    chunk: int  # scenes that a worker draws at a time
    clip_norm: float
    warmup_steps: int
    ema_decay: float
    optimizer: dict[str, Any]  # keyword arguments of AdamW
    settings: dict[str, Any] = field(default_factory=dict)  # further ones
    notes: dict[str, Any] = field(default_factory=dict)  # further entries of the record


def move(module: nn.Module, device: torch.device, memory_format: torch.memory_format = torch.preserve_format) -> None:
    """Move a module to a device, in place. memory_format: of what has four axes."""
    module.to(device, memory_format=memory_format)  # type: ignore[call-overload]  # PyTorch's types leave memory_format out


def learning_rate(peak: float, done: float, step: int, warmup_steps: int) -> float:
    """Warm-up by steps, then a cosine over the share of the training that is `done` (0..1) down to 1 %."""
    cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))
    return peak * cosine * min(1.0, (step + 1) / warmup_steps)


@torch.no_grad()
def follow(mean: dict[str, Tensor], live: dict[str, Tensor], decay: float, step: int) -> None:
    """Move the average towards the live weights; quickly at first. Counters (integers) are left alone."""
    names = [name for name, tensor in live.items() if tensor.is_floating_point()]
    rate = 1 - min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_([mean[name] for name in names], [live[name] for name in names], rate)


Pool = TypeVar("Pool", bound=ScenePool)


class Trainer(ABC, Generic[Pool]):
    """Model, its moving average, the optimiser and the schedule.

    `core` is the module whose parameters are trained, `live` its tensors that are averaged and kept in checkpoints.
    `extra` holds further modules, by their name in checkpoints, that are trained along but belong to no export.
    """

    recipe: Recipe

    def __init__(
        self,
        args: argparse.Namespace,
        device: torch.device,
        core: nn.Module,
        config: transformers.PretrainedConfig,
        live: dict[str, Tensor],
        extra: dict[str, nn.Module] | None = None,
    ) -> None:
        self.args, self.device, self.core, self.config, self.live = args, device, core, config, live
        self.extra = extra or {}
        self.progress = Progress()
        self.ema = {name: tensor.detach().clone() for name, tensor in live.items()}
        decayed = [p for p in core.parameters() if p.ndim >= 2]
        plain = [p for p in core.parameters() if p.ndim < 2]
        for module in self.extra.values():
            decayed.extend(module.parameters())
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=args.lr,
            fused=device.type == "cuda",
            **self.recipe.optimizer,
        )
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            torch.backends.cudnn.benchmark = True

    # What differs from script to script.

    @abstractmethod
    def fill(self, pool: Pool) -> None:
        """Put the pool on the device, wait for the first scenes and say so."""

    @abstractmethod
    def batch(self, pool: Pool, rng: np.random.Generator) -> Any:
        """What the next step learns from."""

    @abstractmethod
    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Weighted losses of a batch; a step lowers their sum."""

    @abstractmethod
    def evaluate(self, scenes: list[Scene]) -> dict:
        """AP of the weights that the model has now."""

    @abstractmethod
    def export(self, folder: Path) -> Path:
        """Write the averaged weights as a folder in transformers format."""

    @abstractmethod
    def scenes_seen(self) -> int:
        """Scenes in all batches so far, with repetition."""

    @abstractmethod
    def headline(self, final: dict) -> dict:
        """What is printed of the last validation."""

    def curve_point(self, found: dict) -> dict:
        """What the record keeps of a validation during the run."""
        return found

    def logged(self) -> dict:
        """Further entries of a log line."""
        return {}

    # The schedule and a step.

    def done(self) -> float:
        """Share of the training time, 0..1."""
        return min(1.0, self.progress.seconds / (60 * self.args.minutes))

    def scenes_drawn(self) -> int:
        return self.progress.next_chunk * self.recipe.chunk

    def finished(self) -> bool:
        return self.progress.seconds >= 60 * self.args.minutes or self.progress.step >= self.args.steps

    def learning_rate(self) -> float:
        return learning_rate(self.args.lr, self.done(), self.progress.step, self.recipe.warmup_steps)

    def step(self, batch: Any) -> dict[str, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        losses = self.losses(batch)
        total = torch.stack(list(losses.values())).sum()
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = nn.utils.clip_grad_norm_(self.core.parameters(), self.recipe.clip_norm)
        self.optimizer.step()
        follow(self.ema, self.live, self.recipe.ema_decay, self.progress.step)
        self.progress.step += 1
        return {"total": total, "gradient": norm} | losses

    def log(self, losses: dict[str, Tensor]) -> None:
        """Print and keep the losses of a step; a loss that is not finite ends the run."""
        progress = self.progress
        values = torch.stack([v.detach().float() for v in losses.values()]).tolist()  # waits for the GPU once
        line = {name: round(value, 4) for name, value in zip(losses, values, strict=True)}
        if not math.isfinite(line["total"]):
            raise SystemExit(f"the loss is {line['total']} at step {progress.step}: {line}")
        line |= {"step": progress.step, "lr": round(self.learning_rate(), 7)}
        line |= {"minute": round(progress.seconds / 60, 2)} | self.logged()
        progress.losses.append(line)
        print(json.dumps(line), flush=True)

    # Validation.

    def validate(self, scenes: list[Scene]) -> dict:
        """AP of the averaged weights."""
        self._swap()
        try:
            return self.evaluate(scenes)
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the live weights and their average."""
        for name, live in self.live.items():
            held = live.detach().clone()
            live.copy_(self.ema[name])
            self.ema[name].copy_(held)

    def validate_when_due(self, scenes: list[Scene]) -> None:
        """`args.validations` results, evenly over the training time; the last one comes after it."""
        progress, checks = self.progress, max(1, self.args.validations)
        due = (len(progress.validation) + 1) / checks * 60 * self.args.minutes
        if progress.seconds < due or len(progress.validation) >= checks - 1:
            return
        point = self.curve_point(self.validate(scenes)) | {"step": progress.step}
        point |= {"minute": round(progress.seconds / 60, 2), "scenes": len(scenes)}
        progress.validation.append(point)
        print(json.dumps(point), flush=True)

    # Files.

    def save(self) -> None:
        """A checkpoint, and the record as it is now."""
        self.save_checkpoint(self.args.checkpoint)
        write_json(self.args.record, self.record(None))

    def save_checkpoint(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        held: dict[str, Any] = {"model": self.live, "ema": self.ema}
        held |= {name: module.state_dict() for name, module in self.extra.items()}
        held |= {"optimizer": self.optimizer.state_dict(), "progress": vars(self.progress)}
        torch.save(held | {"arguments": self._identity()}, partial)
        os.replace(partial, path)

    @torch.no_grad()
    def load_checkpoint(self, path: Path) -> None:
        held = torch.load(path, map_location=self.device, weights_only=True)
        if held["arguments"] != self._identity():
            raise SystemExit(
                f"{path} belongs to a run with {held['arguments']}, this one has {self._identity()}; "
                "give the same arguments or another --checkpoint"
            )
        for name, live in self.live.items():
            live.copy_(held["model"][name])
            self.ema[name].copy_(held["ema"][name])
        for name, module in self.extra.items():
            module.load_state_dict(held[name])
        self.optimizer.load_state_dict(held["optimizer"])
        self.progress = type(self.progress)(**held["progress"])

    def _identity(self) -> dict[str, object]:
        return {name: getattr(self.args, name) for name in ("seed", "minutes", "batch", "lr")}

    def record(self, final: dict | None) -> dict:
        """Everything needed to judge and repeat the run."""
        args, recipe, progress = self.args, self.recipe, self.progress
        return {
            "what": recipe.what,
            "command": f"python training/{recipe.script} --minutes {args.minutes:g} --seed {args.seed}"
            f" --batch {args.batch} --lr {args.lr:g}",
            "seed": args.seed,
            "machine": machine_record(self.device),
            "versions": versions_record(),
            "settings": {
                "minutes": args.minutes,
                "batch": args.batch,
                "lr": args.lr,
                **recipe.optimizer,
                "clip_norm": recipe.clip_norm,
                "warmup_steps": recipe.warmup_steps,
                "ema_decay": recipe.ema_decay,
                "pool_scenes": args.pool,
                **recipe.settings,
            },
            **recipe.notes,
            "parameters": sum(p.numel() for p in self.core.parameters()),
            "steps": progress.step,
            "train_seconds": round(progress.seconds, 1),
            "scenes_seen": self.scenes_seen(),
            "scenes_drawn": self.scenes_drawn(),
            "loss_curve": progress.losses,
            "validation_curve": progress.validation,
            "final_validation_ap": final,
            "config": self.config.to_diff_dict(),
        }


def machine_record(device: torch.device) -> dict[str, object]:
    return {
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
        "cpu_cores": os.cpu_count(),
        "system": platform.system(),
    }


def versions_record() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
    }


def train(
    args: argparse.Namespace,
    build_pool: Callable[[int, int, int, int], Pool],
    build_trainer: Callable[[argparse.Namespace, torch.device], Trainer[Pool]],
) -> Trainer[Pool]:
    """Train until the time or the steps are used up, from the checkpoint if there is one.

    `build_pool` takes the number of scenes, the number of workers, the seed and the first chunk to draw.
    """
    # Workers are forked, which is only safe before the GPU is in use.
    start_chunk = 0
    if args.checkpoint.exists():
        held = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        start_chunk = held["progress"]["next_chunk"]
    pool = build_pool(args.pool, args.workers, args.seed, start_chunk)
    scenes = draw_scenes(VALIDATION_SEED, args.validation_scenes)
    trainer = build_trainer(args, torch.device("cpu" if args.smoke else "cuda"))
    if args.checkpoint.exists():
        trainer.load_checkpoint(args.checkpoint)
        print(f"resumed at step {trainer.progress.step}", flush=True)
    progress = trainer.progress
    trainer.fill(pool)
    rng = np.random.default_rng([args.seed, progress.step])
    torch.manual_seed(args.seed + progress.step)
    clock, saved = time.perf_counter(), progress.seconds
    while not trainer.finished():
        pool.refresh()
        progress.next_chunk = pool.next_chunk
        losses = trainer.step(trainer.batch(pool, rng))
        if progress.step % args.log_every == 0:
            trainer.log(losses)
        progress.seconds += time.perf_counter() - clock
        trainer.validate_when_due(scenes)
        if progress.seconds - saved > 60 * args.save_every:
            trainer.save()
            saved = progress.seconds
        clock = time.perf_counter()  # validation and saving are not training time
    pool.close()
    trainer.save()
    final = trainer.validate(scenes)
    write_json(args.record, trainer.record(final))
    print(json.dumps(trainer.headline(final)), flush=True)
    return trainer
