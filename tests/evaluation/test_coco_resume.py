"""`detrt eval`: figures of pycocotools, resumed runs, saved results, and what it refuses."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

pytest.importorskip("pycocotools", reason="needs the 'eval' extra")

from onnx_models import make_model, make_spec
from PIL import Image

from detrt.backends.onnxruntime.session import OnnxSession
from detrt.cli import main
from detrt.detector import Detector
from detrt.errors import ImageError, OutputError
from detrt.evaluation.coco import METRICS, evaluate_coco, evaluate_results


@pytest.fixture
def data(tmp_path):
    """Seven images of one colour each, the model's file, and annotations that it partly finds."""
    rng = np.random.default_rng(0)
    images, annotations = [], []
    for number in range(7):
        size_hw = (int(rng.integers(20, 60)), int(rng.integers(20, 60)))
        colour = np.zeros(3, np.uint8)
        colour[number % 3] = 255
        Image.fromarray(np.full((*size_hw, 3), colour, np.uint8)).save(tmp_path / f"{number}.png")
        images.append({"id": number + 10, "file_name": f"{number}.png", "height": size_hw[0], "width": size_hw[1]})
        box = [0, 0, size_hw[1], size_hw[0]] if number != 3 else [1, 1, 5, 5]
        annotations.append({"id": number + 1, "image_id": number + 10, "category_id": 5 + number % 3, "bbox": box})
    categories = [{"id": 5 + i, "name": name} for i, name in enumerate(("red", "green", "blue"))]
    truth = tmp_path / "truth.json"
    truth.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    (tmp_path / "model.onnx").write_bytes(make_model(make_spec()))
    return tmp_path


def run(data, capsys, *more):
    arguments = ["eval", str(data / "model.onnx"), "--images", str(data), "--ground-truth", str(data / "truth.json")]
    code = main([*arguments, *more])
    return code, capsys.readouterr()


def test_figures_are_those_of_pycocotools(data, capsys):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    code, said = run(data, capsys, "--json", "-", "--batch", "3")
    assert code == 0
    found = json.loads(said.out)
    truth = json.loads((data / "truth.json").read_text())
    for entry in truth["annotations"]:
        entry |= {"area": entry["bbox"][2] * entry["bbox"][3], "iscrowd": 0}
    coco = COCO()
    coco.dataset = truth
    coco.createIndex()
    rows = []
    with Detector(OnnxSession(data / "model.onnx"), threshold=0.0) as detector:
        for image in truth["images"]:
            rows += detector([data / image["file_name"]])[0].to_coco(image["id"], {0: 5, 1: 6, 2: 7})
    direct = COCOeval(coco, coco.loadRes(rows), "bbox")
    direct.evaluate(), direct.accumulate(), direct.summarize()
    for name, value in zip(METRICS, direct.stats, strict=True):
        assert found[name] == (pytest.approx(value, abs=1e-9) if value >= 0 else None), name
    assert found["AP"] > 0.2
    assert set(found["per_class"]) == {"red", "green", "blue"}
    assert found["images"] == 7 and found["detections"] == len(rows)


def test_a_killed_run_goes_on_and_gives_the_same(data):
    class Killed(Exception):
        pass

    def kill(done, total):
        if done >= 4:
            raise Killed

    state, whole = data / "state.jsonl", {"batch_size": 2, "model": "m"}
    with OnnxSession(data / "model.onnx") as session:
        expected = evaluate_coco(session, data / "truth.json", data, **whole)
        with pytest.raises(Killed):
            evaluate_coco(session, data / "truth.json", data, resume=state, progress=kill, **whole)
        with open(state, "ab") as file:
            file.write(b'{"image_id": 14, "ro')  # killed within a line
        runs = []
        session_run = session.run
        session.run = lambda feeds: (runs.append(1), session_run(feeds))[1]
        resumed = evaluate_coco(session, data / "truth.json", data, resume=state, **whole)
        assert len(runs) == 2 and resumed.resumed == 4  # images 5 to 7 in batches of 2
        again = evaluate_coco(session, data / "truth.json", data, resume=state, **whole)
        assert len(runs) == 2 and again.resumed == 7
    assert resumed.metrics == expected.metrics == again.metrics
    assert resumed.rows == expected.rows
    assert evaluate_results(state, data / "truth.json").metrics == expected.metrics


