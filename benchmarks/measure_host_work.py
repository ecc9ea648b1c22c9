"""Work of the host for each image of a folder where a GPU decodes, resizes and detects; prints one JSON line for each batch size.

    python benchmarks/measure_host_work.py [BATCH ...]

No GPU is needed: the model, the resize and the library that decodes JPEG files do nothing here, all else is what `detrt detect
--image-decoder gpu --json found.jsonl` runs. Files of 62 KB, 300 candidates an image, 8 of them detections. Microseconds an image, medians: of each
part alone, and "all", from the files to JSON lines through all threads, of which "hand-over" is what no part explains.
"""

from __future__ import annotations

import io
import json
import statistics
import tempfile
import timeit
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from PIL import Image
from program import at_least, make_parser, run

from detrt.backends.base import FakeSession
from detrt.backends.batches import PendingDetections
from detrt.backends.gpu import runner
from detrt.backends.gpu.decoder import GpuDecoder
from detrt.data.images import expand_inputs
from detrt.data.sinks import Record, jsonl_writer
from detrt.detector import Detector
from detrt.errors import ImageError
from detrt.jobs.run import ImageResult, detect_inputs
from detrt.spec import LOGITS, PIXEL_VALUES, PRED_BOXES, DecodeSpec, InputSpec, ModelSpec, TensorInfo

FILES, QUERIES, FOUND, SIDE = 800, 300, 8, 32  # small images, whose copies take no time
SPEC = ModelSpec(
    "rt_detr",
    InputSpec("stretch", SIDE, SIDE),
    DecodeSpec("sigmoid", "topk", QUERIES, 80, QUERIES),
    {i: f"class {i}" for i in range(80)},
)


class NoJpegs:
    """Decodes no file."""

    pixels = torch.zeros(SIDE, SIDE, 3, dtype=torch.uint8)

    def decode(self, files: Sequence[bytes]) -> list[torch.Tensor | None]:
        return [self.pixels for _ in files]


class NoModel(FakeSession):
    """A session on a GPU that returns the same candidates for every batch."""

    def __init__(self, batch: int) -> None:
        outputs = (TensorInfo(LOGITS, "float32", (batch, QUERIES, 80)), TensorInfo(PRED_BOXES, "float32", (batch, QUERIES, 4)))
        super().__init__(SPEC, (TensorInfo(PIXEL_VALUES, "uint8", (batch, 3, SIDE, SIDE)),), outputs, lambda feeds: {})
        candidates = torch.rand(batch, QUERIES + 1, 6, generator=torch.Generator().manual_seed(0))
        candidates[..., 0] -= 6.0
        candidates[:, :FOUND, 0] += 7.0
        candidates[..., 1] = torch.randperm(QUERIES * 80)[: QUERIES + 1]
        candidates[:, -1] = 0
        device = torch.device("cpu")
        self._runner = runner.GpuRunner(SPEC, self.inputs, outputs, device, lambda tensors, finish: (lambda: None, [candidates]))
        self._runner.decoder = lambda: GpuDecoder(device, 1, NoJpegs())  # type: ignore[method-assign]

    @property
    def image_runner(self) -> Any:
        return self._runner


def measure(batch: int, folder: Path) -> dict[str, float]:
    detector = Detector(NoModel(batch), image_decoder="gpu")
    decoder, inputs = detector.decoder, expand_inputs([folder])
    assert decoder is not None
    opened = [decoder.open(source.path) for source in inputs[:batch]]
    decoded = [image for image in decoder.decode(opened) if not isinstance(image, ImageError)]
    assert len(decoded) == batch
    pending = detector.submit(decoded)
    record = Record("street.jpg", pending.result()[0])
    assert len(record.detections) == FOUND

    def all_files() -> None:
        with jsonl_writer(folder.parent / "found.jsonl") as write:
            for result in detect_inputs(detector, inputs):
                assert isinstance(result, ImageResult)
                write(result.record)

    def run_model() -> None:
        begun = detector.submit(decoded)
        assert isinstance(begun, PendingDetections)
        for _, _, outputs in begun.batches:
            assert not isinstance(outputs, dict)
            outputs.outputs()

    parts = {
        "read a file and its header": _time(lambda: deque((decoder.open(source.path) for source in inputs), maxlen=1)) / FILES,
        "around the decoder": _time(lambda: decoder.decode(opened), 200) / batch,
        "around the model": _time(run_model, 200) / batch,
        "outputs to detections": _time(pending.result, 200) / batch,
        "JSON line": _time(lambda: json.dumps(record.to_dict(), ensure_ascii=False), 200),
    }
    total = _time(all_files) / FILES
    return parts | {"hand-over": total - sum(parts.values()), "all": total}


def _time(step: Any, number: int = 1) -> float:
    """Microseconds of a step."""
    step()
    return statistics.median(timeit.repeat(step, number=number, repeat=15)) / number * 1e6


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("batches", nargs="*", type=at_least(1), default=[1, 8], metavar="BATCH")
    given = parser.parse_args()
    file = io.BytesIO()
    Image.effect_noise((SIDE, SIDE), 50).convert("RGB").save(file, "JPEG", quality=95, comment=bytes(60_000))
    with tempfile.TemporaryDirectory() as name, mock.patch.object(runner, "resize_batch", lambda *_: None):
        folder = Path(name, "images")
        folder.mkdir()
        for index in range(FILES):
            (folder / f"{index}.jpg").write_bytes(file.getvalue())
        for batch in given.batches:
            rounded = {part: round(value, 1) for part, value in measure(batch, folder).items()}
            print(json.dumps({"batch": batch, "microseconds": rounded}), flush=True)


if __name__ == "__main__":
    run(main)
