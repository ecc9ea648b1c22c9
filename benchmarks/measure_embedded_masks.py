"""AP of the boxes and the masks of `embedded:shapes` in every runtime and precision of a CPU; prints a Markdown table.

    python benchmarks/measure_embedded_masks.py WORK_FOLDER [--scenes 300] [--detrt-run build/cpp/test/detrt-run]

Scenes that the training did not draw; the precisions are calibrated on others. Below FP32, ONNX Runtime rounds to the type of the
graph after every node, as `detrt verify` does. The lowest IoU is that of the masks of paired detections, as `detrt verify` pairs them.
Bundles and scenes stay in the folder, and are taken from it when they are there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from program import at_least, file, make_parser, run

from detrt.backends.base import Session
from detrt.data.matching import gate_for, match
from detrt.data.scenes.scene import write_dataset
from detrt.detections import Detections
from detrt.detector import Detector
from detrt.evaluation.coco import BBOX, SEGM, Row, read_dataset, score_rows
from detrt.evaluation.models import open_side
from detrt.tasks.masks import Masks

REFERENCE = "PyTorch"
PRECISIONS = ("fp16", "bf16", "int8", "fp8")


def built(folder: Path, name: str, *options: str) -> Path:
    """A bundle in the folder, built by the command line."""
    if not (folder / name / "detrt.json").is_file():
        subprocess.run(
            [sys.executable, "-m", "detrt", "build", "embedded:shapes", "-o", str(folder / name), *options], check=True
        )
    return folder / name


def detections_of(session: Session, paths: list[Path]) -> list[Detections]:
    with Detector(session, threshold=0.0, batch_size=1) as detector:
        return [detector(str(path)) for path in paths]


def detections_in_cpp(program: str, bundle: Path, backend: str, paths: list[Path], folder: Path) -> list[Detections]:
    """What `detrt-run` writes as JSON lines."""
    lines = folder / f"{backend}.jsonl"
    command = [
        program,
        str(bundle),
        *map(str, paths),
        "--threshold",
        "0",
        "--json",
        str(lines),
        "--backend",
        backend,
        "--quiet",
    ]
    subprocess.run(command, check=True)
    found = {}
    for row in map(json.loads, lines.read_text("utf-8").splitlines()):
        rows, size = row["detections"], (row["height"], row["width"])
        found[Path(row["image"]).name] = Detections(
            np.array([one["box_xyxy"] for one in rows], np.float32),
            np.array([one["score"] for one in rows], np.float32),
            np.array([one["class_id"] for one in rows], np.int64),
            tuple(one["label"] for one in rows),
            size,
            masks=Masks.from_coco([one["segmentation"] for one in rows], size),
        )
    return [found[path.name] for path in paths]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scenes", type=at_least(1), default=300)
    parser.add_argument("--detrt-run", type=file, help="the C++ program, built with PyTorch")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("scenes", args.scenes, 10_000), ("calibration", 64, 20_000)):
        if not (args.folder / name).is_dir():
            write_dataset(args.folder / name, count, seed=seed)
    dataset, paths = read_dataset(args.folder / "scenes/annotations.json", args.folder / "scenes/images", args.scenes)
    exact = built(args.folder, "fp32", "--target", "onnx,inductor", "--size", "320")
    print("| runs | precision | box AP | mask AP | lowest mask IoU | pairs |\n| --- | --- | ---: | ---: | ---: | ---: |")
    reference: list[Detections] = []

    def report(runs: str, precision: str, found: list[Detections]) -> None:
        rows: list[Row] = []
        for image, one in zip(dataset.images, found, strict=True):
            rows += one.to_coco(image["id"], {i: i + 1 for i in range(12)})
        box, mask = (score_rows(dataset, rows, kind)[0]["AP"] for kind in (BBOX, SEGM))
        pairs = [match(a, b, gate_for(precision)) for a, b in zip(reference or found, found, strict=True)]
        lowest = min(pair.mask_iou for pair in pairs if pair.mask_iou is not None)
        count = sum(pair.compared for pair in pairs)
        print(f"| {runs} | {precision} | {box:.4f} | {mask:.4f} | {lowest:.4f} | {count} |", flush=True)

    torch_side = open_side("embedded:shapes")
    reference += detections_of(torch_side.session, paths)
    report(REFERENCE, "fp32", reference)
    report("ONNX Runtime", "fp32", detections_of(open_side(exact, opening={"backend": "onnxruntime"}).session, paths))
    report("compiled package", "fp32", detections_of(open_side(exact, opening={"backend": "inductor"}).session, paths))
    if args.detrt_run:
        report("C++, compiled package", "fp32", detections_in_cpp(args.detrt_run, exact, "auto", paths, args.folder))
    for precision in PRECISIONS:
        bundle = built(
            args.folder,
            precision,
            "--target",
            "onnx",
            "--precision",
            precision,
            "--calibration",
            str(args.folder / "calibration/images"),
        )
        report("ONNX Runtime", precision, detections_of(open_side(bundle, opening={"backend": "onnxruntime"}).session, paths))


if __name__ == "__main__":
    run(main)
