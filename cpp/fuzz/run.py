"""Run the fuzz targets of a build for a bounded time: `python cpp/fuzz/run.py build/cpp/sanitize --seconds 4`.

Seeds are made here: images of the forms that the runtime reads, and manifests and prompts from the shared test cases.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

CASES = Path(__file__).resolve().parents[2] / "tests/data"


def image_seeds(folder: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (24, 33, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {
        "plain.jpg": {"quality": 60},
        "turned.jpg": {"exif": exif},
        "progressive.jpg": {"progressive": True},
        "plain.png": {},
        "turned.png": {"exif": exif},
        "plain.ppm": {},
    }
    for name, chosen in options.items():
        image.save(folder / name, **chosen)
    image.convert("CMYK").save(folder / "inks.jpg")
    image.convert("L").save(folder / "grey.jpg")
    image.quantize(9).save(folder / "palette.png")
    image.convert("LA").save(folder / "grey-alpha.png")
    return sorted(folder.iterdir())


def spec_seeds(folder: Path) -> list[Path]:
    cases = json.loads((CASES / "prompt_cases.json").read_text("utf-8"))["cases"]
    cases += json.loads((CASES / "preprocess_cases.json").read_text("utf-8"))["cases"][:4]
    engine = {
        "target": "tensorrt",
        "runtime_version": "10.9",
        "compute_capabilities": [89, 90],
        "precision": "fp16",
        "profile": {"pixel_values": {"min": [1, 3, 8, 8], "opt": [1, 3, 8, 8], "max": [4, 3, 8, 8]}},
        "onnx_sha256": "",
        "inputs": [{"name": "pixel_values", "dtype": "uint8", "shape": ["batch", 3, 8, 8]}],
    }
    for number, case in enumerate(cases):
        files = case.get("files", []) + [{"kind": "engine", "path": "m.engine", "sha256": "0" * 64, "size": 1, "engine": engine}]
        text = json.dumps({"schema": 1, "spec": case["spec"], "provenance": {}, "files": files})
        if "prompt" in case:
            text += "\0" + json.dumps(case["prompt"])
        (folder / f"{number}.json").write_bytes(text.encode("utf-8"))
    return sorted(folder.iterdir())


def onnx_seeds(folder: Path) -> list[Path]:
    """Graphs with the keys of data files at some depths; their fields as onnx.proto numbers them."""

    def field(number: int, content: bytes) -> bytes:
        return (
            bytes([(number << 3 & 127) | 2 | (128 if number > 15 else 0), *([number >> 4] if number > 15 else []), len(content)])
            + content
        )

    tensor = field(13, field(1, b"location") + field(2, b"w.bin"))
    node = field(1, field(5, field(6, field(5, tensor))))
    for name, content in {"plain": field(5, tensor), "nested": node, "sparse": field(15, field(1, tensor))}.items():
        (folder / f"{name}.onnx").write_bytes(b"\x08\x0a" + field(7, content) + field(25, field(7, node[2:])))
    return sorted(folder.iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("--seconds", type=float, default=4, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for target, make in (
            ("spec", spec_seeds),
            ("image", image_seeds),
            ("onnx", onnx_seeds),
        ):  # beside each other, one thread each
            place = Path(folder) / target
            place.mkdir()
            program = given.build / "fuzz" / f"fuzz-{target}"
            command = [program, "--runs", 10**9, "--seconds", given.seconds, "--seed", given.seed, *make(place)]
            running[target] = subprocess.Popen([str(part) for part in command])
        try:
            bad = [target for target, program in running.items() if program.wait(given.seconds * 5 + 60) != 0]
        finally:
            for program in running.values():
                program.kill()
    for target in bad:
        print(f"the fuzz target {target} failed with {running[target].returncode}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
