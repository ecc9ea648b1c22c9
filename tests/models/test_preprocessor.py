"""Image processor files of all ages -> InputSpec, and its pixels against transformers' own processor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the 'export' extra")
transformers = pytest.importorskip("transformers", reason="needs the 'export' extra")

from checkpoint_folders import image_processor, save_folder, save_processor
from random_rows import FAMILIES

from detrt.data.preprocess import preprocess
from detrt.errors import SourceError
from detrt.models.families import BY_NAME, IMAGENET_MEAN, IMAGENET_STD, processors
from detrt.models.load import load_source
from detrt.models.preprocessor import multiple_of, parse_resize, read_input_spec
from detrt.models.random import load_random
from detrt.spec import InputSpec

# family, file, what it must say
CASES = {
    "empty file, detr": (
        "detr",
        {},
        {"resize": "shortest_edge", "shortest_edge": 800, "longest_edge": 1333, "mean": IMAGENET_MEAN, "std": IMAGENET_STD},
    ),
    "empty file, rt_detr": (
        "rt_detr",
        {},
        {"resize": "stretch", "height": 640, "width": 640, "mean": (0, 0, 0), "std": (1, 1, 1)},
    ),
    "another family's processor": (
        "rt_detr",
        {"image_processor_type": "DetrImageProcessorFast", "size": {"height": 320, "width": 320}},
        {"height": 320, "mean": IMAGENET_MEAN},
    ),
    "nulls": ("rt_detr", {"size": None, "resample": None, "image_mean": None, "rescale_factor": None}, {"height": 640}),
    "old integer size": (
        "detr",
        {"size": 600, "max_size": 1000, "feature_extractor_type": "DetrFeatureExtractor"},
        {"resize": "shortest_edge", "shortest_edge": 600, "longest_edge": 1000, "height": 600, "width": 800},
    ),
    "old size without a largest": ("detr", {"size": 600}, {"shortest_edge": 600, "longest_edge": 1333, "width": 800}),
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
    "size as a list": ("rt_detr_v2", {"size": [320, 416]}, {"resize": "stretch", "height": 320, "width": 416}),
    "a DETR of fixed size": ("detr", {"size": {"height": 320, "width": 320}}, {"resize": "stretch", "mask": True}),
    "yolos": (
        "yolos",
        {"size": {"shortest_edge": 512, "longest_edge": 864}},
        {"shortest_edge": 512, "mask": False, "multiple_of": 16},
    ),
    "rf_detr, which does not antialias": (
        "rf_detr",
        {"size": {"height": 560, "width": 560}},
        {"resize": "stretch", "height": 560, "mean": IMAGENET_MEAN, "antialias": False, "dtype": "float32"},
    ),
    "the guide of transformers": (
        "conditional_detr",
        {"size": {"max_height": 480, "max_width": 480}, "do_pad": True, "pad_size": {"height": 480, "width": 480}},
        {"resize": "max_size", "max_height": 480, "max_width": 480, "pad": True, "height": 480, "width": 480, "mask": True},
    ),
    "a maximum and no pad_size": (
        "detr",
        {"size": {"max_height": 480, "max_width": 640}},
        {"resize": "max_size", "max_width": 640, "pad": False, "height": 480, "width": 640},
    ),
    "a pad_size that is not used": (
        "detr",
        {"size": {"max_height": 480, "max_width": 640}, "do_pad": False, "pad_size": {"height": 700, "width": 700}},
        {"pad": False},
    ),
    "letterbox without a mask": (
        "rt_detr",
        {"size": {"max_height": 320, "max_width": 320}, "do_pad": True, "pad_size": 320},
        {"resize": "max_size", "pad": True, "height": 320, "mask": False},
    ),
    "edges and pad_size": (
        "detr",
        {"size": {"shortest_edge": 480, "longest_edge": 640}, "pad_size": {"height": 640, "width": 672}},
        {"resize": "shortest_edge", "pad": True, "height": 640, "width": 672},
    ),
    "no normalisation": ("detr", {"do_normalize": False}, {"mean": (0, 0, 0), "std": (1, 1, 1)}),
    "normalisation of its own": (
        "rt_detr",
        {"do_normalize": True, "image_mean": [0.1, 0.2, 0.3], "image_std": 0.5},
        {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.5, 0.5)},
    ),
    "no rescale": ("detr", {"do_rescale": False}, {"rescale": 1.0}),
    "another rescale and filter": (
        "detr",
        {"rescale_factor": 1 / 127.5, "resample": 3},
        {"rescale": 1 / 127.5, "resample": "bicubic"},
    ),
    "keys without an effect": (
        "detr",
        {"format": "coco_detection", "do_center_crop": False, "processor_class": "P", "data_format": "channels_first"},
        {"shortest_edge": 800},
    ),
}


def write(folder, file, name="preprocessor_config.json"):
    (folder / name).write_text(json.dumps(file))


@pytest.mark.parametrize(
    ("resize", "words"),
    [
        ("333x333", r"^`resize=333x333` cannot be done: size .* multiples of 32, e.g. `resize=352x352`$"),
        ("shortest:320,480", r"^`resize=shortest:320,480` cannot be done: .* no padding mask .*`resize=HEIGHTxWIDTH` stretches"),
    ],
)
def test_a_resize_that_cannot_be_done_is_not_the_files(resize, words, tiny, tmp_path):
    write(tmp_path, {"size": {"height": 320, "width": 320}})
    with pytest.raises(SourceError, match=words):
        read_input_spec(tmp_path, BY_NAME["rt_detr_v2"], tiny("rt_detr_v2").module.config, resize=resize)


@pytest.mark.parametrize("nested", [False, True], ids=["own file", "nested"])
@pytest.mark.parametrize(("name", "file", "wanted"), CASES.values(), ids=CASES)
def test_input_spec(name, file, wanted, nested, tiny, tmp_path):
    if nested:
        write(tmp_path, {"image_processor": file, "processor_class": "P"}, "processor_config.json")
        write(tmp_path, {"size": {"height": 96, "width": 96}})  # transformers looks at the nested one first
    else:
        write(tmp_path, file)
        write(tmp_path, {"processor_class": "P"}, "processor_config.json")
    spec = read_input_spec(tmp_path, BY_NAME[name], tiny(name).module.config)
    assert {key: getattr(spec, key) for key in wanted} == wanted
    assert spec.mask is BY_NAME[name].mask and spec.dynamic is BY_NAME[name].dynamic


# What `size` and padding can be, in settings of transformers' own classes. Small: four of the families resize by edges.
SETTINGS = {
    "edges": {"size": {"shortest_edge": 64, "longest_edge": 96}},
    "stretch": {"size": {"height": 64, "width": 128}},
    "guide": {"size": {"max_height": 128, "max_width": 128}, "do_pad": True, "pad_size": {"height": 128, "width": 128}},
    "maximum": {"size": {"max_height": 96, "max_width": 64}},
    "edges, padded": {
        "size": {"shortest_edge": 64, "longest_edge": 96},
        "do_pad": True,
        "pad_size": {"height": 96, "width": 128},
    },
    "numbers": {"size": {"height": 64, "width": 64}, "do_rescale": False, "do_normalize": True, "image_mean": [9, 99, 120]},
    "bicubic": {"size": {"height": 64, "width": 64}, "resample": 3, "rescale_factor": 1 / 127.5, "do_normalize": False},
    "nulls": {"size": {"height": 64, "width": 128}, "do_rescale": None, "do_normalize": None, "do_pad": None},
}
IMAGES = [np.random.default_rng(5).integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((75, 101), (140, 61), (90, 90))]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(
    "name",
    # These take one size only, see tests/models/layers/test_eomt.py and tests/export/test_owl.py.
    [
        f.name
        for f in FAMILIES
        if hasattr(transformers, f"{f.processor.name}ImageProcessorPil") and f.processor.name not in ("Eomt", "OwlViT", "Owlv2")
    ],
)
def test_pixels_are_those_of_transformers(name, settings, tiny, tmp_path):
    """Both sides start from the file that transformers wrote."""
    source = tiny(name)
    save_processor(source, tmp_path, **settings)
    try:
        entry = read_input_spec(tmp_path, source.family, source.module.config)
    except SourceError as error:
        keeps_aspect = "height" not in settings["size"]
        assert keeps_aspect and not source.family.mask and "`resize=" in str(error) and "size" in str(error)
        return
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    spec = source.spec.with_input(**{f: getattr(entry, f) for f in InputSpec.__dataclass_fields__})
    spec = spec.with_input(normalize_in_graph=False, dtype="float32")
    for image in IMAGES:
        want = theirs(images=image, return_tensors="np")
        got = preprocess([image], spec).feeds
        assert got["pixel_values"].shape == want["pixel_values"].shape
        np.testing.assert_allclose(
            got["pixel_values"], want["pixel_values"], atol=1e-5 * max(1, np.abs(want["pixel_values"]).max())
        )
        if source.family.mask and "pixel_mask" in want:
            np.testing.assert_array_equal(got["pixel_mask"], want["pixel_mask"])


@pytest.mark.parametrize("name", ["grounding_dino", "mm_grounding_dino"])
def test_a_processor_of_images_and_text_writes_one_nested_file(name, tiny, tmp_path):
    """Its size was lost, the family's was used without a word, and the detector found nothing."""
    from transformers import BertTokenizerFast, GroundingDinoProcessor

    source = tiny(name)
    (tmp_path / "tokenizer.json").write_bytes(source.tokenizer)
    words = BertTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    images = image_processor(source, size={"shortest_edge": 240, "longest_edge": 320})
    GroundingDinoProcessor(images, words).save_pretrained(tmp_path)
    assert (tmp_path / "processor_config.json").is_file() and not (tmp_path / "preprocessor_config.json").exists()
    source.module.save_pretrained(tmp_path)
    spec = load_source(str(tmp_path)).spec
    assert (spec.input.shortest_edge, spec.input.longest_edge) == (240, 320)


