"""The commands on a model that takes a prompt: detect, verify and eval, their outputs, and bad input."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from text_cases import colour_image, model_spec, text_spec, tokenizer_json

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
pytest.importorskip("tokenizers", reason="needs the 'text' extra")
from cli_support import cli, snapshot, write_onnx  # noqa: F401 - fixture
from text_models import write_text_bundle, write_text_model

from detrt import Detector, open_session
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.errors import SpecError

IMAGES = {"a.png": ("red", "black", "blue"), "b.png": ("black", "green", "black")}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with a bundle, the same as files, and two images."""
    monkeypatch.chdir(tmp_path)
    write_text_bundle(tmp_path / "gd")
    write_text_model(tmp_path / "files")
    (tmp_path / "in").mkdir()
    for name, colours in IMAGES.items():
        Image.fromarray(colour_image(*colours, height=16, width=24)).save(tmp_path / "in" / name)
    return tmp_path


def found(row):
    return sorted((d["label"], d["class_id"], round(d["box_xyxy"][0] / row["width"] * 3)) for d in row["detections"])


@pytest.mark.parametrize("model", ["gd", "files/model.onnx"])
def test_detect_a_prompt(cli, place, model):
    rows = cli("detect", model, "in", "--prompt", "a red cat. blue", "--json", "-", "-q").lines
    assert found(rows[0]) == [("a red cat", 0, 0), ("blue", 1, 2)] and rows[1]["detections"] == []
    for row in rows:
        assert row["prompt"] == "a red cat. blue"
        for one in row["detections"]:
            start, end = one["phrase_span"]
            assert row["prompt"][start:end] == one["label"]
    keys = ["label", "class_id", "score", "box_xyxy", "phrase_span"]
    assert list(rows[0]["detections"][0]) == keys


def test_prompt_files(cli, place):
    (place / "prompt.txt").write_text("\ufeffgreen star.\nred\n", encoding="utf-8")
    rows = cli("detect", "gd", "in", "--prompt-file", "prompt.txt", "--json", "-", "-q").lines
    assert [found(row) for row in rows] == [[("red", 1, 0)], [("green star", 0, 1)]]
    assert rows[0]["prompt"] == "green star. red"


NOTES = {
    "red, blue": "'red, blue' is one phrase, because full stops end phrases; for several: --prompt 'red. blue.'",
    "words.txt": "'words.txt' is also a file; to read it: --prompt-file words.txt",
    "red": "",
    "red. blue": "",
    "red, or rust. blue": "",
}


@pytest.mark.parametrize("prompt", NOTES)
@pytest.mark.parametrize("command", ["detect", "encode-prompt"])
def test_what_may_be_meant_otherwise_is_noted(cli, place, command, prompt):
    (place / "words.txt").write_text("red")
    more = ("in",) if command == "detect" else ("-o", "prompt.json")
    said = " ".join(cli(command, "gd", *more, "--prompt", prompt).err.split())
    assert NOTES[prompt] in said and (NOTES[prompt] != "") == ("note: " in said.replace("note: the tokenizer", ""))


def test_quiet_notes_nothing(cli, place):
    assert cli("detect", "gd", "in", "--prompt", "red, blue", "--quiet").err == ""


def test_class_lists(cli, place):
    (place / "names.txt").write_text("cat\n\nred\ndog\nremote control\nblue\ngreen\nred\n")
    rows = cli("detect", "gd", "in", "--classes-from", "names.txt", "--json", "-", "-q").lines
    assert [found(row) for row in rows] == [[("blue", 5, 2), ("red", 2, 0)], [("green", 6, 1)]]
    assert "prompt" not in rows[0] and "phrase_span" not in rows[0]["detections"][0]
    # The same through a model that takes seven tokens at once, so three runs.
    write_text_bundle(place / "short", model_spec(text=text_spec(max_tokens=7)))
    parts = cli("detect", "short", "in", "--classes-from", "names.txt", "--json", "-", "-q").lines
    assert parts == rows


