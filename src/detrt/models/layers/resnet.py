"""ResNet with frozen BatchNorm, under torchvision's names (He et al., arXiv:1512.03385, table 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1; the 3x3 has the stride: (batch, in, h, w) -> (batch, 4 * width, h/s, w/s)."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.expansion
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(x)) + shortcut)


class ResNet(nn.Module):
    """(batch, 3, h, w) -> maps of the selected stages, of strides 4, 8, 16 and 32.

    depths: blocks per stage. width: channels of the stem; stage i has 4 * width * 2**i channels.
    out_stages: stages to return, 0 to 3.
    """

    def __init__(self, depths: Sequence[int], width: int, out_stages: Sequence[int]) -> None:
        super().__init__()
        self.out_stages = tuple(out_stages)
        self.channels = [4 * width * 2**i for i in self.out_stages]
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels = width
        for stage, depth in enumerate(depths):
            blocks = []
            for block in range(depth):
                stride = 2 if block == 0 and stage > 0 else 1
                blocks.append(Bottleneck(channels, width * 2**stage, stride))
                channels = width * 2**stage * Bottleneck.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.eval()

    def forward(self, x: Tensor) -> list[Tensor]:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        found = []
        for stage in range(4):
            x = getattr(self, f"layer{stage + 1}")(x)
            if stage in self.out_stages:
                found.append(x)
        return found
