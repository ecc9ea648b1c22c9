"""A worker process: `python -m detrt.serve.worker FD`, FD being its end of a socket pair.

It opens every model on its device and answers batches in their order. While a batch runs, the images of the next one
are decoded in threads. What nobody waits for any more is left out: before each run of the model, and between the reads of an
image that is being decoded. When the server process ends, the socket closes, and the worker ends.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..backends.base import BaseSession, Outputs, no_prompt
from ..backends.open import open_with
from ..backends.search import SessionOptions
from ..backends.worker_process import Bulk, Channel, answer_ahead
from ..data.images import OpenedImage, load_encoded, open_image
from ..data.raw_image import EncodedImage, LoadedImage
from ..detections import Detections
from ..detector import Detector
from ..errors import DetrtError, ImageError, PromptError, SessionError, SpecError, number_of
from ..system import repeating
from ..text.prompts import ImageQueries, Prompt
from .child import work_for_server
from .config import ServedModel
from .content import opened_content, stored_content
from .errors import Refused, bad, internal
from .kserve import GRAPH, build_infer
from .messages import MAX_TILES, Alive, Answer, Batch, ContentChanged, Done, ImageTask, Left, ModelFacts, Ready, Setup, TensorTask

if TYPE_CHECKING:
    from ..backends.gpu.decoder import GpuDecoder

# Images of a batch are decoded side by side up to so many pixels together, and one after the other beyond: eight
# images of 50 million pixels would take 1.2 GB at once.
PIXELS_AT_ONCE = 16_000_000
WARM_BATCH = 16  # images: of the largest batch whose first run is made before the worker is ready, beside a full one
_OPENINGS = 3  # of a model that is replaced meanwhile
ALIVE_S = 2.0  # seconds between two signs of life of a worker that opens its models
Result = Answer | Refused
_LEFT = Refused(504, "deadline", "nobody waits for this any more")

# The image, which is still encoded where the GPU decodes it, and milliseconds.
Decoded = tuple[LoadedImage | Refused, float]
# A task, and its image with its header read.
OpenedTask = tuple[ImageTask, "OpenedImage | NDArray[np.uint8] | Refused"]


def main(descriptor: int) -> None:
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the server has its own limit, and says so
    work_for_server(descriptor, serve_parent)


def serve_parent(channel: Channel) -> None:
    """Open the models of a `Setup`, send `Ready`, and answer batches until the server process ends.

    Raises:
        DetrtError: a model that cannot be opened or run.
    """
    setup: Setup = channel.receive()
    models: dict[str, Model] = {}
    with repeating(lambda: channel.send(Alive()), ALIVE_S, "detrt-alive"):  # this process is not stuck
        for served in setup.models:
            models[served.name] = Model(served, setup)
            models[served.name].warm_up()
    channel.send(Ready(tuple(model.facts for model in models.values())))
    held: dict[int, BatchImages] = {}

    def noted(message: Batch | Left) -> bool:
        if isinstance(message, Left) and message.number in held:
            held[message.number].left.update(message.slots)
        return isinstance(message, Left)

    with ThreadPoolExecutor(setup.threads, "detrt-decode") as threads, ThreadPoolExecutor(1, "detrt-open") as opener:

        def prepare(batch: Batch) -> BatchImages:
            held[batch.number] = BatchImages(batch, threads, opener, setup)
            return held[batch.number]

        def answer(batch: Batch, images: BatchImages) -> Done:
            done = run_batch(models, batch, images)
            del held[batch.number]
            return done

        # Where the server process has ended, the model may be running, and nobody waits for it.
        answer_ahead(channel, prepare, answer, lambda: os._exit(0), noted)


def run_batch(models: Mapping[str, Model], batch: Batch, images: BatchImages) -> Done:
    """The results of a batch, in the order of its tasks."""
    model = models[batch.model]
    runs: list[int] = []
    left = images.left.__contains__
    try:
        tensors = [task for task in batch.tasks if isinstance(task, TensorTask)]
        if tensors:
            return Done(batch.number, tuple(model.infer(tensors, runs.append, left)), tuple(runs))
        results: list[Result] = []
        parts = images.parts()
        while parts:
            decoded = list(images.ahead or images.decode(parts[0]))
            images.ahead = None
            tasks = [task for task, _ in parts.popleft()]
            first = len(results)
            results += model.detect(tasks, decoded, runs.append, lambda slot, first=first: left(first + slot))
        return Done(batch.number, tuple(results), tuple(runs))
    except Exception:  # a bug: the request is refused, and the worker stays
        traceback.print_exc()
        return Done(batch.number, (internal(),) * len(batch.tasks), tuple(runs))


class BatchImages:
    """The images of a batch, in parts of a limited number of pixels, which are decoded together.

    The first part is begun at once, so that it is decoded while an earlier batch runs, unless it is one very large image. Headers are
    read in a thread too: some take seconds, and the process must hear meanwhile who has left.

    Attributes:
        left: slots of the tasks that nobody waits for; their images are not decoded further.
        decode: begins to decode a part in threads; gives its images in order.
        ahead: the images of the first part, or None where it is not begun.
    """

    def __init__(self, batch: Batch, threads: Executor, opener: Executor, setup: Setup) -> None:
        self.left: set[int] = set()
        self.decode = partial(threads.map, partial(decode_image, setup))
        self.ahead: Iterator[Decoded] | None = None
        self._opening = opener.submit(self._open, batch.tasks, setup)

    def parts(self) -> deque[list[OpenedTask]]:
        """(task, its opened file or why it cannot be opened), in parts."""
        return self._opening.result()

    def _open(self, tasks: Sequence[ImageTask | TensorTask], setup: Setup) -> deque[list[OpenedTask]]:
        parts: deque[list[OpenedTask]] = deque()
        total = first = 0
        for slot, task in enumerate(tasks):
            if not isinstance(task, ImageTask):
                return parts
            opened: OpenedImage | NDArray[np.uint8] | Refused
            try:
                if isinstance(task.data, np.ndarray):
                    opened, pixels = _checked_pixels(task.data, setup.max_pixels), task.data[..., 0].size
                else:
                    opened = open_image(
                        task.data,
                        max_pixels=setup.max_pixels,
                        formats=setup.image_formats,
                        stopped=partial(self.left.__contains__, slot),
                    )
                    pixels = opened.image.width * opened.image.height
            except DetrtError as error:
                opened, pixels = Refused(400, "bad_image", str(error)), 0
            if not parts or total + pixels > PIXELS_AT_ONCE:
                parts.append([])
                total = 0
            parts[-1].append((task, opened))
            total += pixels
            first = total if len(parts) == 1 else first
        if parts and first <= PIXELS_AT_ONCE:
            self.ahead = self.decode(parts[0])
        return parts


def _checked_pixels(pixels: NDArray[np.uint8], max_pixels: int) -> NDArray[np.uint8]:
    """Pixels as they are. Raises ImageError for none, or more than `max_pixels`."""
    height, width = pixels.shape[:2]
    if not 0 < height * width <= max_pixels:
        raise ImageError(f"an image must have 1 to {max_pixels} pixels; got {width} x {height}")
    return pixels


def decode_image(setup: Setup, opened_task: OpenedTask) -> Decoded:
    """Decode an image; one that a GPU can decode stays encoded for it."""
    task, image = opened_task
    start = time.perf_counter()
    decoded: LoadedImage | Refused
    try:
        if not isinstance(image, OpenedImage):
            decoded = image
        elif setup.image_decoder == "gpu":
            decoded = load_encoded(task.data, max_pixels=setup.max_pixels, opened=image)
        else:
            decoded = image.load()
            image.image.close()  # a batch that waits for its turn holds the arrays alone
    except DetrtError as error:
        decoded = Refused(400, "bad_image", str(error))
    except MemoryError:
        decoded = Refused(413, "too_large", "there is not enough memory to decode this image; send a smaller one")
    return decoded, (time.perf_counter() - start) * 1e3


class Model:
    """One served model, opened on one device. A bad task does not affect those that share its batch.

    Raises:
        DetrtError: it cannot be opened or run there.
    """

    def __init__(self, served: ServedModel, setup: Setup) -> None:
        threads = setup.threads if setup.device == "cpu" else None
        session, content = _open_pinned(
            served,
            setup.pinned.get(served.name),
            lambda: open_with(served.ref, SessionOptions(setup.backend, setup.device, threads, setup.tuning, load=served.load)),
        )
        try:
            limit = min(setup.max_batch, session.info.max_batch or setup.max_batch)
            resizers = 1 if setup.device == "cpu" else setup.threads
            self.detector = Detector(
                session,
                threshold=0.0,
                batch_size=limit,
                size=setup.size_hw,
                resize_threads=resizers,
                image_decoder=setup.image_decoder,
            )
            if self.detector.decoder is not None:
                self.detector.decoder.check()  # now, not with the first request
        except BaseException:
            session.close()
            raise
        self.session, self.spec, self.setup = session, session.spec, setup
        self._left: Callable[[], bool] = lambda: False  # whether nobody waits for what runs now
        text = session.info.text
        if text is not None:
            session.before_run = self._check_left
        self.takes_prompt = text is not None
        self.facts = ModelFacts(
            name=served.name,
            spec=self.spec,
            inputs=tuple(session.inputs),
            outputs=tuple(session.outputs),
            backend=session.info.name,
            max_batch=self.detector.batch_size,
            size_hw=self.detector.size or self.spec.input.size_hw,
            takes_prompt=self.takes_prompt,
            takes_task=text is not None and text.prompt_kind.takes_task,
            takes_query_images=session.info.takes_query_images,
            note=session.info.note,
            only_hw=self.detector.size,
            sizes=session.info.sizes if setup.size_hw is None else (),
            content=content,
        )

    def warm_up(self) -> None:
        """Run once with one image and once with a full batch, on a GPU with every number of images up to `WARM_BATCH`: the first run of
        each searches for kernels and records a CUDA graph, for seconds.

        Raises:
            SessionError: the model cannot run.
        """
        image: Any = np.zeros((*self.facts.size_hw, 3), np.uint8)
        if self.detector.decoder is not None:  # its first file takes longest as well
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, "JPEG")
            image = buffer.getvalue()
        most = self.facts.max_batch
        counts = {1, most} if self.setup.device == "cpu" else {*range(1, min(most, WARM_BATCH) + 1), most}
        for count in sorted(counts):
            begun = time.perf_counter()
            self.detector([image] * count, ["object"] * count if self.takes_prompt else None)
            self.facts = replace(self.facts, run_s=time.perf_counter() - begun)

    def _check_left(self) -> None:
        """Raise SessionError where nobody waits for what runs now."""
        if self._left():
            raise SessionError(_LEFT.message)

    def detect(
        self,
        tasks: Sequence[ImageTask],
        images: Sequence[Decoded],
        ran: Callable[[int], None],
        left: Callable[[int], bool] = lambda slot: False,
    ) -> list[Result]:
        """Detections of each image as JSON: width, height, detections, and the prompt where it is a text.

        ran: told the images of each run. left: whether nobody waits for the task in a slot any more.
        """
        images = [(_LEFT if left(slot) else image, took) for slot, (image, took) in enumerate(images)]
        if self.detector.decoder is not None:
            images = self._decoded_on_gpu(self.detector.decoder, images)
        results: list[Result | None] = [image if isinstance(image, Refused) else None for image, _ in images]
        classes: dict[int, frozenset[int] | None] = {}
        prompts: dict[int, Prompt | ImageQueries | None] = {}
        queries: dict[Any, ImageQueries] = {}  # those of a request are checked once for all of its images
        for index, task in enumerate(tasks):
            if results[index] is None:
                try:
                    classes[index], prompts[index] = self._wanted(task, queries, partial(left, index))
                except DetrtError as error:
                    code = "bad_prompt" if isinstance(error, PromptError) else "bad_request"
                    results[index] = Refused(400, code, str(error))
        for index, task in enumerate(tasks):
            if results[index] is None and task.tiling is not None:
                try:
                    task.tiling.check(images[index][0].shape[:2], MAX_TILES)  # type: ignore[union-attr]  # a refusal is a result
                except SessionError as error:
                    results[index] = bad(str(error))
        ready = [index for index, result in enumerate(results) if result is None]

        def run(indices: list[int]) -> None:
            self._left = lambda: all(left(i) for i in indices)
            start = time.perf_counter()
            # A session that runs several batches at the same time (OpenVINO's "throughput") gets the batch in so many parts.
            info = self.session.info
            plain = [i for i in indices if tasks[i].tiling is None]
            size = max(1, len(plain) if info.fixed_batch else -(-len(plain) // info.parallel))
            parts = [plain[first : first + size] for first in range(0, len(plain), size)]
            parts += [[i] for i in indices if tasks[i].tiling is not None]  # its tiles are batches of their own
            order = [i for part in parts for i in part]
            pending = [
                self.detector.submit(
                    [images[i][0] for i in part],  # type: ignore[misc]  # a refusal is not ready
                    [prompts[i] for i in part] if self.takes_prompt else None,  # type: ignore[misc]
                    threshold=min(tasks[i].threshold for i in part),
                    tiling=tasks[part[0]].tiling,
                    before_run=self._check_left,
                )
                for part in parts
            ]
            found = [detections for one in pending for detections in one.result()]
            took = (time.perf_counter() - start) * 1e3
            for part in parts:
                ran(len(part))
            for i, detections in zip(order, found, strict=True):
                results[i] = _answer(detections, tasks[i], classes[i], images[i][1], took)

        _isolating(run, ready, results)
        return _complete(results)

    @staticmethod
    def _decoded_on_gpu(decoder: GpuDecoder, images: Sequence[Decoded]) -> Sequence[Decoded]:
        """Decode the files as one batch; the time is divided among them."""
        files = [i for i, (image, _) in enumerate(images) if isinstance(image, EncodedImage)]
        if not files:
            return images
        start = time.perf_counter()
        decoded = decoder.decode([images[i][0] for i in files])  # type: ignore[misc]  # not refusals
        took = (time.perf_counter() - start) * 1e3 / len(files)
        done = list(images)
        for i, image in zip(files, decoded, strict=True):
            bad = isinstance(image, ImageError)
            done[i] = (Refused(400, "bad_image", str(image)) if bad else image, images[i][1] + took)
        return done

    def infer(
        self, tasks: Sequence[TensorTask], ran: Callable[[int], None], left: Callable[[int], bool] = lambda slot: False
    ) -> list[Result]:
        """Outputs of the model for tensors as they are, in as few runs as the model takes. Arguments as of `detect`."""
        results: list[Result | None] = [None] * len(tasks)

        def run(indices: list[int]) -> None:
            self._left = lambda: all(left(i) for i in indices)
            self._check_left()
            chosen = [tasks[i] for i in indices]
            start = time.perf_counter()
            feeds = {name: np.concatenate([task.feeds[name] for task in chosen]) for name in chosen[0].feeds}
            rows = sum(task.rows for task in chosen)
            outputs = self._run_rows(feeds, rows)
            took = (time.perf_counter() - start) * 1e3
            ran(rows)
            first = 0
            for i, task in zip(indices, chosen, strict=True):
                values = {name: outputs[name][first : first + task.rows] for name, _ in task.outputs}
                try:
                    body, head = build_infer(self.facts.name + GRAPH, task, values)
                    results[i] = Answer(Bulk(body), head, model_ms=took)
                except Refused as refusal:
                    results[i] = refusal
                first += task.rows

        _isolating(run, list(range(len(tasks))), results, status=400)
        return _complete(results)

    def _run_rows(self, feeds: dict[str, NDArray], rows: int) -> Outputs:
        fixed = self.session.info.fixed_batch
        if fixed and rows < fixed:  # the model cannot run fewer: repeat the last row and forget its results
            feeds = {name: np.concatenate([a, np.repeat(a[-1:], fixed - rows, axis=0)]) for name, a in feeds.items()}
        outputs = self.session.run(feeds)
        for name, array in outputs.items():
            if array.ndim == 0 or len(array) < rows:
                raise SessionError(
                    f"output '{name}' has the shape {array.shape} for {number_of(rows, 'image')}; it must have one row for each"
                )
        return outputs

    def _wanted(
        self, asked: ImageTask, queries: dict[Any, ImageQueries], stopped: Callable[[], bool]
    ) -> tuple[frozenset[int] | None, Prompt | ImageQueries | None]:
        """The class ids to keep, or the prompt; `queries` are those that were checked. Raises PromptError, SpecError, ImageError."""
        prompt: str | list[str] | ImageQueries | None
        prompt = list(asked.prompt) if isinstance(asked.prompt, tuple) else asked.prompt
        if not self.takes_prompt:
            if prompt is not None or asked.task or asked.query_images:
                raise no_prompt()
            return None if asked.classes is None else frozenset(self.spec.class_ids(asked.classes)), None
        if asked.classes is not None:
            raise PromptError(
                "this model has no classes of its own to choose from with 'classes'; say what to find with 'prompt'"
            )
        if asked.query_images:
            if prompt is not None:
                raise PromptError("'prompt' and 'query_images' both say what to find; give one of them")
            shown = tuple((name, bytes(data)) for name, data in asked.query_images)
            if shown not in queries:
                for number, (_, data) in enumerate(shown):
                    try:
                        open_image(
                            data, max_pixels=self.setup.max_pixels, formats=self.setup.image_formats, stopped=stopped
                        ).load()
                    except ImageError as error:
                        raise ImageError(f"query image {number}: {error}") from None
                names = tuple(Path(name or f"image {number}").stem for number, (name, _) in enumerate(shown))
                queries[shown] = ImageQueries(tuple(data for _, data in shown), names)
            prompt = queries[shown]
        if prompt is None:
            field = "PROMPT" if asked.as_detections else "'prompt'"  # its name in the protocol of the request
            raise PromptError(f"this model finds what a prompt names, and there is none; give {field}, e.g. 'a cat. a dog.'")
        # Now, so that one that is too long is refused by itself; prompts are cached, so this costs nothing twice.
        bound = self.session.bind(prompt, task=asked.task)
        if (runs := len(bound.prompts[0].chunks)) > self.setup.max_prompt_runs:
            raise PromptError(
                f"the prompt has {number_of(bound.prompts[0].prompt.num_classes, 'name')}, for which the model has to run {runs} times; at most "
                f"{self.setup.max_prompt_runs} are taken: give fewer names, or start the server with a larger limit of prompt runs"
            )
        return None, prompt if isinstance(prompt, ImageQueries) else bound.prompts[0].prompt

    def close(self) -> None:
        self.detector.close()


def _open_pinned(served: ServedModel, pinned: str | None, open_it: Callable[[], BaseSession]) -> tuple[BaseSession, str]:
    """A session, and the digest of its content. A model that is replaced while it is opened is opened again.

    Raises:
        DetrtError: what `open_it` raises; ContentChanged: the content is not `pinned`; SessionError: it was replaced each time.
    """
    changed = ContentChanged(
        f"'{served.name}' ({served.ref}) is not what the server opened first, so that its answers would differ from those of other "
        "workers; send SIGHUP to the server, or POST /v2/repository/models/NAME/load, to replace the models in all of them"
    )
    for _ in range(_OPENINGS):
        before = _stored(served.ref)
        if before and pinned not in (None, before):
            raise changed
        try:
            session = open_it()
        except DetrtError:
            if before == _stored(served.ref):
                raise
            continue
        content = opened_content(before or "", session)
        if before == _stored(served.ref):
            if pinned in (None, content):
                return session, content
            session.close()
            raise changed
        session.close()
    raise SessionError(f"'{served.name}' ({served.ref}) was replaced {_OPENINGS} times while it was opened; load it again")


def _stored(ref: str) -> str | None:
    """As `stored_content`; None where the files cannot be read, which whoever opens them says better."""
    try:
        return stored_content(ref)
    except (DetrtError, OSError, ValueError):
        return None


def _isolating(
    run: Callable[[list[int]], None], indices: list[int], results: list[Result | None], status: int | None = None
) -> None:
    """Run tasks together; where that fails, each by itself, so that only the culprit is refused."""
    if not indices:
        return
    try:
        run(indices)
    except (DetrtError, MemoryError) as error:
        if len(indices) > 1:
            for index in indices:
                _isolating(run, [index], results, status)
        elif isinstance(error, MemoryError):
            results[indices[0]] = Refused(413, "too_large", "there is not enough memory for this; send fewer or smaller images")
        else:
            bad_input = isinstance(error, (PromptError, SpecError))
            code = "bad_request" if bad_input or status else "model_failed"
            results[indices[0]] = Refused(400 if bad_input else status or 500, code, str(error))


def _complete(results: Sequence[Result | None]) -> list[Result]:
    """The results of all tasks; one without any is a bug."""
    return [result or Refused(500, "internal", "the task was lost; this is a bug of detrt") for result in results]


def _answer(detections: Detections, task: ImageTask, classes: frozenset[int] | None, decode_ms: float, model_ms: float) -> Answer:
    keep = detections.scores > np.float32(task.threshold)
    if classes is not None:
        keep &= np.isin(detections.class_ids, np.array(sorted(classes), np.int64))
    kept = detections[keep][: task.max_detections]
    if task.as_detections:
        return Answer(Bulk(), decode_ms=decode_ms, model_ms=model_ms, found=len(kept), detections=kept)
    height, width = kept.image_size_hw
    value = {"width": width, "height": height, "detections": kept.to_list()}
    if kept.prompt:
        value["prompt"] = kept.prompt
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    data = Bulk(text.encode("utf-8", "backslashreplace"))
    return Answer(data, decode_ms=decode_ms, model_ms=model_ms, found=len(kept))


if __name__ == "__main__":
    main(int(sys.argv[1]))
