"""Plots of the report as inline SVG: colours come from the page's style, so they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .divergence import Divergence

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 58, 16, 14, 40
_FLOOR = 1e-9  # smaller errors are drawn here
_CEILING = 1e2


def error_plot(found: Divergence) -> str:
    """Largest error of every module against its depth in the graph, logarithmic, with the tolerance."""
    height, deepest = 320, max((row.depth for row in found.layers), default=1)

    def x(depth: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * depth / max(deepest, 1)

    def y(error: float) -> float:
        share = (math.log10(_clip(error)) - math.log10(_FLOOR)) / (math.log10(_CEILING) - math.log10(_FLOOR))
        return height - _BOTTOM - (height - _TOP - _BOTTOM) * share

    parts = [_open(_WIDTH, height, "error of every module by depth")]
    for power in range(-9, 3):
        if power % 2:
            parts.append(_line(_LEFT, y(10.0**power), _WIDTH - _RIGHT, y(10.0**power), "grid"))
            parts.append(_text(_LEFT - 8, y(10.0**power) + 4, f"1e{power}", "tick", "end"))
    limit = y(found.tolerance)
    parts.append(_line(_LEFT, limit, _WIDTH - _RIGHT, limit, "limit"))
    parts.append(_text(_WIDTH - _RIGHT, limit - 6, f"tolerance {found.tolerance:g}", "limit-label", "end"))
    line = " ".join(f"{x(row.depth):.1f},{y(row.error):.1f}" for row in found.layers)
    parts.append(f'<polyline class="path" points="{line}"/>')
    for row in found.layers:
        bad = "bad" if not row.error <= found.tolerance else "good"
        title = escape(f"{row.module or '(outside the model)'}: {row.error:.3g}")
        parts.append(
            f'<circle class="{bad}" cx="{x(row.depth):.1f}" cy="{y(row.error):.1f}" r="3.2"><title>{title}</title></circle>'
        )
    if found.first is not None:
        at = x(min(found.first.depth, deepest))
        side = "end" if at > _WIDTH * 0.6 else "start"
        parts.append(_line(at, _TOP, at, height - _BOTTOM, "first"))
        label = found.first.module or "(outside the model)"
        parts.append(_text(at + (-8 if side == "end" else 8), _TOP + 10, label, "first-label", side))
    parts.append(_text((_LEFT + _WIDTH) / 2, height - 8, "depth in the graph (nodes from the picture)", "axis", "middle"))
    return "".join([*parts, "</svg>"])


def score_scatter(scores: Sequence[tuple[float, float]]) -> str:
    """Scores of the reference against those of the candidate; detections without a partner lie on an axis."""
    side, edge = 420, 46
    span = side - edge - 16

    def place(a: float, b: float) -> tuple[float, float]:
        return edge + span * a, side - edge - span * b

    parts = [_open(side, side, "scores of both models")]
    for tick in range(0, 11, 2):
        px, py = place(tick / 10, tick / 10)
        parts.append(_line(px, side - edge, px, side - edge - span, "grid"))
        parts.append(_line(edge, py, edge + span, py, "grid"))
        parts.append(_text(px, side - edge + 16, f"{tick / 10:g}", "tick", "middle"))
        parts.append(_text(edge - 7, py + 4, f"{tick / 10:g}", "tick", "end"))
    start, end = place(0, 0), place(1, 1)
    parts.append(_line(*start, *end, "diagonal"))
    for a, b in scores[:5000]:
        px, py = place(min(max(a, 0.0), 1.0), min(max(b, 0.0), 1.0))
        kind = "good" if a and b else "bad"
        parts.append(f'<circle class="{kind} thin" cx="{px:.1f}" cy="{py:.1f}" r="3"><title>{a:.4f} / {b:.4f}</title></circle>')
    parts.append(_text(edge + span / 2, side - 8, "reference", "axis", "middle"))
    parts.append(
        f'<text class="axis" text-anchor="middle" transform="translate(12 {side - edge - span / 2:.0f}) rotate(-90)">candidate</text>'
    )
    return "".join([*parts, "</svg>"])


def _clip(error: float) -> float:
    return min(max(error, _FLOOR), _CEILING) if math.isfinite(error) else _CEILING


def _open(width: int, height: int, label: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
