"""`verify` beside transformers' own processor and post-processing, which read the folder themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")

from checkpoint_folders import save_folder

from detrt.backends.torch import TorchSession
from detrt.data.scenes.scene import draw_scene
from detrt.evaluation import parity
from detrt.models.contract import ExportConfig, exported_spec
from detrt.models.load import load_source
from detrt.pipeline import build

IMAGES = [draw_scene(index, size_hw=size).image for index, size in enumerate(((150, 200), (150, 200)))]
EDGES = {"size": {"shortest_edge": 96, "longest_edge": 160}}


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return save_folder(tiny("detr"), tmp_path_factory.mktemp("saved") / "model", EDGES)


def verify(folder, candidate):
    return parity.verify(str(folder), candidate, IMAGES, slots=False)


def test_equal(folder):
    report = verify(folder, str(folder))
    assert report.passed, report.failures
    done = report.published
    assert done.oracle == "DetrImageProcessorPil" and done.pixels < 1e-5 and not done.differences
    assert done.unmatched[:2] == (0, 0) and done.unmatched[2] >= 10
    assert any(check.name == "pixels against transformers' DetrImageProcessorPil" for check in report.checks)
    assert report.to_dict()["published"]["oracle"] == done.oracle


def test_images_of_other_shapes(folder):
    """In a batch one is padded to the other, which changes what DETR finds; transformers' result is that of each alone."""
    images = [IMAGES[0], draw_scene(1, size_hw=(220, 140)).image]
    report = parity.verify(str(folder), str(folder), images, slots=False)
    assert report.passed, report.failures
    assert len(report.published.images) == 2 and report.published.unmatched[2] >= 10


def test_a_size_that_the_folder_does_not_have(folder):
    """What a bundle has whose builder did not read the folder's file: both sides ran at 800, and were called equal."""
    source = load_source(str(folder))
    wrong = replace(source, spec=source.spec.with_input(shortest_edge=128, longest_edge=192))
    report = verify(folder, TorchSession(wrong))
    assert not report.passed
    assert any("preprocessing is shortest edge 128, at most 192" in f and "is shortest edge 96" in f for f in report.failures)


def test_a_filter_that_the_folder_does_not_have(folder):
    source = load_source(str(folder))
    report = verify(folder, TorchSession(replace(source, spec=source.spec.with_input(resample="nearest"))))
    assert any("preprocessing differs from transformers' DetrImageProcessorPil: pixels" in f for f in report.failures)


def test_another_size_by_choice(folder):
    """Its own pixels cannot be those of the folder's processor; the checkpoint's are compared."""
    source = load_source(str(folder))
    report = verify(folder, TorchSession(source, spec=exported_spec(source, ExportConfig(height=96, width=128))))
    assert report.passed, report.failures
    assert report.published.pixels < 1e-5 and not report.published.images
    assert any("another input size was chosen when the candidate was built" in note for note in report.notes)


def test_no_folder(tiny):
    """A random model has no processor's file."""
    source = tiny("detr")
    small = replace(source, spec=source.spec.with_input(height=96, width=128, shortest_edge=96, longest_edge=160))
    assert parity.verify(small, TorchSession(small), IMAGES[:1], slots=False).published is None


def test_a_stated_size_is_recorded_with_the_bundle(tiny, tmp_path):
    """So that its checkpoint is read again as it was read for the build."""
    tiny("rt_detr_v2").module.save_pretrained(tmp_path / "folder")
    report = build(str(tmp_path / "folder"), tmp_path / "bundle", engines=(), resize="64x96")
    assert report.preprocessing == ["stretch to 64x96, bilinear, times 1/255, no normalisation"]
    assert report.bundle.provenance.options["resize"] == "64x96"
    done = parity.verify(None, tmp_path / "bundle", IMAGES[:1], slots=False)
    assert done.passed and done.published is None, done.failures
