"""Train the mask head of the demo detector on the CPU, with drawn scenes and their exact masks.

    PYTHONPATH=src python training/train_demo_masks.py --minutes 2.5 --out /tmp/demo_masks

The detector is frozen, so that its boxes stay what they are: its features of all scenes are computed once, and the
head alone is trained on them. A mask is the visible part of an object. `--smoke` takes two steps with eight scenes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_data import MAX_OBJECTS, TRAIN_SEED, VALIDATION_SEED, label_rows, resize
from demo_loss import Targets, match
from demo_model import save_weights
from evaluate_demo_detector import score_model
from evaluation import draw_scenes, write_json
from options import run_program
from safetensors.torch import load_file
from torch import Tensor, nn
from trainer import follow, learning_rate, machine_record, versions_record
from transformers import RTDetrV2Config

from detrt.data.scenes.scene import draw_scene
from detrt.models.layers.rt_detr_v2_seg import SHARPNESS, RTDetrV2ForInstanceSegmentation
from detrt.models.load import EMBEDDED

FIRST_SEED = TRAIN_SEED + 2**42  # no scene of the detector's own training
MASK_DIM = 32
STRIDE = 4
NEAR_POINTS, HARD_POINTS, FAR_POINTS = 1024, 448, 64  # candidates near an object, those of them that count, others anywhere
WARMUP_STEPS, EMA_DECAY, CLIP_NORM, WEIGHT_DECAY = 50, 0.996, 1.0, 1e-3


def build_model(detector: Path, seed: int) -> RTDetrV2ForInstanceSegmentation:
    """The detector of a folder in transformers format, frozen, with a new mask head."""
    torch.manual_seed(seed)
    config = RTDetrV2Config.from_pretrained(detector)
    config.mask_dim, config.mask_downsample_ratio = MASK_DIM, STRIDE
    model = RTDetrV2ForInstanceSegmentation.from_pretrained(detector, config=config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("mask_"))
        if name.startswith("mask_") and parameter.ndim >= 2:  # the class's own initial values are for fine-tuning
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
    nn.init.constant_(model.mask_sharpness, SHARPNESS)
    return model


@dataclass(frozen=True, slots=True)
class Features:
    """What the head gets of `n` scenes, in float16 but for the boxes, and where the objects are.

    levels: of the encoder, (n, channels, height, width) each. detail: (n, channels, height, width). queries: (n, MAX_OBJECTS,
    d_model) and boxes: (n, MAX_OBJECTS, 4), of the query that found each object. valid: (n, MAX_OBJECTS). instances: n maps of
    numbers of objects, see `Scene`.
    """

    levels: list[Tensor]
    detail: Tensor
    queries: Tensor
    boxes: Tensor
    valid: Tensor
    instances: list[np.ndarray]


@torch.no_grad()
def features_of(model: RTDetrV2ForInstanceSegmentation, first_seed: int, count: int, batch: int = 8) -> Features:
    """Draw `count` scenes and run the detector on them."""
    parts: list[tuple[Tensor, ...]] = []
    instances = []
    detail: list[Tensor] = []
    hook = model.model.backbone.model.encoder.stages[0].register_forward_hook(lambda _, __, output: detail.append(output))
    for start in range(0, count, batch):
        scenes = [draw_scene(first_seed + k, max_objects=MAX_OBJECTS) for k in range(start, min(start + batch, count))]
        pixels = torch.from_numpy(np.stack([resize(scene.image) for scene in scenes])).permute(0, 3, 1, 2).float() / 255
        found = model.model(pixels)
        rows = torch.zeros(len(scenes), MAX_OBJECTS, 5)
        for k, scene in enumerate(scenes):
            rows[k, : len(scene.objects)] = torch.from_numpy(label_rows(scene))
        counts = [len(scene.objects) for scene in scenes]
        valid = torch.arange(MAX_OBJECTS)[None] < torch.tensor(counts)[:, None]
        logits, boxes = found.intermediate_logits[:, -1], found.intermediate_reference_points[:, -1]
        index = match(logits[None], boxes[None], Targets(rows[..., 0].long(), rows[..., 1:], valid, counts))[0][..., None]
        queries = found.last_hidden_state.gather(1, index.expand(-1, -1, found.last_hidden_state.shape[-1]))
        boxes = boxes.gather(1, index.expand(-1, -1, 4))
        maps = [tensor.half() for tensor in (*found.encoder_last_hidden_state, detail.pop())]
        parts.append((queries, boxes, valid, *maps))
        instances += [scene.instances.astype(np.uint8) for scene in scenes]
        if start // batch % 10 == 0:
            print(f"features of {start} of {count} scenes", flush=True)
    hook.remove()
    queries, boxes, valid, *maps = (torch.cat(one) for one in zip(*parts, strict=True))
    return Features(maps[:-1], maps[-1], queries, boxes, valid, instances)


def random_points(boxes: Tensor, near: int, far: int) -> Tensor:
    """(n, near + far, 2) points (x, y) in 0..1: in boxes (n, 4) that are 1.3 times as large and some more, and anywhere."""
    inside = torch.rand(len(boxes), near, 2) - 0.5
    inside = (boxes[:, None, :2] + inside * (boxes[:, None, 2:] * 1.3 + 0.02)).clamp(0, 0.9999)
    return torch.cat([inside, torch.rand(len(boxes), far, 2)], 1)


def values_at(maps: Tensor, points: Tensor) -> Tensor:
    """(n, k) of maps (n, height, width) at points (n, k, 2) in 0..1, as masks are enlarged."""
    grid = (points * 2 - 1).unsqueeze(1)
    return F.grid_sample(maps.unsqueeze(1), grid, padding_mode="border", align_corners=False)[:, 0, 0]


def truth_at(instances: list[np.ndarray], image: Tensor, number: Tensor, points: Tensor) -> Tensor:
    """(n, k) 1 where the object `number` (n,) of scene `image` (n,) is seen at points (n, k, 2) in 0..1."""
    rows = []
    for scene, one, place in zip(image.tolist(), number.tolist(), points.numpy(), strict=True):
        height, width = instances[scene].shape
        column, row = (place * (width, height)).astype(np.int64).T
        rows.append(instances[scene][row, column] == one)
    return torch.from_numpy(np.stack(rows)).float()


def mask_loss(model: RTDetrV2ForInstanceSegmentation, data: Features, pick: np.ndarray) -> dict[str, Tensor]:
    """Cross-entropy and dice loss at points, most of them where the mask is least certain (Kirillov et al., arXiv:1912.08193)."""
    index = torch.from_numpy(pick)
    boxes, valid = data.boxes[index], data.valid[index]
    levels = [level[index].float() for level in data.levels]
    logits = model.predict_masks(data.queries[index], boxes, levels, data.detail[index].float())[valid]
    image, number = valid.nonzero(as_tuple=True)
    with torch.no_grad():
        points = random_points(boxes[valid], NEAR_POINTS, FAR_POINTS)
        near = points[:, :NEAR_POINTS]
        order = values_at(logits, near).abs().argsort(1)
        count = HARD_POINTS * 3 // 4
        # The candidates are random, so that the last of them are a random choice.
        kept = torch.cat([order[:, :count], torch.arange(NEAR_POINTS - HARD_POINTS // 4, NEAR_POINTS).expand(len(near), -1)], 1)
        points = torch.cat([near.gather(1, kept[..., None].expand(-1, -1, 2)), points[:, NEAR_POINTS:]], 1)
        truth = truth_at(data.instances, index[image], number + 1, points)
    values = values_at(logits, points)
    entropy = F.binary_cross_entropy_with_logits(values, truth, reduction="none").mean(1).mean()
    chance = values.sigmoid()
    dice = 1 - (2 * (chance * truth).sum(1) + 1) / (chance.sum(1) + truth.sum(1) + 1)
    return {"entropy": 2 * entropy, "dice": dice.mean()}


def train(args: argparse.Namespace, model: RTDetrV2ForInstanceSegmentation, data: Features) -> dict:
    """Train the head in place, to the average of its weights; returns the record of the run."""
    live = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("mask_")}
    mean = {name: tensor.detach().clone() for name, tensor in live.items()}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=WEIGHT_DECAY)
    rng = np.random.default_rng(args.seed)
    scenes = np.flatnonzero(data.valid.any(1).numpy())
    # Of the processor, so that a run on a busy machine learns as much.
    curve, step, started, order = [], 0, time.process_time(), np.zeros(0, np.int64)
    while (seconds := time.process_time() - started) < 60 * args.minutes and step < args.steps:
        if len(order) < args.batch:
            order = rng.permutation(scenes)
        pick, order = order[: args.batch], order[args.batch :]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args.lr, seconds / 60 / args.minutes, step, WARMUP_STEPS)
        losses = mask_loss(model, data, pick)
        optimizer.zero_grad(set_to_none=True)
        torch.stack(list(losses.values())).sum().backward()
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        follow(mean, live, EMA_DECAY, step)
        step += 1
        if step % args.log_every == 0:
            line = {name: round(float(loss.detach()), 4) for name, loss in losses.items()}
            curve.append(line | {"step": step, "minute": round(seconds / 60, 2)})
            print(json.dumps(curve[-1]), flush=True)
    for name, tensor in live.items():
        tensor.copy_(mean[name])
    return {"steps": step, "train_seconds": round(seconds, 1), "scenes": len(data.instances), "loss_curve": curve}


def export(model: RTDetrV2ForInstanceSegmentation, detector: Path, folder: Path) -> Path:
    """Write the folder: the detector's files and tensors as they are, and the head."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("mask_")}
    save_weights(load_file(detector / "model.safetensors") | head, folder)
    config = json.loads((detector / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": [type(model).__name__], "mask_dim": MASK_DIM, "mask_downsample_ratio": STRIDE}
    write_json(folder / "config.json", dict(sorted(config.items())))
    shutil.copyfile(detector / "preprocessor_config.json", folder / "preprocessor_config.json")
    return folder


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--detector", type=Path, default=EMBEDDED["embedded:shapes"], help="folder with the detector")
    parser.add_argument("--record", type=Path, help="JSON record (default: OUT/demo_masks.json)")
    parser.add_argument("--features", type=Path, help="file of the detector's features, written if it is not there")
    parser.add_argument("--scenes", type=int, default=1200)
    parser.add_argument("--minutes", type=float, default=2.5, help="processor time of the training")
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="stop after so many steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--log-every", type=int, default=50, help="steps between log lines")
    parser.add_argument("--validation-scenes", type=int, default=100)
    parser.add_argument("--smoke", action="store_true", help="two steps, eight scenes")
    args = parser.parse_args(argv)
    if args.smoke:
        args.scenes, args.batch, args.steps, args.log_every, args.validation_scenes = 8, 4, 2, 1, 4
    args.record = args.record or args.out / "demo_masks.json"
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    model = build_model(args.detector, args.seed)
    if args.features and args.features.exists():
        data = Features(**torch.load(args.features, weights_only=False))
    else:
        data = features_of(model, FIRST_SEED, args.scenes)
        if args.features:
            torch.save({name: getattr(data, name) for name in Features.__slots__}, args.features)
    record = {
        "what": "the mask head of the demo detector in src/detrt/models/embedded/shapes",
        "command": f"python training/train_demo_masks.py --minutes {args.minutes:g} --scenes {args.scenes} --seed {args.seed}"
        f" --batch {args.batch} --lr {args.lr:g}",
        "machine": machine_record(torch.device("cpu")) | {"threads": torch.get_num_threads()},
        "versions": versions_record(),
        "settings": {"clip_norm": CLIP_NORM, "warmup_steps": WARMUP_STEPS, "ema_decay": EMA_DECAY, "weight_decay": WEIGHT_DECAY},
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    record |= train(args, model, data)
    export(model, args.detector, args.out / "model")
    write_json(args.record, record)
    record["validation"] = score_model(model, draw_scenes(VALIDATION_SEED, args.validation_scenes))
    write_json(args.record, record)
    print(json.dumps(record["validation"]), flush=True)


if __name__ == "__main__":
    run_program(main)
