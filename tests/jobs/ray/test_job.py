"""Runs over many images: shards, resuming, results. The cluster here is this process; Ray: test_cluster_ray.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the 'ray' extra")
pytest.importorskip("fsspec", reason="needs the 'ray' extra")
from cli_support import cli, place, shades, snapshot, write_onnx  # noqa: F401 - fixtures
from cluster_support import Here, rows_of, start
from onnx_models import make_spec

from detrt.data.coco import load_coco
from detrt.errors import OutputError, SessionError, SpecError
from detrt.jobs.ray.job import ClusterConfig
from detrt.jobs.ray.storage import ResultFolder

# What is written


def test_masks_as_in_detect(cli, place):
    shades(place / "many", 6)
    write_onnx(place / "masked.onnx", make_spec(masks=True))
    start(["many"], model="masked.onnx")
    lines = cli("detect", "masked.onnx", "many", "-t", 0.1, "--json", "-", "-q", "--coco", "o.json").lines
    want = [[found["segmentation"] for found in line["detections"]] for line in lines]
    assert any(want) and [[found["segmentation"] for found in row["detections"]] for row in rows_of("out")] == want
    theirs = json.loads(Path("out/coco.json").read_text())
    assert [row["segmentation"] for row in theirs] == [row["segmentation"] for row in json.loads(Path("o.json").read_text())]


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


def test_a_shard_longer_than_what_is_read_ahead(place):
    shades(place / "many", 30, bad=(25,))
    result = start(["many"], shard=30)
    assert (result.images, result.bad) == (30, 1)
    found = [row["image"] for row in rows_of("out") if row["detections"]]
    assert len(found) == len(set(found)) == 29


def test_ids_of_annotations(place):
    shades(place / "many", 5)
    truth = {
        "images": [{"id": 50 - i, "file_name": f"{i:03d}.png"} for i in range(5)],
        "categories": [{"id": 7, "name": "blue"}],
        "annotations": [],
    }
    Path("truth.json").write_text(json.dumps(truth))
    start(["many"], truth=load_coco("truth.json", annotations=False))
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
    """The model returns NaN for images without blue, and spoils their batch."""

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


def test_a_image_that_the_model_fails_on(place):
    shades(place / "many", 16)
    Image.new("RGB", (24, 16), "red").save("many/005.png")
    result = start(["many"], runner=Overflowing())
    assert (result.images, result.bad) == (16, 1) and "005.png" in result.bad_examples[0]
    start(["many"], "whole")
    rows, whole = rows_of("out"), rows_of("whole")
    assert "fails in the model" in rows[5]["error"] and rows[5]["detections"] == []
    assert [row for row in rows if row["image_id"] != 6] == [row for row in whole if row["image_id"] != 6]


def test_a_model_that_fails_on_every_image(place):
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
            self.detector.place = ResultFolder(place / "disk of another machine")
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
        (["--cluster", "ray", "--output", "o", "--device", "0,1"], "--device", "leave it out"),
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
