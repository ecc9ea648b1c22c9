"""detrt detect on cameras: simulated ones over TCP, and a real RTSP server where there is one."""

from __future__ import annotations

import csv
import datetime
import gc
import json
import os
import signal
import subprocess
import urllib.request
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
pytest.importorskip("av", reason="needs the 'video' extra")
from cli_support import COMMAND, cli, place, snapshot  # noqa: F401 - fixtures
from ports import free_port
from rtsp_server import rtsp_server
from stream_sender import cameras, read_number

from detrt.data.video import read_frames, video_writer
from detrt.jobs import streams

ENDS = ("--reconnect", 0, "--timeout", 20)  # these cameras do not come back; all but those of RTSP close their connection


def test_cameras_share_a_model(cli, place):
    """Both end, which is what exit code 2 says; everything before is in the output."""
    with cameras([{"frames": 75}], fps=25, count=2) as (one, two):
        result = cli("detect", "bundle", one, two, "-t", 0, "--json", "-", *ENDS, code=2)
    rows = result.lines
    assert set(Counter(row["image"] for row in rows)) == {one, two}
    for name in (one, two):
        mine = [row for row in rows if row["image"] == name]
        frames = [row["frame"] for row in mine]
        assert frames == sorted(frames) and len(set(frames)) == len(frames) > 5 and frames[-1] >= 72
        assert [row["time_s"] for row in mine] == pytest.approx([frame / 25 for frame in frames], abs=0.02)
    row = rows[-1]
    assert list(row) == ["image", "frame", "time_s", "wall_time", "latency_s", "width", "height", "detections"]
    assert (row["width"], row["height"], len(row["detections"])) == (128, 96, 12) and 0 < row["latency_s"] < 5
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(row["wall_time"])
    assert datetime.timedelta() < age < datetime.timedelta(seconds=60)
    assert "2 of 2 inputs could not be read" in result.err and f"'{one}' has ended" in result.err
    assert "dropped" in result.err and "p99 ms" in result.err


