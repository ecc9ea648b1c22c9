"""ChannelMapper: every backbone level to one width, and further levels by strided convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

GROUPS = 32


class ConvNorm(nn.Module):
    """Convolution and GroupNorm without activation."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, *, bias: bool, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=bias)
        self.norm = nn.GroupNorm(groups, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class ChannelMapper(nn.Module):
    """(batch, c_i, h_i, w_i) for each backbone level -> (batch, dim, h_i, w_i) for each of `levels`.

    The first extra level reads the last backbone map, the next ones the level before them (Deformable
    DETR, appendix A.2). bias: of the convolutions; IDEA-Research's DINO has it, mmdetection has not.
    """

    def __init__(self, channels: Sequence[int], dim: int, levels: int, *, bias: bool, groups: int = GROUPS) -> None:
        super().__init__()
        self.convs = nn.ModuleList(ConvNorm(c, dim, 1, 1, bias=bias, groups=groups) for c in channels)
        self.extra_convs = nn.ModuleList(
            ConvNorm(dim if i else channels[-1], dim, 3, 2, bias=bias, groups=groups) for i in range(levels - len(channels))
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        levels = [conv(x) for conv, x in zip(self.convs, maps, strict=True)]
        for i, conv in enumerate(self.extra_convs):
            levels.append(conv(levels[-1] if i else maps[-1]))
        return levels