def test_other_outputs(cli, place):
    cli("detect", "gd", "in", "--prompt", "red. blue. green.", "--csv", "f.csv", "--coco", "f.json", "--save-dir", "runs", "-q")
    with open("f.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["image"], row["label"], row["class_id"]) for row in table] == [
        ("in/a.png", "red", "0"),
        ("in/a.png", "blue", "1"),
        ("in/b.png", "green", "2"),
    ]
    assert [row["category_id"] for row in json.loads((place / "f.json").read_text())] == [0, 1, 2]
    drawn = np.asarray(Image.open("runs/a.png"))
    assert (drawn != np.asarray(Image.open("in/a.png"))).any()
    out = cli("detect", "gd", "in", "--prompt", "red. blue. green.").out
    assert out.splitlines() == ["in/a.png: 1 red, 1 blue", "in/b.png: 1 green"]


def coco_truth(place):
    """Annotations in which every image has its boxes."""
    categories = [{"id": 7, "name": "red"}, {"id": 8, "name": "green"}, {"id": 9, "name": "blue"}, {"id": 10, "name": "cat"}]
    ids = {row["name"]: row["id"] for row in categories}
    images, boxes = [], []
    for number, (name, colours) in enumerate(IMAGES.items(), 1):
        images.append({"id": number, "file_name": name, "width": 24, "height": 16})
        for q, colour in enumerate(colours):
            if colour in ids:
                box = [8 * q, 0, 8, 16]
                boxes.append({"id": len(boxes) + 1, "image_id": number, "category_id": ids[colour], "bbox": box})
    path = place / "truth.json"
    path.write_text(json.dumps({"images": images, "annotations": boxes, "categories": categories}))
    return path


def test_coco_ids_by_name(cli, place):
    truth = coco_truth(place)
    cli("detect", "gd", "in", "--prompt", "a cat. blue. Red", "--coco", "f.json", "--coco-images", truth, "-q")
    rows = json.loads((place / "f.json").read_text())
    assert [(row["image_id"], row["category_id"]) for row in rows] == [(1, 7), (1, 9)]


def test_eval_asks_for_the_categories(cli, place):
    pytest.importorskip("pycocotools", reason="needs the 'eval' extra")
    truth = coco_truth(place)
    report = cli("eval", "gd", "--images", "in", "--ground-truth", truth, "--json", "-").json
    assert report["AP"] == pytest.approx(1.0)
    assert set(report["per_class"]) == {"red", "green", "blue", "cat"} and report["without_class"] == []
    write_text_bundle(place / "short", model_spec(text=text_spec(max_tokens=5)))
    parts = cli("eval", "short", "--images", "in", "--ground-truth", truth, "--json", "-").json
    assert parts["AP"] == pytest.approx(1.0)


def test_verify(cli, place):
    report = cli(
        "verify", "gd", "--against", "files/model.onnx", "--images", "in", "--prompt", "red. a blue cat.", "--json", "-"
    ).json
    assert report["passed"] and report["compared"] > 0
    assert {"logits", "pred_boxes", "text_features"} <= {row["output"] for row in report["tensors"]}
    (place / "names.txt").write_text("red\nblue\ncat\n")
    cli("verify", "gd", "--against", "files/model.onnx", "--images", "in", "--classes-from", "names.txt")
    write_text_model(place / "other", model_spec(text=text_spec(max_tokens=100)))
    out = cli("verify", "gd", "--against", "other/model.onnx", "--images", "in", "--prompt", "red.", code=3).out
    assert "spec.text.max_tokens is 256, the reference has 100" in out
    # A tokenizer that splits other words.
    (place / "other" / "tokenizer.json").write_bytes(tokenizer_json(["redder"]))
    out = cli("verify", "gd", "--against", "other/model.onnx", "--images", "in", "--prompt", "redder.", code=3).out
    assert "the tokenizers differ" in out
    text = "no prompt|takes no prompt|--prompt"
    cli.refused("verify", "gd", "--against", "files/model.onnx", "--images", "in", names="gd", advice=text)
    write_onnx(place / "fixed.onnx")
    cli.refused(
        "verify", "fixed.onnx", "--against", "fixed.onnx", "--images", "in", "--prompt", "red.", names="fixed.onnx", advice=text
    )


