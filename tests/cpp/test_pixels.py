"""Pixels of the C++ runtime are those of Pillow: files in, and resized."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from PIL import Image
from slow_images import scans

from detrt.data.images import load_image
from detrt.data.preprocess import resize
from detrt.errors import ImageError
from detrt.spec import RESAMPLES


def pixels(build, path, *size):
    done = subprocess.run([str(build / "tests/detrt-pixels"), str(path), *map(str, size)], capture_output=True, timeout=60)
    if done.returncode == 2:
        return done.stderr.decode()
    assert done.returncode == 0, done.stderr
    head, _, body = done.stdout.partition(b"\n")
    height, width = map(int, head.split())
    return np.frombuffer(body, np.uint8).reshape(height, width, 3)


def test_files(sanitized, photos):
    assert len(photos) > 20
    for path in photos:
        expected, got = load_image(path), pixels(sanitized, path)
        assert got.shape == expected.shape, path.name
        # CMYK and a few upsamplings may differ in rounding between versions of libjpeg-turbo.
        assert np.abs(got.astype(int) - expected).max() <= 1, path.name


@pytest.mark.parametrize("resample", RESAMPLES)
def test_resize(sanitized, tmp_path, resample):
    rng = np.random.default_rng(RESAMPLES.index(resample))
    sizes = [((97, 131), (23, 31)), ((64, 48), (41, 43)), ((30, 50), (64, 20)), ((20, 20), (64, 64)), ((90, 31), (9, 31))]
    for number, (before, after) in enumerate(sizes):
        path = tmp_path / f"{number}.png"
        Image.fromarray(rng.integers(0, 256, (*before, 3), dtype=np.uint8)).save(path)
        expected = resize(load_image(path), after, resample)
        got = pixels(sanitized, path, *after, RESAMPLES.index(resample))
        assert np.abs(got.astype(int) - expected).max() <= 1, (before, after)


def test_real_photographs(sanitized, real_data):
    paths = sorted((real_data / "images/coco_permissive").rglob("*.jpg"))[:12]
    assert paths
    for path in paths:
        expected = resize(load_image(path), (416, 416), "bilinear")
        got = pixels(sanitized, path, 416, 416, RESAMPLES.index("bilinear"))
        assert np.abs(got.astype(int) - expected).max() <= 1, path.name


def test_scans_are_counted_before_decoding(sanitized, tmp_path):
    """A hundred of them are read, as in Python; a file of one more takes seconds."""
    path = tmp_path / "scans.jpg"
    path.write_bytes(scans(100, side=40))
    assert (pixels(sanitized, path) == load_image(path)).all()
    path.write_bytes(scans(101))
    assert "more than 100 scans" in pixels(sanitized, path)


def test_damaged_files_are_refused_by_both(sanitized, photos, tmp_path):
    refused = 0
    for path in photos:
        content = path.read_bytes()
        for cut in (len(content) // 3, len(content) * 2 // 3):
            part = tmp_path / path.name
            part.write_bytes(content[:cut])
            got = pixels(sanitized, part)
            with pytest.raises(ImageError):
                load_image(part)
            assert isinstance(got, str) and "damaged or truncated" in got, path.name
            refused += 1
    assert refused > 40
