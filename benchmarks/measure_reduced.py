"""AP and latency with fewer queries and decoder layers: `python benchmarks/measure_reduced.py DATA`; prints a Markdown table.

DATA holds `images/coco_permissive` and `checkpoints/deimv2-*`. ONNX Runtime, one thread, batch 1, fixed size; the graphs of one model are
timed in turns, and a time is the median of their rounds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from program import folder, make_parser, run

from detrt.backends.onnxruntime.session import OnnxSession
from detrt.data.scenes.scene import write_dataset
from detrt.evaluation.coco import evaluate_coco
from detrt.export import ExportConfig, export_onnx
from detrt.models.example_inputs import example_feeds
from detrt.models.load import load_source
from detrt.models.load_options import LoadOptions

SCENES, ROUNDS = 100, 30
DEIMV2 = LoadOptions(family="deimv2-upstream")


def rows(ref: str, options: LoadOptions, images: Path, truth: Path, folder: Path) -> list[str]:
    whole = load_source(ref, options)
    total, layers = whole.spec.decode.num_queries, len(whole.module.model.decoder.layers)  # type: ignore[union-attr,arg-type]
    choices = [
        (total, layers),
        (total // 2, layers),
        (total // 4, layers),
        (total, layers - 1),
        (total, 1),
        (total // 2, layers - 1),
    ]
    height, width = whole.spec.input.size_hw
    sessions, metrics = [], []
    for queries, count in choices:
        source = load_source(ref, options, queries=queries, decoder_layers=count)
        path = folder / f"{queries}-{count}.onnx"
        export_onnx(source, path, ExportConfig(height=height, width=width, check=False))
        sessions.append(OnnxSession(path, threads=1))
        metrics.append(evaluate_coco(sessions[-1], truth, images).metrics)
    feeds = example_feeds(sessions[0].spec, 1, (height, width))
    times: list[list[float]] = [[] for _ in sessions]
    for _ in range(ROUNDS):
        for session, found in zip(sessions, times, strict=True):
            start = time.perf_counter()
            session.run(feeds)
            found.append(1000 * (time.perf_counter() - start))
    name = Path(ref).name
    lines = []
    for (queries, count), metric, found in zip(choices, metrics, times, strict=True):
        ratio = statistics.median(found) / statistics.median(times[0])
        lines.append(
            f"| {name} | {queries} | {count} | {metric['AP']:.3f} | {metric['AP50']:.3f} | {statistics.median(found):.1f} | {ratio:.2f} |"
        )
    return lines


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("data", type=folder, metavar="DATA")
    data = parser.parse_args().data
    coco = data / "images/coco_permissive"
    print(
        "| model | queries | decoder layers | AP | AP50 | ms | of the whole |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    with tempfile.TemporaryDirectory(prefix="detrt-") as name:
        place = Path(name)
        write_dataset(place / "scenes", SCENES, seed=10_000)
        cases: list[tuple[str, LoadOptions, Path, Path]] = [
            ("embedded:shapes", LoadOptions(no_masks=True), place / "scenes/images", place / "scenes/annotations.json"),
            *(
                (
                    str(data / f"checkpoints/deimv2-{size}-coco"),
                    DEIMV2,
                    coco / "val2017",
                    coco / "annotations/instances_val2017.json",
                )
                for size in ("atto", "femto")
            ),
        ]
        for case in cases:
            print("\n".join(rows(*case, place)), flush=True)


if __name__ == "__main__":
    run(main)
