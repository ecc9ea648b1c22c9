"""The target inductor for models that take a prompt."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from text_cases import model_spec, text_spec

from detrt.backends.compare import output_differences
from detrt.backends.inductor.build import check_ready
from detrt.backends.inductor.config import InductorConfig
from detrt.backends.inductor.worker import named
from detrt.cli import main
from detrt.errors import EngineError


def test_lengths_of_prompts():
    tokens, classes = text_spec(max_tokens=256), text_spec("classes", max_tokens=77)
    assert InductorConfig().lengths(tokens, 900) == (64, 0)
    assert InductorConfig(tokens=300).lengths(tokens, 900) == (256, 0)
    assert InductorConfig(tokens=16).lengths(classes, 80) == (77, 16)
    assert InductorConfig(tokens=400).lengths(classes, 80) == (77, 80)
    for wrong in (3, 5000, 1.5):
        with pytest.raises(EngineError, match="`tokens` must be"):
            InductorConfig(tokens=wrong)


def test_what_a_prompted_package_cannot_be():
    spec = model_spec()
    check_ready(InductorConfig(batch=(2, 2, 2)), spec)
    with pytest.raises(EngineError, match="one batch; got `batch=1,2,4`"):
        check_ready(InductorConfig(batch=(1, 2, 4)), spec)
    with pytest.raises(EngineError, match="`decode=graph` is not for"):
        check_ready(InductorConfig(), spec.with_decode(in_graph=True))
    with pytest.raises(EngineError, match="`single_graph` is not for"):
        check_ready(InductorConfig(), replace(spec, text=replace(spec.text, encoder="")))
    with pytest.raises(EngineError, match="fixed classes"):
        check_ready(InductorConfig(tokens=16), replace(spec, text=None))


def test_queries_that_tie_may_change_places():
    generator = torch.Generator().manual_seed(0)
    logits, boxes = torch.randn(2, 9, 5, generator=generator), torch.rand(2, 9, 4, generator=generator)
    logits[:, :, 4] = -torch.inf
    order = torch.tensor([0, 2, 1, 3, 4, 5, 8, 7, 6])
    names = ("logits", "pred_boxes")
    moved = output_differences(named(names, [logits, boxes]), named(names, [logits[:, order] + 1e-6, boxes[:, order]]), 1e-3)
    assert max(moved.values()) < 1e-4
    # Another query is another query, whatever its place.
    wrong = boxes.clone()
    wrong[1, 3] += 0.3
    assert output_differences(named(names, [logits, boxes]), named(names, [logits, wrong]), 1e-3)["pred_boxes"] > 0.1
    same = boxes[:, [0, 0, 2, 3, 4, 5, 6, 7, 8]]
    assert (
        output_differences(named(names, [logits, boxes]), named(names, [logits[:, [0, 0, 2, 3, 4, 5, 6, 7, 8]], same]), 1e-3)[
            "logits"
        ]
        > 0.1
    )


@pytest.mark.slow
def test_detections_are_those_of_the_onnx_file(tmp_path, capsys):
    """The detector compiled for prompts of one length, with its text encoder and its tokenizer, from the command."""
    from PIL import Image

    from detrt.data.scenes.scene import draw_scene

    folder = tmp_path / "phrases"
    command = [
        "build",
        "embedded:phrases",
        "-o",
        str(folder),
        "--target",
        "inductor",
        "--no-check",
        "--size",
        "320",
        "--tokens",
        "16",
    ]
    assert main(command) == 0
    for index in range(3):
        Image.fromarray(draw_scene(index).image).save(tmp_path / f"{index}.png")
    found = []
    for backend in ("inductor", "onnxruntime"):
        capsys.readouterr()
        asked = ["--prompt", "red circle. striped star. blue square.", "--threshold", "0.3", "--size", "320", "--json", "-"]
        assert main(["detect", str(folder), str(tmp_path / "*.png"), "--backend", backend, *asked]) == 0
        found.append([json.loads(line)["detections"] for line in capsys.readouterr().out.splitlines()])
    assert [[d["label"] for d in image] for image in found[0]] == [[d["label"] for d in image] for image in found[1]]
    scores = [np.array([d["score"] for image in side for d in image]) for side in found]
    assert np.abs(scores[0] - scores[1]).max(initial=0) < 1e-3
    asked = ["--prompt", ". ".join(["red circle"] * 20), "--backend", "inductor"]
    assert main(["detect", str(folder), str(tmp_path / "0.png"), *asked]) == 2
    assert "at most 16" in capsys.readouterr().err
