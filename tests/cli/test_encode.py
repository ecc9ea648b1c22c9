"""`detrt encode-prompt`: what the C++ runtime gets is what a session in Python feeds."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
pytest.importorskip("tokenizers", reason="needs the 'text' extra")
from cli_support import cli  # noqa: F401 - fixture
from text_models import write_text_bundle

from detrt import open_session
from detrt.backends.prompt_file import encode_prompt
from detrt.bundle import Bundle
from detrt.errors import PromptError, SpecError

CASES = Path(__file__).parents[1] / "data"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text_bundle(tmp_path / "gd")
    return tmp_path


def array(stored):
    flat = np.frombuffer(base64.b64decode(stored["data"]), np.dtype(stored["dtype"]).newbyteorder("<"))
    return flat.reshape(stored["shape"])


def test_file_holds_the_feeds_of_a_session(cli, place):
    result = cli("encode-prompt", "gd", "--prompt", "a red cat. blue", "-o", "sub/prompt.json")
    assert result.out == "" and "2 phrases" in result.err
    data = json.loads((place / "sub/prompt.json").read_text("utf-8"))
    files = {f.kind: f.sha256 for f in Bundle.open("gd").files}
    assert data["tokenizer_sha256"] == files["tokenizer"] and data["tower_sha256"] == files["text"]
    assert (data["kind"], data["prompt"], data["listed"], data["num_classes"]) == ("tokens", "a red cat. blue", False, 2)
    with open_session("gd", backend="onnxruntime") as session:
        asked = session.encode("a red cat. blue")
        feeds = session.text_feeds(asked.chunks)
    (part,) = data["parts"]
    assert [(p["text"], p["class_id"], p["start"], p["end"]) for p in part["phrases"]] == [
        ("a red cat", 0, 0, 9),
        ("blue", 1, 11, 15),
    ]
    assert part["length"] == asked.chunks[0].length and sorted(part["feeds"]) == sorted(feeds)
    for name, expected in feeds.items():
        got = array(part["feeds"][name])
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    assert [np.flatnonzero(row).tolist() for row in asked.chunks[0].phrase_mask] == part["phrase_mask"]


def test_lists_and_unknown_words(cli, place):
    (place / "names.txt").write_text("red\n\nzzz\n")
    result = cli("encode-prompt", "gd", "--classes-from", "names.txt", "-o", "p.json")
    assert "knows no part of 'zzz'" in result.err
    data = json.loads((place / "p.json").read_text("utf-8"))
    assert data["listed"] and data["num_classes"] == 3
    assert [p["class_id"] for p in data["parts"][0]["phrases"]] == [0, 2]


def test_bad_input(cli, place, tmp_path):
    cases = [
        (["gd", "-o", "p.json"], "there is no prompt; give --prompt"),
        (["gd", "--prompt", " ", "-o", "p.json"], "the prompt is empty"),
        (["none", "--prompt", "a cat.", "-o", "p.json"], "is not a detrt bundle"),
        (["gd", "--prompt", "a cat.", "-o", "gd"], "a folder has that name"),
        (["gd", "--prompt", "a cat.", "--task", "x", "-o", "p.json"], "takes no task"),
    ]
    for arguments, message in cases:
        result = cli("encode-prompt", *arguments, code=2)
        assert message in result.err and "Traceback" not in result.err
    assert not (place / "p.json").exists()
    data = json.loads((place / "gd/detrt.json").read_text("utf-8"))
    del data["spec"]["text"]
    data["spec"]["labels"] = {"0": "cat"}
    (place / "gd/detrt.json").write_text(json.dumps(data))
    with pytest.raises(PromptError, match="has fixed classes and takes no prompt"):
        encode_prompt("gd", "a cat.", "p.json")
    with pytest.raises(SpecError):
        encode_prompt(tmp_path / "nowhere", "a cat.", "p.json")


def test_stored_cases_are_what_this_version_makes():
    """The C++ tests read them: they must say what Python does now."""
    spec = importlib.util.spec_from_file_location("make_cases", CASES / "make_cases.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    stored = json.loads((CASES / "prompt_cases.json").read_text("utf-8"))["cases"]
    made = json.loads(json.dumps(maker.prompt_cases()))
    assert [case["name"] for case in made] == [case["name"] for case in stored]
    for new, old in zip(made, stored, strict=True):
        assert new["spec"] == old["spec"] and new["named"] == old["named"]
        for a, b in zip(new["prompt"]["parts"], old["prompt"]["parts"], strict=True):
            assert {k: v for k, v in a.items() if k != "feeds"} == {k: v for k, v in b.items() if k != "feeds"}
            for name, tensor in b["feeds"].items():
                np.testing.assert_allclose(array(a["feeds"][name]), array(tensor), atol=1e-6)
        for a, b in zip(new["detections"], old["detections"], strict=True):
            assert [d["label"] for d in a] == [d["label"] for d in b]
            np.testing.assert_allclose([d["score"] for d in a], [d["score"] for d in b], atol=3e-6)
