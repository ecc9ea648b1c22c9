"""A family that is defined outside the package, and registered by its file alone, is one like the others."""

from __future__ import annotations

import sys
from importlib import import_module

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")

from detrt.cli.describe import family_rows
from detrt.data.scenes.scene import draw_scene
from detrt.detector import Detector
from detrt.errors import SourceError
from detrt.evaluation.parity import verify
from detrt.export import export_onnx
from detrt.models.families import BY_NAME, register
from detrt.models.load import load_source


@pytest.fixture(autouse=True)
def family():
    """The family, as long as the test runs."""
    before = dict(BY_NAME)
    found = import_module("outside_family")
    yield BY_NAME["glance"]
    for name in BY_NAME.keys() - before.keys():
        del BY_NAME[name]
    del sys.modules[found.__name__]


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "glance.pth"
    torch.save({"model": load_source("random:glance/tiny").module.state_dict()}, path)
    (tmp_path / "names.txt").write_text("\n".join(f"thing {i}" for i in range(7)))
    return f"ckpt:{path}", tmp_path / "names.txt"


def test_it_exports_verifies_and_detects(checkpoint, tmp_path):
    ref, labels = checkpoint
    report = export_onnx(load_source(ref, labels=labels), tmp_path / "glance.onnx")
    assert report.spec.family == "glance" and report.worst < 1e-4  # at sizes that were not traced, too
    scenes = [draw_scene(seed, size_hw=(72, 90)).image for seed in range(2)]
    assert verify(load_source(ref, labels=labels), report.path, scenes).passed
    with Detector(report.path, threshold=0.0) as ours, Detector(ref, threshold=0.0, labels=labels) as theirs:
        for a, b in zip(ours(scenes), theirs(scenes), strict=True):
            assert len(a) == 9 and a.labels == b.labels
            np.testing.assert_allclose(a.boxes_xyxy, b.boxes_xyxy, atol=1e-2)


def test_it_is_listed():
    row = next(row for row in family_rows() if row["family"] == "glance")
    assert row["original files"] == ["the authors of Glance"] and row["licence"] == "MIT"


def test_messages_name_it(checkpoint):
    with pytest.raises(SourceError, match="`family` takes: .*glance"):
        load_source(checkpoint[0], family="nothing")


def test_a_name_is_given_once(family):
    with pytest.raises(SourceError, match="'glance' already; choose another"):
        register(family)
