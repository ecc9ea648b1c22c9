"""Parameters that go by several names, read back from a checkpoint under whichever name it was stored.

transformers stores one of the names and ties the others after loading. Where the name that it stored is
not the one that it ties to (DEIMv2 with `share_bbox_head`: it stores `bbox_embed.1` and ties to
`bbox_embed.0`), the weights stay random and its loading report lists nothing as missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


def has_shared_weights(module: nn.Module) -> bool:
    """Whether any parameter of a module has more than one name."""
    return len(list(module.parameters())) < len(list(module.named_parameters(remove_duplicate=False)))


def restore_shared_weights(module: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Give parameters with several names the value that the checkpoint has, in place; returns the names used.

    A parameter that equals one of its names in `state` is left alone, and so is one of which `state` has
    no name in the right shape (transformers has then read it under a name of its own).
    """
    import torch

    names: dict[int, list[str]] = {}
    parameters: dict[int, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    restored = []
    for key, aliases in names.items():
        target = parameters[key]
        stored = [n for n in aliases if n in state and state[n].shape == target.shape]
        if len(aliases) < 2 or any(torch.equal(state[n].to(target), target) for n in stored):
            continue
        for name in stored[:1]:
            target.data.copy_(state[name])
            restored.append(name)
    return restored
