"""From prompts to token ids: which tokens belong to which phrase, limits, parts of long lists, damaged files."""

from __future__ import annotations

import numpy as np
import pytest
from text_cases import SEPARATORS, WORDS, text_spec, tokenizer_json, word_id

pytest.importorskip("tokenizers", reason="needs the 'text' extra")

from detrt.errors import PromptError, SpecError
from detrt.text.kinds import default_task
from detrt.text.prompts import class_list
from detrt.text.tokenizer import PromptTokenizer


def tokenizer(kind="tokens", **changes):
    return PromptTokenizer(tokenizer_json(), text_spec(kind, **changes))


def ask(prompt, made=None, **limits):
    made = made or tokenizer()
    return made.encode(made.parse(prompt), **limits)


def words_of(part):
    """The words of each phrase, by its mask."""
    names = {word_id(w): w for w in WORDS}
    return [[names.get(int(i), int(i)) for i in part.ids[row]] for row in part.phrase_mask]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a cat. a remote control.", [["a", "cat"], ["a", "remote", "control"]]),
        ("a cat. a remote control", [["a", "cat"], ["a", "remote", "control"]]),
        ("  A CAT .   the dogs", [["a", "cat"], ["the", "dog", "##s"]]),
        ("cat. dog. cat.", [["cat"], ["dog"], ["cat"]]),
        ("cat? dog.", [["cat"], ["dog"]]),
        ("the 3.", [["the", "3"]]),
        ("猫.", [["猫"]]),
        ("a zebra. cat", [["a", 100], ["cat"]]),
    ],
)
def test_tokens_of_phrases(prompt, expected):
    (part,) = ask(prompt).chunks
    assert words_of(part) == expected
    assert part.ids[0] == 101 and part.ids[-1] == 102 and part.ids[-2] == 1012
    assert not (part.phrase_mask & np.isin(part.ids, SEPARATORS)).any()


@pytest.mark.parametrize("kind", ["tokens", "classes"])
@pytest.mark.parametrize("prompt", ["a K\udce4fer. cat", ["cat", "K\udce4fer"], class_list(["K\udce4fer"])], ids=ascii)
def test_half_a_character(prompt, kind):
    """As Python reads an argument in another character set, and JSON an escape without its second half."""
    with pytest.raises(PromptError, match=r"not UTF-8 text: character \d+ is '\\udce4'.*`prompt_file`"):
        ask(prompt, tokenizer(kind))


def test_half_a_character_of_a_task():
    with pytest.raises(PromptError, match="not UTF-8 text"):
        tokenizer("classes").parse("cat", "Detect \ud83d.")


def test_a_missing_dot_changes_nothing():
    (a,), (b,) = ask("a cat. a dog.").chunks, ask("a cat. a dog").chunks
    assert np.array_equal(a.ids, b.ids) and np.array_equal(a.phrase_mask, b.phrase_mask)


def test_a_dot_inside_a_class_name_stays_in_it():
    """The model reads "3. inch" as two sub-sentences; the name still has the tokens of both."""
    (part,) = ask(["3.inch disk", "cat"]).chunks
    assert words_of(part) == [["3", "inch", "disk"], ["cat"]]


def test_limits():
    (part,) = ask("cat dog. red", max_tokens=7).chunks
    assert len(part.ids) == 7
    with pytest.raises(PromptError, match=r"has 7 tokens \(2 of them frame it\), this model takes at most 6.*`classes_from`"):
        ask("cat dog. red", max_tokens=6)
    with pytest.raises(PromptError, match=r"has 304 tokens .* at most 256"):
        ask("cat " * 301)
    with pytest.raises(PromptError, match="has 3 phrases, this model takes at most 2"):
        ask("cat. dog. red.", max_phrases=2)


