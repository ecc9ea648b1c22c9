"""Train a detector on blood cells (BCCD), for checks on a real data set.

    PYTHONPATH=src python training/train_bccd.py DATA --out OUT --seconds 150
    PYTHONPATH=src python training/train_bccd.py DATA --out OUT --model random:rt_detr_v2 --size 480 --batch 16 --seconds 300

DATA holds `BCCD/JPEGImages` and `coco_annotations/instances_{train,test}.json`. OUT/model is a folder in
transformers format that `detrt build` takes; it does not belong into the repository. Architecture and
starting weights are those of `src/detrt/models/embedded/shapes`. With `--model` the architecture is that of a detrt reference, which
is trained from scratch with the loss of its transformers class; `--config` makes it smaller. `--smoke` takes two steps on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_data import resize
from demo_loss import Targets, denoising_queries, detection_loss
from demo_model import INPUT_PX, PREPROCESSOR, run_in_bf16, save_model, start_values
from evaluation import write_json
from options import run_program
from PIL import Image
from torch import Tensor, nn
from trainer import follow, learning_rate, move
from transformers import PreTrainedModel, RTDetrV2Config, RTDetrV2ForObjectDetection
from transformers.models.rt_detr_v2 import modeling_rt_detr_v2

from detrt.errors import SourceError

START = Path(__file__).resolve().parents[1] / "src" / "detrt" / "models" / "embedded" / "shapes"
CLIP_NORM, WEIGHT_DECAY, EMA_DECAY, WARMUP_STEPS = 0.5, 1e-3, 0.998, 100


def load_split(folder: Path, split: str, size: int) -> tuple[Tensor, list[np.ndarray], list[str]]:
    """Images (N, size, size, 3) uint8; rows (n, 5) of class, cx, cy, w, h in 0..1; class names."""
    path = folder / "coco_annotations" / f"instances_{split}.json"
    if not path.is_file():
        raise SourceError(f"there is no '{path}'; give the folder that holds BCCD/ and coco_annotations/")
    data = json.loads(path.read_text(encoding="utf-8"))
    names = [category["name"] for category in data["categories"]]
    index = {category["id"]: k for k, category in enumerate(data["categories"])}
    pixels, rows = [], []
    for entry in data["images"]:
        with Image.open(folder / "BCCD" / "JPEGImages" / entry["file_name"]) as source:
            image = np.asarray(source.convert("RGB"))
        height, width = image.shape[:2]
        found = []
        for label in data["annotations"]:
            if label["image_id"] == entry["id"]:
                x, y, w, h = label["bbox"]
                if w > 1 and h > 1:
                    box = ((x + w / 2) / width, (y + h / 2) / height, w / width, h / height)
                    found.append((index[label["category_id"]], *box))
        pixels.append(resize(image, size))
        rows.append(np.array(found, np.float32).reshape(-1, 5))
    return torch.from_numpy(np.stack(pixels)), rows, names


def build(names: list[str], seed: int) -> RTDetrV2ForObjectDetection:
    """The embedded detector with a new head for these classes."""
    torch.manual_seed(seed)
    config = RTDetrV2Config.from_pretrained(START)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: k for k, name in enumerate(names)}
    model = RTDetrV2ForObjectDetection.from_pretrained(START, config=config, ignore_mismatched_sizes=True)
    bias = -math.log((1 - 0.02) / 0.02)  # few queries hold an object at first
    for head in (model.model.enc_score_head, *model.model.decoder.class_embed):
        nn.init.xavier_uniform_(head.weight)
        nn.init.constant_(head.bias, bias)
    nn.init.normal_(model.model.denoising_class_embed.weight, std=0.5)
    return model.float()


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`config` with `changes`, also of the dictionaries in it. Raises SourceError for names that it does not have."""
    if unknown := sorted(set(changes) - set(config)):
        raise SourceError(f"--config: the config of this model has no {', '.join(unknown)}; it has {', '.join(sorted(config))}")
    return config | {
        name: changed(config[name] or {}, value) if isinstance(value, dict) else value for name, value in changes.items()
    }


class Embedded:
    """The embedded detector: its losses and folder."""

    def __init__(self, names: list[str], args: argparse.Namespace) -> None:
        self.model = build(names, args.seed)
        modeling_rt_detr_v2.get_contrastive_denoising_training_group = denoising_queries
        self.trained: nn.Module = self.model.model
        self.in_bf16 = [self.trained.backbone, self.trained.encoder]

    def loss(self, pixels: Tensor, targets: Targets) -> Tensor:
        return torch.stack(list(detection_loss(self.trained(pixels, labels=targets), targets).values())).sum()

    def save(self, state: dict[str, Tensor], folder: Path) -> Path:
        return save_model({f"model.{name}": tensor for name, tensor in state.items()}, self.model.config, folder)