def test_annotated_videos(cli, place):
    """One for each camera, and a further one after its frames have changed their size; times are those of the frames."""
    steps = [{"frames": 60}, {"frames": 50, "size": [160, 256]}]
    with cameras(steps, fps=20) as (camera,):
        cli("detect", "bundle", camera, "-t", 0.99, "--save-dir", "out", "--csv", "o.csv", *ENDS, code=2)
    name = camera.partition("//")[2].replace(":", "_")
    assert sorted(os.listdir("out")) == [f"{name}-2.mp4", f"{name}.mp4", "detections.jsonl"]
    rows = [json.loads(line) for line in open("out/detections.jsonl")]
    for path, height in ((f"out/{name}.mp4", 96), (f"out/{name}-2.mp4", 160)):
        mine = [row for row in rows if row["height"] == height]
        frames = list(read_frames(path))
        assert [read_number(frame.image)[1] for frame in frames] == [row["frame"] for row in mine]
        times = [row["time_s"] - mine[0]["time_s"] for row in mine]
        assert [frame.time_s for frame in frames] == pytest.approx(times, abs=0.002)
    assert csv.DictReader(open("o.csv")).fieldnames[-2:] == ["wall_time", "latency_s"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_stopping_finishes_the_outputs(place, number):
    with cameras([{"frames": 1000}], fps=20) as (camera,):
        arguments = map(str, (*COMMAND, "detect", "bundle", camera, "-t", 0, "--save-dir", "out", "--csv", "-"))
        process = subprocess.Popen(arguments, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout.readline().startswith("image,frame")
        for _ in range(4 * 12):  # detections of a frame
            process.stdout.readline()
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "Traceback" not in errors and "processed" in errors
    name = camera.partition("//")[2].replace(":", "_")
    rows = [json.loads(line) for line in open(place / "out/detections.jsonl")]
    assert len(list(read_frames(place / f"out/{name}.mp4"))) == len(rows) > 3


def test_duration(cli, place):
    with cameras([{"frames": 1000}], fps=20) as (camera,):
        result = cli("detect", "bundle", camera, "--duration", 1.5, "--json", "-")
    assert 0 < len(result.lines) <= 60
    cli.refused("detect", "bundle", "in", "--duration", 3, names="--duration", advice="--live")


def test_metrics(place):
    pytest.importorskip("prometheus_client", reason="needs the 'serve' extra")
    from prometheus_client.parser import text_string_to_metric_families

    port = free_port()
    with cameras([{"frames": 1000}], fps=20) as (camera,):
        arguments = map(str, (*COMMAND, "detect", "bundle", camera, "--json", "-", "-q", "--metrics", port))
        process = subprocess.Popen(arguments, cwd=place, stdout=subprocess.PIPE, text=True)
        try:
            frames = [json.loads(process.stdout.readline())["frame"] for _ in range(10)]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
                families = {one.name: one.samples for one in text_string_to_metric_families(response.read().decode())}
        finally:
            process.kill()
            process.communicate()
    counts = {
        name: families[f"detrt_stream_{name}"][0] for name in ("received", "processed", "dropped", "damaged", "connections")
    }
    assert all(sample.labels == {"camera": camera} for sample in counts.values())
    values = {name: sample.value for name, sample in counts.items()}
    assert values["received"] > frames[-1] and values["processed"] >= 10 and values["connections"] == 1
    assert values["received"] - values["processed"] - values["dropped"] - values["damaged"] in (0, 1, 2), (
        "in the queue, or running"
    )
    quantiles = {sample.labels["quantile"]: sample.value for sample in families["detrt_stream_latency_seconds"]}
    assert list(quantiles) == ["0.5", "0.9", "0.99"] and 0 < quantiles["0.5"] <= quantiles["0.99"] < 10


def test_a_file_as_a_camera(cli, place):
    with video_writer(place / "clip.mp4", fps=20, size=(16, 24)) as write:
        for level in range(20):
            write(np.full((16, 24, 3), 12 * level, np.uint8))
    rows = cli("detect", "bundle", "clip.mp4", "--live", "--json", "-", "-q").lines
    assert rows[-1]["frame"] == 19 and rows[-1]["wall_time"]
    cli.refused("detect", "bundle", "clip.mp4", "--live", "--save-dir", ".", names="would replace", advice="another --save-dir")
    content = (place / "clip.mp4").read_bytes()
    start, end = content.index(b"mdat") + 4, content.index(b"moov") - 4
    (place / "zeros.mp4").write_bytes(content[:start] + bytes(end - start) + content[end:])
    cli.refused("detect", "bundle", "zeros.mp4", "--live", "--json", "o.jsonl", names="zeros.mp4", advice="damaged or truncated")
    assert (place / "clip.mp4").read_bytes() == content and not (place / "o.jsonl").exists()


def test_modules_are_not_collected_while_cameras_run(cli, place, monkeypatch):
    """A collection over all that is loaded would hold frames up."""
    frozen, real = [], streams.detect_streams
    monkeypatch.setattr(streams, "detect_streams", lambda *given: frozen.append(gc.get_freeze_count()) or real(*given))
    with video_writer(place / "clip.mp4", fps=20, size=(16, 24)) as write:
        for _ in range(3):
            write(np.zeros((16, 24, 3), np.uint8))
    cli("detect", "bundle", "clip.mp4", "--live", "--json", "-", "-q")
    assert frozen[0] > 10_000 and gc.get_freeze_count() == 0


def test_a_real_rtsp_server(cli, place):
    with video_writer(place / "clip.mp4", fps=20, size=(48, 64)) as write:
        for level in range(30):
            write(np.full((48, 64, 3), 8 * level, np.uint8))
    with rtsp_server(place / "clip.mp4", "viewer:hunter2") as address:
        known = address.replace("//", "//viewer:hunter2@")
        for transport in ("tcp", "udp"):
            result = cli("detect", "bundle", known, "--transport", transport, "--json", "-", *ENDS, "--timeout", 3, code=2)
            rows = result.lines
            assert {row["image"] for row in rows} == {address} and rows[-1]["frame"] >= 27
            assert {(row["width"], row["height"]) for row in rows} == {(64, 48)}
            assert "hunter2" not in result.out + result.err
        before = snapshot(place)
        for wrong in (address, address.replace("//", "//viewer:guess@")):
            message = cli.refused(
                "detect", "bundle", wrong, "--save-dir", "out", "--json", "o.jsonl", names=address, advice="USER:PASSWORD@HOST"
            )
            assert "guess" not in message
        cli.refused("detect", "bundle", known + "2", "--json", "o.jsonl", names=address + "2", advice="404.*check the address")
        assert snapshot(place) == before, "something half-written"


def test_unreachable_cameras(cli, place):
    port = free_port()
    before = snapshot(place)
    outputs = ("--save-dir", "out", "--json", "o.jsonl", "--csv", "o.csv")
    with cameras([{"frames": 50}]) as (good,):
        bad = f"rtsp://127.0.0.1:{port}/live"
        cli.refused("detect", "bundle", good, bad, *outputs, names=f"'{bad}'", advice="Connection refused.*check the address")
    cli.refused("detect", "bundle", "/dev/video77", *outputs, names="/dev/video77", advice="ls /dev/video")
    assert snapshot(place) == before, "something half-written"


@pytest.mark.parametrize(
    ("arguments", "names", "advice"),
    [
        (["rtsp://cam/1", "in"], "'in' is no camera", "run of their own"),
        (["rtsp://cam/1", "rtsp://cam/1"], "rtsp://cam/1", "once"),
        (["rtsp://cam/1", "--every", "2"], "--every", "leave it out"),
        (["rtsp://cam/1", "--device", "cpu,cpu"], "--device cpu,cpu", "one process"),
        (["rtsp://cam/1", "--cluster", "ray", "--output", "o"], "rtsp://cam/1", "leave --cluster out"),
        (["rtsp://cam/1", "--timeout", "0"], "got 0", "above 0"),
        (["rtsp://cam/1", "--transport", "tls"], "'tls'", "tcp or udp"),
        (["in", "--reconnect", "5"], "--reconnect", "leave it out"),
        (["in", "--live"], "'in'", "check the path"),
        (["rtsp://cam/1", "--metrics", "here"], "'here'", "HOST:PORT"),
        (["in", "--track"], "--track", "leave it out"),
        (["in", "--every", "2"], "--every", "leave it out"),
        (["in", "in", "--every", "3"], "--every", "leave it out"),
        (["a.jpg", "--live"], "'a.jpg' is an image", "leave it out"),
        (["clip.mp4", "B.PNG", "--live"], "'B.PNG' is an image", "leave it out"),
        (["rtsp://cam/1", "--track", "--track-threshold", "2"], "got 2", "from 0 to 1"),
        (["rtsp://cam/1", "--track-threshold", "0.5"], "--track-threshold 0.5", "--track"),
        (["clip.mp4", "--track", "--cluster", "ray", "--output", "o"], "--track", "leave one of them out"),
        (["http://cam/a.mp4"], "http://cam/a.mp4", "download it first"),
    ],
)
def test_refused(cli, place, arguments, names, advice):
    cli.refused("detect", "bundle", *arguments, names=names, advice=advice)


def test_a_limit_above_the_model_is_noted_unless_quiet(cli, place):
    noted = cli("detect", "bundle", "in", "--max-detections", 100_000, "--json", "a.jsonl")
    quiet = cli("detect", "bundle", "in", "--max-detections", 100_000, "--json", "b.jsonl", "--quiet")
    within = cli("detect", "bundle", "in", "--max-detections", 1, "--json", "c.jsonl")
    assert "--max-detections 100000" in " ".join(noted.err.split())
    assert "note" not in quiet.err and "note" not in within.err
    assert (place / "a.jsonl").read_bytes() == (place / "b.jsonl").read_bytes() != b""