def test_labels_of_tokens(cli, place):
    common = ("detect", "gd", "in/a.png", "--prompt", "red cat. a blue star", "--json", "-", "-q")
    rows = cli(*common, "--phrases", "tokens", "--text-threshold", "0.9").lines
    assert found(rows[0]) == [("blue", 1, 2), ("red", 0, 0)]
    rows = cli(*common, "--phrases", "tokens-of-best", "--text-threshold", "0").lines
    assert found(rows[0]) == [("a blue star", 1, 2), ("red cat", 0, 0)]


@pytest.mark.parametrize(
    ("prompt", "label"), [("猫. red", "red"), ("RED.", "RED"), ("  red  ", "red"), ("Ärger, 猫 red. ?", "Ärger, 猫 red")]
)
def test_any_script(cli, place, prompt, label):
    """Labels that the bundled font has no letters for are drawn, and written as they are."""
    cli("detect", "gd", "in", "--prompt", prompt, "--save-dir", "runs", "--json", "f.jsonl", "-q")
    rows = [json.loads(line) for line in (place / "f.jsonl").read_text("utf-8").splitlines()]
    assert label in [d["label"] for d in rows[0]["detections"]] and rows[0]["prompt"] == prompt
    assert Image.open("runs/a.png").size == (24, 16)


def test_words_that_are_not_known_are_told(cli, place):
    result = cli("detect", "gd", "in", "--prompt", "zebra. red.")
    assert "knows no part of 'zebra'" in result.err and "1 red" in result.out


LONG = "cat " * 300
BAD = [
    ((), "gd", "there is none.*--prompt"),
    (("--prompt", ""), "empty", "give a value, or leave the option out"),
    (("--prompt", " . . "), "no words", "a cat"),
    (("--prompt", LONG), "303 tokens", "at most 256.*--classes-from"),
    (("--prompt-file", "none.txt"), "none.txt", "check the path"),
    (("--prompt-file", "empty.txt"), "empty.txt", "write a prompt"),
    (("--classes-from", "none.txt"), "none.txt", "check the path"),
    (("--classes-from", "empty.txt"), "empty.txt", "one class name a line"),
    (("--classes-from", "in/a.png"), "in/a.png", "UTF-8"),
    (("--classes-from", "in"), "'in'", "cannot be read"),
    (("--prompt", "red.", "--classes-from", "empty.txt"), "--prompt and --classes-from", "give one"),
    (("--classes", "red"), "--classes", "--prompt"),
    (("--prompt", "red.", "--classes", "red"), "--classes", "--prompt"),
    (("--prompt", "red.", "--task", "Find it."), "no task", "leave the task out"),
    (("--prompt", "red.", "--phrases", "words"), "'words'", "best, tokens"),
    (("--prompt", "red.", "--text-threshold", "0.3"), "--text-threshold", "--phrases"),
    (("--prompt", "red.", "--phrases", "tokens", "--text-threshold", "3"), "--text-threshold", "from 0 to 1; got 3"),
]


@pytest.mark.parametrize(("options", "names", "advice"), BAD, ids=lambda v: " ".join(v)[:30] if isinstance(v, tuple) else "")
def test_bad_prompts(cli, place, options, names, advice):
    (place / "empty.txt").write_text("\n \n")
    before = snapshot(place)
    message = cli.refused(
        "detect", "gd", "in", *options, "--json", "out.jsonl", "--save-dir", "runs",
        names="" if names == "gd" else names, advice=f"(?s){advice}",
    )  # fmt: skip
    assert len(message) < 600 and snapshot(place) == before


