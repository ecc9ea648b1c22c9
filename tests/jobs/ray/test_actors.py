"""`--cluster ray` on a Ray of this machine: workers are killed on the way, and every image has one row."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
pytest.importorskip("ray", reason="needs the 'ray' extra")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the 'ray' extra")
from cli_support import cli, place, run_process  # noqa: F401 - fixtures

from detrt.detector import DetectorOptions
from detrt.jobs.ray.actors import RayRunner
from detrt.jobs.ray.job import ClusterConfig, run_job

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="Ray and SIGKILL need POSIX")


class Killer:
    """Kills workers that have finished a shard, once so many images are done; knows the runner by having made it."""

    def __init__(self, at):
        self.at, self.killed = list(at), []

    def make(self, *arguments):
        self.runner = RayRunner(*arguments)
        return self.runner

    def progress(self, done, total):
        if self.at and done >= self.at[0]:
            alive = {int(name.rpartition(":")[2]) for name in self.runner.processes} - set(self.killed)
            if alive:
                self.at.pop(0)
                self.killed.append(max(alive))
                os.kill(self.killed[-1], signal.SIGKILL)


def check_rows(output, images, lines):
    """Every image has one row, which is what `detrt detect` finds in it alone."""
    rows = sorted(parquet.read_table(Path(output) / "detections").to_pylist(), key=lambda row: row["image_id"])
    assert len(rows) == images and [row["image_id"] for row in rows] == list(range(1, images + 1))
    assert len({row["image"] for row in rows}) == images
    good = [row for row in rows if row["error"] is None]
    assert [row["image"] for row in good] == [line["image"] for line in lines]
    for row, line in zip(good, lines, strict=True):
        assert [d["label"] for d in row["detections"]] == [d["label"] for d in line["detections"]]
        ours, theirs = ([d["box_xyxy"] for d in found["detections"]] for found in (row, line))
        np.testing.assert_allclose(ours, theirs, atol=2e-3)
    return rows


@pytest.mark.slow
def test_two_workers_are_killed(cli, place):
    (place / "many").mkdir()
    for index in range(120):
        Image.new("RGB", (24 + index % 5, 16), (0, 0, 130 + index)).save(place / "many" / f"{index:03d}.png")
    (place / "many" / "044.png").write_bytes(b"\x89PNG not really")
    killer = Killer(at=(20, 60))
    result = run_job(
        "bundle",
        ["many"],
        "out",
        config=ClusterConfig(workers=2, cpus=0.5, shard=4),
        detector=DetectorOptions(threshold=0.1, batch_size=4),
        runner=killer.make,
        progress=killer.progress,
    )
    assert len(killer.killed) == 2 and result.processes > result.workers == 2
    assert (result.images, result.bad, result.resumed) == (120, 1, 0)
    lines = cli("detect", "bundle", "many", "-t", 0.1, "--batch", 4, "--json", "-", "-q", code=2).lines
    check_rows("out", 120, lines)


@pytest.mark.slow
def test_a_model_that_cannot_be_opened(place):
    """The error of a worker is the error of the command, also from a process of its own."""
    Path("bundle/model.onnx").write_bytes(b"damaged")
    result = run_process("detect", "bundle", "in", "--cluster", "ray", "--output", "out", cwd=place)
    assert result.code == 2 and "model.onnx" in result.err and "build it again" in result.err
    assert "Traceback" not in result.err and not (place / "out").exists()


@pytest.mark.slow
def test_a_node_of_a_cluster_is_lost(place):
    """Two nodes, on one machine; one of them goes with its workers while it works, and the model was sent to both."""
    import ray
    from ray.cluster_utils import Cluster

    (place / "many").mkdir()
    for index in range(240):
        Image.new("RGB", (24 + index % 5, 16), (0, 0, 10 + index)).save(place / "many" / f"{index:03d}.png")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        second = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        lost = []

        def progress(done, total):
            if done >= 60 and not lost:
                lost.append(done)
                cluster.remove_node(second, allow_graceful=False)
                cluster.add_node(num_cpus=1)

        result = run_job(
            "bundle",
            ["many"],
            "out",
            config=ClusterConfig(cpus=1, shard=6, address=cluster.address),
            detector=DetectorOptions(threshold=0.1, batch_size=1),
            runner=RayRunner,
            progress=progress,
        )
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert lost and result.workers == 2 and result.images == 240
    ids = sorted(parquet.read_table("out/detections").column("image_id").to_pylist())
    assert ids == list(range(1, 241))


@pytest.mark.slow
def test_two_thousand_images_and_two_killed_workers(cli, tmp_path, monkeypatch, real_data):
    """The real DEIMv2-Femto on 2 000 crops, half of them mirrored, of real photographs."""
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    photos = sorted((real_data / "images/coco_permissive").rglob("*.jpg"))
    (tmp_path / "many").mkdir()
    for index in range(2000):
        with Image.open(photos[index % len(photos)]) as photo:
            x, y = rng.integers(0, photo.width // 4), rng.integers(0, photo.height // 4)
            crop = photo.convert("RGB").crop((x, y, photo.width - x // 2, photo.height - y // 2))
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if index % 2 else crop
            crop.save(tmp_path / "many" / f"{index:05d}.jpg", quality=90)
    checkpoint = real_data / "checkpoints/deimv2-femto-coco"
    cli("build", checkpoint, "-o", "femto", "--target", "onnx", "--trust-remote-code", "--json", "-")
    killer = Killer(at=(300, 1100))
    started = time.perf_counter()
    result = run_job(
        "femto",
        ["many"],
        "out",
        config=ClusterConfig(shard=64),
        detector=DetectorOptions(threshold=0.4, batch_size=8),
        runner=killer.make,
        progress=killer.progress,
    )
    seconds = time.perf_counter() - started
    assert len(killer.killed) == 2 and result.processes > result.workers
    started = time.perf_counter()
    lines = cli("detect", "femto", "many", "-t", 0.4, "--batch", 8, "--json", "-", "-q").lines
    alone = time.perf_counter() - started
    rows = check_rows("out", 2000, lines)
    assert sum(len(row["detections"]) for row in rows) == result.detections == len(json.load(open("out/coco.json"))) > 2000
    print(f"\nRay, {result.workers} workers, 2 killed: {seconds:.1f} s; one process: {alone:.1f} s")
