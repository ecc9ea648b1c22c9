"""A worker process: `python -m detrt.serve.worker FD`, FD being its end of a socket pair.

It opens every model on its device and answers batches in their order. While a batch runs, the images of the next one
are decoded in threads. When the front process goes, the socket closes, and the worker leaves.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import traceback
import warnings
from concurrent.futures import Future, ThreadPoolExecutor

from PIL import Image

from ..errors import DetrtError
from . import messages as wire
from .messages import Batch, Done, Failed, ImageTask, Ready, Refusal, Setup, TensorTask
from .runner import Decoded, Model, decoded, parts_of

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
    with ThreadPoolExecutor(setup.threads, "detrt-decode") as pool:
        coming: queue.Queue[Work] = queue.Queue()
        threading.Thread(target=_read, args=(sock, setup, pool, coming), daemon=True).start()
        while True:
            work = coming.get()
            wire.send(sock, _done(work, models, pool, setup))


def _read(sock: socket.socket, setup: Setup, pool: ThreadPoolExecutor, coming: queue.Queue[Work]) -> None:
    """Take batches from the socket, and start decoding their images. The front process sends at most two ahead."""
    try:
        while True:
            batch = wire.receive(sock)
            parts, ahead = parts_of(batch)
            coming.put((batch, parts, _start(batch, parts[0], pool, setup) if ahead else None))
    except (EOFError, OSError):
        os._exit(0)  # the front process has gone; the model may be running, and nobody waits for it
    except Exception:
        traceback.print_exc()
        os._exit(1)  # without this thread the worker would sit there for ever; it is replaced


def _start(batch: Batch, indices: list[int], pool: ThreadPoolExecutor, setup: Setup) -> list[Future[Decoded]]:
    tasks = [batch.tasks[i] for i in indices]
    return [pool.submit(decoded, task, setup.max_pixels, setup.decode) for task in tasks if isinstance(task, ImageTask)]


def _done(work: Work, models: dict[str, Model], pool: ThreadPoolExecutor, setup: Setup) -> Done:
    batch, parts, started = work
    model = models[batch.model]
    runs: list[int] = []
    try:
        tensors = [task for task in batch.tasks if isinstance(task, TensorTask)]
        if tensors:
            return Done(batch.number, tuple(model.infer(tensors, runs.append)), tuple(runs))
        results = []
        for number, part in enumerate(parts):
            futures = started if number == 0 and started is not None else _start(batch, part, pool, setup)
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
