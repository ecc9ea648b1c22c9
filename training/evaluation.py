"""What the evaluations of the demo detectors share: COCO documents and figures, and the record of a result."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_data import HELD_OUT_SEED
from torch import nn

from detrt.data.scenes.scene import Scene, SceneObject, draw_scene
from detrt.errors import SourceError
from detrt.files import write_text

TOP_K = 100  # detections of a scene that are kept, as COCO's rules say


def draw_scenes(first_seed: int, count: int) -> list[Scene]:
    return [draw_scene(first_seed + k) for k in range(count)]


def result_row(image: int, category: int, box_cxcywh: Sequence[float], score: float) -> dict:
    """COCO result of image and category number (from 0); the box in pixels."""
    cx, cy, w, h = box_cxcywh
    return {
        "image_id": image + 1,
        "category_id": category + 1,
        "bbox": [float(cx - w / 2), float(cy - h / 2), float(w), float(h)],
        "score": float(score),
    }


def coco_truth(scenes: Sequence[Scene], names: Sequence[str], categories_of: Callable[[SceneObject], Iterable[int]]) -> dict:
    """COCO document of scenes: one annotation for each object and each category (its number in `names`) that it has."""
    annotations: list[dict[str, object]] = []
    for k, scene in enumerate(scenes):
        for item, mask in zip(scene.objects, scene.masks.to_coco(), strict=True):
            x0, y0, x1, y1 = item.box_xyxy
            box = {"image_id": k + 1, "bbox": [x0, y0, x1 - x0, y1 - y0], "iscrowd": 0, "segmentation": mask}
            box["area"] = (x1 - x0) * (y1 - y0)
            for number in categories_of(item):
                annotations.append({"id": len(annotations) + 1, "category_id": number + 1} | box)
    return {
        "info": {},
        "images": [{"id": k + 1, "height": s.image.shape[0], "width": s.image.shape[1]} for k, s in enumerate(scenes)],
        "categories": [{"id": k + 1, "name": name} for k, name in enumerate(names)],
        "annotations": annotations,
    }


def coco_scores(document: dict, results: list[dict], iou_type: str = "bbox") -> tuple[dict[str, object], dict[str, float]]:
    """COCO's figures for result rows against a COCO document; and the AP of each category that has an object.

    iou_type: "bbox", or "segm" for rows with a segmentation.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = document
        truth.createIndex()
        run = COCOeval(truth, truth.loadRes(results), iou_type)
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
    write_text(path, json.dumps(content, indent=2) + "\n")


def evaluate_folder(
    description: str,
    script: str,
    name: str,
    load: Callable[[Path], nn.Module],
    score: Callable[[nn.Module, list[Scene]], dict[str, object]],
    count: Callable[[list[Scene]], dict[str, object]] = lambda scenes: {},
) -> None:
    """The command line of an evaluation: load a folder, score it on held-out scenes, print and keep the figures.

    `name` is the result's key in the record, `load` opens the folder, `count` gives further figures of the scenes.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="folder with config.json and model.safetensors")
    parser.add_argument("--scenes", type=int, default=500, help="number of held-out scenes")
    parser.add_argument("--record", type=Path, help=f"JSON file that takes the result as {name}")
    args = parser.parse_args()

    import transformers

    model: Any = load(args.folder).eval()
    if model.dtype != torch.float32:
        raise SourceError(f"{args.folder} loads as {model.dtype}; its config must say float32")
    started = time.perf_counter()
    scenes = draw_scenes(HELD_OUT_SEED, args.scenes)
    scores = score(model, scenes) | {"scenes": args.scenes, "first_seed": HELD_OUT_SEED} | count(scenes)
    scores |= {
        "device": "cpu, float32",
        "seconds": round(time.perf_counter() - started, 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": f"PYTHONPATH=src python training/{script} {args.folder.as_posix()} --scenes {args.scenes}",
    }
    print(json.dumps(scores, indent=2))
    if args.record:
        add_to_record(args.record, name, scores)