def test_a_long_list_is_asked_for_in_parts():
    names = [f"{a} {b}" for a in ("red", "green", "blue", "striped") for b in ("cat", "dogs", "circle")]
    asked = ask(names, max_tokens=12)
    assert len(asked.chunks) > 3
    assert all(len(part.ids) <= 12 for part in asked.chunks)
    assert [name for part in asked.chunks for name in part.prompt.names.values()] == names
    assert [i for part in asked.chunks for i in part.prompt.class_ids] == list(range(12))
    for part in asked.chunks:
        assert [" ".join(w).replace(" ##", "") for w in words_of(part)] == list(part.prompt.names.values())
    (whole,) = ask(names).chunks
    assert whole.prompt == class_list(names)
    assert [len(p.phrase_mask) for p in ask(names, max_phrases=5).chunks] == [5, 5, 2]
    with pytest.raises(PromptError, match=r"'a remote control striped star' \(number 1\) has 5 tokens.* at most 4 in one"):
        ask(["cat", "a remote control striped star"], max_tokens=7)


def test_unknown_phrases_are_named():
    assert ask("zebra. cat. a giraffe").unknown == ("zebra",)
    assert ask(["zebra", "okapi", "cat"]).unknown == ("zebra", "okapi")


@pytest.mark.parametrize("prompt", ["cat. \u200b\u200b.", ["cat", "\u0000\u0001"], ["?"], "cat. ??. dog"])
def test_phrases_without_a_token(prompt):
    if prompt == "cat. ??. dog":  # separators of the model, so not even a phrase
        assert [p.text for p in ask(prompt).prompt.phrases] == ["cat", "dog"]
        return
    with pytest.raises(PromptError, match="gives no token"):
        ask(prompt)


def test_classes_and_their_task():
    made = tokenizer("classes", separators=(), max_tokens=8)
    (part,) = ask("a cat. remote control", made).chunks
    assert [ids.tolist() for ids in part.names] == [
        [101, word_id("a"), word_id("cat"), 102],
        [101, word_id("remote"), word_id("control"), 102],
    ]
    assert default_task(part.prompt) == "Detect a cat, remote control."
    # Cut off as the published processor does: the first tokens and the last.
    assert part.task.tolist() == [
        101,
        100,
        word_id("a"),
        word_id("cat"),
        word_id(","),
        word_id("remote"),
        word_id("control"),
        102,
    ]
    (part,) = made.encode(made.parse("cat", "the cat")).chunks
    assert part.task.tolist() == [101, word_id("the"), word_id("cat"), 102]
    with pytest.raises(PromptError, match="task has 10 tokens, this model takes at most 8"):
        made.encode(made.parse("cat", "cat " * 8))
    with pytest.raises(PromptError, match="'dog dog dog dog dog dog dog' has 9 tokens, this model takes at most 8"):
        ask(["cat", "dog " * 7], made)
    parts = ask(["cat", "dog", "red"], made, max_phrases=2).chunks
    assert [list(p.prompt.names) for p in parts] == [[0, 1], [2]]
    with pytest.raises(PromptError, match="3 phrases"):
        ask("cat. dog. red.", made, max_phrases=2)


def test_a_task_is_for_models_that_take_one():
    with pytest.raises(PromptError, match="takes no task"):
        tokenizer().parse("cat", "Detect it.")
    with pytest.raises(PromptError, match="got int"):
        tokenizer().parse(5)


def test_truncation_and_padding_of_the_file_do_not_count():
    from tokenizers import Tokenizer

    made = Tokenizer.from_str(tokenizer_json().decode())
    made.enable_truncation(4)
    made.enable_padding(length=16)
    (part,) = ask("a cat. a dog.", PromptTokenizer(made.to_str().encode(), text_spec())).chunks
    assert len(part.ids) == 8


def test_bad_files(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(SpecError, match="there is no tokenizer") as caught:
        PromptTokenizer(path, text_spec())
    assert str(path) in str(caught.value)
    for content in (b"", b"{}", b"\xff\xfe", tokenizer_json()[:5000]):
        path.write_bytes(content)
        with pytest.raises(SpecError, match="cannot be read"):
            PromptTokenizer(path, text_spec())
    path.write_bytes(tokenizer_json())
    assert PromptTokenizer(path, text_spec()).separators == ".?"
    with pytest.raises(SpecError, match=r"belongs to another model"):
        PromptTokenizer(path, text_spec(separators=(101, 30000)))
