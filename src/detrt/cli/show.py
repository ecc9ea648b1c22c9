"""What the commands print: tables for people, JSON for programs, progress on a terminal only."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import files
from ..system import StageProgress


def human_size(size: int) -> str:
    """Bytes as text, e.g. "1.9 MB"; empty for 0."""
    if not size:
        return ""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000  # type: ignore[assignment]
    return ""


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print a table to standard output; `right`: columns that are aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 200)
    shown = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        shown.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(str(cell).replace("[", "\\[") for cell in row))
    console.print(shown)


def notes(lines: Iterable[str]) -> None:
    """What was decided on the way, to standard error."""
    for line in lines:
        print(f"note: {line}", file=sys.stderr)


def write_json(data: Any, place: str) -> None:
    """Write JSON to a file, or to standard output for "-"."""
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    if place == "-":
        sys.stdout.write(text)
    else:
        files.write_text(Path(place), text)


def check_json(place: str | None) -> None:
    """Find out before the work whether its report can be written. Raises OutputError."""
    if place is not None and place != "-":
        files.check_place(place)


@contextlib.contextmanager
def progress() -> Iterator[StageProgress]:
    """A function (stage, fraction or None, text) that moves a bar on a terminal and is silent when piped."""
    if not sys.stderr.isatty():
        yield lambda stage, fraction, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[text]}"),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        tasks: dict[str, Any] = {}

        def step(stage: str, fraction: float | None, text: str) -> None:
            if stage not in tasks:
                for done in tasks.values():
                    bar.update(done, visible=False)
                tasks[stage] = bar.add_task(stage, total=None if fraction is None else 1.0, text=text)
            bar.update(tasks[stage], completed=fraction or 0.0, total=None if fraction is None else 1.0, text=text[-60:])

        yield step
