"""ResNet backbones under timm's names: every key, whole checkpoints of both config styles, and DC5."""

from __future__ import annotations

import json
import re

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
transformers = pytest.importorskip("transformers", reason="needs the 'export' extra")

from safetensors.torch import save_file
from torch import nn
from transformers import DetrImageProcessorPil

from detrt.errors import SourceError
from detrt.models.checkpoints.timm import RESNETS, dilate_last_stage, is_dilated, rename_key, rename_resnet, resnet_config
from detrt.models.families import BY_NAME
from detrt.models.families.sizes import TINY_DETR
from detrt.models.load import load_source
from detrt.models.random import build

HEAD = "model.backbone.model."


def timm_keys(name: str) -> list[str]:
    """Keys of timm's ResNet without its classifier, written from the paper's table and timm's names."""
    layer_type, depths, _ = RESNETS[name]
    convolutions = 2 if layer_type == "basic" else 3
    parts = ["conv1", "bn1"]
    for stage, depth in enumerate(depths, 1):
        for block in range(depth):
            for i in range(1, convolutions + 1):
                parts += [f"layer{stage}.{block}.conv{i}", f"layer{stage}.{block}.bn{i}"]
            # The first block of a stage has a shortcut where it changes the width or the size.
            if block == 0 and (stage > 1 or layer_type == "bottleneck"):
                parts += [f"layer{stage}.0.downsample.0", f"layer{stage}.0.downsample.1"]
    keys = []
    for part in parts:
        is_norm = re.search(r"bn\d$|downsample\.1$", part)
        leaves = ("weight", "bias", "running_mean", "running_var") if is_norm else ("weight",)
        keys += [f"{part}.{leaf}" for leaf in leaves]
    return keys


@pytest.mark.parametrize("name", RESNETS)
def test_every_key_has_its_place(name):
    with torch.device("meta"):
        model = transformers.ResNetBackbone(
            transformers.ResNetConfig(**{k: v for k, v in resnet_config({"backbone": name}).items() if k != "model_type"})
        )
    native = {HEAD + key for key in model.state_dict() if not key.endswith("num_batches_tracked")}
    renamed = [rename_key(HEAD + key) for key in timm_keys(name)]
    assert len(set(renamed)) == len(renamed)
    assert set(renamed) == native


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (
            "model.backbone.conv_encoder.model.conv1.weight",
            "model.backbone.conv_encoder.model.embedder.embedder.convolution.weight",
        ),
        ("backbone.model.layer4.2.bn3.bias", "backbone.model.encoder.stages.3.layers.2.layer.2.normalization.bias"),
        ("model.encoder.layers.0.fc1.weight", "model.encoder.layers.0.fc1.weight"),
        ("model.backbone.model.layer5.0.conv1.weight", "model.backbone.model.layer5.0.conv1.weight"),
        ("model.decoder.layer1.0.conv1.weight", "model.decoder.layer1.0.conv1.weight"),
    ],
)
def test_rename_key(key, expected):
    assert rename_key(key) == expected


def test_step_counters_are_dropped():
    state = {HEAD + "bn1.num_batches_tracked": torch.tensor(3), HEAD + "bn1.bias": torch.zeros(1)}
    assert list(rename_resnet(state)) == [HEAD + "embedder.embedder.normalization.bias"]


def native_detr():
    backbone = {**resnet_config({"backbone": "resnet18", "out_indices": [1, 2, 3, 4]})}
    return build(BY_NAME["detr"], {**TINY_DETR, "num_labels": 7, "backbone_config": backbone})


@pytest.fixture(scope="module")
def native():
    return native_detr()


def hub_name(key):
    """A key as it was before transformers 5 renamed modules; the checkpoints on the hub have these."""
    key = key.replace("model.backbone.", "model.backbone.conv_encoder.").replace(".o_proj.", ".out_proj.")
    return key.replace(".mlp.fc", ".fc")


def write_timm(folder, module, backbone_fields, rename=lambda key: key):
    """Save a model as checkpoints of the hub are: timm's names in the backbone."""
    module.save_pretrained(folder)
    DetrImageProcessorPil().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("backbone_config", None)
    (folder / "config.json").write_text(json.dumps({**config, **backbone_fields}))
    back = {rename_key(HEAD + key): HEAD + key for key in timm_keys("resnet18")}
    state = {rename(back.get(key, key)): value.contiguous() for key, value in module.state_dict().items()}
    assert sum(".model.layer" in key for key in state) > 60
    state[rename(HEAD) + "bn1.num_batches_tracked"] = torch.tensor(9)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


