"""preprocessor_config.json of all ages -> InputSpec."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="needs the 'export' extra")

from detrt.errors import SourceError
from detrt.models.families import BY_NAME, IMAGENET_MEAN, IMAGENET_STD
from detrt.models.preprocessor import multiple_of, read_input_spec
from detrt.models.random import load_random
from detrt.spec import InputSpec

# family, file (None: there is none), what it must say
CASES = {
    "missing file, detr": (
        "detr",
        None,
        {"resize": "shortest_edge", "shortest_edge": 800, "longest_edge": 1333, "mean": IMAGENET_MEAN, "std": IMAGENET_STD},
    ),
    "missing file, rt_detr": (
        "rt_detr",
        None,
        {"resize": "stretch", "height": 640, "width": 640, "mean": (0, 0, 0), "std": (1, 1, 1)},
    ),
    "missing file, rf_detr": ("rf_detr", None, {"resize": "stretch", "height": 112, "dynamic": False, "mean": IMAGENET_MEAN}),
    "empty file": ("rt_detr", {}, {"height": 640, "rescale": 1 / 255, "resample": "bilinear"}),
    "nulls": ("rt_detr", {"size": None, "resample": None, "image_mean": None, "rescale_factor": None}, {"height": 640}),
    "old integer size": (
        "detr",
        {"size": 600, "max_size": 1000},
        {"resize": "shortest_edge", "shortest_edge": 600, "longest_edge": 1000, "height": 600, "width": 800},
    ),
    "old size without a largest": ("detr", {"size": 600}, {"shortest_edge": 600, "longest_edge": None, "width": 800}),
    "edges": (
        "detr",
        {"size": {"shortest_edge": 480, "longest_edge": 600}},
        {"shortest_edge": 480, "longest_edge": 600, "height": 480, "width": 600},
    ),
    "height and width": (
        "rt_detr_v2",
        {"size": {"height": 320, "width": 416}},
        {"resize": "stretch", "height": 320, "width": 416},
    ),
    "rounded up to the multiple": ("rt_detr", {"size": {"height": 330, "width": 641}}, {"height": 352, "width": 672}),
    "a DETR of fixed size": ("detr", {"size": {"height": 320, "width": 320}}, {"resize": "stretch", "mask": True}),
    "edges for a family of fixed size": (
        "rf_detr",
        {"size": {"shortest_edge": 500, "longest_edge": 900}},
        {"resize": "stretch", "height": 504, "width": 504, "dynamic": False},
    ),
    "yolos": (
        "yolos",
        {"size": {"shortest_edge": 512, "longest_edge": 864}},
        {"shortest_edge": 512, "mask": False, "multiple_of": 16},
    ),
    "no normalisation": ("detr", {"do_normalize": False}, {"mean": (0, 0, 0), "std": (1, 1, 1)}),
    "normalisation of its own": (
        "rt_detr",
        {"do_normalize": True, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]},
        {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)},
    ),
    "no rescale": ("detr", {"do_rescale": False}, {"rescale": 1.0}),
    "another rescale and filter": (
        "detr",
        {"rescale_factor": 1 / 127.5, "resample": 3},
        {"rescale": 1 / 127.5, "resample": "bicubic"},
    ),
}


@pytest.mark.parametrize(("name", "file", "wanted"), CASES.values(), ids=CASES)
def test_input_spec(name, file, wanted, tiny, tmp_path):
    if file is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(file))
    spec = read_input_spec(tmp_path, BY_NAME[name], tiny(name).module.config)
    assert {key: getattr(spec, key) for key in wanted} == wanted
    assert spec.mask is BY_NAME[name].mask and spec.dynamic is BY_NAME[name].dynamic


def test_without_a_folder_no_file_is_read(tiny, tmp_path, monkeypatch):
    """A preprocessor file in the working folder belongs to another checkpoint."""
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 320, "width": 416}}')
    monkeypatch.chdir(tmp_path)
    assert read_input_spec(None, BY_NAME["rt_detr"], tiny("rt_detr").module.config).size_hw == (640, 640)
    assert load_random("random:rt_detr/tiny").spec.input.size_hw == (640, 640)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"size": ', "is not readable JSON"),
        ("[640]", "must hold a JSON object"),
        ('{"size": "big"}', "size 'big'"),
        ('{"size": {"longest_edge": 800}}', "longest_edge.*800"),
        ('{"size": {"height": 0, "width": 64}}', "input.height .*got 0"),
        ('{"resample": 9}', "resample 9"),
        ('{"resample": -1}', "resample -1"),
        ('{"rescale_factor": "half"}', "half"),
        ('{"rescale_factor": 0}', "input.rescale must be .*positive.*got 0"),
        ('{"do_normalize": true, "image_mean": [0.5]}', r"input.mean must be 3 finite numbers; got \(0.5,\)"),
        ('{"do_normalize": true, "image_std": [1, 1, 0]}', "input.std must be .*positive"),
        ('{"do_normalize": true, "image_mean": 0.5}', "float"),
    ],
)
def test_unusable_file_is_named(text, words, tiny, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(SourceError, match=f"preprocessor_config.json'.*{words}"):
        read_input_spec(tmp_path, BY_NAME["rt_detr"], tiny("rt_detr").module.config)


@pytest.mark.parametrize(
    ("name", "multiple"), [("detr", 1), ("rt_detr", 32), ("yolos", 16), ("lw_detr", 16 * 4), ("rf_detr", 14 * 2)]
)
def test_multiple_of(name, multiple, tiny):
    """LW-DETR counts 16 windows in an image, RF-DETR 2 along each side."""
    assert multiple_of(BY_NAME[name], tiny(name).module.config) == multiple
    assert isinstance(tiny(name).spec.input, InputSpec) and tiny(name).spec.input.multiple_of == multiple
