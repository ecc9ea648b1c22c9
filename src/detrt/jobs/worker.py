"""A worker process of `DevicePool`: `python -m detrt.jobs.worker FD`, where FD is its end of a socket pair.

It opens one detector on one device and runs tasks in order; threads decode images of the next tasks meanwhile. When the other end
of the socket closes, it exits, and removes an unfinished video.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..backends.open import open_with
from ..backends.search import SessionOptions
from ..backends.worker_process import Channel, ParentGone, answer_ahead, work_for_parent
from ..data.frames import show_frames_once
from ..data.images import Input
from ..data.prefetch import Begun, Prefetcher
from ..data.sinks import Record
from ..detector import Detector, DetectorOptions
from .annotate import AnnotatedCopies
from .run import ImageFailure, detect_inputs

# Result of one image or frame: the index of its input, and its record or error.
Answer = tuple[int, Record | str]


@dataclass(frozen=True, slots=True)
class Opening:
    """The first message to a worker: the model, its device, and what to do with the images.

    session: how the model is opened, with its device. detector: what is done with images. threads: that decode and resize them.
    copies: arguments of `AnnotatedCopies`.
    """

    ref: str
    threads: int
    session: SessionOptions
    detector: DetectorOptions
    categories: list[dict[str, Any]] | None = None
    copies: Mapping[str, Any] | None = None
    every: int = 1


def detect_for_parent(channel: Channel) -> None:
    """Open the model, send its facts, and run tasks until the connection closes.

    Raises:
        ParentGone: the parent has exited. DetrtError: errors of opening or running the model.
    """
    show_frames_once()
    opening: Opening = channel.receive()
    session = open_with(opening.ref, opening.session)
    with contextlib.ExitStack() as stack:
        if opening.categories is not None:
            from ..evaluation.coco import bind_categories

            session = bind_categories(session, opening.categories)
        detector = stack.enter_context(Detector.with_options(session, replace(opening.detector, resize_threads=opening.threads)))
        detector.check_prompt()
        copies = stack.enter_context(AnnotatedCopies(**opening.copies)) if opening.copies is not None else None
        prefetcher = stack.enter_context(Prefetcher(opening.threads, decoder=detector.decoder))

        def begin(inputs: list[Input]) -> list[Input | Begun]:
            return [prefetcher.begin(source) if source.kind == "image" else source for source in inputs]

        def answer(_: object, inputs: list[Input | Begun]) -> list[Answer]:
            answers = []
            for found in _answers(detector, prefetcher, inputs, copies, opening.every):
                if gone.is_set():
                    raise ParentGone
                answers.append(found)
            if copies is not None:
                copies.finish_video()  # before the result, so that a full disk is reported
            return answers

        channel.send({"batch_size": detector.batch_size, "spec": detector.spec, "info": detector.session.info})
        gone = threading.Event()
        answer_ahead(channel, begin, answer, gone.set)


def _answers(
    detector: Detector, prefetcher: Prefetcher, inputs: list[Input | Begun], copies: AnnotatedCopies | None, every: int
) -> Iterator[Answer]:
    """(index of the input, its record or error) for each image and frame, in order."""
    index_of = {id(one.input if isinstance(one, Begun) else one): index for index, one in enumerate(inputs)}
    for item in detect_inputs(detector, inputs, prefetcher=prefetcher, every=every):
        if isinstance(item, ImageFailure):
            yield index_of[id(item.input)], str(item.error)
            continue
        if copies is not None:
            copies.save(item)
        yield index_of[id(item.input)], item.record


if __name__ == "__main__":
    work_for_parent(int(sys.argv[1]), detect_for_parent)
