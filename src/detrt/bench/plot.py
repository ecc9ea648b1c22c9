"""Plots of a report of `detrt bench` on bundles, as one SVG or PNG.

A colour is a backend and a marker is a model, in all panels; one legend says which.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..data.figure import COLOURS, check_figure, new_figure, save_figure
from ..errors import number_of
from .config import SCOPES

MAX_PARTS = 9
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STACKED = (*COLOURS[:6], "#F0E442", "#8C6D31", "#9467BD", "#C7C7C7")
Panel = Callable[[Any], None]


def write_plot(report: dict[str, Any], path: str | os.PathLike) -> None:
    """Draw latency and throughput against the batch size for each scope; AP against latency, parts and the fraction of the
    roofline where they were measured.

    Raises:
        DetrtError, OutputError, MissingPackageError: as `data.figure.check_figure`.
    """
    check_figure(path)
    look = _Look(report["rows"])
    panels = _panels(report, look)
    columns = min(len(panels), 3 if len(panels) > 4 else 2)
    lines = -(-len(panels) // columns)
    figure = new_figure(5.4 * columns, 4.0 * lines + 0.8)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for draw, ax in zip(panels, axes, strict=False):
        draw(ax)
    for ax in axes[len(panels) :]:
        ax.remove()
    figure.legend(
        handles=look.handles(),
        loc="outside lower center",
        ncols=min(6, len(look.colours) + len(look.markers)),
        fontsize=8,
        frameon=False,
    )
    figure.suptitle(_machine(report["machine"]), fontsize=9)
    save_figure(figure, path)


class _Look:
    """Colour of each backend, marker of each model."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        backends = list(dict.fromkeys(row["backend"] for row in rows))
        models = list(dict.fromkeys(row["model"] for row in rows))
        self.colours = {backend: COLOURS[i % len(COLOURS)] for i, backend in enumerate(backends)}
        self.markers = {model: MARKERS[i % len(MARKERS)] for i, model in enumerate(models)}

    def of(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"color": self.colours[row["backend"]], "marker": self.markers[row["model"]]}

    def handles(self) -> list[Any]:
        from matplotlib.lines import Line2D

        lines = [Line2D([], [], color=colour, linewidth=3, label=backend) for backend, colour in self.colours.items()]
        points = [
            Line2D([], [], color="grey", marker=m, linestyle="none", label=short(model)) for model, m in self.markers.items()
        ]
        return lines + points


def short(model: str) -> str:
    """The name of a model, without the folders that lead to it."""
    return Path(model).name if "/" in model and ":" not in model else model


def _panels(report: dict[str, Any], look: _Look) -> list[Panel]:
    rows, parts = report["rows"], report.get("parts") or []
    scopes = [scope for scope in SCOPES if any(row["scope"] == scope for row in rows)]
    panels: list[Panel] = [partial(_against_batch, rows=rows, look=look, scope=scope, key="p50_ms") for scope in scopes]
    panels.append(partial(_against_batch, rows=rows, look=look, scope=scopes[-1], key="images_per_s"))
    if any(row.get("AP") is not None and row["scope"] == scopes[-1] for row in rows):
        panels.append(partial(_pareto, rows=rows, look=look, scope="forward" if "forward" in scopes else scopes[-1]))
    for key, title in (("modules", "by module"), ("kinds", "by kind of operator")):
        if some := [part for part in parts if part[key]]:
            panels.append(partial(_parts, parts=some, key=key, title=title))
    if some := [part for part in parts if part.get("roofline")]:
        panels.append(partial(_roofline, parts=some, look=look))
    return panels


def _machine(machine: dict[str, Any]) -> str:
    gpus = [gpu if isinstance(gpu, str) else gpu.get("name", "") for gpu in machine.get("gpus") or []]
    return f"{', '.join(gpus) or machine['processor']}, {number_of(machine['cores'], 'core')}"


def _against_batch(ax: Any, rows: Sequence[dict[str, Any]], look: _Look, scope: str, key: str) -> None:
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["scope"] == scope:
            lines.setdefault((row["model"], row["backend"]), []).append(row)
    for found in lines.values():
        points = sorted((row["batch"], row[key]) for row in found)
        ax.plot(*zip(*points, strict=True), markersize=5, linewidth=1.3, alpha=0.85, **look.of(found[0]))
    label = "median latency, ms" if key == "p50_ms" else "images per second"
    ax.set_title(scope.replace("_", " "), fontsize=9)
    ax.set(xlabel="batch size", ylabel=label)
    batches = sorted({row["batch"] for row in rows})
    if _spread([row[key] for row in rows]):  # of all panels of this kind, which are compared
        _logarithmic(ax.yaxis, ax.set_yscale)
    else:
        same = [row[key] for row in rows] if key == "p50_ms" else [row[key] for row in rows if row["scope"] == scope]
        ax.set_ylim(0, 1.05 * max(same))  # latencies of all scopes on one scale
    if len(batches) > 1:
        ax.set_xscale("log")
    ax.set_xticks(batches, [str(batch) for batch in batches])
    ax.minorticks_off()
    ax.grid(alpha=0.3, which="both")


