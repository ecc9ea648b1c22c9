"""`detrt detect`: find objects in images and videos."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DetrtError, ImageError, SpecError
from ..models.load import LoadOptions
from ..spec import parse_size
from .cluster import ClusterOptions, check_alone, detect_on_cluster
from .options import Given, PromptOptions, RunOptions, comma_separated, command, load_arguments

if TYPE_CHECKING:
    from ..data.images import Input
    from ..detector import Detector


def parse_class_thresholds(text: str) -> tuple[tuple[str, float], ...]:
    """ "person=0.6,car=0.4" -> (("person", 0.6), ("car", 0.4)). Raises DetrtError."""
    found = []
    for part in comma_separated(text):
        name, _, number = part.rpartition("=")
        try:
            threshold = float(number)
        except ValueError:
            threshold = math.nan
        if not (name and 0 <= threshold <= 1):
            raise DetrtError(f"--class-thresholds takes CLASS=SCORE with scores from 0 to 1, comma-separated; got {part!r}")
        found.append((name.strip(), threshold))
    if len(dict(found)) < len(found):
        raise DetrtError(f"--class-thresholds names a class twice; got {text!r}")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class DetectorOptions:
    """Options of `Detector`.

    Raises:
        SpecError: a number out of range. DetrtError: an unknown decoder.
    """

    threshold: float = field(default=0.5, metadata={"help": "Lowest score to keep.", "flag": "--threshold -t"})
    classes: tuple[str, ...] | None = field(
        default=None, metadata={"help": "Classes to keep: comma-separated names or ids.", "parse": comma_separated}
    )
    class_thresholds: tuple[tuple[str, float], ...] = field(
        default=(),
        metadata={
            "help": "Thresholds of classes, instead of --threshold: person=0.6,car=0.4.",
            "parse": parse_class_thresholds,
        },
    )
    phrases: str = field(
        default="best",
        metadata={
            "help": "Label of a box: its best phrase (best), or tokens as published (tokens, tokens-of-best).",
            "panel": "Prompt",
        },
    )
    text_threshold: float | None = field(
        default=None,
        metadata={
            "help": "Token score threshold (0.25).",
            "panel": "Prompt",
            "needs": {"phrases": ("tokens", "tokens-of-best")},
        },
    )
    max_detections: int | None = field(default=None, metadata={"help": "Largest number of detections per image."})
    batch: int | None = field(default=None, metadata={"help": "Batch size; default: the model's own.", "panel": "Size"})
    size: tuple[int, int] | None = field(
        default=None, metadata={"help": "Input size: 640 or HEIGHTxWIDTH.", "panel": "Size", "parse": parse_size}
    )
    image_decoder: str = field(
        default="cpu", metadata={"help": "Decode JPEG files and videos on the cpu, or on the gpu that runs the model."}
    )

    def __post_init__(self) -> None:
        from ..system import IMAGE_DECODERS

        for name, value in (("--threshold", self.threshold), ("--text-threshold", self.text_threshold)):
            if value is not None and not 0 <= value <= 1:
                raise SpecError(f"{name} must be from 0 to 1; got {value}")
        for name, value in (("--batch", self.batch), ("--max-detections", self.max_detections)):
            if value is not None and value < 1:
                raise SpecError(f"{name} must be at least 1; got {value}")
        if self.image_decoder not in IMAGE_DECODERS:
            raise DetrtError(f"--image-decoder must be {' or '.join(IMAGE_DECODERS)}; got {self.image_decoder!r}")

    def arguments(self, prompt: PromptOptions) -> dict[str, Any]:
        """Keywords of `Detector`. Newer ones are left out at their default, since a cluster run is bound to them."""
        from ..text.postprocess import TEXT_THRESHOLD

        found = {
            "threshold": self.threshold,
            "batch_size": self.batch,
            "size_hw": self.size,
            "classes": None if self.classes is None else list(self.classes),
            "max_detections": self.max_detections,
            "prompt": prompt.read(),
            "task": prompt.task,
            "phrases": self.phrases,
            "text_threshold": TEXT_THRESHOLD if self.text_threshold is None else self.text_threshold,
        }
        if self.class_thresholds:
            found["class_thresholds"] = dict(self.class_thresholds)
        return found if self.image_decoder == "cpu" else {**found, "image_decoder": self.image_decoder}


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What is written, and what of the inputs is read."""

    save_dir: Path | None = field(default=None, metadata={"help": "Folder for annotated copies and detections.jsonl."})
    draw: bool = field(
        default=True,
        metadata={"help": "Annotated copies in --save-dir.", "flag": "--draw/--no-draw", "needs": {"save_dir": ()}},
    )
    font: Path | None = field(
        default=None,
        metadata={
            "help": "TrueType font for class names that are not ASCII.",
            "panel": "Advanced",
            "needs": {"save_dir": ()},
        },
    )
    json_file: str | None = field(default=None, metadata={"help": "JSON lines to this file; - is stdout.", "flag": "--json"})
    csv_file: str | None = field(default=None, metadata={"help": "CSV to this file; - is stdout.", "flag": "--csv"})
    coco_file: str | None = field(default=None, metadata={"help": "COCO results to this file; - is stdout.", "flag": "--coco"})
    coco_images: Path | None = field(
        default=None, metadata={"help": "COCO annotations that give --coco its image and category ids."}
    )
    every: int = field(default=1, metadata={"help": "Take every n-th frame of a video.", "min": 1})
    skip_bad: bool = field(
        default=True, metadata={"help": "Continue after an unreadable image, or stop.", "flag": "--skip-bad/--strict"}
    )

    @property
    def jsonl(self) -> Path | None:
        """The JSON lines beside the annotated copies."""
        return None if self.save_dir is None else self.save_dir / "detections.jsonl"


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How a model is opened, beside its backend and device."""

    threads: int | None = field(default=None, metadata={"help": "Threads of ONNX Runtime.", "panel": "Advanced"})
    spec: Path | None = field(default=None, metadata={"help": "Spec of an ONNX file that has none.", "panel": "Advanced"})


@command
def detect(
    model: Annotated[
        str,
        typer.Argument(help="Bundle folder, .onnx, .engine, checkpoint folder, hf:org/name, ckpt:FILE or embedded:name."),
    ],
    inputs: Annotated[list[str], typer.Argument(help="Images, videos, folders (searched at any depth), patterns.")],
    detector: DetectorOptions,
    prompt: PromptOptions,
    output: Given[OutputOptions],
    run: Given[RunOptions],
    opening: OpenOptions,
    load: LoadOptions,
    cluster: ClusterOptions,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, lines or summary.")] = False,
) -> None:
    """Find objects in images and videos.

    Without an output option, one line for each image is printed.

    Exit code 0: all done; 2: something was wrong, or inputs were skipped; the outputs hold the others.
    """
    from ..data.sinks import check_stdout_once
    from ..spec import read_spec_file

    arguments = detector.arguments(prompt)
    session = {
        "backend": run.backend,
        "threads": opening.threads,
        "spec": None if opening.spec is None else read_spec_file(opening.spec),
        **load_arguments(load),
    }
    if cluster.cluster is not None:
        check_alone(output, run)
        detect_on_cluster(
            model, inputs, cluster, session=session, detector=arguments, coco_images=output.coco_images, quiet=quiet
        )
        return
    options = output.make()
    if options.coco_images is not None and options.coco_file is None:
        raise DetrtError("--coco-images does nothing without --coco FILE; give both")
    check_stdout_once([options.jsonl, options.json_file, options.csv_file, options.coco_file])
    _detect_here(model, inputs, options, run.make(), session, arguments, quiet)


def _detect_here(
    model: str,
    names: list[str],
    output: OutputOptions,
    run: RunOptions,
    session: dict[str, Any],
    arguments: dict[str, Any],
    quiet: bool,
) -> None:
    """Detect on this machine: in this process, or with several devices in one for each."""
    from rich.console import Console

    from ..data.coco import load_coco
    from ..data.images import expand_inputs
    from ..jobs.annotate import AnnotatedCopies
    from ..jobs.pool import DevicePool
    from ..jobs.run import detect_inputs, exclude_outputs
    from . import show

    inputs = expand_inputs(names)
    if output.save_dir is not None:
        inputs = exclude_outputs(output.save_dir, inputs, names)
    truth = None if output.coco_images is None else load_coco(output.coco_images, annotations=False)
    if truth is not None:
        for source in inputs:  # now, rather than after an hour
            truth.image_id(str(source.path))
    copies = None
    if output.save_dir is not None and output.draw:
        copies = {"folder": output.save_dir, "inputs": inputs, "every": output.every, "font": output.font}
    console = Console(stderr=True, quiet=quiet)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_reader_may_leave())
        if len(run.device) > 1:
            pool = DevicePool(model, run.device, session=session, detector=arguments, copies=copies, every=output.every)
            runner: Any = stack.enter_context(pool)
            found = pool.detect_inputs(inputs)
        else:
            detector = stack.enter_context(_open_detector(model, run, session, arguments))
            detector.check_prompt()
            runner = detector.session
            found = detect_inputs(detector, inputs, every=output.every)
        started = time.perf_counter()
        if runner.info.notes:
            show.notes([runner.info.note])
        step = _progress(stack, len(inputs), quiet)  # before the writers: their lines go above the bar
        writers = _writers(stack, output, runner.spec, truth, quiet)
        save = None
        if copies is not None and len(run.device) < 2:
            save = stack.enter_context(AnnotatedCopies(**copies)).save
        tally = _write(found, writers, save, step, strict=not output.skip_bad)
    decoder = None if len(run.device) > 1 else detector.decoder
    _summary(console, runner.info.name, tally, time.perf_counter() - started, str(decoder or ""))
    if tally.bad:
        raise ImageError(
            f"{len(tally.bad)} of {len(inputs)} inputs could not be read: {', '.join(map(str, tally.bad[:3]))}"
            f"{' ...' if len(tally.bad) > 3 else ''}; all others were done"
        )


def _open_detector(model: str, run: RunOptions, session: dict[str, Any], arguments: dict[str, Any]) -> Detector:
    from ..detector import Detector

    opened = open_model(model, run, **session)
    try:
        return Detector(opened, **arguments)
    except BaseException:
        opened.close()
        raise


def open_model(model: str, run: RunOptions, **session: Any) -> Any:
    """The session of a model on the one device of `run`, or on the backend's own."""
    from ..backends.open import open_session

    return open_session(model, **{"backend": run.backend, "device": run.one_device(), **session})


