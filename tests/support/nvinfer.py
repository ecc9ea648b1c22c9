"""Gst-nvinfer on the CPU, from its documents: what its configuration file does to a frame, and DeepStream-Yolo's parser.

NVIDIA's manual of Gst-nvinfer gives the formula of the pixels, y = net-scale-factor * (x - offsets), and the meaning of the keys. The sizes of
the letterbox are those of `scale_and_fill_data` in NVIDIA's gst-nvdspreprocess, whose transform is that of nvinfer: an even source, truncated
sides, black padding. `topk` is applied as in `nvdsinfer_context_impl_output_parsing.cpp`, which DeepStream installs in sources/libs/nvdsinfer.
`NvDsInferParseYolo` of DeepStream-Yolo (2ccf529) reads rows of x0, y0, x1, y1, score, class, and DeepStream-Yolo-Seg's
`NvDsInferParseYoloSeg` a mask of a quarter of the network's sides behind them. Masks cover their boxes, as `resize_mask` in
deepstream_segmask.py of NVIDIA's deepstream_python_apps (2027435) has them; that sample also cuts boxes to whole pixels, which is not
done here.
"""

from __future__ import annotations

import configparser
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import onnxruntime

_FILTERS = {0: cv2.INTER_NEAREST, 1: cv2.INTER_LINEAR, 2: cv2.INTER_CUBIC, 3: cv2.INTER_AREA, 4: cv2.INTER_LANCZOS4}


class NvInfer:
    """Runs the files that a configuration names, one frame at a time."""

    def __init__(self, config: Path) -> None:
        self.groups = configparser.ConfigParser()
        self.groups.read(config)
        self.keys = self.groups["property"]
        self.masks = self.keys["network-type"] == "3"
        if self.masks:
            assert self.keys["parse-bbox-instance-mask-func-name"] == "NvDsInferParseYoloSeg"
            assert self.keys.getint("output-instance-mask") and "parse-bbox-func-name" not in self.keys
        else:
            assert self.keys["parse-bbox-func-name"] == "NvDsInferParseYolo" and self.keys["network-type"] == "0"
        assert self.keys["cluster-mode"] == "4", "clustering is not modelled here"
        self.session = onnxruntime.InferenceSession(str(config.parent / self.keys["onnx-file"]))
        (self.input,) = self.session.get_inputs()
        assert self.input.type == "tensor(float)"
        self.labels = (config.parent / self.keys["labelfile-path"]).read_text("utf-8").splitlines()
        assert len(self.labels) == int(self.keys["num-detected-classes"])

    def __call__(self, image: np.ndarray) -> list[tuple[str, float, tuple[float, ...]]]:
        """(label, score, box in pixels of the frame) of each object, best first. image: (H, W, 3) uint8 RGB."""
        return [one[:3] for one in self.objects(image)]

    def objects(self, image: np.ndarray) -> list[tuple[str, float, tuple[float, ...], np.ndarray]]:
        """As a call, with the values of each mask, (network height / 4, network width / 4); without values where there are none."""
        net_h, net_w = self.input.shape[2:]
        source = image[: image.shape[0] // 2 * 2, : image.shape[1] // 2 * 2]
        height, width = source.shape[:2]
        dest_h, dest_w = net_h, net_w
        if self.keys.getint("maintain-aspect-ratio"):
            tall, wide = net_w * height / width, net_h * width / height
            dest_h, dest_w = (int(tall), net_w) if tall <= net_h else (net_h, int(wide))
        assert not self.keys.getint("symmetric-padding") and not self.keys.getint("model-color-format")
        canvas = np.zeros((net_h, net_w, 3), np.uint8)
        canvas[:dest_h, :dest_w] = cv2.resize(
            source, (dest_w, dest_h), interpolation=_FILTERS[self.keys.getint("scaling-filter")]
        )
        offsets = np.array([float(part) for part in self.keys.get("offsets", "0;0;0").split(";")], np.float32)
        pixels = self.keys.getfloat("net-scale-factor") * (canvas.astype(np.float32) - offsets)
        (rows,) = self.session.run(None, {self.input.name: pixels.transpose(2, 0, 1)[None].astype(np.float32)})
        found = [one for row in rows[0] if (one := self._parsed(row, net_w, net_h)) is not None]
        found.sort(key=lambda one: -one[1])
        ratio = np.array([dest_w / width, dest_h / height] * 2)
        kept, counts = [], Counter()
        for label, score, box, mask in found:  # `fillUnclusteredOutput` applies `filterTopKOutputs` to each class by itself
            counts[label] += 1
            if counts[label] <= self.groups.getint("class-attrs-all", "topk"):
                kept.append((label, score, tuple(box / ratio), mask))
        return kept

    def drawn(self, box: tuple[float, ...], mask: np.ndarray, size_hw: tuple[int, int]) -> np.ndarray:
        """A mask in pixels of the frame: its values cover the box evenly, between them it is linear."""
        taps, inside = [], []
        for low, high, count, size in zip(box[1::-1], box[:1:-1], mask.shape, size_hw, strict=True):
            pixels = np.arange(size) + 0.5
            at = np.clip((pixels - low) / (high - low) * count - 0.5, 0, count - 1)
            first = np.floor(at).astype(int)
            taps.append((first, np.minimum(first + 1, count - 1), at - first))
            inside.append((pixels > low) & (pixels < high))
        (top, bottom, down), (left, right, along) = taps
        rows = mask[top] * (1 - down)[:, None] + mask[bottom] * down[:, None]
        values = rows[:, left] * (1 - along) + rows[:, right] * along
        return (values >= self.keys.getfloat("segmentation-threshold")) & inside[0][:, None] & inside[1]

    def _parsed(self, row: np.ndarray, net_w: int, net_h: int) -> tuple[str, float, np.ndarray, np.ndarray] | None:
        score, class_id = float(row[4]), int(row[5])
        group = f"class-attrs-{class_id}"
        group = group if group in self.groups else "class-attrs-all"
        if score < self.groups.getfloat(group, "pre-cluster-threshold"):
            return None
        box = np.clip(row[:4].astype(np.float64), 0, [net_w, net_h, net_w, net_h])
        if box[2] - box[0] < 1 or box[3] - box[1] < 1:
            return None
        assert len(row) == 6 + self.masks * (net_h // 4) * (net_w // 4)
        mask = row[6:].reshape(net_h // 4, net_w // 4) if self.masks else row[6:]
        return self.labels[class_id], score, box, mask
