"""`detrt verify`: does a candidate detect the same things as a reference?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer


def verify(
    candidate: Annotated[str, typer.Argument(help="Bundle, .onnx, .engine or checkpoint to check.")],
    images: Annotated[list[str], typer.Option(help="Images or folders; repeat for several.")],
    against: Annotated[
        str | None, typer.Option(help="The reference; default: the checkpoint that the bundle was made from.")
    ] = None,
    ground_truth: Annotated[Path | None, typer.Option(help="COCO annotations of the images: compare the AP as well.")] = None,
    backend: Annotated[
        str, typer.Option(help="Of the candidate, a bundle or file: auto, onnxruntime, tensorrt or inductor.")
    ] = "auto",
    provider: Annotated[str, typer.Option(help="Of the candidate, for ONNX Runtime: cpu or cuda.")] = "cpu",
    device: Annotated[str | None, typer.Option(help="Of the candidate, for TensorRT and packages: cuda:0.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Take the gates of fp32, tf32, fp16, bf16, int8 or fp8; default: the candidate's own.")
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="Compare detections with at least this score (0.3).")] = None,
    box_px: Annotated[float | None, typer.Option(help="Largest allowed difference of a box side, pixels.")] = None,
    score: Annotated[float | None, typer.Option(help="Largest allowed difference of a score.")] = None,
    tensor: Annotated[float | None, typer.Option(help="Largest allowed relative difference of an output.")] = None,
    ap: Annotated[float | None, typer.Option(help="Largest allowed loss of AP (0..1).")] = None,
    unmatched: Annotated[float | None, typer.Option(help="Share of detections that may have no partner.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first so many images.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images a run.")] = 2,
    batches: Annotated[
        str | None, typer.Option(help="Batches whose slots are checked, e.g. 1,4,8; default: the profile's.")
    ] = None,
    divergence: Annotated[str, typer.Option(help="Search where the graphs part: auto (on failure), always or never.")] = "auto",
    report: Annotated[Path | None, typer.Option(help="Write one self-contained HTML page.")] = None,
    pictures: Annotated[int, typer.Option(min=0, max=50, help="Pictures in the report, the worst first.")] = 6,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Of a checkpoint that takes a prompt: tokenizer.json or vocab.txt.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="Class names that the bundle was built with, if not the checkpoint's.")
    ] = None,
    family: Annotated[str | None, typer.Option(help="Family of ckpt:FILE, where its keys do not tell.")] = None,
    prompt: Annotated[str | None, typer.Option(help="What to find, for models that take a prompt: 'a cat. a dog.'")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Text file with the prompt.")] = None,
    classes_from: Annotated[Path | None, typer.Option(help="Text file of class names, one a line, as the prompt.")] = None,
    task: Annotated[str, typer.Option(help="Sentence for models that take one; default: 'Detect NAMES.'")] = "",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a checkpoint.")
    ] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="Result to this file; - is stdout.")] = None,
) -> None:
    """Compare two models on real images: tensors, batch slots, detections, AP. Exit code 3 if they differ."""
    from ..data.images import expand_inputs
    from ..evaluation import parity
    from ..evaluation.html import figures
    from ..evaluation.matching import Gate, gate_for
    from ..text.prompts import chosen_prompt
    from . import show

    show.check_json(json_file)
    changes = {
        "threshold": threshold, "box_px": box_px, "score": score, "tensor": tensor, "ap": ap, "unmatched": unmatched
    }  # fmt: skip
    changes = {name: value for name, value in changes.items() if value is not None}
    gate: Gate | None = None if precision is None else replace(gate_for(precision), **changes)
    paths: list[Path] = [found.path for found in expand_inputs(images)][:limit]
    with show.progress() as step:
        done = parity.verify(
            against,
            candidate,
            paths,
            gate=gate,
            gate_changes=changes,
            batch_size=batch,
            trust_remote_code=trust_remote_code,
            ground_truth=ground_truth,
            batches=_numbers(batches),
            divergence="always" if report is not None and divergence == "auto" else divergence,
            pictures=pictures if report is not None else 0,
            labels=labels,
            tokenizer=tokenizer,
            prompt=chosen_prompt(prompt, prompt_file, classes_from),
            task=task,
            family=family,
            opening={"backend": backend, "provider": provider, "device": device},
            progress=lambda count, total: step("verify", count / total, f"{count} of {total} images"),
            say=lambda text: step(text, None, ""),
        )
    if json_file:
        show.write_json(done.to_dict(), json_file)
    if report is not None:
        from ..evaluation.html import write_report

        write_report(done, report, candidate=candidate, reference=against or "the checkpoint it was made from")
    if json_file != "-":
        title = f"{done.candidate} ({done.precision}) against {done.reference}, {len(done.images)} images"
        lines = [(f.name, f.measured, f.allowed + ("" if f.judged else " (AP decides)")) for f in figures(done)]
        show.table(title, ("", "measured", "allowed"), lines, right=(1, 2))
        for note in done.notes:
            print(f"note: {note}")
        if done.divergence is not None:
            print(done.divergence.sentence())
        for failure in done.failures:
            print(f"failed: {failure}")
        print("verdict: the same detections" if done.passed else "verdict: DIFFERENT")
    parity.require(done)


def _numbers(text: str | None) -> list[int] | None:
    from ..errors import DetrtError

    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise DetrtError(f"--batches must be numbers such as 1,4,8; got {text!r}")
    return [int(part) for part in parts]
