"""Fine-tune the embedded RT-DETRv2 on blood cells (BCCD) with transformers' Trainer, and compare the AP of both worlds.

    PYTHONPATH=src python training/finetune_with_trainer.py DATA --out OUT --epochs 150 --size 640 --workers 6

Data set, collator and Trainer are used as transformers' guide to object detection uses them; nothing of detrt is part of
the training. Training images are mirrored at random; blood cells have no upright. OUT/model is what `save_model` and the image processor's `save_pretrained` wrote. Its AP on the test images is
computed three times: by transformers' processor, model and post-processing with pycocotools, by `detrt build` and
`detrt eval`, and from the answers of `detrt serve`. Needs accelerate; `--model FOLDER` compares a folder of an earlier run
without training. OUT/result.json has the figures; exit code 3 if they differ by more than 0.002.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from options import run_program
from PIL import Image
from PIL.Image import Transpose
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch.utils.data import Dataset
from transformers import AutoImageProcessor, AutoModelForObjectDetection, Trainer, TrainingArguments

from detrt.errors import SourceError

START = Path(__file__).resolve().parents[1] / "src" / "detrt" / "models" / "embedded" / "shapes"
ALLOWED = 0.002


class CocoImages(Dataset):
    """Images and annotations of one split, as the image processor's output. mirrored: left to right and top to bottom, at random."""

    def __init__(self, data: Path, split: str, processor: Any, *, mirrored: bool = False) -> None:
        self.mirrored = mirrored
        self.annotations = annotations_of(data, split)
        with contextlib.redirect_stdout(io.StringIO()):
            self.coco = COCO(str(self.annotations))
        self.folder, self.processor = data / "BCCD" / "JPEGImages", processor
        self.ids = sorted(self.coco.imgs)
        self.classes = {category: index for index, category in enumerate(sorted(self.coco.cats))}

    def __len__(self) -> int:
        return len(self.ids)

    def image(self, index: int) -> Image.Image:
        with Image.open(self.folder / self.coco.imgs[self.ids[index]]["file_name"]) as photo:
            return photo.convert("RGB")

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = self.coco.loadAnns(self.coco.getAnnIds(self.ids[index]))
        # Class indices of the model in place of the categories' ids; one of the files has boxes without an area.
        rows = [{**one, "category_id": self.classes[one["category_id"]]} for one in found if min(one["bbox"][2:]) > 1]
        image = self.image(index)
        for axis, flip in enumerate((Transpose.FLIP_LEFT_RIGHT, Transpose.FLIP_TOP_BOTTOM)):
            if self.mirrored and random.random() < 0.5:
                image = image.transpose(flip)
                rows = [{**one, "bbox": mirror(one["bbox"], axis, image.size[axis])} for one in rows]
        target = {"image_id": self.ids[index], "annotations": rows}
        inputs = self.processor(images=image, annotations=target, return_tensors="pt")
        return {"pixel_values": inputs["pixel_values"][0], "labels": inputs["labels"][0]}


def mirror(box: list[float], axis: int, length: int) -> list[float]:
    """A box as x, y, width, height, mirrored along an axis of `length` pixels; axis 0 is x."""
    mirrored = list(box)
    mirrored[axis] = length - box[axis] - box[axis + 2]
    return mirrored


def annotations_of(data: Path, split: str) -> Path:
    path = data / "coco_annotations" / f"instances_{split}.json"
    if not path.is_file():
        raise SourceError(f"there is no '{path}'; give the folder that holds BCCD/ and coco_annotations/")
    return path


def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
    return {"pixel_values": torch.stack([one["pixel_values"] for one in batch]), "labels": [one["labels"] for one in batch]}


def fine_tune(data: Path, out: Path, size: int, settings: dict[str, Any]) -> Path:
    """Train on images of `size` x `size` pixels, and save model and image processor; returns their folder."""
    processor = AutoImageProcessor.from_pretrained(START, size={"height": size, "width": size})
    train = CocoImages(data, "train", processor, mirrored=True)
    names = {index: train.coco.cats[category]["name"] for category, index in train.classes.items()}
    model = AutoModelForObjectDetection.from_pretrained(
        START, id2label=names, label2id={name: index for index, name in names.items()}, ignore_mismatched_sizes=True
    )
    arguments = TrainingArguments(
        output_dir=str(out / "runs"),
        remove_unused_columns=False,
        eval_do_concat_batches=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **settings,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=train, data_collator=collate, processing_class=processor)
    trainer.train()
    trainer.save_model(str(out / "model"))
    return out / "model"


