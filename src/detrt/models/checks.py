"""What every loaded model must have: three channels and finite weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import SourceError, number_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

RGB = 3  # channels of every image that is read


def check_channels(module: nn.Module, ref: str, weights: Mapping[str, Any] | None = None) -> None:
    """Raise SourceError for a model of other images than RGB, by its first convolution: configs of backbones lie.

    weights: those that are to be loaded, by the names of the module; None: they are.
    """
    from torch import nn

    for name, part in module.named_modules():
        if not isinstance(part, (nn.Conv2d, nn.Conv3d)):
            continue
        weight = part.weight if weights is None else weights.get(f"{name}.weight", part.weight)
        channels = int(weight.shape[1]) if weight.ndim == part.weight.ndim else RGB
        if channels != RGB:
            raise SourceError(
                f"'{ref}' reads images of {number_of(channels, 'channel')}, and detrt gives every model {RGB} (R, G, B); "
                f"give one that was trained with num_channels {RGB}"
            )
        return


def check_finite(module: nn.Module, ref: str) -> None:
    import torch

    # The state dict, not the parameters: the running statistics of BatchNorm are buffers.
    state = module.state_dict()
    bad = [name for name, p in state.items() if p.is_floating_point() and not torch.isfinite(p).all()]
    if bad:
        raise SourceError(
            f"'{ref}' has NaN or infinite weights in {number_of(len(bad), 'tensor')}, e.g. {', '.join(bad[:3])}; "
            "the checkpoint is damaged or its training diverged"
        )