class Referenced:
    """A transformers model of another reference, trained from scratch with the loss of its class."""

    def __init__(self, names: list[str], args: argparse.Namespace) -> None:
        from detrt.models.load import load_source

        source = load_source(args.model)
        module, step = source.module, source.spec.input.multiple_of
        loss = module.loss_type if isinstance(module, PreTrainedModel) else None
        if not isinstance(module, PreTrainedModel) or source.spec.text or "ObjectDetection" not in (loss or ""):
            raise SourceError(
                f"--model: transformers has no loss of boxes for '{args.model}'; give one such as random:rt_detr_v2"
            )
        if args.size < 1 or args.size % step:
            raise SourceError(f"--size: must be a multiple of {step} for '{args.model}'; got {args.size}")
        wanted = changed(module.config.to_dict(), args.config)
        torch.manual_seed(args.seed)
        try:
            config = type(module.config).from_dict(wanted)
            config.id2label = dict(enumerate(names))
            config.label2id = {name: k for k, name in enumerate(names)}
            config.auxiliary_loss = True
            self.trained = self.model = type(module)(config)
        except Exception as error:  # of many kinds, by the value
            raise SourceError(f"--config: transformers makes no model of {json.dumps(args.config)}: {error}") from error
        # Transformers' BatchNorm, which is frozen, counts no batches.
        self.counters = {f"{name}.num_batches_tracked" for name in thaw_batch_norms(self.model)}
        start_values(self.model)
        self.in_bf16 = [part for name, part in self.model.named_modules() if name == "model.backbone"]
        entry = source.spec.input
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in (entry.mean, entry.std))
        normalized = {"do_normalize": True, "image_mean": list(entry.mean), "image_std": list(entry.std)}
        self.described = PREPROCESSOR | {"size": {"height": args.size, "width": args.size}} | normalized

    def loss(self, pixels: Tensor, targets: Targets) -> Tensor:
        mean, std = self.mean.to(pixels), self.std.to(pixels)
        labels = [
            {"class_labels": classes[:count], "boxes": boxes[:count]}
            for classes, boxes, count in zip(targets.classes, targets.boxes, targets.counts, strict=True)
        ]
        return self.trained((pixels - mean) / std, labels=labels).loss

    def save(self, state: dict[str, Tensor], folder: Path) -> Path:
        self.model.load_state_dict(state)
        kept = {name: tensor for name, tensor in self.model.state_dict().items() if name not in self.counters}
        self.model.save_pretrained(folder, state_dict=kept)
        write_json(folder / "preprocessor_config.json", self.described)
        return folder


def thaw_batch_norms(model: nn.Module) -> list[str]:
    """Put a BatchNorm that learns in the place of each that transformers freezes, in place; their names."""
    names = [name for name, module in model.named_modules() if type(module).__name__.endswith("FrozenBatchNorm2d")]
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, nn.BatchNorm2d(len(model.get_buffer(f"{name}.running_mean"))))
    return names


