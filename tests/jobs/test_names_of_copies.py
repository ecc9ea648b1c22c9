"""Names of annotated copies, labels and crops: two inputs or two classes never share a file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detrt.data.images import Input
from detrt.data.sinks import Record
from detrt.detections import Detections
from detrt.errors import OutputError
from detrt.files import TEMPORARY, remove_unfinished, writing
from detrt.jobs.annotate import AnnotatedCopies, ObjectFiles
from detrt.jobs.run import ImageResult

LABELS = (
    "../x",
    "con",
    "",
    "n" * 300,
    "n" * 301,
    "a/b",
    "a_b",
    "a.b",
    "..",
    "/etc",
    "ü☃" * 150,
    " ",
    "a ",
    "a",
    "-rf",
    "\ud800",
    "x\n",
)


def found(source: Input, labels: tuple[str, ...] = ("a",), frame: int | None = None) -> ImageResult:
    image = np.zeros((20, 30, 3), np.uint8)
    count = len(labels)
    boxes = np.tile(np.array([[1, 2, 9, 8]], np.float32), (count, 1))
    detections = Detections(boxes, np.ones(count, np.float32), np.arange(count), labels, (20, 30))
    return ImageResult(source, Record(source.name, detections, frame=frame), image)


def test_each_class_has_a_folder_of_its_own_inside(tmp_path):
    files = ObjectFiles([source := Input(tmp_path / "in.png")], labels=None, crops=tmp_path / "crops")
    files.save(found(source, LABELS))
    folders = [path.parent for path in sorted((tmp_path / "crops").rglob("*.jpg"), key=lambda path: int(path.stem.split("-")[1]))]
    assert len(set(folders)) == len(LABELS) and {folder.parent for folder in folders} == {tmp_path / "crops"}
    names = {label: folder.name for label, folder in zip(LABELS, folders, strict=True)}
    assert [names[label] for label in ("a_b", "a", "-rf")] == ["a_b", "a", "-rf"]
    assert "con" not in names.values()
    assert os.listdir(tmp_path) == ["crops"]


@pytest.mark.parametrize(
    "names",
    [
        ("a.png", "a.jpg", "a.png.jpg"),
        ("a.tif", "a.tif.png", "a.tif.png.png"),
        ("A.png", "a.jpg", "b/a.png"),
        ("drive.mp4", "drive-000001.jpg", "drive-000001.png", "drive.mov"),
        ("drive.mp4", "drive-000001.jpg", "drive.mp4-000001.jpg"),
        ("a.mov", "a.mov.mp4", "a.jpg"),
    ],
)
def test_no_file_is_written_twice(tmp_path, names):
    inputs = [Input(tmp_path / name, "video" if name.endswith(("mp4", "mov")) else "image") for name in names]
    files = ObjectFiles(inputs, labels=tmp_path / "labels", crops=tmp_path / "crops")
    copies = AnnotatedCopies(tmp_path / "copies", inputs)
    for source in inputs:
        files.save(found(source, frame=1 if source.kind == "video" else None))
    for folder in ("labels", "crops"):
        assert sum(path.is_file() for path in (tmp_path / folder).rglob("*")) == len(names)
    paths = [str(path).casefold() for path in copies._paths.values()]
    assert len(set(paths)) == len(names) and all(Path(path).suffix in (".png", ".jpg", ".mp4") for path in paths)


def test_one_image_by_two_names_has_one_copy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inputs = [Input(Path("a.png")), Input(tmp_path / "a.png")]
    with AnnotatedCopies("copies", inputs) as copies:
        for source in inputs:
            copies.save(found(source))
    assert os.listdir("copies") == ["a.png"]


def test_names_as_long_as_a_file_system_takes(tmp_path):
    path = tmp_path / ("x" * 251 + ".jpg")
    ObjectFiles([source := Input(tmp_path / "in.png")], labels=None, crops=tmp_path / "c").save(found(source))
    with writing(path) as temporary:
        Image.new("RGB", (2, 2)).save(temporary, "jpeg")
        name = temporary.name
    assert os.listdir(tmp_path / "c") and path.stat().st_size
    (tmp_path / name).write_text("left by a process that was killed")
    remove_unfinished(tmp_path, [path.name])
    assert not [one for one in os.listdir(tmp_path) if one.endswith(TEMPORARY)]
    with pytest.raises(OutputError, match=r"xxx.*name too long"), writing(tmp_path / ("x" * 256)):
        pass
