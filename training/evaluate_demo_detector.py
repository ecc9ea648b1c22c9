"""COCO AP of the boxes, and where it has them of the masks, of a demo detector on freshly drawn scenes.

    python training/evaluate_demo_detector.py src/detrt/models/embedded/shapes --record training/demo_detector.json

Loads the folder with transformers or, with a mask head, detrt's class, in float32, resizes each
scene with Pillow's bilinear filter and keeps the 100 best (query, class) pairs per scene.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from demo_data import resize
from evaluation import TOP_K, coco_scores, coco_truth, evaluate_folder, result_row
from torch import Tensor, nn

from detrt.data.scenes.scene import CLASSES, Scene
from detrt.models.families import BY_NAME
from detrt.models.source import auto_class
from detrt.tasks.masks import encode_masks


@torch.no_grad()
def predict(
    forward: Callable[[Tensor], tuple[Tensor, ...]],
    scenes: list[Scene],
    device: torch.device,
    batch: int = 50,
) -> list[dict]:
    """COCO result rows; ``forward`` maps (B, 3, H, W) to logits (B, Q, C), boxes (B, Q, 4) and perhaps mask logits (B, Q, h, w)."""
    results = []
    for start in range(0, len(scenes), batch):
        part = scenes[start : start + batch]
        stacked = torch.from_numpy(np.stack([resize(scene.image) for scene in part]))
        logits, boxes, *maps = forward(stacked.to(device).permute(0, 3, 1, 2).float() / 255)
        best, flat = logits.float().sigmoid().flatten(1).topk(TOP_K)
        query = flat.div(logits.shape[-1], rounding_mode="floor")
        chosen = boxes.float().gather(1, query[..., None].expand(-1, -1, 4)).cpu().numpy()
        label, scores = (flat % logits.shape[-1]).cpu().numpy(), best.cpu().numpy()
        for k, scene in enumerate(part):
            height, width = scene.image.shape[:2]
            chosen[k] *= (width, height, width, height)
            for (cx, cy, w, h), score, kind in zip(chosen[k], scores[k], label[k], strict=True):
                results.append(result_row(start + k, int(kind), (cx, cy, w, h), score))
            for masks in maps:
                rows = encode_masks(masks[k, query[k]].float().cpu().numpy(), (height, width)).to_coco()
                for row, mask in zip(results[-len(rows) :], rows, strict=True):
                    row["segmentation"] = mask
    return results


def average_precision(scenes: list[Scene], results: list[dict]) -> dict[str, object]:
    """AP over IoU 0.50..0.95, AP50, AP75, AP by object size and AP per class (COCO's rules); of rows with masks those of the masks
    under "masks". Sizes are those of the boxes."""
    document = coco_truth(scenes, CLASSES, lambda item: [item.class_id])
    scores, each = coco_scores(document, results)
    scores |= {"per_class": each}
    if results and "segmentation" in results[0]:
        masks, each = coco_scores(document, results, "segm")
        scores["masks"] = masks | {"per_class": each}
    return scores


def score_model(model: nn.Module, scenes: list[Scene]) -> dict[str, object]:
    def forward(pixels: Tensor) -> tuple[Tensor, ...]:
        out = model(pixels)
        return out.logits, out.pred_boxes, *([out.pred_masks] if "pred_masks" in out else [])

    return average_precision(scenes, predict(forward, scenes, torch.device("cpu"), batch=10))


def load(folder: Path) -> nn.Module:
    architectures = transformers.AutoConfig.from_pretrained(folder).architectures
    return auto_class(BY_NAME["rt_detr_v2"], architectures).from_pretrained(folder)


if __name__ == "__main__":
    evaluate_folder(
        __doc__.splitlines()[0],
        script="evaluate_demo_detector.py",
        name="held_out_ap",
        load=load,
        score=score_model,
        count=lambda scenes: {"objects": sum(len(scene.objects) for scene in scenes)},
    )
