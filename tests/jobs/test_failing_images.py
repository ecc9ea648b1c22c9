"""An image that the model fails on, such as a thin one, is named and left out; a model that fails on every image ends the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from runtime_cases import make_session, make_spec

from detrt.data.images import Input, expand_inputs
from detrt.detector import Detector
from detrt.errors import SessionError
from detrt.jobs.run import ImageFailure, detect_inputs

EDGE = {"resize": "shortest_edge", "shortest_edge": 16, "longest_edge": 24, "dynamic": True}
SIZES = [(90, 120), (1, 4000), (90, 121), (200, 3), (80, 120), (90, 30)]
THIN = ["1.png", "3.png"]


def detector(batch, fails):
    session = make_session(make_spec(**EDGE, mask=True))
    works = session._function
    calls = []

    def run(feeds):
        calls.append(feeds["pixel_values"].shape)
        rows, columns = feeds["pixel_mask"].any(2).sum(1), feeds["pixel_mask"].any(1).sum(1)
        if fails(int(min(rows.min(), columns.min()))):
            raise SessionError("chooses the best 300 of an image's positions, which has 49")
        return works(feeds)

    session._function = run
    return Detector(session, threshold=0.01, batch_size=batch), calls


@pytest.fixture
def photos(tmp_path):
    for index, size in enumerate(SIZES):
        Image.fromarray(np.full((*size, 3), 100 + index, np.uint8)).save(tmp_path / f"{index}.png")
    return expand_inputs([str(tmp_path)])


@pytest.mark.parametrize("batch", [1, 2, 3, 6])
def test_thin_images_are_named_and_the_others_are_done(batch, photos):
    made, calls = detector(batch, lambda side: side < 4)
    found = list(detect_inputs(made, photos))
    assert [Path(one.input.path).name for one in found] == [f"{i}.png" for i in range(6)]
    failed = [one for one in found if isinstance(one, ImageFailure)]
    assert [Path(one.input.path).name for one in failed] == THIN
    for one, size in zip(failed, ("1x4000", "200x3"), strict=True):
        assert f"{one.input.path}', of {size} pixels, fails in the model: chooses the best 300" in str(one.error)
    scores = [round(float(one.record.detections.scores[0]) * 255) for one in found if not isinstance(one, ImageFailure)]
    assert scores == [100, 102, 104, 105]
    assert len(calls) <= 2 * len(photos) + 2


@pytest.mark.parametrize("batch", [1, 2])
def test_a_folder_of_thin_images_alone(batch, photos):
    made, _ = detector(batch, lambda side: side < 4)
    found = list(detect_inputs(made, [photos[1], photos[3]]))
    assert all(isinstance(one, ImageFailure) for one in found) and len(found) == 2


@pytest.mark.parametrize("batch", [1, 3])
def test_a_model_that_fails_on_all_images_ends_the_run(batch, photos):
    made, calls = detector(batch, lambda side: True)
    with pytest.raises(SessionError, match="^chooses the best 300"):
        list(detect_inputs(made, photos))
    assert len(calls) <= 3 * batch + 1  # two batches are on their way; each image of the first again; and one without content


def test_a_thin_video_is_named_once(photos, tmp_path):
    pytest.importorskip("av", reason="needs the 'video' extra")
    from detrt.data.video import video_writer

    with video_writer(tmp_path / "thin.mp4", fps=5, size=(2, 600)) as put:
        for _ in range(5):
            put(np.zeros((2, 600, 3), np.uint8))
    made, _ = detector(2, lambda side: side < 4)
    found = list(detect_inputs(made, [Input(tmp_path / "thin.mp4", "video"), photos[0]]))
    assert [isinstance(one, ImageFailure) for one in found] == [True, False]
