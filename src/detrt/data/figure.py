"""Figures of matplotlib as SVG or PNG: where it is loaded, and what a file of one must be."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from ..errors import DetrtError, MissingPackageError
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


def save_figure(figure: Any, path: str | os.PathLike) -> None:
    """Write a figure. Raises OutputError."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=Path(path).suffix.lower()[1:], dpi=130)
    write_bytes(Path(path), buffer.getvalue())


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure  # no pyplot: no window, no state
    except ImportError:
        raise MissingPackageError("matplotlib", "bench", "drawing plots") from None
    return Figure
