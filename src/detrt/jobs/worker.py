"""A worker process of `DevicePool`: `python -m detrt.jobs.worker FD`, FD being its end of a socket pair.

It opens one detector on one device and answers tasks in their order. Images of the coming tasks are decoded in
threads meanwhile. When the other end of the socket closes, it leaves, and removes a video it was writing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..backends.open import open_on
from ..backends.worker_process import Channel, ParentGone, receive_ahead, work_for_parent
from ..data.images import Input, load_image
from ..data.sinks import Record
from ..detector import Detector
from .annotate import AnnotatedCopies
from .run import Bad, Found, detect_inputs

# What is sent back for one image or frame: the index of its input, and its record or what was wrong with it.
Answer = tuple[int, Record | str]


@dataclass(frozen=True, slots=True)
class Opening:
    """The first message to a worker: the model, its device, and what to do with the images.

    threads: of the model on a CPU, and of the decoder. session: arguments of `open_on`; detector: of `Detector`; copies: of
    `AnnotatedCopies`.
    """

    ref: str
    device: str
    threads: int
    session: Mapping[str, Any]
    detector: Mapping[str, Any]
    categories: list[dict[str, Any]] | None = None
    copies: Mapping[str, Any] | None = None
    every: int = 1


def detect_for_parent(channel: Channel, opening: Opening) -> None:
    """Open the model, send its facts, and answer lists of inputs until there are no more.

    Raises:
        ParentGone: the parent has ended. DetrtError: what opening the model or running it raises.
    """
    session = open_on(opening.ref, opening.device, **opening.session)
    with contextlib.ExitStack() as stack:
        if opening.categories is not None:
            from ..evaluation.coco import bind_categories

            session = bind_categories(session, opening.categories)
        detector = stack.enter_context(Detector(session, resize_threads=opening.threads, **opening.detector))
        detector.check_prompt()
        copies = stack.enter_context(AnnotatedCopies(**opening.copies)) if opening.copies is not None else None
        decoders = stack.enter_context(ThreadPoolExecutor(opening.threads, "detrt-decode"))
        load = load_image if detector.decoder is None else detector.decoder.open

        def decode(inputs: list[Input]) -> dict[Input, Future[Any]]:
            return {source: decoders.submit(load, source.path) for source in inputs if source.kind == "image"}

        facts = {
            "batch_size": detector.batch_size,
            "backend": detector.session.backend,
            "note": getattr(session, "note", ""),
            "spec": detector.spec,
            "path": str(getattr(session, "path", None) or ""),
        }
        channel.send(facts)
        gone = threading.Event()
        for inputs, loads in receive_ahead(channel, decode, gone.set):
            answers = []
            for answer in _answers(detector, inputs, loads, copies, opening.every):
                if gone.is_set():
                    raise ParentGone
                answers.append(answer)
            if copies is not None:
                copies.finish_video()  # before the answer, so that a full disk is told
            channel.send(answers)


class _Decoded:
    """An Input whose image is on its way from a thread."""

    kind = "image"

    def __init__(self, source: Input, load: Future[Any]) -> None:
        self.path, self.load = source.path, load.result


def _answers(
    detector: Detector, inputs: list[Input], loads: dict[Input, Future[Any]], copies: AnnotatedCopies | None, every: int
) -> Iterator[Answer]:
    """(index of the input, its record or what was wrong) for each image and frame, in order."""
    sources = [_Decoded(source, loads[source]) if source in loads else source for source in inputs]
    index_of = {id(source): index for index, source in enumerate(sources)}
    for item in detect_inputs(detector, sources, every=every):  # type: ignore[arg-type]  # what it uses of an Input is there
        index = index_of[id(item.input)]
        if isinstance(item, Bad):
            yield index, str(item.error)
            continue
        if copies is not None:
            copies.save(Found(inputs[index], item.record, item.picture))
        yield index, item.record


if __name__ == "__main__":
    work_for_parent(int(sys.argv[1]), detect_for_parent)
