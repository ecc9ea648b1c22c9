"""The released DEIMv2 weights in detrt's own published DEIMv2, without remote code, against the authors' graphs."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs the 'export' extra")
pytest.importorskip("pycocotools", reason="needs the 'eval' extra")

from deimv2_files import SIZES, assert_same, authors, coco, images, source, write_released  # noqa: F401 - fixtures

from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.torch.session import TorchSession
from detrt.detector import Detector
from detrt.errors import SourceError
from detrt.export import ExportConfig, export_onnx
from detrt.models.load import load_source


@pytest.fixture
def as_file(real_data, tmp_path):
    """size -> the released weights under the authors' names, in one file."""
    return lambda size: write_released(real_data, size, tmp_path / f"deimv2_hgnetv2_{size}_coco.pth")


@pytest.mark.parametrize("size", (pytest.param("atto", marks=pytest.mark.slow), "femto"))
def test_the_folder_runs_without_its_code(size, real_data, authors, images):
    own = load_source(str(real_data / "checkpoints" / f"deimv2-{size}-coco"), family="deimv2-upstream")
    assert type(own.module).__module__ == "detrt.models.layers.deimv2"
    with Detector(TorchSession(own), threshold=0.0, batch_size=5) as detector:
        assert_same(authors(size), detector(images))


@pytest.mark.slow
@pytest.mark.parametrize("size", ("atto", "femto"))
def test_the_original_file_is_the_authors_graph(size, as_file, authors, images, tmp_path):
    own = load_source(f"ckpt:{as_file(size)}")
    assert (own.spec.input.height, own.spec.input.normalize_in_graph) == (SIZES[size], True)
    path = export_onnx(own, tmp_path / "model.onnx", ExportConfig()).path
    with Detector(OnnxSession(path), threshold=0.0, batch_size=5) as detector:
        assert_same(authors(size), detector(images))


def test_a_flag_is_still_needed_and_only_for_deimv2(real_data):
    folder = real_data / "checkpoints" / "deimv2-atto-coco"
    with pytest.raises(SourceError, match="`trust_remote_code` or set DETRT_TRUST_REMOTE_CODE=1; or `family=deimv2-upstream`"):
        load_source(str(folder))
    with pytest.raises(SourceError, match="`family=detr` is not for it"):
        load_source(str(folder), family="detr")
