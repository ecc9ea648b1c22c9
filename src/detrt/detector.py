"""Images in, detections out, through any session."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .backends.base import NO_PROMPT, Outputs, PendingOutputs, Session
from .backends.prompted import Prompts, prompt_groups, require_prompt
from .data.images import ImageSource
from .data.postprocess import DetectionFilter, check_threshold
from .data.prefetch import Prefetcher
from .data.preprocess import BatchPlan, SizeHW, check_size, plan_batches, preprocess, size_words
from .data.raw_image import LoadedImage
from .detections import Detections
from .errors import PromptError, SessionError, SpecError
from .models.load import LoadOptions
from .spec import ModelSpec
from .system import IMAGE_DECODERS, usable_cores
from .text.postprocess import TEXT_THRESHOLD
from .text.prompts import Prompt

if TYPE_CHECKING:
    from .backends.gpu.decoder import GpuDecoder

MAX_DECODERS, MAX_READERS = 8, 4  # threads that decode files for a GPU, and that read what a GPU decodes
AHEAD = 2  # batches that wait on a GPU while the results of one are read; the runner has memory for one more


@dataclass(frozen=True)
class PendingDetections:
    """Detections of images that were submitted; a GPU may still work on them.

    batches: of the images, each with its session and the outputs of that. keep: which detections are returned.
    """

    batches: Sequence[tuple[BatchPlan, Session, Outputs | PendingOutputs]]
    keep: DetectionFilter

    def result(self) -> list[Detections]:
        """Wait, and post-process: one for each image, in order.

        Raises:
            SessionError: the model failed, or its outputs cannot be read.
        """
        results: dict[int, Detections] = {}
        for plan, session, outputs in self.batches:
            arrays = outputs if isinstance(outputs, dict) else outputs.outputs()
            found = session.postprocess(arrays, plan.originals_hw, self.keep)
            results.update(zip(plan.indices[: plan.count], found, strict=False))
        return [results[index] for index in range(len(results))]


class Detector:
    """Finds objects: `Detector.open("bundle/")(["street.jpg"])`.

    session: what runs the model; the detector closes it.
    threshold: keep scores above it. classes: names or ids to keep, default all.
    batch_size: images per run; default: the fixed or largest batch of the session, else 1.
    size_hw: another (height, width) of the input, for models with a dynamic size.
    max_detections: keep at most so many for each image.
    resize_threads: threads that resize the images of a batch; more than one pays where the model runs on a GPU.
    on_device: resize and choose candidates on the GPU where the session can; the detections are the same.
    image_decoder: "cpu", or "gpu": JPEG files, whose pixels then differ a little, and videos are decoded by the GPU that
        runs the model. What it cannot decode is decoded on the CPU; `decoder.counts` tells how many.

    For models that take a prompt (see docs/guide/prompts.md):

    prompt: what to look for in all images; None: every call brings its own. A text gives its phrases as
        classes; a list of names takes as many runs as it needs. task: for models that take one.
    phrases: "best" names a box by its best phrase, "tokens" by the tokens above `text_threshold` as
        published, "tokens-of-best" by those of its best sub-sentence.

    Raises:
        SpecError: unknown class names, or a size that the model cannot take.
        PromptError: a prompt for a model of fixed classes, classes for one that takes a prompt, or a bad prompt.
        SessionError: image_decoder is "gpu", and the session does not resize images on a GPU.
        ValueError: threshold, text_threshold, batch_size, max_detections, resize_threads or image_decoder out of range.
    """

    def __init__(
        self,
        session: Session,
        *,
        threshold: float = 0.5,
        batch_size: int | None = None,
        size_hw: SizeHW | None = None,
        classes: Sequence[str | int] | None = None,
        max_detections: int | None = None,
        resize_threads: int = 1,
        on_device: bool = True,
        image_decoder: str = "cpu",
        prompt: Prompts | None = None,
        task: str = "",
        phrases: str = "best",
        text_threshold: float = TEXT_THRESHOLD,
    ) -> None:
        check_threshold(threshold)
        check_threshold(text_threshold, "text_threshold")
        for name, value in (("batch_size", batch_size), ("max_detections", max_detections), ("resize_threads", resize_threads)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        check_image_decoder(image_decoder)
        self._prompt_options = {"task": task, "phrases": phrases, "text_threshold": text_threshold}
        if session.info.text is None and (prompt is not None or task or phrases != "best"):
            raise PromptError(NO_PROMPT)
        if session.info.text is not None and classes is not None:
            raise PromptError(
                "this model has no classes of its own to choose from with --classes (Python: classes=...); say what to find "
                "with --prompt or --classes-from (Python: prompt=...)"
            )
        self.session = session if prompt is None else session.bind(prompt, **self._prompt_options)
        self.spec: ModelSpec = self.session.spec
        self.threshold = threshold
        self.max_detections = max_detections
        self.class_ids: Collection[int] | None = None
        if classes is not None:
            self.class_ids = frozenset(self.spec.class_ids([str(name) for name in classes]))
        info = self.session.info
        self.size_hw = self._checked_size(size_hw)
        self._sizes = info.sizes if size_hw is None else ()
        self._runner = self.session.image_runner if on_device and self.spec.input.antialias else None
        self.decoder: GpuDecoder | None = None
        if image_decoder == "gpu":
            if self._runner is None:
                raise SessionError(_NO_GPU_DECODING.format(info.name))
            self.decoder = self._runner.decoder()
        limit = info.fixed_batch or info.max_batch
        self.batch_size = min(batch_size or limit or 1, limit or batch_size or 1)
        # Files of a batch are decoded side by side where a GPU would wait for them.
        decoders = 1 if self._runner is None else min(MAX_DECODERS, usable_cores())
        self._prefetcher = Prefetcher(decoders, decoder=self.decoder)
        self._resizers = ThreadPoolExecutor(resize_threads, "detrt-resize") if resize_threads > 1 else None

    def _checked_size(self, size_hw: SizeHW | None) -> SizeHW | None:
        """The input size of all batches; None: the model's rule. Raises SpecError: a size that the model does not take."""
        info = self.session.info
        if info.sizes and size_hw is not None and tuple(size_hw) not in info.sizes:
            raise SpecError(
                f"--size {size_words([size_hw])}: this bundle was compiled for {size_words(info.sizes)}; give one of them, or none"
            )
        shape = info.pixel_shape
        if size_hw is None and not info.sizes and self.spec.input.dynamic and all(isinstance(side, int) for side in shape[2:]):
            size_hw = shape[2:] or None  # type: ignore[assignment]  # an engine of one size from a model of many
        if size_hw is not None:
            size_hw = (int(size_hw[0]), int(size_hw[1]))
        check_size(self.spec.input, size_hw)
        return size_hw

    @classmethod
    def open(
        cls,
        ref: str | os.PathLike,
        *,
        device: str | None = None,
        backend: str = "auto",
        threads: int | None = None,
        spec: ModelSpec | None = None,
        load: LoadOptions | None = None,
        **options: Any,
    ) -> Detector:
        """Open a bundle, ONNX file, engine or checkpoint; see `open_session`.

        options: keywords of `Detector`, and fields of `LoadOptions` such as `trust_remote_code=True`.
        """
        from .backends.open import open_session

        changes = {name: options.pop(name) for name in LoadOptions.__dataclass_fields__ if name in options}
        session = open_session(ref, backend=backend, device=device, threads=threads, spec=spec, load=load, **changes)
        try:
            return cls(session, **options)
        except BaseException:
            session.close()
            raise

    def __call__(
        self, images: Sequence[ImageSource], prompts: Sequence[Prompts] | None = None, *, threshold: float | None = None
    ) -> list[Detections]:
        """Detect in every image; the result has the same length and order.

        Args:
            images: arrays (H, W, 3) uint8 RGB, or anything that `load_image` takes.
            prompts: one for each image, instead of the detector's; images with different prompts share a batch.
            threshold: keep scores above it, 0 to 1; None: the detector's.

        Raises:
            ImageError: an image that cannot be read. SessionError: the model failed.
            PromptError: no prompt for a model that takes one, or a bad one.
            ValueError: a threshold out of range.
        """
        if isinstance(images, (str, bytes, os.PathLike, np.ndarray)) or not isinstance(images, Iterable):
            raise TypeError(f"give a list of images, also for one: detector([image]); got {type(images).__name__}")
        return list(self.stream(images, prompts, threshold=threshold))

    def stream(
        self,
        images: Iterable[ImageSource],
        prompts: Iterable[Prompts] | None = None,
        *,
        threshold: float | None = None,
    ) -> Iterator[Detections]:
        """As a call, for images as they come; holds one batch of images in memory, and `ahead` more where a GPU works on
        them."""
        if isinstance(prompts, (str, Prompt)):
            raise PromptError(f"give a list of prompts, one for each image; got one, {prompts!r}")
        if prompts is not None and not self.session.info.text and not self.session.prompts:
            raise PromptError(NO_PROMPT)
        if prompts is None:
            self.check_prompt()
        source, given = iter(images), None if prompts is None else iter(prompts)
        waiting: deque[PendingDetections] = deque()
        while some := list(itertools.islice(source, self.batch_size)):
            batch = self._prefetcher.load_batch(some)
            mine = None if given is None else list(itertools.islice(given, len(batch)))
            if mine is not None and len(mine) != len(batch):
                raise PromptError("there are fewer prompts than images; give one for each image")
            waiting.append(self.submit(batch, mine, threshold=threshold))
            if len(waiting) > self.ahead:
                yield from waiting.popleft().result()
        for pending in waiting:
            yield from pending.result()
        if given is not None and next(given, None) is not None:
            raise PromptError("there are more prompts than images; give one for each image")

    @property
    def ahead(self) -> int:
        """How many batches to `submit` before the result of the first is read."""
        if self._runner is not None:
            return AHEAD
        return self.session.info.parallel if self.session.info.parallel > 1 else 0

    @property
    def planar(self) -> bool:
        """Whether frames of videos are best given in 4:2:0, as `YuvImage`: their RGB is then made on the GPU."""
        return self._runner is not None

    def check_prompt(self) -> None:
        """Raise PromptError where the model takes a prompt and the detector has none."""
        require_prompt(self.session)

    def submit(
        self, images: Sequence[LoadedImage], prompts: Sequence[Prompts] | None = None, *, threshold: float | None = None
    ) -> PendingDetections:
        """Begin with at most `batch_size` images; the detections are in the `result` of what is returned.

        Where a GPU prepares the images, or a session works on several batches, that goes on meanwhile; otherwise the model has run
        when this returns.

        Args:
            images: arrays (H, W, 3) uint8 RGB, or raw images.
            prompts, threshold: see `__call__`.

        Raises:
            As `__call__`.
        """
        threshold = self.threshold if threshold is None else threshold
        check_threshold(threshold)
        if prompts is None:
            self.check_prompt()
        plans = plan_batches(
            [(image.shape[0], image.shape[1]) for image in images],
            self.spec.input,
            size_hw=self.size_hw,
            sizes=self._sizes,
            split=None if prompts is None else lambda group: self._split(group, prompts),
            fill=self.session.info.fixed_batch,
        )
        begun: list[tuple[BatchPlan, Session, Outputs | PendingOutputs]] = []
        for plan in plans:
            batch = [images[index] for index in plan.indices]
            if self._runner is not None and prompts is None:
                begun.append((plan, self.session, self._runner.submit(batch, plan)))
                continue
            session = self.session
            if prompts is not None:
                session = session.bind(*(prompts[index] for index in plan.indices), **self._prompt_options)
            feeds = preprocess(batch, session.spec, plan=plan, pool=self._resizers).feeds
            begun.append((plan, session, session.start(feeds)))
        return PendingDetections(begun, DetectionFilter(threshold, self.class_ids, self.max_detections))

    def _split(self, group: list[int], prompts: Sequence[Prompts]) -> list[list[int]]:
        parts = prompt_groups(self.session, [prompts[index] for index in group], str(self._prompt_options["task"]))
        return [[group[i] for i in part] for part in parts]

    def close(self) -> None:
        """Release the model and the threads."""
        self._prefetcher.close()
        if self._resizers is not None:
            self._resizers.shutdown()
        self.session.close()

    def __enter__(self) -> Detector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_image_decoder(name: str) -> None:
    """Raise ValueError where `name` is not in IMAGE_DECODERS."""
    if name not in IMAGE_DECODERS:
        raise ValueError(f"image_decoder must be one of {', '.join(IMAGE_DECODERS)}; got {name!r}")


_NO_GPU_DECODING = (
    "--image-decoder gpu (Python: image_decoder='gpu') is for models whose images a GPU resizes: a package of an NVIDIA GPU "
    "(--backend inductor), or ONNX Runtime with --device cuda:0 and PyTorch's CUDA build; this one runs with {}. Leave it out, or "
    "choose such a backend"
)
