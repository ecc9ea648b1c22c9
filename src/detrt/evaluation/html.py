"""The report of `detrt verify` as one HTML page without any outside resource.

The page and its style are `report.html`. The plots are inline SVG that is written here, not drawn by matplotlib: the report needs
no extra that way, its points have tooltips, and its colours follow the light and dark style of the page.
"""

from __future__ import annotations

import base64
import io
import math
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from PIL import Image

from .. import files
from ..data.draw import draw_detections
from ..detections import Detections
from ..errors import number_of
from ..system import package_version, processor_name
from .divergence import Divergence, TensorError

if TYPE_CHECKING:
    from .report import Example, VerifyReport

_LONGEST_PX = 640
_IMAGE_BYTES = 150_000
_MAX_ROWS = 200  # of a table
_MAP_DEPTH = 4  # components of a module path in the precision map
_PACKAGES = (
    "detrt",
    "numpy",
    "onnxruntime",
    "openvino",
    "onnx",
    "torch",
    "transformers",
    "tensorrt-rtx-cu13-bindings",
    "tensorrt",
)
# Plots: width and margins in pixels, and the smallest and largest error that is drawn.
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 58, 16, 14, 40
_FLOOR = 1e-9
_CEILING = 1e2
_TYPES = ("fp32", "fp16", "bf16", "int8", "fp8", "fp64")


def write_report(report: VerifyReport, path: Path | str, *, candidate: str, reference: str) -> None:
    """Write the page; raises OutputError."""
    files.write_text(Path(path), page(report, candidate=candidate, reference=reference))


def page(report: VerifyReport, *, candidate: str, reference: str) -> str:
    """The page as text. candidate, reference: what the user called them."""
    sections = [html_section("Verdict", _checks(report) + _failures_and_notes(report))]
    if report.divergence is not None:
        sections.append(html_section("First divergence", _divergence(report)))
    if report.scores or report.images:
        sections.append(html_section("Detections", _detections(report)))
    if report.examples:
        sections.append(html_section("Images, the worst first", "".join(map(_example, report.examples))))
    if report.ap is not None:
        sections.append(html_section("Average precision", _ap(report.ap)))
    if report.tensors or report.slots:
        sections.append(html_section("Tensors and batch slots", _tensors(report)))
    if report.precision_map:
        sections.append(html_section("Precision map", _precision_map(report.precision_map)))
    sections.append(html_section("Environment", html_environment()))
    kind = "pass" if report.passed else "fail"
    return fill_page("detrt verify", report.verdict, kind, _facts(report, candidate, reference), sections)


def fill_page(title: str, verdict: str, kind: str, facts: Iterable[tuple[str, str]], sections: Sequence[str]) -> str:
    """The page with its style. kind: "pass", "fail" or "free". sections: HTML."""
    template = Template(resources.files(__package__).joinpath("report.html").read_text("utf-8"))
    shown = "".join(f"<div><dt>{key}</dt><dd>{escape(value)}</dd></div>" for key, value in facts)
    return template.substitute(title=title, verdict=escape(verdict), kind=kind, facts=shown, sections="".join(sections))


