"""Processor time of mask post-processing: 100 objects in an image of 1080p, beside PyTorch's interpolation and the model itself.

    python benchmarks/measure_masks.py [MODEL] [--json FILE]

MODEL: an ONNX file or bundle with masks, which is timed on one image; left out, only the masks are. The objects are discs whose
radii are a twenty-seventh of the map, half to one and a half times, so that they cover about half of the image.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np
from program import make_parser, run

from detrt.tasks.masks import encode_masks

SIZE, COUNT, REPEATS = (1080, 1920), 100, 5


def discs(side: int) -> np.ndarray:
    """(COUNT, side, side) float32 mask logits."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:side, :side]
    rows = zip(rng.uniform(side / 54, side / 18, COUNT), *rng.uniform(0, side, (2, COUNT)), strict=True)
    return np.stack([radius - np.hypot(y - top, x - left) for radius, top, left in rows]).astype(np.float32)


def median_ms(function: Callable[[], object]) -> float:
    function()
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return round(float(np.median(times)) * 1e3, 2)


def measure(side: int) -> dict[str, object]:
    import torch

    logits = discs(side)
    masks = encode_masks(logits, SIZE)
    enlarge = torch.nn.functional.interpolate
    large = torch.from_numpy(logits)[:, None]
    return {
        "map": side,
        "pixels": round(float(masks.areas.mean())),
        "encode_ms": median_ms(lambda: encode_masks(logits, SIZE)),
        "json_ms": median_ms(masks.to_coco),
        "interpolate_ms": median_ms(lambda: enlarge(large, size=SIZE, mode="bilinear", align_corners=False) > 0),
    }


def model_ms(model: str) -> float:
    from detrt import open_session

    with open_session(model) as session:
        height, width = session.spec.input.size_hw
        feeds = {"pixel_values": np.zeros((1, 3, height, width), session.spec.input.dtype)}
        return median_ms(lambda: session.run(feeds))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--json")
    given = parser.parse_args()
    found = [] if given.model is None else [{"model": given.model, "model_ms": model_ms(given.model)}]
    rows: list[dict[str, object]] = [*(measure(side) for side in (78, 108, 192)), *found]
    for row in rows:
        print(row)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    run(main)