def test_a_folder_without_a_file_needs_a_choice(tiny, tmp_path):
    source = tiny("rt_detr")
    source.module.save_pretrained(tmp_path)
    with pytest.raises(SourceError, match=r"has neither preprocessor_config.json nor .*`resize=.*`preprocess=family-default`"):
        load_source(str(tmp_path))
    assert load_source(str(tmp_path), preprocess="family-default").spec.input == source.spec.input
    stated = load_source(str(tmp_path), resize="320x416").spec.input
    assert (stated.resize, stated.height, stated.width, stated.mean) == ("stretch", 320, 416, (0, 0, 0))


def test_resize_is_stated_beside_the_file(tiny, tmp_path):
    """The file's normalisation stays."""
    write(tmp_path, {"do_resize": False, "image_mean": [0.1, 0.2, 0.3]})
    config = tiny("detr").module.config
    with pytest.raises(SourceError, match="says do_resize false: .*`resize="):
        read_input_spec(tmp_path, BY_NAME["detr"], config)
    for text, wanted in {
        "480x640": {"resize": "stretch", "height": 480, "width": 640},
        "stretch:480": {"resize": "stretch", "height": 480, "width": 480},
        "shortest:480,640": {"resize": "shortest_edge", "shortest_edge": 480, "longest_edge": 640, "pad": False},
        "fit:480x512": {"resize": "max_size", "max_height": 480, "max_width": 512, "pad": True, "width": 512},
    }.items():
        spec = read_input_spec(tmp_path, BY_NAME["detr"], config, resize=text)
        assert {key: getattr(spec, key) for key in wanted} == wanted and spec.mean == (0.1, 0.2, 0.3)
    spec = read_input_spec(tmp_path, BY_NAME["detr"], config, resize="480", preprocess="family-default")
    assert spec.height == 480 and spec.mean == IMAGENET_MEAN


