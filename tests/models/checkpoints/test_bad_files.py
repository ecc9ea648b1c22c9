"""Checkpoint files that must be refused with a reason, and never run."""

from __future__ import annotations

import argparse
import gzip
import pickle
import re
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the 'export' extra")

import torch
from key_lists import random_state
from payload import Payload
from safetensors.torch import save_file

from detrt.errors import SourceError, SpecError
from detrt.models.checkpoints.loader import names_start
from detrt.models.checkpoints.state_file import StateFile, read_state
from detrt.models.labels import choose, labels_for, read_labels
from detrt.models.load import load_source

SMALL = "deimv2_hgnetv2_atto_coco"


@pytest.fixture(scope="module")
def state():
    return random_state(SMALL)


@pytest.fixture
def save(tmp_path):
    def write(content, name="model.pth"):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        return f"ckpt:{path}"

    return write


def refuse(reference, words, **options):
    with pytest.raises(SourceError, match=words) as caught:
        load_source(reference, **options)
    return str(caught.value)


@pytest.mark.parametrize("zipped", (True, False))
def test_code_in_a_pickle_is_refused_and_not_run(zipped, save, tmp_path, state):
    target = tmp_path / "was-run"
    path = tmp_path / "code.pth"
    torch.save({"model": state, "hook": Payload(target)}, path, _use_new_zipfile_serialization=zipped)
    message = refuse(f"ckpt:{path}", "refused and not run")
    assert "mkdir" in message and not target.exists()


def test_a_bare_pickle_with_code_is_refused_and_not_run(save, tmp_path):
    target = tmp_path / "was-run"
    refuse(save(pickle.dumps(Payload(target)), "model.pt"), "refused and not run|damaged")
    assert not target.exists()


def test_a_whole_module_is_code(save):
    assert "torch.nn" in refuse(save(torch.nn.Linear(2, 2)), "refused and not run")


def test_settings_of_a_trainer_are_named(save, state, monkeypatch):
    package = types.ModuleType("mmengine")
    package.ConfigDict = type("ConfigDict", (dict,), {"__module__": "mmengine"})
    monkeypatch.setitem(sys.modules, "mmengine", package)
    refuse(
        save({"state_dict": state, "cfg": package.ConfigDict(a=1)}),
        r"mmengine\.ConfigDict.*setting of the trainer",
    )


def test_ultralytics_are_not_supported(save, state, monkeypatch):
    """Their checkpoints hold modules: saving a state dict would only lead to keys that are not known."""
    for name in ("ultralytics", "ultralytics.nn", "ultralytics.nn.tasks"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = sys.modules["ultralytics.nn.tasks"]
    module.RTDETRDetectionModel = type("RTDETRDetectionModel", (dict,), {"__module__": "ultralytics.nn.tasks"})
    message = refuse(save({"model": module.RTDETRDetectionModel()}), "ultralytics are not supported.*hf:PekingU")
    assert "state dict" not in message


@pytest.mark.parametrize("content", [b"hello, this is text", bytes(range(256)) * 4, pickle.dumps({1: b"x"})[:-4], b"junk"])
def test_advice_of_torch_is_not_passed_on(content, save):
    """torch says how to run the code in a file; detrt warns against it."""
    message = refuse(save(content, "junk.pth"), "damaged or not a PyTorch checkpoint|holds")
    assert "weights_only" not in message and "arbitrary code" not in message and len(message) < 300


def test_a_damaged_storage_key(save, state, tmp_path):
    """torch asserts that the storages of its older format are all there."""
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "old.pth").read_bytes()
    key = re.search(rb"X.\0\0\0(\d{9,})", whole)[1]
    refuse(save(whole.replace(key, key[:-1] + b"p", 1), "cut.pth"), "damaged or not a PyTorch checkpoint: storage key")


