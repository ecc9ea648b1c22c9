"""Lists of images for runs on a cluster, object stores, and models for machines without the same disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the 'ray' extra")
fsspec = pytest.importorskip("fsspec", reason="needs the 'ray' extra")
from cli_support import place, shades  # noqa: F401 - fixtures
from cluster_support import Here, rows_of, start

from detrt.errors import DetrtError, ImageError
from detrt.jobs.ray.inputs import image_refs
from detrt.jobs.ray.storage import ResultFolder, list_images
from detrt.jobs.ray.worker import pack

# Lists of images


def test_manifests(place):
    shades(place / "data" / "many", 4)
    import pyarrow as pa

    names = [f"many/{i:03d}.png" for i in range(4)]
    parquet.write_table(pa.table({"image_id": [9, 8, 7, 6], "path": names, "other": [1, 2, 3, 4]}), "data/list.parquet")
    Path("data/list.csv").write_text("file_name,image_id\n" + "".join(f"{n},{i}\n" for i, n in enumerate(names)))
    Path("data/list.jsonl").write_text("".join(json.dumps({"uri": n}) + "\n" for n in names))
    Path("data/list.txt").write_text("# a list\n" + "\n".join(names) + "\n")
    for suffix, ids in (("parquet", [9, 8, 7, 6]), ("csv", [0, 1, 2, 3]), ("jsonl", [None] * 4), ("txt", [None] * 4)):
        refs = image_refs([f"data/list.{suffix}"])
        assert [ref.image for ref in refs] == names and [ref.image_id for ref in refs] == ids
        assert all(Path(ref.address).is_file() and Path(ref.address).is_absolute() for ref in refs)
    # Each image once, whatever names it.
    assert len(image_refs(["data/list.txt", "data/many", "data/many/*.png"])) == 4
    start(["data/list.parquet"])
    assert [row["image_id"] for row in rows_of("out")] == [6, 7, 8, 9]


@pytest.mark.parametrize(
    "name, content, word",
    [
        ("a.txt", "", "names no images"),
        ("a.csv", "x,y\n1,2\n", "must name the images"),
        ("a.csv", "path,image_id\na.png,x\n", "integer"),
        ("a.csv", "path,image_id\na.png,1\nb.png,1\n", "image_id 1"),
        ("a.jsonl", "{", "line 1"),
        ("a.jsonl", "[1]\n", "JSON object"),
        ("a.jsonl", '{"path": null}\n', "None"),
        ("a.parquet", "PAR1", "Parquet"),
        ("a.txt", b"\xff\xc3", "UTF-8"),
    ],
)
def test_bad_manifests(tmp_path, name, content, word):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ImageError, match=word):
        image_refs([str(tmp_path / name)])


def test_other_bad_lists(place):
    for names, word in (
        ([], "no inputs"),
        (["nothing/"], "no file"),
        (["missing.parquet"], "no manifest"),
        (["memory://nothing/at/all"], "nothing at"),
    ):
        with pytest.raises(ImageError, match=word):
            image_refs(names)
    Path("clip.mp4").write_bytes(b"x")
    with pytest.raises(ImageError, match="video"):
        image_refs(["clip.mp4"])
    with pytest.raises(DetrtError, match="protocol"):
        image_refs(["nonsense://x/y.png"])


# Addresses


@pytest.fixture
def store():
    system = fsspec.filesystem("memory")
    yield system
    for path in list(system.store):
        del system.store[path]


def test_an_object_store(place, store):
    """Images from a store, results into it: one object for each file, and the same rows as on a disk."""
    shades(place / "many", 12, bad=(5,))
    for path in sorted(Path("many").iterdir()):
        store.pipe_file(f"/bucket/photos/{path.name}", path.read_bytes())
    store.pipe_file("/bucket/photos/.hidden/x.png", b"x")
    store.pipe_file("/bucket/photos/notes.txt", b"x")
    assert len(list_images("memory://bucket/photos/*.png")) == 12
    with pytest.raises(KeyboardInterrupt):
        start(["memory://bucket/photos/"], "memory://bucket/run", runner=Here(stop_after=1))
    result = start(["memory://bucket/photos/"], "memory://bucket/run")
    assert (result.images, result.bad, result.resumed) == (12, 1, 8)
    start(["many"])
    for name in ("detections/part-000000.parquet", "detections/part-000001.parquet"):
        with store.open(f"/bucket/run/{name}") as file:
            there = parquet.read_table(file).drop_columns(["image", "error"]).to_pylist()
        assert there == parquet.read_table(f"out/{name}").drop_columns(["image", "error"]).to_pylist()
    assert store.cat_file("/bucket/run/coco.json") == Path("out/coco.json").read_bytes()
    bad = ResultFolder("memory://bucket/run").read("summary.json")
    assert "memory://bucket/photos/005.png" in json.loads(bad)["bad_examples"][0] or b"005.png" in bad


def test_a_file_address_is_a_local_folder(place):
    start(["in"], f"file://{place}/there")
    assert len(rows_of(place / "there")) == 2


def test_a_store_that_fails_for_a_moment(place, store, monkeypatch):
    from detrt.jobs.ray import storage as places

    store.pipe_file("/bucket/a.png", Path("in/blue.png").read_bytes())
    calls = []
    real = type(store).cat_file

    def flaky(self, path, *rest, **more):
        calls.append(path)
        if len(calls) < 3:
            raise OSError("503 slow down")
        return real(self, path, *rest, **more)

    monkeypatch.setattr(type(store), "cat_file", flaky)
    monkeypatch.setattr(places, "_PAUSE_SECONDS", 0)
    assert places.fetch("memory://bucket/a.png")[:4] == b"\x89PNG" and len(calls) == 3
    with pytest.raises(ImageError, match="no file"):
        places.fetch("memory://bucket/gone.png")


# A model for machines without the same disk


def test_a_model_travels(place, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(place / "there"))
    (place / "there").mkdir()
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", None)
    for ref in ("bundle", "model.onnx"):
        shipment = pack(ref)
        first, second = shipment.unpack(), shipment.unpack()
        assert first == second and str(first).startswith(str(place / "there"))
        from detrt import Detector

        with Detector.open(first, threshold=0.7) as detector:
            assert [len(found) for found in detector(["in/black.png", "in/blue.png"])] == [0, 2]
    assert not list((place / "there").rglob(".*.tmp"))