def test_a_state_of_another_run_is_refused(data):
    state = data / "state.jsonl"
    with OnnxSession(data / "model.onnx") as session:
        evaluate_coco(session, data / "truth.json", data, resume=state, batch_size=2, model="m")
        with pytest.raises(OutputError, match="another run.*batch 2, now 3"):
            evaluate_coco(session, data / "truth.json", data, resume=state, batch_size=3, model="m")
        state.write_text("something else\n")
        with pytest.raises(OutputError, match="damaged|not a state file"):
            evaluate_coco(session, data / "truth.json", data, resume=state, batch_size=2, model="m")


def test_saved_results_give_the_same_figures(data, capsys):
    code, said = run(data, capsys, "--json", "-", "--save", str(data / "results.json"))
    direct = json.loads(said.out)
    assert code == 0
    code = main(["eval", "--results", str(data / "results.json"), "--ground-truth", str(data / "truth.json"), "--json", "-"])
    saved = json.loads(capsys.readouterr().out)
    assert code == 0
    assert {name: saved[name] for name in METRICS} == {name: direct[name] for name in METRICS}
    assert saved["per_class"] == direct["per_class"]


def test_limit_takes_the_first_images(data, capsys):
    code, said = run(data, capsys, "--json", "-", "--limit", "3")
    assert code == 0 and json.loads(said.out)["images"] == 3


def test_a_table_for_people(data, capsys):
    code, said = run(data, capsys)
    assert code == 0
    assert "AP50" in said.out and "green" in said.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.onnx", "--images", "."], "--ground-truth"),
        (["--ground-truth", "truth.json"], "MODEL and --images"),
        (["model.onnx", "--results", "r.json", "--ground-truth", "truth.json"], "leave out MODEL"),
        (["--results", "none.json", "--ground-truth", "truth.json"], "no results file"),
        (["none.onnx", "--images", ".", "--ground-truth", "truth.json"], "no ONNX file"),
        (["model.onnx", "--images", ".", "--ground-truth", "none.json"], "no annotation file"),
    ],
)
def test_bad_input_is_exit_code_2(arguments, words, data, capsys, monkeypatch):
    monkeypatch.chdir(data)
    assert main(["eval", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["{", "{}", '[{"image_id": 10}]', '[{"image_id": 99, "category_id": 5, "bbox": [0,0,1,1], "score": 1}]']
)
def test_damaged_results_are_refused(text, data):
    (data / "results.json").write_text(text)
    with pytest.raises(ImageError, match="results"):
        evaluate_results(data / "results.json", data / "truth.json")


@pytest.mark.slow  # the figures are those of tests/models/layers/test_deimv2.py, here by the commands
def test_femto_gives_the_authors_figures(real_data, tmp_path, capsys):
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    coco = real_data / "images" / "coco_permissive"
    graph = tmp_path / "femto.onnx"
    checkpoint = str(real_data / "checkpoints" / "deimv2-femto-coco")
    assert main(["export", checkpoint, "--trust-remote-code", "--no-check", "-o", str(graph)]) == 0
    capsys.readouterr()
    truth = coco / "annotations" / "instances_val2017.json"
    assert main(["eval", str(graph), "--images", str(coco / "val2017"), "--ground-truth", str(truth), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["AP"] == pytest.approx(0.334, abs=1e-3)
    assert found["AP50"] == pytest.approx(0.496, abs=1e-3)
    assert os.path.basename(found["model"]) == "femto.onnx"
