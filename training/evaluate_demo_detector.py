"""COCO AP of a demo detector on freshly drawn scenes.

    python training/evaluate_demo_detector.py src/detrt/models/embedded/shapes --record training/demo_detector.json

Loads the folder with ``AutoModelForObjectDetection.from_pretrained`` in float32, resizes each
scene with Pillow's bilinear filter and keeps the 100 best (query, class) pairs per scene.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from demo_data import resize
from evaluation import TOP_K, coco_scores, coco_truth, evaluate_folder, result_row
from torch import Tensor, nn

from detrt.data.scenes.scene import CLASSES, Scene


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
                results.append(result_row(start + k, int(kind), (cx, cy, w, h), score))
    return results


def average_precision(scenes: list[Scene], results: list[dict]) -> dict[str, object]:
    """AP over IoU 0.50..0.95, AP50, AP75, AP by object size and AP per class (COCO's rules)."""
    scores, each = coco_scores(coco_truth(scenes, CLASSES, lambda item: [item.class_id]), results)
    return scores | {"per_class": each}


def score_model(model: nn.Module, scenes: list[Scene]) -> dict[str, object]:
    def forward(pixels: Tensor) -> tuple[Tensor, Tensor]:
        out = model(pixels)
        return out.logits, out.pred_boxes

    return average_precision(scenes, predict(forward, scenes, torch.device("cpu"), batch=10))


if __name__ == "__main__":
    evaluate_folder(
        __doc__.splitlines()[0],
        script="evaluate_demo_detector.py",
        name="held_out_ap",
        auto="AutoModelForObjectDetection",
        score=score_model,
        count=lambda scenes: {"objects": sum(len(scene.objects) for scene in scenes)},
    )
