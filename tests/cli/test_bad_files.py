"""Bad images, videos, bundles, engines and output places, end to end through the command line."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import check_refusal, cli, place, run_process, snapshot  # noqa: F401 - fixtures
from engine_graphs import rtx
from fake_tensorrt import FakeCuda, fake_engine_bytes, fake_trt
from slow_images import png_chunk

from detrt.backends.tensorrt import TensorRTSession
from detrt.bundle import EngineFacts, write_sidecar
from detrt.data.video import video_writer
from detrt.errors import DetrtError
from detrt.spec import ModelSpec, TensorInfo

DETECT = ("detect", "bundle")


def png_header(width, height):
    """A PNG that claims a size and holds next to no pixels."""

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(bytes(100)))


BAD_IMAGES = {
    "empty": (b"", "0 bytes", "copy or download it again"),
    "text": (b"no image", "not an image", "save it as PNG or JPEG"),
    "cut": (None, "damaged or truncated", "copy it again"),
    "20000 x 20000": (png_header(20000, 20000), "too large", "Make it smaller"),
}


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_bad_images(cli, place, kind):
    content, names, advice = BAD_IMAGES[kind]
    if content is None:
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(place / "bad.jpg")
        content = (place / "bad.jpg").read_bytes()[:900]
    (place / "bad.jpg").write_bytes(content)
    before = snapshot(place)
    message = cli.refused(*DETECT, "bad.jpg", "--strict", "--json", "new/o.jsonl", names="'bad.jpg'", advice=advice)
    assert names in message and snapshot(place) == before
    # Without --strict the others are done, and the exit code still tells.
    result = cli(*DETECT, "bad.jpg", "in/blue.png", "--json", "-", code=2)
    assert [row["image"] for row in result.lines] == ["in/blue.png"]
    assert "1 of 2 inputs could not be read: bad.jpg" in result.err


def test_odd_images_are_read(cli, place):
    """CMYK, 16 bits, a palette, grey, transparency, one pixel: what they show is found. Blue is RGB 0, 0, 255."""
    blue = Image.new("RGB", (24, 16), "blue")
    odd = place / "odd"
    odd.mkdir()
    Image.new("CMYK", (24, 16), (255, 255, 0, 0)).save(odd / "cmyk.jpg", quality=100)
    blue.convert("P").save(odd / "palette.png")
    blue.convert("RGBA").save(odd / "transparent.png")
    Image.new("RGB", (1, 1), "blue").save(odd / "pixel.png")
    Image.fromarray(np.full((16, 24), 65535, np.uint16)).save(odd / "deep.png")
    Image.new("L", (24, 16), 255).save(odd / "grey.png")
    rows = cli(*DETECT, "odd", "--json", "-", "-q", "-t", "0.7").lines
    found = {Path(row["image"]).stem: {d["label"] for d in row["detections"]} for row in rows}
    assert {name: found[name] for name in ("cmyk", "palette", "transparent", "pixel")} == {
        key: {"blue"} for key in ("cmyk", "palette", "transparent", "pixel")
    }
    assert found["deep"] == found["grey"] == {"red", "green", "blue"}  # white
    pixel = next(row for row in rows if row["image"].endswith("pixel.png"))
    assert all(0 <= v <= 1 for d in pixel["detections"] for v in d["box_xyxy"])


def test_exif_rotation(cli, place):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (24, 16), "blue").save("turned.jpg", exif=exif, quality=95)
    row = cli(*DETECT, "turned.jpg", "--json", "-", "-q").lines[0]
    assert (row["width"], row["height"]) == (16, 24) and row["detections"]


@pytest.mark.parametrize(
    "content", [b"", b"no video", b"\0\0\0\x20ftypisom" + b"\0" * 40, None], ids=["empty", "text", "cut", "unknown codec"]
)
def test_bad_videos(cli, place, content):
    pytest.importorskip("av", reason="av is not installed")
    if content is None:
        with video_writer(place / "bad.mp4", fps=5, size=(16, 24)) as write:
            write(np.zeros((16, 24, 3), np.uint8))
        content = (place / "bad.mp4").read_bytes()
        assert content.count(b"avc1") >= 1
        content = content.replace(b"avc1", b"zzzz")
    (place / "bad.mp4").write_bytes(content)
    before = snapshot(place)
    cli.refused(*DETECT, "bad.mp4", "--strict", "--json", "o.jsonl", names="bad.mp4", advice="video|again|bytes")
    assert snapshot(place) == before


@pytest.mark.parametrize(
    ("inputs", "names", "advice"),
    [
        (["none"], "'none'", "check the path"),
        (["empty"], "'empty'", "known suffixes"),
        (["in/*.bmp"], "'in/*.bmp'", "known suffixes"),
        ([""], "''", "give a file"),
        (["https:///a.jpg", "--save-dir", "x"], "https:///a.jpg", "names no host"),
        (["x" * 5000 + ".jpg"], "xxx", "File name too long|check the path"),
        (["in", "--save-dir", "in"], "'in'", "give another --save-dir"),
        (["in", "--json", "in"], "'in'", "give another output path"),
        (["in", "--json", "."], "'.'", "give another output path"),
        (["in", "--csv", "model.onnx/x"], "model.onnx/x", "part of the path is a file"),
        (["in", "--json", "/proc/o.jsonl"], "/proc/o.jsonl", "give another output path"),
        (["in", "--save-dir", "/proc/o"], "/proc/o", "give another output path"),
        (["in", "--json", "a", "--csv", "a"], "'a'", "give each output its own"),
        (["in", "--classes", "blu"], "'blu'", "did you mean blue"),
        (["in", "--size", "64"], "64x64", "8x12"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_inputs_and_outputs(cli, place, inputs, names, advice):
    (place / "empty").mkdir()
    before = snapshot(place)
    cli.refused(*DETECT, *inputs, names=names, advice=advice)
    assert snapshot(place) == before


def manifest(change):
    def apply(folder):
        data = json.loads((folder / "detrt.json").read_text())
        change(data)
        (folder / "detrt.json").write_text(json.dumps(data))

    return apply


BUNDLES = {
    "cut": (lambda f: (f / "detrt.json").write_text('{"schema": 1'), "detrt.json", "detrt build"),
    "empty": (lambda f: (f / "detrt.json").write_text(""), "detrt.json", "detrt build"),
    "binary": (lambda f: (f / "detrt.json").write_bytes(b"\xff\xfe\x00"), "detrt.json", "detrt build"),
    "a list": (lambda f: (f / "detrt.json").write_text("[]"), "got list", "build it again"),
    "newer": (manifest(lambda d: d.update(schema=2)), "schema 2", "build it again"),
    "no spec": (manifest(lambda d: d.pop("spec")), "'spec'", "detrt build"),
    "spec of a newer detrt": (manifest(lambda d: d["spec"].update(flavour=1)), "flavour", "allowed: "),
    "outside": (manifest(lambda d: d["files"][0].update(path="../model.onnx")), "'../model.onnx'", "outside its own"),
    "absolute": (manifest(lambda d: d["files"][0].update(path="/etc/passwd")), "'/etc/passwd'", "outside its own"),
    "files": (manifest(lambda d: d.update(files=[1])), "damaged", "detrt build"),
    "model gone": (lambda f: (f / "model.onnx").unlink(), "model.onnx' is missing", "detrt build"),
    "model cut": (lambda f: os.truncate(f / "model.onnx", 500), "has 500 bytes", "build it again"),
    "model changed": (
        lambda f: (f / "model.onnx").write_bytes((f / "model.onnx").read_bytes()[:-1] + b"x"),
        "SHA-256 differs",
        "build it again",
    ),
}


@pytest.mark.parametrize("kind", BUNDLES)
def test_damaged_bundles(cli, place, kind):
    damage, names, advice = BUNDLES[kind]
    damage(place / "bundle")
    before = snapshot(place)
    cli.refused(*DETECT, "in", "--json", "o.jsonl", names=names, advice=advice)
    assert snapshot(place) == before


@rtx
@pytest.mark.parametrize(
    ("damage", "names", "advice"),
    [
        (lambda e: os.truncate(e, 1000), "has 1000 bytes", "build it again"),
        (lambda e: e.write_bytes(b"x" + e.read_bytes()[1:]), "SHA-256 differs", "build it again"),
        (lambda e: e.unlink(), "model", "detrt build|build it again"),
        (lambda e: e.with_name(e.name + ".json").unlink(), "sidecar", "detrt build"),
        (lambda e: e.with_name(e.name + ".json").write_text("{}"), "no field", "detrt build"),
        (lambda e: e.with_name(e.name + ".json").write_text("{"), "JSON", "detrt build"),
    ],
    ids=["cut", "changed", "gone", "no sidecar", "empty sidecar", "cut sidecar"],
)
def test_damaged_engines(cli, place, damage, names, advice):
    cli("build", "model.onnx", "-o", "full", "--target", "tensorrt-rtx", "--sm", 89)
    engine = Path("full/model.tensorrt-rtx-sm89.engine")
    damage(engine)
    before = snapshot(place)
    cli.refused("info", engine, names=names, advice=advice)
    detect = ("detect", engine, "in", "--json", "o.jsonl")
    if advice == "build it again":  # the content, which is not read where the engine cannot run
        names, advice = "engine", "pip install|GPU|build it again|--backend onnxruntime"
    cli.refused(*detect, names=names, advice=advice)
    assert snapshot(place) == before


def test_batch_outside_of_the_profile(tmp_path):
    """No GPU here: the session is the real one, the library under it the fake that detrt ships."""
    inputs = [TensorInfo("pixel_values", "uint8", ("batch", 3, 8, 12))]
    outputs = [TensorInfo("logits", "float32", ("batch", 4, 3)), TensorInfo("pred_boxes", "float32", ("batch", 4, 4))]
    profile = {"pixel_values": {"min": [1, 3, 8, 12], "opt": [1, 3, 8, 12], "max": [2, 3, 8, 12]}}
    path = tmp_path / "m.engine"
    path.write_bytes(fake_engine_bytes(inputs, outputs, profile))
    from onnx_models import make_spec

    spec: ModelSpec = make_spec()
    write_sidecar(path, spec, EngineFacts("tensorrt-rtx", "1.7.1.116", (89,), "fp32", profile, ""))
    cuda = FakeCuda(89)

    def model(feeds):
        size = len(feeds["pixel_values"])
        return {"logits": np.zeros((size, 4, 3), np.float32), "pred_boxes": np.zeros((size, 4, 4), np.float32)}

    with TensorRTSession(path, trt=fake_trt("tensorrt-rtx", cuda, model), cuda=cuda) as session:
        assert session.run({"pixel_values": np.zeros((2, 3, 8, 12), np.uint8)})["logits"].shape == (2, 4, 3)
        with pytest.raises(DetrtError, match=r"batch 3; this engine takes 1 to 2.*`batch=") as caught:
            session.run({"pixel_values": np.zeros((3, 3, 8, 12), np.uint8)})
        assert caught.value.exit_code == 2


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@rtx
@pytest.mark.parametrize("free", ["nothing", "the graph but not the engine"])
def test_disk_that_fills_up(cli, place, small_disk, free):
    """A real full file system: found out while the graph is copied, and while the engine is written."""
    cli("build", "model.onnx", "-o", small_disk / "b", "--target", "onnx")
    filler = small_disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    if free != "nothing":
        os.truncate(filler, 100 * 1024)  # the engine has 400 kB
    before = snapshot(small_disk)
    arguments = ("build", "model.onnx", "-o", small_disk / "b", "--target", "tensorrt-rtx", "--sm", 89)
    cli.refused(*arguments, names=str(small_disk / "b"), advice="the disk is full; free space or give another")
    assert snapshot(small_disk) == before


class NoSpace:
    """Path.write_bytes that fails for one file, after half of the data."""

    def __init__(self, monkeypatch, name, number):
        self.hits = 0
        real = Path.write_bytes

        def write_bytes(path, data):
            if name in path.name:
                self.hits += 1
                real(path, bytes(data)[: len(data) // 2])
                raise OSError(number, os.strerror(number), str(path))
            return real(path, data)

        monkeypatch.setattr(Path, "write_bytes", write_bytes)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_last_write_fails(cli, place, monkeypatch, number):
    """The manifest is the last file of a bundle: everything before it goes again."""
    broken = NoSpace(monkeypatch, "detrt.json", number)
    before = snapshot(place)
    advice = {errno.ENOSPC: "free space", errno.EACCES: "you may write"}.get(number, "give another output path")
    for output in ("bundle", "new/deep"):
        cli.refused("build", "model.onnx", "-o", output, "--target", "onnx", names=f"'{output}", advice=advice)
    assert broken.hits == 2 and snapshot(place) == before


def test_a_working_folder_that_is_gone(cli, place, monkeypatch):
    (place / "gone").mkdir()
    monkeypatch.chdir(place / "gone")
    (place / "gone").rmdir()
    done = cli("detect", place / "bundle", place / "in", "--json", "found.jsonl", code=2)
    assert done.err == "detrt: the working folder does not exist any more; change to one that does\n"


def test_no_thread_can_be_started(cli, place, monkeypatch):
    """As with the limit of processes of a container."""

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    done = cli("detect", "bundle", "in", code=2)
    assert done.err.startswith("detrt: no thread can be started; raise the limit of processes")


def test_folder_that_may_not_be_written(cli, place, monkeypatch):
    """Tests run as root, whom modes do not stop; so the system's answer is put in its place."""
    real = os.mkdir

    def mkdir(path, *args, **kwargs):
        if "locked" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", mkdir)
    before = snapshot(place)
    for arguments in (
        ("build", "model.onnx", "-o", "locked/b", "--target", "onnx"),
        (*DETECT, "in", "--save-dir", "locked/runs"),
        ("demo-data", "locked/scenes"),
    ):
        cli.refused(*arguments, names="locked", advice="no permission; give an output path that you may write")
    assert snapshot(place) == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_standard_output_fills_up(place):
    with open("/dev/full", "w") as full:
        result = run_process(*DETECT, "in", "--json", "-", "-q", cwd=place, stdout=full)
    check_refusal(result, names="'-'", advice="the disk is full")


def test_swap_that_fails_puts_the_old_bundle_back(cli, place, monkeypatch):
    """The manifest is the last file that is replaced; a failure there must not leave new files beside the old one."""
    real, failed = os.replace, []

    def replace(source, target):
        if Path(target).parts[-2:] == ("bundle", "detrt.json") and not failed:
            failed.append(source)
            raise OSError(errno.EIO, "Input/output error")
        return real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    before = snapshot(place)
    cli.refused("build", "model.onnx", "-o", "bundle", "--target", "onnx", names="'bundle'", advice="another output")
    assert failed and snapshot(place) == before
