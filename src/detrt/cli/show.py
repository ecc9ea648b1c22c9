"""What the commands print: tables for people, JSON for programs, progress on a terminal only."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from .. import files
from ..errors import printable
from ..system import StageProgress
from .spellings import spelled


def human_size(size: int) -> str:
    """Bytes as text, e.g. "1.9 MB"; empty for 0."""
    if not size:
        return ""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000  # type: ignore[assignment]
    return ""


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), keys: int = 1) -> None:
    """Print a table to standard output.

    Args:
        title: of the table; "" for none.
        columns: their heads.
        rows: one text for each column.
        right: indices of columns that are aligned to the right.
        keys: number of first columns that name a row. Where the table is wider than the terminal, it is printed in parts, and
            each part begins with these.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # What reads a pipe has no width of its own; COLUMNS says it.
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)
    cells = [[printable(spelled(cell), keep="\n") for cell in row] for row in rows]
    if title:
        console.print(printable(title), markup=False, highlight=False, style="italic")
    for part in _fitting(columns, cells, console.width, keys):
        shown = Table(box=box.SIMPLE_HEAD if any(columns) else None, pad_edge=False, show_header=any(columns))
        for index in part:
            shown.add_column(
                columns[index],
                justify="right" if index in right else "left",
                overflow="fold",
                no_wrap=index < keys and len(part) > keys + 1,
            )
        for row in cells:
            shown.add_row(*(row[index].replace("[", "\\[") for index in part))
        console.print(shown)


def _fitting(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, keys: int) -> list[list[int]]:
    """Indices of the columns of each part of a table; one part where all fit, or where the texts are long anyway."""
    widths = [max([len(head), *(len(row[i]) for row in rows)]) for i, head in enumerate(columns)]
    first = list(range(keys))
    if sum(widths) + 3 * len(widths) <= width or len(widths) <= keys + 3 or sum(widths[:keys]) > width // 2:
        return [list(range(len(columns)))]
    parts, used = [list(first)], sum(widths[:keys]) + 3 * keys
    room = used
    for index in range(keys, len(columns)):
        if room + widths[index] + 3 > width and len(parts[-1]) > keys:
            parts.append(list(first))
            room = used
        parts[-1].append(index)
        room += widths[index] + 3
    return parts


def paragraph(text: str, *, file: TextIO | None = None) -> None:
    """Print a text; on a terminal its lines break between words, and those after the first are indented."""
    out, text = sys.stdout if file is None else file, printable(spelled(text), keep="\n")
    if out.isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print(text, file=out)


def machine_line(machine: Mapping[str, Any], more: str, packages: Sequence[str] = ()) -> str:
    """Processor, cores, `more`, and the versions of the packages that shape a measurement, and of `packages`."""
    versions = machine["versions"]
    names = ("torch", "transformers", "onnxruntime", *packages)
    named = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    return f"{machine['processor']}, {machine['cores']} cores, {more}; {named}"


def notes(lines: Iterable[str]) -> None:
    """What was decided on the way, to standard error."""
    for line in lines:
        paragraph(f"note: {line}", file=sys.stderr)


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
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[text]}"),
    )
    with bar_of(*columns) as bar:
        tasks: dict[str, Any] = {}

        def step(stage: str, fraction: float | None, text: str) -> None:
            if stage not in tasks:
                for done in tasks.values():
                    bar.update(done, visible=False)
                tasks[stage] = bar.add_task(stage, total=None if fraction is None else 1.0, text=text)
            bar.update(tasks[stage], completed=fraction or 0.0, total=None if fraction is None else 1.0, text=text[-60:])

        yield step


@contextlib.contextmanager
def bar_of(*columns: Any) -> Iterator[Any]:
    """A rich progress bar on the terminal. What is printed meanwhile appears above it, whole lines at a time."""
    from rich.console import Console
    from rich.progress import Progress

    # Where standard output is the same terminal, the bar is written there too: one stream keeps their order.
    on_stdout = sys.stdout.isatty()
    console = Console(stderr=not on_stdout)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=True) as bar:
        if not on_stdout:
            yield bar
            return
        with contextlib.redirect_stdout(_AboveBar(console)):  # type: ignore[type-var]
            yield bar


class _AboveBar(io.TextIOBase):
    """Standard output while a bar is on the same terminal. Lines are not wrapped or styled."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._console.file = sys.stdout  # not this object, once it has replaced sys.stdout
        self._begun = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._console.out("\n".join(lines), highlight=False)
        return len(text)
