"""Text and JSON files of other people's editors: one behaviour in every reader."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from onnx_models import make_spec

from detrt import bundle, files
from detrt.data.coco import load_coco
from detrt.errors import DetrtError, SpecError
from detrt.evaluation.results import read_results
from detrt.jobs.ray import inputs
from detrt.models.foreign import OnnxSidecar
from detrt.models.hub import read_config
from detrt.models.labels import count_labels, read_labels
from detrt.models.preprocessor import read_processor
from detrt.precision.calibrate import find_images
from detrt.spec import ModelSpec, read_spec_file
from detrt.text.prompts import read_class_file, read_prompt_file

NAMES = ["person", "", "a car", "\u72ac", "x\u2028y"]
TEXT = "\n".join(NAMES)
ENCODINGS = {
    "plain": TEXT.encode(),
    "mark": codecs.BOM_UTF8 + TEXT.encode(),
    "CRLF": TEXT.replace("\n", "\r\n").encode(),
    "CR": TEXT.replace("\n", "\r").encode(),
    "last lines blank": (TEXT + "\n\n \n").encode(),
    "UTF-16": TEXT.encode("utf-16"),
    "UTF-16 big": codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    "UTF-32": TEXT.encode("utf-32"),
    "mark and CRLF": codecs.BOM_UTF8 + TEXT.replace("\n", "\r\n").encode(),
}
NOT_TEXT = {
    "Latin-1": "caf\u00e9\nx".encode("latin-1"),
    "UTF-16 without a mark": "abc".encode("utf-16-le"),
    "half a mark": b"\xff\xfea",
    "an image": b"\x89PNG\r\n\x1a\n\0\0",
}


@pytest.mark.parametrize("how", ENCODINGS)
def test_lists_of_names_are_read_alike_in_every_encoding(tmp_path: Path, how: str) -> None:
    path = tmp_path / "names.txt"
    path.write_bytes(ENCODINGS[how])
    named = {number: name for number, name in enumerate(NAMES) if name}
    assert read_labels(path, 5) == named
    assert count_labels(path) == 5
    assert dict(enumerate(read_class_file(path))) == dict(enumerate(NAMES))
    assert read_prompt_file(path).split() == TEXT.split()
    assert [image for image, _ in inputs._entries("m.txt", path.read_bytes())] == [name for name in NAMES if name]


@pytest.mark.parametrize("how", NOT_TEXT)
@pytest.mark.parametrize(
    "read", [lambda p: read_labels(p, 2), read_class_file, read_prompt_file], ids=["labels", "classes", "prompt"]
)
def test_other_encodings_are_refused_with_the_remedy(tmp_path: Path, how: str, read: Callable[[Path], Any]) -> None:
    path = tmp_path / "names.txt"
    path.write_bytes(NOT_TEXT[how])
    with pytest.raises(DetrtError, match=r"names\.txt.*save it as UTF-8"):
        read(path)


ANNOTATIONS = {"images": [{"id": 1, "file_name": "a"}], "categories": [{"id": 1, "name": "x"}]}
ANNOTATIONS["annotations"] = [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1]}]
# Name of the file -> its reader and a content that it takes.
JSON_READERS: dict[str, tuple[str, Callable[[Path], Any], Any]] = {
    "labels": ("names.json", lambda p: read_labels(p, 3), ["a", "b", "c"]),
    "annotations": ("a.json", load_coco, ANNOTATIONS),
    "results": ("r.json", read_results, []),
    "calibration": ("c.json", lambda p: find_images(p, 1), None),
    "sidecar": ("m.onnx.json", OnnxSidecar.read, {"layout": "rt-detr"}),
    "config": ("config.json", lambda p: read_config(p.parent), {"model_type": "detr"}),
    "processor": ("preprocessor_config.json", lambda p: read_processor(p.parent), {"do_resize": True}),
    "manifest": ("detrt.json", bundle.read_json, {"schema": 1}),
    "spec": ("spec.json", read_spec_file, None),
}


@pytest.mark.parametrize("reader", JSON_READERS)
def test_json_of_any_reader_has_a_mark_or_ends_in_an_error_of_ours(tmp_path: Path, reader: str) -> None:
    name, read, content = JSON_READERS[reader]
    path = tmp_path / name
    if content is not None:
        for encoding in ("utf-8", "utf-8-sig", "utf-16"):
            path.write_bytes(json.dumps(content).encode(encoding))
            read(path)
    for damaged in (b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000 + b"x", b"{", b"\xff\xfe\xff", b""):
        path.write_bytes(damaged)
        with pytest.raises(DetrtError, match=name.replace(".", r"\.")):
            read(path)
    os.truncate(path, 3 << 30)  # of zeros that the file system need not hold
    with pytest.raises(DetrtError, match="has 3221225472 bytes; at most"):
        read(path)


def test_json_texts_that_are_nested_too_deeply_are_errors() -> None:
    with pytest.raises(DetrtError, match="nested too deeply"):
        ModelSpec.from_json("[" * 100_000)
    with pytest.raises(DetrtError, match="nested too deeply"):
        list(inputs._entries("m.jsonl", b"[" * 100_000))


def test_a_text_file_has_a_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_bytes(b"a\n" * 100)
    with pytest.raises(DetrtError, match="200 bytes; at most 100"):
        files.read_text(path, "labels file", most=100)


MARKED = {
    "colon": "0: cat\n1: dog\n2: bird",
    "from 1": "1: cat\n2: dog\n3: bird",
    "space": "0 cat\n1 dog\n2 bird",
    "comma": "0,cat\n1,dog\n2,bird",
    "tab": "1\tcat\n2\tdog\n4\tbird",
    "point": "1. cat\n2. dog\n3. bird",
    "bracket": "1) cat\n2) dog\n13) bird",
    "equals": "0 = cat\n1 = dog\n2 = bird",
    "blank lines between": "0: cat\n\n1: dog",
    "YAML": "- cat\n- dog\n- bird",
    "quoted": '"cat"\n"dog"\n"bird"',
    "quoted for Python": "'cat',\n'dog',\n'bird'",
    "commas": "cat,\ndog,\nbird",
    "JSON": '{"id": 0, "name": "cat"}\n{"id": 1, "name": "dog"}\n{"id": 2, "name": "bird"}',
}
PLAIN = {
    "digits": "0\n1\n2",
    "some numbers": "2 stroke\n4 wheeler\ncar",
    "falling numbers": "9 mm\n7 mm\n5 mm",
    "a number behind": "thing 0\nthing 1\nthing 2",
    "letters behind": "3d\n4k\n5g",
    "one name": "1 person",
    "some dashes": "- cat\ndog\n- bird",
    "a quotation": "'cat'\ndog\nbird",
    "a comma within": "cat, small\ncat, large\ndog",
    "decimals": "0.5 l\n1.5 l\n2.5 l",
    "ratios": "4:3\n16:9\n21:9",
    "decimals with commas": "0,5 l\n1,5 l\n2,5 l",
}


@pytest.mark.parametrize("how", MARKED)
@pytest.mark.parametrize("read", [lambda p: read_labels(p, 3), count_labels, read_class_file], ids=["labels", "count", "classes"])
def test_lists_with_numbers_or_marks_at_every_name_are_refused(tmp_path: Path, how: str, read: Callable[[Path], Any]) -> None:
    path = tmp_path / "names.txt"
    path.write_text(MARKED[how])
    with pytest.raises(DetrtError, match=r"names\.txt' has (a|an|quotation) .* at every name; write the names alone"):
        read(path)


@pytest.mark.parametrize("how", PLAIN)
def test_names_may_hold_numbers_and_marks(tmp_path: Path, how: str) -> None:
    path = tmp_path / "names.txt"
    path.write_text(PLAIN[how])
    names = PLAIN[how].split("\n")
    assert read_labels(path, len(names)) == dict(enumerate(names))
    assert read_class_file(path) == names


OTHER_FORMATS = {
    "ids.csv": "id,name\n0,cat\n1,dog",
    "names.csv": "name\ncat\ndog",
    "names.tsv": "0\tcat\n1\tdog\n2\tbird",
    "map.pbtxt": "item {\n  id: 1\n}",
    "labels.jsonl": '{"id": 0}\n{"id": 1}\n{"id": 2}',
    "obj.data": "classes = 3\ntrain = train.txt\nnames = obj.names",
    "labels.xml": "<View>\n<Label/>\n</View>",
    "names.toml": "a = 1\nb = 2\nc = 3",
    "classes.py": "CLASSES = (\n'cat',\n)",
    "comment.txt": "# classes\ncat\ndog",
    "cvat.txt": "# label:color_rgb:parts:actions\nbackground:0,0,0::\ncat:1,2,3::",
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
@pytest.mark.parametrize("read", [lambda p: read_labels(p, 3), read_class_file], ids=["labels", "classes"])
def test_lists_of_another_format_are_refused_where_the_number_of_lines_fits(
    tmp_path: Path, name: str, read: Callable[[Path], Any]
) -> None:
    path = tmp_path / name
    path.write_text(OTHER_FORMATS[name])
    with pytest.raises(DetrtError, match="give a text file with the names alone|begins with a comment"):
        read(path)


@pytest.mark.parametrize("name", ["cat\nx", "cat\0", "a\tb", "\x1b[31mred", "\ud800"])
def test_a_name_is_one_line_of_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / "names.json"
    path.write_text(json.dumps([name, "dog"]))
    with pytest.raises(DetrtError, match="the name of class 0 must be one line of text"):
        replace(make_spec(), labels=read_labels(path, 2))


@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
def test_an_id_is_named_once(tmp_path: Path, name: str) -> None:
    pytest.importorskip("yaml")
    (tmp_path / name).write_text('{"names": {"0": "cat", "0": "dog", "1": "bird"}}')
    with pytest.raises(DetrtError, match="it has the key '0' twice"):
        read_labels(tmp_path / name, 2)


def test_words_of_yaml_are_names_as_they_are_written(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    words = ["yes", "Off", "010", "0x1F", "1e3", "12:30", "2001-01-01", "1_000", ".inf", "true"]
    path = tmp_path / "data.yaml"
    path.write_text("names: [" + ", ".join(words) + "]\n")
    assert read_labels(path, len(words)) == dict(enumerate(words))
    path.write_text("base: &base {0: cat, 1: dog}\nnames: {<<: *base, 1: cow}\n")
    assert read_labels(path, 2) == {0: "cat", 1: "cow"}


def test_names_with_rising_numbers_are_read_from_a_list(tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    path.write_text(json.dumps(["1 cent", "2 cents", "5 cents"]))
    assert read_labels(path, 3) == {0: "1 cent", 1: "2 cents", 2: "5 cents"}


CLASSES = {0: "cat", 1: "dog", 2: "bird"}
COCO = {
    "images": [],
    "annotations": [],
    "categories": [{"id": 2, "name": "bird"}, {"id": 0, "name": "cat"}, {"id": 1, "name": "dog"}],
}
NAME_FILES = {
    "list.json": json.dumps(list(CLASSES.values())),
    "object.json": json.dumps(CLASSES),
    "config.json": json.dumps({"model_type": "detr", "id2label": CLASSES, "label2id": {}}),
    "instances.json": json.dumps(COCO),
    "categories.json": json.dumps(COCO["categories"]),
    "data.yaml": "path: .\nnc: 3\nnames: [cat, dog, bird]\n",
    "data.yml": "train: images\nval: images\nnames:\n  0: cat\n  1: dog\n  2: bird\n",
    "list.yaml": "- cat\n- dog\n- bird\n",
    "label2id.json": json.dumps({"label2id": {"cat": 0, "dog": 1, "bird": 2}}),
    "by_name.json": json.dumps({"bird": 2, "cat": 0, "dog": 1}),
    "class_names.json": json.dumps({"class_names": ["cat", "dog", "bird"]}),
    "spaces.json": json.dumps([" cat", "dog ", "bird"]),
}


def test_names_of_digits_are_told_from_ids_by_their_key(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"label2id": {"1": 0, "2": 1, "0": 2}}))
    assert read_labels(tmp_path / "a.json", 3) == {0: "1", 1: "2", 2: "0"}


def test_a_name_without_letters_leaves_its_id_free(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(["cat", " ", "bird"]))
    assert read_labels(tmp_path / "a.json", 3) == {0: "cat", 2: "bird"} and count_labels(tmp_path / "a.json") == 3


@pytest.mark.parametrize("name", NAME_FILES)
def test_class_names_are_read_from_the_files_that_have_them(name: str, tmp_path: Path) -> None:
    if name.endswith("ml"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(NAME_FILES[name], "utf-8")
    assert read_labels(tmp_path / name, 3) == CLASSES


@pytest.mark.parametrize("ids", [(1, 2, 3), (1, 3, 90)], ids=["from 1", "with gaps"])
def test_categories_stand_where_it_is_said(ids: tuple[int, ...], tmp_path: Path) -> None:
    """Trainings on files of COCO's form number the categories anew, from 0 or from 1, or take their ids for columns."""
    path, names = tmp_path / "coco.json", CLASSES.values()
    categories = [{"id": number, "name": name} for number, name in zip(ids, names, strict=True)]
    path.write_text(json.dumps({"categories": categories[::-1]}), "utf-8")
    with pytest.raises(SpecError, match=r"say which: `labels_start=0`, or 1; else give the labels"):
        read_labels(path, 3)
    with pytest.raises(SpecError, match=r"3 names, and the head has 4 columns.*`labels_start=0`.*`labels_start=1`"):
        read_labels(path, 4)
    assert read_labels(path, 3, 0) == CLASSES
    assert read_labels(path, 4, 1) == dict(enumerate(names, 1))
    assert read_labels(path, 91, 1) == dict(zip(ids, names, strict=True))
    assert count_labels(path) == count_labels(path, 1) == ids[-1] + 1 == count_labels(path, 0) + 1
    with pytest.raises(SpecError, match=r"needs columns 1\.\.3, and the head has 0\.\.2"):
        read_labels(path, 3, 1)