def batch_of(images: Tensor, rows: list[np.ndarray], size: int, rng: np.random.Generator) -> tuple[Tensor, Targets]:
    """Augmented pixels (B, 3, S, S) float32 in 0..1: turned, mirrored, enlarged up to 1.5 times, recoloured."""
    pick = rng.integers(0, len(rows), size)
    device = images.device
    pixels = images[torch.from_numpy(pick).to(device)].permute(0, 3, 1, 2).float() / 255
    theta = np.zeros((size, 2, 3), np.float32)
    boxes: list[np.ndarray] = []
    for k, number in enumerate(pick):
        scale = float(rng.uniform(1 / 1.5, 1.0))  # side of the window that is shown
        left, top = rng.uniform(0, 1 - scale, 2)
        theta[k] = [[scale, 0, 2 * left + scale - 1], [0, scale, 2 * top + scale - 1]]
        found = rows[number].copy()
        low, high = found[:, 1:3] - found[:, 3:] / 2, found[:, 1:3] + found[:, 3:] / 2
        area = np.prod(high - low, axis=1)
        low, high = ((edge - (left, top)) / scale for edge in (low, high))
        low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
        kept = np.prod(high - low, axis=1) * scale**2 > 0.4 * area  # most of the cell is still in sight
        found[:, 1:3], found[:, 3:] = (low + high) / 2, high - low
        boxes.append(found[kept])
    grid = nn.functional.affine_grid(torch.from_numpy(theta).to(device), list(pixels.shape), align_corners=False)
    pixels = nn.functional.grid_sample(pixels, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    flips = rng.random((size, 3)) < 0.5
    for k in range(size):
        for turn, (axes, column) in enumerate(((2, 1), (1, 2))):
            if flips[k, turn]:
                pixels[k] = pixels[k].flip(axes)
                boxes[k][:, column] = 1 - boxes[k][:, column]
        if flips[k, 2]:
            pixels[k] = pixels[k].transpose(1, 2).clone()
            boxes[k] = boxes[k][:, [0, 2, 1, 4, 3]]
    gain = torch.from_numpy(rng.uniform(0.85, 1.15, (size, 3, 1, 1)).astype(np.float32)).to(device)
    pixels = (pixels * gain).clamp(0, 1).contiguous(memory_format=torch.channels_last)
    counts = [len(found) for found in boxes]
    padded = np.zeros((size, max(1, *counts), 5), np.float32)
    valid = np.zeros(padded.shape[:2], bool)
    for k, found in enumerate(boxes):
        padded[k, : len(found)], valid[k, : len(found)] = found, True
    packed = torch.from_numpy(padded).to(device)
    return pixels, Targets(packed[..., 0].long(), packed[..., 1:], torch.from_numpy(valid).to(device), counts)


def train(args: argparse.Namespace) -> Path:
    """Train for `args.seconds` or `args.steps` and write the averaged weights to OUT/model."""
    device = torch.device("cpu" if args.smoke or not torch.cuda.is_available() else "cuda")
    images, rows, names = load_split(args.data, "train", args.size)
    images = images.to(device)
    detector = (Referenced if args.model else Embedded)(names, args)
    move(detector.model, device, torch.channels_last)
    core = detector.trained
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        for part in detector.in_bf16:
            run_in_bf16(part)
    optimizer = torch.optim.AdamW(core.parameters(), lr=args.lr, weight_decay=WEIGHT_DECAY)
    live = core.state_dict()
    mean = {name: x.clone() if x.is_floating_point() else x for name, x in live.items()}  # counters as they are
    rng = np.random.default_rng(args.seed)
    start, step = time.perf_counter(), 0
    core.train()
    while step < args.steps and (done := (time.perf_counter() - start) / args.seconds) < 1:
        share = max(done, step / args.steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args.lr, share, step, WARMUP_STEPS)
        pixels, targets = batch_of(images, rows, args.batch, rng)
        total = detector.loss(pixels, targets)
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(core.parameters(), CLIP_NORM)
        optimizer.step()
        step += 1
        follow(mean, live, EMA_DECAY, step)
        if step % args.log_every == 0 or step == 1:
            line = {"step": step, "seconds": round(time.perf_counter() - start, 1), "loss": round(total.item(), 3)}
            print(json.dumps(line), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    folder = detector.save(mean, args.out / "model")
    record = {
        "model": args.model or "embedded:shapes",
        "config": args.config,
        "data": "BCCD, split train",
        "size": args.size,
        "steps": step,
        "batch": args.batch,
        "lr": args.lr,
        "seed": args.seed,
        "seconds": round(time.perf_counter() - start, 1),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
    }
    (args.out / "train_bccd.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record), flush=True)
    return folder


def json_object(text: str) -> dict[str, Any]:
    """The type of an argument: a JSON object."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise argparse.ArgumentTypeError(f"must be a JSON object; got {text!r}")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with BCCD/ and coco_annotations/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="a detrt reference such as random:rt_detr_v2, instead of the embedded detector")
    parser.add_argument(
        "--config",
        type=json_object,
        default={},
        help='with --model: values of its transformers config, such as {"decoder_layers": 3}',
    )
    parser.add_argument(
        "--size", type=int, default=INPUT_PX, help="height and width of the input, in pixels; other than 320 with --model alone"
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="training time")
    parser.add_argument("--steps", type=int, default=sys.maxsize)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--smoke", action="store_true", help="two steps on the CPU")
    args = parser.parse_args(argv)
    if args.seconds <= 0 or args.batch < 1 or args.steps < 1:
        parser.error("--seconds, --batch and --steps must be above 0")
    if not args.model and (args.size != INPUT_PX or args.config):
        parser.error(f"--size, --config: the embedded detector is trained at {INPUT_PX} as it is; name another with --model")
    if args.smoke:
        args.steps, args.batch, args.log_every = 2, 2, 1
    return args


if __name__ == "__main__":
    run_program(lambda: train(parse(sys.argv[1:])))
