"""A worker process of `DevicePool`: `python -m detrt.jobs.worker FD`, FD being its end of a socket.

It opens one detector on one device and answers tasks in their order. Images of the coming tasks are decoded in
threads meanwhile. When the other end of the socket closes, it leaves, and removes a video it was writing.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from ..backends.open import open_on
from ..data.images import Input, load_image
from ..data.sinks import Record
from ..detector import Detector
from ..errors import DetrtError, ImageError
from .annotate import AnnotatedCopies
from .run import Bad, Found, detect_inputs

# What is sent back for one image or frame: its record, or what was wrong with it.
Answer = tuple[int, Record | str]
_END = None


class _Left(Exception):
    """The other end has gone."""


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent closes the socket
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output belongs to the results
    pipe = Connection(descriptor)
    try:
        _serve(pipe, pipe.recv())
    except (EOFError, BrokenPipeError, ConnectionResetError, _Left):
        return
    except DetrtError as error:
        _tell(pipe, ("failed", type(error).__name__, str(error)))
    except Exception:
        _tell(pipe, ("bug", "", traceback.format_exc()))


def _tell(pipe: Connection, message: tuple[Any, ...]) -> None:
    with contextlib.suppress(OSError):
        pipe.send(message)


def _serve(pipe: Connection, opening: dict[str, Any]) -> None:
    session = open_on(opening["ref"], opening["device"], **opening["session"])
    with contextlib.ExitStack() as stack:
        if opening["categories"] is not None:
            from ..evaluation.coco import bind_categories

            session = bind_categories(session, opening["categories"])
        detector = stack.enter_context(Detector(session, resize_threads=opening["decoders"], **opening["detector"]))
        detector.check_prompt()
        copies = stack.enter_context(AnnotatedCopies(**opening["copies"])) if opening["copies"] is not None else None
        gone = threading.Event()
        facts = {
            "batch_size": detector.batch_size,
            "backend": detector.session.backend,
            "note": getattr(session, "note", ""),
            "spec": detector.spec,
            "path": str(getattr(session, "path", None) or ""),
        }
        pipe.send(("ready", facts))
        for number, inputs, loads in _tasks(pipe, opening["decoders"], detector, stack, gone):
            answers = []
            for answer in _answers(detector, inputs, loads, copies, opening["every"]):
                if gone.is_set():
                    raise _Left
                answers.append(answer)
            if copies is not None:
                copies.finish_video()  # before the answer, so that a full disk is told
            pipe.send(("done", number, answers))


def _tasks(
    pipe: Connection, decoders: int, detector: Detector, stack: contextlib.ExitStack, gone: threading.Event
) -> Iterator[tuple[int, list[Input], dict[Input, Future[Any]]]]:
    """(number, inputs, images being decoded) of each task; the parent keeps no more than a few of them here."""
    pool = stack.enter_context(ThreadPoolExecutor(decoders, "detrt-decode"))
    load = load_image if detector.decoder is None else detector.decoder.open
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while (task := pipe.recv()) is not _END:
                number, inputs = task
                loads = {source: pool.submit(load, source.path) for source in inputs if source.kind == "image"}
                waiting.put((number, inputs, loads))
            waiting.put(_END)
        except (OSError, EOFError, RuntimeError):  # RuntimeError: the thread pool is closed already
            gone.set()
            waiting.put(_Left())

    threading.Thread(target=receive, name="detrt-receive", daemon=True).start()
    while (task := waiting.get()) is not _END:
        if isinstance(task, _Left):
            raise task
        yield task


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


def rebuilt(name: str, message: str) -> DetrtError:
    """The error of a worker, in this process."""
    from .. import errors

    kind = getattr(errors, name, ImageError)
    error = kind.__new__(kind)  # one class takes other arguments than its message
    Exception.__init__(error, message)
    return error


if __name__ == "__main__":
    main(int(sys.argv[1]))