def _writers(
    stack: contextlib.ExitStack, output: OutputOptions, spec: Any, truth: Any, quiet: bool
) -> list[Callable[[Any], None]]:
    """What writes the records; lines of text where nothing else does."""
    from ..data import sinks

    paths = (output.jsonl, output.json_file)
    writers = [stack.enter_context(sinks.jsonl_writer(path)) for path in paths if path is not None]
    if output.csv_file is not None:
        writers.append(stack.enter_context(sinks.csv_writer(output.csv_file)))
    if output.coco_file is not None:
        writers.append(stack.enter_context(sinks.coco_writer(output.coco_file, spec, truth)))
    if not (writers or quiet):
        writers.append(stack.enter_context(sinks.text_writer()))
    return writers


@dataclass(slots=True)
class _Tally:
    """What was done: images, detections by class, and inputs that could not be read."""

    images: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    bad: list[Path] = field(default_factory=list)


def _write(
    found: Iterator[Any],
    writers: list[Callable[[Any], None]],
    save: Callable[[Any], None] | None,
    step: Callable[[Input], None],
    *,
    strict: bool,
) -> _Tally:
    """Write every result. strict: raise the error of an unreadable input."""
    from rich.console import Console

    from ..jobs.run import ImageFailure

    tally = _Tally()
    for item in found:
        step(item.input)
        if isinstance(item, ImageFailure):
            if strict:
                raise item.error
            tally.bad.append(item.input.path)
            _say(Console(stderr=True), f"skipped: {item.error}", "red")
            continue
        for write in writers:
            write(item.record)
        if save is not None:
            save(item)
        tally.images += 1
        tally.labels.update(item.record.detections.labels)
    return tally


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """End quietly when the reader of stdout has gone (`| head`); other outputs are then left out."""
    try:
        yield
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give it a sink.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


