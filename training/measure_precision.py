"""AP of a typed graph against its FP32 graph, on a CPU with every stored value rounded to its type.

    python training/measure_precision.py FOLDER CHECKPOINT int8 fp8 ...

FOLDER holds `annotations/instances_{val,train}2017.json` and the images in `val2017/` and `train2017/`; the training
images are the calibration. CHECKPOINT is any reference that `detrt export` takes. Small sets resolve little: a box that
changes places with one of equal score moves AP by 0.01. So the images of both sets are also taken together, each as it
is and mirrored, and the same is done for FP32 on pixels that were changed by -1, 0 or 1 at random (`--noise`), which
shows what a change that no eye sees does to the figure. The mean of the changes that a precision makes on such draws is
known better than its change on the images as they are. Draws of pixels change few detections, so that their mean still is that of
these images; `--moves` draws borders of 0 to 32 pixels on every side, and a brightness, which change where each object falls on the
grid of the model.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import tempfile
from pathlib import Path

import numpy as np
from options import run_program
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from detrt import ExportConfig, export_onnx, graph, load_source
from detrt.backends.base import Session
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.detector import Detector
from detrt.graph.emulate_low_precision import emulate
from detrt.precision import PrecisionConfig
from detrt.precision.apply import apply_precision, calibrate

SETS = ("val", "train")


def read(folder: Path) -> tuple[COCO, list[np.ndarray], dict[str, list[int]]]:
    """Annotations and images of both sets, every image followed by its mirror image; set -> image ids."""
    data: dict = {"images": [], "annotations": [], "categories": []}
    samples: list[np.ndarray] = []
    ids: dict[str, list[int]] = {name: [] for name in (*SETS, "both, mirrored")}
    for name in SETS:
        found = json.loads((folder / f"annotations/instances_{name}2017.json").read_text("utf-8"))
        data["categories"] = found["categories"]
        for entry in found["images"]:
            image = np.asarray(Image.open(folder / f"{name}2017" / entry["file_name"]).convert("RGB"))
            boxes = [a for a in found["annotations"] if a["image_id"] == entry["id"]]
            for mirrored in (False, True):
                image_id = len(data["images"]) + 1
                data["images"].append({"id": image_id, "height": entry["height"], "width": entry["width"]})
                for box in boxes:
                    x, y, width, height = box["bbox"]
                    left = entry["width"] - x - width if mirrored else x
                    data["annotations"].append(
                        {
                            **{k: box[k] for k in ("category_id", "area", "iscrowd")},
                            "id": len(data["annotations"]) + 1,
                            "image_id": image_id,
                            "bbox": [left, y, width, height],
                        }
                    )
                samples.append(np.ascontiguousarray(image[:, ::-1]) if mirrored else image)
                ids["both, mirrored"].append(image_id)
                if not mirrored:
                    ids[name].append(image_id)
    return indexed(data), samples, ids


def indexed(data: dict) -> COCO:
    coco = COCO()
    coco.dataset = data
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco


def scores(session: Session, coco: COCO, samples: list[np.ndarray], ids: dict[str, list[int]], batch=1) -> dict[str, float]:
    """Set -> AP; closes the session."""
    categories = {c["name"]: c["id"] for c in coco.dataset["categories"]}
    rows = []
    with Detector(session, threshold=0.0, batch_size=batch) as detector:
        for image_id, found in enumerate(detector.stream(samples), start=1):
            for (x0, y0, x1, y1), score, label in zip(
                found.boxes_xyxy.tolist(), found.scores.tolist(), found.labels, strict=True
            ):
                box = [x0, y0, x1 - x0, y1 - y0]
                rows.append({"image_id": image_id, "category_id": categories[label], "bbox": box, "score": score})
    result = {}
    with contextlib.redirect_stdout(io.StringIO()):
        found = coco.loadRes(rows)
        for name, chosen in ids.items():
            evaluation = COCOeval(coco, found, "bbox")
            evaluation.params.imgIds = chosen
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            result[name] = float(evaluation.stats[0])
    return result


def changed(samples: list[np.ndarray], draw: int) -> list[np.ndarray]:
    """The images with -1, 0 or 1 added to every value at random; draw: the seed."""
    generator = np.random.default_rng(draw)
    return [np.clip(p.astype(np.int16) + generator.integers(-1, 2, p.shape), 0, 255).astype(np.uint8) for p in samples]


def moved(coco: COCO, samples: list[np.ndarray], draw: int) -> tuple[COCO, list[np.ndarray]]:
    """The images with borders of 0 to 32 px on every side and a gamma of 0.76 to 1.32 at random, and their annotations."""
    generator = np.random.default_rng(1000 + draw)
    data = copy.deepcopy(coco.dataset)
    boxes: dict[int, list[dict]] = {}
    for one in data["annotations"]:
        boxes.setdefault(one["image_id"], []).append(one)
    result = []
    for entry, image in zip(data["images"], samples, strict=True):
        left, top, right, bottom = (int(side) for side in generator.integers(0, 33, 4))
        gamma = 2.0 ** generator.uniform(-0.4, 0.4)
        bright = np.rint(255 * (image / 255.0) ** gamma).astype(np.uint8)
        result.append(np.pad(bright, ((top, bottom), (left, right), (0, 0)), mode="edge"))
        entry["height"], entry["width"] = result[-1].shape[:2]
        for one in boxes.get(entry["id"], []):
            one["bbox"] = [one["bbox"][0] + left, one["bbox"][1] + top, *one["bbox"][2:]]
    return indexed(data), result


def mean_change(pairs: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, list[float | None]]:
    """Set -> mean of the change of AP over the draws (before, after), and the standard error of that mean; None of one draw."""
    result = {}
    for name in pairs[0][0]:
        found = np.array([after[name] - before[name] for before, after in pairs])
        error = round(float(found.std(ddof=1) / len(found) ** 0.5), 5) if len(found) > 1 else None  # NaN is not JSON
        result[name] = [round(float(found.mean()), 5), error]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoint")
    parser.add_argument("precision", nargs="*")
    parser.add_argument("--noise", type=int, default=0, help="repeats of FP32 on changed pixels")
    parser.add_argument("--moves", type=int, default=0, help="repeats of all on images with borders and of another brightness")
    parser.add_argument("--quantize-fraction", type=float, help="default: that of detrt build")
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args()
    coco, samples, ids = read(args.folder)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.onnx"
        source = load_source(args.checkpoint, trust_remote_code=args.trust_remote_code)
        export_onnx(source, path, ExportConfig(check=False))
        model, spec = graph.load(path), graph.read_spec(path)
    exact = scores(OnnxSession(model.SerializeToString(), spec), coco, samples, ids)
    print(json.dumps({"precision": "fp32", "AP": exact}), flush=True)
    draws = [scores(OnnxSession(model.SerializeToString(), spec), coco, changed(samples, d), ids) for d in range(args.noise)]
    for found in draws:
        print(json.dumps({"precision": "fp32, pixels +-1", "change": {n: found[n] - exact[n] for n in ids}}), flush=True)
    before = [scores(OnnxSession(model.SerializeToString(), spec), *moved(coco, samples, d), ids) for d in range(args.moves)]
    images = sorted((args.folder / "train2017").glob("*.jpg"))
    for precision in args.precision:
        config = PrecisionConfig(precision, calibration=args.folder, quantize_fraction=args.quantize_fraction)
        known = None if precision == "bf16" else calibrate(model, spec, config, images)
        typed, report = apply_precision(model, spec, config, images, calibration=known)
        emulated = emulate(typed).SerializeToString()
        found = scores(OnnxSession(emulated, spec), coco, samples, ids)
        row = {
            "precision": precision,
            "AP": found,
            "change": {n: round(found[n] - exact[n], 4) for n in ids},
            "share": report.fractions.of(precision),
            "quantized": report.quantized,
        }
        print(json.dumps(row), flush=True)
        if draws:
            pairs = [(a, scores(OnnxSession(emulated, spec), coco, changed(samples, d), ids)) for d, a in enumerate(draws)]
            print(json.dumps({"precision": precision, "mean change": mean_change(pairs)}), flush=True)
        if before:
            pairs = [(a, scores(OnnxSession(emulated, spec), *moved(coco, samples, d), ids)) for d, a in enumerate(before)]
            print(json.dumps({"precision": precision, "mean change, moved": mean_change(pairs)}), flush=True)


if __name__ == "__main__":
    run_program(main)
