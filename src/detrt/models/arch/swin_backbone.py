"""detrt's Swin with the weights of a transformers `SwinBackbone`.

transformers' own Swin pads and slices by Python branches on sizes, which a trace turns into constants without
an error; and it projects queries, keys and values one by one, and makes its shift mask anew in every block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ExportError
from .swin import Swin


def from_transformers_swin(backbone: Any) -> Swin:
    """detrt's Swin with the weights of a transformers `SwinBackbone`; the same function at any size.

    Raises:
        ExportError: a Swin with settings that no published detector has.
    """
    config = backbone.config
    facts = {"use_absolute_embeddings": False, "qkv_bias": True, "patch_size": 4, "hidden_act": "gelu"}
    wrong = {name: getattr(config, name) for name, value in facts.items() if getattr(config, name) != value}
    ratio = float(config.mlp_ratio)
    if wrong or ratio != int(ratio):
        raise ExportError(f"a Swin backbone with {wrong or {'mlp_ratio': ratio}}; detrt exports those with {facts}")
    stages = [int(name.removeprefix("stage")) - 1 for name in backbone.out_features]
    with torch.device("meta"):
        swin = Swin(config.embed_dim, config.depths, config.num_heads, config.window_size, stages, int(ratio))
    state = {
        key.removeprefix("swin."): tensor
        for key, tensor in backbone.state_dict().items()
        if not key.startswith("swin.layernorm.")  # of the classifier; a backbone does not use it
    }
    renamed: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if ".q_proj." in key:
            parts = [state[key.replace(".q_proj.", f".{name}_proj.")] for name in "qkv"]
            renamed[_swin_name(key)] = torch.cat(parts)
        elif ".k_proj." not in key and ".v_proj." not in key:
            renamed[_swin_name(key)] = tensor
    for name, module in swin.named_modules():
        if isinstance(module, nn.LayerNorm):
            inside = "blocks" in name
            module.eps = float(config.layer_norm_eps) if inside else 1e-5
        if hasattr(module, "relative_position_index"):
            index = type(module)(module.qkv.in_features, module.heads, module.window).relative_position_index
            module.relative_position_index = index
    swin.load_state_dict(renamed, strict=True, assign=True)
    return swin.eval().requires_grad_(False)


_SWIN_PARTS = (
    ("embeddings.patch_embeddings.projection.", "patch."),
    ("embeddings.norm.", "patch_norm."),
    ("encoder.layers.", "stages."),
    (".attention.q_proj.", ".attn.qkv."),
    (".attention.o_proj.", ".attn.proj."),
    (".attention.relative_position_bias.", ".attn."),
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
    (".mlp.", "."),
)


def _swin_name(key: str) -> str:
    if key.startswith("hidden_states_norms.stage"):
        stage, _, leaf = key.removeprefix("hidden_states_norms.stage").partition(".")
        return f"norms.{int(stage) - 1}.{leaf}"
    for old, new in _SWIN_PARTS:
        key = key.replace(old, new)
    return key
