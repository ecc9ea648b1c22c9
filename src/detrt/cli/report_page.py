"""The page of `detrt report`: what each precision gains and costs, in sentences first, then the table, for people who decide."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ..bench.plot import short
from ..errors import number_of
from ..evaluation.html import fill_page, html_environment, html_section, html_table

SMALL_AP = 0.005  # a change of AP that is called small


def report_page(found: dict[str, Any], title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """One HTML page without outside resources. found: of `run_report`. columns, rows: of the table, as text."""
    said = sentences(found)
    failed = sum("error" in row for row in found["rows"])
    settings = found["config"]
    facts = [
        ("models", str(len({row["model"] for row in found["rows"]}))),
        ("target", settings["target"]),
        ("precisions", ", ".join(settings["precisions"])),
        ("annotations", settings["ground_truth"] or "none, so no AP"),
        ("annotated images", str(settings["annotated_images"] or "-")),
    ]
    verdict = (
        f"{failed} of {number_of(len(found['rows']), 'row')} failed"
        if failed
        else f"{number_of(len(found['rows']), 'row')} built and timed"
    )
    sections = [
        html_section("In short", "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in said) + "</ul>"),
        html_section(
            "All rows",
            html_table(columns, [[row[0].replace("-", "\u2011"), *row[1:]] for row in rows], right=range(2, len(columns) - 1))
            + f"<p>{escape(title)}</p>",
        ),
        html_section("Environment", html_environment()),
    ]
    return fill_page("detrt report", verdict, "fail" if failed else "pass", facts, sections)


def sentences(found: dict[str, Any]) -> list[str]:
    """What a reader should know of each model and precision, against the first precision at the same batch size."""
    first = found["config"]["precisions"][0]
    by_key = {(row["model"], row["precision"], row["batch"]): row for row in found["rows"]}
    said = []
    for (model, precision, batch), row in by_key.items():
        name = f"{short(model)} in {precision}, batch {batch}"
        if "error" in row:
            said.append(f"{name}: failed: {row['error']}")
            continue
        text = f"{name}: {row['p50_ms']:.1f} ms, {row['images_per_s']:.1f} images/s"
        reference = by_key.get((model, first, batch))
        if precision != first and reference is not None and "error" not in reference:
            text += f", {reference['p50_ms'] / row['p50_ms']:.2f} times the speed of {first}"
            text += f", {100 * row['bytes'] / reference['bytes']:.0f} % of its size"
        if row.get("AP") is not None:
            text += f"; AP {row['AP']:.4f}"
            change = row.get("AP change")
            if precision != first and change is not None:
                text += f", {change:+.4f} against {first}" + (" (small)" if abs(change) <= SMALL_AP else "")
        said.append(text)
    return said
