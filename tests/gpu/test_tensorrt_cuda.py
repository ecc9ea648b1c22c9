"""Images through a TensorRT engine on its GPU. `DETRT_TEST_BUNDLE=BUNDLE pytest -m gpu tests/gpu/test_tensorrt_cuda.py`

BUNDLE has an engine of the installed TensorRT and the GPU here; without one an engine of `embedded:shapes` is built, in minutes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from detrt.backends.batches import BATCHES_ON_GPU
from detrt.backends.open import open_session
from detrt.backends.tensorrt import TensorRTSession
from detrt.bench.measure import jpeg_of
from detrt.bench.stages import stage_times
from detrt.data.preprocess import preprocess
from detrt.data.scenes.scene import draw_scene
from detrt.detections import Detections
from detrt.detector import Detector
from detrt.spec import INSTANCE_SEGMENTATION
from detrt.tasks.masks import mask_iou

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SIZES = ((320, 320), (480, 640), (640, 427), (480, 640), (333, 500))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("tensorrt", reason="needs TensorRT")
    if given := os.environ.get("DETRT_TEST_BUNDLE"):
        return given
    from detrt.cli import main

    folder = tmp_path_factory.mktemp("engine") / "bundle"
    assert main(["build", "embedded:shapes", "-o", str(folder), "--target", "tensorrt", "--size", "320", "--batch", "1"]) == 0
    return str(folder)


@pytest.fixture
def session(bundle: str) -> Iterator[TensorRTSession]:
    with open_session(bundle, backend="tensorrt") as opened:
        assert isinstance(opened, TensorRTSession)
        yield opened


def images() -> list[np.ndarray]:
    return [draw_scene(900_000_300 + seed, size_hw=size).image for seed, size in enumerate(SIZES)]


def same(want: Detections, got: Detections) -> bool:
    """Equal up to the order of nearly equal scores."""
    if len(want) != len(got) or want.image_size_hw != got.image_size_hw:
        return False
    if not len(want):
        return True
    box = np.abs(want.boxes_xyxy[:, None] - got.boxes_xyxy[None]).max(-1)
    score = np.abs(want.scores[:, None] - got.scores[None])
    near = (box < 0.1) & (score < 1e-3) & (want.class_ids[:, None] == got.class_ids[None])
    if want.masks is not None and got.masks is not None:
        near &= mask_iou(want.masks, got.masks) > 0.99
    return bool(near.any(0).all() and near.any(1).all())


def test_detections_are_those_of_images_resized_on_the_cpu(session: TensorRTSession) -> None:
    given = images()
    plain, there = Detector(session, threshold=0.05, on_device=False), Detector(session, threshold=0.05)
    assert plain.ahead == 0 and there.ahead == BATCHES_ON_GPU, session.info.note
    want = plain(given)
    assert sum(map(len, want)) > 0
    for _ in range(6):  # plain runs, the capture of CUDA graphs, their replays
        for expected, got in zip(want, there(given), strict=True):
            assert same(expected, got)
    assert session.graph_note == ""


def test_arrays_and_images_take_turns(session: TensorRTSession) -> None:
    (image, *_) = images()
    there = Detector(session, threshold=0.05)
    feeds = preprocess([image] * there.batch_size, session.spec, size_hw=there.size_hw).feeds
    outputs, found = session.run(feeds), there(image)
    for _ in range(5):
        for name, array in session.run(feeds).items():
            assert np.array_equal(array, outputs[name])
        assert same(found, there(image))
    assert len(session.forward_times(3)) == 3


def test_another_thread_runs_arrays_meanwhile(session: TensorRTSession) -> None:
    given = images()
    there = Detector(session, threshold=0.05)
    feeds = preprocess(given[:1] * there.batch_size, session.spec, size_hw=there.size_hw).feeds
    outputs, want, wrong = session.run(feeds), there(given), []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            wrong.extend(name for name, array in session.run(feeds).items() if not np.array_equal(array, outputs[name]))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(10):
            assert all(same(expected, got) for expected, got in zip(want, there(given), strict=True))
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_files_may_be_decoded_by_the_gpu(session: TensorRTSession) -> None:
    pytest.importorskip("nvidia.nvimgcodec", reason="needs detrt[decode]")
    files = [jpeg_of(image) for image in images()]
    detector = Detector(session, threshold=0.5, image_decoder="gpu")
    found = detector(files)
    assert detector.decoder is not None and detector.decoder.counts["files on the GPU"] == len(files)
    for want, got in zip(Detector(session, threshold=0.5)(files), found, strict=True):
        assert abs(len(want) - len(got)) <= 1  # their pixels differ by a level


def test_masks_come_from_the_engine(session: TensorRTSession) -> None:
    if session.spec.task != INSTANCE_SEGMENTATION:
        pytest.skip("the engine of DETRT_TEST_BUNDLE has no masks")
    found = Detector(session, threshold=0.3)(images())
    assert sum(map(len, found)) > 0 and all(one.masks is not None and len(one.masks) == len(one) for one in found)


def test_layers_have_times_and_leave_the_session_as_it_was(session: TensorRTSession) -> None:
    detector = Detector(session)
    feeds = preprocess(images()[:1] * detector.batch_size, session.spec, size_hw=detector.size).feeds
    outputs = session.run(feeds)
    times = session.layer_times(3)
    assert len(times) > 10 and 0 < sum(times.values()) < 1000
    for _ in range(4):  # again to the replay of a CUDA graph
        for name, array in session.run(feeds).items():
            assert np.array_equal(array, outputs[name])
    assert session.graph_note == ""


def test_every_stage_has_a_time(session: TensorRTSession) -> None:
    stages = stage_times(session, [jpeg_of(images()[0])] * Detector(session).batch_size, None)
    assert list(stages) == ["decode", "upload", "resize", "forward", "selection", "download", "post-process"]
    assert min(stages.values()) > 0
