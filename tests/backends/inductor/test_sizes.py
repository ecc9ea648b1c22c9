"""Bundles with packages of several sizes: how they are requested, and which image gets which."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from detrt.backends.inductor.config import InductorConfig, package_name
from detrt.backends.inductor.session import SizedSession
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.shared import configs_of
from detrt.bundle import Bundle
from detrt.cli import main
from detrt.cli.build import TargetOptions
from detrt.cli.options import SizeOptions, parse_sizes
from detrt.data.preprocess import nearest_size
from detrt.detector import Detector
from detrt.errors import DetrtError, EngineError, SessionError, SpecError
from detrt.spec import PIXEL_MASK, PIXEL_VALUES

WIDE, TALL = (64, 96), (96, 64)


def packages(size, target, device=()):
    asked = TargetOptions(target, device).shared(SizeOptions(parse_sizes(size)), "model")
    return [config for config in configs_of(asked) if isinstance(config, InductorConfig)]


def test_several_sizes_become_several_packages():
    assert packages("640", ("onnx",)) == []
    sizes = [(64, 96), (320, 320)]
    found = [(c.device, c.height, c.width) for c in packages("64x96, 320", ("inductor", "onnx"), ("cpu", "cuda"))]
    assert found == [(d, (h,) * 3, (w,) * 3) for d in ("cpu", "cuda") for h, w in sizes]
    assert package_name("cuda", 90, "fp16", (64, 96)) == "model.inductor-sm90-64x96.fp16.pt2"
    with pytest.raises(EngineError, match="several sizes"):
        packages("320,640", ("inductor", "tensorrt"))
    with pytest.raises(DetrtError, match="one number such as 640"):
        parse_sizes("320,")


def test_a_range_is_of_the_targets_that_take_one():
    """Beside targets that take every size: OpenVINO's model was asked about the range of an engine."""
    ranged = SizeOptions(height=(320, 320, 320), width=(256, 320, 384))
    asked = TargetOptions(("tensorrt-rtx", "openvino", "onnx")).shared(ranged, "model")
    assert [getattr(config, "width", None) for config in configs_of(asked)] == [(256, 320, 384), None, None]
    with pytest.raises(EngineError, match=r"`width=256,320,384` is a range"):
        TargetOptions(("openvino",)).shared(ranged, "model")


def test_the_nearest_aspect_ratio_wins_and_the_first_of_equals():
    assert nearest_size((480, 640), [TALL, WIDE]) == WIDE and nearest_size((640, 480), [TALL, WIDE]) == TALL
    assert nearest_size((500, 500), [WIDE, TALL]) == WIDE and nearest_size((10, 1000), [(320, 320), (640, 640)]) == (320, 320)


class OneSize(OnnxSession):
    """An ONNX graph of one size in the place of a package."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._info = replace(self._info, max_batch=2)


@pytest.fixture(scope="module")
def sessions(exported):
    reports = [exported("detr", height=h, width=w) for h, w in (WIDE, TALL)]
    # As in a bundle, the spec is that of the model, which takes any size.
    return [OneSize(r.path, replace(r.spec, input=replace(r.spec.input, dynamic=True))) for r in reports]


def test_every_image_gets_its_size(sessions):
    sized = SizedSession(sessions)
    assert sized.info.sizes == (WIDE, TALL) and sized.info.max_batch == 2
    rng = np.random.default_rng(3)
    images = [rng.integers(0, 256, (*size, 3), np.uint8) for size in ((60, 90), (90, 50), (50, 90), (80, 60), (70, 70))]
    found = Detector(sized, threshold=0.0, batch_size=2)(images)
    alone = [Detector(session, threshold=0.0) for session in sessions]
    for image, got in zip(images, found, strict=True):
        want = alone[int(image.shape[0] > image.shape[1])]([image])[0]
        assert np.allclose(want.boxes_xyxy, got.boxes_xyxy, atol=1e-2) and np.allclose(want.scores, got.scores, atol=1e-4)


def test_a_size_that_was_not_built(sessions):
    sized = SizedSession(sessions)
    with pytest.raises(SpecError, match="compiled for 64x96, 96x64"):
        Detector(sized, size=(32, 32))
    assert Detector(sized, size=TALL).size == TALL
    feeds = {PIXEL_VALUES: np.zeros((1, 3, 32, 32), np.uint8), PIXEL_MASK: np.ones((1, 32, 32), np.int64)}
    with pytest.raises(SessionError, match="there is no package for 32x32"):
        sized.run(feeds)


def test_verify_opens_the_candidate_as_asked(exported, tmp_path, capsys):
    from PIL import Image

    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(tmp_path / "0.png")
    common = ["--against", "random:detr/tiny", "--images", str(tmp_path / "0.png")]
    path = str(exported("detr", height=64, width=96).path)
    for options, says in (
        (["--device", "cuda:0"], "provider 'cuda' is not in this build"),
        (["--backend", "inductor"], "runs with onnxruntime or onnxruntime-rtx; got backend 'inductor'"),
    ):
        assert main(["verify", path, *common, *options]) == 2
        assert says in capsys.readouterr().err
    assert main(["verify", "random:detr/tiny", *common, "--backend", "onnxruntime"]) == 2
    assert "is a checkpoint, which PyTorch runs" in capsys.readouterr().err


@pytest.mark.slow
def test_built_and_run_through_the_command(tmp_path, capsys):
    pytest.importorskip("torch")
    folder = tmp_path / "sized"
    command = ["build", "random:rt_detr_v2/tiny", "-o", str(folder), "--target", "inductor", "--batch", "1", "--no-check"]
    assert main([*command, "--size", "64x96,96x64"]) == 0
    names = [entry.path for entry in Bundle.open(folder).of_kind("inductor")]
    assert names == ["model.inductor-cpu-64x96.pt2", "model.inductor-cpu-96x64.pt2"]
    from PIL import Image

    for index, size in enumerate((WIDE, TALL)):
        Image.fromarray(np.random.default_rng(index).integers(0, 256, (*size, 3), np.uint8)).save(tmp_path / f"{index}.png")
    capsys.readouterr()
    assert main(["detect", str(folder), str(tmp_path / "*.png"), "--backend", "inductor", "--threshold", "0", "--json", "-"]) == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 2
    assert main(["detect", str(folder), str(tmp_path / "0.png"), "--backend", "inductor", "--size", "32"]) == 2
    assert "64x96, 96x64" in capsys.readouterr().err
