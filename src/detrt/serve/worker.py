"""A worker process: `python -m detrt.serve.worker FD`, FD being its end of a socket pair.

It opens every model on its device and answers batches in their order. While a batch runs, the images of the next one
are decoded in threads. When the front process goes, the socket closes, and the worker leaves.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..backends.base import Outputs
from ..backends.open import open_on
from ..data.images import load_encoded, load_image
from ..data.prefetch import Prefetcher
from ..data.raw_image import EncodedImage, LoadedImage
from ..detections import Detections
from ..detector import Detector
from ..errors import DetrtError, ImageError, PromptError, SessionError, SpecError
from ..text.prompts import Prompt
from . import messages as wire
from .config import ServedModel
from .messages import Answer, Batch, Done, Failed, ImageTask, ModelFacts, Ready, Refusal, Setup, TensorTask

# A batch, its parts, and the images of the first part, which are being decoded; None: they are too large to be, ahead.
Work = tuple[Batch, list[list[int]], "list[Future[Decoded]] | None"]


def main(descriptor: int) -> None:
    # Ctrl-C and SIGTERM may reach the whole group; the front process drains and then closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output belongs to the front process
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the server has its own limit, and says so
    sock = socket.socket(fileno=descriptor)
    try:
        _serve(sock, wire.receive(sock))
    except (EOFError, ConnectionError):
        return
    except DetrtError as error:
        _tell(sock, Failed(str(error)))
    except Exception:
        _tell(sock, Failed(traceback.format_exc(), bug=True))


def _tell(sock: socket.socket, message: Failed) -> None:
    with contextlib.suppress(OSError):
        wire.send(sock, message)


def _serve(sock: socket.socket, setup: Setup) -> None:
    models: dict[str, Model] = {}
    for served in setup.models:
        models[served.name] = Model(served, setup)
        models[served.name].warm_up()
    wire.send(sock, Ready(tuple(model.facts for model in models.values())))
    with Prefetcher(setup.threads) as prefetcher:
        coming: queue.Queue[Work] = queue.Queue()
        threading.Thread(target=_read, args=(sock, setup, prefetcher, coming), daemon=True).start()
        while True:
            work = coming.get()
            wire.send(sock, _done(work, models, prefetcher, setup))


def _read(sock: socket.socket, setup: Setup, prefetcher: Prefetcher, coming: queue.Queue[Work]) -> None:
    """Take batches from the socket, and start decoding their images. The front process sends at most two ahead."""
    try:
        while True:
            batch = wire.receive(sock)
            parts, ahead = parts_of(batch)
            coming.put((batch, parts, _start(batch, parts[0], prefetcher, setup) if ahead else None))
    except (EOFError, OSError):
        os._exit(0)  # the front process has gone; the model may be running, and nobody waits for it
    except Exception:
        traceback.print_exc()
        os._exit(1)  # without this thread the worker would sit there for ever; it is replaced


def _start(batch: Batch, indices: list[int], prefetcher: Prefetcher, setup: Setup) -> list[Future[Decoded]]:
    tasks = [batch.tasks[i] for i in indices]
    return [
        prefetcher.submit(decoded, task, setup.max_pixels, setup.image_decoder) for task in tasks if isinstance(task, ImageTask)
    ]


def _done(work: Work, models: dict[str, Model], prefetcher: Prefetcher, setup: Setup) -> Done:
    batch, parts, started = work
    model = models[batch.model]
    runs: list[int] = []
    try:
        tensors = [task for task in batch.tasks if isinstance(task, TensorTask)]
        if tensors:
            return Done(batch.number, tuple(model.infer(tensors, runs.append)), tuple(runs))
        results = []
        for number, part in enumerate(parts):
            futures = started if number == 0 and started is not None else _start(batch, part, prefetcher, setup)
            images = [future.result() for future in futures]
            tasks = [task for i in part if isinstance(task := batch.tasks[i], ImageTask)]
            results += model.detect(tasks, images, runs.append)
        return Done(batch.number, tuple(results), tuple(runs))
    except Exception:  # a bug: it is told, and the worker goes on
        traceback.print_exc()
        refusal = Refusal(500, "internal", "an error inside the server; its log has the details")
        return Done(batch.number, (refusal,) * len(batch.tasks), tuple(runs))


if __name__ == "__main__":
    main(int(sys.argv[1]))

# A model inside a worker: tasks in, answers out. One bad task never spoils those that share its batch.
# Images of a batch are decoded side by side up to so many pixels together, and one after the other beyond: eight
# pictures of 50 million pixels would take 1.2 GB at once.
PIXELS_AT_ONCE = 16_000_000
Result = Answer | Refusal

# The image, which is still a file where the GPU decodes it, and milliseconds.
Decoded = tuple[LoadedImage | Refusal, float]


def declared_pixels(data: bytes) -> int:
    """Pixels that the header of an image file promises; 0 where it has none (decoding then says what is wrong)."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.width * image.height
    except Exception:  # decoders raise whatever they like on damaged files; `decoded` words it
        return 0


