"""detrt-run with the OpenVINO model of a bundle, against Python with the same."""

from __future__ import annotations

import json
import shlex
import shutil
from importlib.util import find_spec

import pytest
from large_scenes import compose
from native import run
from PIL import Image

from detrt.backends.openvino.config import OpenVinoConfig
from detrt.data.scenes.scene import draw_images
from detrt.data.sinks import Record
from detrt.detector import Detector
from detrt.pipeline import build as build_bundle

if find_spec("openvino") is None:  # not importorskip, whose import would send telemetry
    pytest.skip("needs the 'openvino' extra", allow_module_level=True)


@pytest.fixture(scope="module")
def shapes(exported, shared):
    """A bundle of the trained detector of shapes."""

    def make(folder):
        build_bundle(exported("embedded:shapes").path, folder / "bundle", targets=(OpenVinoConfig(),))
        return folder / "bundle"

    return shared("shapes-openvino", make)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    for number, image in enumerate(draw_images(5, (120, 160))):
        Image.fromarray(image).save(folder / f"{number}.png")
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def program(build, shapes, scenes):
    path = build / "detrt-run"
    if "no backend 'openvino'" in run(path, shapes, scenes[0], "--backend", "openvino").stderr:
        pytest.skip("detrt-run was built without OpenVINO; run: make cpp-build")
    return path


@pytest.mark.parametrize(
    ("choices", "arguments"),
    [({}, []), ({"threshold": 0.2, "batch_size": 3, "threads": 1}, ["--threshold", "0.2", "--batch", "3", "--threads", "1"])],
)
def test_lines_are_those_of_python(program, shapes, scenes, choices, arguments):
    done = run(program, shapes, *scenes, "--json", "-", *arguments)
    assert done.returncode == 0, done.stderr
    with Detector(shapes, backend="openvino", **choices) as detector:
        rows = [Record(str(path), found).to_dict() for path, found in zip(scenes, detector(scenes), strict=True)]
    lines = done.stdout.splitlines()
    assert len(lines) == len(rows) and sum(len(row["detections"]) for row in rows) > 5
    for line, row in zip(lines, rows, strict=True):
        got = json.loads(line)
        for theirs, ours in zip(got["detections"], row["detections"], strict=True):
            # C++ and NumPy round the sigmoid of a logit differently in the last bit.
            assert theirs.pop("score") == pytest.approx(ours.pop("score"), abs=1.5e-6)
        assert got == row


@pytest.mark.parametrize(
    ("choices", "arguments"),
    [
        ({"tile": 256}, ["--tile", "256"]),
        ({"tile": (200, 330), "overlap": 0.4}, ["--tile", "200x330", "--overlap", "0.4", "--batch", "3"]),
        ({"tile": 120, "overlap": 0.0, "max_detections": 9}, ["--tile=120", "--overlap=0", "--max-detections", "9"]),
        ({"tile": 1000}, ["--tile", "1000"]),
    ],
)
def test_tiles_and_what_they_show_are_those_of_python(program, shapes, choices, arguments, tmp_path):
    """At a threshold that leaves many pieces and near duplicates to join, with masks."""
    paths = []
    for seed in range(2):
        paths.append(tmp_path / f"{seed}.png")
        Image.fromarray(compose(seed, (500, 700), 12, rows=2, columns=2).image).save(paths[-1])
    done = run(program, shapes, *paths, "--json", "-", "--threads", "1", "-t", "0.05", *arguments)
    assert done.returncode == 0, done.stderr
    with Detector(shapes, backend="openvino", threads=1, threshold=0.05, **choices) as detector:
        rows = [Record(str(path), detector(path)).to_dict() for path in paths]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(row["detections"]) for row in lines] == [len(row["detections"]) for row in rows]
    assert min(len(row["detections"]) for row in rows) >= 9
    for got, row in zip(lines, rows, strict=True):
        for theirs, ours in zip(got["detections"], row["detections"], strict=True):
            assert theirs.pop("score") == pytest.approx(ours.pop("score"), abs=1.5e-6)
        assert got == row


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(5, 6), (6, 8)])
def test_twenty_large_scenes_are_equal_everywhere(program, shapes, rows, columns, tmp_path):
    """Python, C++ and the server, with the same model: every detection of 20 images of 4000x3000, at least 60 objects each."""
    pytest.importorskip("fastapi", reason="needs the 'serve' extra")
    import httpx
    from serve_support import Server

    paths = []
    for seed in range(20):
        paths.append(tmp_path / f"{seed}.png")
        Image.fromarray(compose(seed, (3000, 4000), 60, rows=rows, columns=columns).image).save(paths[-1], compress_level=1)
    done = run(program, shapes, *paths, "--json", "-", "--threads", "1", "--tile", "640", "-t", "0.3")
    assert done.returncode == 0, done.stderr
    native = [json.loads(line)["detections"] for line in done.stdout.splitlines()]
    with Detector(shapes, backend="openvino", threads=1, threshold=0.3, tile=640) as detector:
        here = [detector(path).to_list() for path in paths]
    with Server(f"shapes={shapes}", "--backend", "openvino", "--workers", 1) as server:
        served = []
        for path in paths:
            form = {"data": {"threshold": "0.3", "tile": "640"}, "files": {"images": path.read_bytes()}}
            answer = httpx.post(f"{server.address}/v1/detect", timeout=300, **form)
            served.append(answer.raise_for_status().json()["images"][0]["detections"])
    assert min(map(len, here)) >= 60
    for theirs in (native, served):
        for got, known in zip(theirs, here, strict=True):
            assert len(got) == len(known)
            for one, mine in zip(got, known, strict=True):
                assert one["score"] == pytest.approx(mine["score"], abs=1.5e-6)
                assert {**one, "score": 0} == {**mine, "score": 0}


