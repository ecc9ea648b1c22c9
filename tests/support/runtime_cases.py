"""Specs and fake sessions that the tests of the runtime share."""

from __future__ import annotations

import numpy as np

from detrt.backends.base import FakeSession
from detrt.spec import DecodeSpec, InputSpec, ModelSpec, TensorInfo

LABELS = {0: "cat", 1: "dog", 2: "bird"}


def make_spec(*, decode=None, labels=LABELS, task="detection", **changes) -> ModelSpec:
    given = {"resize": "stretch", "height": 8, "width": 12, **changes}
    decode = {"activation": "sigmoid", "select": "topk", "num_queries": 4, "num_classes": 3, **(decode or {})}
    decode.setdefault("max_detections", 4)
    decode.setdefault("mask_stride", 2 if task == "instance-segmentation" else 0)
    return ModelSpec("test", InputSpec(**given), DecodeSpec(**decode), labels, task=task)


def make_session(spec: ModelSpec, *, max_batch=None, batch="batch", log=None) -> FakeSession:
    """One box an image: class 0, centred, whose score is the mean of the red pixels / 255. A mask fills the box.

    log: a list that gets the shape of every pixel_values.
    """
    sides = ("height", "width") if spec.input.dynamic else spec.input.size_hw
    inputs = [TensorInfo("pixel_values", spec.input.dtype, (batch, 3, *sides))]
    if spec.input.mask:
        inputs.append(TensorInfo("pixel_mask", "int64", (batch, *sides)))
    outputs = (
        TensorInfo("logits", "float32", (batch, 4, 3)),
        TensorInfo("pred_boxes", "float32", (batch, 4, 4)),
    )
    if spec.has_masks:
        map_hw = [side // spec.decode.mask_stride for side in spec.input.size_hw]
        outputs += (TensorInfo("mask_logits", "float32", (batch, 4, *map_hw)),)

    def run(feeds):
        pixels = feeds["pixel_values"].astype(np.float32)
        if log is not None:
            log.append(pixels.shape)
        n = len(pixels)
        if spec.input.mask:
            red = (pixels[:, 0] * feeds["pixel_mask"]).sum((1, 2)) / feeds["pixel_mask"].sum((1, 2))
        else:
            red = pixels[:, 0].mean((1, 2))
        p = np.clip(red / 255, 1e-6, 1 - 1e-6)
        logits = np.full((n, 4, 3), -np.inf, np.float32)
        logits[:, 0, 0] = np.log(p / (1 - p))
        boxes = np.tile(np.array([0.5, 0.5, 0.5, 0.5], np.float32), (n, 4, 1))
        found = {"logits": logits, "pred_boxes": boxes}
        if spec.has_masks:
            height, width = map_hw
            found["mask_logits"] = np.full((n, 4, height, width), -1, np.float32)
            found["mask_logits"][:, :, height // 4 : height * 3 // 4, width // 4 : width * 3 // 4] = 1
        return found

    return FakeSession(spec, tuple(inputs), outputs, run, max_batch)


def red(height: int, width: int, value: int) -> np.ndarray:
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0] = value
    return image
