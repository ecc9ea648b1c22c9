"""The report of `detrt verify` as one HTML page without any outside resource."""

from __future__ import annotations

import base64
import io
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from .. import files
from ..data.draw import draw_detections
from ..detections import Detections
from .verify_figures import figures
from .verify_style import STYLE
from .verify_svg import error_plot, score_scatter

if TYPE_CHECKING:
    from .parity import Picture, VerifyReport

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