def published_ap(folder: Path, data: Path, split: str) -> float:
    """COCO AP by transformers alone and pycocotools."""
    processor = AutoImageProcessor.from_pretrained(folder)
    model = AutoModelForObjectDetection.from_pretrained(folder).eval()
    images = CocoImages(data, split, processor)
    category = {index: one for one, index in images.classes.items()}
    rows = []
    for index, image_id in enumerate(images.ids):
        photo = images.image(index)
        with torch.inference_mode():
            outputs = model(**processor(images=photo, return_tensors="pt"))
        found = processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=[photo.size[::-1]])[0]
        for box, score, label in zip(found["boxes"].tolist(), found["scores"].tolist(), found["labels"].tolist(), strict=True):
            x0, y0, x1, y1 = np.clip(box, 0, [*photo.size, *photo.size]).tolist()
            row = {"image_id": image_id, "category_id": category[label], "score": score}
            rows.append({**row, "bbox": [x0, y0, x1 - x0, y1 - y0]})
    return average_precision(images.coco, rows)


def average_precision(truth: COCO, rows: list[dict[str, Any]]) -> float:
    """COCO AP of detections in COCO's form, by pycocotools."""
    with contextlib.redirect_stdout(io.StringIO()):
        scored = COCOeval(truth, truth.loadRes(rows), "bbox")
        scored.evaluate()
        scored.accumulate()
        scored.summarize()
    return float(scored.stats[0])


def detrt_ap(folder: Path, data: Path, split: str, out: Path) -> float:
    """The same of a bundle built from the folder, by the command line."""
    from detrt.cli import main as detrt

    images, truth, metrics = data / "BCCD" / "JPEGImages", annotations_of(data, split), out / "eval.json"
    for command in (
        ["build", folder, "-o", out / "bundle", "--target", "onnx"],
        ["eval", out / "bundle", "--images", images, "--ground-truth", truth, "--json", metrics],
    ):
        if code := detrt([str(part) for part in command]):
            raise SystemExit(code)
    return float(json.loads(metrics.read_text("utf-8"))["AP"])


def served_ap(bundle: Path, data: Path, split: str) -> float:
    """The same of the answers of a server with the bundle, one JPEG file a request."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(annotations_of(data, split))
    category = {one["name"]: one["id"] for one in truth.cats.values()}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "detrt", "serve", str(bundle), "--port", str(port)])
    rows = []
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}/readyz")
        for image_id, image in truth.imgs.items():
            body = (data / "BCCD" / "JPEGImages" / image["file_name"]).read_bytes()
            address = f"http://127.0.0.1:{port}/v1/detect?threshold=0"
            with urllib.request.urlopen(urllib.request.Request(address, body, {"Content-Type": "image/jpeg"})) as answer:
                (found,) = json.load(answer)["images"]
            for one in found["detections"]:
                x0, y0, x1, y1 = one["box_xyxy"]
                row = {"image_id": image_id, "category_id": category[one["label"]], "score": one["score"]}
                rows.append({**row, "bbox": [x0, y0, x1 - x0, y1 - y0]})
    finally:
        server.terminate()
        server.wait()
    return average_precision(truth, rows)


def wait_until_ready(server: subprocess.Popen, address: str) -> None:
    for _ in range(240):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(address).close()
            return
        if server.poll() is not None:
            break
        time.sleep(0.5)
    raise SourceError("the server did not start")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with BCCD/ and coco_annotations/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="folder of an earlier run; nothing is trained")
    parser.add_argument("--epochs", type=float, default=150)
    parser.add_argument("--size", type=int, default=640, help="height and width of the input, in pixels")
    parser.add_argument("--workers", type=int, default=0, help="processes that load images")
    parser.add_argument("--steps", type=int, default=-1, help="stop after so many steps")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    args = parser.parse_args(argv)
    settings = {
        "num_train_epochs": args.epochs,
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch,
        "learning_rate": args.lr,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 50 if args.steps < 0 else 0,
        "weight_decay": 1e-4,
        "max_grad_norm": 0.1,
        "use_cpu": args.cpu,
        "dataloader_num_workers": args.workers,
        "dataloader_persistent_workers": args.workers > 0,
    }
    folder = args.model or fine_tune(args.data, args.out, args.size, settings)
    result = {
        "transformers": published_ap(folder, args.data, "test"),
        "detrt eval": detrt_ap(folder, args.data, "test", args.out),
        "detrt serve": served_ap(args.out / "bundle", args.data, "test"),
    }
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(json.dumps(result))
    return 0 if max(result.values()) - min(result.values()) <= ALLOWED else 3


if __name__ == "__main__":
    run_program(main)
