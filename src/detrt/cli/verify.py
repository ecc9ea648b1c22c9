"""`detrt verify`: does a candidate detect the same things as a reference?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def verify(
    candidate: Annotated[str, typer.Argument(help="Bundle, .onnx or .engine to check.")],
    against: Annotated[str, typer.Option(help="The reference: a checkpoint, bundle, .onnx or .engine.")],
    images: Annotated[list[str], typer.Option(help="Images or folders; repeat for several.")],
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Compare detections with at least this score.")] = 0.3,
    box_px: Annotated[float, typer.Option(help="Largest allowed difference of a box side, pixels.")] = 0.5,
    score: Annotated[float, typer.Option(help="Largest allowed difference of a score.")] = 1e-3,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first so many images.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images a run.")] = 2,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with a checkpoint.")] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="Report to this file; - is stdout.")] = None,
) -> None:
    """Compare two models on real images: forced tensors and matched detections. Exit code 3 if they differ."""
    from .. import parity
    from ..compare import Gate
    from ..images import expand_inputs
    from . import show

    show.check_json(json_file)
    gate = Gate(threshold=threshold, box_px=box_px, score=score)
    paths: list[Path] = [found.path for found in expand_inputs(images)][:limit]
    with show.progress() as step:
        report = parity.verify(
            against,
            candidate,
            paths,
            gate=gate,
            batch_size=batch,
            trust_remote_code=trust_remote_code,
            progress=lambda done, total: step("verify", done / total, f"{done} of {total} images"),
        )
    if json_file:
        show.write_json(report.to_dict(), json_file)
    if json_file != "-":
        rows = [
            ("detections compared", str(report.compared), ""),
            ("missing / extra", f"{sum(m.missing for m in report.images)} / {sum(m.extra for m in report.images)}", "0 / 0"),
            ("largest box difference", f"{report.worst_box_px:.4f} px", f"{gate.box_px} px"),
            ("largest score difference", f"{report.worst_score:.2e}", f"{gate.score:.0e}"),
        ]
        if report.tensors:
            rows.append(("largest tensor difference", f"{report.worst_tensor:.2e}", f"{gate.tensor:.0e}"))
        show.table(f"{report.candidate} against {report.reference}, {len(report.images)} images", ("", "measured", "allowed"), rows, right=(1, 2))
        print("verdict: the same detections" if report.passed else "verdict: DIFFERENT")
    parity.require(report)
