"""`ckpt:` with DINO and Co-DINO files, from the file to detections' spec."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("detrt.models.load", reason="checkpoint files are read there")

from dino_reference import keys as key_lists
from dino_reference.weights import fill

from detrt.errors import SourceError
from detrt.models.load import load_source

RESNET = {"kind": "resnet", "depths": (1, 1, 1, 1), "width": 8}
SMALL = {"dim": 32, "ffn": 48, "layers": 2, "queries": 20}


def test_a_co_dino_file(tmp_path):
    path = tmp_path / "co_dino_5scale_r50.pth"
    torch.save({"meta": {}, "state_dict": fill(key_lists.co_dino(RESNET, fc=16, **SMALL))}, path)
    source = load_source(f"ckpt:{path}")
    assert source.family.name == "co_dino" and source.spec.decode.nms == "soft_nms"
    assert source.spec.label(0) == "person" and source.spec.name == "co_dino_5scale_r50"
    words = " ".join(source.notes)
    assert "classes 80, queries 20" in words and "rpn_head" in words and "backbone.bn1" not in words


def test_a_dino_file_with_ids_of_coco(tmp_path):
    path = tmp_path / "dino.pth"
    torch.save({"model": fill(key_lists.dino(RESNET, (1, 2, 3), 4, **SMALL))}, path)
    source = load_source(f"ckpt:{path}")
    assert source.family.name == "dino" and source.spec.decode.nms == "none"
    assert source.spec.label(1) == "person" and source.spec.decode.num_classes == 91


def test_lvis_by_the_number_of_classes(tmp_path):
    path = tmp_path / "lvis.pth"
    torch.save({"state_dict": fill(key_lists.co_dino(RESNET, fc=16, classes=1203, **SMALL))}, path)
    source = load_source(f"ckpt:{path}")
    assert (source.spec.label(0), source.spec.label(1202)) == ("aerosol_can", "zucchini")
    assert any("class names of LVIS" in note for note in source.notes)


def test_names_in_the_file_or_none(tmp_path):
    path = tmp_path / "seven.pth"
    state = fill(key_lists.co_dino(RESNET, fc=16, classes=7, **SMALL))
    torch.save({"state_dict": state}, path)
    with pytest.raises(SourceError, match=r"7 classes and names none.*1203 \(LVIS\).*`labels=FILE`"):
        load_source(f"ckpt:{path}")
    for meta in ({"CLASSES": tuple("abcdefg")}, {"dataset_meta": {"classes": list("abcdefg")}}):
        torch.save({"meta": meta, "state_dict": state}, path)
        source = load_source(f"ckpt:{path}")
        assert source.spec.label(6) == "g" and "7 class names of the checkpoint" in source.notes[0]
    torch.save({"meta": {"CLASSES": ("a", "b")}, "state_dict": state}, path)
    with pytest.raises(SourceError, match="2 names in the checkpoint do not fit"):
        load_source(f"ckpt:{path}")


def test_half_a_file_is_refused(tmp_path):
    path = tmp_path / "half.pth"
    state = fill(key_lists.dino(RESNET, (1, 2, 3), 4, **SMALL))
    torch.save({"model": {k: v for k, v in state.items() if "decoder.layers.1" not in k}}, path)
    with pytest.raises(SourceError, match=r"missing|unexpected"):
        load_source(f"ckpt:{path}")
