"""Prompts and class lists as text."""

from __future__ import annotations

import pytest

from detrt.errors import PromptError
from detrt.text.prompts import chunks, class_list, parse_prompt, read_class_file, read_prompt_file


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("a cat. a remote control.", ["a cat", "a remote control"]),
        ("a cat. a remote control", ["a cat", "a remote control"]),
        ("a cat", ["a cat"]),
        ("  a cat .\n a dog . ", ["a cat", "a dog"]),
        ("cat. dog. cat.", ["cat", "dog", "cat"]),
        ("cat... . dog", ["cat", "dog"]),
        (".cat", ["cat"]),
        ("ein rotes Haus. Äpfel. 猫. кошка.", ["ein rotes Haus", "Äpfel", "猫", "кошка"]),
        ("is it a cat? a dog.", ["is it a cat? a dog"]),
        ("a cat, a dog.", ["a cat, a dog"]),
        ("👩‍🚀 suit. e\u0301clair.", ["👩‍🚀 suit", "e\u0301clair"]),
    ],
)
def test_phrases_and_their_spans(text, phrases):
    prompt = parse_prompt(text)
    assert [p.text for p in prompt.phrases] == phrases
    assert [text[p.start : p.end] for p in prompt.phrases] == phrases
    assert prompt.text == text and prompt.class_ids == tuple(range(len(phrases))) and not prompt.listed


def test_other_separators():
    assert [p.text for p in parse_prompt("is it a cat? a dog.", separators=".?").phrases] == ["is it a cat", "a dog"]


@pytest.mark.parametrize("text", ["", " \n\t ", ".", " . .. ", "..."])
def test_nothing_to_look_for(text):
    with pytest.raises(PromptError, match=r"empty|no words") as caught:
        parse_prompt(text)
    assert "a cat. a remote control." in str(caught.value)


@pytest.mark.parametrize("text", [None, 5, b"a cat."])
def test_not_text(text):
    with pytest.raises(PromptError, match="is text"):
        parse_prompt(text)


def test_class_list():
    prompt = class_list(["cat", "", "Remote  control", "CAT ", "dog.", "t.v."])
    assert prompt.names == {0: "cat", 2: "Remote control", 4: "dog", 5: "t.v"}
    assert prompt.listed and max(prompt.class_ids) == 5
    assert prompt.text == "cat. Remote control. dog. t.v."
    assert [prompt.text[p.start : p.end] for p in prompt.phrases] == [p.text for p in prompt.phrases]
    part = prompt.part([1, 3])
    assert part.text == "Remote control. t.v." and part.class_ids == (2, 5) and part.listed
    for wrong in ([], ["", " . "], "cat. dog.", [1]):
        with pytest.raises(PromptError):
            class_list(wrong)


@pytest.mark.parametrize(
    ("lengths", "limit", "most", "expected"),
    [
        ([2, 2, 2], 6, None, [[0, 1, 2]]),
        ([2, 2, 2], 5, None, [[0, 1], [2]]),
        ([5, 1, 4, 1], 5, None, [[0], [1, 2], [3]]),
        ([1] * 7, 100, 3, [[0, 1, 2], [3, 4, 5], [6]]),
        ([0, 0, 0], 0, 2, [[0, 1], [2]]),
        ([3], 3, None, [[0]]),
    ],
)
def test_chunks(lengths, limit, most, expected):
    assert chunks(lengths, limit, most) == expected


def test_files(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffa cat.\r\n  a dog\n".encode())
    assert read_prompt_file(path) == "a cat. a dog"
    assert read_class_file(path) == ["a cat.", "a dog"]
    path.write_text("person\n\ncar\n\n")
    assert class_list(read_class_file(path)).names == {0: "person", 2: "car"}
    assert read_class_file(path) == ["person", "", "car"]


@pytest.mark.parametrize("read", [read_prompt_file, read_class_file])
@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "there is no"), (b"", "is empty"), (b" \n \n", "is empty"), (b"\xff\xfe\x00", "UTF-8"), ("folder", "read")],
)
def test_bad_files(tmp_path, read, content, words):
    path = tmp_path / "list.txt"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(PromptError, match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "weights.bin"
    with open(path, "wb") as file:
        file.truncate(5 * 1024 * 1024)
    with pytest.raises(PromptError, match="5242880 bytes"):
        read_prompt_file(path)
