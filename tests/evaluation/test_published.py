"""`verify` beside transformers' own processor and post-processing, which read the folder themselves."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")

from checkpoint_folders import image_processor, save_folder
from parity_scenes import parity_set
from torchvision_nms import batched_nms

from detrt.backends.prompted import TokenLabelSession
from detrt.backends.torch.session import TorchSession, open_torch
from detrt.data.scenes.scene import draw_scene
from detrt.evaluation import parity
from detrt.models import published
from detrt.models.contract import ExportConfig, exported_spec
from detrt.models.load import load_source
from detrt.pipeline import build
from detrt.text import kinds, tokenizer

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


@pytest.mark.slow
def test_a_stated_size_is_recorded_with_the_bundle(tiny, tmp_path):
    """So that its checkpoint is read again as it was read for the build."""
    tiny("rt_detr_v2").module.save_pretrained(tmp_path / "folder")
    report = build(str(tmp_path / "folder"), tmp_path / "bundle", resize="64x96")
    assert report.preprocessing == ["stretch to 64x96, bilinear, times 1/255, no normalisation"]
    assert report.bundle.provenance.options["resize"] == "64x96"
    done = parity.verify(None, tmp_path / "bundle", IMAGES[:1], slots=False)
    assert done.passed and done.published is None, done.failures


PROMPT = "red circle. striped star. a blue square. circle"  # words of two phrases, and no last dot


@pytest.fixture(scope="module")
def phrases(tiny, tmp_path_factory):
    """A trained model from the folder that its training script saves: the processor writes processor_config.json alone."""
    folder, source = tmp_path_factory.mktemp("phrases"), tiny("embedded:phrases")
    source.module.save_pretrained(folder)
    images = image_processor(source, size={"shortest_edge": 192, "longest_edge": 320})
    published.processor_with_text(source, images).save_pretrained(folder)
    assert not (folder / "preprocessor_config.json").exists()
    return load_source(str(folder))


def verify_phrases(source, prompt=PROMPT, scenes=1):
    images = [scene.image for scene, _ in parity_set(scenes, 1)]
    return parity.verify(source, open_torch(source), images, slots=False, prompt=prompt)


def test_a_prompt_by_phrases_and_by_tokens(phrases):
    report = verify_phrases(phrases, scenes=2)
    assert report.passed, report.failures
    done = report.published
    assert done.oracle == "GroundingDinoImageProcessorPil" and done.pixels < 1e-5
    assert done.unmatched[:2] == (0, 0) and done.unmatched[2] >= 10
    assert max(one.score for one in done.images) < 1e-4 and max(one.box_px for one in done.images) < 0.1
    assert len(done.by_tokens) == 2 and sum(one.image.compared for one in done.by_tokens) >= 10 and not done.wrong_labels
    assert any(check.name == "text labels other than its" for check in report.checks)


@pytest.mark.slow
def test_a_list_of_names_has_no_labels_of_tokens(phrases):
    report = verify_phrases(phrases, ["red circle", "", "striped star"])
    assert report.passed, report.failures
    assert report.published.unmatched[2] >= 5 and not report.published.by_tokens


def shifted_phrases(monkeypatch):
    """Each phrase starts and ends a token late, its dot with it."""
    right = kinds.TokenPrompts.chunk_of

    def wrong(words, prompt):
        chunk = right(words, prompt)
        return replace(chunk, phrase_mask=np.roll(chunk.phrase_mask, 1, axis=1))

    monkeypatch.setattr(kinds.TokenPrompts, "chunk_of", staticmethod(wrong))


def swapped_phrases(monkeypatch):
    right = kinds.TokenPrompts.chunk_of
    wrong = lambda words, prompt: replace(chunk := right(words, prompt), phrase_mask=chunk.phrase_mask[::-1])  # noqa: E731
    monkeypatch.setattr(kinds.TokenPrompts, "chunk_of", staticmethod(wrong))


def other_words(monkeypatch):
    """Labels of the tokens beside those above the threshold."""
    right = tokenizer.PromptTokenizer.decode
    monkeypatch.setattr(tokenizer.PromptTokenizer, "decode", lambda self, ids: right(self, [i + 1 for i in ids]))


def lower_scores(monkeypatch):
    right = TokenLabelSession.run
    monkeypatch.setattr(TokenLabelSession, "run", lambda self, feeds: {k: v - 0.1 for k, v in right(self, feeds).items()})


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (shifted_phrases, "against transformers' GroundingDinoImageProcessorPil, "),
        pytest.param(other_words, "text labels differ: ", marks=pytest.mark.slow),
        pytest.param(swapped_phrases, "detections missing and", marks=pytest.mark.slow),
        pytest.param(lower_scores, "with scores of tokens, ", marks=pytest.mark.slow),
    ],
)
def test_a_fault_of_both_sides(plant, words, phrases, monkeypatch):
    """Both sides read the prompt by the same code, and agree; transformers' processor does not."""
    plant(monkeypatch)
    report = verify_phrases(phrases)
    assert not report.differences and not report.facts
    assert not report.passed and any(words in failure for failure in report.failures), report.failures


def test_class_names_with_their_own_text(tiny, tmp_path, monkeypatch):
    """OmDet-Turbo, whose processor needs torchvision for its NMS: a function of the same meaning takes its place."""
    transformers = pytest.importorskip("transformers")
    module = importlib.import_module("transformers.models.omdet_turbo.processing_omdet_turbo")
    monkeypatch.setattr(module, "batched_nms", batched_nms, raising=False)
    monkeypatch.setattr(transformers, "OmDetTurboProcessor", module.OmDetTurboProcessor)
    folder = save_folder(tiny("omdet_turbo"), tmp_path, {"size": {"height": 128, "width": 128}})
    report = parity.verify(str(folder), str(folder), IMAGES, slots=False, prompt=["red circle", "", "star"], task="Find shapes.")
    assert report.passed, report.failures
    assert report.published.unmatched[:2] == (0, 0) and report.published.unmatched[2] >= 10 and not report.published.by_tokens


def test_class_names_without_torchvision(tiny, tmp_path, monkeypatch):
    def missing(*args):
        raise ImportError

    monkeypatch.setattr(pytest.importorskip("transformers"), "OmDetTurboProcessor", missing)
    folder = save_folder(tiny("omdet_turbo"), tmp_path, {"size": {"height": 128, "width": 128}})
    report = parity.verify(str(folder), str(folder), IMAGES[:1], slots=False, prompt=["red circle", "star"])
    assert report.published.pixels < 1e-5 and not report.published.images
    assert any(note.startswith("no end result of transformers: ") and "torchvision" in note for note in report.notes)