def _facts(report: VerifyReport, candidate: str, reference: str) -> list[tuple[str, str]]:
    return [
        ("candidate", f"{candidate} ({report.candidate}, {report.precision})"),
        ("reference", f"{reference} ({report.reference})"),
        ("images", str(len(report.images))),
        ("score threshold", f"{report.gate.threshold:g}"),
        ("detrt", package_version()),
        ("date", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
    ]


def _checks(report: VerifyReport) -> str:
    rows = []
    for check in report.checks:
        state = "ok" if check.ok else ("no" if check.decides else "free")
        word = {"ok": "within", "no": "outside", "free": f"outside, {report.decider}"}[state]
        rows.append((check.name, check.measured, check.allowed, f'<span class="{state}">{word}</span>'))
    return html_table(("", "measured", "allowed", ""), rows, raw=(3,), right=(1, 2))


def _failures_and_notes(report: VerifyReport) -> str:
    failed = "".join(f"<li>{escape(text)}</li>" for text in report.failures)
    notes = "".join(f"<li>{escape(text)}</li>" for text in report.notes)
    return (f'<ul class="failures">{failed}</ul>' if failed else "") + (f'<ul class="notes">{notes}</ul>' if notes else "")


def _divergence(report: VerifyReport) -> str:
    found = report.divergence
    assert found is not None
    kind = "calm" if found.first is None or report.passed else "alarm"
    passed = "; the detections are within the tolerances all the same" if found.first is not None and report.passed else ""
    parts = [f'<p class="{kind}">{escape(found.sentence() + passed)}</p>']
    measure = "largest difference" if found.metric == "max" else "root mean square of the difference"
    parts.append(
        f"<p>{number_of(found.compared, 'tensor')} against {escape(found.against)}; the error is the {measure}, relative to the "
        "reference, with the candidate's selections given to both.</p>"
    )
    parts.append(f'<div class="plot">{error_plot(found)}</div>')
    if found.roots:
        rows = [(_root(r), r.op, _number(r.error), _number(r.before)) for r in found.roots]
        parts.append(html_table(("module, node", "op", "error", "before it"), rows, right=(2, 3), raw=(0,)))
    rows = [(row.module or "(outside the model)", _number(row.error), str(row.tensors), str(row.depth)) for row in found.layers]
    table = html_table(("module", "largest error", "tensors", "depth"), rows[:_MAX_ROWS], right=(1, 2, 3))
    more = f"<p>{number_of(len(rows) - _MAX_ROWS, 'more module')} are in the JSON report.</p>" if len(rows) > _MAX_ROWS else ""
    parts.append(f"<details><summary>Errors of {number_of(len(rows), 'module')}</summary>{table}{more}</details>")
    return "".join(parts)


def _root(root: TensorError) -> str:
    """A module, its node and what is said about it, under each other: side by side they are wider than a page."""
    lines = (f"<small>{escape(text)}</small>" for text in (root.node, root.text) if text)
    return "<br>".join([escape(root.module or "-"), *lines])


def _detections(report: VerifyReport) -> str:
    rows = []
    names = report.names or [f"image {i}" for i in range(len(report.images))]
    for name, m in zip(names, report.images, strict=True):
        paired = m.compared - m.missing
        rows.append(
            (os.path.basename(name), *map(str, (m.compared, paired, m.missing, m.extra)), f"{m.box_px:.4f}", f"{m.score:.2e}")
        )
    head = ("image", "compared", "matched", "missing", "extra", "box, px", "score")
    table = html_table(head, rows[:_MAX_ROWS], right=range(1, 7))
    more = f"<p>{number_of(len(rows) - _MAX_ROWS, 'more image')} are in the JSON report.</p>" if len(rows) > _MAX_ROWS else ""
    plot = f'<div class="plot square">{score_scatter(report.scores)}</div>' if report.scores else ""
    classes = [
        (name, *map(str, (m.compared, m.missing, m.extra)), f"{m.box_px:.4f}", f"{m.score:.2e}")
        for name, m in report.classes.items()
    ]
    if classes:
        head = ("class", "compared", "missing", "extra", "box, px", "score")
        more += html_table(head, classes[:_MAX_ROWS], right=range(1, 6))
    return f'<div class="pair">{plot}<div class="scroll">{table}{more}</div></div>'


def _example(example: Example) -> str:
    m = example.matched
    caption = (
        f"{os.path.basename(example.name)}: {m.compared} compared, {m.missing} missing, {m.extra} extra, box {m.box_px:.3f} px"
    )
    floor = 0.3
    sides = (("reference", example.reference), ("candidate", example.candidate))
    return html_sides(example.image, [(name, found[found.scores >= floor]) for name, found in sides], caption)


def html_sides(image: Any, sides: Sequence[tuple[str, Detections]], caption: str) -> str:
    """An image several times, each with other detections on it and a name below."""
    shown = "".join(
        f'<div><img alt="{escape(name)}" src="{_data_uri(image, found)}"><p>{escape(name)}</p></div>' for name, found in sides
    )
    return f'<figure><div class="sides">{shown}</div><figcaption>{escape(caption)}</figcaption></figure>'


def _data_uri(image: Any, found: Detections) -> str:
    """A JPEG of bounded size with the detections on it."""
    drawn = draw_detections(image, found)
    drawn.thumbnail((_LONGEST_PX, _LONGEST_PX), Image.Resampling.LANCZOS)
    for quality in (85, 70, 50, 30):
        buffer = io.BytesIO()
        drawn.save(buffer, format="JPEG", quality=quality)
        if buffer.tell() <= _IMAGE_BYTES:
            break
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _ap(ap: dict[str, Any]) -> str:
    rows = []
    for name, value in ap["reference"].items():
        other = ap["candidate"][name]
        change = "" if value is None or other is None else f"{other - value:+.4f}"
        rows.append((name, *("-" if v is None else f"{v:.4f}" for v in (value, other)), change))
    return html_table(("", "reference", "candidate", "change"), rows, right=(1, 2, 3))


def _tensors(report: VerifyReport) -> str:
    parts = []
    if report.tensors:
        rows = [
            (r["output"], f"{r['batch']} x {r['height']} x {r['width']}", _number(r["error"]), r["text"]) for r in report.tensors
        ]
        parts.append(html_table(("output", "batch, height, width", "relative error", ""), rows, right=(2,)))
    if report.slots:
        cells = []
        for row in report.slots:
            name = f"slot {row['slot']} of {row['batch']}" if row["slot"] >= 0 else f"batch {row['batch']}"
            kind = "ok" if row["passed"] else "no"
            tip = escape(f"{row['height']} x {row['width']}: {row['error']:.3g} {row['text']}")
            cells.append(f'<span class="slot {kind}" title="{tip}">{name}<small>{row["height"]}x{row["width"]}</small></span>')
        parts.append(f'<p>Each slot against the same image alone:</p><div class="slots">{"".join(cells)}</div>')
    return "".join(parts)


def _precision_map(found: dict[str, dict[str, int]]) -> str:
    groups: dict[str, dict[str, int]] = {}
    for module, counts in found.items():
        name = ".".join(module.split(".")[:_MAP_DEPTH]) or "(outside the model)"
        into = groups.setdefault(name, {})
        for kind, count in counts.items():
            into[kind] = into.get(kind, 0) + count
    total: dict[str, int] = {}
    for counts in groups.values():
        for kind, count in counts.items():
            total[kind] = total.get(kind, 0) + count
    every = sum(total.values())
    legend = "".join(
        f'<span class="key"><i class="{kind}"></i>{kind} {total[kind]} ({total[kind] / every:.0%})</span>'
        for kind in _TYPES
        if kind in total
    )
    rows = []
    for name, counts in list(groups.items())[:_MAX_ROWS]:
        size = sum(counts.values())
        bars = "".join(
            f'<i class="{kind}" style="width:{100 * counts[kind] / size:.1f}%" title="{kind}: {counts[kind]}"></i>'
            for kind in _TYPES
            if kind in counts
        )
        text = ", ".join(f"{counts[kind]} {kind}" for kind in _TYPES if kind in counts)
        rows.append((name, f'<div class="bar">{bars}</div>', text))
    return f'<p class="legend">{legend}</p>{html_table(("module", "types of its nodes", ""), rows, raw=(1,))}'


def html_environment() -> str:
    rows = [("platform", platform.platform()), ("processor", processor_name()), ("Python", platform.python_version())]
    for package in _PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return html_table(("", ""), rows)


def html_section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = (), raw: Sequence[int] = ()) -> str:
    """raw: columns that are HTML already."""
    align = set(right)

    def cell(index: int, text: str, tag: str) -> str:
        kind = ' class="right"' if index in align else ""
        return f"<{tag}{kind}>{text if index in raw and tag == 'td' else escape(str(text))}</{tag}>"

    top = "".join(cell(i, text, "th") for i, text in enumerate(head))
    body = "".join(f"<tr>{''.join(cell(i, text, 'td') for i, text in enumerate(row))}</tr>" for row in rows)
    header = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return f'<div class="scroll"><table>{header}<tbody>{body}</tbody></table></div>'


