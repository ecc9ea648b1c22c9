"""The precision stage of a build: converts `model.onnx`, and writes `ranges.json` and the files of the search beside it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import onnx

from .. import files, graph
from ..backends.base import Feeds
from ..backends.compare import compare_opened, drawn_batches, require_near
from ..backends.onnxruntime.session import OnnxSession
from ..backends.open import open_prompted
from ..bundle import PROVENANCE_KEY, Provenance
from ..data.images import ImageSource
from ..data.scenes.scene import draw_scene
from ..errors import GraphError
from ..graph.dequantize import remove_quantization
from ..graph.emulate_low_precision import emulate
from ..spec import ModelSpec, Precision
from ..system import Progress
from .apply import PrecisionReport, apply_precision, calibrate, unmatched_patterns, write_ranges
from .calibrate import PromptedImages, find_images
from .config import RANGES, SEARCH_PLOT, SEARCH_STATE, PrecisionConfig
from .search import Search, plot

if TYPE_CHECKING:
    from ..backends.building import Trial
    from ..export.trace import ExportReport

E = TypeVar("E", bound="Exported")

# Without calibration images, FP16 is checked for overflow on so many drawn scenes: DEIMv2-Femto overflows on any image.
DRAWN_SCENES, DRAWN_SCENE_PROMPT = 2, "a person. a red circle."
NO_CALIBRATION = (
    f"no `calibration` was given, so overflow was checked on {DRAWN_SCENES} drawn scenes only; give images of your own with "
    "`calibration` for a better check"
)


class Exported(Protocol):
    """What an export gives: `report` names the file and its spec."""

    @property
    def report(self) -> ExportReport: ...


def export_converted(
    export: Callable[[Path], E],
    path: Path,
    precision: PrecisionConfig,
    progress: Progress,
    *,
    form: Callable[[onnx.ModelProto], object] | None = None,
    check: bool = True,
) -> tuple[E, PrecisionReport | None]:
    """Export a graph in a precision; `path` and the files beside it are written when all is done, or stay as they were.

    Args:
        export: writes an FP32 graph to the path that it is given.
        progress: of the conversion.
        form: changes the converted graph in place, which is compared with it where `check` says so; `export` does both in FP32.

    Returns:
        What `export` returned, with the file in its report, and the report of the conversion; None in FP32.

    Raises:
        GraphError, GateError, OutputError: see `convert_file`, and `form` that changes the outputs; and what `export` raises.
    """
    if precision.target == Precision.FP32:
        return export(path), None
    with (
        files.naming(path),
        files.making_parents(path),
        files.temporary_folder(path.parent, path.name) as folder,
        files.naming_place(folder, path.parent),
    ):
        done = export(folder / path.name)
        file, spec = done.report.path, done.report.spec
        prompted = form is not None and check and spec.text is not None
        # While it is FP32: ONNX Runtime opens no BF16 on a CPU.
        text = text_feeds(file, DRAWN_SCENE_PROMPT)[0] if prompted else {}
        converted = convert_file(file, spec, precision, progress)
        model = graph.load(file)
        if form is not None:
            before = _without_rounding(model) if check else None
            form(model)
            graph.save(model, file)
            if before is not None:
                _require_same(before, _without_rounding(model), spec, text)
        for one in sorted(folder.iterdir(), key=lambda one: one.name == path.name):  # the graph last: what it names is there
            files.put(one, path.parent / one.name)
    return replace(done, report=replace(done.report, path=path, summary=graph.summarise(model))), converted  # type: ignore[type-var]


def _require_same(before: onnx.ModelProto, after: onnx.ModelProto, spec: ModelSpec, text: Feeds) -> None:
    """Compare two forms of a graph on a drawn scene. text: its text inputs.

    Raises:
        GateError: they differ.
    """
    limit = Precision.FP32.output_tolerance
    with files.scratch() as folder:
        plain, formed = folder / "plain.onnx", folder / "formed.onnx"
        graph.save(before, plain)
        graph.save(after, formed)
        errors = compare_opened(
            lambda: OnnxSession(plain, spec),
            lambda: OnnxSession(formed, spec),
            lambda session: [{**feeds, **text} for feeds in drawn_batches(session, (1,))],
            limit,
        )
    found = [(f"'{name}'", error, "") for name, error in errors.items()]
    require_near(found, limit, "the last form of the graph differs from the converted graph")


def _without_rounding(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in FP32 of what a graph of lower types computes, which rounding does not turn into other selections."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    remove_quantization(copy)
    return emulate(copy, rounded=False)


def convert_file(
    path: Path,
    spec: ModelSpec,
    config: PrecisionConfig,
    progress: Progress | None = None,
    extras: Path | None = None,
    trial: Trial | None = None,
) -> PrecisionReport:
    """Convert an ONNX file in place.

    extras: folder for `ranges.json` and the files of the search. trial: builds and times what the search measures.

    Raises:
        GraphError, ImageError, GateError: see `apply_precision` and `Search.run`.
    """
    progress = progress or (lambda fraction, text: None)
    model = graph.load(path)
    unknown = unmatched_patterns(model, config.keep_fp32)
    if unknown:
        paths = sorted({node.name.strip("/").split("/")[0] for node in model.graph.node if "/" in node.name.strip("/")})
        raise GraphError(
            f"`keep_fp32={', '.join(unknown)}` matches no layer of this graph; its paths start with {', '.join(paths[:8])}; "
            "give one of them, a longer path, or a pattern such as *attention*"
        )
    images: Sequence[ImageSource] = []
    images, coco = find_images(config.calibration, config.calibration_images) if config.calibration else (images, None)
    use_drawn = not images and config.target == Precision.FP16
    if use_drawn:
        images = [draw_scene(seed).image for seed in range(DRAWN_SCENES)]
    if images and spec.text is not None:
        images = PromptedImages(images, text_feeds(path, config.prompt or DRAWN_SCENE_PROMPT))
    if config.precision == "auto":
        typed, report = _search(path, model, spec, config, images, coco, progress, extras, trial)
    else:
        typed, report = apply_precision(model, spec, config, images, progress=progress)
    if use_drawn:
        report.warnings = (*report.warnings, NO_CALIBRATION)
    if origin := graph.read_metadata(typed, PROVENANCE_KEY):
        provenance = Provenance.from_json(origin)
        provenance = replace(provenance, options={**provenance.options, "precision": facts_of(config, report)})
        graph.with_metadata(typed, {PROVENANCE_KEY: provenance.to_json()})
    graph.save(graph.with_spec(typed, spec), path)
    if extras is not None and report.ranges:
        write_ranges(report, extras / RANGES)
    return report


def facts_of(config: PrecisionConfig, report: PrecisionReport) -> dict[str, Any]:
    """Choices and outcome as JSON-ready values, for provenance."""
    return {**config.to_dict(), **report.to_dict()}


def text_feeds(path: Path, prompt: str) -> list[Feeds]:
    """Text inputs of a detector for one image, for each chunk of the prompt.

    path: its ONNX file, with its text encoder and tokenizer beside it.

    Raises:
        PromptError: an empty prompt, or too many tokens.
    """
    with open_prompted(path) as session:
        return [session.text_feeds([chunk]) for chunk in session.encode(prompt).chunks]


def _search(
    path: Path,
    model: onnx.ModelProto,
    spec: ModelSpec,
    config: PrecisionConfig,
    images: Sequence[ImageSource],
    coco: Path | None,
    progress: Progress,
    extras: Path | None,
    trial: Trial | None,
) -> tuple[onnx.ModelProto, PrecisionReport]:
    low = config.without_search()
    calibration = calibrate(model, spec, low, images, progress=progress)
    state = config.state or (extras / SEARCH_STATE if extras is not None else None)
    annotations = None
    if coco is not None:
        from ..data.datasets import folder_of_images, load_dataset

        annotations = (coco, folder_of_images(load_dataset(coco)))
    with contextlib.ExitStack() as stack:
        prompted = stack.enter_context(open_prompted(path)) if spec.text is not None else None
        searched = replace(config, state=state)
        result = Search(model, spec, searched, images, calibration, annotations, progress, prompted, trial).run()
    chosen = replace(low, min_fraction=config.min_fraction or 0.0)
    typed, report = apply_precision(
        model, spec, chosen, images, progress=progress, calibration=calibration, left_out=result.paths
    )
    report.search = result.to_dict()
    report.warnings = (*report.warnings, *result.warnings)
    if extras is not None:
        files.write_text(extras / SEARCH_PLOT, plot(result))
        if config.state is not None and config.state.is_file():
            shutil.copyfile(config.state, extras / SEARCH_STATE)
    return typed, report
