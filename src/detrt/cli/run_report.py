"""The report: checkpoints in several precisions and batch sizes, built, checked, timed and evaluated on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..backends.shared import SharedOptions, builds, configs_of
from ..backends.targets import GRAPH
from ..bench.measure import machine
from ..bench.run import bench
from ..data.coco import CocoDataset
from ..data.datasets import load_dataset
from ..errors import DetrtError, GateError, MissingPackageError, OutputError
from ..models.contract import ExportConfig
from ..models.load_options import LoadOptions
from ..pipeline import BuildReport, build
from ..system import StageProgress

if TYPE_CHECKING:
    from .report import ReportConfig

FAILED = "failed"
_LONGEST_NAME = 150  # bytes of a model in the names of folders, which have more behind it
DONE = "report.done.json"  # in the folder of the bundles


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
    dataset = None if config.ground_truth is None else load_dataset(config.ground_truth)
    settings = {
        "target": config.target, "precisions": list(config.precisions), "batches": list(config.batches), "repeats": config.repeats,
        "size": config.size, "ground_truth": config.ground_truth and str(config.ground_truth), "prompt": config.prompt,
        "calibration": config.calibration and str(config.calibration), "load": load.choices(),
        "annotated_images": None if dataset is None else len(dataset.images),
    }  # fmt: skip
    here = machine()
    data = _state_of(config.images, config.calibration, dataset=dataset)
    with _folder(config.keep) as folder:
        done = _Done(folder / DONE)
        for model in models:
            weights = _state_of(model.removeprefix("ckpt:"))
            graph: Path | None = None  # the bundle in FP32, which the others are built of
            for name in config.precisions:
                about = {
                    **settings,
                    "machine": {key: value for key, value in here.items() if key != "disk_free_gib"},  # which each build changes
                    "images": config.images,
                    "files": [data, weights],
                    "precisions": name,
                }
                key = hashlib.sha256(json.dumps([model, about], default=str, sort_keys=True).encode()).hexdigest()
                some = done.rows.get(key)
                if some is None:
                    some = _rows(model, name, config, load, folder, progress, graph)
                    if config.keep is not None and not any("error" in row for row in some):
                        done.add(key, some)
                else:
                    progress(f"{model} {name}: done before", 1.0, f"taken from {folder / DONE}")
                rows += some
                if name == "fp32" and not any("error" in row for row in some):
                    graph = folder / _name(model, name)
    for row in rows:
        of_reference = (row["model"], config.precisions[0])
        reference = next(
            (r["AP"] for r in rows if (r["model"], r["precision"]) == of_reference and r.get("AP") is not None), None
        )
        if row.get("AP") is not None and reference is not None:
            row["AP change"] = round(row["AP"] - reference, 5)
    return {"machine": here, "config": settings, "rows": rows}


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with files.scratch() as folder:
            yield folder
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--keep '{keep}' cannot be created: {error.strerror}") from None
    yield keep


def _name(model: str, precision: str) -> str:
    """Of the folder of a bundle."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", model).strip("-.") or "model"
    return f"{files.short_name(name, _LONGEST_NAME)}.{precision}"


def _rows(
    model: str,
    precision: str,
    config: ReportConfig,
    load: LoadOptions,
    folder: Path,
    progress: StageProgress,
    graph: Path | None,
) -> list[dict[str, Any]]:
    """A row for each batch size. The graph is exported once, and an engine built from it for each batch size.

    graph: a bundle of the model in FP32, whose graph is converted; None: the checkpoint is exported.
    """
    row, what = builds()[config.target]
    by_batch = "batch" in what.takes
    stem = _name(model, precision)
    about = {"model": model, "precision": precision}
    height, width = config.size or (None, None)

    def step(stage: str, fraction: float | None, text: str) -> None:
        progress(f"{model} {precision}: {stage}", fraction, text)

    try:
        exported = build(
            graph or model,
            folder / stem,
            export=ExportConfig(height=height, width=width) if graph is None else ExportConfig(),
            targets=() if by_batch or row is GRAPH else (config.target,),
            precision=config.precision(precision),
            load=load if graph is None else None,
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
            if by_batch:
                asked = SharedOptions((config.target,), batch=(batch,) * 3)
                built = build(exported.bundle.folder, folder / f"{stem}.b{batch}", targets=configs_of(asked), progress=step)
            measured = bench([str(built.bundle.folder)], config.bench(batch, evaluated=number == 0), step)["rows"]
            rows += [about | _measured(row, built, config) for row in measured]
        except MissingPackageError:
            raise
        except DetrtError as error:
            rows.append(about | _failure(error, batch))
    return rows


def _is_row(value: object) -> bool:
    return isinstance(value, dict) and {"model", "precision", "batch", "check"} <= value.keys()


class _Done:
    """The rows that earlier runs measured, by the digest of what they depend on; a file that cannot be read holds none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = self._read()

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        kept: Any = None
        with contextlib.suppress(DetrtError):
            kept = files.read_json(self.path, "rows that are done")
        rows = kept.items() if isinstance(kept, dict) else ()
        return {key: some for key, some in rows if isinstance(some, list) and all(map(_is_row, some))}

    def add(self, key: str, rows: list[dict[str, Any]]) -> None:
        """Add to what is there by now: another report may keep its rows in the same folder."""
        with files.locked(self.path.parent):
            self.rows = self._read() | self.rows | {key: [dict(row) for row in rows]}
            files.write_text(self.path, json.dumps(self.rows, indent=1) + "\n")


def _state_of(*given: str | Path | None, dataset: CocoDataset | None = None) -> list[tuple[str, str]]:
    """(name, digest) of the files that rows depend on, so that a changed one is measured again. given: files, and folders at any depth."""
    found = {one for path in given if path for one in (Path(path), *Path(path).rglob("*"))}
    state = []
    if dataset is not None:
        state.append(("annotations", dataset.digest))
        found.update(() if dataset.folder is None else dataset.files(dataset.folder))
    return state + [(str(path), files.sha256_of(path)) for path in sorted(found) if path.is_file()]


def _failure(error: DetrtError, batch: int) -> dict[str, Any]:
    return {"batch": batch, "check": FAILED if isinstance(error, GateError) else "", "error": str(error)}


def _measured(row: dict[str, Any], built: BuildReport, config: ReportConfig) -> dict[str, Any]:
    kind = builds()[config.target][0].kind
    file = built.bundle.of_kind(kind)[0]
    weights = built.bundle.of_kind(f"{kind}-weights")  # OpenVINO keeps them in a file of their own
    found = {name: row[name] for name in ("backend", "batch", "height", "width", "p50_ms", "p90_ms", "images_per_s", "build_s")}
    found |= {
        "bytes": file.size + sum(entry.size for entry in weights),
        "activation_bytes": (file.engine and file.engine.activation_bytes) or None,  # 0 where TensorRT did not say
        "AP": row.get("AP"),
    }
    # What the build compared: an engine of this machine with its graph, an OpenVINO model with ONNX Runtime.
    verdicts = [stage.verdict for stage in built.stages if stage.name in (f"check {config.target}", config.target)]
    return found | {"check": next(iter(verdicts), "")}
