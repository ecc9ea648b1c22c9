"""Facts read from the shapes of a state dict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isqrt
from typing import TYPE_CHECKING, Any

from ...errors import SourceError, number_of

if TYPE_CHECKING:
    from torch import Tensor


class Shapes:
    """A state dict seen as shapes. Every question about a key that does not exist is a SourceError."""

    def __init__(self, state: Mapping[str, Tensor], ref: str) -> None:
        self.state = state
        self.ref = ref

    def __contains__(self, key: str) -> bool:
        return key in self.state

    def size(self, key: str, axis: int = 0) -> int:
        """Length of one axis of a tensor."""
        if key not in self.state:
            raise SourceError(
                f"'{self.ref}' has no '{key}', which tells the size of the model; the file is incomplete or of "
                "another family (name it with `family`)"
            )
        shape = self.state[key].shape
        if axis >= len(shape):
            raise SourceError(f"'{self.ref}': '{key}' has shape {list(shape)}; expected at least {axis + 1} axes")
        return int(shape[axis])

    def count(self, pattern: str) -> int:
        """How many different numbers `#` takes in the keys that start with a pattern; they must be 0, 1, ..."""
        rule = re.compile(re.escape(pattern).replace(r"\#", r"(\d+)"))
        found = sorted({int(m.group(1)) for m in map(rule.match, self.state) if m})
        if found != list(range(len(found))):
            raise SourceError(f"'{self.ref}' has '{pattern}' for {found}: some are missing; the file is incomplete")
        return len(found)

    def points(self, key: str, heads: int, levels: int) -> int:
        """Points of a level of a deformable attention, from the rows of its `attention_weights`."""
        rows = self.size(key)
        points, rest = divmod(rows, heads * levels)
        if rest or points < 1:
            raise SourceError(
                f"'{self.ref}': '{key}' has {number_of(rows, 'row')}, which {heads} heads times {levels} levels do not divide; state the heads that it "
                "was trained with, e.g. `assume=heads=4`"
            )
        return points

    def window(self, key: str) -> int:
        """Side of the square windows of a Swin, from the rows of its `relative_position_bias_table`."""
        rows = self.size(key)
        window = (isqrt(rows) + 1) // 2
        if (2 * window - 1) ** 2 != rows:
            raise SourceError(f"'{self.ref}': '{key}' has {number_of(rows, 'row')}, which no square window has")
        return window

    def any(self, pattern: str) -> bool:
        rule = re.compile(pattern)
        return any(rule.search(key) for key in self.state)


def resnet(shapes: Shapes, body: str) -> dict[str, Any]:
    """transformers ResNet settings from torchvision names (`layer1.0.conv1` ...) under a prefix."""
    depths, widths = [], []
    bottleneck = f"{body}layer1.0.conv3.weight" in shapes
    for stage in range(1, 5):
        depths.append(shapes.count(f"{body}layer{stage}.#."))
        widths.append(shapes.size(f"{body}layer{stage}.0.conv{3 if bottleneck else 2}.weight"))
    return {
        "model_type": "resnet",
        "num_channels": shapes.size(f"{body}conv1.weight", 1),
        "embedding_size": shapes.size(f"{body}conv1.weight"),
        "hidden_sizes": widths,
        "depths": depths,
        "layer_type": "bottleneck" if bottleneck else "basic",
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
    }


def hgnet(shapes: Shapes, last: str = "aggregation.1") -> dict[str, Any]:
    """transformers HGNetV2 settings from the PyTorch port's names. last: the last convolution of a block."""
    stages = shapes.count("backbone.stages.#.")
    columns: dict[str, list[Any]] = {
        name: [] for name in ("inputs", "middle", "output", "blocks", "layers", "light", "kernel", "down")
    }
    for index in range(stages):
        stage = f"backbone.stages.{index}."
        light = f"{stage}blocks.0.layers.0.conv1.conv.weight" in shapes
        first = f"{stage}blocks.0.layers.0.{'conv1.' if light else ''}conv.weight"
        spatial = f"{stage}blocks.0.layers.0.{'conv2.' if light else ''}conv.weight"
        blocks = shapes.count(f"{stage}blocks.#.")
        columns["inputs"].append(shapes.size(first, 1))
        columns["middle"].append(shapes.size(first))
        columns["output"].append(shapes.size(f"{stage}blocks.0.{last}.conv.weight"))
        columns["blocks"].append(blocks)
        columns["layers"].append(shapes.count(f"{stage}blocks.0.layers.#."))
        columns["light"].append(light)
        columns["kernel"].append(shapes.size(spatial, 2))
        columns["down"].append(f"{stage}downsample.conv.weight" in shapes)
    stem = [
        shapes.size("backbone.stem.stem1.conv.weight", 1),
        shapes.size("backbone.stem.stem1.conv.weight"),
        shapes.size("backbone.stem.stem4.conv.weight"),
    ]
    return {
        "model_type": "hgnet_v2",
        "embedding_size": stem[2],
        "hidden_sizes": columns["output"],
        "depths": columns["layers"],
        "stem_channels": stem,
        "stage_in_channels": columns["inputs"],
        "stage_mid_channels": columns["middle"],
        "stage_out_channels": columns["output"],
        "stage_num_blocks": columns["blocks"],
        "stage_downsample": columns["down"],
        "stage_downsample_strides": [2] * stages,
        "stage_light_block": columns["light"],
        "stage_kernel_size": columns["kernel"],
        "stage_numb_of_layers": columns["layers"],
        "use_learnable_affine_block": "backbone.stem.stem1.lab.scale" in shapes,
    }


def levels_of(widths: list[int], inputs: list[int], ref: str) -> list[str]:
    """Names of the backbone stages whose widths are the inputs of the neck: the last ones, in order."""
    first = len(widths) - len(inputs)
    if first < 0 or widths[first:] != inputs:
        raise SourceError(
            f"'{ref}': the neck takes {inputs} channels, but the backbone's last stages have {widths[max(first, 0) :]}; "
            "the file is incomplete or of another family"
        )
    return [f"stage{index + 1}" for index in range(first, len(widths))]


def points_of(scale: Tensor, ref: str) -> list[int]:
    """Points per level from D-FINE's and RT-DETRv2's `num_points_scale`, which holds 1/n n times per level."""
    points: list[int] = []
    values = scale.flatten().tolist()
    position = 0
    while position < len(values):
        count = round(1 / values[position]) if values[position] > 0 else 0
        if count < 1 or position + count > len(values):
            break
        points.append(count)
        position += count
    if position != len(values):
        raise SourceError(f"'{ref}': 'num_points_scale' must hold 1/n n times for the n points of every level; got {values[:12]}")
    return points
