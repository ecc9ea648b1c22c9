"""One self-contained page of an evaluation: metrics, curves, thresholds, confusions, and the difference from another model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from .. import files
from ..data.draw import class_colour
from .coco import METRICS, SEGM, EvalReport, metric_text
from .curves import ClassCurve, Confusion, Difference
from .html import fill_page, html_environment, html_section, html_sides, html_table, svg_line, svg_open, svg_text
from .worst import ShownImage, lost_images, worst_images

_SIDE, _EDGE = 430, 44
_CURVES = 12  # in one plot
_WORST = 20


def write_eval_page(
    report: EvalReport, path: Path | str, *, model: str, against: tuple[str, EvalReport, Difference] | None = None
) -> None:
    """Write the page. against: another model, its report, and how this one differs from it. Raises OutputError."""
    curves = report.curves
    sections = [
        html_section("Metrics", html_table(("", ""), [(name, metric_text(report.metrics[name])) for name in METRICS], right=(1,)))
    ]
    if against is not None:
        sections.append(html_section(f"Compared with {against[0]}", _comparison(report, *against[1:])))
    sections.append(html_section("Classes", _classes(report, curves)))
    sections.append(html_section("Precision by recall, at an IoU of 0.5", _plots(curves)))
    if report.confusion is not None:
        sections.append(html_section("Confusions, at the threshold of best F1 of each class", _confusions(report.confusion)))
        if report.paths:
            none = "<p>None: everything was found, and nothing else.</p>"
            sections.append(html_section("Images with most errors", _images(worst_images(report)) or none))
    sections.append(html_section("Environment", html_environment()))
    facts = [
        ("model", model),
        ("images", str(report.images)),
        ("detections", str(report.detections)),
        ("IoU of", "masks" if report.iou_type == SEGM else "boxes"),
    ]
    verdict = f"AP {metric_text(report.metrics['AP'])}"
    files.write_text(Path(path), fill_page("detrt eval", verdict, "free", facts, sections))


def _classes(report: EvalReport, curves: Mapping[str, ClassCurve]) -> str:
    """AP, and the threshold of best F1 with what it gives."""
    categories = {} if report.dataset is None else {report.names[key]: name for key, name in report.dataset.names.items()}
    rows = []
    for name, curve in sorted(curves.items()):
        index = curve.best()
        figures = ["-"] * 4
        if index is not None:
            figures = [
                f"{value:.3f}" for value in (curve.threshold(index), curve.f1[index], curve.precision[index], curve.recall[index])
            ]
        rows.append([name, str(curve.objects), metric_text(report.per_class.get(categories.get(name, name))), *figures])
    head = ("class", "objects", "AP", "threshold of best F1", "F1", "precision", "recall")
    return html_table(head, rows, right=range(1, 7))


def _plots(curves: Mapping[str, ClassCurve]) -> str:
    """Curves of the classes with most objects first, a dozen in a plot."""
    ordered = sorted(curves.items(), key=lambda item: -item[1].objects)
    plots = [ordered[first : first + _CURVES] for first in range(0, len(ordered), _CURVES)]
    return "".join(f'<div class="plot square">{_plot(some)}</div>{_legend(some)}' for some in plots)


def _plot(curves: Sequence[tuple[str, ClassCurve]]) -> str:
    span = _SIDE - 2 * _EDGE

    def at(recall: float, precision: float) -> tuple[float, float]:
        return _EDGE + span * recall, _EDGE + span * (1 - precision)

    parts = [svg_open(_SIDE, _SIDE, "precision by recall of each class")]
    for tick in range(0, 11, 2):
        x, y = at(tick / 10, tick / 10)
        parts += [svg_line(x, _EDGE, x, _EDGE + span, "grid"), svg_line(_EDGE, y, _EDGE + span, y, "grid")]
        parts += [
            svg_text(x, _EDGE + span + 16, f"{tick / 10:g}", "tick", "middle"),
            svg_text(_EDGE - 7, y + 4, f"{tick / 10:g}", "tick", "end"),
        ]
    for number, (name, curve) in enumerate(curves):
        points = " ".join("{:.1f},{:.1f}".format(*at(r, p)) for r, p in zip(curve.recall, curve.precision, strict=True))
        parts.append(
            f'<polyline class="curve" stroke="{_colour(number)}" points="{points}"><title>{escape(name)}</title></polyline>'
        )
        if (index := curve.best()) is not None:
            x, y = at(curve.recall[index], curve.precision[index])
            parts.append(
                f'<circle fill="{_colour(number)}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(name)}: best F1</title></circle>'
            )
    parts.append(svg_text(_SIDE / 2, _SIDE - 8, "recall", "axis", "middle"))
    parts.append(svg_text(_EDGE, _EDGE - 12, "precision", "axis", "middle"))
    return "".join([*parts, "</svg>"])


def _legend(curves: Sequence[tuple[str, ClassCurve]]) -> str:
    keys = (
        f'<span class="key"><i style="background:{_colour(i)}"></i>{escape(name)}</span>' for i, (name, _) in enumerate(curves)
    )
    return f'<p class="legend">{"".join(keys)}</p>'


def _colour(number: int) -> str:
    return "#{:02x}{:02x}{:02x}".format(*class_colour(number))


def _confusions(found: Confusion) -> str:
    """Rows are objects, columns what they were found as; darker for a larger part of the row. Classes without either are left out."""
    shown = [i for i in range(len(found.names)) if found.counts[i].any() or found.counts[:, i].any()]
    rows = []
    for i in shown:
        total = max(int(found.counts[i].sum()), 1)
        cells = []
        for j in shown:
            count = int(found.counts[i, j])
            shade = round(70 * count / total)
            cells.append(f'<span class="part" style="opacity:{shade}%"></span>{count or ""}')
        rows.append([escape(found.names[i]), *cells])
    note = "<p>Rows: what is annotated. Columns: what was found.</p>"
    return note + html_table(
        ("", *(found.names[j] for j in shown)), rows, right=range(1, len(shown) + 1), raw=range(len(shown) + 1)
    )


def _images(shown: Iterable[ShownImage]) -> str:
    return "".join(html_sides(image.pixels, image.sides, image.caption) for image in shown)


def _comparison(report: EvalReport, other: EvalReport, found: Difference) -> str:
    sure = "more than chance" if found.low > 0 or found.high < 0 else "no more than chance may give"
    figures = [
        ("AP of the other", metric_text(found.first)),
        ("AP of this one", metric_text(found.second)),
        ("difference", f"{found.difference:+.4f}, {sure}"),
        ("95 % interval", f"{found.low:+.4f} to {found.high:+.4f} ({found.samples} draws of images)"),
    ]
    worst = [(name, f"{value:+.3f}") for name, value in list(found.images.items())[:_WORST] if value < 0]
    lost = f"<h3>Images that lost most</h3>{html_table(('image', 'AP'), worst, right=(1,))}" if worst else ""
    return html_table(("", ""), figures) + lost + _images(lost_images(report, other, found))