def _say(console: Any, text: str, style: str) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _progress(stack: contextlib.ExitStack, total: int, quiet: bool) -> Callable[[Input], None]:
    """A function to call with the input of every result; shows a bar on a terminal only."""
    if quiet or not sys.stderr.isatty():
        return lambda source: None
    from rich import progress
    from rich.markup import escape

    from . import show

    columns = (
        progress.TextColumn("detect"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.description}"),
    )
    bar = stack.enter_context(show.bar_of(*columns))
    task = bar.add_task("", total=total)
    done: set[Input] = set()

    def step(source: Input) -> None:
        done.add(source)
        # Markup in a file name must not be read as such.
        bar.update(task, completed=len(done), description=escape(source.path.name))

    return step


def _summary(console: Any, backend: str, tally: _Tally, seconds: float, decoded: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=None, box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    counts, images = tally.labels, tally.images
    table.add_row("images", f"{images}" + (f" ({len(tally.bad)} skipped)" if tally.bad else ""))
    found = ", ".join(f"{number} {label}" for label, number in counts.most_common(8))
    table.add_row("detections", Text(f"{sum(counts.values())}" + (f": {found}" if found else "")))
    if len(counts) > 8:
        table.add_row("", f"and {len(counts) - 8} more classes")
    rate = f", {images / seconds:.1f} images/s with reading and writing" if images and seconds > 0 else ""
    table.add_row("time", f"{seconds:.2f} s{rate}")
    table.add_row("ran on", backend)
    if decoded:
        table.add_row("decoded", decoded)
    console.print(table)
