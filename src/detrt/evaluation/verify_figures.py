"""The figures of a VerifyReport as text, for the terminal and the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .parity import VerifyReport


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
