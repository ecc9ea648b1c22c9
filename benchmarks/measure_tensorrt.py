"""AP and latency of TensorRT engines beside ONNX Runtime on the CPU; prints one JSON line per bundle.

    python benchmarks/measure_tensorrt.py DATA DRAWS BUNDLE...

DATA holds `images/coco_permissive`. AP is that of its 74 photographs and their mirror images, and of DRAWS copies of them whose
pixels are changed by -1, 0 or 1; of `embedded:shapes`, of 500 drawn scenes. Latency is a call of `Session.run` with its copies
to and from the GPU, at the batch size of the engine's profile: median and the range of the middle half of 200 calls.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "training"))
import measure_precision as photographs
from program import at_least, drawn_scenes, folder, make_parser, run

from detrt.backends.open import open_session
from detrt.bench.measure import time_call
from detrt.bundle import Bundle
from detrt.data.preprocess import preprocess
from detrt.data.scenes.scene import draw_images
from detrt.evaluation.coco import evaluate_coco


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("data", type=folder, metavar="DATA")
    parser.add_argument("draws", type=at_least(0), metavar="DRAWS")
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE")
    given = parser.parse_args()
    coco = given.data / "images" / "coco_permissive"
    truth, images, ids = photographs.read(coco)
    ids = {name: ids[name] for name in ("val", "both, mirrored") if name in ids}
    for place in given.bundles:
        bundle = Bundle.open(place)
        row = {"bundle": Path(place).name, **latency(place)}
        for backend in ("tensorrt", "onnxruntime"):
            if bundle.provenance.source.startswith("embedded:"):
                row[backend] = drawn_ap(place, backend)
                continue
            shown = [images, *(photographs.changed(images, draw) for draw in range(given.draws))]
            row[backend] = [photographs.scores(open_session(place, backend=backend), truth, some, ids) for some in shown]
        print(json.dumps(row), flush=True)


def latency(place: str) -> dict:
    """Milliseconds of a call at the usual shape of the profile."""
    with open_session(place, backend="tensorrt") as session:
        batch, _, height, width = session.info.profile["pixel_values"][1]
        feeds = preprocess(draw_images(batch, (height, width)), session.spec).feeds
        low, middle, high = statistics.quantiles(time_call(lambda: session.run(feeds), 20, 200), n=4)
        note = getattr(session, "graph_note", "")
        return {"batch": batch, "ms": round(middle, 3), "ms middle half": [round(low, 3), round(high, 3)], "no CUDA graph": note}


def drawn_ap(place: str, backend: str) -> float | None:
    """AP of 500 drawn scenes; the same ones every time."""
    with open_session(place, backend=backend) as session:
        return evaluate_coco(session, *drawn_scenes(), batch_size=1, iou_type="bbox").metrics["AP"]


if __name__ == "__main__":
    run(main)
