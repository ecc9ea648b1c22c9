"""Several devices: worker processes on this machine's CPU; the same results as one process, also when a worker is killed."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import cli, place, run_process, shades, snapshot, write_onnx  # noqa: F401 - fixtures

from detrt.backends.open import open_session
from detrt.data.images import expand_inputs
from detrt.data.video import video_writer
from detrt.detector import DetectorOptions
from detrt.errors import SessionError
from detrt.jobs import pool as pool_module
from detrt.jobs.pool import DevicePool, _DeviceWorker
from detrt.jobs.run import ImageFailure
from detrt.system import cpu_threads, parse_devices


@pytest.mark.parametrize(
    "text, expected",
    [
        ("0", ("cuda:0",)),
        ("0,1", ("cuda:0", "cuda:1")),
        (" cuda:3 , GPU1", ("cuda:3", "cuda:1")),
        ("cpu,cpu", ("cpu", "cpu")),
        ("cuda", ("cuda:0",)),
        ("0,0", ("cuda:0", "cuda:0")),
    ],
)
def test_forms(text, expected):
    assert parse_devices(text) == expected


@pytest.mark.parametrize("text", ["", "0,", "-1", "tpu", "0 1", "cuda:x"])
def test_other_forms_are_refused(text):
    with pytest.raises(SessionError, match="0,1"):
        parse_devices(text)


def test_all_is_every_visible_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,9")
    assert parse_devices("cuda:all") == ("cuda:0", "cuda:1", "cuda:2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SessionError, match="no NVIDIA GPU"):
        parse_devices("cuda:all")


def test_cores_are_shared():
    alone = cpu_threads(["cpu"])
    assert alone >= 1 and cpu_threads(["cpu"] * (4 * alone)) == 1


def test_a_gpu_is_never_replaced_by_the_cpu(place):
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    for ref in ("model.onnx", "bundle"):
        with pytest.raises(SessionError, match="cuda"):
            open_session(ref, device="cuda:0")


def test_the_same_in_the_same_order(cli, place):
    """Images, a broken one and a video through one process and through three."""
    pytest.importorskip("av", reason="av is not installed")
    shades(place / "many", 40, bad=(7,))
    with video_writer(place / "many" / "020.mp4", fps=5, size=(16, 24)) as write:
        for index in range(12):
            write(np.full((16, 24, 3), (0, 0, 20 * index), np.uint8))
    outputs = ["-t", 0.1, "--batch", 3, "--coco", "o.json", "--csv", "o.csv", "--json", "-", "-q"]
    one = cli("detect", "bundle", "many", *outputs, code=2)
    files = [(place / name).read_text() for name in ("o.json", "o.csv")]
    three = cli("detect", "bundle", "many", *outputs, "--device", "cpu,cpu,cpu", code=2)
    assert one.lines == three.lines and len(one.lines) == 39 + 12
    assert files == [(place / name).read_text() for name in ("o.json", "o.csv")]
    assert "007.png" in three.err and "1 of 41 inputs" in three.err


def test_annotated_copies_are_the_same(cli, place):
    shades(place / "many", 12)
    cli("detect", "bundle", "many", "-q", "--save-dir", "one")
    cli("detect", "bundle", "many", "-q", "--save-dir", "two", "--device", "cpu,cpu")
    one, two = snapshot(place / "one"), snapshot(place / "two")
    assert one == two and len(one) == 13


def test_standard_output_and_summary(place):
    result = run_process("detect", "bundle", "in", "--device", "cpu,cpu", "--json", "-", cwd=place)
    assert result.code == 0 and len(result.lines) == 2
    assert "onnxruntime-cpu on cpu, cpu" in result.err and "Traceback" not in result.err


def test_a_killed_worker_is_replaced(place):
    """Killed again and again by somebody: every image is there once, in order."""
    inputs = expand_inputs([shades(place / "many", 400)])
    with DevicePool("bundle", ("cpu", "cpu"), detector=DetectorOptions(threshold=0.1, batch_size=8)) as pool:
        killed = []

        def kill() -> None:
            worker = pool._workers[len(killed) % 2]
            killed.append(worker.process.pid)
            os.kill(worker.process.pid, signal.SIGKILL)

        rows = []
        for found in pool.detect_inputs(inputs):
            if len(rows) in (10, 30):
                kill()
            rows.append(found)
        assert pool.replaced == 2 and len(set(killed)) == 2
    assert [row.input for row in rows] == inputs
    with DevicePool("bundle", ("cpu",), detector=DetectorOptions(threshold=0.1, batch_size=8)) as pool:
        alone = list(pool.detect_inputs(inputs))
    assert [row.record.to_dict() for row in rows] == [row.record.to_dict() for row in alone]


def test_a_worker_that_cannot_be_kept_is_named(place, monkeypatch):
    """Whatever is sent to a worker kills it: an error that names the device, the signal and an image, not a hang."""
    inputs = expand_inputs([shades(place / "many", 16)])
    killed = set()

    class Doomed(_DeviceWorker):
        def send(self, message):
            if isinstance(message, list):  # inputs
                killed.add(self.process.pid)
                self.kill()
            super().send(message)

    monkeypatch.setattr(pool_module, "_DeviceWorker", Doomed)
    with DevicePool("bundle", ("cpu",), detector=DetectorOptions(batch_size=8)) as pool:
        with pytest.raises(SessionError, match=r"worker on cpu \(process \d+\) was killed by SIGKILL.*000\.png"):
            list(pool.detect_inputs(inputs))
        assert len(killed) == 2


def test_nothing_is_left_running(place):
    inputs = expand_inputs([shades(place / "many", 64)])
    with DevicePool("bundle", ("cpu", "cpu"), detector=DetectorOptions(batch_size=1)) as pool:
        workers = [worker.process for worker in pool._workers]
        results = pool.detect_inputs(inputs)
        assert not isinstance(next(results), ImageFailure)
    assert all(process.poll() is not None for process in workers)


def test_refusals(cli, place):
    cli.refused("detect", "bundle", "in", "--device", "0,x", names="'0,x'", advice="0,1")
    cli.refused("detect", "nothing", "in", "--device", "cpu,cpu", names="'nothing'", advice="give a bundle")
    message = cli.refused("detect", "bundle", "in", "--device", "0", names="cuda:0", advice="onnxruntime-gpu|cpu")
    assert "Traceback" not in message
    cli.refused("detect", "bundle", "in", "--device", "cpu", "--classes", "purple", names="'purple'", advice="it has")


def test_evaluation_is_the_same(cli, place):
    pytest.importorskip("pycocotools", reason="pycocotools is not installed")
    shades(place / "many", 21)
    truth = {
        "images": [{"id": 100 + i, "file_name": f"{i:03d}.png"} for i in range(21)],
        "categories": [{"id": 5, "name": "blue"}, {"id": 6, "name": "red"}],
        "annotations": [{"id": i + 1, "image_id": 100 + i, "category_id": 5, "bbox": [0, 0, 24, 16]} for i in range(21)],
    }
    (place / "truth.json").write_text(json.dumps(truth))
    common = ["eval", "bundle", "--ground-truth", "truth.json", "--images", "many", "--batch", 2]
    one = cli(*common, "--save", "one.json", "--json", "-").json
    two = cli(*common, "--save", "two.json", "--json", "-", "--device", "cpu,cpu", "--resume", "state").json
    assert (place / "one.json").read_text() == (place / "two.json").read_text()
    assert {**one, "seconds": 0} == {**two, "seconds": 0} and one["AP"] > 0
    # Goes on from the state of several devices on one.
    again = cli(*common, "--json", "-", "--resume", "state").json
    assert again["resumed"] == 21 and again["AP"] == one["AP"]