@pytest.mark.parametrize(
    "options", [("--prompt", "red."), ("--classes-from", "names.txt"), ("--phrases", "tokens"), ("--task", "Find it.")]
)
def test_a_model_of_fixed_classes_takes_no_prompt(cli, place, options):
    write_onnx(place / "fixed.onnx")
    (place / "names.txt").write_text("red\n")
    cli.refused("detect", "fixed.onnx", "in", *options, names="fixed classes", advice="--classes")


def test_models_of_which_one_takes_a_prompt_are_not_compared(cli, place):
    write_onnx(place / "fixed.onnx")
    words = "they cannot be the same detector: give another --against"
    options = ("--images", "in")
    cli.refused("verify", "fixed.onnx", "--against", "gd", *options, names="'gd' takes a prompt", advice=words)
    cli.refused("verify", "gd", "--against", "fixed.onnx", *options, "--prompt", "red.", names="has fixed classes", advice=words)


@pytest.mark.parametrize("kind", ["tokenizer", "text"])
def test_a_bundle_without_a_part(cli, place, kind):
    write_text_bundle(place / "gd", without=kind)
    what = {"tokenizer": "tokenizer 'tokenizer.json'", "text": "text encoder 'text.onnx'"}[kind]
    cli.refused("detect", "gd", "in", "--prompt", "red.", names=f"has no {what}", advice="build it again")


@pytest.mark.parametrize("name", ["tokenizer.json", "text.onnx"])
@pytest.mark.parametrize("damage", ["gone", "other", "cut"])
def test_damaged_parts(cli, place, name, damage):
    for folder in ("gd", "files"):
        path = place / folder / name
        content = path.read_bytes()
        path.unlink()
        if damage != "gone":
            path.write_bytes(b"other" if damage == "other" else content[: len(content) // 2])
    cli.refused("detect", "gd", "in", "--prompt", "red.", names=name, advice="build (it|the bundle) again")
    cli.refused("detect", "files/model.onnx", "in", "--prompt", "red.", names=name, advice="export|copy")


def test_a_text_encoder_is_not_a_detector(cli, place):
    cli.refused("detect", "files/text.onnx", "in", "--prompt", "red.", names="text encoder", advice="give the model itself")


def test_sessions_are_closed_when_a_part_is_missing(place, monkeypatch):
    closed = []
    monkeypatch.setattr(OnnxSession, "close", lambda self: closed.append(self.name))
    (place / "files" / "tokenizer.json").unlink()
    with pytest.raises(SpecError, match="has no tokenizer"):
        open_session("files/model.onnx")
    assert len(closed) == 1
    with pytest.raises(Exception, match="fewer prompts"):
        Detector.open("gd")(["in/a.png"], prompts=[])


def test_neither_torch_nor_transformers_is_loaded(place):
    code = (
        "import sys; from detrt import Detector\n"
        "found, = Detector.open('gd', prompt='red. blue.')(['in/a.png'])\n"
        "print(sorted(found.labels), [n for n in ('torch', 'transformers', 'onnx') if n in sys.modules])"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert out.strip() == "['blue', 'red'] []"


def test_one_graph(place):
    """A model without a text encoder takes the token ids itself; here it is opened without its file."""
    spec = model_spec(text=text_spec(encoder=""))
    from text_cases import make_prompted

    session = make_prompted(spec=spec)
    assert session.text_encoder is None
    (one,) = Detector(session, prompt="a red cat. blue")([colour_image(*IMAGES["a.png"])])
    (pair,) = Detector.open("gd", prompt="a red cat. blue")([colour_image(*IMAGES["a.png"])])
    assert one.labels == pair.labels
    np.testing.assert_allclose(one.scores, pair.scores, atol=1e-5)