def _spread(values: Sequence[float]) -> bool:
    """Whether values lie ten times apart, so that a linear axis would show the largest only."""
    return max(values) > 10 * max(min(values), 1e-9)


def _logarithmic(axis: Any, set_scale: Callable[[str], Any]) -> None:
    """A logarithmic axis with enough numbers to read a value."""
    from matplotlib.ticker import LogLocator

    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axis.set_major_formatter("{x:g}")


def _pareto(ax: Any, rows: Sequence[dict[str, Any]], look: _Look, scope: str) -> None:
    """AP against latency at the smallest batch; the line joins those that none beats in both."""
    least = min(row["batch"] for row in rows)
    points = [r for r in rows if r["scope"] == scope and r["batch"] == least and r.get("AP") is not None]
    for row in points:
        ax.plot(row["p50_ms"], row["AP"], linestyle="none", markersize=7, **look.of(row))
    best = pareto([(row["p50_ms"], row["AP"]) for row in points])
    ax.plot(*zip(*best, strict=True), color="grey", linewidth=1, zorder=0)
    named = set()
    for row in sorted(points, key=lambda r: r["p50_ms"]):
        if row["model"] not in named:  # once for each model, at its fastest backend
            named.add(row["model"])
            ax.annotate(short(row["model"]), (row["p50_ms"], row["AP"]), fontsize=7, xytext=(5, 5), textcoords="offset points")
    ax.margins(0.15)
    low, high = min(row["AP"] for row in points), max(row["AP"] for row in points)
    if high - low < 0.02:  # differences that mean nothing should not fill the panel
        ax.set_ylim((low + high) / 2 - 0.02, (low + high) / 2 + 0.02)
    if _spread([row["p50_ms"] for row in points]):
        _logarithmic(ax.xaxis, ax.set_xscale)
    ax.set_title("average precision and latency", fontsize=9)
    ax.set(xlabel=f"{scope.replace('_', ' ')}, milliseconds, batch {least}", ylabel="AP")
    ax.grid(alpha=0.3)


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those (cost, gain) that no other point beats in both, by rising cost."""
    kept: list[tuple[float, float]] = []
    for cost, gain in sorted(points, key=lambda p: (p[0], -p[1])):
        if not kept or gain > kept[-1][1]:
            kept.append((cost, gain))
    return kept


def _parts(ax: Any, parts: Sequence[dict[str, Any]], key: str, title: str) -> None:
    """One bar for each model and backend, cut into its parts."""
    most: dict[str, float] = {}
    for part in parts:
        for name, share in part[key].items():
            most[name] = most.get(name, 0.0) + share
    names = sorted(most, key=most.__getitem__, reverse=True)[:MAX_PARTS]
    bars = [_bar_name(part) for part in parts]
    left = [0.0] * len(parts)
    for index, name in enumerate([*names, "other"]):
        widths = [
            100 * (part[key].get(name, 0.0) if name in names else sum(v for k, v in part[key].items() if k not in names))
            for part in parts
        ]
        if any(widths):
            ax.barh(bars, widths, 0.7, left=left, label=name, color=STACKED[min(index, len(STACKED) - 1)])
        left = [a + b for a, b in zip(left, widths, strict=True)]
    ax.invert_yaxis()
    ax.set_title(title, fontsize=9)
    ax.set(xlabel="% of the time", xlim=(0, 100))
    ax.tick_params(axis="y", labelsize=6.5)
    ax.legend(fontsize=6.5, ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.16), frameon=False)


def _roofline(ax: Any, parts: Sequence[dict[str, Any]], look: _Look) -> None:
    shares = [100 * part["roofline"]["share"] for part in parts]
    bars = ax.barh([_bar_name(part) for part in parts], shares, 0.7, color=[look.colours[part["backend"]] for part in parts])
    ax.bar_label(bars, [f"{share:.0f} %" for share in shares], fontsize=7, padding=2)
    ax.invert_yaxis()
    ax.set_title("matmuls and convolutions at the machine's ceilings", fontsize=9)
    ax.set(xlabel="% of the forward time", xlim=(0, max(100.0, *shares) * 1.08))
    ax.tick_params(axis="y", labelsize=6.5)


def _bar_name(part: dict[str, Any]) -> str:
    return f"{short(part['model'])}\n{part['backend']}"
