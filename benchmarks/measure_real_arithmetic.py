"""FP16 and BF16 of the typed graphs in real arithmetic on a GPU; prints one JSON line per model.

    python benchmarks/measure_real_arithmetic.py DATA CHECKPOINT... [random:FAMILY...] [embedded:shapes]

DATA holds `images/coco_permissive`. DETRT_PRECISIONS: which ones (fp16,bf16); int8 and fp8 compute with the dequantised values
in FP16. DETRT_DRAWS: repeats on pixels that are changed by -1, 0 or 1, for the mean of the change. Checkpoints are measured by AP on its two sets and on both with their mirror images,
random models by the largest relative error of the encoder's memory over DETRT_PICTURES (20) images, the embedded model
by AP on 500 drawn scenes.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx_on_torch import TorchGraph
from program import drawn_scenes, folder, make_parser, run

from detrt import graph
from detrt.backends.base import BaseSession, SessionInfo
from detrt.backends.compare import relative_error
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.data.images import ImageSource
from detrt.evaluation.coco import evaluate_coco
from detrt.export import ExportConfig, export_onnx
from detrt.models.load import load_source
from detrt.precision import PrecisionConfig, noise
from detrt.precision import calibrate as histograms
from detrt.precision.apply import apply_precision, calibrate
from detrt.precision.calibrate import PromptedImages, image_feeds
from detrt.precision.stage import text_feeds
from detrt.spec import ModelSpec
from detrt.system import CountProgress

LOW = tuple(os.environ.get("DETRT_PRECISIONS", "fp16,bf16").split(","))
DRAWS = int(os.environ.get("DETRT_DRAWS", "0"))
IMAGES = int(os.environ.get("DETRT_PICTURES", "20"))
PROMPT = "a person. a cat. a dog. a car. a chair."


class Session(BaseSession):
    """A session over a graph on PyTorch, with the contract of the ONNX session."""

    def __init__(self, model, like: OnnxSession) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.graph, self.spec = TorchGraph(model, device), like.spec
        self._info = SessionInfo("onnx-on-torch", f"onnx-on-torch-{device}", device, like.inputs, like.outputs)

    def run(self, feeds, force=None):
        return self.graph.run(feeds)

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


def run_tensors(
    model: onnx.ModelProto,
    spec: ModelSpec,
    images: Sequence[ImageSource],
    names: Sequence[str],
    visit: Callable[[str, np.ndarray], None],
    progress: CountProgress | None = None,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """What `detrt.precision.calibrate.run_tensors` does, with PyTorch on the GPU: one pass per image instead of many."""
    typed = TorchGraph(model, "cuda" if torch.cuda.is_available() else "cpu")
    for feeds in image_feeds(images, spec):
        typed.run(feeds, names, visit)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("data", type=folder, metavar="DATA")
    parser.add_argument("refs", nargs="+", metavar="CHECKPOINT")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    coco = given.data / "images" / "coco_permissive"
    val = (coco / "annotations" / "instances_val2017.json", coco / "val2017")
    images = sorted((coco / "train2017").glob("*.jpg"))
    histograms.run_tensors = noise.run_tensors = run_tensors
    for ref in given.refs:
        start = time.time()
        try:
            row = measure(ref, val, images)
        except Exception as error:  # one model must not end the others
            row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps({"model": ref, **row, "seconds": round(time.time() - start, 1)}), flush=True)


def measure(ref: str, val, images) -> dict:
    path = Path(tempfile.mkdtemp()) / "m.onnx"
    boxes = True if ref == "embedded:shapes" else None  # its figures are those of boxes
    report = export_onnx(load_source(ref, trust_remote_code=True, no_masks=boxes), path, ExportConfig(check=False))
    model, spec = graph.load(path), report.spec
    like = OnnxSession(path)
    row: dict = {}
    random = ref.startswith("random:")
    scan, shown = images[:2] if random else images[:16], images[:IMAGES]
    if spec.text is not None:
        texts = text_feeds(path, PROMPT)
        scan, shown = PromptedImages(scan, texts), PromptedImages(shown, texts)
    known = calibrate(model, spec, PrecisionConfig("fp16", calibration=val[1]), scan)
    exact: list[dict[str, np.ndarray]] = []
    exact_ap: list[dict[str, float]] = []
    for precision in ("fp32", *LOW):
        config = PrecisionConfig(precision, min_fraction=0.0, calibration=val[1])
        if precision in ("int8", "fp8"):
            known = calibrate(model, spec, config, scan if random else images)
        typed, done = apply_precision(model, spec, config, scan, calibration=known)
        row[f"{precision} share"] = round(done.fractions.of(precision), 4)
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
            scored = average_precision(session, None if ref.startswith("embedded:") else val[0].parents[1])
            row[precision] = scored[0]
            exact_ap = exact_ap or scored[1:]
            if precision != "fp32" and exact_ap:
                row[f"{precision}, mean change"] = on_cpu().mean_change(list(zip(exact_ap, scored[1:], strict=True)))
            print(json.dumps({"model": ref, "so far": row}), flush=True)
    if known.fp16_failures:
        row["kept by the scan"] = len(known.fp16_failures)
    return row


def average_precision(session: Session, coco: Path | None) -> list[dict[str, float]]:
    """Set -> AP: of a COCO folder as `training/measure_precision.py` measures it, on its images and on DRAWS changed copies
    of them; or of the drawn scenes."""
    if coco is None:
        found = evaluate_coco(session, *drawn_scenes(), batch_size=10).metrics["AP"] or 0.0
        return [{"drawn scenes": round(found, 5)}]
    cpu = on_cpu()
    truth, images, ids = cpu.read(coco)
    shown = [images, *(cpu.changed(images, draw) for draw in range(DRAWS))]
    return [{name: round(value, 5) for name, value in cpu.scores(session, truth, some, ids, batch=8).items()} for some in shown]


@functools.cache
def on_cpu():
    """The script that measures the same with rounding on a CPU."""
    place = Path(__file__).resolve().parents[1] / "training" / "measure_precision.py"
    spec = importlib.util.spec_from_file_location("on_cpu", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    run(main)
