"""EoMT as an instance segmenter: the queries of transformers' class are masks (Kerssies et al., arXiv:2503.19108), see `query_masks`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import EomtDinov3ForUniversalSegmentation, EomtForUniversalSegmentation

from ...errors import ExportError, SourceError
from ..families import IMAGENET_MEAN, IMAGENET_STD
from .query_masks import InstanceOutput, Instances


class _Eomt(Instances):
    """The forward pass of an EoMT with boxes and scores. Inference only.

    config.mask_downsample_ratio: stride of the mask logits.
    """

    config: Any
    padding: Tensor
    _buffers: dict[str, Tensor | None]
    _constants: list[float] | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        config.mask_downsample_ratio = config.patch_size // 2**config.num_upscale_blocks
        self.pad_with(IMAGENET_MEAN, IMAGENET_STD)

    def pad_with(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Fill padding with black, normalised, as its image processor does."""
        values = [-m / s for m, s in zip(mean, std, strict=True)]
        self.register_buffer("padding", torch.tensor(values).view(1, 3, 1, 1), persistent=False)  # type: ignore[attr-defined]

    @property
    def attn_mask_probs(self) -> Any:
        """Of masked attention in each of the last layers: transformers' buffer, or after `fix_attention` its values."""
        if "attn_mask_probs" not in self._buffers:
            raise AttributeError("attn_mask_probs")
        return self._buffers["attn_mask_probs"] if self._constants is None else self._constants

    def fix_attention(self) -> None:
        """Turn the probabilities of masked attention into constants, on which a tracer can branch.

        Raises:
            SourceError: some are between 0 and 1, so that transformers' class draws random numbers.
        """
        found = self.attn_mask_probs.tolist()
        if any(0 < value < 1 for value in found):
            raise SourceError(
                f"its attention is masked at random (attn_mask_probs {found}), in the middle of training; train it to the end"
            )
        self._constants = found

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor | None = None, **options: Any) -> InstanceOutput:
        """pixel_values (b, 3, h, w), normalised; pixel_mask (b, h, w), 1 for the image."""
        side = self.config.image_size
        if (int(pixel_values.shape[2]), int(pixel_values.shape[3])) != (side, side):
            raise ExportError(f"EoMT takes {side}x{side} only, the size of its position table; leave `size` out")
        image = self.image_of(pixel_values, pixel_mask)
        if pixel_mask is not None:
            pixel_values = pixel_values * image + self.padding * (1 - image)
        return self.instances(super().forward(pixel_values), image)  # type: ignore[misc]


class EomtForInstanceSegmentation(_Eomt, EomtForUniversalSegmentation):
    pass


class EomtDinov3ForInstanceSegmentation(_Eomt, EomtDinov3ForUniversalSegmentation):
    pass