def decoded(task: ImageTask, max_pixels: int, image_decoder: str = "cpu") -> Decoded:
    start = time.perf_counter()
    image: LoadedImage | Refusal
    try:
        image = (load_encoded if image_decoder == "gpu" else load_image)(task.data, max_pixels=max_pixels)
    except DetrtError as error:
        image = Refusal(400, "bad_image", str(error))
    except MemoryError:
        image = Refusal(413, "too_large", "there is not enough memory to decode this image; send a smaller one")
    return image, (time.perf_counter() - start) * 1e3


class Model:
    """One served model, opened on one device.

    Raises:
        DetrtError: it cannot be opened or run there.
    """

    def __init__(self, served: ServedModel, setup: Setup) -> None:
        threads = setup.threads if setup.device == "cpu" else None
        session = open_on(served.ref, setup.device, backend=setup.backend, threads=threads)
        try:
            limit = min(setup.max_batch, session.info.max_batch or setup.max_batch)
            resizers = 1 if setup.device == "cpu" else setup.threads
            self.detector = Detector(
                session,
                threshold=0.0,
                batch_size=limit,
                size_hw=setup.size_hw,
                resize_threads=resizers,
                image_decoder=setup.image_decoder,
            )
            if self.detector.decoder is not None:
                self.detector.decoder.check()  # now, not with the first request
        except BaseException:
            session.close()
            raise
        self.session, self.spec = session, session.spec
        text = session.info.text
        self.takes_prompt = text is not None
        self.facts = ModelFacts(
            name=served.name,
            spec=self.spec,
            inputs=tuple(session.inputs),
            outputs=tuple(session.outputs),
            backend=session.info.name,
            max_batch=self.detector.batch_size,
            size_hw=self.detector.size_hw or self.spec.input.size_hw,
            takes_prompt=self.takes_prompt,
            takes_task=text is not None and text.kind == "classes",
            note=session.info.note,
        )

    def warm_up(self) -> None:
        """Run once with one image and once with a full batch; the first runs are the slowest.

        Raises:
            SessionError: the model cannot run.
        """
        picture: Any = np.zeros((*self.facts.size_hw, 3), np.uint8)
        if self.detector.decoder is not None:  # its first file takes longest as well
            buffer = io.BytesIO()
            Image.fromarray(picture).save(buffer, "JPEG")
            picture = buffer.getvalue()
        for count in sorted({1, self.facts.max_batch}):
            self.detector([picture] * count, ["object"] * count if self.takes_prompt else None)

    def detect(self, tasks: Sequence[ImageTask], images: Sequence[Decoded], ran: Callable[[int], None]) -> list[Result]:
        """Detections of each image as JSON: width, height, detections, and the prompt where it is a text."""
        images = self._decoded(images)
        results: list[Result | None] = [image if isinstance(image, Refusal) else None for image, _ in images]
        classes: dict[int, frozenset[int] | None] = {}
        prompts: dict[int, Prompt | None] = {}
        for index, task in enumerate(tasks):
            if results[index] is None:
                try:
                    classes[index], prompts[index] = self._wanted(task)
                except DetrtError as error:
                    code = "bad_prompt" if isinstance(error, PromptError) else "bad_request"
                    results[index] = Refusal(400, code, str(error))
        ready = [index for index, result in enumerate(results) if result is None]

        def run(indices: list[int]) -> None:
            start = time.perf_counter()
            found = self.detector(
                [images[i][0] for i in indices],  # type: ignore[misc]  # a refusal is not ready
                [prompts[i] for i in indices] if self.takes_prompt else None,  # type: ignore[misc]
                threshold=min(tasks[i].threshold for i in indices),
            )
            took = (time.perf_counter() - start) * 1e3
            ran(len(indices))
            for i, detections in zip(indices, found, strict=True):
                results[i] = _answer(detections, tasks[i], classes[i], images[i][1], took)

        _isolating(run, ready, results)
        return [result or Refusal(500, "internal", "the task was lost; this is a bug of detrt") for result in results]

    def _decoded(self, images: Sequence[Decoded]) -> Sequence[Decoded]:
        """What is still a file is decoded by the GPU, all together, each for its share of the time."""
        decoder = self.detector.decoder
        files = [i for i, (image, _) in enumerate(images) if isinstance(image, EncodedImage)]
        if decoder is None or not files:
            return images
        start = time.perf_counter()
        pictures = decoder.decode([images[i][0] for i in files])  # type: ignore[misc]  # these are no refusals
        took = (time.perf_counter() - start) * 1e3 / len(files)
        done = list(images)
        for i, picture in zip(files, pictures, strict=True):
            bad = isinstance(picture, ImageError)
            done[i] = (Refusal(400, "bad_image", str(picture)) if bad else picture, images[i][1] + took)
        return done

    def infer(self, tasks: Sequence[TensorTask], ran: Callable[[int], None]) -> list[Result]:
        """Outputs of the model for tensors as they are, in as few runs as the model takes."""
        results: list[Result | None] = [None] * len(tasks)

        def run(indices: list[int]) -> None:
            chosen = [tasks[i] for i in indices]
            start = time.perf_counter()
            feeds = {name: np.concatenate([task.feeds[name] for task in chosen]) for name in chosen[0].feeds}
            rows = sum(task.rows for task in chosen)
            outputs = self._run_rows(feeds, rows)
            took = (time.perf_counter() - start) * 1e3
            ran(rows)
            first = 0
            for i, task in zip(indices, chosen, strict=True):
                values = {name: array[first : first + task.rows] for name, array in outputs.items()}
                results[i] = Answer(values, model_ms=took)
                first += task.rows

        _isolating(run, list(range(len(tasks))), results, status=400)
        return [result or Refusal(500, "internal", "the task was lost; this is a bug of detrt") for result in results]

    def _run_rows(self, feeds: dict[str, NDArray], rows: int) -> Outputs:
        shape = next((info.shape for info in self.session.inputs), ())
        fixed = shape[0] if shape and isinstance(shape[0], int) else None
        if fixed and rows < fixed:  # the model cannot run fewer: repeat the last row and forget its results
            feeds = {name: np.concatenate([a, np.repeat(a[-1:], fixed - rows, axis=0)]) for name, a in feeds.items()}
        outputs = self.session.run(feeds)
        for name, array in outputs.items():
            if array.ndim == 0 or len(array) < rows:
                raise SessionError(
                    f"output '{name}' has the shape {array.shape} for {rows} images; it must have one row for each"
                )
        return outputs

    def _wanted(self, task: ImageTask) -> tuple[frozenset[int] | None, Prompt | None]:
        if not self.takes_prompt:
            if task.prompt is not None or task.task:
                raise PromptError("this model has fixed classes and takes no prompt; choose among them with 'classes'")
            return None if task.classes is None else frozenset(self.spec.class_ids(list(task.classes))), None
        if task.classes is not None:
            raise PromptError(
                "this model has no classes of its own to choose from with 'classes'; say what to find with 'prompt'"
            )
        if task.prompt is None:
            raise PromptError("this model finds what a prompt names, and there is none; give 'prompt', e.g. 'a cat. a dog.'")
        # Now, so that one that is too long is refused by itself; prompts are cached, so this costs nothing twice.
        bound = self.session.bind(task.prompt if isinstance(task.prompt, str) else list(task.prompt), task=task.task)
        return None, bound.info.prompts[0].prompt

    def close(self) -> None:
        self.detector.close()


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
            results[indices[0]] = Refusal(413, "too_large", "there is not enough memory for this; send fewer or smaller images")
        else:
            bad_input = isinstance(error, (PromptError, SpecError))
            code = "bad_request" if bad_input or status else "model_failed"
            results[indices[0]] = Refusal(400 if bad_input else status or 500, code, str(error))


def _answer(detections: Detections, task: ImageTask, classes: frozenset[int] | None, decode_ms: float, model_ms: float) -> Answer:
    keep = detections.scores > np.float32(task.threshold)
    if classes is not None:
        keep &= np.isin(detections.class_ids, np.array(sorted(classes), np.int64))
    kept = detections[keep][: task.max_detections]
    height, width = kept.image_size_hw
    value = {"width": width, "height": height, "detections": kept.to_list()}
    if kept.prompt:
        value["prompt"] = kept.prompt
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Answer(text.encode("utf-8", "backslashreplace"), decode_ms, model_ms, len(kept))


def parts_of(batch: Batch) -> tuple[list[list[int]], bool]:
    """Indices of a batch of images, in parts that may be decoded at once; and whether the first may be while another runs."""
    parts: list[list[int]] = [[]]
    total = first = 0
    for index, task in enumerate(batch.tasks):
        pixels = declared_pixels(task.data) if isinstance(task, ImageTask) else 0
        if parts[-1] and total + pixels > PIXELS_AT_ONCE:
            parts.append([])
            total = 0
        parts[-1].append(index)
        total += pixels
        first = total if len(parts) == 1 else first
    return parts, first <= PIXELS_AT_ONCE