def test_an_id_without_a_name_keeps_its_column_where_the_first_is_said(tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    for data in (["", "cat", "dog"], {"0": "", "1": "cat", "2": "dog"}, {"names": {"0": "", "1": "cat", "2": "dog"}}):
        path.write_text(json.dumps(data), "utf-8")
        assert (read_labels(path, 3, 0), count_labels(path, 0)) == ({1: "cat", 2: "dog"}, 3)
        assert (read_labels(path, 4, 1), count_labels(path, 1)) == ({2: "cat", 3: "dog"}, 4)


# Names that are 43 million words, in 160 bytes.
BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)) + "names: *a8\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", '{"0": null, "1": "dog", "2": "bird"}', "must hold names as a list or as an object of id to name"),
        ("a.json", '[["cat"], "dog", "bird"]', "must hold names"),
        ("a.json", '{"cat": 0, "dog": 0, "bird": 2}', "an id twice"),
        ("a.json", '{"0.0": "cat"}', "must hold names"),
        ("a.json", "[true, false, true]", "must hold names"),
        ("a.json", '{"images": []}', "must hold names"),
        ("a.json", '{"0": "cat", " 0": "dog", "2": "bird"}', "an id twice"),
        ("a.json", "3", "must hold names"),
        ("a.yaml", "nc: 3\nval: images\ntrain: images\n", "must hold names"),
        ("a.yaml", "names: [cat\n", "is not YAML"),
        ("a.yaml", "[" * 20000, "is not YAML"),
        ("a.yaml", BOMB, "a million values or more"),
        ("a.yaml", "names: &a [*a]\n", "a million values or more"),
        ("gone.yaml", None, "there is no labels file"),
    ],
)
def test_files_without_class_names_are_refused(name: str, content: str | None, words: str, tmp_path: Path) -> None:
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    if content is not None:
        (tmp_path / name).write_text(content, "utf-8")
    with pytest.raises(DetrtError, match=words):
        read_labels(tmp_path / name, 3)