def test_harmless_types_are_read(save, state):
    args = argparse.Namespace(dilation=True, nheads=8)
    path = save({"model": state, "args": args, "best": np.float64(0.4), "epoch": np.int64(3)})
    found = read_state(Path(path.removeprefix("ckpt:")), path)
    assert found.args == {"dilation": True, "nheads": 8} and set(found.tensors) == set(state)


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (b"", "model.pth", "empty file"),
        (b"<html>404 not found</html>", "model.pth", "is a web page"),
        (b"{}", "model.safetensors", "not a safetensors file"),
        (b"x", "model.onnx.txt", "ends with '.txt'"),
        (b"x", "model-00001-of-00003.safetensors", "one shard"),
        (b"{}", "model.safetensors.index.json", "one shard"),
        ([1, 2], "model.pth", "holds a list, not a state dict"),
        ({"epoch": 3, "best": 0.4}, "model.pth", "holds no state dict: its keys are epoch, best"),
        (
            {"foo.weight": torch.zeros(2), "bar.weight": torch.zeros(2)},
            "model.pth",
            "keys of no model that detrt knows .*foo.weight",
        ),
    ],
)
def test_files_that_are_no_checkpoints(content, name, words, save):
    refuse(save(content, name), words)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("detr.transformer.decoder.norm.weight", "panoptic segmentation"),
        ("backbone.0.encoder.res_layers.0.blocks.0.branch2a.conv.weight", "an LW-DETR with a ResNet"),
        ("backbone.0.projector.stages_sampling.0.0.3.weight", "an LW-DETR with a map of stride 4"),
        ("encoder.backbone.blocks.0.layer_scale1.lambda1", "EoMT with DINOv3.*hf:tue-mps"),
        ("encoder.backbone.blocks.0.mlp.w12.weight", "EoMT with a giant ViT.*hf:tue-mps"),
        ("transformer.encoder.layers.0.attentions.0.attention_weights.weight", "of detrex; export it to ONNX"),
        ("tgt_embed.weight", "DAB-Deformable-DETR or DN-DETR"),
        ("transformer.refpoint_embed.weight", "a DINO of one stage"),
        ("decoder.tgt_embed.weight", "learn_query_content"),
        ("encoder.encoder.1.layers.0.norm1.weight", "attends on several levels"),
    ],
)
def test_relatives_are_refused_by_name(key, words, save, state):
    refuse(save({"model": {**state, key: torch.zeros(2)}}), words)


def test_missing_files_and_unknown_families(tmp_path, save, state):
    refuse("ckpt:gone.pth", "'gone.pth' is not there")
    refuse(f"ckpt:{tmp_path}", "a folder; give the file in it")
    refuse(save({"model": state}), "no family 'yolo'.*detr, detr-dc5", family="yolo")


def test_one_dictionary_under_many_names_is_searched_once(tmp_path):
    state = {f"layers.{number}.weight": torch.zeros(2) for number in range(3)}
    inner: dict = state
    for _ in range(4):
        inner = {f"part{number}": inner for number in range(300)}
    torch.save({"model": state, "others": inner}, tmp_path / "many.pth")
    assert read_state(tmp_path / "many.pth", "ckpt:many.pth").tensors.keys() == state.keys()


MISTAKEN = {
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "model.pth", "git lfs pull"),
    "LFS of safetensors": (b"version https://git-lfs.github.com/spec/v1\n", "model.safetensors", "git lfs pull"),
    "gzip": (gzip.compress(b"x"), "model.pth", "compressed with gzip; unpack it"),
    "HDF5": (b"\x89HDF\r\n\x1a\n", "model.pth", "an HDF5 file"),
    "web page": (b"\xef\xbb\xbf\r\n<!DOCTYPE html>", "model.bin", "is a web page"),
}


@pytest.mark.parametrize("what", MISTAKEN)
def test_a_file_that_is_something_else_is_named(what, save):
    content, name, words = MISTAKEN[what]
    refuse(save(content, name), words)


