"""Figures of matplotlib as SVG or PNG: where it is loaded, and what a file of one must be."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from ..errors import DetrtError, MissingPackageError, printable
from ..files import check_place, write_bytes

SUFFIXES = (".svg", ".png")
# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31", "#7F7F7F")


def check_figure(path: str | os.PathLike) -> None:
    """Check the file and the package before minutes of measuring.

    Raises:
        DetrtError: a file that is neither SVG nor PNG. OutputError: it cannot be written. MissingPackageError: matplotlib is not
            installed.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise DetrtError(f"`plot` must end in {' or '.join(SUFFIXES)}; got '{os.fspath(path)}'")
    check_place(path)
    _matplotlib()


def new_figure(width: float, height: float) -> Any:
    """An empty figure. width, height: in inches."""
    return _matplotlib()(figsize=(width, height), layout="constrained")


def label_text(name: str, most: int) -> str:
    """A name in a figure, in at most `most` characters: the start and the end of a longer one, since names of files differ at the end."""
    name = printable(name)
    if len(name) > most:
        end = (most - 3) // 2
        name = f"{name[: most - 3 - end]}...{name[-end:]}"
    # A legend leaves out what begins with an underscore, and what is blank.
    return f" {name}" if name.startswith("_") else name if name.strip() else "(no name)"


def save_figure(figure: Any, path: str | os.PathLike) -> None:
    """Write a figure. Raises OutputError."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a dollar sign in a name is one
    buffer = io.BytesIO()
    figure.savefig(buffer, format=Path(path).suffix.lower()[1:], dpi=130)
    write_bytes(Path(path), buffer.getvalue())


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure  # no pyplot: no window, no state
    except ImportError:
        raise MissingPackageError("matplotlib", "bench", "drawing plots") from None
    return Figure