@pytest.mark.parametrize("text", ["", "big", "0", "480x", "shortest:480", "shortest:800,480", "fit:99999", "crop:480", "480,640"])
def test_a_resize_that_cannot_be_read(text):
    with pytest.raises(SourceError, match=r"`resize` must be HEIGHTxWIDTH .* got '"):
        parse_resize(text)


@pytest.mark.parametrize("ref", ["random:rt_detr/tiny", "ckpt:model.pth"])
@pytest.mark.parametrize("option", [{"resize": "320"}, {"preprocess": "family-default"}])
def test_choices_are_for_folders(ref, option):
    with pytest.raises(SourceError, match=f"`{next(iter(option))}=.*` is for a folder in transformers format"):
        load_source(ref, **option)


def test_without_a_folder_no_file_is_read(tiny, tmp_path, monkeypatch):
    """A preprocessor file in the working folder belongs to another checkpoint."""
    write(tmp_path, {"size": {"height": 320, "width": 416}})
    monkeypatch.chdir(tmp_path)
    assert read_input_spec(None, BY_NAME["rt_detr"], tiny("rt_detr").module.config).size_hw == (640, 640)
    assert load_random("random:rt_detr/tiny").spec.input.size_hw == (640, 640)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"size": ', "cannot be read as JSON"),
        ("[640]", "must hold a JSON object"),
        ('{"size": "big"}', "size 'big'"),
        ('{"size": {"longest_edge": 800}}', "longest_edge.*800"),
        ('{"size": {"height": 0, "width": 64}}', "height.*0"),
        ('{"resample": 9}', "resample 9"),
        ('{"resample": -1}', "resample -1"),
        ('{"rescale_factor": "half"}', "half"),
        ('{"rescale_factor": 0}', "input.rescale must be .*positive.*got 0"),
        ('{"do_normalize": true, "image_mean": [0.5]}', r"input.mean must be 3 finite numbers; got \(0.5,\)"),
        ('{"do_normalize": true, "image_std": [1, 1, 0]}', "input.std must be .*positive"),
        # What detrt does not do, by its name and with the way on.
        ('{"size": {"height": 330, "width": 641}}', "multiples of 32, e.g. `resize=352x672`;.*`resize="),
        ('{"size": {"shortest_edge": 480, "longest_edge": 640}}', "size .*keeps the aspect ratio: RT-DETR has no padding mask"),
        ('{"do_pad": true, "pad_size": {"height": 96, "width": 96}}', "pad_size .*into which images of size .* do not fit"),
        ('{"do_pad": true, "pad_size": {"height": 704, "width": 704}}', "pad_size .* around images of size"),
        ('{"do_pad": true, "pad_size": {"height": 704}}', "pad_size .*it must have height and width"),
        ('{"do_center_crop": true, "crop_size": 320}', "do_center_crop True, which detrt does not know"),
        ('{"patch_limit": 32}', "patch_limit 32, which detrt does not know; remove the key if"),
        ('{"data_format": "channels_last"}', "data_format 'channels_last'"),
        ('{"image_processor_type": "ViTImageProcessor"}', "image_processor_type 'ViTImageProcessor'.*knows DetrImageProcessor"),
    ],
)
def test_unusable_file_is_named(text, words, tiny, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(SourceError, match=f"preprocessor_config.json'.*{words}"):
        read_input_spec(tmp_path, BY_NAME["rt_detr"], tiny("rt_detr").module.config)


@pytest.mark.parametrize("name", ["conditional_detr", "d_fine"])
def test_a_processor_that_rounds_sides_of_another_family(name, tiny, tmp_path):
    """Each had images of another size than transformers gives it."""
    write(tmp_path, {"image_processor_type": "YolosImageProcessor", "size": {"shortest_edge": 64, "longest_edge": 96}})
    with pytest.raises(SourceError, match="YolosImageProcessor, which rounds sides down to multiples of 16.*`resize="):
        read_input_spec(tmp_path, BY_NAME[name], tiny(name).module.config)
    write(tmp_path, {"image_processor_type": "YolosImageProcessor", "size": {"height": 64, "width": 96}})
    assert read_input_spec(tmp_path, BY_NAME[name], tiny(name).module.config).size_hw == (64, 96)


def test_another_filter_without_antialiasing(tiny, tmp_path):
    write(tmp_path, {"size": {"height": 112, "width": 112}, "resample": 3})
    with pytest.raises(SourceError, match="resample 3 of RfDetrImageProcessor, which does not antialias"):
        read_input_spec(tmp_path, BY_NAME["rf_detr"], tiny("rf_detr").module.config)


def test_edges_for_a_family_of_fixed_size(tiny, tmp_path):
    write(tmp_path, {"size": {"shortest_edge": 500, "longest_edge": 900}})
    with pytest.raises(SourceError, match="keeps the aspect ratio: RF-DETR takes one fixed size; .*`resize="):
        read_input_spec(tmp_path, BY_NAME["rf_detr"], tiny("rf_detr").module.config)


def test_defaults_of_processors_are_those_of_transformers():
    for name, settings in ((row.name, row.settings) for row in processors().values()):
        kind = getattr(transformers, f"{name}ImageProcessorPil", None)
        if name == "RfDetr":
            source = (transformers.__path__[0], "models/rf_detr/image_processing_rf_detr.py")
            text = open("/".join(source)).read()
            assert all(f"    {key} = {value!r}".replace("'", '"') in text for key, value in settings.items())
            continue
        if name == "Sam3":
            text = (Path(transformers.__path__[0]) / "models/sam3/image_processing_sam3.py").read_text()
            wanted = {"resample": "PILImageResampling.BILINEAR", "image_mean": "IMAGENET_STANDARD_MEAN", "do_normalize": True}
            wanted |= {"image_std": "IMAGENET_STANDARD_STD", "size": settings["size"], "do_pad": None, "do_rescale": True}
            assert all(f"    {key} = {value}\n".replace("'", '"') in text for key, value in wanted.items())
            assert settings["image_mean"] == tuple(transformers.image_utils.IMAGENET_STANDARD_MEAN) == settings["image_std"]
            continue
        if name.startswith("PPDocLayout"):
            package = f"pp_doclayout_{name[-2:].lower()}"
            text = (Path(transformers.__path__[0]) / "models" / package / f"image_processing_{package}.py").read_text()
            lines = ("resample = PILImageResampling.BICUBIC", "image_mean = [0, 0, 0]", "image_std = [1, 1, 1]")
            assert all(
                f"    {line}\n" in text for line in (*lines, 'size = {"height": 800, "width": 800}', "do_normalize = True")
            )
            assert "do_pad = " not in text and settings["resample"] == 3
            continue
        if name.startswith("Owl"):
            found = {key: getattr(kind, key, None) or False for key in settings}
            assert {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()} == settings
            assert (kind.resample, kind.rescale_factor) == (settings.get("resample", 2), 1 / 255)
            continue
        assert {key: getattr(kind, key) for key in settings} == settings
        assert (kind.resample, kind.rescale_factor) == (2, 1 / 255)
        assert (tuple(kind.image_mean), tuple(kind.image_std)) == (IMAGENET_MEAN, IMAGENET_STD)


@pytest.mark.parametrize(
    ("name", "multiple"), [("detr", 1), ("rt_detr", 32), ("yolos", 16), ("lw_detr", 16 * 4), ("rf_detr", 14 * 2)]
)
def test_multiple_of(name, multiple, tiny):
    """LW-DETR counts 16 windows in an image, RF-DETR 2 along each side."""
    assert multiple_of(BY_NAME[name], tiny(name).module.config) == multiple
    assert isinstance(tiny(name).spec.input, InputSpec) and tiny(name).spec.input.multiple_of == multiple


@pytest.mark.parametrize(("version", "noted"), [("5.15.1", True), ("5.23.0", False)])
def test_versions_whose_rf_detr_antialiases_are_noted(version, noted, tiny, tmp_path, monkeypatch):
    """transformers changed that processor; with torchvision the comparison with the older ones fails."""
    from detrt.models import hub

    folder = save_folder(tiny("rf_detr"), tmp_path)
    monkeypatch.setattr(hub, "transformers_version", lambda: version)
    notes = load_source(str(folder)).notes
    assert any(f"{version} antialiases" in note and "`preprocess=family-default`" in note for note in notes) is noted
    assert not load_source(str(folder), preprocess="family-default").notes
