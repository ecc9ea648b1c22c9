"""`detrt detect`: find objects in images and videos."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..class_names import split_classes
from ..data.arguments import IMAGE_DECODER, INPUT_SIZE, check_image_decoder, read_class_thresholds
from ..data.stream_config import StreamConfig
from ..errors import DetrtError, SpecError, check_range
from ..models.load_options import LoadOptions
from ..system import CPU
from . import outputs
from .cluster import ClusterOptions, check_alone, detect_on_cluster
from .live import LiveOptions, TrackOptions, check_live, detect_live, find_sources
from .options import OVERLAP, TILE, Given, GivenTuning, PromptOptions, RunOptions, command
from .outputs import OutputOptions

if TYPE_CHECKING:
    from ..backends.search import SessionOptions
    from ..detector import Detector, DetectorOptions


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """What is done with images, as the command line has it.

    Raises:
        SpecError: a number out of range. DetrtError: an unknown decoder.
    """

    threshold: float = field(default=0.5, metadata={"help": "Lowest score to keep.", "flag": "threshold t"})
    classes: tuple[str, ...] | None = field(
        default=None,
        metadata={
            "help": "Classes to keep: comma-separated names, or ids as id:3; may be repeated.",
            "parse": split_classes,
            "many": True,
        },
    )
    class_thresholds: tuple[tuple[str, float], ...] = field(
        default=(),
        metadata={
            "help": "Thresholds of classes, instead of --threshold: person=0.6,car=0.4, or FILE.json; may be repeated.",
            "parse": read_class_thresholds,
            "many": True,
        },
    )
    phrases: str = field(
        default="best",
        metadata={
            "help": "Label of a box: its best phrase (best), or tokens as published (tokens, tokens-of-best).",
            "panel": "Prompt",
        },
    )
    text_threshold: float | None = field(
        default=None,
        metadata={
            "help": "Token score threshold (0.25).",
            "panel": "Prompt",
            "needs": {"phrases": ("tokens", "tokens-of-best")},
        },
    )
    max_detections: int | None = field(default=None, metadata={"help": "Largest number of detections per image."})
    batch: int | None = field(default=None, metadata={"help": "Batch size; default: the model's own.", "panel": "Size"})
    size: tuple[int, int] | None = field(default=None, metadata=INPUT_SIZE)
    tile: tuple[int, int] | None = field(default=None, metadata=TILE)
    overlap: float | None = field(default=None, metadata=OVERLAP)
    image_decoder: str = field(default="cpu", metadata=IMAGE_DECODER)

    def __post_init__(self) -> None:
        from ..data.tiles import make_tiling

        make_tiling(self.tile, self.overlap)
        for name, value in (("--threshold", self.threshold), ("--text-threshold", self.text_threshold)):
            if value is not None:
                check_range(name, value, 0, 1, SpecError)
        for name, value in (("--batch", self.batch), ("--max-detections", self.max_detections)):
            if value is not None and value < 1:
                raise SpecError(f"{name} must be at least 1; got {value}")
        if len(dict(self.class_thresholds)) < len(self.class_thresholds):
            raise SpecError("--class-thresholds names a class twice; give it one threshold")
        check_image_decoder(self.image_decoder)

    def make(self, prompt: PromptOptions) -> DetectorOptions:
        from ..data.token_labels import TEXT_THRESHOLD
        from ..detector import DetectorOptions

        return DetectorOptions(
            threshold=self.threshold,
            batch_size=self.batch,
            size=self.size,
            classes=None if self.classes is None else list(self.classes),
            class_thresholds=dict(self.class_thresholds) or None,
            max_detections=self.max_detections,
            image_decoder=self.image_decoder,
            tile=self.tile,
            overlap=self.overlap,
            prompt=prompt.read(),
            task=prompt.task,
            phrases=self.phrases,
            text_threshold=TEXT_THRESHOLD if self.text_threshold is None else self.text_threshold,
        )


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How a model is opened, beside its backend and device."""

    threads: int | None = field(
        default=None,
        metadata={"help": "Threads of a model that runs on a CPU; default: all cores.", "panel": "Advanced", "min": 1},
    )
    spec: Path | None = field(default=None, metadata={"help": "Spec of an ONNX file that has none.", "panel": "Advanced"})


# So many images are resized on the CPU, to the same pixels: a process needs seconds to load PyTorch and to compile the kernels that
# resize on a GPU, and milliseconds for an image on the CPU.
FEW_IMAGES = 16


@command
def detect(
    model: Annotated[
        str,
        typer.Argument(help="Bundle folder, .onnx, .engine, checkpoint folder, hf:org/name, ckpt:FILE or embedded:name."),
    ],
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Images, also https://..., videos, folders (searched at any depth), patterns; or cameras: rtsp://..., /dev/video0."
        ),
    ],
    detector: ImageOptions,
    prompt: PromptOptions,
    output: Given[OutputOptions],
    run: Given[RunOptions],
    opening: OpenOptions,
    tuning: GivenTuning,
    load: LoadOptions,
    cluster: ClusterOptions,
    live: Given[LiveOptions],
    stream: Given[StreamConfig],
    track: TrackOptions,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, lines or summary.")] = False,
) -> None:
    """Find objects in images, videos and cameras.

    Without an output option, one line for each image is printed.

    Exit code 0: all done; 2: something was wrong, or inputs were skipped; the outputs hold the others.
    """
    from ..backends.search import SessionOptions
    from ..data.sinks import check_stdout_once
    from ..spec import read_spec_file
    from . import show

    choices = detector.make(prompt)
    if not quiet:
        show.notes(prompt.notes())
    spec = None if opening.spec is None else read_spec_file(opening.spec)
    session = SessionOptions(run.backend, threads=opening.threads, tuning=tuning.arguments(), spec=spec, load=load)
    sources = find_sources(inputs, live, stream)
    if cluster.cluster is not None:
        check_alone(output, run)
        if prompt.query_image:
            raise DetrtError(
                "--query-image shows what to find on this machine, and --cluster detects on others; leave one of them out"
            )
        if track.track:
            raise DetrtError("--track follows objects through one video, and --cluster spreads frames; leave one of them out")
        if sources:
            raise DetrtError(f"--cluster detects in files, and '{sources[0].path}' is a camera; leave --cluster out")
        detect_on_cluster(model, inputs, cluster, session=session, detector=choices, coco_images=output.coco_images, quiet=quiet)
        return
    options = output.make()
    if options.coco_images is not None and options.coco_file is None:
        raise DetrtError("--coco-images does nothing without --coco FILE; give both")
    check_stdout_once([options.jsonl, options.json_file, options.csv_file, options.coco_file])
    if not sources:
        _detect_here(model, inputs, options, run.make(), session, choices, track, quiet)
        return
    check_live(output, run.device)
    with _open_for_cameras(model, run.make(), session, choices, len(sources)) as opened:
        detect_live(opened, sources, stream.make(), live.make(), options, track.make(), quiet)


