"""The demo detector: a stock RT-DETRv2 of about two million parameters."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig, RTDetrResNetConfig, RTDetrV2Config, RTDetrV2ForObjectDetection

from detrt.data.scenes.scene import CLASSES

INPUT_PX = 320
# Heads of transformers' classes: of the decoder's layers, and of the encoder's proposals.
CLASS_HEAD = re.compile(r"(class_embed|enc_score_head|enc_out_class_embed)(\.\d+)*$")
BOX_HEAD = re.compile(r"(bbox_embed|pre_bbox_head|enc_bbox_head|enc_out_bbox_embed)(\.\d+)*$")

PREPROCESSOR = {
    "image_processor_type": "RTDetrImageProcessor",
    "do_resize": True,
    "size": {"height": INPUT_PX, "width": INPUT_PX},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": False,
    "do_pad": False,
    "do_convert_annotations": True,
    "format": "coco_detection",
}


def demo_config() -> RTDetrV2Config:
    """Configuration of the demo detector; 100 queries, three decoder layers."""
    backbone = RTDetrResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 96, 144],
        depths=[1, 2, 2, 1],
        layer_type="basic",
        hidden_act="relu",
    )
    backbone.out_indices = [2, 3, 4]
    return RTDetrV2Config(
        backbone_config=backbone,
        freeze_backbone_batch_norms=False,
        encoder_hidden_dim=96,
        encoder_in_channels=[64, 96, 144],
        encoder_ffn_dim=256,
        encoder_attention_heads=6,
        hidden_expansion=0.5,
        d_model=128,
        decoder_in_channels=[96, 96, 96],
        decoder_ffn_dim=256,
        decoder_attention_heads=8,
        decoder_layers=3,
        num_queries=100,
        num_denoising=100,
        id2label=dict(enumerate(CLASSES)),
        label2id={name: k for k, name in enumerate(CLASSES)},
    )


def build_model(seed: int) -> RTDetrV2ForObjectDetection:
    """A new model with weights that train from scratch.

    The class's own initial values suit fine-tuning: they leave batch-norm gains near zero, so
    a model that starts from them passes no signal.
    """
    torch.manual_seed(seed)
    model = RTDetrV2ForObjectDetection(demo_config())
    start_values(model)
    nn.init.normal_(model.model.denoising_class_embed.weight, std=0.5)
    return model


def start_values(model: nn.Module) -> None:
    """Weights of a DETR of transformers that train from scratch, in place."""
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            if "sampling_offsets" in name or "attention_weights" in name:
                continue  # a ring of points around each query; the class sets this well
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    bias = -math.log((1 - 0.02) / 0.02)  # few queries hold an object at first
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and CLASS_HEAD.search(name):
            nn.init.constant_(module.bias, bias)
        elif (layers := getattr(module, "layers", None)) is not None and BOX_HEAD.search(name):
            nn.init.zeros_(layers[-1].weight)
            nn.init.zeros_(layers[-1].bias)


def run_in_bf16(module: nn.Module) -> None:
    """Let ``module`` compute in bfloat16 on a GPU and hand float32 on.

    Only backbone and encoder run so: box coordinates need more than bfloat16's eight bits.
    """
    inner = module.forward

    def widen(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.float() if value.is_floating_point() else value
        if isinstance(value, (list, tuple)):
            return type(value)(widen(item) for item in value)
        return value

    def forward(*args: object, **kwargs: object) -> object:
        with torch.autocast("cuda", torch.bfloat16):
            result = inner(*args, **kwargs)
        if hasattr(result, "last_hidden_state"):
            result.last_hidden_state = widen(result.last_hidden_state)
            return result
        return widen(result)

    module.forward = forward


def save_model(state: dict[str, torch.Tensor], config: RTDetrV2Config, folder: str | os.PathLike[str]) -> Path:
    """Write config, preprocessor and weights so that ``from_pretrained`` loads them; see `write_model`."""
    tied = ("class_embed.", "bbox_embed.")  # to model.decoder.*
    config.architectures = ["RTDetrV2ForObjectDetection"]
    return write_model(state, config, folder, tied, {"preprocessor_config": PREPROCESSOR})


def write_model(
    state: dict[str, torch.Tensor],
    config: PretrainedConfig,
    folder: str | os.PathLike[str],
    tied: tuple[str, ...],
    described: dict[str, dict],
) -> Path:
    """Write a folder in transformers format: weights, config, and the JSON files of `described` (name -> content).

    Weights whose names start with one of `tied` are left out. The config says float32, which is what the model is loaded as.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(state, folder, tied)
    config.dtype = torch.float32
    config.save_pretrained(folder)
    for name, content in described.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return folder


def save_weights(state: dict[str, torch.Tensor], folder: Path, tied: tuple[str, ...] = ()) -> None:
    """Write model.safetensors: matrices and kernels as float16, vectors (biases, norms and their statistics) as float32."""
    stored = {}
    for name, tensor in state.items():
        if name.startswith(tied):
            continue
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point() and tensor.ndim >= 2:
            tensor = tensor.half()
            if not torch.isfinite(tensor).all():
                raise ValueError(f"weight {name} does not fit float16 (a value is over 65504)")
        stored[name] = tensor.contiguous().clone()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
