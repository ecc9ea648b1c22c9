"""What is found in an image does not depend on the images that other clients send at the same time."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

httpx = pytest.importorskip("httpx", reason="needs the 'dev' extra")
pytest.importorskip("fastapi", reason="needs the 'serve' extra")
onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")

from cli_support import cli  # noqa: F401 - a fixture
from serve_support import Server, png, together

from detrt.graph.io import read_spec, with_spec

# Families whose models see, by a mask, how far an image was padded. Their random models have no equal scores.
PADDED = ("detr", "conditional_detr", "deformable_detr", "dino", "grounding_dino")
PROMPT = "red. blue."
CLIENTS = 8
# Small ones lie in the corner of the tensor of a large one, if they share it.
SIZES = [(60, 90), (90, 60), (64, 64), (48, 100), (100, 48), (72, 80), (80, 72), (50, 98)]


@pytest.fixture(scope="module")
def images():
    """Two of each size, so that there are batches of more than one."""
    rng = np.random.default_rng(5)
    return {f"{index:02}.png": png(rng.integers(0, 256, (*SIZES[index % 8], 3), np.uint8)) for index in range(16)}


@pytest.fixture(scope="module")
def models(exported, tmp_path_factory):
    """name -> file of a tiny model whose rule makes small tensors."""
    found = {}
    for name in PADDED:
        path = tmp_path_factory.mktemp(name) / f"{name}.onnx"
        source = exported(name).path
        shutil.copytree(source.parent, path.parent, dirs_exist_ok=True)  # with the text encoder and the tokenizer
        spec = read_spec(source).with_input(height=96, width=128, shortest_edge=96, longest_edge=160)
        onnx.save(with_spec(onnx.load(source), spec), path)
        found[name] = path
    return found


def lines_of(folder, model, cli, *options):
    """name of an image -> the detections that `detrt detect --json -` prints for it."""
    rows = cli("detect", model, folder, "--json", "-", "--threshold", 0.0, *options).lines
    return {row["image"].rpartition("/")[2]: json.dumps(row["detections"]) for row in rows}


def test_a_server_under_load_answers_as_detect_does(images, models, cli, tmp_path):
    for name, data in images.items():
        (tmp_path / name).write_bytes(data)
    said = {name: ("--prompt", PROMPT) if name == "grounding_dino" else () for name in PADDED}
    expected = {name: lines_of(tmp_path, models[name], cli, *said[name]) for name in PADDED}
    for name in PADDED:
        assert len(expected[name]) == len(images) and all(len(json.loads(one)) > 4 for one in expected[name].values())
        assert lines_of(tmp_path, models[name], cli, *said[name], "--batch", "8") == expected[name], name
    served = [f"{name}={path}" for name, path in models.items()]
    with Server(*served, "--workers", 1, "--max-batch", 8, "--max-delay-ms", 20) as server:

        def client(index: int) -> list[str]:
            """Every image to every model, from another place on."""
            wrong = []
            with httpx.Client(base_url=server.address, timeout=120) as http:
                for model in PADDED:
                    for file in [*images][2 * index :] + [*images][: 2 * index]:
                        asked = {"model": model, "threshold": 0.0} | ({"prompt": PROMPT} if said[model] else {})
                        answer = http.post(
                            "/v1/detect", params=asked, content=images[file], headers={"Content-Type": "image/png"}
                        )
                        assert answer.status_code == 200, answer.text
                        if json.dumps(answer.json()["images"][0]["detections"]) != expected[model][file]:
                            wrong.append(f"{model} {file}")
            return wrong

        assert together(client, CLIENTS) == [[]] * CLIENTS
        metrics = httpx.get(f"{server.address}/metrics", timeout=60).text.splitlines()
    for name in PADDED:
        single = next(
            float(line.split()[1]) for line in metrics if line.startswith(f'detrt_batch_size_bucket{{le="1.0",model="{name}"')
        )
        every = next(float(line.split()[1]) for line in metrics if line.startswith(f'detrt_batch_size_count{{model="{name}"'))
        assert every > single, f"no two images of {name} shared a run, so that nothing was tested"
