"""Checkpoint folders: every family loads back equal, and every damaged or odd folder is refused by name."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
transformers = pytest.importorskip("transformers", reason="needs the 'export' extra")

from checkpoint_folders import save_folder, save_processor
from random_rows import MODELS
from safetensors.torch import load_file, save_file

from detrt.errors import SourceError, SpecError
from detrt.models.families import BY_NAME
from detrt.models.hub import _remote_code, weights_digest
from detrt.models.load import load_source
from detrt.models.random import build


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """name -> folder of a tiny model, written once; copy it before a change."""
    made = {}

    def save(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("checkpoint") / name
            save_folder(tiny(name), made[name])
        return made[name]

    return save


@pytest.fixture
def folder(saved, tmp_path):
    """A fresh copy of the tiny RT-DETR checkpoint."""
    return shutil.copytree(saved("rt_detr"), tmp_path / "model")


def edit_json(path, **changes):
    data = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**data, **changes}))


def edit_weights(folder, change, name="model.safetensors"):
    weights = load_file(folder / name)
    change(weights)
    save_file(weights, folder / name, metadata={"format": "pt"})


def same_model(a, b):
    ours, theirs = a.state_dict(), b.state_dict()
    assert list(ours) == list(theirs)
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


@pytest.mark.parametrize("name", MODELS)
def test_folder_loads_back_equal(name, saved, tiny):
    source, folder = tiny(name), saved(name)
    loaded = load_source(str(folder))
    same_model(loaded.module, source.module)
    assert loaded.family is source.family
    # RF-DETR's authors antialias, and transformers' processor of its folders does not.
    entry = replace(source.spec.input, antialias=False, dtype="float32") if name.startswith("rf_detr") else source.spec.input
    if name == "d_fine-seg":  # its author resizes without antialiasing; a folder without settings is read as transformers' D-FINE
        entry = replace(source.spec.input, antialias=True, dtype="uint8")
    assert (loaded.spec.input, loaded.spec.decode, loaded.spec.labels) == (
        entry,
        source.spec.decode,
        source.spec.labels,
    )
    assert loaded.spec.name == folder.name
    assert loaded.provenance.source == str(folder)
    assert len(loaded.provenance.checkpoint_sha256) == 64
    assert loaded.provenance.parameters == sum(p.numel() for p in source.module.parameters())
    assert not loaded.module.training
    assert {p.dtype for p in loaded.module.parameters()} == {torch.float32}
    size = max(source.spec.input.multiple_of * 2, 64) if source.spec.input.dynamic else source.spec.input.height
    pixels = torch.rand(1, 3, size, size)
    with torch.no_grad():
        # Of copies, whose weights have one alignment: those of a loaded file lie at any address, and kernels round by it.
        expected, got = (copy.deepcopy(module)(pixel_values=pixels) for module in (source.module, loaded.module))
    assert torch.equal(expected.logits, got.logits)
    assert torch.equal(expected.pred_boxes, got.pred_boxes)


@pytest.mark.parametrize("name", ("deimv2", "d_fine"))
def test_shared_box_head_is_read_back(name, tiny, tmp_path):
    """transformers stores it under a name that it does not read: the head would be random, silently."""
    settings = {**MODELS[name][1], **MODELS[name][2], "num_labels": 7, "share_bbox_head": True}
    module = build(BY_NAME[name], settings)
    module.save_pretrained(tmp_path)
    save_processor(tiny(name), tmp_path)
    same_model(load_source(str(tmp_path)).module, module)


def test_half_precision_weights_become_float32(folder, tiny):
    edit_weights(folder, lambda w: w.update({k: v.half() for k, v in w.items() if v.is_floating_point()}))
    module = load_source(str(folder)).module
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    key = "model.decoder.class_embed.0.weight"
    torch.testing.assert_close(module.state_dict()[key], tiny("rt_detr").module.state_dict()[key], atol=1e-3, rtol=0)


def test_sharded_safetensors(tiny, tmp_path):
    save_folder(tiny("rt_detr"), tmp_path, max_shard_size="200KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = load_source(str(tmp_path))
    same_model(loaded.module, tiny("rt_detr").module)


@pytest.fixture(params=["safetensors", "bin"])
def shards(request, tiny, tmp_path):
    """The files of a checkpoint in several, in either format."""
    save_folder(tiny("rt_detr"), tmp_path, max_shard_size="200KB")
    if request.param == "bin":
        index = tmp_path / "model.safetensors.index.json"
        text = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        (tmp_path / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()
        for path in tmp_path.glob("model-*"):
            torch.save(load_file(path), tmp_path / f"pytorch_{path.stem}.bin")
            path.unlink()
    return sorted(tmp_path.glob(f"*-000*.{request.param}"))


def test_missing_shards_are_named_with_what_to_do(shards, tiny):
    same_model(load_source(str(shards[0].parent)).module, tiny("rt_detr").module)
    for count, path in enumerate(shards[1:3], 1):
        path.unlink()
        with pytest.raises(
            SourceError, match=f"lacks {count} of the {len(shards)} files .*{path.name}; copy or download them into"
        ):
            load_source(str(path.parent))


@pytest.mark.parametrize("cut_to", [0, -100])
def test_damaged_shards_are_named_with_what_to_do(shards, cut_to):
    path = shards[1]
    path.write_bytes(path.read_bytes()[:cut_to])
    with pytest.raises(SourceError, match=rf"damaged or truncated, in {path.name}: .*copy, download or save"):
        load_source(str(path.parent))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ([], "has no 'metadata', or no 'weight_map'"),
        ({"weight_map": {"a": "model.safetensors"}}, "has no 'metadata'"),
        ({"metadata": {}, "weight_map": 5}, "or no 'weight_map'"),
        ({"metadata": {}, "weight_map": {}}, "or no 'weight_map'"),
        ({"metadata": {}, "weight_map": {"a": 5}}, "names the file 5, which is none beside it; refused"),
        ({"metadata": {}, "weight_map": {"a": "../other.safetensors"}}, r"'\.\./other\.safetensors', which is none beside it"),
        ({"metadata": {}, "weight_map": {"a": "a\0b"}}, "which is none beside it"),
    ],
    ids=str,
)
def test_damaged_indexes_of_weights(index, words, folder):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match=words):
        load_source(str(folder))


def test_a_shard_of_any_name_is_in_the_digest(folder):
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "other.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    before = weights_digest(folder)
    edit_weights(folder, lambda weights: weights["model.enc_output.0.weight"].add_(1), "other.safetensors")
    assert weights_digest(folder) != before


def test_pytorch_bin(folder, tiny):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    same_model(load_source(str(folder)).module, tiny("rt_detr").module)
    whole = (folder / "pytorch_model.bin").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"not a pickle at all"):
        (folder / "pytorch_model.bin").write_bytes(damaged)
        with pytest.raises(SourceError, match=str(folder)):
            load_source(str(folder))


def test_pickle_that_runs_code_is_refused(folder, tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "trap"), "w"))

    (folder / "model.safetensors").unlink()
    torch.save({"weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(SourceError, match=str(folder)):
        load_source(str(folder))
    assert not (tmp_path / "trap").exists()


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


DAMAGE = {
    "no config": (lambda f: (f / "config.json").unlink(), r"has neither config\.json"),
    "damaged config": (lambda f: (f / "config.json").write_text('{"model_type": '), r"config\.json' cannot be read as JSON"),
    "config of no model": (lambda f: (f / "config.json").write_text("[1]"), r"config\.json' has no model_type"),
    "unknown model_type": (
        lambda f: edit_json(f / "config.json", model_type="bert"),
        "'bert', which detrt does not know.*rt_detr_v2",
    ),
    "wrong type in the config": (lambda f: edit_json(f / "config.json", num_queries="many"), "num_queries.*'many'"),
    "endless config": (lambda f: edit_json(f / "config.json", encoder_layers=10**9), "encoder_layers 1000000000; at most 1000"),
    "endless names": (lambda f: edit_json(f / "config.json", num_labels=10**400), r"num_labels 10{39} \.\.\.; at most 1000000"),
    "endless backbone": (
        lambda f: edit_json(f / "config.json", text_config={"num_hidden_layers": 10**9}),
        "num_hidden_layers 1000000000",
    ),
    "impossible config": (lambda f: edit_json(f / "config.json", d_model=-8), "cannot be loaded"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"has no weights; expected one of model\.safetensors"),
    "truncated weights": (cut, "damaged or truncated.*copy, download or save"),
    "text as weights": (
        lambda f: (f / "model.safetensors").write_text("weights"),
        "damaged or truncated.*copy, download or save",
    ),
    "a Git LFS pointer": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n"),
        "a Git LFS pointer, not the file itself; run: git lfs pull",
    ),
    "a pickle as safetensors": (
        lambda f: torch.save({"a": torch.zeros(2)}, f / "model.safetensors"),
        r"a checkpoint of PyTorch; let its name end with \.pth",
    ),
    "missing keys": (
        lambda f: edit_weights(f, lambda w: [w.pop(k) for k in list(w) if "enc_score_head" in k]),
        r"lacks 2 of the model's weights.*model\.enc_score_head\.bias",
    ),
    "head of another size": (
        lambda f: edit_json(f / "config.json", id2label={"0": "a"}, label2id={"a": 0}),
        r"another shape, e\.g\. .*class_embed.* config\.json names 1 class \(id2label\), and the weights are of 7;",
    ),
    "names of torch.compile": (
        lambda f: edit_weights(f, lambda w: [w.__setitem__(f"_orig_mod.{k}", w.pop(k)) for k in list(w)]),
        r"All names in it begin with '_orig_mod\.', of a wrapper around the model",
    ),
    "quantized weights": (
        lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
        r"is quantized \(quantization_config in config\.json, method 'bitsandbytes'\); give the float checkpoint",
    ),
    "NaN in a weight": (
        lambda f: edit_weights(f, lambda w: w["model.enc_output.0.weight"].fill_(float("nan"))),
        r"NaN or infinite weights in 1 tensor, e\.g\. model\.enc_output\.0\.weight",
    ),
    "infinity in a running mean": (
        lambda f: edit_weights(f, lambda w: next(v for k, v in w.items() if k.endswith("running_mean")).fill_(float("inf"))),
        r"infinite weights in 1 tensor, e\.g\. .*running_mean",
    ),
    "own code": (
        lambda f: edit_json(f / "config.json", auto_map={"AutoModelForObjectDetection": "modeling_own.Own"}),
        r"own code \(modeling_own\.py\).*`trust_remote_code`",
    ),
    "damaged auto_map": (lambda f: edit_json(f / "config.json", auto_map="modeling_own.Own"), r"own code \(modeling_own\.py\)"),
}


@pytest.mark.parametrize(("change", "words"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(change, words, folder):
    change(folder)
    with pytest.raises(SourceError, match=words) as caught:
        load_source(str(folder))
    assert str(folder) in str(caught.value)


def test_names_of_a_config_are_stripped_and_empty_ones_leave_their_id_free(folder):
    """Names that were read from the lines of a file often end with the line."""
    names = {"0": "a\n", "1": " b ", "2": "", "3": "c\r\n", "4": " ", "5": "d", "6": "e"}
    edit_json(folder / "config.json", id2label=names, label2id={name: int(key) for key, name in names.items()})
    assert load_source(str(folder)).spec.labels == {0: "a", 1: "b", 3: "c", 5: "d", 6: "e"}


def test_trusted_code_that_is_missing_is_named(folder):
    edit_json(folder / "config.json", auto_map={"AutoModelForObjectDetection": "modeling_own.Own"})
    with pytest.raises(SourceError, match="modeling_own"):
        load_source(str(folder), trust_remote_code=True)
    (folder / "modeling_own.py").write_text("class Own(:\n")
    with pytest.raises(SourceError, match=str(folder)):
        load_source(str(folder), trust_remote_code=True)


@pytest.mark.parametrize(
    ("auto_map", "files"),
    [
        ({"AutoModel": "modeling_a.A", "AutoConfig": "config_a.A"}, ["config_a.py", "modeling_a.py"]),
        ({"AutoModel": "org/repo--modeling_a.A"}, ["modeling_a.py"]),
        ({"AutoTokenizer": ["tok.Slow", None]}, ["tok.py"]),
        (None, []),
    ],
)
def test_names_of_remote_code(auto_map, files):
    assert _remote_code(auto_map) == files


LABELS = ["a", "b", "c", "d", "e", "f", "g"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("names.txt", "\n".join(LABELS) + "\n\n", dict(enumerate(LABELS))),
        ("names.json", json.dumps(LABELS), dict(enumerate(LABELS))),
        ("names.json", '{"6": "last", "0": "first"}', {0: "first", 6: "last"}),
    ],
)
def test_labels_file(name, text, expected, folder, tmp_path):
    (tmp_path / name).write_text(text)
    assert load_source(str(folder), labels=tmp_path / name).spec.labels == expected


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("short.txt", "a\nb\n", r"short\.txt' has 2 names .*7 classes"),
        ("long.txt", "a\n" * 8, r"long\.txt' has 8 names"),
        ("empty.txt", "", r"empty\.txt' has 0 names"),
        ("long.json", json.dumps(["x"] * 8), r"long\.json' has 8 names"),
        ("ids.json", '{"seven": "a"}', r"ids\.json' must hold"),
        ("text.json", '"abcdefg"', r"text\.json' must hold"),
        ("cut.json", '["a", ', r"cut\.json' cannot be read"),
        ("gone.txt", None, r"no labels file '.*gone\.txt'; check the path"),
    ],
)
def test_labels_that_do_not_fit(name, text, words, folder, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match=words):
        load_source(str(folder), labels=tmp_path / name)


def test_references_that_name_nothing(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    beside = tmp_path / "tuned" / "config.json"
    beside.parent.mkdir()
    beside.write_text("{}")
    weights = beside.with_name("model.safetensors")
    save_file({"model.backbone.weight": torch.zeros(1)}, weights)
    for ref, words in {
        str(file): r"model\.safetensors' is a file; give the folder.*, or ckpt:.*model\.safetensors",
        "PekingU/rtdetr_r50vd": r"write 'hf:PekingU/rtdetr_r50vd'",
        str(tmp_path / "gone"): "there is no folder '.*gone'; check the path.*ckpt:FILE",
        f"ckpt:{weights}": r"model.safetensors' is a file of a checkpoint in transformers format; give its folder: .*tuned$",
        str(beside): r"is a file of a checkpoint in transformers format; give its folder: .*tuned$",
        str(tmp_path): r"has neither config\.json",
        "hf:detr": "'hf:detr' is not a hub reference",
        "hf:a/b/c": "'hf:a/b/c' is not a hub reference",
        "ckpt:dfine.pth": "'ckpt:dfine.pth': the file 'dfine.pth' is not there",
        "embedded:fruit": "no embedded model 'embedded:fruit'",
        "random:yolo": "no random model 'random:yolo'.*yolos",
        "random:detr/small": "'random:detr/small'",
        "hf:PekingU/rtdetr_r50vd@main": "'PekingU/rtdetr_r50vd' is not in the local cache.*HF_HUB_OFFLINE",
    }.items():
        with pytest.raises(SourceError, match=words):
            load_source(ref)


@pytest.mark.parametrize("name", ["rt_detr", "rt_detr_v2", "d_fine"])
def test_anchors_for_one_size_do_not_fix_the_size(name, saved, tmp_path):
    """The stored anchors fit one size, and tracing at another ended in a message about shapes that blamed torch."""
    folder = shutil.copytree(saved(name), tmp_path / "model")
    edit_json(folder / "config.json", anchor_image_size=[96, 128])
    loaded = load_source(str(folder))
    assert "anchor_image_size [96, 128]" in loaded.notes[0]
    stored = transformers.AutoModelForObjectDetection.from_pretrained(folder).eval()
    pixels = torch.rand(1, 3, 96, 128, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want, got, other = stored(pixels), loaded.module(pixels), loaded.module(torch.rand(1, 3, 64, 96))
    torch.testing.assert_close(got.logits, want.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.pred_boxes, want.pred_boxes, atol=1e-5, rtol=0)
    assert torch.isfinite(other.logits).all()
