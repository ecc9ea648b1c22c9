"""ONNX files as other exporters write them: small torch modules with their tensor names and their documented decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

HEIGHT, WIDTH, CLASSES = 64, 96, 5
NAMES = ("person", "car", "dog", "cat", "bird")
MEAN, STD = np.float32((0.485, 0.456, 0.406)), np.float32((0.229, 0.224, 0.225))


class Detector(nn.Module):
    """A convolution whose cells are the queries. columns: of the logits."""

    def __init__(self, columns: int = CLASSES, baked_batch: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Conv2d(3, 16, 16, 16)
        self.logits, self.boxes = nn.Linear(16, columns), nn.Linear(16, 4)
        self.baked_batch = baked_batch
        with torch.no_grad():
            self.logits.weight *= 12  # scores that differ
        self.eval()

    def heads(self, images: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.body(images).relu().flatten(2).transpose(1, 2)
        if self.baked_batch:
            rows = rows.reshape(1, -1, 16)
        return self.logits(rows), self.boxes(rows).sigmoid()

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads(pixel_values)


class RtDetr(Detector):
    """The post-processor in deploy mode of RT-DETR, D-FINE and DEIM. focal: as they train; else by softmax, without top-k."""

    def __init__(self, focal: bool = True, **changes: Any) -> None:
        super().__init__(CLASSES if focal else CLASSES + 1, **changes)
        self.focal = focal

    def forward(self, images: Tensor, orig_target_sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, boxes = self.heads(images)
        centre, size = boxes[..., :2], boxes[..., 2:]
        boxes = torch.cat([centre - size / 2, centre + size / 2], -1) * orig_target_sizes.repeat(1, 2).unsqueeze(1)
        if not self.focal:
            scores, labels = logits.softmax(-1)[..., :-1].max(-1)
            return labels, boxes, scores
        scores, index = torch.topk(logits.sigmoid().flatten(1), 20, dim=-1)
        labels = index - index // CLASSES * CLASSES
        index = index // CLASSES
        return labels, boxes.gather(1, index.unsqueeze(-1).repeat(1, 1, 4)), scores


class RfDetr(Detector):
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        logits, boxes = self.heads(input)
        return boxes, logits


class Ultralytics(Detector):
    """hidden: with an operation behind the concatenation, so that the sigmoid is not found."""

    def __init__(self, hidden: bool = False, **changes: Any) -> None:
        super().__init__(**changes)
        self.hidden = hidden

    def forward(self, images: Tensor) -> Tensor:
        logits, boxes = self.heads(images)
        joined = torch.cat([boxes, logits.sigmoid()], -1)
        return joined * 1.0 + 0.0 if self.hidden else joined


LAYOUTS = {
    "rt-detr": (RtDetr, ("images", "orig_target_sizes"), ("labels", "boxes", "scores")),
    "rf-detr": (RfDetr, ("input",), ("dets", "labels")),
    "ultralytics": (Ultralytics, ("images",), ("output0",)),
}


def write(path: Path, layout: str, *, batch: int | None = None, half: bool = False, **changes: Any) -> nn.Module:
    """Export a module; the module. batch: fixed; None: symbolic. half: all in FP16, as `half=True` of ultralytics."""
    kind, inputs, outputs = LAYOUTS[layout]
    module = kind(**changes)
    images = torch.rand(batch or 1, 3, HEIGHT, WIDTH)
    arguments = (images, torch.tensor([[WIDTH, HEIGHT]] * len(images))) if len(inputs) == 2 else (images,)
    axes = {} if batch else {name: {0: "N"} for name in (*inputs, *outputs)}
    if half:
        module, arguments = module.half(), tuple(a.half() if a.is_floating_point() else a for a in arguments)
    options = {"input_names": list(inputs), "output_names": list(outputs), "dynamic_axes": axes, "opset_version": 16}
    torch.onnx.export(module, arguments, str(path), dynamo=False, **options)
    return module


def add_metadata(path: Path, **entries: str) -> None:
    model = onnx.load(path)
    for key, value in entries.items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, path)
