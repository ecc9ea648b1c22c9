"""A model with masks behind the server: run lengths in JSON, maps over KServe, and the page's reader of run lengths."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

httpx = pytest.importorskip("httpx", reason="needs the 'dev' extra")
pytest.importorskip("fastapi", reason="needs the 'serve' extra")

from cli_support import write_onnx
from onnx_models import make_spec
from serve_support import Server, png

import detrt.serve
from detrt import Detector, open_session
from detrt.tasks.masks import encode_masks

IMAGE = np.full((60, 90, 3), (40, 90, 255), np.uint8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_onnx(tmp_path_factory.mktemp("served") / "masked.onnx", make_spec(masks=True))


@pytest.fixture(scope="module")
def client(model):
    with Server(model, "--workers", 1) as server, httpx.Client(base_url=server.address, timeout=60) as client:
        yield client


def test_the_answer_has_the_masks_of_a_detector(client, model):
    with Detector.open(model, threads=1, threshold=0.5) as detector:
        expected = detector(IMAGE).to_list()
    answer = client.post("/v1/detect", files={"images": png(IMAGE)}, data={"threshold": "0.5"}).json()
    assert answer["images"][0]["detections"] == expected and expected[0]["segmentation"]["counts"]


def test_kserve_returns_the_maps(client, model):
    with open_session(model) as session:
        want = session.run({"pixel_values": np.full((1, 3, 8, 12), 200, np.uint8)})["mask_logits"]
    outputs = {row["name"]: row for row in client.get("/v2/models/masked:graph").json()["outputs"]}
    assert outputs["mask_logits"]["shape"] == [-1, 4, 4, 6]
    pixels = {"name": "pixel_values", "datatype": "UINT8", "shape": [1, 3, 8, 12], "data": [200] * 288}
    answer = client.post("/v2/models/masked:graph/infer", json={"inputs": [pixels], "outputs": [{"name": "mask_logits"}]}).json()
    np.testing.assert_allclose(np.reshape(answer["outputs"][0]["data"], want.shape), want, rtol=1e-6)


def test_the_page_reads_run_lengths(tmp_path):
    """Its function by itself; tests/serve/test_page.py looks at the drawn pixels where there is a browser."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    page = (Path(detrt.serve.__file__).parent / "page" / "page.js").read_text("utf-8")
    function = re.search(r"^function runs\(.*?^}", page, re.MULTILINE | re.DOTALL)[0]
    masks = encode_masks(np.random.default_rng(2).normal(size=(4, 27, 27)).astype(np.float32), (480, 640))
    texts = json.dumps([one["counts"] for one in masks.to_coco()])
    script = tmp_path / "runs.js"
    script.write_text(f"{function}\nconsole.log(JSON.stringify({texts}.map(runs)))", "utf-8")
    found = json.loads(subprocess.run([node, script], capture_output=True, check=True, text=True).stdout)
    assert found == [counts.tolist() for counts in masks.counts]