def _number(value: float) -> str:
    return f"{value:.2e}"


def error_plot(found: Divergence) -> str:
    """Largest error of every module against its depth in the graph, logarithmic, with the tolerance."""
    height, deepest = 320, max((row.depth for row in found.layers), default=1)

    def x(depth: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * depth / max(deepest, 1)

    def y(error: float) -> float:
        fraction = (math.log10(_clip(error)) - math.log10(_FLOOR)) / (math.log10(_CEILING) - math.log10(_FLOOR))
        return height - _BOTTOM - (height - _TOP - _BOTTOM) * fraction

    parts = [svg_open(_WIDTH, height, "error of every module by depth")]
    for power in range(-9, 3):
        if power % 2:
            parts.append(svg_line(_LEFT, y(10.0**power), _WIDTH - _RIGHT, y(10.0**power), "grid"))
            parts.append(svg_text(_LEFT - 8, y(10.0**power) + 4, f"1e{power}", "tick", "end"))
    limit = y(found.tolerance)
    parts.append(svg_line(_LEFT, limit, _WIDTH - _RIGHT, limit, "limit"))
    parts.append(svg_text(_WIDTH - _RIGHT, limit - 6, f"tolerance {found.tolerance:g}", "limit-label", "end"))
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
        parts.append(svg_line(at, _TOP, at, height - _BOTTOM, "first"))
        label = found.first.module or "(outside the model)"
        parts.append(svg_text(at + (-8 if side == "end" else 8), _TOP + 10, label, "first-label", side))
    parts.append(svg_text((_LEFT + _WIDTH) / 2, height - 8, "depth in the graph (nodes from the image)", "axis", "middle"))
    return "".join([*parts, "</svg>"])


def score_scatter(scores: Sequence[tuple[float, float]]) -> str:
    """Scores of the reference against those of the candidate; detections without a partner lie on an axis."""
    side, edge = 420, 46
    span = side - edge - 16

    def point(a: float, b: float) -> tuple[float, float]:
        return edge + span * a, side - edge - span * b

    parts = [svg_open(side, side, "scores of both models")]
    for tick in range(0, 11, 2):
        px, py = point(tick / 10, tick / 10)
        parts.append(svg_line(px, side - edge, px, side - edge - span, "grid"))
        parts.append(svg_line(edge, py, edge + span, py, "grid"))
        parts.append(svg_text(px, side - edge + 16, f"{tick / 10:g}", "tick", "middle"))
        parts.append(svg_text(edge - 7, py + 4, f"{tick / 10:g}", "tick", "end"))
    start, end = point(0, 0), point(1, 1)
    parts.append(svg_line(*start, *end, "diagonal"))
    for a, b in scores[:5000]:
        px, py = point(min(max(a, 0.0), 1.0), min(max(b, 0.0), 1.0))
        kind = "good" if a and b else "bad"
        parts.append(f'<circle class="{kind} thin" cx="{px:.1f}" cy="{py:.1f}" r="3"><title>{a:.4f} / {b:.4f}</title></circle>')
    parts.append(svg_text(edge + span / 2, side - 8, "reference", "axis", "middle"))
    parts.append(
        f'<text class="axis" text-anchor="middle" transform="translate(12 {side - edge - span / 2:.0f}) rotate(-90)">candidate</text>'
    )
    return "".join([*parts, "</svg>"])


def _clip(error: float) -> float:
    return min(max(error, _FLOOR), _CEILING) if math.isfinite(error) else _CEILING


def svg_open(width: int, height: int, label: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'


def svg_line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def svg_text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