def _detect_here(
    model: str,
    names: list[str],
    output: OutputOptions,
    run: RunOptions,
    session: SessionOptions,
    choices: DetectorOptions,
    track: TrackOptions,
    quiet: bool,
) -> None:
    """Detect on this machine: in this process, or with several devices in one for each."""
    from rich.console import Console

    from ..data.coco import load_coco
    from ..data.given import typed_inputs
    from ..data.sinks import TRACK_COLUMNS
    from ..detector import Detector
    from ..jobs.annotate import AnnotatedCopies, ObjectFiles
    from ..jobs.pool import DevicePool
    from ..jobs.run import detect_inputs, exclude_outputs
    from ..jobs.track import track_objects
    from . import show

    inputs = typed_inputs(names)
    if output.save_dir is not None:
        inputs = exclude_outputs(output.save_dir, inputs, names)
    if output.every > 1 and not any(source.kind == "video" for source in inputs):
        raise DetrtError("--every is for videos, and there is none among the inputs; leave it out")
    truth = None if output.coco_images is None else load_coco(output.coco_images, annotations=False)
    if truth is not None:
        for source in inputs:  # now, rather than after an hour
            truth.image_id(source.name)
    if output.save_crops is not None and len(run.device) > 1 and any(source.kind == "video" for source in inputs):
        raise DetrtError(f"--save-crops of videos runs on one device; got --device {','.join(run.device)}")
    tracker = track.make_for_files(inputs, run.device)
    copies = None
    if output.save_dir is not None and output.draw:
        copies = {"folder": output.save_dir, "inputs": inputs, "every": output.every, "font": output.font}
    console = Console(stderr=True, quiet=quiet)
    with contextlib.ExitStack() as stack:
        stack.enter_context(outputs.reader_may_leave())
        if len(run.device) > 1:
            pool = DevicePool(model, run.device, session=session, detector=choices, copies=copies, every=output.every)
            runner: Any = stack.enter_context(pool)
            found = pool.detect_inputs(inputs)
        else:
            if len(inputs) <= FEW_IMAGES and choices.image_decoder == "cpu" and all(one.kind == "image" for one in inputs):
                choices = replace(choices, on_device=False)
            detector = stack.enter_context(Detector.with_options(model, choices, replace(session, device=run.one_device())))
            detector.check_prompt()
            runner = detector.session
            found = detect_inputs(detector, inputs, every=output.every)
            if tracker is not None:
                found = track_objects(found, tracker)
        started = time.perf_counter()
        if not quiet:
            show.notes(_notes(runner, choices.max_detections))
        step = outputs.progress_bar(stack, len(inputs), quiet)  # before the writers: their lines go above the bar
        columns = TRACK_COLUMNS if tracker is not None else []
        writers = outputs.open_writers(stack, output, runner.spec, truth, quiet, columns)
        saves = []
        if copies is not None and len(run.device) < 2:
            saves.append(stack.enter_context(AnnotatedCopies(**copies)).save)
        if output.save_txt is not None or output.save_crops is not None:
            saves.append(ObjectFiles(inputs, labels=output.save_txt, crops=output.save_crops).save)
        tally = outputs.write_all(found, writers, saves, step, strict=not output.skip_bad)
    decoder = None if len(run.device) > 1 else detector.decoder
    outputs.summary(console, runner.info.name, tally, time.perf_counter() - started, str(decoder or ""))
    tally.check(len(inputs))


def _notes(runner: Any, max_detections: int | None) -> list[str]:
    """What the user of a session is told before the results."""
    from ..detector import more_than_given

    notes = [runner.info.note] if runner.info.notes else []
    if note := more_than_given(max_detections, runner.spec):
        notes.append(f"--max-detections {note}")
    return notes


def _open_for_cameras(model: str, run: RunOptions, session: SessionOptions, choices: DetectorOptions, cameras: int) -> Detector:
    """The detector that cameras share; a batch of their frames is faster than one by one on a GPU only."""
    from ..detector import Detector

    opened = open_model(model, run, session)
    if choices.batch_size is None:
        choices = replace(choices, batch_size=1 if opened.info.device == CPU else cameras)
    try:
        return Detector.with_options(opened, choices)
    except BaseException:
        opened.close()
        raise


def open_model(model: str, run: RunOptions, session: SessionOptions) -> Any:
    """The session of a model with the backend and on the one device of `run`, or on the backend's own."""
    from ..backends.open import open_with

    return open_with(model, replace(session, backend=run.backend, device=run.one_device()))
