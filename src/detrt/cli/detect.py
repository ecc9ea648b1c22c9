"""`detrt detect`: find objects in images and videos."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DetrtError, ImageError, SessionError, SpecError

if TYPE_CHECKING:
    from ..data.images import Input


_CLUSTER = "On a cluster (docs/guide/cluster.md)"


def detect(
    model: Annotated[
        str,
        typer.Argument(help="Bundle folder, .onnx, .engine, checkpoint folder, hf:org/name, ckpt:FILE or embedded:name."),
    ],
    inputs: Annotated[list[str], typer.Argument(help="Images, videos, folders (searched at any depth), patterns.")],
    threshold: Annotated[float, typer.Option("--threshold", "-t", help="Keep scores above it.")] = 0.5,
    classes: Annotated[str | None, typer.Option(help="Keep these classes: names or ids, with commas.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="What to find, for models that take a prompt: 'a cat. a remote control.'")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Text file with the prompt.")] = None,
    classes_from: Annotated[
        Path | None, typer.Option(help="Text file of class names, one a line, as the prompt; as many as you like.")
    ] = None,
    task: Annotated[str, typer.Option(help="Sentence for models that take one; default: 'Detect NAMES.'")] = "",
    phrases: Annotated[
        str, typer.Option(help="Name a box by its best phrase (best), or by tokens as published (tokens, tokens-of-best).")
    ] = "best",
    text_threshold: Annotated[float | None, typer.Option(help="Of --phrases tokens: tokens with scores above it (0.25).")] = None,
    max_detections: Annotated[int | None, typer.Option(help="Keep at most so many in an image.")] = None,
    save_dir: Annotated[Path | None, typer.Option(help="Folder for annotated copies and detections.jsonl.")] = None,
    draw: Annotated[bool, typer.Option("--draw/--no-draw", help="Annotated copies in --save-dir.")] = True,
    json_file: Annotated[str | None, typer.Option("--json", help="JSON lines to this file; - is stdout.")] = None,
    csv_file: Annotated[str | None, typer.Option("--csv", help="CSV to this file; - is stdout.")] = None,
    coco_file: Annotated[str | None, typer.Option("--coco", help="COCO results to this file; - is stdout.")] = None,
    coco_images: Annotated[
        Path | None, typer.Option(help="COCO annotations that give --coco its image and category ids.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Images a run.")] = None,
    size: Annotated[str | None, typer.Option(help="Input size, HEIGHTxWIDTH or one number.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Take every n-th frame of a video.")] = 1,
    backend: Annotated[str, typer.Option(help="auto, onnxruntime, tensorrt, inductor or torch.")] = "auto",
    provider: Annotated[str, typer.Option(help="ONNX Runtime: cpu, cuda or cuda:1.")] = "cpu",
    device: Annotated[str | None, typer.Option(help="TensorRT, PyTorch: cuda:0, cpu.")] = None,
    devices: Annotated[
        str | None, typer.Option(help="Several devices, a worker process for each: 0,1 or all or cpu,cpu.")
    ] = None,
    image_decoder: Annotated[
        str, typer.Option(help="Decode JPEG files and videos on the cpu, or on the gpu that runs the model.")
    ] = "cpu",
    threads: Annotated[int | None, typer.Option(help="ONNX Runtime: threads.")] = None,
    spec_file: Annotated[Path | None, typer.Option("--spec", help="Spec of an ONNX file that has none.")] = None,
    family: Annotated[str | None, typer.Option(help="Family of ckpt:FILE, where its keys do not tell.")] = None,
    labels: Annotated[Path | None, typer.Option(help="Class names of a checkpoint: a text file, one a line, or JSON.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Of a checkpoint that takes a prompt: tokenizer.json or vocab.txt.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a checkpoint.")
    ] = False,
    font: Annotated[Path | None, typer.Option(help="TrueType font for class names that are not ASCII.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Run on a cluster: ray.", rich_help_panel=_CLUSTER)] = None,
    output: Annotated[
        str | None, typer.Option(help="Folder or address for Parquet and COCO results.", rich_help_panel=_CLUSTER)
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="auto, HOST:6379 or ray://HOST:10001; default: this machine.", rich_help_panel=_CLUSTER)
    ] = None,
    actors: Annotated[int | None, typer.Option(help="Workers; default: as many as fit.", rich_help_panel=_CLUSTER)] = None,
    gpus_per_actor: Annotated[
        float | None, typer.Option(help="0 to 1, e.g. 0.5; default: 1 where there are GPUs.", rich_help_panel=_CLUSTER)
    ] = None,
    cpus_per_actor: Annotated[
        float | None, typer.Option(help="CPUs of a worker, for decoding too (1).", rich_help_panel=_CLUSTER)
    ] = None,
    shard: Annotated[
        int | None, typer.Option(help="Images that a worker does at a time, rows of a file (256).", rich_help_panel=_CLUSTER)
    ] = None,
    retry_bad: Annotated[
        bool, typer.Option("--retry-bad", help="Do files with unreadable images again.", rich_help_panel=_CLUSTER)
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge/--no-merge", help="One coco.json of all results at the end.", rich_help_panel=_CLUSTER)
    ] = True,
    skip_bad: Annotated[bool, typer.Option("--skip-bad/--strict", help="Go on after an unreadable image, or stop.")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, lines or summary.")] = False,
) -> None:
    """Find objects in images and videos.

    Without an output option, one line for each image is printed.

    Exit code 0: all done; 2: something was wrong, or inputs were skipped; the outputs hold the others.
    """
    from rich.console import Console

    from ..backends.onnxruntime.session import read_spec
    from ..data import sinks as outputs
    from ..data.coco import load_coco
    from ..data.images import expand_inputs
    from ..detector import IMAGE_DECODERS, Detector
    from ..jobs.annotate import AnnotatedCopies
    from ..jobs.pool import DevicePool
    from ..jobs.run import Bad, detect_inputs, outside_of
    from ..text.postprocess import TEXT_THRESHOLD
    from ..text.prompts import chosen_prompt
    from .cluster import check_options, detect_on_cluster
    from .options import image_decoder_choice

    size_hw = parse_size(size)
    check_range(threshold, batch, max_detections)
    if text_threshold is not None and not 0 <= text_threshold <= 1:
        raise SpecError(f"--text-threshold must be from 0 to 1; got {text_threshold}")
    if text_threshold is not None and phrases == "best":
        raise DetrtError("--text-threshold does nothing without --phrases tokens; give both, or leave it out")
    asked = chosen_prompt(prompt, prompt_file, classes_from)
    alone = {"--save-dir": save_dir, "--json": json_file, "--csv": csv_file, "--coco": coco_file, "--devices": devices}
    alone |= {
        "--device": device,
        "--provider": provider != "cpu",
        "--every": every != 1,
        "--font": font,
        "--strict": not skip_bad,
    }
    spread = {"workers": actors, "gpus": gpus_per_actor, "cpus": cpus_per_actor, "shard": shard, "address": ray_address}
    names = ("--actors", "--gpus-per-actor", "--cpus-per-actor", "--shard", "--ray-address")
    check_options(
        cluster,
        output,
        alone,
        dict(zip(names, (v is not None for v in spread.values()), strict=True))
        | {"--retry-bad": retry_bad, "--no-merge": not merge},
    )
    jsonl = None if save_dir is None else save_dir / "detections.jsonl"
    outputs.check_stdout_once([jsonl, json_file, csv_file, coco_file])
    opening = {
        "backend": backend,
        "threads": threads,
        "spec": None if spec_file is None else read_spec(spec_file),
        "trust_remote_code": trust_remote_code,
        "family": family,
        "labels": labels,
        "tokenizer": tokenizer,
    }
    options = {
        "threshold": threshold,
        "batch_size": batch,
        "size_hw": size_hw,
        "classes": None if classes is None else [name for name in classes.split(",") if name.strip()],
        "max_detections": max_detections,
        "prompt": asked,
        "task": task,
        "phrases": phrases,
        "text_threshold": TEXT_THRESHOLD if text_threshold is None else text_threshold,
    }
    if image_decoder_choice(image_decoder) != IMAGE_DECODERS[0]:  # a cluster's results are bound to what is given here
        options["image_decoder"] = image_decoder
    if cluster is not None:
        assert output is not None
        config = {key: value for key, value in spread.items() if value is not None} | {"retry_bad": retry_bad, "merge": merge}
        detect_on_cluster(
            model,
            inputs,
            output,
            config=config,
            session=opening,
            detector=options,
            coco_images=coco_images,
            quiet=quiet,
        )
        return
    if coco_images is not None and coco_file is None:
        raise DetrtError("--coco-images does nothing without --coco FILE; give both")
    found_inputs = expand_inputs(inputs)
    if save_dir is not None:
        found_inputs = outside_of(save_dir, found_inputs, inputs)
    truth = None if coco_images is None else load_coco(coco_images, annotations=False)
    if truth is not None:
        for source in found_inputs:  # now, rather than after an hour
            truth.image_id(str(source.path))
    annotated = None
    if save_dir is not None and draw:
        annotated = {"folder": save_dir, "inputs": found_inputs, "every": every, "font": font}
    pool = detector = None
    if devices is not None:
        places = devices_alone(devices, device, provider)
        pool = DevicePool(model, places, session=opening, detector=options, copies=annotated, every=every)
    else:
        detector = Detector.open(model, provider=provider, device=device, **opening, **options)
    runner = pool or detector.session  # what the spec, the note and the name of the back end come from
    console = Console(stderr=True, quiet=quiet)
    bad: list[Path] = []
    counts: Counter[str] = Counter()
    images = 0
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_reader_may_leave())
        stack.enter_context(pool or detector)
        if detector is not None:
            detector.check_prompt()
        if runner.info.notes:
            _say(console, f"note: {runner.info.note}", "yellow")
        writers = [stack.enter_context(outputs.jsonl_writer(path)) for path in (jsonl, json_file) if path is not None]
        if csv_file is not None:
            writers.append(stack.enter_context(outputs.csv_writer(csv_file)))
        if coco_file is not None:
            writers.append(stack.enter_context(outputs.coco_writer(coco_file, runner.spec, truth)))
        if not (writers or quiet):
            writers.append(stack.enter_context(outputs.text_writer()))
        copies = None
        if annotated is not None and pool is None:
            copies = stack.enter_context(AnnotatedCopies(**annotated))
        step = _progress(stack, console, len(found_inputs), quiet)
        found = pool.detect_inputs(found_inputs) if pool else detect_inputs(detector, found_inputs, every=every)
        for item in found:
            step(item.input)
            if isinstance(item, Bad):
                if not skip_bad:
                    raise item.error
                bad.append(item.input.path)
                _say(Console(stderr=True), f"skipped: {item.error}", "red")
                continue
            for write in writers:
                write(item.record)
            if copies is not None:
                copies.save(item)
            images += 1
            counts.update(item.record.detections.labels)
    decoder = None if detector is None else detector.decoder
    _summary(console, runner.info.name, images, len(bad), counts, time.perf_counter() - started, str(decoder or ""))
    if bad:
        raise ImageError(
            f"{len(bad)} of {len(found_inputs)} inputs could not be read: {', '.join(map(str, bad[:3]))}"
            f"{' ...' if len(bad) > 3 else ''}; all others were done"
        )


def parse_size(text: str | None) -> tuple[int, int] | None:
    """ "480x640" -> (480, 640); "640" -> (640, 640). Raises SpecError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,5})(?:[x,](\d{1,5}))?", text.strip().lower())
    if not match or int(match[1]) < 1 or int(match[2] or 1) < 1:
        raise SpecError(f"--size must be HEIGHTxWIDTH or one number, e.g. 480x640; got {text!r}")
    return int(match[1]), int(match[2] or match[1])


