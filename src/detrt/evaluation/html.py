"""The report of `detrt verify` as one HTML page without any outside resource."""

from __future__ import annotations

import base64
import io
import math
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from .. import files
from ..data.draw import draw_detections
from ..detections import Detections
from .divergence import Divergence

if TYPE_CHECKING:
    from .report import Picture, VerifyReport

_LONGEST_PX = 640
_PICTURE_BYTES = 150_000
_ROWS = 200  # of a long table
_MAP_DEPTH = 4  # parts of a module path in the precision map
_PACKAGES = ("detrt", "numpy", "onnxruntime", "onnx", "torch", "transformers", "tensorrt-rtx-cu13-bindings", "tensorrt")
_TYPES = ("fp32", "fp16", "bf16", "int8", "fp8", "fp64")


def write_report(report: VerifyReport, path: Path | str, *, candidate: str, reference: str) -> None:
    """Write the page; raises OutputError."""
    files.write_text(Path(path), page(report, candidate=candidate, reference=reference))


def page(report: VerifyReport, *, candidate: str, reference: str) -> str:
    """The page as text. candidate, reference: what the user called them."""
    verdict = "the same detections" if report.passed else "different"
    sections = [
        _head(report, candidate, reference, verdict),
        _section("Verdict", _figures(report) + _words(report)),
    ]
    if report.divergence is not None:
        sections.append(_section("Where the graphs part", _divergence(report)))
    if report.scores or report.images:
        sections.append(_section("Detections", _detections(report)))
    if report.pictures:
        sections.append(_section("Pictures, the worst first", "".join(map(_picture, report.pictures))))
    if report.ap is not None:
        sections.append(_section("Average precision", _ap(report.ap)))
    if report.tensors or report.slots:
        sections.append(_section("Tensors and batch slots", _tensors(report)))
    if report.precision_map:
        sections.append(_section("Precision map", _precision_map(report.precision_map)))
    sections.append(_section("Environment", _environment()))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>detrt verify: {escape(verdict)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _head(report: VerifyReport, candidate: str, reference: str, verdict: str) -> str:
    kind = "pass" if report.passed else "fail"
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    rows = (
        ("candidate", f"{candidate} ({report.candidate}, {report.precision})"),
        ("reference", f"{reference} ({report.reference})"),
        ("images", str(len(report.images))),
        ("made", when),
    )
    facts = "".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in rows)
    return f'<header><p class="badge {kind}">{escape(verdict)}</p><h1>detrt verify</h1><dl>{facts}</dl></header>'


def _figures(report: VerifyReport) -> str:
    rows = []
    for figure in figures(report):
        state = "ok" if figure.ok else ("no" if figure.judged else "free")
        word = {"ok": "inside", "no": "outside", "free": "outside, AP decides"}[state]
        rows.append((figure.name, figure.measured, figure.allowed, f'<span class="{state}">{word}</span>'))
    return _table(("", "measured", "allowed", ""), rows, raw=(3,), right=(1, 2))


def _words(report: VerifyReport) -> str:
    failed = "".join(f"<li>{escape(text)}</li>" for text in report.failures)
    notes = "".join(f"<li>{escape(text)}</li>" for text in report.notes)
    return (f'<ul class="failures">{failed}</ul>' if failed else "") + (f'<ul class="notes">{notes}</ul>' if notes else "")


def _divergence(report: VerifyReport) -> str:
    found = report.divergence
    assert found is not None
    kind = "calm" if found.first is None else "alarm"
    parts = [f'<p class="{kind}">{escape(found.sentence())}</p>']
    measure = "largest difference" if found.metric == "max" else "root mean square of the difference"
    parts.append(
        f"<p>{found.compared} tensors against {escape(found.against)}; the error is the {measure}, relative to the "
        "reference, with the candidate's selections given to both.</p>"
    )
    parts.append(f'<div class="plot">{error_plot(found)}</div>')
    if found.roots:
        rows = [(r.module or "-", r.op, r.node, _number(r.error), _number(r.before), r.text) for r in found.roots]
        parts.append(_table(("module", "op", "node", "error", "before it", ""), rows, right=(3, 4)))
    rows = [(row.module or "(outside the model)", _number(row.error), str(row.tensors), str(row.depth)) for row in found.layers]
    table = _table(("module", "largest error", "tensors", "depth"), rows[:_ROWS], right=(1, 2, 3))
    more = f"<p>{len(rows) - _ROWS} more modules are in the JSON report.</p>" if len(rows) > _ROWS else ""
    parts.append(f"<details><summary>Errors of {len(rows)} modules</summary>{table}{more}</details>")
    return "".join(parts)


