"""Images in batches through a session, and the detections that come of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ..data.postprocess import DetectionFilter
from ..data.preprocess import BatchPlan, SizeHW, plan_batches, preprocess
from ..data.raw_image import LoadedImage, RawImage
from ..data.tiles import Tiling, merge
from ..detections import Detections
from ..errors import SessionError
from ..system import CPU, RUN_THREAD
from ..tasks import tasks_of
from .base import Feeds, ImageRunner, Outputs, PendingOutputs, Session
from .prompted import Prompts, prompt_groups

BATCHES_ON_GPU = 2  # batches that wait on a GPU while the results of one are read; the runner has memory for one more


@dataclass(frozen=True)
class RunBeside:
    """A run of the model in another thread."""

    run: Future[Outputs]

    def outputs(self) -> Outputs:
        """Wait for it. Raises what it raised."""
        return self.run.result()


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


@dataclass(frozen=True)
class FoundInTiles:
    """Detections of images that were detected in tiles; those of `PendingDetections` come later."""

    found: list[Detections]

    def result(self) -> list[Detections]:
        """One for each image, in order."""
        return self.found


class Batches:
    """Prepares images in batches and begins the runs of a model.

    session: runs the model; its owner closes it. runner: prepares images on the device of the model; None: they are prepared here.
    batch_size: tiles that run together. size_hw: input size in pixels of all batches; None: the rule of the model.
    resize_threads: that resize the images of a batch. prompt_options: keywords of `Session.bind`.
    """

    def __init__(
        self,
        session: Session,
        runner: ImageRunner | None,
        *,
        batch_size: int,
        size_hw: SizeHW | None,
        resize_threads: int,
        prompt_options: Mapping[str, Any],
    ) -> None:
        self.session, self.runner = session, runner
        self._batch_size, self._size_hw, self._prompt_options = batch_size, size_hw, prompt_options
        self._resizers = ThreadPoolExecutor(resize_threads, "detrt-resize") if resize_threads > 1 else None
        self._runs: ThreadPoolExecutor | None = None  # once a batch was to run beside the caller

    @property
    def ahead(self) -> int:
        """How many batches to `begin` before the result of the first is read."""
        if self.runner is not None:
            return BATCHES_ON_GPU
        return self.session.info.parallel if self.beside or self.session.info.parallel > 1 else 0

    @property
    def beside(self) -> bool:
        """Whether a batch may run in a thread of its own; a thread has no device of its own but the CPU."""
        return self.session.info.device == CPU and self.session.info.parallel == 1

    def begin(
        self,
        images: Sequence[LoadedImage],
        prompts: Sequence[Prompts] | None,
        keep: DetectionFilter,
        before_run: Callable[[], None] | None = None,
        beside: bool = False,
    ) -> PendingDetections:
        """Begin with images, in batches of equal input sizes.

        Args:
            prompts: one for each image; None: the session has one, or needs none.
            before_run: called before each run of the model; what it raises ends the work.
            beside: run the model in a thread where it may, one batch after another.

        Raises:
            DetrtError: as `Detector.submit`.
        """
        plans = plan_batches(
            [(image.shape[0], image.shape[1]) for image in images],
            self.session.spec.input,
            size_hw=self._size_hw,
            sizes=self.session.info.sizes if self._size_hw is None else (),
            split=None if prompts is None else lambda group: self._split(group, prompts),
            fill=self.session.info.fixed_batch,
        )
        begun: list[tuple[BatchPlan, Session, Outputs | PendingOutputs]] = []
        for plan in plans:
            if before_run is not None:
                before_run()
            batch = [images[index] for index in plan.indices]
            if self.runner is not None and prompts is None:
                begun.append((plan, self.session, self.runner.submit(batch, plan)))
                continue
            session = self.session
            if prompts is not None:
                session = session.bind(*(prompts[index] for index in plan.indices), **self._prompt_options)
            feeds = preprocess(batch, session.spec, plan=plan, pool=self._resizers).feeds
            begun.append((plan, session, self._run(session, feeds, beside and self.beside)))
        return PendingDetections(begun, keep)

    def detect_tiles(
        self,
        images: Sequence[LoadedImage],
        prompts: Sequence[Prompts] | None,
        tiling: Tiling,
        keep: DetectionFilter,
        before_run: Callable[[], None] | None = None,
    ) -> FoundInTiles:
        """Detect in the tiles of images, in batches that tiles of several images share. Arguments and errors: see `begin`."""
        if whole := [task.title for task in tasks_of(self.session.spec) if task.sorts]:
            raise SessionError(f"this model reads a page as a whole, and tiles have no {', '.join(whole)}; leave the tiles out")
        pixels = [image.rgb() if isinstance(image, RawImage) else image for image in images]
        windows = [tiling.windows((image.shape[0], image.shape[1])) for image in pixels]
        work = [(index, window) for index, some in enumerate(windows) for window in some]
        found: list[Detections] = []
        waiting: deque[PendingDetections] = deque()
        for first in range(0, len(work), self._batch_size):
            some = work[first : first + self._batch_size]
            parts = [pixels[index][y0:y1, x0:x1] for index, (y0, x0, y1, x1) in some]
            mine = None if prompts is None else [prompts[index] for index, _ in some]
            waiting.append(self.begin(parts, mine, replace(keep, max_detections=None), before_run))
            if len(waiting) > self.ahead:
                found += waiting.popleft().result()
        for pending in waiting:
            found += pending.result()
        rest = iter(found)
        results = []
        for image, own in zip(pixels, windows, strict=True):
            shown = [(window, next(rest)) for window in own]
            results.append(merge(shown, tiling, (image.shape[0], image.shape[1]))[: keep.max_detections])
        return FoundInTiles(results)

    def close(self) -> None:
        """Release the threads, when what runs in them has ended."""
        for pool in (self._resizers, self._runs):
            if pool is not None:
                pool.shutdown()
        self._runs = None

    def _run(self, session: Session, feeds: Feeds, beside: bool) -> Outputs | PendingOutputs:
        if session.info.parallel > 1:
            return session.start(feeds)
        if beside and self._runs is None:
            self._runs = ThreadPoolExecutor(1, RUN_THREAD)
        if self._runs is None:
            return session.run(feeds)
        run = self._runs.submit(session.run, feeds)  # behind what was begun, also where this call waits for it
        return RunBeside(run) if beside else run.result()

    def _split(self, group: list[int], prompts: Sequence[Prompts]) -> list[list[int]]:
        parts = prompt_groups(self.session, [prompts[index] for index in group], str(self._prompt_options["task"]))
        return [[group[i] for i in part] for part in parts]