OLD = {"backbone": "resnet18", "use_timm_backbone": True, "backbone_config": None, "use_pretrained_backbone": True}
NEW = {"backbone_config": {"model_type": "timm_backbone", "backbone": "resnet18", "out_indices": [1, 2, 3, 4]}}
PIXELS = torch.rand(1, 3, 96, 128, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rename", (str, hub_name), ids=("new names", "hub names"))
@pytest.mark.parametrize("fields", (OLD, NEW), ids=("old config", "new config"))
def test_checkpoint_with_timm_names_equals_the_native_one(fields, rename, native, tmp_path):
    write_timm(tmp_path, native, fields, rename)
    loaded = load_source(str(tmp_path)).module
    ours = {k: v for k, v in loaded.state_dict().items() if not k.endswith("num_batches_tracked")}
    theirs = {k: v for k, v in native.state_dict().items() if not k.endswith("num_batches_tracked")}
    assert list(ours) == list(theirs)
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    with torch.no_grad():
        expected, got = native(pixel_values=PIXELS), loaded(pixel_values=PIXELS)
    assert torch.equal(expected.logits, got.logits) and torch.equal(expected.pred_boxes, got.pred_boxes)


DC5 = {
    "old config": {**OLD, "dilation": True},
    "new config": {"dilation": True, "backbone_config": {**NEW["backbone_config"], "output_stride": 16}},
    "only in the backbone": {"dilation": False, "backbone_config": {**NEW["backbone_config"], "output_stride": 16}},
}


@pytest.mark.parametrize("fields", DC5.values(), ids=DC5)
def test_dc5_checkpoint_has_twice_the_resolution(fields, native, tmp_path):
    write_timm(tmp_path, native, fields)
    backbone = load_source(str(tmp_path)).module.model.backbone.model
    with torch.no_grad():
        last = backbone(PIXELS).feature_maps[-1]
        plain = native.model.backbone.model(PIXELS).feature_maps[-1]
    assert tuple(last.shape[2:]) == (6, 8)
    assert tuple(plain.shape[2:]) == (3, 4)


@pytest.mark.parametrize("name", ("resnet18", "resnet50"))
def test_dilation_is_torchvisions_rule(name):
    """torchvision: `_make_layer(dilate=True)` multiplies the dilation by the stride and sets the stride to 1;
    the first block still gets the previous dilation, the later ones the new; padding equals dilation. Its
    basic blocks take no dilation; there it is timm's rule, in which the block's second convolution has the new one.
    """
    settings = {k: v for k, v in resnet_config({"backbone": name}).items() if k != "model_type"}
    with torch.device("meta"):
        backbone = transformers.ResNetBackbone(transformers.ResNetConfig(**settings))
    before = [c for stage in backbone.encoder.stages[:-1] for c in stage.modules() if isinstance(c, nn.Conv2d)]
    untouched = [(c.stride, c.dilation) for c in before]
    dilate_last_stage(backbone)
    assert [(c.stride, c.dilation) for c in before] == untouched
    previous, dilation = 1, 2
    for index, block in enumerate(backbone.encoder.stages[-1].layers):
        spatial = [c for c in block.layer.modules() if isinstance(c, nn.Conv2d) and c.kernel_size == (3, 3)]
        first = previous if index == 0 else dilation
        wanted = [first] + [dilation] * (len(spatial) - 1)
        assert [c.dilation for c in spatial] == [(d, d) for d in wanted]
        assert [c.padding for c in spatial] == [(d, d) for d in wanted]
        assert {c.stride for c in block.modules() if isinstance(c, nn.Conv2d)} == {(1, 1)}
        ones = [c for c in block.modules() if isinstance(c, nn.Conv2d) and c.kernel_size == (1, 1)]
        assert all(c.dilation == (1, 1) and c.padding == (0, 0) for c in ones)


def test_other_backbones_and_strides_are_refused_by_name(native, tmp_path):
    with pytest.raises(SourceError, match=r"timm's 'swin_tiny'; detrt reads resnet18"):
        resnet_config({"backbone": "swin_tiny"})
    with pytest.raises(SourceError, match="output_stride 8"):
        is_dilated({}, {"output_stride": 8})
    assert resnet_config({"backbone": "resnet50.a1_in1k"})["depths"] == [3, 4, 6, 3]
    write_timm(tmp_path, native, {**OLD, "backbone": "mobilenetv3"})
    with pytest.raises(SourceError, match="timm's 'mobilenetv3'"):
        load_source(str(tmp_path))


def test_missing_backbone_weights_are_named(native, tmp_path):
    write_timm(tmp_path, native, {**OLD, "backbone": "resnet34"})
    with pytest.raises(SourceError, match=r"lacks \d+ of the model's weights.*backbone"):
        load_source(str(tmp_path))
