"""A long run under the sanitizers: nothing grows, nothing is lost, nothing is touched that was given back."""

from __future__ import annotations

import json
import os

import pytest
from native import BUILD, run
from PIL import Image

pytestmark = pytest.mark.slow
COUNT = 1000


@pytest.fixture(scope="module")
def checked():
    folder = BUILD.parent / "sanitize-libtorch"
    if not (folder / "detrt-run").is_file():
        pytest.skip(f"the C++ runtime is not built in '{folder}'; run: make cpp-test-slow")
    return folder


def test_a_thousand_images_leak_nothing(checked, bundle, photos, tmp_path):
    inputs = tmp_path / "in"
    inputs.mkdir()
    for number in range(COUNT):
        source = photos[number % len(photos)]
        os.link(source, inputs / f"{number:04}{source.suffix}")
    (inputs / "bad.jpg").write_bytes(b"\xff\xd8\xff\xe0 no image")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ASAN_OPTIONS": "detect_leaks=1:exitcode=99"}
    command = [
        checked / "detrt-run",
        bundle,
        inputs,
        "--json",
        tmp_path / "out.jsonl",
        "--save",
        tmp_path / "saved",
        "--batch",
        "4",
    ]
    done = run(*command, env=environment)
    assert done.returncode == 2 and f"1 of {COUNT + 1} inputs could not be read" in done.stderr, done.stderr[-3000:]
    assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr
    lines = (tmp_path / "out.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == COUNT
    # The same image gives the same detections, first and last.
    rows = [json.loads(line)["detections"] for line in lines]
    assert all(rows[i] == rows[i % len(photos)] for i in range(COUNT))
    assert len(list((tmp_path / "saved").iterdir())) == COUNT


def test_real_photographs_leak_nothing(checked, bundle, real_data, tmp_path):
    folder = real_data / "images/bccd"
    images = sorted(folder.rglob("*.jpg"))[:100]
    assert images
    for path in images[:3]:
        Image.open(path).verify()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ASAN_OPTIONS": "detect_leaks=1:exitcode=99"}
    done = run(checked / "detrt-run", bundle, *images, "--json", tmp_path / "out.jsonl", env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
