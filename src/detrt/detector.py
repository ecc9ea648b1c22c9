"""Images in, detections out, through any session."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
import warnings
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypedDict, overload

import numpy as np

from .backends.base import Session, no_prompt
from .backends.batches import Batches, FoundInTiles, PendingDetections
from .backends.prompted import Prompts, require_prompt
from .backends.search import SessionOptions
from .data.addresses import is_web_address
from .data.arguments import (
    check_image_decoder,
    check_integer,
    check_model,
    is_tensor,
    many_images,
    one_image,
    pixel_size,
    read_class_thresholds,
    refuse,
)
from .data.given import AnyImage, as_image, fetch_image, media_of
from .data.images import Input, load_image
from .data.live import LiveSource
from .data.postprocess import DetectionFilter, check_threshold
from .data.prefetch import Prefetcher, ReadImage
from .data.preprocess import SizeHW, check_size, size_words
from .data.raw_image import LoadedImage
from .data.result import ImageDetections
from .data.streams import LiveStreams
from .data.tiles import Tiling, make_tiling
from .data.token_labels import TEXT_THRESHOLD
from .data.track import Tracker
from .errors import ArgumentError, ImageError, PromptError, SessionError, SpecError, check_one_of, no_attribute, number_of
from .models.load_options import LoadChanges, LoadOptions, changed, check_changes
from .spec import ModelSpec
from .system import usable_cores
from .text.prompts import ImageQueries, Prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .backends.gpu.decoder import GpuDecoder

MAX_DECODERS, MAX_READERS = 8, 4  # threads that decode files for a GPU, and that read what a GPU decodes
COLORS = ("rgb", "bgr")


class CallOptions(TypedDict, total=False):
    """Options of one call, instead of the detector's own; None: the detector's.

    threshold: lowest score that is reported, 0 to 1. class_thresholds: name or id of a class -> its threshold, instead of `threshold`.
    classes: names or ids to report. max_detections: most detections of an image. prompt: what to find in all images.
    tile, overlap: see `Detector`.
    """

    threshold: float | None
    class_thresholds: ClassThresholds | None
    classes: Sequence[str | int] | None
    max_detections: int | None
    prompt: Prompts | None
    tile: SizeHW | int | None
    overlap: float | None


ClassThresholds = Mapping[str | int, float] | str | os.PathLike[str]

# Keywords of a call in other libraries -> what to type here.
_KEYWORDS = {
    **dict.fromkeys(("conf", "confidence", "score_threshold", "conf_thres", "score_thr"), "threshold=..."),
    **dict.fromkeys(("iou", "iou_threshold", "agnostic_nms", "nms"), "nothing: detectors of the DETR family need no NMS"),
    **dict.fromkeys(("imgsz", "size", "image_size"), "Detector(model, size=...)"),
    **dict.fromkeys(("device", "half"), "Detector(model, device=...), and detrt.build for a precision"),
    **dict.fromkeys(("batch", "batch_size"), "Detector(model, batch_size=...)"),
    **dict.fromkeys(("max_det", "topk", "top_k"), "max_detections=..."),
    **dict.fromkeys(("candidate_labels", "text", "text_labels", "class_names"), "prompt=[...]"),
    **dict.fromkeys(("save", "project"), "found.save('out.jpg')"),
    **dict.fromkeys(("save_txt", "save_conf"), "found.to_yolo()"),
    **dict.fromkeys(("save_crop",), "found.crop()"),
    **dict.fromkeys(("show", "visualize"), "found.plot().show()"),
    **dict.fromkeys(("verbose",), "nothing: it prints nothing"),
    **dict.fromkeys(("stream", "source"), "detector.stream(source)"),
    **dict.fromkeys(("persist", "tracker"), "detector.stream(source, track=True)"),
    **dict.fromkeys(("vid_stride",), "detector.stream(source, every=...)"),
    **dict.fromkeys(("augment", "tta"), "nothing: there is no test-time augmentation"),
    **dict.fromkeys(("slice_wh", "slice_size", "slice_height", "slice_width"), "tile=..."),
    **dict.fromkeys(("retina_masks", "target_size", "target_sizes"), "nothing: boxes and masks have the size of the image"),
    **dict.fromkeys(("line_width", "show_labels", "show_conf"), "found.plot()"),
}
_CALLED = "a detector is called: detector(images)"
_METHODS = {
    **dict.fromkeys(("predict", "detect", "infer", "run", "inference", "forward", "predict_with_caption"), _CALLED),
    "track": "use detector.stream(source, track=True)",
    **dict.fromkeys(("val", "evaluate", "validate"), "use detrt.evaluation.coco.evaluate_coco, or in a shell: detrt eval"),
    **dict.fromkeys(("export",), "use detrt.build(checkpoint, folder)"),
    **dict.fromkeys(
        ("train", "fit"), "detrt trains nothing; train with transformers or the authors' code, and then: detrt.build"
    ),
    **dict.fromkeys(("to", "cuda", "cpu"), "use Detector(model, device='cuda:0')"),
    **dict.fromkeys(("half", "optimize_for_inference"), "use detrt.build(checkpoint, folder) with a precision"),
    **dict.fromkeys(("eval", "fuse"), "it is ready as it is"),
    **dict.fromkeys(("class_names", "labels", "id2label", "classes"), "use detector.names"),
    **dict.fromkeys(("model", "device", "predictor", "backend"), "use detector.session, whose info names what it runs on"),
    **dict.fromkeys(("imgsz", "input_size", "resolution"), "use detector.size"),
    **dict.fromkeys(("conf", "confidence"), "use detector.threshold"),
    **dict.fromkeys(("set_classes",), "use detector(images, classes=[...]), or prompt=[...] of a model that takes one"),
    **dict.fromkeys(("warmup",), "detect in one image: detector(image)"),
    **dict.fromkeys(("info", "summary"), "use print(detector)"),
    **dict.fromkeys(("benchmark",), "in a shell: detrt bench MODEL"),
}


def check_call(options: Mapping[str, object]) -> None:
    """Raise TypeError for an option that a call of a detector does not take, with what to type instead."""
    for name in options:
        if name not in CallOptions.__annotations__:
            close = difflib.get_close_matches(name, CallOptions.__annotations__, n=1, cutoff=0.6)
            hint = f"use {_KEYWORDS[name]}" if name in _KEYWORDS else f"did you mean {close[0]}?" if close else ""
            hint = hint or f"it takes: {', '.join(CallOptions.__annotations__)}"
            raise TypeError(f"a call of the detector has no keyword {name!r}; {hint}")


@dataclass(frozen=True, slots=True)
class DetectorOptions:
    """What a detector does with images: the arguments of `Detector` of the same names.

    Raises:
        ValueError, ArgumentError: a value that is not allowed.
    """

    threshold: float = 0.5
    batch_size: int | None = None
    size: SizeHW | int | None = None
    classes: Sequence[str | int] | None = None
    class_thresholds: ClassThresholds | None = None
    max_detections: int | None = None
    tile: SizeHW | int | None = None
    overlap: float | None = None
    resize_threads: int = 1
    on_device: bool = True
    image_decoder: str = "cpu"
    color: str = "rgb"
    prompt: Prompts | None = None
    task: str = ""
    phrases: str = "best"
    text_threshold: float = TEXT_THRESHOLD

    def __post_init__(self) -> None:
        check_threshold(self.threshold)
        check_threshold(self.text_threshold, "text_threshold")
        for name, usual in (("batch_size", None), ("max_detections", None), ("resize_threads", 1)):
            object.__setattr__(self, name, check_integer(getattr(self, name), name) or usual)
        object.__setattr__(self, "size", pixel_size(self.size, "size"))
        make_tiling(self.tile, self.overlap)
        check_image_decoder(self.image_decoder)
        check_one_of("color", self.color, COLORS, ArgumentError)


P = ParamSpec("P")


def _with_parameters_of(
    init: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., Detector]], Callable[Concatenate[Any, P], Detector]]:
    """The parameters of a constructor for another function, as editors and type checkers see them."""
    return lambda function: function


class Detector:
    """Finds objects in images: `Detector("bundle/")("street.jpg")`.

    Args:
        model: a bundle, ONNX file, engine or checkpoint, as `open_session` takes it; or a session. The detector closes it.
        threshold: lowest score that is reported, 0 to 1.
        batch_size: images that run together; None: the fixed or largest batch size of the model, else 1.
        size: (height, width) of the input in pixels, for models with a dynamic size; None: the model's own.
        classes: names or ids to report; None: all.
        class_thresholds: name or id of a class -> its threshold, instead of `threshold`; or the file of them that `detrt eval` writes.
        max_detections: most detections of an image; None: no limit.
        tile: detect in tiles of (height, width) pixels of the image and in the whole image, and join the detections
            (docs/guide/detect.md#large-photographs); None: in the whole image alone.
        overlap: part of a tile's side that neighbours share, 0 to 0.9; None: 0.2.
        resize_threads: threads that resize the images of a batch; more than one pays where the model runs on a GPU.
        on_device: resize and select candidates on the GPU where the session can; the detections are the same.
        image_decoder: "cpu", or "gpu": JPEG files, whose pixels then differ a little, and videos are decoded by the GPU that
            runs the model. What it cannot decode is decoded on the CPU; `decoder.counts` tells how many.
        color: channel order of NumPy arrays: "rgb", or "bgr" as OpenCV reads them. Files and PIL images have one of their own.
        prompt: what to find in all images, for models that take a prompt (docs/guide/prompts.md); None: every call brings its
            own. A text gives its phrases as classes; a list of names runs in as many chunks as it needs; `ImageQueries` shows it.
        task: task sentence, for models that take one.
        phrases: label of a box: "best", its best phrase; "tokens", the tokens above `text_threshold` as published;
            "tokens-of-best", those of its best sub-sentence.
        text_threshold: lowest score of a token, 0 to 1.
        device: "cpu" or "cuda:N"; None: the backend's own. This and all that follow are for a model that is opened here.
        backend: "auto", "onnxruntime", "onnxruntime-rtx", "tensorrt", "inductor", "openvino" or "torch".
        threads: of a model that runs on the CPU. PyTorch has one number for a process: it stays what it was set to last.
        performance: of OpenVINO: "latency", all threads work on one batch, or "throughput", several batches at a time.
        streams: batches at a time with "throughput".
        spec: replaces the spec of an ONNX file.
        load: how a checkpoint is read.
        changes: fields of `LoadOptions` by name, e.g. `trust_remote_code=True`.

    Raises:
        SessionError: nothing there, a backend or device that cannot run it, or image_decoder is "gpu" and the session does not
            resize images on a GPU.
        SpecError: unknown class names, or a size that the model cannot take.
        PromptError: a prompt for a model of fixed classes, classes for one that takes a prompt, or a bad prompt.
        DetrtError: from what opens the model.
        ValueError: threshold, text_threshold, batch_size, max_detections, resize_threads, image_decoder or color out of range.
        TypeError: options of opening for a session that is open already.
    """

    def __init__(
        self,
        model: Session | str | os.PathLike[str],
        *,
        threshold: float = 0.5,
        batch_size: int | None = None,
        size: SizeHW | int | None = None,
        classes: Sequence[str | int] | None = None,
        class_thresholds: ClassThresholds | None = None,
        max_detections: int | None = None,
        tile: SizeHW | int | None = None,
        overlap: float | None = None,
        resize_threads: int = 1,
        on_device: bool = True,
        image_decoder: str = "cpu",
        color: str = "rgb",
        prompt: Prompts | None = None,
        task: str = "",
        phrases: str = "best",
        text_threshold: float = TEXT_THRESHOLD,
        device: str | None = None,
        backend: str = "auto",
        threads: int | None = None,
        performance: str | None = None,
        streams: int | None = None,
        spec: ModelSpec | None = None,
        load: LoadOptions | None = None,
        **changes: Unpack[LoadChanges],
    ) -> None:
        check_changes(Detector.__init__, changes)
        check_model(model, sessions=True)
        options = DetectorOptions(
            threshold, batch_size, size, classes, class_thresholds, max_detections, tile, overlap, resize_threads, on_device,
            image_decoder, color, prompt, task, phrases, text_threshold,
        )  # fmt: skip
        tuning = {"performance": performance, "streams": check_integer(streams, "streams")}
        opening = SessionOptions(backend, device, threads, tuning, spec, load=changed(load, changes))
        self._open(model, options, opening)

    @classmethod
    def with_options(
        cls, model: Session | str | os.PathLike[str], options: DetectorOptions, opening: SessionOptions | None = None
    ) -> Detector:
        """As the constructor, whose arguments are two objects: what is done with images, and how the model is opened."""
        detector = cls.__new__(cls)
        detector._open(model, options, opening or SessionOptions())
        return detector

    def _open(self, model: Session | str | os.PathLike[str], options: DetectorOptions, opening: SessionOptions) -> None:
        if isinstance(model, (str, os.PathLike)):
            from .backends.open import open_with

            session: Session = open_with(model, opening)
        else:
            session = model
            if given := opening.given():
                raise TypeError(f"{', '.join(given)}: options of opening, but this session is open already; leave them out")
        prompt = options.prompt
        try:
            takes_prompt = session.info.text is not None
            if not takes_prompt and (prompt is not None or options.task or options.phrases != "best"):
                raise no_prompt()
            if takes_prompt and options.classes is not None:
                raise PromptError(_NO_CLASSES.format("`classes`"))
            prompt_options = {"task": options.task, "phrases": options.phrases, "text_threshold": options.text_threshold}
            self.session = session if prompt is None else session.bind(prompt, **prompt_options)
            self.spec: ModelSpec = self.session.spec
            self.class_ids = self._ids_of(options.classes)
            self.class_thresholds = self._thresholds_of(options.class_thresholds or {})
            self._choose_batches(options, prompt_options)
        except BaseException:
            if session is not model:
                session.close()
            raise
        self.threshold = options.threshold
        self.max_detections = options.max_detections
        self.tiling = make_tiling(options.tile, options.overlap)
        if note := more_than_given(options.max_detections, self.spec):
            warnings.warn(f"max_detections {note}", stacklevel=3)
        self._color = options.color

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, _METHODS.get(name, ""))

    def __reduce__(self) -> Any:
        raise TypeError(
            "a detector holds an open model and cannot be pickled or copied; open one in each process: Detector('bundle')"
        )

    def _ids_of(self, classes: Sequence[str | int] | None) -> Collection[int] | None:
        """Class ids of names and ids. Raises SpecError for unknown ones."""
        return None if classes is None else frozenset(self.spec.class_ids(classes))

    def _thresholds_of(self, named: ClassThresholds) -> dict[int, float]:
        """Thresholds by class id. Raises SpecError for unknown classes, PromptError for a model that takes a prompt."""
        if isinstance(named, (str, os.PathLike)):
            named = dict(read_class_thresholds(os.fspath(named)))
        if not isinstance(named, Mapping):
            raise refuse(
                "class_thresholds", "a mapping such as {'person': 0.6}, or a file of detrt eval with its thresholds", named
            )
        if named and self.session.info.text is not None:
            raise PromptError(_NO_CLASSES.format("`class_thresholds`"))
        return self.spec.class_thresholds(named.items())

    def _choose_batches(self, options: DetectorOptions, prompt_options: Mapping[str, Any]) -> None:
        """Input size, batch size, and what resizes and decodes the images."""
        info, batch_size = self.session.info, options.batch_size
        self.size = self._checked_size(pixel_size(options.size, "size"))
        runner = self.session.image_runner if options.on_device and self.spec.input.antialias else None
        self.decoder: GpuDecoder | None = None
        if options.image_decoder == "gpu":
            if runner is None:
                raise SessionError(_NO_GPU_DECODING.format(info.name))
            self.decoder = runner.decoder()
        limit = info.fixed_batch or info.max_batch
        self.batch_size = min(batch_size or limit or 1, limit or batch_size or 1)
        self._batches = Batches(
            self.session,
            runner,
            batch_size=self.batch_size,
            size_hw=self.size,
            resize_threads=options.resize_threads,
            prompt_options=prompt_options,
        )
        # Files of a batch are decoded side by side where a GPU would wait for them.
        decoders = 1 if runner is None else min(MAX_DECODERS, usable_cores())
        self._prefetcher = Prefetcher(decoders, decoder=self.decoder, load=self._load)

    def _checked_size(self, size_hw: SizeHW | None) -> SizeHW | None:
        """The input size of all batches; None: the model's rule. Raises SpecError: a size that the model does not take."""
        info = self.session.info
        if info.sizes and size_hw is not None and tuple(size_hw) not in info.sizes:
            raise SpecError(
                f"`size={size_words([size_hw])}`: this bundle was compiled for {size_words(info.sizes)}; give one of them, or none"
            )
        shape = info.pixel_shape
        if size_hw is None and not info.sizes and self.spec.input.dynamic and all(isinstance(side, int) for side in shape[2:]):
            size_hw = shape[2:] or None  # type: ignore[assignment]  # an engine of one size from a model of many
        check_size(self.spec.input, size_hw)
        return size_hw

    @classmethod
    @_with_parameters_of(__init__)
    def open(cls, *args: Any, **kwargs: Any) -> Detector:
        """The same as `Detector(...)`, with the same arguments."""
        return cls(*args, **kwargs)

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a str is an iterable of str as well, and is one image
        self,
        images: AnyImage,
        prompts: Sequence[Prompts] | None = None,
        *,
        skip_bad: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> ImageDetections: ...

    @overload
    def __call__(
        self,
        images: Iterable[AnyImage],
        prompts: Sequence[Prompts] | None = None,
        *,
        skip_bad: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> list[ImageDetections]: ...

    @overload
    def __call__(
        self,
        images: Iterable[AnyImage],
        prompts: Sequence[Prompts] | None = None,
        *,
        skip_bad: bool,
        **options: Unpack[CallOptions],
    ) -> list[ImageDetections | ImageError]: ...

    def __call__(
        self,
        images: AnyImage | Iterable[AnyImage],
        prompts: Sequence[Prompts] | None = None,
        *,
        skip_bad: bool = False,
        **options: Unpack[CallOptions],
    ) -> ImageDetections | list[ImageDetections] | list[ImageDetections | ImageError]:
        """Detect in one image, or in many.

        Args:
            images: an image, or a list or other iterable of such: a path, an http(s) address, which is fetched (at most 64 MiB, 30 s),
                the bytes of a file, an open file, a PIL image, an array (H, W, 3) uint8 in the detector's `color`, or a PyTorch
                tensor (3, H, W) or (H, W, 3), RGB, uint8 or floats from 0 to 1. An array or tensor with four axes is many images.
            prompts: one for each image; images with different prompts share a batch.
            skip_bad: of many images, give the ImageError of one that cannot be read in its place, and go on.
            options: see `CallOptions`.

        Returns:
            The detections of one image; of many, a list of the same length and order.

        Raises:
            ImageError: an image that cannot be read. SessionError: the model failed.
            PromptError: no prompt for a model that takes one, or a bad one. SpecError: unknown class names.
            ValueError: a number out of range. TypeError: what is neither an image nor iterable, or an unknown option.
        """
        if (image := one_image(images)) is not None:
            (found,) = self.stream([image], prompts, **options)
            return found
        return list(self.stream(many_images(images), prompts, skip_bad=skip_bad, **options))

    @overload
    def stream(
        self,
        source: Iterable[AnyImage] | str | os.PathLike[str] | int,
        prompts: Iterable[Prompts] | None = None,
        *,
        skip_bad: Literal[False] = False,
        every: int = 1,
        track: bool = False,
        **options: Unpack[CallOptions],
    ) -> Iterator[ImageDetections]: ...

    @overload
    def stream(
        self,
        source: Iterable[AnyImage] | str | os.PathLike[str] | int,
        prompts: Iterable[Prompts] | None = None,
        *,
        skip_bad: bool,
        every: int = 1,
        track: bool = False,
        **options: Unpack[CallOptions],
    ) -> Iterator[ImageDetections | ImageError]: ...

    def stream(
        self,
        source: Iterable[AnyImage] | str | os.PathLike[str] | int,
        prompts: Iterable[Prompts] | None = None,
        *,
        skip_bad: bool = False,
        every: int = 1,
        track: bool = False,
        **options: Unpack[CallOptions],
    ) -> Iterator[ImageDetections] | Iterator[ImageDetections | ImageError]:
        """Detect in images as they come; holds one batch of images in memory, and `ahead` more while the model works on them. On a CPU
        that is for files and lists; any other iterable is asked for an image when the results of those before have been given.

        Args:
            source: any iterable of images, e.g. a generator of frames; or the name of a folder, a pattern such as "cams/**/*.jpg", a
                video, or a camera ("rtsp://...", "/dev/video0" or 0), whose newest frame is taken each time.
            prompts: see `__call__`, as for `skip_bad` and the options.
            every: take every n-th image, of a folder every n-th frame of its videos.
            track: give objects ids across the frames of a video or a camera, or across the images of an iterable, as 30 per second.

        Yields:
            The detections of each image, in order.

        Raises:
            DetrtError: as `__call__`, and its ValueError and TypeError.
        """
        check_call(options)
        options["max_detections"] = check_integer(options.get("max_detections"), "max_detections")
        media = media_of(source)
        images = [source] if media is None and is_web_address(source) else source
        images = images if media is not None else many_images(images)
        prompt = options.pop("prompt", None)
        if isinstance(prompts, (str, Prompt, ImageQueries)):
            raise PromptError(f"give a list of prompts, one for each image, or prompt=... for all; got one, {prompts!r}")
        if prompts is not None and not isinstance(prompts, Iterable):
            raise refuse("prompts", "a list, one for each image; a threshold is given by its name, threshold=0.3", prompts)
        if prompt is not None and prompts is not None:
            raise PromptError("give prompt=... for all images or prompts, one for each; not both")
        if (prompts is not None or prompt is not None) and not self.session.info.text and not self.session.prompts:
            raise no_prompt()
        if prompts is None and prompt is None:
            self.check_prompt()
        given = None if prompts is None else iter(prompts)
        tracker = Tracker() if track else None
        waiting: deque[tuple[PendingDetections | FoundInTiles | None, list[ReadImage]]] = deque()
        ahead = 0 if isinstance(media, LiveSource) else self.ahead
        if media is None and self._batches.beside and not (isinstance(source, (list, tuple)) and len(source) > self.batch_size):
            ahead = 0  # nothing to prepare meanwhile, or an iterable that may wait for this result before it gives the next image
        with contextlib.closing(self._read(images, media, check_integer(every, "every") or 1, track)) as batches:
            for read in batches:
                good = [item for item in read if not isinstance(item.image, ImageError)]
                if len(good) < len(read) and not skip_bad:
                    while waiting:
                        yield from _in_place(*waiting.popleft(), tracker)
                    raise next(item.image for item in read if isinstance(item.image, ImageError))
                mine = None if given is None else list(itertools.islice(given, len(read)))
                if mine is not None and len(mine) != len(read):
                    raise PromptError("there are fewer prompts than images; give one for each image")
                if prompt is not None:
                    mine = [prompt] * len(read)
                mine = mine and [one for one, item in zip(mine, read, strict=True) if not isinstance(item.image, ImageError)]
                pending = self.submit([item.image for item in good], mine, beside=ahead > 0, **options) if good else None  # type: ignore[misc]
                waiting.append((pending, read))
                if len(waiting) > ahead:
                    yield from _in_place(*waiting.popleft(), tracker)
        for pending, read in waiting:
            yield from _in_place(pending, read, tracker)
        if given is not None and next(given, None) is not None:
            raise PromptError("there are more prompts than images; give one for each image")

    def _read(
        self, images: Any, media: Sequence[Input] | LiveSource | None, every: int, timed: bool
    ) -> Generator[list[ReadImage], None, None]:
        """Batches of images of a source. timed: give images of an iterable times, 30 per second."""
        if isinstance(media, LiveSource):
            with LiveStreams([media], planar=self.planar) as streams:
                while not streams.ended:
                    for frame in streams.next_frames(1):
                        if frame.index % every == 0:
                            yield [ReadImage(media, frame.image, frame.index, frame.time_s)]
                        streams.done(frame)
                    if (lost := streams.lost()) is not None:
                        raise lost[1]
            return
        if media is not None:
            items = self._prefetcher.items(media, ahead=2 * self.batch_size, every=every, planar=self.planar)
            with contextlib.closing(items):  # type: ignore[type-var]  # it is a generator
                while some := list(itertools.islice(items, self.batch_size)):
                    yield some
            return
        numbers = itertools.count(0, every)
        source = itertools.islice(images, 0, None, every)
        while given := list(itertools.islice(source, self.batch_size)):
            read = self._prefetcher.try_batch([self._on_its_device(image) for image in given])
            times = [next(numbers) / 30 if timed else None for _ in read]
            yield [ReadImage(one, image, None, time_s) for one, image, time_s in zip(given, read, times, strict=True)]

    def _on_its_device(self, image: Any) -> Any:
        """A tensor on the device that resizes images, without a copy to the CPU; all else, and what is no image, as it is."""
        if self._batches.runner is not None and is_tensor(image) and str(image.device) == self.session.info.device:
            from .backends.gpu.yuv import gpu_image

            with contextlib.suppress(ImageError):  # `_load` raises it where the image is read
                return gpu_image(image)
        return image

    def _load(self, image: Any) -> LoadedImage:
        """One image of a caller. Raises ImageError."""
        load = load_image if self.decoder is None else self.decoder.open
        if is_web_address(image):
            return fetch_image(image, load)
        return load(self._in_rgb(image) if isinstance(image, np.ndarray) else as_image(image))

    @property
    def names(self) -> dict[int, str]:
        """Class id -> name."""
        return dict(self.spec.labels)

    def _in_rgb(self, image: np.ndarray) -> np.ndarray:
        """An array of OpenCV in RGB; all else as it is."""
        if self._color == "rgb" or image.ndim != 3 or image.shape[2] not in (3, 4):
            return image
        return image[..., [2, 1, 0, 3][: image.shape[2]]]

    def __repr__(self) -> str:
        info, spec = self.session.info, self.spec
        finds = "takes a prompt" if info.text is not None else number_of(len(spec.labels), "class")
        size = self.size or spec.input.size_hw
        return (
            f"<Detector {spec.name or 'unnamed'} ({spec.family}): {finds}, input {size[0]}x{size[1]}, batch size {self.batch_size}, "
            f"{info.name}, threshold {self.threshold:g}>"
        )

    @property
    def ahead(self) -> int:
        """How many batches to `submit` before the result of the first is read."""
        return self._batches.ahead

    @property
    def planar(self) -> bool:
        """Whether frames of videos are best given in 4:2:0, as `YuvImage`: their RGB is then made on the GPU."""
        return self._batches.runner is not None

    def check_prompt(self) -> None:
        """Raise PromptError where the model takes a prompt and the detector has none."""
        require_prompt(self.session)

    def submit(
        self,
        images: Sequence[LoadedImage],
        prompts: Sequence[Prompts] | None = None,
        *,
        threshold: float | None = None,
        class_thresholds: ClassThresholds | None = None,
        classes: Sequence[str | int] | None = None,
        max_detections: int | None = None,
        tile: SizeHW | int | None = None,
        overlap: float | None = None,
        tiling: Tiling | None = None,
        before_run: Callable[[], None] | None = None,
        beside: bool = False,
    ) -> PendingDetections | FoundInTiles:
        """Begin with at most `batch_size` images; the detections are in the `result` of what is returned.

        Where a GPU prepares the images, or a session works on several batches, that goes on meanwhile; otherwise the model has run
        when this returns, unless `beside` is given.

        Args:
            images: arrays (H, W, 3) uint8 RGB, or raw images.
            prompts: see `__call__`.
            threshold, class_thresholds, classes, max_detections, tile, overlap: see `CallOptions`. With tiles the model has run when this
                returns.
            tiling: the same as tile and overlap.
            before_run: called before each run of the model; what it raises ends the work.
            beside: on a CPU, run the model in a thread, one batch after another, while the caller prepares the next images.

        Raises:
            DetrtError: as `__call__`, and its ValueError and TypeError.
        """
        if classes is not None and self.session.info.text is not None:
            raise PromptError(_NO_CLASSES.format("`classes`"))
        class_ids = self.class_ids if classes is None else self._ids_of(classes)
        own = self.class_thresholds if class_thresholds is None else self._thresholds_of(class_thresholds)
        threshold = self.threshold if threshold is None else threshold
        check_threshold(threshold)
        if prompts is None:
            self.check_prompt()
        keep = DetectionFilter(threshold, class_ids, max_detections or self.max_detections, own)
        if tile is not None or overlap is not None:
            tiling = make_tiling(tile, overlap)
        tiling = tiling or self.tiling
        if tiling is not None:
            return self._batches.detect_tiles(images, prompts, tiling, keep, before_run)
        return self._batches.begin(images, prompts, keep, before_run, beside)

    def close(self) -> None:
        """Release the model and the threads."""
        self._prefetcher.close()
        self._batches.close()
        self.session.close()

    def __enter__(self) -> Detector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def more_than_given(max_detections: int | None, spec: ModelSpec) -> str:
    """What to say of a number of detections that the model never gives; "" for others."""
    most = spec.decode.max_detections
    if max_detections is None or max_detections <= most or spec.text is not None:
        return ""
    return f"{max_detections} changes nothing: this model gives at most {most} for an image"


_NO_CLASSES = "this model has no classes of its own to choose from with {}; say what to find with `prompt` or `classes_from`"
_NO_GPU_DECODING = (
    "`image_decoder=gpu` is for models whose images a GPU resizes: a package of an NVIDIA GPU "
    "(`backend=inductor`), or an engine or ONNX Runtime with `device=cuda:0`, and PyTorch's CUDA build; this one runs with {}. Leave it out, or "
    "choose such a backend"
)


def _in_place(
    pending: PendingDetections | FoundInTiles | None, read: Sequence[ReadImage], tracker: Tracker | None
) -> Iterator[ImageDetections | ImageError]:
    """The detections of a batch, with the errors of images that cannot be read where those were."""
    found = iter(() if pending is None else pending.result())
    for item in read:
        if isinstance(item.image, ImageError):
            yield item.image
            continue
        one = next(found)
        if tracker is not None and item.time_s is not None:
            one = tracker.update("", one, item.time_s)
        of = getattr(item.input, "path", item.input) if isinstance(item.input, (Input, LiveSource)) else item.input
        path = os.fspath(of) if isinstance(of, (str, os.PathLike)) else ""
        again = bool(path) and item.time_s is None and not is_web_address(path)  # a file of one image, which can be read again
        yield ImageDetections.of(one, path if again else item.image, path, item.frame, item.time_s)
