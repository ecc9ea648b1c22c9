"""What the commands print: tables for people, JSON for programs, progress on a terminal only."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from .. import files
from ..errors import number_of, printable
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


_SHORT = 24  # characters that a column needs at most to keep its texts on one line
_READABLE = 18  # of a column of long texts: below it is moved to another part of the table
_WORD = 20  # longest one that is not broken behind the marks of paths and names


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[int] = (),
    keys: int = 1,
    console: Any = None,
) -> None:
    """Print a table. Lines break between words, and in paths and long names behind a mark.

    Args:
        title: of the table; "" for none.
        columns: their heads.
        rows: one text for each column.
        right: indices of columns that are aligned to the right.
        keys: number of first columns that name a row. Where the table is wider than the terminal, it is printed in parts, and
            each part begins with these.
        console: where to; None: standard output.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if console is None:  # what reads a pipe has no width of its own; COLUMNS says it
        console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)
    cells = [[printable(spelled(cell), keep="\n") for cell in row] for row in rows]
    headed = any(columns)
    if title:
        console.print(printable(title), markup=False, highlight=False, style="italic")
    gap, edge = (3, 2) if headed else (2, 0)
    for part in _fitting(columns, cells, console.width - edge, gap, keys):
        shown = Table(box=box.SIMPLE_HEAD if headed else None, pad_edge=False, show_header=headed)
        for index, width in part.items():
            shown.add_column(columns[index], justify="right" if index in right else "left", width=width, overflow="fold")
        for row in cells:
            shown.add_row(*(Text(_wrapped(row[index], width)) for index, width in part.items()))
        console.print(shown)


def _fitting(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, gap: int, keys: int) -> list[dict[int, int]]:
    """The parts of a table: index -> width of their columns."""
    texts = [[head, *(line for row in rows for line in row[i].split("\n"))] for i, head in enumerate(columns)]
    whole = [max(map(len, some)) for some in texts]
    least = [
        wide if wide <= (width // 2 if i < keys else _SHORT) else max(len(piece) for text in some for piece in _pieces(text))
        for i, (wide, some) in enumerate(zip(whole, texts, strict=True))
    ]

    def fitted(part: Sequence[int]) -> dict[int, int]:
        room = width - gap * (len(part) - 1)
        got = {i: least[i] for i in part}
        while sum(got.values()) > room and max(got.values()) > 1:  # a word that is longer than its line is broken
            got[max(got, key=got.__getitem__)] -= 1
        while (spare := room - sum(got.values())) > 0 and (short := [i for i in part if got[i] < whole[i]]):
            for i in short[:spare]:
                got[i] += 1
        return got

    together = list(range(len(columns)))
    one = fitted(together)
    cramped = any(one[i] < min(whole[i], _READABLE) for i in together) or any(one[i] < least[i] for i in together)
    if len(columns) <= keys + 1 or not cramped:
        return [one]
    parts: list[list[int]] = [[]]
    for i in together[keys:]:
        tried = [*range(keys), *parts[-1], i]
        if parts[-1] and sum(max(least[j], min(whole[j], _READABLE)) for j in tried) + gap * (len(tried) - 1) > width:
            parts.append([])
        parts[-1].append(i)
    return [fitted([*range(keys), *part]) for part in parts]


def _pieces(text: str) -> list[str]:
    """What a text may be broken into."""
    words = text.split()
    return [piece for word in words for piece in (re.findall(_MARKS, word) if len(word) > _WORD else [word])] or [""]


_MARKS = re.compile(r"[^/\\,.]*[/\\,.]+|[^/\\,.]+")


def _wrapped(text: str, width: int) -> str:
    """A text in lines of at most so many characters."""
    lines = []
    for line in text.split("\n"):
        current = ""
        for word in line.split(" "):
            joined = f"{current} {word}" if current else word
            if len(joined) <= width:
                current = joined
                continue
            if current and len(word) <= width:
                lines.append(current)
                current = word
                continue
            current = f"{current} " if current else ""
            for piece in _pieces(word):
                while len(current) + len(piece) > width:
                    if current.strip():
                        lines.append(current.rstrip())
                        current = ""
                    else:
                        lines.append(piece[:width])
                        piece = piece[width:]
                current += piece
        lines.append(current)
    return "\n".join(lines)


def counted(labels: Mapping[str, int]) -> str:
    """How many were found, and of which classes."""
    most = sorted(labels.items(), key=lambda one: -one[1])[:8]
    found = ", ".join(f"{number} {printable(label)}" for label, number in most)  # cells of tables keep their line breaks
    more = f" and {number_of(len(labels) - len(most), 'more class')}" if len(labels) > len(most) else ""
    return f"{sum(labels.values())}" + (f": {found}{more}" if found else "")


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
    return f"{machine['processor']}, {number_of(machine['cores'], 'core')}, {more}; {named}"


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
