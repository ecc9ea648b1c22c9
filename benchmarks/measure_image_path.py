"""From the bytes of JPEG files to boxes, against the forward pass alone; prints one JSON line for each bundle and backend.

    python benchmarks/measure_image_path.py BUNDLE [BUNDLE ...]
    python benchmarks/measure_image_path.py BUNDLE --backends onnxruntime,openvino --threads 1

For the engine and the GPU package of each bundle, or what --backends names: the forward pass ("forward": CUDA graph, inputs and outputs on
the GPU), one call of `Detector` at a time with its batch size ("call"), and a stream of 400 files ("stream", for each batch), with
files decoded on the CPU and on the GPU. Files are drawn scenes of 480x640 and of the model's own size, JPEG quality 90. Milliseconds,
median of 100 calls and of three streams. "stages" are those of `detrt bench --parts`.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from program import at_least, make_parser, run

from detrt.backends.base import Session
from detrt.backends.open import open_session
from detrt.bench.measure import drawn_images, jpeg_of, time_call
from detrt.bench.stages import stage_times
from detrt.detector import Detector
from detrt.errors import DetrtError
from detrt.system import IMAGE_DECODERS

PHOTOGRAPH, CALLS, STREAM = (480, 640), 100, 400


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("bundles", nargs="+")
    parser.add_argument("--backends", default="tensorrt,inductor")
    parser.add_argument("--threads", type=at_least(1), help="of a backend on the CPU")
    given = parser.parse_args()
    measured = 0
    for folder in given.bundles:
        for backend in given.backends.split(","):
            try:
                session = open_session(folder, backend=backend, threads=given.threads)
            except DetrtError as error:
                print(json.dumps({"bundle": folder, "backend": backend, "skipped": str(error)}), flush=True)
                continue
            with session:
                print(json.dumps({"bundle": Path(folder).name, **measure(session)}), flush=True)
            measured += 1
    return 0 if measured else 2


def measure(session: Session) -> dict[str, Any]:
    height, width = session.info.pixel_shape[2:] or (None, None)
    own = (height, width) if isinstance(height, int) and isinstance(width, int) else session.spec.input.size_hw
    row: dict[str, Any] = {"backend": session.info.name, "precision": session.info.precision, "notes": session.info.notes}
    for size in dict.fromkeys((PHOTOGRAPH, own)):
        batch = Detector(session).batch_size
        files = [jpeg_of(image) for image in drawn_images(size, max(8, batch))]
        found: dict[str, Any] = {"batch": batch, "stages": stage_times(session, files[:batch], None)}
        forward = found["stages"]["forward"]
        for decoder in IMAGE_DECODERS:
            try:
                detector = Detector(session, image_decoder=decoder)
                call = statistics.median(time_call(functools.partial(detector, files[:batch]), 20, CALLS))
                streamed = _stream(detector, files)
            except DetrtError as error:
                found[decoder] = str(error)
                continue
            found[decoder] = {"call": round(call, 3), "call / forward": round(call / forward, 2)}
            found[decoder] |= {"stream": round(streamed, 3), "forward / stream": round(forward / streamed, 3)}
        row["x".join(map(str, size))] = found
    return row


def _stream(detector: Detector, files: list[bytes]) -> float:
    """Milliseconds of a batch in a stream of files."""
    count = STREAM // detector.batch_size

    def run() -> None:
        for _ in detector.stream([files[index % len(files)] for index in range(count * detector.batch_size)]):
            pass

    run()
    return statistics.median(_seconds(run) for _ in range(3)) / count * 1e3


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    run(main)