def test_other_files_of_torch_are_named(save, state, tmp_path):
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "script.pt")
    refuse(f"ckpt:{tmp_path / 'script.pt'}", "a TorchScript program")
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "program.pt2")
    (tmp_path / "program.pt2").rename(tmp_path / "program.pt")
    refuse(f"ckpt:{tmp_path / 'program.pt'}", "a program of torch.export")
    whole = save({"model": state}).removeprefix("ckpt:")
    with zipfile.ZipFile(tmp_path / "packed.pth", "w") as archive:
        archive.write(whole, "model.pth")
    refuse(f"ckpt:{tmp_path / 'packed.pth'}", r"an archive of 1 file \(model\.pth\); unpack it")
    save_file(state, tmp_path / "other.pth")
    refuse(f"ckpt:{tmp_path / 'other.pth'}", "let its name end with .safetensors")
    (tmp_path / "other.safetensors").write_bytes(Path(whole).read_bytes())
    refuse(f"ckpt:{tmp_path / 'other.safetensors'}", "let its name end with .pth")


@pytest.mark.parametrize("name", ("model.pth.tar", "MODEL.PTH"))
def test_other_suffixes_of_checkpoints(name, save, state):
    assert read_state(Path(save({"model": state}, name).removeprefix("ckpt:")), "x").tensors.keys() == state.keys()


