"""Latency of a prompted detector on this CPU: ONNX Runtime with a cached prompt against plain transformers.

    python training/measure_prompted.py random:grounding_dino 800x1200

The detector graph runs on a ready tensor with the text encoder's features; transformers runs its whole forward, and
once more its text encoder alone, which is taken off. Medians of `--repeats` runs, seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from options import run_program
from transformers import GroundingDinoForObjectDetection, MMGroundingDinoForObjectDetection, PreTrainedConfig

from detrt import ExportConfig, export_onnx, load_source
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.bench.measure import time_call
from detrt.errors import SourceError
from detrt.spec import PIXEL_MASK, PIXEL_VALUES, parse_size
from detrt.text.tensors import ATTENTION_MASK, INPUT_IDS

# "a b . c d ." in BERT's ids: framed by [CLS] and [SEP], phrases ended by ".".
TOKENS = [101, 1104, 1105, 1012, 1106, 1107, 1012, 102]


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call."""
    return statistics.median(time_call(function, 1, repeats)) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("size")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    height, width = parse_size(args.size)
    source = load_source(args.model)
    module = source.module
    pixels = np.random.default_rng(0).integers(0, 256, (1, 3, height, width), dtype=np.uint8)
    if not isinstance(module, (GroundingDinoForObjectDetection, MMGroundingDinoForObjectDetection)):
        raise SourceError(f"'{args.model}' is no Grounding DINO of transformers; give one such as random:grounding_dino")
    text_config = module.config.text_config
    assert isinstance(text_config, PreTrainedConfig)
    vocabulary = text_config.vocab_size
    ids = np.array([[token if token < vocabulary else 1012 for token in TOKENS]], np.int64)
    text = {INPUT_IDS: ids, ATTENTION_MASK: np.ones_like(ids)}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        report = export_onnx(source, Path(folder) / "model.onnx", ExportConfig())
        exported = time.perf_counter() - start
        text_encoder = OnnxSession(Path(folder) / "text.onnx")
        detector = OnnxSession(report.path)
        known = {**text, **text_encoder.run(text), PIXEL_VALUES: pixels, PIXEL_MASK: np.ones((1, height, width), np.int64)}
        feeds = {info.name: known[info.name] for info in detector.inputs}
        ours, encoder_seconds = (
            seconds(lambda: detector.run(feeds), args.repeats),
            seconds(lambda: text_encoder.run(text), args.repeats),
        )
    mean, std = (torch.tensor(v).reshape(1, 3, 1, 1) for v in (source.spec.input.mean, source.spec.input.std))
    inputs = {
        PIXEL_VALUES: (torch.from_numpy(pixels).float() / 255 - mean) / std,
        PIXEL_MASK: torch.ones(1, height, width, dtype=torch.long),
        INPUT_IDS: torch.from_numpy(ids),
        ATTENTION_MASK: torch.from_numpy(text[ATTENTION_MASK]),
    }
    with torch.no_grad():
        whole = seconds(lambda: module(**inputs), args.repeats)
        bert = seconds(lambda: module.model.text_backbone(inputs[INPUT_IDS], inputs[ATTENTION_MASK]), args.repeats)
    print(
        json.dumps(
            {
                "model": args.model,
                "size": args.size,
                "threads": torch.get_num_threads(),
                "export_and_check_s": round(exported, 1),
                "onnxruntime_s": round(ours, 3),
                "tower_s": round(encoder_seconds, 3),
                "transformers_s": round(whole, 3),
                "transformers_text_s": round(bert, 3),
                "ratio": round((whole - bert) / ours, 2),
            }
        )
    )


if __name__ == "__main__":
    run_program(main)
