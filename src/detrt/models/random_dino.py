"""Random DINO and Co-DINO: `random:dino`, `random:co_dino-swin-l` and so on, and `/tiny` for tests.

Sizes of the full ones are those of the published configs: DINO 4scale R50 and Swin-L (91 classes, as
IDEA-Research trains COCO), Co-DINO 5scale R50 and Swin-L (80 classes).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..bundle import Provenance
from .arch.co_dino import CoDino
from .arch.dino import Dino, DinoConfig
from .checkpoints.dino import make_spec
from .families import BY_NAME
from .hub import versions
from .labels import labels_for
from .random_weights import SEED, keep_variance

if TYPE_CHECKING:
    from .load import Source


_R50 = DinoConfig(
    classes=91,
    queries=900,
    backbone="resnet",
    depths=(3, 4, 6, 3),
    width=64,
    out_stages=(1, 2, 3),
    levels=4,
    conv_bias=True,
)
_SWIN_L = replace(_R50, backbone="swin", depths=(2, 2, 18, 2), width=192, heads=(6, 12, 24, 48), window=12)
_CO = {"classes": 80, "levels": 5, "out_stages": (0, 1, 2, 3), "conv_bias": False}
_VIT_L = {
    "backbone": "vit",
    "depths": (24,),
    "width": 1024,
    "heads": (16,),
    "hidden": 2730,
    "patch": 16,
    "positions": 1025,
    "window": 24,
    "windowed": tuple(i for i in range(24) if i % 4 != 3),
    "out_stages": (0,),
    "queries": 1500,
}
MODELS: dict[str, tuple[str, DinoConfig]] = {
    "dino": ("dino", _R50),
    "dino-swin-l": ("dino", _SWIN_L),
    "co_dino-r50": ("co_dino", replace(_R50, **_CO)),  # type: ignore[arg-type]
    "co_dino-vit-l": ("co_dino", replace(_R50, **{**_CO, **_VIT_L})),  # type: ignore[arg-type]
    "co_dino-swin-l": ("co_dino", replace(_SWIN_L, **_CO)),  # type: ignore[arg-type]
}
_TINY = {
    "classes": 7,
    "queries": 20,
    "dim": 32,
    "ffn": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "groups": 8,
}
_TINY_BACKBONE = {
    "resnet": {"depths": (1, 1, 1, 1), "width": 8},
    "swin": {"depths": (2, 2, 2, 2), "width": 16, "heads": (1, 2, 4, 8), "window": 4},
    "vit": {
        "depths": (4,),
        "width": 32,
        "heads": (2,),
        "hidden": 43,
        "positions": 50,
        "window": 3,
        "windowed": (0, 1, 2),
    },
}


def tiny_config(name: str) -> DinoConfig:
    """The small relative of a full config: same levels and stages."""
    config = MODELS[name][1]
    return replace(config, **_TINY, **_TINY_BACKBONE[config.backbone])  # type: ignore[arg-type]


def load_random_dino(ref: str, *, labels: Path | str | None = None) -> Source:
    """A Source for `random:<name>` or `random:<name>/tiny` with a name of `MODELS`."""
    from .load import Source

    name, _, size = ref.removeprefix("random:").partition("/")
    family_name, config = MODELS[name]
    module = build(family_name, tiny_config(name) if size == "tiny" else config)
    family = BY_NAME[family_name]
    title = ref.removeprefix("random:").replace("/", "-")
    numbers = () if labels_for(module.config.classes) else tuple(map(str, range(module.config.classes)))
    spec, _note = make_spec(family, module.config, labels=labels, stored=numbers, name=title)
    provenance = Provenance(ref, "", sum(p.numel() for p in module.parameters()), versions=versions())
    return Source(module, spec, family, provenance)


def build(family: str, config: DinoConfig, *, attend_padding: bool = False) -> Dino:
    """The model with seeded weights, eval mode; nothing is zero or one, which would hide errors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = CoDino(config, attend_padding=attend_padding) if family == "co_dino" else Dino(config)
        keep_variance(module)
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                parameter.data += torch.randn_like(parameter) * 0.05
            elif name.endswith(("_embed", "bias_table")):
                parameter.data.normal_()
            elif "sampling_offsets" in name:
                # About a cell at level 0, so that samples leave their cell, and some the map.
                parameter.data *= 3
            elif name.endswith("layers.2.weight"):
                parameter.data *= 0.3
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.data.uniform_(0.6, 1.6)
            elif name.endswith("running_mean"):
                buffer.data.normal_(0, 0.1)
    return module.eval().requires_grad_(False)
