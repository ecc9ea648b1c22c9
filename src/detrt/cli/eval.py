"""`detrt eval`: COCO average precision of a model, or of results that were saved before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    model: Annotated[str | None, typer.Argument(help="Bundle, .onnx, .engine or checkpoint; leave out with --results.")] = None,
    ground_truth: Annotated[Path | None, typer.Option(help="Annotations in COCO's format.")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of the annotated images.")] = None,
    results: Annotated[Path | None, typer.Option(help="Evaluate these saved results instead of running a model.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images a run.")] = 4,
    resume: Annotated[Path | None, typer.Option(help="State file: written batch by batch, and gone on from.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first so many images.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the detections as a COCO results file.")] = None,
    backend: Annotated[str, typer.Option(help="auto, onnxruntime, tensorrt, inductor or torch.")] = "auto",
    provider: Annotated[str, typer.Option(help="Of ONNX Runtime: cpu or cuda.")] = "cpu",
    device: Annotated[str | None, typer.Option(help="Of TensorRT and PyTorch: cuda:0, cpu.")] = None,
    devices: Annotated[
        str | None, typer.Option(help="Several devices, a worker process for each: 0,1 or all or cpu,cpu.")
    ] = None,
    image_decoder: Annotated[str, typer.Option(help="Decode JPEG files on the cpu, or on the gpu that runs the model.")] = "cpu",
    labels: Annotated[Path | None, typer.Option(help="Class names of a checkpoint: a text file, one a line, or JSON.")] = None,
    family: Annotated[str | None, typer.Option(help="Family of ckpt:FILE, where its keys do not tell.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a checkpoint.")
    ] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="Figures to this file; - is stdout.")] = None,
) -> None:
    """COCO average precision: all twelve figures and one for each class."""
    from ..backends.open import open_session
    from ..data.coco import load_coco
    from ..errors import DetrtError
    from ..evaluation.coco import evaluate_coco, evaluate_results, identity
    from ..evaluation.results import write_results
    from ..jobs.pool import DevicePool
    from . import show
    from .detect import devices_alone
    from .options import image_decoder_choice

    if ground_truth is None:
        raise DetrtError("detrt eval needs annotations; give --ground-truth FILE (COCO instances JSON)")
    if results is not None:
        if model is not None or images is not None or resume is not None:
            raise DetrtError("--results evaluates what was saved, without a model; leave out MODEL, --images and --resume")
        report = evaluate_results(results, ground_truth, limit=limit)
        name = str(results)
    else:
        if model is None or images is None:
            raise DetrtError("give MODEL and --images DIR, or --results FILE to evaluate saved results")
        name = model
        opening = {"backend": backend, "trust_remote_code": trust_remote_code, "family": family, "labels": labels}
        if devices is not None:
            places = devices_alone(devices, device, provider)
            categories = load_coco(ground_truth).categories
            choices = {"threshold": 0.0, "batch_size": batch, "image_decoder": image_decoder_choice(image_decoder)}
            session = DevicePool(model, places, session=opening, detector=choices, categories=categories)
            detect_batches = session.detect_batches
        else:
            detect_batches = None
            session = open_session(model, provider=provider, device=device, **opening)
        try:
            with show.progress() as step:
                report = evaluate_coco(
                    session,
                    ground_truth,
                    images,
                    batch_size=batch,
                    image_decoder=image_decoder_choice(image_decoder),
                    detect_batches=detect_batches,
                    resume=resume,
                    limit=limit,
                    model=identity(model, session),
                    progress=lambda count, total: step("eval", count / total, f"{count} of {total} images"),
                )
        finally:
            session.close()
    if save is not None:
        write_results(report.rows, save)
    data = {"model": name, **report.to_dict()}
    if json_file:
        show.write_json(data, json_file)
    if json_file == "-":
        return
    resumed = f", {report.resumed} resumed" if report.resumed else ""
    figures = [(key, _text(value)) for key, value in report.metrics.items()]
    show.table(f"{name}: {report.images} images{resumed}, {report.detections} detections", ("", "value"), figures, right=(1,))
    classes = sorted(((k, v) for k, v in report.per_class.items() if v is not None), key=lambda row: -row[1])
    show.table("AP by class", ("class", "AP"), [(key, _text(value)) for key, value in classes], right=(1,))
    if report.without_class:
        print(f"annotated, but not found by this model: {', '.join(report.without_class)}")


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