def _detections(report: VerifyReport) -> str:
    rows = []
    names = report.names or [f"image {i}" for i in range(len(report.images))]
    for name, m in zip(names, report.images, strict=True):
        paired = m.compared - m.missing
        rows.append(
            (os.path.basename(name), *map(str, (m.compared, paired, m.missing, m.extra)), f"{m.box_px:.4f}", f"{m.score:.2e}")
        )
    head = ("image", "compared", "matched", "missing", "extra", "box, px", "score")
    table = _table(head, rows[:_ROWS], right=range(1, 7))
    more = f"<p>{len(rows) - _ROWS} more images are in the JSON report.</p>" if len(rows) > _ROWS else ""
    plot = f'<div class="plot square">{score_scatter(report.scores)}</div>' if report.scores else ""
    return f'<div class="pair">{plot}<div class="scroll">{table}{more}</div></div>'


def _picture(picture: Picture) -> str:
    m = picture.matched
    caption = (
        f"{os.path.basename(picture.name)}: {m.compared} compared, {m.missing} missing, {m.extra} extra, box {m.box_px:.3f} px"
    )
    floor = 0.3
    sides = (("reference", picture.reference), ("candidate", picture.candidate))
    shown = "".join(
        f'<div><img alt="{escape(name)}" src="{_data_uri(picture.image, found[found.scores >= floor])}"><p>{name}</p></div>'
        for name, found in sides
    )
    return f'<figure><div class="sides">{shown}</div><figcaption>{escape(caption)}</figcaption></figure>'


def _data_uri(image: Any, found: Detections) -> str:
    """A JPEG of bounded size with the detections on it."""
    drawn = draw_detections(image, found)
    drawn.thumbnail((_LONGEST_PX, _LONGEST_PX), Image.Resampling.LANCZOS)
    for quality in (85, 70, 50, 30):
        buffer = io.BytesIO()
        drawn.save(buffer, format="JPEG", quality=quality)
        if buffer.tell() <= _PICTURE_BYTES:
            break
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _ap(ap: dict[str, Any]) -> str:
    rows = []
    for name, value in ap["reference"].items():
        other = ap["candidate"][name]
        change = "" if value is None or other is None else f"{other - value:+.4f}"
        rows.append((name, *("-" if v is None else f"{v:.4f}" for v in (value, other)), change))
    return _table(("", "reference", "candidate", "change"), rows, right=(1, 2, 3))


def _tensors(report: VerifyReport) -> str:
    parts = []
    if report.tensors:
        rows = [
            (r["output"], f"{r['batch']} x {r['height']} x {r['width']}", _number(r["error"]), r["text"]) for r in report.tensors
        ]
        parts.append(_table(("output", "batch, height, width", "relative error", ""), rows, right=(2,)))
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
    for name, counts in list(groups.items())[:_ROWS]:
        size = sum(counts.values())
        bars = "".join(
            f'<i class="{kind}" style="width:{100 * counts[kind] / size:.1f}%" title="{kind}: {counts[kind]}"></i>'
            for kind in _TYPES
            if kind in counts
        )
        text = ", ".join(f"{counts[kind]} {kind}" for kind in _TYPES if kind in counts)
        rows.append((name, f'<div class="bar">{bars}</div>', text))
    return f'<p class="legend">{legend}</p>{_table(("module", "types of its nodes", ""), rows, raw=(1,))}'


def _environment() -> str:
    rows = [("platform", platform.platform()), ("processor", platform.machine()), ("Python", platform.python_version())]
    for package in _PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return _table(("", ""), rows)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = (), raw: Sequence[int] = ()) -> str:
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


# Plots of the report as inline SVG: colours come from the page's style, so they follow light and dark.
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


