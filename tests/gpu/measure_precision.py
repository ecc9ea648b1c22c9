"""FP16 and BF16 of the typed graphs in real arithmetic on a GPU; prints one JSON line a model.

    python tests/gpu/measure_precision.py DATA CHECKPOINT... [random:FAMILY...] [embedded:shapes]

DATA holds `images/coco_permissive`. Checkpoints are measured by AP, random models by the largest relative error of
the encoder's memory over 20 pictures, the embedded model by AP on 500 drawn scenes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from onnx_on_torch import TorchGraph

from detrt import graph
from detrt.evaluate import evaluate_coco
from detrt.export import ExportConfig, export_onnx
from detrt.export.onnx import relative_error
from detrt.onnx_session import OnnxSession
from detrt.precision import PrecisionConfig
from detrt.precision.apply import apply_precision, calibrate
from detrt.precision.images import Prompted
from detrt.precision.ranges import image_feeds
from detrt.precision.stage import text_feeds
from detrt.sources import load_source

PROMPT = "a person. a cat. a dog. a car. a chair."


class Session:
    """A session over a graph on PyTorch, with the contract of the ONNX session."""

    backend, max_batch, note = "onnx-on-torch", None, ""

    def __init__(self, model, like: OnnxSession) -> None:
        self.graph = TorchGraph(model, "cuda" if torch.cuda.is_available() else "cpu")
        self.spec, self.inputs, self.outputs = like.spec, like.inputs, like.outputs

    def run(self, feeds):
        return self.graph.run(dict(feeds))

    def close(self) -> None:
        pass


def memory_of(model) -> str:
    """The encoder's memory: what the last normalisation before the decoder, or the flattened pyramid, gives."""
    names = [(n.name, n.output[0], n.op_type) for n in model.graph.node]
    places = (
        "/enc_output/enc_output.1/",
        "/encoder/layers.5/final_layer_norm/",
        "/encoder/layers.5/",
        "/deformable_layer/final_layer_norm",
    )
    for want in places:
        found = [o for name, o, kind in names if want in name and kind == "LayerNormalization"]
        if found:
            return found[-1]
    raise SystemExit("no encoder memory found")


def main(data: Path, refs: list[str]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    coco = data / "images" / "coco_permissive"
    val = (coco / "annotations" / "instances_val2017.json", coco / "val2017")
    pictures = sorted((coco / "train2017").glob("*.jpg"))
    for ref in refs:
        start = time.time()
        try:
            row = measure(ref, val, pictures)
        except Exception as error:  # one model must not end the others
            row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps({"model": ref, **row, "seconds": round(time.time() - start, 1)}), flush=True)


def measure(ref: str, val, pictures) -> dict:
    path = Path(tempfile.mkdtemp()) / "m.onnx"
    report = export_onnx(load_source(ref, trust_remote_code=True), path, ExportConfig(check=False))
    model, spec = graph.load(path), report.spec
    like = OnnxSession(path)
    row: dict = {}
    random = ref.startswith("random:")
    scan, shown = pictures[:2] if random else pictures[:16], pictures[:20]
    if spec.text is not None:
        texts = text_feeds(path, PROMPT)
        scan, shown = Prompted(scan, texts), Prompted(shown, texts)
    known = calibrate(model, spec, PrecisionConfig("fp16", calibration=val[1]), scan)
    for precision in ("fp32", "fp16", "bf16"):
        typed, done = apply_precision(model, spec, PrecisionConfig(precision, min_share=0.0), scan, known=known)
        row[f"{precision} share"] = round(done.share.of(precision), 4)
        session = Session(typed, like)
        if random:
            name = memory_of(model)
            found = [session.graph.run(f, (name,)) for f in image_feeds(shown, spec)]
            if precision == "fp32":
                exact = found
                continue
            row[precision] = max(relative_error(a[name], b[name]) for a, b in zip(exact, found, strict=True))
            row[f"{precision} finite"] = all(np.isfinite(v).all() for b in found for v in b.values())
        else:
            sets = (
                [scenes()]
                if ref.startswith("embedded:")
                else [val, (Path(str(val[0]).replace("val", "train")), pictures[0].parent)]
            )
            row[precision] = [round(evaluate_coco(session, *s, batch_size=10).metrics["AP"] or 0.0, 5) for s in sets]
    if known.lost:
        row["kept by the scan"] = len(known.lost)
    return row


def scenes() -> tuple[Path, Path]:
    """500 drawn scenes as a COCO data set; the same every time."""
    from detrt.scenes import write_dataset

    folder = Path(tempfile.gettempdir()) / "detrt-scenes-500"
    if not (folder / "annotations.json").is_file():
        write_dataset(folder, 500, seed=10_000)
    return folder / "annotations.json", folder / "images"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
