"""DEIMv2 Atto and Femto with their released weights, against the authors' own ONNX files.

A random model shows that two graphs compute the same function; only real weights and images show
that it is the right one: preprocessing, labels, decoding and the choice of the class included.
"""

from __future__ import annotations

import copy
from functools import lru_cache

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the 'export' extra")
pytest.importorskip("pycocotools", reason="needs the 'eval' extra")

import torch
from deimv2_files import SIZES, assert_same, authors, coco, images, source  # noqa: F401 - fixtures

from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.torch.session import TorchSession
from detrt.data.images import load_image
from detrt.data.postprocess import sigmoid
from detrt.data.preprocess import preprocess
from detrt.detector import Detector
from detrt.errors import SourceError
from detrt.evaluation.coco import METRICS, evaluate_coco
from detrt.export import ExportConfig, export_onnx
from detrt.models.load import load_source

AUTHORS_AP = {"atto": (0.288, 0.444), "femto": (0.334, 0.496)}
# Both are made of the same layers; the original file of Atto is read in every run (tests/models/checkpoints/test_deimv2.py).
QUICK = tuple(pytest.param(size, marks=[] if size == "femto" else pytest.mark.slow) for size in SIZES)
REFITTED_AP = {"atto": (0.269, 0.428), "femto": (0.333, 0.501)}


@pytest.fixture(scope="module")
def graph_file(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deimv2")

    def export(size, msda):
        return export_onnx(source(size), folder / f"{size}-{msda}.onnx", ExportConfig(msda=msda)).path

    return lru_cache(maxsize=None)(export)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_pytorch_detects_what_the_authors_graph_detects(size, source, authors, images):
    with Detector(TorchSession(source(size)), threshold=0.0, batch_size=5) as detector:
        assert_same(authors(size), detector(images))


@pytest.mark.parametrize("batch", (1, 5))
@pytest.mark.parametrize("msda", ("gather", pytest.param("gridsample", marks=pytest.mark.slow)))
@pytest.mark.parametrize("size", QUICK)
def test_exported_graph_detects_what_the_authors_graph_detects(size, msda, batch, graph_file, authors, images):
    with Detector(OnnxSession(graph_file(size, msda)), threshold=0.0, batch_size=batch) as detector:
        assert_same(authors(size), detector(images))


@pytest.mark.slow
@pytest.mark.parametrize("msda", ("gather", "gridsample"))
def test_graph_is_the_float64_model(msda, source, graph_file, coco):
    """On the image where the authors' graph is furthest away, ours is within rounding of float64."""
    batch = preprocess([load_image(coco[1] / "000000547336.jpg")], source("atto").spec)
    logits = OnnxSession(graph_file("atto", msda)).run(batch.feeds)["logits"]
    module = copy.deepcopy(source("atto").module).double()
    with torch.no_grad():
        pixels = torch.from_numpy(batch.feeds["pixel_values"]).double() / 255
        exact = module(pixel_values=pixels).logits.float().numpy()
    best, same = (np.sort(sigmoid(values).reshape(-1))[::-1][:20] for values in (exact, logits))
    np.testing.assert_allclose(same, best, atol=1e-4)


@pytest.mark.parametrize("size", QUICK)
def test_average_precision_is_the_authors(size, graph_file, coco):
    report = evaluate_coco(OnnxSession(graph_file(size, "gather")), *coco)
    assert tuple(report.metrics) == METRICS
    print(report.metrics)
    assert report.metrics["AP"] == pytest.approx(AUTHORS_AP[size][0], abs=1e-3)
    assert report.metrics["AP50"] == pytest.approx(AUTHORS_AP[size][1], abs=1e-3)


@pytest.mark.parametrize("size", QUICK)
def test_refitted_checkpoint_runs_without_remote_code(size, real_data, coco):
    folder = real_data / "checkpoints" / f"deimv2-{size}-coco-stockfit"
    report = evaluate_coco(TorchSession(load_source(str(folder))), *coco)
    print(report.metrics)
    assert report.metrics["AP"] == pytest.approx(REFITTED_AP[size][0], abs=1e-3)
    assert report.metrics["AP50"] == pytest.approx(REFITTED_AP[size][1], abs=1e-3)


@pytest.mark.parametrize("size", SIZES)
def test_remote_code_is_refused_unless_trusted(size, real_data):
    with pytest.raises(SourceError, match=r"modeling_deimv2_upstream\.py.*`trust_remote_code`"):
        load_source(str(real_data / "checkpoints" / f"deimv2-{size}-coco"))