# The style of the report: one set of colours for light, one for dark.
STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b2430;--soft:#5b6776;--line:#dde2e9;
--good:#1d7f4e;--bad:#c42b2b;--warn:#9a6700;--accent:#2b62c9;--tint:#eef2f8;
--t32:#7d8da3;--t16:#2b8a6e;--tb16:#4f6fd8;--t8:#d08a1d;--tf8:#b1509e}
@media (prefers-color-scheme:dark){:root{--page:#11151b;--card:#1a2029;--ink:#e7ebf1;--soft:#9aa6b5;
--line:#2c3542;--good:#4cc38a;--bad:#ff7b72;--warn:#e3b341;--accent:#7fabff;--tint:#222b37;
--t32:#8896a9;--t16:#45b892;--tb16:#8aa2ff;--t8:#e6a94a;--tf8:#d983c9}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 16px 64px}
header,section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:20px 24px;margin:0 0 18px}
h1{font-size:24px;margin:6px 0 12px}h2{font-size:17px;margin:0 0 12px}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(220px,1fr));gap:8px 24px;margin:0}
dt{color:var(--soft);font-size:12px}dd{margin:0;overflow-wrap:anywhere}
.badge{display:inline-block;margin:0;padding:4px 14px;border-radius:999px;font-weight:650;border:1.5px solid currentColor}
.pass,.ok{color:var(--good)}.fail,.no{color:var(--bad)}.free{color:var(--warn)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{font-weight:600;color:var(--soft);font-size:12px;text-align:left;border-bottom:1px solid var(--line)}
th,td{padding:5px 14px 5px 0;vertical-align:top}td{border-bottom:1px solid var(--line);overflow-wrap:break-word;min-width:52px}
tr:last-child td{border-bottom:0}.right{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
ul{margin:12px 0 0;padding-left:20px}.failures li{color:var(--bad)}.notes li{color:var(--soft)}
.alarm,.calm{margin:0 0 10px;padding:10px 14px;border-radius:8px;background:var(--tint);overflow-wrap:anywhere;
border-left:4px solid var(--bad);font-weight:550}.calm{border-left-color:var(--good)}
.plot{margin:10px 0 16px}.plot svg{width:100%;height:auto;display:block}.square{max-width:430px}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}
.grid{stroke:var(--line)}.limit{stroke:var(--warn);stroke-dasharray:6 4}svg text.limit-label{fill:var(--warn)}
.first{stroke:var(--bad);stroke-width:1.5}svg text.first-label{fill:var(--bad);font-weight:600}
.path{fill:none;stroke:var(--accent);stroke-opacity:.3}.diagonal{stroke:var(--soft);stroke-dasharray:3 4}
circle.good{fill:var(--accent)}circle.bad{fill:var(--bad)}.thin{fill-opacity:.65}
.pair{display:grid;grid-template-columns:minmax(280px,430px) 1fr;gap:24px;align-items:start}
@media (max-width:800px){.pair{grid-template-columns:1fr}}
figure{margin:0 0 20px}.sides{display:grid;grid-template-columns:1fr 1fr;gap:10px}
.sides img{width:100%;height:auto;border-radius:8px;display:block;background:var(--tint)}
.sides p{margin:4px 0 0;font-size:12px;color:var(--soft)}figcaption{font-size:13px;color:var(--soft)}
.slots{display:flex;flex-wrap:wrap;gap:8px}
.slot{border:1px solid currentColor;border-radius:8px;padding:3px 10px;font-size:13px}.slot small{margin-left:8px;opacity:.7}
.bar{display:flex;height:12px;min-width:180px;margin-top:5px;border-radius:4px;overflow:hidden;background:var(--tint)}
.bar i{display:block;height:100%}.legend{display:flex;flex-wrap:wrap;gap:16px;margin:0 0 10px}
.key i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
i.fp32,i.fp64{background:var(--t32)}i.fp16{background:var(--t16)}i.bf16{background:var(--tb16)}
i.int8{background:var(--t8)}i.fp8{background:var(--tf8)}
details{margin-top:12px}summary{cursor:pointer;color:var(--accent)}
"""


# The figures of a VerifyReport as text, for the terminal and the page.
@dataclass(frozen=True, slots=True)
class Figure:
    """One line: what, measured, allowed; ok: inside the gate; judged: whether it decides."""

    name: str
    measured: str
    allowed: str = ""
    ok: bool = True
    judged: bool = True


def figures(report: VerifyReport) -> list[Figure]:
    """What was measured and what is allowed, in the order of the levels."""
    gate = report.gate
    decides = not (gate.ap_decides and report.ap_loss is not None)
    share = f"{gate.unmatched:.0%} each" if gate.unmatched else "0 / 0"
    unmatched = max(report.missing, report.extra) <= gate.unmatched * report.compared
    found = [
        Figure("facts of the spec that differ", str(len(report.facts)), "0", not report.facts),
        Figure("detections compared", str(report.compared), "at least 1", report.compared > 0),
        Figure("missing / extra", f"{report.missing} / {report.extra}", share, unmatched, decides),
    ]
    for name, worst, allowed, shown, unit in (
        ("largest box difference", report.worst_box_px, gate.box_px, f"{report.worst_box_px:.4f} px", " px"),
        ("largest score difference", report.worst_score, gate.score, f"{report.worst_score:.2e}", ""),
        ("largest tensor difference", report.worst_tensor, gate.tensor, f"{report.worst_tensor:.2e}", ""),
    ):
        if "tensor" not in name or report.tensors:
            found.append(Figure(name, shown, f"{allowed:g}{unit}", worst <= allowed, decides))
    if report.slots:
        wrong = sum(not row["passed"] for row in report.slots)
        shapes = len({(row["batch"], row["height"], row["width"]) for row in report.slots})
        found.append(Figure(f"wrong batch slots, {shapes} shapes", f"{wrong} of {len(report.slots)}", "0", not wrong))
    if report.padding:
        worst = max(row["error"] for row in report.padding)
        same = all(row["passed"] for row in report.padding)
        found.append(Figure("effect of the padding's content", f"{worst:.2e}", f"{gate.tensor:g}", same))
    if report.ap is not None:
        both = (report.ap[side]["AP"] for side in ("reference", "candidate"))
        shown = " -> ".join("-" if value is None else f"{value:.4f}" for value in both)
        lost = report.ap_loss
        name = f"AP on {report.ap['images']} annotated images"
        found.append(Figure(name, shown, f"-{gate.ap:g}", lost is None or lost <= gate.ap))
    return found
