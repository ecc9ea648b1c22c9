"""The report: checkpoints in several precisions and batch sizes, built, checked, timed and evaluated on this machine."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..backends.openvino.config import TARGET as OPENVINO
from ..backends.openvino.config import OpenVinoConfig
from ..backends.tensorrt.config import TARGETS, EngineConfig
from ..bench.config import BenchConfig
from ..bench.measure import machine
from ..bench.run import bench
from ..errors import DetrtError, GateError, MissingPackageError, OutputError
from ..models.contract import ExportConfig
from ..models.load import LoadOptions
from ..pipeline import BuildReport, build
from ..precision import PrecisionConfig
from ..system import StageProgress

ONNX = "onnx"
REPORT_TARGETS = (*TARGETS, OPENVINO, ONNX)
_BACKENDS = dict.fromkeys(TARGETS, "tensorrt") | {OPENVINO: OPENVINO, ONNX: "onnxruntime"}
_KINDS = dict.fromkeys(TARGETS, "engine") | {OPENVINO: OPENVINO, ONNX: ONNX}
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """What a report measures.

    Attributes:
        target: one of REPORT_TARGETS. precisions: of the graph, the reference first.
        batches: batch sizes. TensorRT gets an engine of each; AP is measured with the first.
        size_hw: (height, width) in pixels; None: the model's own.
        repeats: timed runs after ten that are not counted.
        ground_truth, images: a data set in COCO's format, for average precision.
        calibration: images for INT8, and for ranges of FP16. prompt: of models that take one.
        keep: folder for the bundles; None: they are deleted.

    Raises:
        DetrtError: a target or precision that is not known, or a data set without its other half.
    """

    target: str
    precisions: tuple[str, ...] = ("fp32", "fp16")
    batches: tuple[int, ...] = (1, 8)
    size_hw: tuple[int, int] | None = None
    repeats: int = 50
    ground_truth: Path | None = None
    images: Path | None = None
    calibration: Path | None = None
    prompt: str | None = None
    keep: Path | None = None

    def __post_init__(self) -> None:
        if self.target not in REPORT_TARGETS:
            raise DetrtError(f"--target must be one of {', '.join(REPORT_TARGETS)}; got {self.target!r}")
        if not self.precisions:
            raise DetrtError("--precisions is empty; give one or more of fp32, fp16, bf16, int8, fp8")
        for name in self.precisions:
            self.precision(name)
        self.bench(self.batches[0] if self.batches else 0, evaluated=True)

    def precision(self, name: str) -> PrecisionConfig:
        """How the graph of a precision is made. Raises GraphError."""
        calibration = self.calibration if name in ("fp16", "int8", "fp8") else None
        return PrecisionConfig(precision=name, calibration=calibration)

    def bench(self, batch: int, *, evaluated: bool) -> BenchConfig:
        """What is measured of one bundle."""
        data = {"ground_truth": self.ground_truth, "images": self.images} if evaluated else {}
        return BenchConfig(
            batches=(batch,), size_hw=self.size_hw, repeats=self.repeats, warmup=10, scopes=("forward",),
            backends=(_BACKENDS[self.target],), providers=("cpu",) if self.target == ONNX else (), prompt=self.prompt, **data,
        )  # fmt: skip


def coco_val2017(folder: Path) -> tuple[Path, Path]:
    """(annotations, images) of COCO's own layout.

    Raises:
        DetrtError: a part is missing.
    """
    annotations, images = folder / "annotations" / "instances_val2017.json", folder / "val2017"
    if not annotations.is_file() or not images.is_dir():
        raise DetrtError(
            f"--coco '{folder}' must hold annotations/instances_val2017.json and val2017/, as COCO's downloads unpack; for another "
            "data set give --ground-truth FILE and --images DIR"
        )
    return annotations, images


def run_report(models: Sequence[str], config: ReportConfig, load: LoadOptions, progress: StageProgress) -> dict[str, Any]:
    """Build, check, time and evaluate every model in every precision.

    A model that fails in one precision leaves a row that says why, and the others go on.

    Returns:
        {"machine", "config", "rows"}; a row has "model", "precision", "batch", "check" and what was measured, or "error".

    Raises:
        MissingPackageError: a package that all rows need. OutputError: the folder of the bundles cannot be made.
    """
    rows: list[dict[str, Any]] = []
    with _folder(config.keep) as folder:
        for model in models:
            for name in config.precisions:
                rows += _rows(model, name, config, load, folder, progress)
    for row in rows:
        of_reference = (row["model"], config.precisions[0])
        reference = next(
            (r["AP"] for r in rows if (r["model"], r["precision"]) == of_reference and r.get("AP") is not None), None
        )
        if row.get("AP") is not None and reference is not None:
            row["AP change"] = round(row["AP"] - reference, 5)
    settings = {
        "target": config.target, "precisions": list(config.precisions), "batches": list(config.batches), "repeats": config.repeats,
        "size": config.size_hw, "ground_truth": config.ground_truth and str(config.ground_truth), "prompt": config.prompt,
        "calibration": config.calibration and str(config.calibration), "load": load.choices(),
    }  # fmt: skip
    return {"machine": machine(), "config": settings, "rows": rows}


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="detrt-report-") as folder:
            yield Path(folder)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--keep '{keep}' cannot be made: {error.strerror}") from None
    yield keep


def _rows(
    model: str, precision: str, config: ReportConfig, load: LoadOptions, folder: Path, progress: StageProgress
) -> list[dict[str, Any]]:
    """A row for each batch size. The graph is exported once, and an engine built from it for each batch size."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", model).strip("-.") + "." + precision
    about = {"model": model, "precision": precision}
    height, width = config.size_hw or (None, None)

    def step(stage: str, fraction: float | None, text: str) -> None:
        progress(f"{model} {precision}: {stage}", fraction, text)

    try:
        exported = build(
            model,
            folder / stem,
            export=ExportConfig(height=height, width=width),
            engines=(),
            openvino=(OpenVinoConfig(),) if config.target == OPENVINO else (),
            precision=config.precision(precision),
            load=load,
            progress=step,
        )
    except MissingPackageError:
        raise
    except DetrtError as error:
        return [about | _failure(error, batch) for batch in config.batches]
    rows = []
    for number, batch in enumerate(config.batches):
        built = exported
        try:
            if config.target in TARGETS:
                engine = EngineConfig(target=config.target, batch=(batch,) * 3)
                built = build(exported.bundle.folder, folder / f"{stem}.b{batch}", engines=(engine,), progress=step)
            measured = bench([str(built.bundle.folder)], config.bench(batch, evaluated=number == 0), step)["rows"]
            rows += [about | _measured(row, built, config) for row in measured]
        except MissingPackageError:
            raise
        except DetrtError as error:
            rows.append(about | _failure(error, batch))
    return rows


def _failure(error: DetrtError, batch: int) -> dict[str, Any]:
    return {"batch": batch, "check": FAILED if isinstance(error, GateError) else "", "error": str(error)}


def _measured(row: dict[str, Any], built: BuildReport, config: ReportConfig) -> dict[str, Any]:
    kind = _KINDS[config.target]
    file = built.bundle.of_kind(kind)[0]
    weights = built.bundle.of_kind(f"{kind}-weights")  # OpenVINO keeps them in a file of their own
    found = {name: row[name] for name in ("backend", "batch", "height", "width", "p50_ms", "p90_ms", "images_per_s", "build_s")}
    found |= {
        "bytes": file.size + sum(entry.size for entry in weights),
        "activation_bytes": (file.engine and file.engine.activation_bytes) or None,  # 0 where TensorRT did not say
        "AP": row.get("AP"),
    }
    # What the build compared: an engine of this machine with its graph, an OpenVINO model with ONNX Runtime.
    verdicts = [stage.verdict for stage in built.stages if stage.name in ("check tensorrt", OPENVINO)]
    return found | {"check": next(iter(verdicts), "")}
