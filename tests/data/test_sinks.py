from __future__ import annotations

import csv
import io
import json
import os

import pytest
from runtime_cases import make_spec

from detrt.data.coco import load_coco
from detrt.data.sinks import CSV_COLUMNS, Record, check_stdout_once, coco_writer, csv_writer, jsonl_writer, text_writer
from detrt.detections import Detections
from detrt.errors import OutputError

SPEC = make_spec()
TWO = Detections([[1, 2, 5, 9], [0, 0, 3, 3.5]], [0.75, 0.5], [1, 0], ("dog", "cat"), (10, 20))
NONE = Detections([], [], [], (), (4, 6))
RECORDS = [Record("a/one.jpg", TWO), Record("two.jpg", NONE), Record("clip.mp4", TWO, 7, 0.28)]


def write_all(writer):
    with writer as write:
        for record in RECORDS:
            write(record)


def test_json_lines(tmp_path):
    path = tmp_path / "new/out.jsonl"
    write_all(jsonl_writer(path))
    one, two, clip = map(json.loads, path.read_text().splitlines())
    assert one == {
        "image": "a/one.jpg",
        "width": 20,
        "height": 10,
        "detections": [
            {"label": "dog", "class_id": 1, "score": 0.75, "box_xyxy": [1.0, 2.0, 5.0, 9.0]},
            {"label": "cat", "class_id": 0, "score": 0.5, "box_xyxy": [0.0, 0.0, 3.0, 3.5]},
        ],
    }
    assert two["detections"] == [] and "frame" not in two
    assert clip["frame"] == 7 and clip["time_s"] == 0.28


def test_json_lines_of_odd_names(tmp_path):
    path = tmp_path / "out.jsonl"
    names = ["bild ä.jpg", 'quo"te\n.jpg', os.fsdecode(b"caf\xe9.jpg")]
    with jsonl_writer(path) as write:
        for name in names:
            write(Record(name, NONE))
    lines = path.read_bytes().decode("utf-8").splitlines()
    assert [json.loads(line)["image"] for line in lines] == names
    assert "ä" in lines[0]


def test_csv(tmp_path):
    path = tmp_path / "out.csv"
    write_all(csv_writer(path))
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert list(rows[0]) == CSV_COLUMNS and len(rows) == 4
    assert rows[1] == {
        "image": "a/one.jpg", "frame": "", "time_s": "", "width": "20", "height": "10", "label": "cat",
        "class_id": "0", "score": "0.5", "x0": "0.0", "y0": "0.0", "x1": "3.0", "y1": "3.5",
    }  # fmt: skip
    assert rows[2]["frame"] == "7"


def test_text(capsys):
    write_all(text_writer())
    assert capsys.readouterr().out.splitlines() == [
        "a/one.jpg: 1 dog, 1 cat",
        "two.jpg: nothing",
        "clip.mp4 frame 7: 1 dog, 1 cat",
    ]


def test_stdout_gets_nothing_else(capsys):
    write_all(jsonl_writer("-"))
    out = capsys.readouterr().out
    assert len([json.loads(line) for line in out.splitlines()]) == 3


def test_coco_without_truth(tmp_path):
    path = tmp_path / "out.json"
    write_all(coco_writer(path, SPEC))
    rows = json.loads(path.read_text())
    assert [(row["image_id"], row["category_id"]) for row in rows] == [(1, 1), (1, 0), (3, 1), (3, 0)]
    assert rows[0]["bbox"] == [1.0, 2.0, 4.0, 7.0]


def test_coco_without_detections(tmp_path):
    path = tmp_path / "out.json"
    with coco_writer(path, SPEC) as write:
        write(Record("two.jpg", NONE))
    assert json.loads(path.read_text()) == []


def test_coco_with_truth(tmp_path, truth):
    path = tmp_path / "out.json"
    with coco_writer(path, SPEC, load_coco(truth, annotations=False)) as write:
        write(RECORDS[0])
    assert json.loads(path.read_text()) == [{"image_id": 40, "category_id": 18, "bbox": [1.0, 2.0, 4.0, 7.0], "score": 0.75}]


@pytest.mark.parametrize("model_name", ["couch", "sofa", "Couch"])
@pytest.mark.parametrize("category", ["couch", "Sofa"])
def test_voc_names_match_on_both_sides(tmp_path, model_name, category):
    """Annotations may have the VOC name and the model the COCO one, or the reverse; no class is dropped."""
    path = tmp_path / "truth.json"
    categories = [{"id": 7, "name": category}, {"id": 1, "name": "person"}]
    path.write_text(json.dumps({"images": [{"id": 1, "file_name": "a.jpg"}], "categories": categories}))
    spec = make_spec(labels={0: model_name, 1: "person"})
    found = Detections([[1, 2, 5, 9]], [0.75], [0], (model_name,), (10, 20))
    with coco_writer(tmp_path / "out.json", spec, load_coco(path, annotations=False)) as write:
        write(Record("a.jpg", found))
    assert [row["category_id"] for row in json.loads((tmp_path / "out.json").read_text())] == [7]


@pytest.mark.parametrize("kind", [jsonl_writer, csv_writer, lambda p: coco_writer(p, SPEC)], ids=["jsonl", "csv", "coco"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x")], ids=repr)
def test_failure_leaves_nothing(tmp_path, kind, error):
    with pytest.raises(type(error)), kind(tmp_path / "out") as write:
        write(RECORDS[0])
        raise error
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_full_disk_names_the_right_output(tmp_path, monkeypatch):
    real = open

    def full(path, *args, **kwargs):
        return real("/dev/full", *args, **kwargs) if "full.csv" in str(path) else real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", full)
    with (
        pytest.raises(OutputError, match=r"full.csv': the disk is full"),
        csv_writer(tmp_path / "full.csv") as full_csv,
        jsonl_writer(tmp_path / "other.jsonl"),
    ):
        for _ in range(1000):
            full_csv(RECORDS[0])
    assert os.listdir(tmp_path) == []


def test_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"file/out.csv"), csv_writer(tmp_path / "file/out.csv"):
        pass


def test_outputs_are_given_once():
    check_stdout_once(["-", "a.json", None, None])
    with pytest.raises(OutputError, match=r"two outputs have the name '-'"):
        check_stdout_once(["-", None, "-"])
    with pytest.raises(OutputError, match=r"a.json"):
        check_stdout_once(["a.json", "b.json", "./a.json"])
