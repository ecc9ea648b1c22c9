"""Figures of a report of `detrt bench` on bundles, as one SVG or PNG. The only module that imports `matplotlib`."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from .errors import DetrtError, MissingPackageError
from .files import write_bytes

SUFFIXES = (".svg", ".png")
MOST_PARTS = 10


def check_plot(path: str | os.PathLike) -> None:
    """Before minutes of measuring.

    Raises:
        DetrtError: a file that is neither SVG nor PNG. MissingPackageError: matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise DetrtError(f"--plot must end in {' or '.join(SUFFIXES)}; got '{os.fspath(path)}'")
    _matplotlib()


def write_plot(report: dict[str, Any], path: str | os.PathLike) -> None:
    """Latency and images a second against batch; AP against latency, parts and share of the roofline where they were measured."""
    check_plot(path)
    figure_class = _matplotlib()
    panels = [_latency, _throughput]
    if any(row.get("AP") is not None for row in report["rows"]):
        panels.append(_pareto)
    if report.get("parts"):
        panels += [_parts]
        if any(part.get("roofline") for part in report["parts"]):
            panels.append(_roofline)
    figure = figure_class(figsize=(5.6 * min(len(panels), 2), 4.2 * -(-len(panels) // 2)), layout="constrained")
    axes = figure.subplots(-(-len(panels) // 2), min(len(panels), 2), squeeze=False).flatten()
    for draw, ax in zip(panels, axes, strict=False):
        draw(ax, report)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    figure.suptitle(_machine(report["machine"]), fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=Path(path).suffix.lower()[1:], dpi=150)
    write_bytes(Path(path), buffer.getvalue())


def _machine(machine: dict[str, Any]) -> str:
    gpus = [gpu if isinstance(gpu, str) else gpu.get("name", "") for gpu in machine.get("gpus") or []]
    return f"{', '.join(gpus) or machine['processor']}, {machine['cores']} cores"


def _lines(report: dict[str, Any], key: str) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in report["rows"]:
        label = f"{Path(row['model']).name} {row['backend']}"
        found.setdefault(f"{label} {row['scope'].replace('_', ' ')}", []).append((row["batch"], row[key]))
    return found


def _against_batch(ax: Any, report: dict[str, Any], key: str, label: str) -> None:
    for name, points in sorted(_lines(report, key).items()):
        style = "--" if name.endswith("end to end") else "-"
        ax.plot(*zip(*sorted(points), strict=True), style, marker="o", markersize=3, label=name)
    ax.set(xlabel="images a run", ylabel=label, ylim=(0, None))
    ax.set_xticks(sorted({row["batch"] for row in report["rows"]}))
    ax.legend(fontsize=7)
    ax.grid(alpha=0.3)


def _latency(ax: Any, report: dict[str, Any]) -> None:
    _against_batch(ax, report, "p50_ms", "milliseconds a run, median")


def _throughput(ax: Any, report: dict[str, Any]) -> None:
    _against_batch(ax, report, "images_per_s", "images a second")


def _pareto(ax: Any, report: dict[str, Any]) -> None:
    """AP against forward latency at the smallest batch; the line joins those that none beats in both."""
    least = min(row["batch"] for row in report["rows"])
    rows = [r for r in report["rows"] if r["scope"] == "forward" and r["batch"] == least and r.get("AP") is not None]
    for row in rows:
        ax.plot(row["p50_ms"], row["AP"], "o")
        ax.annotate(f"{Path(row['model']).name} {row['backend']}", (row["p50_ms"], row["AP"]), fontsize=7, xytext=(4, 4), textcoords="offset points")  # fmt: skip
    best = pareto([(row["p50_ms"], row["AP"]) for row in rows])
    ax.plot(*zip(*best, strict=True), color="grey", linewidth=1)
    ax.set(xlabel=f"forward, milliseconds, batch {least}", ylabel="AP")
    ax.grid(alpha=0.3)


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those (cost, gain) that no other point beats in both, by rising cost."""
    kept: list[tuple[float, float]] = []
    for cost, gain in sorted(points, key=lambda p: (p[0], -p[1])):
        if not kept or gain > kept[-1][1]:
            kept.append((cost, gain))
    return kept


def _parts(ax: Any, report: dict[str, Any]) -> None:
    """Share of the time by module, or by kind of step where a back end names no modules."""
    parts = [(f"{Path(part['model']).name} {part['backend']}", part["modules"] or part["kinds"]) for part in report["parts"]]
    most = {name: max(shares.get(name, 0.0) for _, shares in parts) for _, some in parts for name in some}
    names = sorted(most, key=most.__getitem__, reverse=True)[:MOST_PARTS]
    height = 0.8 / len(parts)
    for index, (label, shares) in enumerate(parts):
        places = [place + index * height for place in range(len(names))]
        ax.barh(places, [100 * shares.get(name, 0.0) for name in names], height, label=label)
    ax.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names, fontsize=7)
    ax.invert_yaxis()
    ax.set(xlabel="% of the forward time")
    ax.legend(fontsize=7)


def _roofline(ax: Any, report: dict[str, Any]) -> None:
    parts = [part for part in report["parts"] if part.get("roofline")]
    names = [f"{Path(part['model']).name}\n{part['backend']}" for part in parts]
    ax.bar(names, [100 * part["roofline"]["share"] for part in parts], 0.8 / max(1, 4 - len(parts)))
    ax.set(ylabel="% of the roofline", ylim=(0, 100), xlim=(-0.8, len(parts) - 0.2))
    ax.tick_params(axis="x", labelsize=7)


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure  # no pyplot: no window, no state
    except ImportError:
        raise MissingPackageError("matplotlib", "bench", "drawing plots") from None
    return Figure