def test_tiles_that_are_none(program, shapes, scenes):
    for arguments, message in [
        (["--overlap", "0.2"], "--overlap is of tiles, and there are none; give --tile HxW as well"),
        (["--tile", "64", "--overlap", "0.95"], "--overlap: Value 0.95 not in range 0"),
        (["--tile", "0"], "--tile: must be HEIGHTxWIDTH or one number"),
    ]:
        done = run(program, shapes, scenes[0], *arguments)
        assert done.returncode == 2 and message in done.stderr, done.stderr


def test_compiled_models_are_stored(program, shapes, scenes, tmp_path, monkeypatch):
    monkeypatch.setenv("DETRT_OPENVINO_CACHE", str(tmp_path / "cache"))
    done = run(program, shapes, scenes[0], "--benchmark", "1")
    assert done.returncode == 0 and done.stdout.startswith("openvino-cpu, batch 1"), done.stderr
    assert list((tmp_path / "cache").glob("*.blob"))


def test_a_type_that_the_processor_lacks_is_computed_in_fp32(program, shapes, scenes, tmp_path):
    from detrt.backends.openvino.runtime import core

    lacking = {"BF16", "FP16"} - set(core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
    if not lacking:
        pytest.skip("this processor has BF16 and FP16")
    name = min(lacking)
    folder = changed(shapes, tmp_path / "low", lambda model, weights: model["engine"].update(precision=name.lower()))
    done = run(program, folder, scenes[0], "--benchmark", "1", "--backend", "openvino")
    assert done.stdout.startswith(f"openvino-cpu (in FP32: this processor has no {name}), batch 1"), done.stderr


def changed(bundle, folder, change):
    """A copy of the bundle whose rows of the OpenVINO model and its weights are changed."""
    shutil.copytree(bundle, folder)
    path = folder / "detrt.json"
    data = json.loads(path.read_text("utf-8"))
    change(*(entry for entry in data["files"] if entry["kind"].startswith("openvino")))
    path.write_text(json.dumps(data), "utf-8")
    return folder


def test_bad_input_is_a_message(program, shapes, scenes, tmp_path):
    weights = changed(shapes, tmp_path / "weights", lambda *rows: None) / "model.openvino.bin"
    weights.write_bytes(b"x" + weights.read_bytes()[1:])
    cases = [
        ([weights.parent], "SHA-256 differs"),
        ([changed(shapes, tmp_path / "facts", lambda model, weights: model.update(engine=None))], "does not say which tensors"),
        ([changed(shapes, tmp_path / "named", lambda model, weights: weights.update(path="x"))], "which"),
        ([shapes, "--device", "npu"], "OpenVINO finds no device 'npu' here; it finds CPU"),
        ([shapes, "--device", "xpu:1"], "OpenVINO finds no device 'xpu:1' here"),
        ([shapes, "--device", "cuda"], "OpenVINO runs on cpu, xpu, xpu:N and npu; got device cuda"),
        ([shapes, "--cuda-graph"], "choices for the tensorrt backend"),
        ([changed(shapes, tmp_path / "none", lambda model, weights: model.update(kind="x"))], "the bundle has no OpenVINO model"),
    ]
    for (folder, *arguments), message in cases:
        done = run(program, folder, scenes[0], "--backend", "openvino", *arguments)
        assert done.returncode == 2 and message in done.stderr and not done.stdout, (arguments, done.stderr)
        assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_a_copy_that_cannot_be_written_is_named(program, shapes, scenes, tmp_path, suffix):
    """Where the disk is full, which a limit of the size of files stands for; the file that was begun is gone."""
    Image.open(scenes[0]).save(tmp_path / f"scene{suffix}")
    copy = tmp_path / "out" / f"scene{suffix}"
    command = shlex.join(
        map(str, (program, shapes, tmp_path / f"scene{suffix}", "--backend", "openvino", "--save", tmp_path / "out"))
    )
    done = run("bash", "-c", f"trap '' XFSZ; ulimit -f 1; exec {command}")
    assert done.returncode == 2 and f"cannot write '{copy}': " in done.stderr, done.stderr
    assert "the space on the disk" in done.stderr and list((tmp_path / "out").iterdir()) == []
