"""An evaluation as one figure, SVG or PNG: curves, confusions, the difference from another model, and the images with most errors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..data.draw import draw_detections
from ..data.figure import COLOURS, label_text, new_figure, save_figure
from ..errors import number_of
from .coco import EvalReport, metric_text
from .curves import Confusion, Difference
from .worst import ShownImage, lost_images, worst_images

_CURVES, _CLASSES, _BARS, _IMAGES = 9, 14, 16, 3
_LINES = ("solid", "dashed", "dotted")


def write_eval_plot(
    report: EvalReport,
    path: str | os.PathLike,
    *,
    model: str,
    against: tuple[str, EvalReport, Difference] | None = None,
) -> None:
    """Draw the figure. against: another model, its report, and how this one differs from it.

    Raises:
        DetrtError, OutputError, MissingPackageError: as `data.figure.check_figure`.
    """
    panels: list[Any] = [lambda ax: _curves(ax, report)]
    if (confusion := report.confusion) is not None:
        panels.append(lambda ax: _confusions(ax, confusion))
    if against is None:
        shown = list(worst_images(report, _IMAGES))
    else:
        panels.append(lambda ax: _difference(ax, against[0], against[2]))
        shown = list(lost_images(report, against[1], against[2], _IMAGES))
    sides = max((len(image.sides) for image in shown), default=0)
    width = 5.6 * len(panels)
    heights = [_height(image, width / sides) for image in shown]
    figure = new_figure(width, 5.2 + sum(heights))
    top, *rows = figure.subfigures(1 + len(shown), 1, height_ratios=[5.2, *heights], squeeze=False).flatten()
    for draw, ax in zip(panels, top.subplots(1, len(panels), squeeze=False).flatten(), strict=True):
        draw(ax)
    for row, image in zip(rows, shown, strict=True):
        row.suptitle(image.caption, fontsize=9)
        for ax, (name, found) in zip(row.subplots(1, sides, squeeze=False).flatten(), image.sides, strict=True):
            ax.imshow(np.asarray(draw_detections(image.pixels, found)))
            ax.set_title(name, fontsize=8)
            ax.set_axis_off()
    top.suptitle(f"{model}: AP {metric_text(report.metrics['AP'])}, {number_of(report.images, 'image')}", fontsize=10)
    save_figure(figure, path)


def _height(image: ShownImage, width: float) -> float:
    """Inches of a row of an image, with its titles."""
    height, across = image.pixels.shape[:2]
    return min(width * height / across, 7.0) + 0.7


def _curves(ax: Any, report: EvalReport) -> None:
    """Curves of the classes with most objects."""
    ordered = sorted(report.curves.items(), key=lambda item: -item[1].objects)
    for number, (name, curve) in enumerate(ordered[:_CURVES]):
        colour = COLOURS[number % len(COLOURS)]
        ax.plot(
            curve.recall,
            curve.precision,
            color=colour,
            linestyle=_LINES[number % len(_LINES)],
            linewidth=1.6,
            label=label_text(name, 24),
        )
        if (index := curve.best()) is not None:
            ax.plot(curve.recall[index], curve.precision[index], marker="o", color=colour, markersize=6)
    more = f", the {_CURVES} classes of {len(ordered)} with most objects" if len(ordered) > _CURVES else ""
    ax.set_title(f"precision by recall at an IoU of 0.5; dot: best F1{more}", fontsize=9)
    ax.set(xlabel="recall", ylabel="precision", xlim=(0, 1.02), ylim=(0, 1.02))
    ax.grid(alpha=0.3)
    if ordered:
        ax.legend(fontsize=7, loc="upper right")


def _confusions(ax: Any, found: Confusion) -> None:
    """Rows are objects, shaded by their part of the row. The classes with most errors, and nothing."""
    counts = found.counts
    last = len(found.names) - 1
    errors = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
    used = [i for i in np.argsort(-errors[:last], kind="stable").tolist() if counts[i].any() or counts[:, i].any()]
    shown = [*sorted(used[:_CLASSES]), last]
    part = counts[np.ix_(shown, shown)]
    total = np.maximum(counts[shown].sum(1, keepdims=True), 1)
    ax.imshow(part / total, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (i, j), count in np.ndenumerate(part):
        if count:
            ax.text(j, i, str(count), ha="center", va="center", fontsize=7, color="white" if count > total[i, 0] / 2 else "black")
    names = [label_text(found.names[i], 18) for i in shown]
    ax.set_xticks(range(len(shown)), names, rotation=45, ha="right", fontsize=7)
    ax.set_yticks(range(len(shown)), names, fontsize=7)
    more = f"; {_CLASSES} of {number_of(len(used), 'class')}" if len(used) > _CLASSES else ""
    ax.set_title(f"confusions at the threshold of best F1{more}", fontsize=9)
    ax.set(xlabel="found as", ylabel="annotated as")


def _difference(ax: Any, other: str, found: Difference) -> None:
    """The difference of the AP with its interval, and that of the images that lost and won most."""
    values: Sequence[tuple[str, float]] = [item for item in found.images.items() if item[1]]
    half = _BARS // 2
    ends = [*values[:half], *values[-half:]] if len(values) > _BARS else values
    rows = [("all images", found.difference), *((label_text(name, 26), v) for name, v in ends)]
    colours = ["#000000", *(COLOURS[1] if value < 0 else COLOURS[0] for _, value in rows[1:])]
    places = list(range(len(rows)))  # names of images may be equal after they are cut
    ax.barh(places, [value for _, value in rows], 0.7, color=colours)
    error = [[found.difference - found.low], [found.high - found.difference]]
    ax.errorbar([found.difference], [0], xerr=np.maximum(error, 0), color="#7F7F7F", capsize=4)
    ax.set_yticks(places, [name for name, _ in rows], fontsize=7)
    ax.invert_yaxis()
    ax.axvline(0, color="black", linewidth=0.8)
    ax.grid(alpha=0.3, axis="x")
    ax.set_title(f"AP less that of {label_text(other, 30)}; bar: 95 % interval", fontsize=9)
    ax.set(xlabel="difference of AP")