def devices_alone(devices: str, device: str | None, provider: str) -> tuple[str, ...]:
    """The parsed --devices, which says where to run by itself. Raises SessionError."""
    from ..system import parse_devices

    for name, given in (("--device", device), ("--provider", None if provider == "cpu" else provider)):
        if given is not None:
            raise SessionError(f"--devices {devices} says where to run; leave out {name} {given}")
    return parse_devices(devices)


def check_range(threshold: float, batch: int | None, max_detections: int | None) -> None:
    """Check numbers before anything is opened. Raises SpecError."""
    if not 0 <= threshold <= 1:
        raise SpecError(f"--threshold must be from 0 to 1; got {threshold}")
    for name, value in (("--batch", batch), ("--max-detections", max_detections)):
        if value is not None and value < 1:
            raise SpecError(f"{name} must be at least 1; got {value}")


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """End quietly when the reader of stdout has gone (`| head`); other outputs are then left out."""
    try:
        yield
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give it a sink.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


def _say(console: Any, text: str, style: str) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _progress(stack: contextlib.ExitStack, console: Any, total: int, quiet: bool) -> Callable[[Input], None]:
    """A function to call with the input of every result; shows a bar on a terminal only."""
    if quiet or not console.is_terminal:
        return lambda source: None
    from rich import progress
    from rich.markup import escape

    columns = (
        progress.TextColumn("detect"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.description}"),
    )
    bar = stack.enter_context(progress.Progress(*columns, console=console, transient=True))
    task = bar.add_task("", total=total)
    done: set[Input] = set()

    def step(source: Input) -> None:
        done.add(source)
        # Markup in a file name must not be read as such.
        bar.update(task, completed=len(done), description=escape(source.path.name))

    return step


def _summary(console: Any, backend: str, images: int, bad: int, counts: Counter[str], seconds: float, decoded: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=None, box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("images", f"{images}" + (f" ({bad} skipped)" if bad else ""))
    found = ", ".join(f"{number} {label}" for label, number in counts.most_common(8))
    table.add_row("detections", Text(f"{sum(counts.values())}" + (f": {found}" if found else "")))
    if len(counts) > 8:
        table.add_row("", f"and {len(counts) - 8} more classes")
    rate = f", {images / seconds:.1f} images/s with reading and writing" if images and seconds > 0 else ""
    table.add_row("time", f"{seconds:.2f} s{rate}")
    table.add_row("ran on", backend)
    if decoded:
        table.add_row("decoded", decoded)
    console.print(table)
