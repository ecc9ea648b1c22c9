"""detrt-run against `detrt detect`: the same images, the same detections, the same lines."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import zlib

import numpy as np
import pytest
from killed import calls_of, kill, some_of, without_strace
from native import LARGEST, ROOT, run
from PIL import Image
from slow_images import png_chunk

from detrt.data.sinks import Record
from detrt.detector import Detector
from detrt.errors import printable

OPTIONS = (
    ({}, []),
    ({"threshold": 0.2, "batch_size": 3}, ["--threshold", "0.2", "--batch", "3"]),
    ({"classes": ['A "dog"', "0"], "threshold": 0.1}, ["--classes", 'A "dog",0', "-t", "0.1"]),
    ({"max_detections": 2, "threshold": 0.0}, ["--max-detections", "2", "--threshold=0"]),
)


@pytest.mark.parametrize(("choices", "arguments"), OPTIONS)
def test_lines_are_those_of_python(build, bundle, session, photos, choices, arguments):
    done = run(build / "detrt-run", bundle, *photos, "--json", "-", *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    expected = [Record(str(p), d).to_dict() for p, d in zip(photos, Detector(session, **choices)(photos), strict=True)]
    assert len(lines) == len(expected) and sum(len(row["detections"]) for row in expected) > 20
    for line, row in zip(lines, expected, strict=True):
        got = json.loads(line)
        assert json.dumps(got, ensure_ascii=False) == line  # spaces, order of fields and form of numbers
        assert list(got) == list(row) and got["image"] == row["image"]
        assert (got["width"], got["height"]) == (row["width"], row["height"])
        assert [d["label"] for d in got["detections"]] == [d["label"] for d in row["detections"]]
        for a, b in zip(got["detections"], row["detections"], strict=True):
            assert list(a) == list(b)
            assert abs(a["score"] - b["score"]) <= 1e-3
            np.testing.assert_allclose(a["box_xyxy"], b["box_xyxy"], atol=0.5)


@pytest.mark.slow
def test_masks_are_those_of_python(build, masked, photos, tmp_path):
    mask_api = pytest.importorskip("pycocotools.mask", reason="needs the 'eval' extra")
    bundle, session = masked
    done = run(build / "detrt-run", bundle, *photos, "--json", tmp_path / "out.jsonl", "--save", tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line)["detections"] for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    found = Detector(session)(photos)
    assert sum(len(row) for row in rows) > 20
    for path, row, ours in zip(photos, rows, found, strict=True):
        assert [d["label"] for d in row] == list(ours.labels)
        theirs = [d["segmentation"]["counts"] for d in row]
        # The compiled package rounds otherwise, which may move a pixel at logit 0.
        pixels = mask_api.decode([{"size": list(ours.image_size_hw), "counts": text} for text in theirs]) if theirs else None
        for i, mask in enumerate(ours.masks.to_array()):
            assert (pixels[..., i] != mask).mean() < 1e-3, path


def test_files_and_annotated_copies(build, bundle, photos, tmp_path):
    done = run(build / "detrt-run", bundle, photos[0].parent, "--json", tmp_path / "sub/out.jsonl", "--save", tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "sub/out.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == len(photos)
    for row in map(json.loads, lines):
        name = row["image"].rsplit("/", 1)[1]
        copy = tmp_path / "saved" / (name if name.endswith((".jpg", ".png")) else name + ".png")
        with Image.open(copy) as image:
            assert image.size == (row["width"], row["height"])
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".tmp")]


def test_what_another_build_runs_is_named(build, bundle, photos, tmp_path):
    """One line for each backend, also for those that the bundle has a file of and this build does not have."""
    shutil.copytree(bundle, tmp_path / "engine")
    manifest = tmp_path / "engine" / "detrt.json"
    data = json.loads(manifest.read_text("utf-8"))
    data["files"][0]["kind"] = "engine"
    manifest.write_text(json.dumps(data), "utf-8")
    done = run(build / "detrt-run", tmp_path / "engine", photos[0])
    first, *lines = done.stderr.splitlines()
    assert done.returncode == 2 and first.endswith("here:") and all(line.startswith("  ") for line in lines)
    assert f"  tensorrt: '{data['files'][0]['path']}' needs a libdetrt configured with -DDETRT_TENSORRT=ON" in lines
    assert [line for line in lines if line.startswith("  libtorch: the bundle has no compiled package")]


def test_types_that_are_not_read_are_told(build, bundle, photos, tmp_path):
    shutil.copy(photos[0], tmp_path)
    for name in ("a.webp", "b.tiff", "c.TIFF", "d.mp4", "e.txt"):
        (tmp_path / name).write_bytes(b"x")
    done = run(build / "detrt-run", bundle, tmp_path)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1
    assert done.stderr == "note: left out of the folders: 1 .mp4, 2 .tiff, 1 .webp; detrt detect reads them\n"
    assert run(build / "detrt-run", bundle, tmp_path, "-q").stderr == ""


def test_a_skipped_image_is_told_and_the_others_are_done(build, bundle, photos, tmp_path):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(photos[-1].read_bytes()[:100] + b"x")
    out = tmp_path / "out.jsonl"
    done = run(build / "detrt-run", bundle, photos[0], bad, photos[1], "--json", out)
    assert done.returncode == 2 and "1 of 3 inputs could not be read" in done.stderr and "skipped:" in done.stderr
    assert len(out.read_text("utf-8").splitlines()) == 2
    out.unlink()
    done = run(build / "detrt-run", bundle, photos[0], bad, "--json", out, "--strict")
    assert done.returncode == 2 and not out.exists() and [p.name for p in tmp_path.iterdir()] == ["bad.jpg"]


def changed(bundle, folder, change):
    shutil.copytree(bundle, folder)
    path = folder / "detrt.json"
    data = json.loads(path.read_text("utf-8"))
    change(data)
    path.write_text(json.dumps(data), "utf-8")
    return folder


def refused(program, photos, cases):
    for arguments, message in cases:
        done = run(program, arguments[0], photos[0], *arguments[1:])
        assert done.returncode == 2 and message in done.stderr and not done.stdout, (arguments, done.stderr, done.returncode)
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert len(re.findall("[bB]uild it|detrt build MODEL|compile it", done.stderr)) <= 1, done.stderr  # one next step


def test_bad_input_is_a_message(build, sanitized, bundle, photos, tmp_path):
    def edit(name, change):
        return changed(bundle, tmp_path / name, change)

    def other(field, value):
        return lambda data: data["files"][0]["engine"].__setitem__(field, value)

    prompted = json.loads((ROOT / "tests/data/prompt_cases.json").read_text("utf-8"))["cases"][0]["spec"]
    short = changed(bundle, tmp_path / "short", lambda data: None)
    package = short / "model.inductor-cpu.pt2"
    package.write_bytes(package.read_bytes()[:5000])
    swapped = changed(bundle, tmp_path / "swapped", lambda data: None)
    package = swapped / "model.inductor-cpu.pt2"
    package.write_bytes(b"x" + package.read_bytes()[1:])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/detrt.json").write_text("{")
    cases = [
        ([short], "truncated or replaced; build it again"),
        ([swapped], "SHA-256 differs"),
        ([edit("gpu", other("compute_capabilities", [90]))], "and PyTorch sees no GPU here"),
        ([edit("form", other("options", {"format": "artifact"}))], "of the form that only Python opens"),
        ([edit("cpu", other("options", {"format": "aoti", "cpu_flags": ["no_such_set"]}))], "for a CPU with no_such_set, which"),
        ([edit("prompted", lambda d: d.update(spec=prompted))], "models that take a prompt run in Python only"),
        ([edit("version", other("runtime_version", "2.1.0"))], "was compiled by PyTorch 2.1.0"),
        ([edit("facts", lambda d: d["files"][0].update(engine=None))], "does not say which tensors"),
        ([edit("none-of-it", lambda d: d.update(files=[]))], "the bundle has no compiled package"),
        ([bundle, "--batch", str(LARGEST + 1)], f"batch must be from 1 to {LARGEST} with this model"),
        ([bundle, "--device", "cuda:7"], "PyTorch sees 0 GPUs here; got device cuda:7"),
        ([bundle, "--device", "tpu"], "device must be cpu, cuda or cuda:N"),
        ([bundle, "--backend", "other"], "has no backend 'other'"),
        ([bundle, "--classes", "cow"], "this model has no class 'cow'"),
        ([bundle, "--size", "64x64"], "this model takes 32x40 only"),
        ([bundle, "--json", tmp_path], "a folder has that name"),
        ([bundle, "--cuda-graph"], "choices for the tensorrt backend"),
        ([bundle, "--image-decoder", "gpu"], "this is libtorch-cpu: leave it out"),
    ]
    # Others that are built in would add their reasons.
    named = [(arguments if "--backend" in arguments else [*arguments, "--backend", "libtorch"], why) for arguments, why in cases]
    refused(build / "detrt-run", photos, named)
    before_the_model = [
        ([tmp_path / "none"], "is not a detrt bundle. Make one with: detrt build"),
        ([tmp_path / "broken"], "cannot be read as JSON"),
        ([edit("schema", lambda d: d["spec"].update(schema=9))], "spec has schema 9"),
        ([edit("outside", lambda d: d["files"][0].update(path="../x"))], "outside its own folder; refused"),
        ([bundle, "--batch", "0"], "--batch: Value 0 not in range 1 to 1000000"),
        ([bundle, "--threshold", "2"], "--threshold: Value 2 not in range 0.0"),
        ([bundle, "--prompt", "p.json"], "there is no prompt file 'p.json'"),
        ([bundle, "--image-decoder", "tpu"], "--image-decoder: tpu not in {"),
        ([bundle, "--what"], "The following argument was not expected: --what"),
        ([bundle, "--json"], "--json: 1 required"),
        ([bundle, "--json", "--quiet"], "--json has no value: --quiet behind it is spelled like an option"),
        ([bundle, "--json", ""], "--json is '' (empty): give a value, or leave the option out"),
        ([bundle, "--plugin", "a", "--plugin", ""], "--plugin is '' (empty)"),
        ([bundle, "--save", "-q"], "--save VALUE -q (a file of that name is ./-q)"),
        ([bundle, "--classes", "red", "--classes", "--strict"], "--classes has no value: --strict"),
    ]
    refused(sanitized / "detrt-run", photos, before_the_model)
    for inputs, message in (([], "IMAGE is required"), (["none.jpg"], "there is no file 'none.jpg'")):
        done = run(sanitized / "detrt-run", bundle, *inputs)
        assert done.returncode == 2 and message in done.stderr


def test_help_and_benchmark(build, bundle, photos):
    assert "--benchmark N" in run(build / "detrt-run", "--help").stdout
    done = run(build / "detrt-run", bundle, photos[0], "--benchmark", "5", "--batch", "2")
    assert done.returncode == 0 and "libtorch-cpu, batch 2, 5 runs after 5" in done.stdout
    assert all(name in done.stdout for name in ("read ", "preprocess ", "model ", "decode ", "end to end "))


def test_installed_package_is_found_by_a_consumer(build, bundle, photos, tmp_path):
    prefix = tmp_path / "prefix"
    done = run("cmake", "--install", build, "--prefix", prefix)
    assert done.returncode == 0, done.stderr
    source = ROOT / "cpp/example"
    done = run(
        "cmake", "-S", source, "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror"
    )
    assert done.returncode == 0, done.stderr
    done = run("cmake", "--build", tmp_path / "b")
    assert done.returncode == 0, done.stdout
    done = run(tmp_path / "b/count_objects", bundle, photos[0])
    assert done.returncode == 0, done.stderr
    assert sum(1 for line in (source / "count_objects.cpp").read_text().splitlines() if line.strip()) <= 40
    assert run(prefix / "bin/detrt-run", bundle, photos[0]).returncode == 0


def _contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_json_replaces_nothing_that_is_read(build, bundle, photos, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(bundle, own)
    pictures = tmp_path / "in"
    pictures.mkdir()
    for photo in photos[:2]:
        shutil.copy(photo, pictures)
    first = pictures / photos[0].name
    (tmp_path / "link").symlink_to(first)
    (tmp_path / "binary").write_bytes(b"\x89PNG\0")
    before = _contents(tmp_path)
    listed = next(path for path in own.iterdir() if path.name != "detrt.json" and path.suffix != ".json")
    for target in (
        first,
        pictures / ".." / "in" / first.name,
        tmp_path / "link",
        own / "detrt.json",
        listed,
        tmp_path / "binary",
    ):
        done = run(build / "detrt-run", own, pictures, "--json", target)
        assert done.returncode == 2 and "would replace" in done.stderr, (target, done.stderr)
        assert _contents(tmp_path) == before
    for _ in range(2):  # its own output of an earlier run, also among the images
        assert run(build / "detrt-run", own, pictures, "--json", pictures / "found.jsonl").returncode == 0


def test_copies_replace_no_input_under_another_name(build, bundle, photos, tmp_path):
    (tmp_path / "in").mkdir()
    shutil.copy(photos[0], tmp_path / "in")
    (tmp_path / "out").symlink_to("in")
    before = _contents(tmp_path)
    done = run(build / "detrt-run", bundle, tmp_path / "in", "--save", tmp_path / "out")
    assert done.returncode == 2 and "would replace the input" in done.stderr
    assert _contents(tmp_path) == before


def test_copies_have_names_of_their_own(build, bundle, tmp_path):
    (tmp_path / "in").mkdir()
    sizes = {"a.ppm": (8, 8), "a.ppm.png": (9, 9), "n" * 250 + ".png": (10, 10)}
    for name, size in sizes.items():
        Image.new("RGB", size).save(tmp_path / "in" / name)
    done = run(build / "detrt-run", bundle, tmp_path / "in", tmp_path / "in" / ".." / "in" / "a.ppm", "--save", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    copies = {path.name: Image.open(path).size for path in (tmp_path / "out").iterdir()}
    assert copies == {**{name: size for name, size in sizes.items() if name != "a.ppm"}, "a.ppm.png.png": sizes["a.ppm"]}


def test_json_of_an_impossible_name_is_a_message(build, bundle, photos, tmp_path):
    done = run(build / "detrt-run", bundle, photos[0], "--json", tmp_path / ("n" * 256))
    assert done.returncode == 2 and "File name too long" in done.stderr


def test_one_large_file_ends_no_run(build, bundle, photos, tmp_path):
    """A file that is mostly a hole, and one whose texts unpack to gigabytes."""

    plain = (photos[0].parent / "plain.png").read_bytes()
    text = zlib.compress(b" " * 7_900_000, 9)
    texts = png_chunk(b"zTXt", b"k\0\0" + text) * 500 + png_chunk(b"iTXt", b"k\0\1\0\0\0" + text) * 500
    (tmp_path / "texts.png").write_bytes(plain[:33] + texts + plain[33:])
    shutil.copy(photos[0].parent / "plain.jpg", tmp_path / "hole.jpg")
    os.truncate(tmp_path / "hole.jpg", 1 << 40)
    command = shlex.join(map(str, (build / "detrt-run", bundle, tmp_path / "texts.png", tmp_path / "hole.jpg", "--json", "-")))
    done = run("bash", "-c", f"ulimit -d {4 << 20}; exec {command}")  # KiB; the texts have twice as much
    assert done.returncode == 2 and "at most 2147483648 are read" in done.stderr, done.stderr
    assert [json.loads(line)["image"] for line in done.stdout.splitlines()] == [str(tmp_path / "texts.png")]


def test_json_goes_into_pipes_and_descriptors_as_they_are(build, bundle, photos, tmp_path):
    """A rename would replace them for everybody."""
    fifo, link = tmp_path / "fifo", tmp_path / "stdout"
    os.mkfifo(fifo)
    link.symlink_to("/proc/self/fd/1")
    with subprocess.Popen(["cat", fifo], stdout=subprocess.PIPE, text=True) as reader:
        done = run(build / "detrt-run", bundle, *photos, "--json", fifo)
        lines = reader.communicate(timeout=60)[0].splitlines()
    assert done.returncode == 0 and fifo.is_fifo()
    through = run(build / "detrt-run", bundle, *photos, "--json", link)
    assert through.returncode == 0 and link.is_symlink()
    assert lines == through.stdout.splitlines() and len(lines) == len(photos)


@pytest.mark.parametrize("output", [(), ("--json", "-")], ids=["text", "json"])
@pytest.mark.parametrize("stream", ["> /dev/full", ">&-"])
def test_a_stdout_that_takes_nothing_is_an_error(build, bundle, photos, output, stream):
    line = " ".join(map(shlex.quote, map(str, (build / "detrt-run", bundle, *photos, *output))))
    done = subprocess.run(["bash", "-c", f"{line} {stream}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "standard output" in done.stderr


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_into_a_stdout_that_takes_nothing_is_an_error(build, option):
    reader, writer = os.pipe()
    os.close(reader)
    command = [build / "detrt-run", option]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, restore_signals=False)
    os.close(writer)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("detrt-run: cannot write standard output: Broken pipe; ")


@pytest.mark.parametrize("stream", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams_leave_files_alone(build, bundle, photos, tmp_path, stream):
    path = tmp_path / "found.jsonl"
    line = " ".join(map(shlex.quote, map(str, (build / "detrt-run", bundle, *photos, "--json", path))))
    assert subprocess.run(["bash", "-c", f"{line} {stream}"], timeout=120).returncode == 0
    assert [json.loads(row)["image"] for row in path.read_text("utf-8").splitlines()] == [str(photo) for photo in photos]


@pytest.mark.parametrize("name", ["line1\nline2: 3 person", "\x1b[2J", "a\rb", "\x9b31m", "\u202eexe", "a\u2028b", "犬 é"])
def test_names_forge_no_line(build, bundle, photos, tmp_path, name):
    path = tmp_path / f"{name}.png"
    Image.open(photos[0]).save(path)
    done = run(build / "detrt-run", bundle, path)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1
    assert done.stdout.startswith(printable(path))


def test_a_program_in_c_and_its_threads(build, bundle, photos, tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs cc, a compiler for C")
    program, library = (
        tmp_path / "program",
        ["-I", ROOT / "cpp/include", "-L", build, "-ldetrt", f"-Wl,-rpath,{build}", "-pthread"],
    )
    flags = ["-std=c99", "-D_POSIX_C_SOURCE=200809L", "-pedantic", "-Wall", "-Wextra", "-Werror"]
    made = run(compiler, *flags, "-o", program, ROOT / "cpp/tests/c_program.c", *library)
    assert made.returncode == 0, made.stderr
    done = run(program, bundle, photos[0], 8)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run(build / "detrt-run", bundle, photos[0], "--json", "-").stdout


@pytest.mark.skipif(bool(without_strace()), reason=without_strace() or "strace works")
@pytest.mark.parametrize("some", [2, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "each"])
def test_a_run_that_is_killed_leaves_old_files_or_new_ones(build, bundle, photos, tmp_path, some):
    """Killed at a call that writes, renames or removes; the next run removes what it had begun."""
    pictures, place, out = tmp_path / "in", tmp_path / "place", tmp_path / "place/out"
    pictures.mkdir()
    for name in ("plain.jpg", "plain.png"):
        shutil.copy(photos[0].parent / name, pictures)
    command = tuple(map(str, (build / "detrt-run", bundle, pictures, "--batch", 1, "--json", "out/found.jsonl", "--save", "out")))

    def begin() -> None:
        shutil.rmtree(place, ignore_errors=True)
        out.mkdir(parents=True)
        (out / "found.jsonl").write_text("[]\n")
        Image.new("RGB", (3, 3)).save(out / "plain.jpg")

    begin()
    calls = calls_of(place, command)
    assert {"write", "rename", "fsync"} <= {name for name, _ in calls}
    done = []
    for call in some_of(calls, some):
        begin()
        kill(place, call, command)
        lines = [json.loads(line) for line in (out / "found.jsonl").read_text("utf-8").splitlines()]
        assert lines == [[]] or len(lines) == 2, f"killed at {call}: {lines}"
        done.append(len(lines) == 2)
        for path in out.glob("[!.]*.[jp][pn]g"):
            with Image.open(path) as image:
                image.load()
        assert run(*command, cwd=place).returncode == 0
        assert sorted(os.listdir(out)) == ["found.jsonl", "plain.jpg", "plain.png"], f"killed at {call}"
    assert done == sorted(done) and not done[0] and done[-1]
