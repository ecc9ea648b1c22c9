"""Outputs of `detrt detect`: their options, what writes them, and what is printed."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ImageError, number_of, printable
from .spellings import spelled
from .streams import give_stdout_a_sink

if TYPE_CHECKING:
    from ..data.images import Input


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What is written, and what of the inputs is read."""

    save_dir: Path | None = field(
        default=None, metadata={"help": "Folder for annotated copies and detections.jsonl.", "writes": "folder"}
    )
    draw: bool = field(
        default=True,
        metadata={"help": "Annotated copies in --save-dir.", "flag": "draw/no-draw", "needs": {"save_dir": ()}},
    )
    font: Path | None = field(
        default=None,
        metadata={
            "help": "TrueType font for class names that are not ASCII.",
            "panel": "Advanced",
            "needs": {"save_dir": ()},
        },
    )
    json_file: str | None = field(
        default=None, metadata={"help": "JSON lines to this file; - is stdout.", "flag": "json", "writes": "JSON lines"}
    )
    csv_file: str | None = field(
        default=None, metadata={"help": "CSV to this file; - is stdout.", "flag": "csv", "writes": "CSV"}
    )
    coco_file: str | None = field(
        default=None, metadata={"help": "COCO results to this file; - is stdout.", "flag": "coco", "writes": "JSON"}
    )
    save_txt: Path | None = field(
        default=None, metadata={"help": "Write labels in YOLO's format to this folder.", "writes": "folder"}
    )
    save_crops: Path | None = field(
        default=None, metadata={"help": "Write crops of the objects to this folder, by class.", "writes": "folder"}
    )
    coco_images: Path | None = field(
        default=None, metadata={"help": "COCO annotations that give --coco its image and category ids."}
    )
    every: int = field(default=1, metadata={"help": "Take every n-th frame of a video.", "min": 1})
    skip_bad: bool = field(
        default=True, metadata={"help": "Continue after an unreadable image, or stop.", "flag": "skip-bad/strict"}
    )

    @property
    def jsonl(self) -> Path | None:
        """The JSON lines beside the annotated copies."""
        return None if self.save_dir is None else self.save_dir / "detections.jsonl"


def open_writers(
    stack: contextlib.ExitStack, output: OutputOptions, spec: Any, truth: Any, quiet: bool, extra: Sequence[str] = ()
) -> list[Callable[[Any], None]]:
    """What writes the records; lines of text where nothing else does. extra: further columns of CSV."""
    from ..data import sinks

    paths = (output.jsonl, output.json_file)
    silent = bool(quiet or output.save_txt or output.save_crops)
    writers = [stack.enter_context(sinks.jsonl_writer(path)) for path in paths if path is not None]
    if output.csv_file is not None:
        from ..tasks import tasks_of  # with numpy, which help does without

        extra = [*extra, *(task.key for task in tasks_of(spec) if task.table)]
        writers.append(stack.enter_context(sinks.csv_writer(output.csv_file, extra)))
    if output.coco_file is not None:
        writers.append(stack.enter_context(sinks.coco_writer(output.coco_file, spec, truth)))
    if not (writers or silent):
        writers.append(stack.enter_context(sinks.text_writer()))
    return writers


@dataclass(slots=True)
class Tally:
    """What was done: images, detections by class, and inputs that could not be read."""

    images: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    def check(self, inputs: int) -> None:
        """Raise ImageError where some of `inputs` could not be read."""
        if self.bad:
            raise ImageError(
                f"{len(self.bad)} of {number_of(inputs, 'input')} could not be read: {', '.join(self.bad[:3])}"
                f"{' ...' if len(self.bad) > 3 else ''}{'; all others were done' if len(self.bad) < inputs else ''}"
            )


def write_all(
    found: Iterator[Any],
    writers: list[Callable[[Any], None]],
    saves: Sequence[Callable[[Any], None]],
    step: Callable[[Input], None],
    *,
    strict: bool,
) -> Tally:
    """Write every result. strict: raise the error of an unreadable input."""
    from rich.console import Console

    from ..jobs.run import ImageFailure

    tally = Tally()
    for item in found:
        step(item.input)
        if isinstance(item, ImageFailure):
            if strict:
                raise item.error
            tally.bad.append(item.input.name)
            say(Console(stderr=True), f"skipped: {item.error}", "red")
            continue
        for write in writers:
            write(item.record)
        for save in saves:
            save(item)
        tally.images += 1
        tally.labels.update(item.record.detections.labels)
    return tally


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """End quietly when the reader of stdout has gone (`| head`); other outputs are then left out."""
    try:
        yield
    except BrokenPipeError:
        give_stdout_a_sink()
        raise typer.Exit(0) from None


def say(console: Any, text: str, style: str) -> None:
    console.print(printable(spelled(text)), style=style, markup=False, highlight=False, soft_wrap=True)


def progress_bar(stack: contextlib.ExitStack, total: int, quiet: bool) -> Callable[[Input], None]:
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
        bar.update(task, completed=len(done), description=escape(printable(source.path.name)))

    return step


def summary(console: Any, backend: str, tally: Tally, seconds: float, decoded: str) -> None:
    from . import show

    counts, images = tally.labels, tally.images
    rate = f", {images / seconds:.1f} images/s with reading and writing" if images and seconds > 0 else ""
    rows = [
        ("images", f"{images}" + (f" ({len(tally.bad)} skipped)" if tally.bad else "")),
        ("detections", show.counted(counts)),
        ("time", f"{seconds:.2f} s{rate}"),
        ("ran on", backend),
        ("decoded", decoded),
    ]
    show.table("", ("", ""), [row for row in rows if row[1]], console=console)