OPTIMIZERS = {
    "moments": lambda state: {"exp_avg": state, "step": 3},
    "moments inside": lambda state: {"optim_state": {"exp_avg": state, "exp_avg_sq": state}},
    "by parameter": lambda state: {"optim": {"state": {key: {"exp_avg": value} for key, value in state.items()}}},
    "gradients": lambda state: {"gradients": state},
    "momentum": lambda state: {"momentum_buffer": state},
    "optimizer": lambda state: {"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []}, "epoch": 3},
}


@pytest.mark.parametrize("how", OPTIMIZERS)
def test_what_an_optimizer_keeps_is_no_model(how, save, state):
    refuse(save(OPTIMIZERS[how](state)), "holds no state dict")
    assert load_source(save({"model": state, **OPTIMIZERS[how](state)})).notes


NAMES = [f"thing {i}" for i in range(80)]
BY_ID = dict(enumerate(NAMES))
NAMED = {
    "names": {"names": NAMES},
    "names by id": {"names": BY_ID},
    "class_names": {"class_names": tuple(NAMES)},
    "classes": {"classes": NAMES},
    "id2label": {"id2label": BY_ID},
    "id2label of text": {"config": {"id2label": {str(key): name for key, name in BY_ID.items()}}},
    "label2id": {"label2id": {name: key for key, name in BY_ID.items()}},
    "class_to_idx": {"class_to_idx": {name: key for key, name in BY_ID.items()}},
    "categories": {"categories": [{"id": key, "name": name} for key, name in BY_ID.items()]},
    "settings of Lightning": {"hyper_parameters": {"classes": NAMES}},
    "its data": {"datamodule_hyper_parameters": {"class_names": NAMES}},
    "arguments": {"args": argparse.Namespace(names=NAMES)},
    "mmdetection": {"meta": {"CLASSES": NAMES}},
}


@pytest.mark.parametrize("where", NAMED)
def test_class_names_in_a_file_are_read(where, save, state):
    assert load_source(save({"model": state, **NAMED[where]})).spec.labels == BY_ID


@pytest.mark.parametrize("other", ({"names": 80}, {"classes": 80}, {"names": ["a"]}, {"classes": {"a": "b"}}, {"names": [1, 2]}))
def test_what_is_no_class_names_is_left(other, save, state):
    assert load_source(save({"model": state, **other})).spec.labels == labels_for(80)


def test_stored_names_for_one_column_less_need_a_stated_start(save, state):
    path = save({"model": state, "class_names": NAMES[:79]})
    with pytest.raises(SpecError, match=r"has 79 names, and the head has 80 columns.*`labels_start=1`"):
        load_source(path)
    assert load_source(path, labels_start=1).spec.labels == {number + 1: name for number, name in enumerate(NAMES[:79])}


AVERAGES = {
    "ema_weights": {"callbacks": {"EMA": {"ema_weights": [torch.ones(2), torch.ones(3)]}}},
    "shadow_params": {"ema": {"shadow_params": [torch.ones(2), torch.ones(3)], "decay": 0.9}},
}


@pytest.mark.parametrize("how", AVERAGES)
def test_an_average_without_names_is_told(how, save, state):
    assert f"the moving average in '{'callbacks.EMA.' if how == 'ema_weights' else 'ema.'}{how}'" in " ".join(
        load_source(save({"model": state, **AVERAGES[how]})).notes
    )


@pytest.mark.parametrize("place", ("swa_model", "swa_state_dict", "shadow", "state_dict_ema", "averaged_model"))
def test_an_average_under_any_of_its_names_is_taken(place, save, state):
    other = {key: value * 0.5 if key.startswith("backbone") and key.endswith("weight") else value for key, value in state.items()}
    found = load_source(save({"model": other, place: {f"module.{key}": value for key, value in state.items()}}))
    plain = load_source(save({"model": state}))
    assert all(torch.equal(a, b) for a, b in zip(found.module.parameters(), plain.module.parameters(), strict=True))


def test_the_log_of_mmengine_is_left_out(save, state, monkeypatch):
    """A class that pickles as HistoryBuffer does: its methods by getattr, its numbers as arrays."""
    for name in ("mmengine", "mmengine.logging", "mmengine.logging.history_buffer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))

    class HistoryBuffer:
        def __init__(self):
            self.log = np.arange(3.0)

        def __getstate__(self):
            return {"statistics_methods": {"mean": HistoryBuffer.mean}, **self.__dict__}

        def mean(self):
            return self.log.mean()

    for key in ("__module__", "__qualname__"):
        setattr(HistoryBuffer, key, {"__module__": "mmengine.logging.history_buffer", "__qualname__": "HistoryBuffer"}[key])
    HistoryBuffer.mean.__module__, HistoryBuffer.mean.__qualname__ = HistoryBuffer.__module__, "HistoryBuffer.mean"
    sys.modules[HistoryBuffer.__module__].HistoryBuffer = HistoryBuffer
    path = save({"state_dict": state, "message_hub": {"log_scalars": {"loss": HistoryBuffer()}, "best": np.int64(3)}})
    assert b"HistoryBuffer" in zipfile.ZipFile(path.removeprefix("ckpt:")).read("model/data.pkl")
    assert load_source(path).spec.labels == labels_for(80)


def test_arrays_of_numpy_are_tensors_and_never_objects(save, state):
    arrays = {key: np.asfortranarray(value.numpy()) for key, value in state.items()}
    found, plain = load_source(save({"model": arrays})), load_source(save({"model": state}, "plain.pth"))
    assert all(torch.equal(a, b) for a, b in zip(found.module.parameters(), plain.module.parameters(), strict=True))
    objects = np.empty(2, object)
    objects[:] = ["a", "b"]
    refuse(save({"model": {"x": objects}}), "damaged|holds no state dict|refused")


def test_cut_file(save, state, tmp_path):
    path = tmp_path / "whole.pth"
    torch.save({"model": state}, path)
    refuse(save(path.read_bytes()[:20000], "cut.pth"), "damaged or not a PyTorch checkpoint")


def test_half_the_keys(save, state):
    # Every other tensor of the decoder layers, so that the sizes can still be read.
    layers = [key for key in state if re.match(r"decoder\.decoder\.layers\.[12]\.", key)]
    kept = {key: tensor for key, tensor in state.items() if key not in layers[::2]}
    refuse(save({"model": kept}), rf"{len(layers[::2])} missing|missing \(e\.g\. model\.decoder\.layers\.1")
    first = dict(list(state.items())[: len(state) // 2])
    refuse(save({"model": first}), "keys of no model|incomplete")


def test_misshapen_and_unexpected(save, state):
    wrong = {**state, "decoder.pre_bbox_head.layers.0.weight": torch.zeros(3, 64)}
    refuse(
        save({"model": wrong}),
        r"1 misshapen \(e\.g\. decoder\.pre_bbox_head\.layers\.0\.weight \[3, 64\] instead of \[64, 64\]\)",
    )
    refuse(
        save({"model": {**state, "mask_head.weight": torch.zeros(3)}}),
        r"1 unexpected \(e\.g\. mask_head\.weight\)",
    )


@pytest.mark.parametrize("family", ("detr", "deformable_detr", "rt_detr", "d_fine", "rf_detr", "dino"))
def test_a_wrong_family_is_refused(family, save, state):
    refuse(save({"model": state}), "another family|leave `family` out|incomplete", family=family)


def test_quantised_tensors(save, state):
    key = "decoder.enc_score_head.weight"
    refuse(save({"model": {**state, key: state[key].to(torch.int8)}}), "is quantised")
    refuse(save({"model": {**state, "backbone.stem.stem1.conv.zero_point": torch.zeros(1)}}), "is quantised")


@pytest.mark.parametrize(
    ("change", "what"),
    (
        (lambda value: value.to(torch.complex64), "complex"),
        (lambda value: value.to_sparse(), "sparse"),
        (lambda value: value.to_sparse_csr(), "sparse"),
        (lambda value: value.to("meta"), "without values"),
    ),
    ids=("complex", "sparse", "csr", "meta"),
)
def test_other_kinds_of_tensors(change, what, save, state):
    key = "decoder.enc_score_head.weight"
    refuse(save({"model": {**state, key: change(state[key])}}), rf"{re.escape(key)} is {what}")


def test_not_a_number(save, state):
    key = "decoder.enc_score_head.weight"
    refuse(save({"model": {**state, key: state[key] * float("nan")}}), "NaN or infinite")


def test_d_fine_and_deim_have_the_same_keys(save):
    path = save({"model": random_state("dfine_hgnetv2_n_coco")})
    refuse(path, "`family=d_fine`, deim or rt_detr_v4")
    assert type(load_source(path, family="deim").module).__name__ == "DeimDFine"


def test_class_count_without_names(save, state, tmp_path):
    few = {
        k: (v[:7] if re.search(r"(score_head).*\.(weight|bias)$", k) else v[:8] if "denoising" in k else v)
        for k, v in state.items()
    }
    path = save({"model": few})
    refuse(path, r"7 classes .*known: 80 \(COCO\).*`labels=FILE`")
    names = tmp_path / "names.txt"
    names.write_text("a\nb\nc\nd\ne\nf\ng\n", "utf-8")
    assert load_source(path, labels=names).spec.labels[6] == "g"
    names.write_text("a\nb\n", "utf-8")
    with pytest.raises(SpecError, match="7 classes"):
        load_source(path, labels=names)


def test_label_sets():
    assert len(labels_for(80)) == len(labels_for(91)) == 80
    assert (labels_for(91)[1], labels_for(91)[13], labels_for(91)[90]) == (
        "person",
        "stop sign",
        "toothbrush",
    )
    assert 12 not in labels_for(91) and 0 not in labels_for(91)
    assert len(labels_for(365)) == len(set(labels_for(365).values())) == 365
    assert labels_for(366)[1] == labels_for(365)[0] == "Person"
    assert len(labels_for(1203)) == len(set(labels_for(1203).values())) == 1203
    assert labels_for(1203)[1202] == "zucchini"
    assert labels_for(20) is None


# What a file says of its origin -> column of the first of its names, by the code of those versions of rfdetr.
RF_DETR_FILES = {
    "1.4, roboflow": ({}, False, {"dataset_file": "roboflow"}, 1),
    "1.4, without a data set": ({}, False, {}, 1),
    "1.4, yolo": ({}, False, {"dataset_file": "yolo"}, 0),
    "1.6, roboflow": ({}, True, {"dataset_file": "roboflow"}, 0),
    "1.6, yolo": ({}, True, {"dataset_file": "yolo"}, 0),
    "1.6, lightning": ({"pytorch-lightning_version": "2.6.0"}, False, {"dataset_file": "roboflow"}, 0),
    "1.11": ({"rfdetr_version": "1.11.2"}, False, {}, 0),
}


@pytest.mark.parametrize("origin", RF_DETR_FILES)
def test_the_first_name_of_an_rf_detr_follows_version_and_data_set(origin):
    words, plain, args, first = RF_DETR_FILES[origin]
    file = StateFile({}, "weights", args, ("cat", "dog", "cow"), words=words, plain_args=plain)
    names, note = choose(4, stored=file.labels, first=names_start("rf_detr", file))
    assert names == {first: "cat", first + 1: "dog", first + 2: "cow"} and f"'cat' is column {first} (`labels_start`)" in note


@pytest.mark.parametrize("first", (0, 1))
@pytest.mark.parametrize("classes", (4, 80, 91, 366))
def test_a_head_that_kept_columns_of_its_pre_training_has_the_names_of_the_file(first, classes):
    names, note = choose(classes, stored=["keyboard", "computer mouse"], first=first)
    assert names == {first: "keyboard", first + 1: "computer mouse"} and f"'keyboard' is column {first}" in note


def test_the_names_of_a_label_set_keep_their_published_ids():
    coco = list(labels_for(91).values())
    assert choose(91, stored=coco, first=1)[0] == labels_for(91) == choose(91, stored=coco, first=0)[0]


def test_other_formats_have_a_name_for_each_column():
    assert names_start("dino", StateFile({}, "weights")) is None
    assert choose(4, stored={1: "cat", 3: "cow"})[0] == {1: "cat", 3: "cow"}
    assert choose(80, stored=["cat"])[1].startswith("class names of COCO, by their number; 1 name in")


@pytest.mark.parametrize("name", ("names.txt", "names.json"))
@pytest.mark.parametrize("start", (0, 1))
def test_fewer_names_than_columns_need_a_stated_start(name, start, tmp_path):
    path = tmp_path / name
    path.write_text("cat\ndog\n" if name.endswith("txt") else '["cat", "dog"]', "utf-8")
    with pytest.raises(SpecError, match=r"2 names, and the head has 3 columns.*`labels_start=0`.*`labels_start=1`"):
        read_labels(path, 3)
    assert read_labels(path, 3, start) == {start: "cat", start + 1: "dog"}
    with pytest.raises(SpecError, match=r"needs columns 2\.\.3, and the head has 0\.\.2"):
        read_labels(path, 3, 2)


def test_a_stated_start_is_the_same_for_every_way_in(save, state, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"c{i}" for i in range(79)), "utf-8")
    folder = tmp_path / "folder"
    load_source("random:rt_detr/tiny").module.save_pretrained(folder)
    few = tmp_path / "six.txt"
    few.write_text("a\nb\nc\nd\ne\nf\n", "utf-8")
    ways = [(save({"model": state}), names), ("random:rt_detr/tiny", few), (str(folder), few)]
    for ref, file in ways:
        extra = {"preprocess": "family-default"} if ref == str(folder) else {}
        first = file.read_text("utf-8").split("\n")[0]
        for start in (0, 1):
            source = load_source(ref, labels=file, labels_start=start, **extra)
            assert source.spec.labels[start] == first and source.provenance.options["labels_start"] == start
        with pytest.raises(SpecError, match="`labels_start="):
            load_source(ref, labels=file, **extra)
    for ref in ("random:rt_detr/tiny", str(folder)):
        with pytest.raises(SourceError, match="`labels_start=1` needs `labels="):
            load_source(ref, labels_start=1)
    with pytest.raises(SourceError, match="finds what a prompt asks for"):
        load_source("random:grounding_dino/tiny", labels_start=1)


def test_half_precision_is_said(save, state):
    half = {k: v.half() if v.is_floating_point() and "scale" not in k else v for k, v in state.items()}
    source = load_source(save({"model": half}))
    assert "half-precision tensors read as float32" in source.notes[0]
    assert all(p.dtype == torch.float32 for p in source.module.parameters())
