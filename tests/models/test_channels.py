"""Models of other images than RGB are refused when they are read, whatever their family and file."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")

from authors_files import CASES, module_of, write_file
from checkpoint_folders import save_folder
from random_rows import MODELS, OWN_MODELS, TEXT_MODELS
from safetensors.torch import load_file, save_file
from torch import nn

from detrt.backends.torch.session import open_torch
from detrt.detector import Detector
from detrt.errors import SourceError
from detrt.models.checks import check_channels
from detrt.models.load import load_source


class Reached(Exception):
    """The first convolution of a model runs."""


@pytest.mark.parametrize("name", [*MODELS, *OWN_MODELS, *TEXT_MODELS])
def test_the_convolution_that_is_looked_at_reads_the_images(name, tiny):
    source = tiny(name)
    ran = []

    def first(module, given):
        ran.append((module, tuple(given[0].shape)))
        raise Reached

    convolutions = [one for one in source.module.modules() if isinstance(one, (nn.Conv2d, nn.Conv3d))]
    hooks = [one.register_forward_pre_hook(first) for one in convolutions]
    prompt = {} if source.spec.text is None else {"prompt": "a cat."}
    try:
        with pytest.raises(Exception) as raised:
            Detector(open_torch(source))(np.zeros((64, 64, 3), np.uint8), **prompt)
    finally:
        for hook in hooks:
            hook.remove()
    assert ran, raised.value
    module, shape = ran[0]
    assert module is convolutions[0] and shape[1] == 3
    check_channels(source.module, name)


FOLDERS = [
    ("detr", 1),
    ("rt_detr_v2", 4),
    ("d_fine", 4),
    ("yolos", 2),
    ("rt_detr", 6),
    ("deformable_detr", 1),
    ("grounding_dino", 4),
]


@pytest.mark.parametrize(("name", "channels"), FOLDERS, ids=[f"{name}-{channels}" for name, channels in FOLDERS])
def test_a_folder(name, channels, tiny, tmp_path):
    save_folder(tiny(name), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for key, value in state.items():
        if value.ndim == 4 and value.shape[1] == 3:
            state[key] = value.mean(1, keepdim=True).repeat(1, channels, 1, 1).contiguous()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    for part in (config, config.get("backbone_config") or {}):
        if "num_channels" in part:
            part["num_channels"] = channels
        if "stem_channels" in part:
            part["stem_channels"][0] = channels
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=f"images of {channels} channels?, and detrt gives every model 3"):
        load_source(str(tmp_path))


@pytest.mark.parametrize("case", ["detr", "rt_detr_v2", "d_fine", "deimv2", "rf_detr", "deimv2-dinov3", "ecseg"])
def test_a_file_of_the_authors(case, tmp_path):
    path, labels = write_file(case, tmp_path / "model.pth", module_of(case))
    file = torch.load(path)
    for key, value in file["model"].items():
        if value.ndim == 4 and value.shape[1] == 3:
            file["model"][key] = value.mean(1, keepdim=True).repeat(1, 4, 1, 1)
    torch.save(file, path)
    with pytest.raises(SourceError, match="images of 4 channels"):
        load_source(f"ckpt:{path}", family=CASES[case][1], labels=labels)
