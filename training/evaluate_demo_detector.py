"""COCO AP of a demo detector on freshly drawn scenes.

    python training/evaluate_demo_detector.py src/detrt/default_model --record training/demo_detector.json

Loads the folder with ``AutoModelForObjectDetection.from_pretrained`` in float32, resizes each
scene with Pillow's bilinear filter and keeps the 100 best (query, class) pairs per scene.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from demo_data import HELD_OUT_SEED, resize
from torch import Tensor

from detrt.scenes import CLASSES, Scene, draw_scene

TOP_K = 100


def draw_scenes(first_seed: int, count: int) -> list[Scene]:
    return [draw_scene(first_seed + k) for k in range(count)]


@torch.no_grad()
def predict(
    forward: Callable[[Tensor], tuple[Tensor, Tensor]],
    scenes: list[Scene],
    device: torch.device,
    batch: int = 50,
) -> list[dict]:
    """COCO result rows; ``forward`` maps (B, 3, H, W) to logits (B, Q, C), boxes (B, Q, 4)."""
    results = []
    for start in range(0, len(scenes), batch):
        part = scenes[start : start + batch]
        stacked = torch.from_numpy(np.stack([resize(scene.image) for scene in part]))
        logits, boxes = forward(stacked.to(device).permute(0, 3, 1, 2).float() / 255)
        scores, flat = logits.float().sigmoid().flatten(1).topk(TOP_K)
        query = flat.div(logits.shape[-1], rounding_mode="floor")
        chosen = boxes.float().gather(1, query[..., None].expand(-1, -1, 4)).cpu().numpy()
        label, scores = (flat % logits.shape[-1]).cpu().numpy(), scores.cpu().numpy()
        for k, scene in enumerate(part):
            height, width = scene.image.shape[:2]
            chosen[k] *= (width, height, width, height)
            for (cx, cy, w, h), score, kind in zip(chosen[k], scores[k], label[k], strict=True):
                results.append(
                    {
                        "image_id": start + k + 1,
                        "category_id": int(kind) + 1,
                        "bbox": [float(cx - w / 2), float(cy - h / 2), float(w), float(h)],
                        "score": float(score),
                    }
                )
    return results


def coco_truth(scenes: list[Scene]) -> dict:
    """COCO document of the scenes' labels."""
    annotations = []
    for index, scene in enumerate(scenes):
        for item in scene.objects:
            x0, y0, x1, y1 = item.box_xyxy
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": index + 1,
                    "category_id": item.class_id + 1,
                    "bbox": [x0, y0, x1 - x0, y1 - y0],
                    "area": (x1 - x0) * (y1 - y0),
                    "iscrowd": 0,
                }
            )
    return {
        "info": {},
        "images": [{"id": k + 1, "height": s.image.shape[0], "width": s.image.shape[1]} for k, s in enumerate(scenes)],
        "categories": [{"id": k + 1, "name": name} for k, name in enumerate(CLASSES)],
        "annotations": annotations,
    }


def average_precision(scenes: list[Scene], results: list[dict]) -> dict[str, object]:
    """AP over IoU 0.50..0.95, AP50, AP75, AP by object size and AP per class (COCO's rules)."""
    scores, each = coco_scores(coco_truth(scenes), results)
    return scores | {"per_class": each}


def coco_scores(document: dict, results: list[dict]) -> tuple[dict[str, object], dict[str, float]]:
    """COCO's figures for result rows against a COCO document; and the AP of each category that has an object."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = document
        truth.createIndex()
        run = COCOeval(truth, truth.loadRes(results), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
    scores: dict[str, object] = {name: round(float(v), 4) for name, v in zip(names, run.stats[:6], strict=True)}
    precision = run.eval["precision"][:, :, :, 0, 2]  # (IoU, recall, category), all sizes
    each = {
        category["name"]: round(float(np.mean(precision[:, :, k][precision[:, :, k] > -1])), 4)
        for k, category in enumerate(document["categories"])
        if (precision[:, :, k] > -1).any()
    }
    return scores, each


def add_to_record(path: Path, name: str, scores: dict[str, object]) -> None:
    """Put `scores` under `name` into a JSON file, which need not be there."""
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    record[name] = scores
    write_json(path, record)


def write_json(path: Path, content: dict) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with config.json and model.safetensors")
    parser.add_argument("--scenes", type=int, default=500, help="number of held-out scenes")
    parser.add_argument("--record", type=Path, help="JSON file that takes the result as held_out_ap")
    args = parser.parse_args()

    import transformers

    model = transformers.AutoModelForObjectDetection.from_pretrained(args.folder).eval()
    if model.dtype != torch.float32:
        raise SystemExit(f"{args.folder} loads as {model.dtype}; its config must say float32")

    def forward(pixels: Tensor) -> tuple[Tensor, Tensor]:
        out = model(pixels)
        return out.logits, out.pred_boxes

    started = time.perf_counter()
    scenes = draw_scenes(HELD_OUT_SEED, args.scenes)
    scores = average_precision(scenes, predict(forward, scenes, torch.device("cpu"), batch=10))
    scores |= {
        "scenes": args.scenes,
        "first_seed": HELD_OUT_SEED,
        "objects": sum(len(scene.objects) for scene in scenes),
        "device": "cpu, float32",
        "seconds": round(time.perf_counter() - started, 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": (f"PYTHONPATH=src python training/evaluate_demo_detector.py {args.folder.as_posix()} --scenes {args.scenes}"),
    }
    print(json.dumps(scores, indent=2))
    if args.record:
        add_to_record(args.record, "held_out_ap", scores)


if __name__ == "__main__":
    main()
