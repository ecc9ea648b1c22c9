"""Images per second of `detrt detect --devices` for several lists of devices; run by hand, see docs/results/capacity.md.

    python benchmarks/measure_devices.py MODEL FOLDER --devices 0 --devices 0,0 --devices 0,1 --images 4096 --batch 32

The folder's images are taken again and again. Opening the workers and a first round are not in the figures, and every
list must give the detections of the first one.
"""

from __future__ import annotations

import itertools
import json
import platform
import sys
import time
from pathlib import Path

from program import at_least, make_parser, run

from detrt.backends.search import SessionOptions
from detrt.data.images import expand_inputs, load_image
from detrt.detector import DetectorOptions
from detrt.jobs.pool import DevicePool
from detrt.jobs.run import ImageResult
from detrt.models.load_options import LoadOptions
from detrt.system import parse_devices, usable_cores


def alike(one: list, other: list) -> float:
    """Share of the images with the same labels; batches of other sizes round differently on a GPU."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("--devices", action="append", required=True)
    parser.add_argument("--images", type=at_least(1), default=4096)
    parser.add_argument("--batch", type=at_least(1), default=32)
    parser.add_argument("--threads", type=at_least(1))
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    photos = expand_inputs([given.folder])
    inputs = list(itertools.islice(itertools.cycle(photos), given.images))
    started = time.perf_counter()
    for photo in photos[:50]:
        load_image(photo.path)
    decode_ms = (time.perf_counter() - started) / len(photos[:50]) * 1e3
    facts = {"model": given.model, "batch": given.batch, "images": given.images, "cores": usable_cores()}
    report = {**facts, "cpu": platform.processor() or platform.machine(), "decode_ms_one_core": decode_ms, "rows": []}
    first = None
    for text in given.devices:
        devices = parse_devices(text)
        started = time.perf_counter()
        load = LoadOptions(trust_remote_code=given.trust_remote_code)
        session = SessionOptions(threads=given.threads, load=load)
        detector = DetectorOptions(threshold=0.4, batch_size=given.batch)
        with DevicePool(given.model, devices, session=session, detector=detector) as pool:
            opened = time.perf_counter() - started
            # Enough that every worker runs two of its tasks, which chooses kernels and fills caches.
            list(pool.detect_inputs(inputs[: 4 * pool.task_size * len(devices)]))
            started = time.perf_counter()
            found = list(pool.detect_inputs(inputs))
            seconds = time.perf_counter() - started
            backend, replaced = pool.info.name, pool.replaced
        labels = [item.record.detections.labels if isinstance(item, ImageResult) else None for item in found]
        first = first or labels
        row = {
            "devices": text,
            "backend": backend,
            "open_seconds": round(opened, 1),
            "seconds": round(seconds, 3),
            "images_per_second": round(len(inputs) / seconds, 1),
            "same_labels_as_the_first": round(alike(first, labels), 4),
            "replaced": replaced,
        }
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
        if given.json:
            given.json.write_text(json.dumps(report, indent=2))
    print(json.dumps({key: value for key, value in report.items() if key != "rows"}), file=sys.stderr)


if __name__ == "__main__":
    run(main)
