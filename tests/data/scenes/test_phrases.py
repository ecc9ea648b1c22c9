"""Captions of drawn scenes: which phrases there are, which objects they name, and what is held out."""

from __future__ import annotations

import json
import re

import pytest
from parity_scenes import parity_set

from detrt.data.scenes.phrases import (
    COLOR_NAMES,
    COLOR_PHRASES,
    HELD_OUT_COLORS,
    HELD_OUT_FILLS,
    SHAPE_PHRASES,
    Phrase,
    caption_scene,
    find,
    is_held_out,
    prompt_of,
    write_phrase_dataset,
)
from detrt.data.scenes.scene import CLASSES, SceneObject, draw_scene, write_dataset
from detrt.data.scenes.shapes import FILLS


@pytest.fixture(scope="module")
def scenes():
    return [draw_scene(seed) for seed in range(40)]


def test_held_out_pairs_use_every_color_every_shape_and_every_fill() -> None:
    assert sorted(p.color for p in HELD_OUT_COLORS) == sorted(COLOR_NAMES)
    assert sorted(p.shape for p in HELD_OUT_COLORS) == sorted(CLASSES)
    assert sorted(p.fill for p in HELD_OUT_FILLS) == sorted(FILLS)
    assert len({p.shape for p in HELD_OUT_FILLS}) == len(FILLS)
    # The embedded model was trained without these; another list would make its figures wrong.
    assert HELD_OUT_COLORS[0] == Phrase("red", "", "hexagon")
    assert HELD_OUT_FILLS[-1] == Phrase("", "outlined", "square")


def test_a_pair_is_held_out_in_every_phrase_that_holds_both_words() -> None:
    pair = HELD_OUT_COLORS[0]
    assert is_held_out(pair)
    assert is_held_out(Phrase(pair.color, "dotted", pair.shape))
    assert not is_held_out(Phrase(color=pair.color))
    assert not is_held_out(Phrase(shape=pair.shape))
    assert not any(map(is_held_out, SHAPE_PHRASES))
    assert sum(map(is_held_out, COLOR_PHRASES)) == len(HELD_OUT_COLORS)


def test_text_of_phrases_and_prompts() -> None:
    assert Phrase("red", "striped", "letter A").text() == "red striped letter A"
    assert Phrase("orange", "", "circle").text("a") == "an orange circle"
    assert Phrase(color="red").text("the") == "the red shape"
    assert prompt_of([Phrase("red", "", "circle"), Phrase("", "", "letter A")]) == "red circle. letter a."
    assert prompt_of([]) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"color": "mauve"}, "unknown color: got 'mauve', allowed are red"),
        ({"shape": "blob"}, "unknown shape: got 'blob'"),
        ({}, "must name a color, a fill or a shape"),
    ],
)
def test_unknown_words_are_refused(words, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Phrase(**words)


def test_a_phrase_names_what_has_all_its_attributes() -> None:
    item = SceneObject(CLASSES.index("star"), "star", "red", "dotted", (0, 0, 9, 9), 1.0)
    assert all(p.matches(item) for p in (Phrase("red"), Phrase("red", "dotted", "star"), Phrase(shape="star")))
    assert not any(p.matches(item) for p in (Phrase("blue"), Phrase("red", "plain"), Phrase("red", "", "circle")))


def test_captions_are_seeded_mixed_and_free_of_held_out_pairs(scenes) -> None:
    for seed, scene in enumerate(scenes):
        caption = caption_scene(scene, seed, phrases=9)
        assert caption == caption_scene(scene, seed, phrases=9)
        assert len(caption.phrases) == 9 == len(set(caption.phrases))
        assert caption.found == find(scene, caption.phrases)
        present = sum(bool(found) for found in caption.found)
        assert present <= 4
        assert present > 0 or not scene.objects
        assert not any(map(is_held_out, caption.phrases))
        assert caption.prompt.count(".") == 9 and caption.prompt == caption.prompt.lower()
    assert caption_scene(scenes[0], 1, phrases=9) != caption_scene(scenes[0], 2, phrases=9)
    free = [p for k, s in enumerate(scenes) for p in caption_scene(s, k, phrases=20, held_out=True).phrases]
    assert any(map(is_held_out, free))


@pytest.mark.parametrize("wrong", [0, 21, True, 2.0])
def test_wrong_numbers_of_phrases_are_refused(scenes, wrong) -> None:
    with pytest.raises(ValueError, match="from 1 to 20"):
        caption_scene(scenes[0], 0, phrases=wrong)


def test_phrase_dataset_has_the_same_images_and_one_annotation_for_each_phrase(tmp_path) -> None:
    plain, asked = write_dataset(tmp_path / "a", 3, seed=5), write_phrase_dataset(tmp_path / "b", 3, seed=5)
    old, new = (json.loads((f / "annotations.json").read_text("utf-8")) for f in (plain, asked))
    assert [c["name"] for c in new["categories"]][:2] == ["red circle", "red square"]
    assert len(new["categories"]) == 144
    assert [a["bbox"] for a in new["annotations"]] == [a["bbox"] for a in old["annotations"]]
    shapes = {c["id"]: c["name"].lower() for c in old["categories"]}
    names = {c["id"]: c["name"] for c in new["categories"]}
    for one, other in zip(old["annotations"], new["annotations"], strict=True):
        assert names[other["category_id"]] == f"{one['attributes']['color']} {shapes[one['category_id']]}"
    image = "images/000002.jpg"
    assert (plain / image).read_bytes() == (asked / image).read_bytes()
    two = write_phrase_dataset(tmp_path / "c", 3, seed=5, phrases=[Phrase(shape="star"), Phrase(color="red")])
    found = json.loads((two / "annotations.json").read_text("utf-8"))["annotations"]
    wanted = sum(
        (i["category_id"] == CLASSES.index("star") + 1) + (i["attributes"]["color"] == "red") for i in old["annotations"]
    )
    assert len(found) == wanted
    with pytest.raises(ValueError, match="different from each other"):
        write_phrase_dataset(tmp_path / "d", 1, phrases=[])


def test_parity_set_is_always_the_same() -> None:
    one, two = parity_set(2), parity_set(2)
    assert [c for _, captions in one for c in captions] == [c for _, captions in two for c in captions]
    assert [len(captions) for _, captions in one] == [5, 5]
    assert [len(c.phrases) for c in one[0][1]] == [4, 1, 8, 20, 12]
