"""Build the C++ runtime against this machine's PyTorch and run its libtorch backend on the GPU: one JSON file of results.

    python3 benchmarks/cpp_cuda.py OUT.json [--deps FOLDER] [--program DETRT_RUN]

--deps: headers and static libraries of libjpeg, libpng, zlib, libcrypto, nlohmann/json and stb, for a machine without
packages (default: .device/cpp-deps where it is there). The model is small and compiled here by AOTInductor for the GPU;
its detections are compared with the same module run by PyTorch in Python. Every step is on its own: a crash is recorded
with its exit code, and where cuda-gdb is at hand with a backtrace.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests/support")]
SIDE, QUERIES, CLASSES, LARGEST = 320, 100, 4, 8


def call(command: list, seconds: float = 140, **options) -> dict:
    start = time.monotonic()
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            **options,
        )
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, text = "timeout", str(error.stdout)
    except OSError as error:
        code, text = "missing", str(error)
    return {"rc": code, "seconds": round(time.monotonic() - start, 2), "tail": text[-3000:]}


def tiny():
    """A detector of 100 places over a small convolutional network; float32 products on the GPU without TF32."""
    import torch

    torch.manual_seed(3)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [torch.nn.Conv2d(3, 32, 8, stride=8), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, stride=4, padding=1)]
            self.features = torch.nn.Sequential(*layers, torch.nn.ReLU())
            self.heads = torch.nn.Linear(64, CLASSES + 4)

        def forward(self, pixel_values):
            tokens = self.features(pixel_values.to(torch.float32) / 255).flatten(2).transpose(1, 2)[:, :QUERIES]
            raw = self.heads(tokens) * 4
            return raw[..., :CLASSES], raw[..., CLASSES:].sigmoid()

    return Tiny().eval()


def compile_package(folder: Path) -> None:
    """In a process of its own: compile, and write the bundle."""
    import torch

    from detrt.bundle import Bundle, BundleFile, EngineFacts, Provenance
    from detrt.files import sha256_of
    from detrt.spec import DecodeSpec, InputSpec, ModelSpec

    device = os.environ["DETRT_CPP_DEVICE"].partition(":")[0]
    module = tiny().to(device)
    pixels = torch.zeros((2, 3, SIDE, SIDE), dtype=torch.uint8, device=device)
    batch = torch.export.Dim("batch", min=1, max=LARGEST)
    with torch.no_grad():
        program = torch.export.export(module, (pixels,), dynamic_shapes=({0: batch},))
        path = folder / "model.inductor-sm90.pt2"
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    major, minor = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    facts = EngineFacts(
        f"inductor-{device}",
        torch.__version__,
        (major * 10 + minor,) if major else (),
        "fp32",
        {"pixel_values": {key: [count, 3, SIDE, SIDE] for key, count in (("min", 1), ("opt", 1), ("max", LARGEST))}},
        "",
        inputs=({"name": "pixel_values", "dtype": "uint8", "shape": ["batch", 3, SIDE, SIDE]},),
        outputs=(
            {"name": "logits", "dtype": "float32", "shape": ["batch", QUERIES, CLASSES]},
            {"name": "pred_boxes", "dtype": "float32", "shape": ["batch", QUERIES, 4]},
        ),
    )
    spec = ModelSpec(
        "test",
        InputSpec("stretch", SIDE, SIDE),
        DecodeSpec("sigmoid", "topk", QUERIES, CLASSES, 50),
        {0: "a", 1: "b", 2: "c", 3: "d"},
    )
    entry = BundleFile("inductor", path.name, sha256_of(path), path.stat().st_size, facts)
    Bundle(folder, spec, Provenance("test"), (entry,)).save()


def expected(folder: Path, images: list[Path]) -> None:
    """In a process of its own: detections of the module itself, on the CPU."""
    import torch

    from detrt.backends.base import FakeSession
    from detrt.bundle import Bundle
    from detrt.data.sinks import Record
    from detrt.detector import Detector
    from detrt.spec import TensorInfo

    module = tiny()

    def forward(feeds):
        with torch.inference_mode():
            logits, boxes = module(torch.from_numpy(feeds["pixel_values"]))
        return {"logits": logits.numpy(), "pred_boxes": boxes.numpy()}

    inputs = (TensorInfo("pixel_values", "uint8", ("batch", 3, SIDE, SIDE)),)
    detector = Detector(FakeSession(Bundle.open(folder).spec, inputs, (), forward), threshold=0.3)
    rows = [Record(str(p), d).to_dict() for p, d in zip(images, detector(images), strict=True)]
    (folder / "expected.json").write_text(json.dumps(rows), "utf-8")


def compared(folder: Path, lines: str) -> dict:
    got = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    want = json.loads((folder / "expected.json").read_text("utf-8"))
    box = score = 0.0
    same = len(got) == len(want)
    count = 0
    for a, b in zip(got, want, strict=False):
        same &= [d["label"] for d in a["detections"]] == [d["label"] for d in b["detections"]]
        for x, y in zip(a["detections"], b["detections"], strict=False):
            count += 1
            score = max(score, abs(x["score"] - y["score"]))
            box = max(box, *(abs(p - q) for p, q in zip(x["box_xyxy"], y["box_xyxy"], strict=True)))
    return {"images": len(got), "detections": count, "labels_same": same, "box_px": box, "score": score}


def unpacked(folder: Path, note, program: list) -> None:
    """The same package as a shared library with its kernels beside it, which needs no package loader."""
    from detrt.bundle import Bundle, BundleFile
    from detrt.files import sha256_of

    other = folder / "unpacked"
    try:
        with zipfile.ZipFile(folder / "model.inductor-sm90.pt2") as archive:
            archive.extractall(other)
        bundle = Bundle.open(folder)
        (library,) = list(other.rglob("*.so"))
        entry = BundleFile(
            "inductor", str(library.relative_to(other)), sha256_of(library), library.stat().st_size, bundle.files[0].engine
        )
        Bundle(other, bundle.spec, bundle.provenance, (entry,)).save()
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        note("unpack", repr(error))
        return
    note("unpacked_files", sorted(p.name for p in library.parent.iterdir())[:20])
    program = [program[0], other, *program[2:]]
    note("unpacked_run", call([*program, "--json", other / "got.jsonl", "--batch", "4", "-t", "0.3"]))
    if (other / "got.jsonl").is_file():
        note("unpacked_compared", compared(folder, (other / "got.jsonl").read_text("utf-8")))
        for batch in (1, 8):
            note(f"unpacked_benchmark_{batch}", call([*program, "--benchmark", "100", "--batch", batch]))


def configure(build: Path, deps: Path) -> list:
    command = [
        "cmake",
        "-S",
        ROOT / "cpp",
        "-B",
        build,
        "-G",
        "Ninja",
        "-DCMAKE_CXX_FLAGS=-O1",
        "-DDETRT_LIBTORCH=ON",
        "-DBUILD_SHARED_LIBS=OFF",
    ]
    command.append(f"-DDETRT_PYTHON={sys.executable}")
    if deps.is_dir():
        lib, include = deps / "lib", deps / "include"
        command += [f"-DCMAKE_PREFIX_PATH={deps}", f"-Dnlohmann_json_DIR={deps}/share/cmake/nlohmann_json"]
        command += [f"-DSTB_INCLUDE_DIR={include}", f"-DJPEG_LIBRARY={lib}/libjpeg.a", f"-DJPEG_INCLUDE_DIR={include}"]
        command += [f"-DPNG_LIBRARY={lib}/libpng16.a", f"-DPNG_PNG_INCLUDE_DIR={include}"]
        command += [f"-DZLIB_LIBRARY={lib}/libz.a", f"-DZLIB_INCLUDE_DIR={include}", f"-DOPENSSL_ROOT_DIR={deps}"]
        command += [f"-DOPENSSL_CRYPTO_LIBRARY={lib}/libcrypto.a", f"-DOPENSSL_INCLUDE_DIR={include}"]
    return command


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--deps", type=Path, default=ROOT / ".device/cpp-deps")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--program", type=Path, help="a detrt-run that was built for this PyTorch already")
    given = parser.parse_args()
    if str(given.out) in ("compile", "expected"):
        folder = Path(os.environ["DETRT_CPP_FOLDER"])
        images = sorted((folder / "images").iterdir())
        compile_package(folder) if str(given.out) == "compile" else expected(folder, images)
        return 0
    results: dict = {}

    def note(name: str, value: object) -> None:
        results[name] = value
        given.out.write_text(json.dumps(results, indent=1), "utf-8")
        print(name, json.dumps(value)[:600], flush=True)

    folder = Path(tempfile.mkdtemp(prefix="detrt-cpp-"))
    (folder / "images").mkdir()
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(12):
        y, x = np.mgrid[0 : 200 + 17 * number, 0:333]
        image = np.stack([x * (number + 1) % 256, y * 3 % 256, (x + y) * 2 % 256], -1) + rng.normal(0, 9, (*x.shape, 3))
        Image.fromarray(np.clip(image, 0, 255).astype(np.uint8)).save(folder / f"images/{number:02}.png")
    environment = {**os.environ, "DETRT_CPP_FOLDER": str(folder), "DETRT_CPP_DEVICE": given.device}
    build = folder / "build"
    python = subprocess.Popen(
        [sys.executable, __file__, "compile"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # beside the C++ build
    if given.program is None:
        note("configure", call(configure(build, given.deps)))
        note("build", call(["cmake", "--build", build, "-j", "14"]))
    try:
        text, _ = python.communicate(timeout=60 if given.program is None else 200)
    except subprocess.TimeoutExpired:
        python.kill()
        text = "timeout"
    note("compile", {"rc": python.returncode, "tail": text[-2000:]})
    note("expected", call([sys.executable, __file__, "expected"], env=environment))
    program = [given.program or build / "detrt-run", folder, folder / "images", "--device", given.device]
    unpacked(folder, note, program)
    done = call([*program, "--json", folder / "got.jsonl", "--batch", "4", "-t", "0.3"])
    note("run", done)
    if (folder / "got.jsonl").is_file():
        note("compared", compared(folder, (folder / "got.jsonl").read_text("utf-8")))
        for batch in (1, 8):
            note(f"benchmark_{batch}", call([*program, "--benchmark", "100", "--batch", batch]))
        note("wrong_device", call([*program[:3], "--device", "cuda:9"]))
        note("too_many", call([*program, "--batch", LARGEST + 1]))
    elif shutil.which("cuda-gdb") and done["rc"] not in (0, 2):
        note(
            "backtrace",
            call(["cuda-gdb", "-batch", "-ex", "run", "-ex", "bt 25", "--args", *program, "--json", folder / "x"], 60),
        )
    load = "import os,torch; m=torch._inductor.aoti_load_package(os.environ['DETRT_CPP_FOLDER']+'/model.inductor-sm90.pt2'); "
    load += (
        f"print([t.shape for t in m(torch.zeros((2,3,{SIDE},{SIDE}),dtype=torch.uint8,device=os.environ['DETRT_CPP_DEVICE']))])"
    )
    note("python_loads_it", call([sys.executable, "-c", load], env=environment))
    manifest = json.loads((folder / "detrt.json").read_text("utf-8")) if (folder / "detrt.json").is_file() else None
    if manifest:
        manifest["files"][0]["engine"]["compute_capabilities"] = [75]
        (folder / "detrt.json").write_text(json.dumps(manifest), "utf-8")
        note("wrong_gpu", call(program))
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
