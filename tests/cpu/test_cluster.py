"""Runs over many images: lists of images, shards, resuming, results. The cluster here is this process; Ray: test_cluster_ray.py."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the 'ray' extra")
fsspec = pytest.importorskip("fsspec", reason="needs the 'ray' extra")
from cli_support import cli, place, snapshot, write_onnx  # noqa: F401 - fixtures

from detrt.cluster.inputs import image_refs
from detrt.cluster.job import ClusterConfig, run_job
from detrt.cluster.places import Place, list_images
from detrt.cluster.worker import ShardDetector, pack
from detrt.errors import DetrtError, ImageError, OutputError, SessionError, SpecError
from detrt.outputs import CocoImages


class Here:
    """A cluster of one worker in this process. lose: numbers of shards whose worker dies. stop_after: shards, then a crash."""

    def __init__(self, lose=(), stop_after=None):
        self.lose, self.stop_after, self.ran, self.workers, self.processes = lose, stop_after, [], 1, {"here"}

    @contextmanager
    def __call__(self, job, shipment, config):
        from dataclasses import replace

        self.detector = ShardDetector(replace(job, device="cpu"), shipment)
        yield self

    def describe(self):
        return self.detector.detector.spec

    def run(self, shards):
        for shard in shards:
            if shard.number in self.lose:
                continue
            if len(self.ran) == self.stop_after:
                raise KeyboardInterrupt
            self.ran.append(shard.number)
            yield self.detector(shard)


def shades(folder, count, bad=()):
    folder.mkdir(parents=True)
    for index in range(count):
        path = folder / f"{index:03d}.png"
        Image.new("RGB", (24 + index % 5, 16), (0, 0, 140 + index)).save(path)
        if index in bad:
            path.write_bytes(path.read_bytes()[:40])
    return folder


def start(names, output="out", runner=None, **config):
    session, truth = config.pop("session", {}), config.pop("truth", None)
    options = {"threshold": 0.1, "batch_size": 4, **config.pop("detector", {})}
    config.setdefault("shard", 8)
    return run_job(
        config.pop("model", "bundle"),
        [str(name) for name in names],
        str(output),
        config=ClusterConfig(**config),
        session=session,
        detector=options,
        truth=truth,
        runner=runner or Here(),
    )


def rows_of(folder):
    table = parquet.read_table(Path(folder) / "detections")
    return sorted(table.to_pylist(), key=lambda row: row["image_id"])


# What is written


def test_the_same_as_detect(cli, place):
    shades(place / "many", 30, bad=(9,))
    result = start(["many"])
    assert (result.images, result.bad, result.resumed) == (30, 1, 0)
    lines = cli("detect", "bundle", "many", "-t", 0.1, "--batch", 4, "--json", "-", "-q", "--coco", "o.json", code=2).lines
    rows = rows_of("out")
    assert [row["image_id"] for row in rows] == list(range(1, 31))
    good = [row for row in rows if row["error"] is None]
    assert [row["image"] for row in good] == [line["image"] for line in lines] and len(good) == 29
    for row, line in zip(good, lines, strict=True):
        assert (row["width"], row["height"]) == (line["width"], line["height"])
        assert [d["label"] for d in row["detections"]] == [d["label"] for d in line["detections"]]
        np.testing.assert_allclose(
            [d["box_xyxy"] for d in row["detections"]], [d["box_xyxy"] for d in line["detections"]], atol=6e-4
        )
    assert rows[9]["detections"] == [] and rows[9]["width"] is None and "009.png" in rows[9]["error"]
    # detrt detect numbers what it could read; a run here gives every image its number.
    ids = [row["image_id"] for row in good]
    single = [{**entry, "image_id": ids[entry["image_id"] - 1]} for entry in json.load(open("o.json"))]
    assert json.load(open("out/coco.json")) == single and len(single) == result.detections > 0
    assert sorted(path.name for path in Path("out/detections").iterdir()) == [f"part-00000{i}.parquet" for i in range(4)]
    listed = parquet.read_table("out/inputs.parquet").to_pylist()
    assert [entry["image_id"] for entry in listed] == list(range(1, 31)) and Path(listed[0]["address"]).is_absolute()
    assert json.load(open("out/summary.json"))["bad"] == 1


def test_without_the_merged_file(place):
    """For runs so large that one file of all results has no use."""
    shades(place / "many", 20, bad=(2,))
    whole = start(["many"], "whole")
    parts = start(["many"], merge=False)
    assert (parts.images, parts.bad, parts.detections) == (20, 1, whole.detections) and whole.detections > 0
    assert not Path("out/coco.json").exists() and len(rows_of("out")) == 20
    assert start(["many"]).resumed == 20  # --merge is no part of what the run is
    assert Path("out/coco.json").read_bytes() == Path("whole/coco.json").read_bytes()


def test_ids_of_annotations(place):
    shades(place / "many", 5)
    truth = {
        "images": [{"id": 50 - i, "file_name": f"{i:03d}.png"} for i in range(5)],
        "categories": [{"id": 7, "name": "blue"}],
        "annotations": [],
    }
    Path("truth.json").write_text(json.dumps(truth))
    start(["many"], truth=CocoImages("truth.json"))
    assert [row["image_id"] for row in rows_of("out")] == [46, 47, 48, 49, 50]
    assert {entry["category_id"] for entry in json.load(open("out/coco.json"))} == {7}


# Once and only once


def test_goes_on_after_a_crash(place):
    shades(place / "many", 50)
    with pytest.raises(KeyboardInterrupt):
        start(["many"], runner=Here(stop_after=3))
    assert len(list(Path("out/detections").iterdir())) == 3 and not Path("out/coco.json").exists()
    Path("out/detections/part-000001.parquet").write_bytes(b"PAR1 cut off")
    Path("out/detections/.part-000005.parquet.1234.tmp").write_bytes(b"of a killed worker")
    second = Here()
    result = start(["many"], runner=second)
    assert second.ran == [1, 3, 4, 5, 6] and result.resumed == 16
    assert [row["image_id"] for row in rows_of("out")] == list(range(1, 51))
    assert not list(Path("out/detections").glob(".*"))
    start(["many"], "whole")
    assert (Path("out") / "coco.json").read_bytes() == (Path("whole") / "coco.json").read_bytes()
    third = Here()
    assert start(["many"], runner=third).resumed == 50 and third.ran == []


def test_shards_that_are_lost_are_named(place):
    shades(place / "many", 30)
    with pytest.raises(SessionError, match=r"8 of 30 images.*008\.png"):
        start(["many"], runner=Here(lose=(1,)))
    assert start(["many"]).resumed == 22
    assert [row["image_id"] for row in rows_of("out")] == list(range(1, 31))


def test_bad_images_are_tried_again_on_request(place):
    shades(place / "many", 20, bad=(3,))
    assert start(["many"]).bad == 1
    Image.new("RGB", (24, 16), "blue").save("many/003.png")
    assert start(["many"]).bad == 1
    again = Here()
    assert start(["many"], runner=again, retry_bad=True).bad == 0 and again.ran == [0]
    assert len(rows_of("out")) == 20


class Overflowing(Here):
    """The model returns NaN for pictures without blue, and spoils their batch."""

    def run(self, shards):
        session = self.detector.detector.session
        real = session.run

        def run(feeds):
            found = real(feeds)
            if (feeds["pixel_values"][:, 2].max(axis=(1, 2)) == 0).any():
                found["logits"][:] = np.nan
            return found

        session.run = run
        yield from super().run(shards)


def test_a_picture_that_the_model_fails_on(place):
    shades(place / "many", 16)
    Image.new("RGB", (24, 16), "red").save("many/005.png")
    result = start(["many"], runner=Overflowing())
    assert (result.images, result.bad) == (16, 1) and "005.png" in result.bad_examples[0]
    start(["many"], "whole")
    rows, whole = rows_of("out"), rows_of("whole")
    assert "the model failed" in rows[5]["error"] and rows[5]["detections"] == []
    assert [row for row in rows if row["image_id"] != 6] == [row for row in whole if row["image_id"] != 6]


def test_a_model_that_fails_on_every_picture(place):
    (place / "red").mkdir()
    for index in range(4):
        Image.new("RGB", (24, 16), (200 + index, 0, 0)).save(place / "red" / f"{index}.png")
    with pytest.raises(SessionError, match="(?i)nan"):
        start(["red"], runner=Overflowing())


@pytest.mark.parametrize(
    "change, word",
    [
        ({"detector": {"threshold": 0.3}}, "options"),
        ({"shard": 7}, "shard"),
        ({"model": "other.onnx"}, "model"),
        ({"names": ["many", "in"]}, "inputs"),
    ],
)
def test_another_run_is_not_mixed_in(place, change, word):
    shades(place / "many", 10)
    write_onnx(place / "other.onnx", height=16, width=16)
    start(["many"])
    before = snapshot(place / "out")
    with pytest.raises(OutputError, match=f"another run.*{word}"):
        start(change.pop("names", ["many"]), **change)
    assert snapshot(place / "out") == before


def test_results_of_unknown_origin(place):
    Path("out/detections").mkdir(parents=True)
    Path("out/detections/part-000000.parquet").write_bytes(b"")
    with pytest.raises(OutputError, match="unknown run"):
        start(["in"])


def test_a_folder_that_is_not_shared(place):
    """Workers of other machines wrote to their own disks."""

    class Elsewhere(Here):
        def run(self, shards):
            self.detector.place = Place(place / "disk of another machine")
            yield from super().run(shards)

    with pytest.raises(OutputError, match="all machines share"):
        start(["in"], runner=Elsewhere())


def test_a_changed_file_is_noticed(place):
    shades(place / "many", 16)
    start(["many"])
    Path("out/detections/part-000001.parquet").write_bytes(Path("out/detections/part-000000.parquet").read_bytes())
    again = Here()
    start(["many"], runner=again)
    assert again.ran == [1] and len({row["image_id"] for row in rows_of("out")}) == 16


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
        ("a.csv", "path,image_id\na.png,x\n", "whole number"),
        ("a.csv", "path,image_id\na.png,1\nb.png,1\n", "image_id 1"),
        ("a.jsonl", "{", "line 1"),
        ("a.jsonl", "[1]\n", "JSON object"),
        ("a.jsonl", '{"path": null}\n', "None"),
        ("a.parquet", "PAR1", "Parquet"),
        ("a.txt", b"\xff\xfe", "UTF-8"),
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
    bad = Place("memory://bucket/run").read("summary.json")
    assert "memory://bucket/photos/005.png" in json.loads(bad)["bad_examples"][0] or b"005.png" in bad


def test_a_file_address_is_a_local_folder(place):
    start(["in"], f"file://{place}/there")
    assert len(rows_of(place / "there")) == 2


def test_a_store_that_fails_for_a_moment(place, store, monkeypatch):
    from detrt.cluster import places

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


# The command line


@pytest.mark.parametrize(
    "options, names, advice",
    [
        (["--cluster", "slurm", "--output", "o"], "'slurm'", "ray"),
        (["--cluster", "ray"], "--output", "DIR"),
        (["--output", "o"], "--output", "--cluster ray"),
        (["--actors", 2], "--actors", "--cluster ray"),
        (["--retry-bad"], "--retry-bad", "--cluster ray"),
        (["--cluster", "ray", "--output", "o", "--save-dir", "runs"], "--save-dir", "leave it out"),
        (["--cluster", "ray", "--output", "o", "--every", 2], "--every", "leave it out"),
        (["--cluster", "ray", "--output", "o", "--devices", "0,1"], "--devices", "leave it out"),
        (["--cluster", "ray", "--output", "o", "--gpus-per-actor", 1.5], "1.5", "0.5"),
        (["--cluster", "ray", "--output", "o", "--shard", 0], "0", "1000000"),
        (["--cluster", "ray", "--output", "o", "--actors", 0], "0", "at least 1"),
        (["--cluster", "ray", "--output", "model.onnx"], "model.onnx", "folder"),
    ],
)
def test_refusals(cli, place, options, names, advice):
    before = snapshot(place)
    cli.refused("detect", "bundle", "in", *options, names=names, advice=advice)
    assert snapshot(place) == before


def test_config_checks():
    for wrong in ({"workers": 0}, {"gpus": -0.1}, {"cpus": 0}, {"shard": 0}):
        with pytest.raises(SpecError):
            ClusterConfig(**wrong)
