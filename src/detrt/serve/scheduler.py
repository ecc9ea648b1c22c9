"""Scheduling of tasks on worker processes, and requests that wait for their results."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request

from ..backends.worker_process import Failed, after_death
from ..data.images import stored_size
from ..data.preprocess import tensor_size
from ..errors import DetrtError, SessionError, number_of
from .batcher import ALONE, Batcher, Item, QueueFull
from .config import ServeConfig
from .errors import Refused, bad
from .generation import FIRST_PAUSE_S, Generation, Sent, ServerWorker
from .messages import Alive, Answer, Batch, ContentChanged, Done, ImageTask, Left, ModelFacts, Ready, Setup, TensorTask
from .metrics import Metrics

log = logging.getLogger("detrt.serve")
BATCHES_PER_WORKER = 2  # batches per worker: one runs, the images of the next are decoded
_EARLY_ENDS = 3
# A worker that does nothing but what nobody waits for is killed after so many seconds, or after twice the time of a full batch.
_GRACE_S = 3.0
_SILENCE_S = 20.0  # without a sign of life of a worker that opens its models
_WATCH_S = 0.5
_LONGEST_PAUSE_S = 10.0


class Pool:
    """Runs tasks on worker processes. `failure` is set if a worker cannot start at first.

    Runs in one event loop, without locks. A worker that dies is replaced, and its tasks run again once, alone; if a second worker
    dies, they are refused with 503. A worker that works on nothing but what nobody waits for, and does not end that, is killed and
    replaced, and so is one that is stuck while it opens its models.

    All workers that answer hold the same content. `load` starts a `Generation` of workers beside the one that serves, and puts it in
    its place when all of them are ready; the old workers finish what they were given. Where a model is replaced before all workers
    were ready once, the server begins again with what is stored now.
    """

    def __init__(self, config: ServeConfig, metrics: Metrics, on_worker: Callable[[int, int], None] | None = None) -> None:
        self.config, self.metrics, self._on_worker = config, metrics, on_worker
        self.failure: DetrtError | None = None
        self.failed = asyncio.Event()
        self.all_ready = asyncio.Event()
        self._batcher = Batcher(
            lambda item: self._generations[item.group].models[item.model].max_batch,
            capacity=config.queue_size,
            max_delay=config.max_delay_ms / 1e3,
        )
        self._setups = [Setup.of(config, device) for device in config.worker_devices]
        self._serving = Generation(0, len(self._setups), {})
        self._generations = {0: self._serving}  # by number: that which serves, that which is loaded, and those that leave
        self._loading = asyncio.Lock()
        self._batches = 0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing, self._early_ends = False, 0
        self._finished: deque[tuple[float, int]] = deque(maxlen=64)  # (when, images), for Retry-After
        metrics.watch("detrt_queue_images", "Images that wait for a worker", lambda: self._batcher.waiting)
        metrics.watch("detrt_running_images", "Images that workers hold", lambda: self.running)
        metrics.watch("detrt_workers_ready", "Worker processes that can run", lambda: self.ready_workers)

    def start(self) -> None:
        self._start_all(self._serving)
        self._spawn(self._watch())

    @property
    def models(self) -> dict[str, ModelFacts]:
        """Facts of the models that new requests get; empty until a worker is ready."""
        return self._serving.models

    @property
    def workers(self) -> list[ServerWorker]:
        """The processes of all generations."""
        return [worker for generation in self._generations.values() for worker in generation.live()]

    @property
    def ready_workers(self) -> int:
        return self._serving.ready

    @property
    def running(self) -> int:
        return sum(item.rows for worker in self.workers for sent in worker.running.values() for item in sent.items)

    def submit(self, model: str, tasks: Sequence[ImageTask | TensorTask], lanes: Sequence[Hashable]) -> list[Item]:
        """Queue the tasks of a request; the future of each item has its result, or a Refused.

        lanes: for each task; tasks of one lane may share a batch.

        Raises:
            Refused: the queue is full.
        """
        loop = asyncio.get_running_loop()
        group = self._serving.number
        items = [
            Item(model, task, (group, model, lane), loop.create_future(), getattr(task, "rows", 1), group=group)
            for task, lane in zip(tasks, lanes, strict=True)
        ]
        try:
            self._batcher.add(items, loop.time())
        except QueueFull:
            raise Refused(
                429,
                "queue_full",
                f"{self._batcher.waiting} of at most {number_of(self._batcher.capacity, 'image')} wait already; try again later, or start the "
                "server with more workers or a longer `queue`",
                retry_after=self.retry_after(),
            ) from None
        self._pump()
        return items

    def leave(self, items: list[Item]) -> None:
        """Cancel items. Workers are told, so that they end what nobody waits for; results of running ones are dropped."""
        for item in items:
            self._batcher.leave(item)
            item.future.cancel()
        gone = set(map(id, items))
        for worker in self.workers:
            for number, sent in worker.running.items():
                slots = tuple(slot for slot, item in enumerate(sent.items) if id(item) in gone)
                if not slots:
                    continue
                if all(item.state == "left" for item in sent.items):
                    sent.abandoned = asyncio.get_running_loop().time()
                if worker.state == "ready":
                    worker.send(Left(number, slots))

    def retry_after(self) -> int:
        """Estimated seconds until the queue is empty, from recent throughput; 1 to 60."""
        if len(self._finished) < 2:
            return 1
        span = asyncio.get_running_loop().time() - self._finished[0][0]
        speed = sum(count for _, count in self._finished) / max(span, 1e-3)
        return min(60, max(1, math.ceil(self._batcher.waiting / max(speed, 1e-3))))

    def refuse_all(self, refusal: Refused) -> None:
        """Refuse all waiting and running items, at the end of a drain that took too long."""
        running = [item for worker in self.workers for sent in worker.running.values() for item in sent.items]
        for item in [*self._batcher.items(), *running]:
            self._refuse(item, refusal)

    async def close(self) -> None:
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.disconnect() for worker in self.workers))

    @property
    def loading(self) -> bool:
        """Whether `load` is at work."""
        return self._loading.locked()

    def stop_loading(self) -> None:
        """Give up what `load` opens, at the end of the server."""
        for generation in self._generations.values():
            if generation.number > self._serving.number:
                generation.fail(SessionError("the server stops"))

    async def load(self, names: Collection[str] | None = None) -> None:
        """Open models again, in new workers, which take the place of those that serve when all of them are ready.

        names: of the models whose content may have changed; None: all.

        Raises:
            Refused: they cannot be opened (400), which leaves those that serve as they are; the server starts or stops (503).
        """
        if not self.all_ready.is_set():
            raise _starting()
        async with self._loading:
            for attempts in reversed(range(_EARLY_ENDS)):
                serving = self._serving
                pinned = {} if names is None else {name: digest for name, digest in serving.pinned.items() if name not in names}
                fresh = self._generation(pinned)
                try:
                    self._start_all(fresh)
                    await fresh.decided.wait()
                finally:
                    if self._closing or fresh.error is not None or not fresh.decided.is_set():
                        self._retire(fresh)
                if not (fresh.mixed and attempts):
                    break
            if fresh.error is not None:
                self.metrics.loads.labels("failed").inc()
                what = "the models" if names is None else ", ".join(f"'{name}'" for name in names)
                raise Refused(400, "not_loaded", f"{what} cannot be loaded, and what was served before still is: {fresh.error}")
            self.metrics.loads.labels("done").inc()
            self._serve(fresh)

    def _generation(self, pinned: Mapping[str, str]) -> Generation:
        fresh = Generation(max(self._generations) + 1, len(self._setups), pinned)
        self._generations[fresh.number] = fresh
        return fresh

    def _serve(self, fresh: Generation) -> None:
        """Give new requests to another generation. Workers of the one before finish what they were given."""
        before, self._serving = self._serving, fresh
        for worker in [worker for worker in before.live() if worker.state == "starting"]:
            worker.kill()
        self._refuse_waiting(before)
        self._pump()

    def _begin_again(self) -> None:
        """A model was replaced before all workers were ready once: let all of them open what is stored now."""
        if not self._give_up("the models are replaced again and again while workers open them; start the server when they stay"):
            log.warning("the models were replaced while workers opened them: all workers open what is stored now")
            self._serve(self._generation({}))
            self._start_all(self._serving)

    def _retire(self, generation: Generation) -> None:
        """End the workers of a generation, which have nothing to do."""
        del self._generations[generation.number]
        for worker in generation.live():
            worker.state = "gone"
            self._spawn(worker.disconnect())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_all(self, generation: Generation) -> None:
        for index in range(len(self._setups)):
            self._spawn(self._start(generation, index, 0.0))

    async def _start(self, generation: Generation, index: int, pause: float) -> None:
        await asyncio.sleep(pause)
        if self._generations.get(generation.number) is not generation or self._leaves(generation):
            return
        # Where no worker holds the content that was opened first, the next one may open what is there now.
        pinned = {} if generation is self._serving and not generation.ready else generation.pinned
        try:
            worker = ServerWorker(index, replace(self._setups[index], pinned=pinned), generation)
            generation.workers[index] = worker
            await worker.connect(partial(self._on_message, worker), partial(self._on_exit, worker))
        except OSError as error:
            log.error("worker %d cannot be started: %s", index, error)
            generation.workers[index] = None
            self._ended(
                generation, index, f"no worker process can be started ({error}); see the limits of processes, files and memory"
            )

    def _leaves(self, generation: Generation) -> bool:
        """Whether a later generation has taken its place."""
        return generation.number < self._serving.number

    def _on_message(self, worker: ServerWorker, message: Alive | Ready | Failed | Done) -> None:
        worker.heard = asyncio.get_running_loop().time()
        if isinstance(message, Alive):
            return
        if isinstance(message, Failed):
            self._cannot_start(worker, message)
        elif isinstance(message, Ready):
            self._is_ready(worker, worker.generation, message)
        elif batch := worker.running.pop(message.number, None):
            for following in list(worker.running.values())[:1]:
                following.first = min(following.first, worker.heard)
            items, sent = batch.items, batch.since
            metrics, model = self.metrics, items[0].model
            self._finished.append((asyncio.get_running_loop().time(), sum(item.rows for item in items)))
            for rows in message.runs:
                metrics.batch_size.labels(model).observe(rows)
            slowest = 0.0
            for item, result in zip(items, message.results, strict=True):
                if isinstance(result, Refused):
                    self._refuse(item, result)
                    continue
                slowest = max(slowest, result.model_ms)
                metrics.images.labels(model).inc(item.rows)
                metrics.detections.labels(model).inc(result.found)
                metrics.queue_seconds.labels(model).observe(sent - item.since)
                if isinstance(item.task, ImageTask):
                    metrics.decode_seconds.labels(model).observe(result.decode_ms / 1e3)
                item.started, item.state, item.task = sent, "left", None  # without its image
                if not item.future.done():
                    item.future.set_result(result)
            if slowest:
                metrics.model_seconds.labels(model).observe(slowest / 1e3)
        self._pump()

    def _is_ready(self, worker: ServerWorker, generation: Generation, message: Ready) -> None:
        if self._leaves(generation):  # it was killed, and had said so before
            return
        opened = {facts.name: facts.content for facts in message.models}
        if opened != generation.pinned and generation.ready:  # both were started before the first of them was ready
            log.error("worker %d opened other content than the others: the models are being replaced", worker.index)
            worker.kill()
            if generation is not self._serving:
                generation.mixed = True
                generation.fail(SessionError("the models were replaced again and again while they were opened; load them again"))
            elif not self.all_ready.is_set():
                self._begin_again()
            return
        if generation is self._serving and generation.pinned and opened != generation.pinned:
            log.warning("no worker is left that holds what was served; the models are those that are stored now")
            for item in self._batcher.items():
                self._refuse(item, _replaced())
        generation.pinned, generation.models = opened, {facts.name: facts for facts in message.models}
        worker.state = "ready"
        generation.pauses[worker.index] = FIRST_PAUSE_S
        if self._on_worker is not None and not self.all_ready.is_set():
            self._on_worker(generation.ready, len(generation.workers))
        if generation.ready == len(generation.workers):
            generation.decided.set()
            self.all_ready.set()

    def _cannot_start(self, worker: ServerWorker, message: Failed) -> None:
        if worker.generation is not self._serving:
            if message.trace:
                log.error("worker %d has a bug:\n%s", worker.index, message.trace)
            worker.generation.fail(SessionError(str(message.error)))
        elif self.all_ready.is_set():  # it started before, so that the cause may be transient: a file being replaced, a full GPU
            log.error("worker %d cannot start: %s", worker.index, message.trace or message.error)
        elif isinstance(message.error, ContentChanged):
            self._begin_again()
        else:
            self.failure = SessionError(str(message.error))
            if message.trace:
                log.error("worker %d has a bug:\n%s", worker.index, message.trace)
                self.failure = SessionError("a worker cannot start because of a bug of detrt; its traceback is above")
            self.failed.set()

    def _refuse_waiting(self, generation: Generation) -> None:
        """Refuse what waits for workers that will not be started again, where none of them is left."""
        if not generation.ready:
            for item in [item for item in self._batcher.items() if item.group == generation.number]:
                self._refuse(item, _replaced())

    def _refuse(self, item: Item, refusal: Refused) -> None:
        self._batcher.leave(item)
        if not item.future.done():
            item.future.set_exception(refusal)

    def _on_exit(self, worker: ServerWorker) -> None:
        """Requeue the items of a dead worker, and start another one."""
        retired = worker.state == "gone"
        worker.state = "gone"
        if self._closing or retired:
            return
        batches = len(worker.running)
        again, lost = after_death(item for sent in worker.running.values() for item in sent.items if item.state != "left")
        for item in again:
            self.metrics.retried.inc(item.rows)
            self._batcher.requeue(item)
        for item in lost:
            text = "two workers ended while they ran this request; it was not tried again: check the image and the log"
            self._refuse(item, Refused(503, "worker_died", text, retry_after=1))
        worker.running = {}
        self._pump()
        self._spawn(self._bury(worker, batches))

    async def _bury(self, worker: ServerWorker, batches: int) -> None:
        """Wait for the end of a process whose socket is closed, and start another one. batches: that it held."""
        code = await asyncio.to_thread(worker.exit_code)
        if code is None:  # it still runs
            worker.kill()
        if not (self.failure and not self.all_ready.is_set()):
            log.warning("worker %d is gone (exit code %s) with %d batches", worker.index, code, batches)
        self._ended(
            worker.generation,
            worker.index,
            f"workers end before they are ready (exit code {code}); see what they printed, and whether the "
            "machine has enough memory: try `workers=1`",
        )
        self._pump()

    def _ended(self, generation: Generation, index: int, why: str) -> None:
        """Start another worker in the place of one, unless there is no use in it. why: it ended before it was ready."""
        if self._leaves(generation):
            self._refuse_waiting(generation)
        elif generation is not self._serving:
            generation.fail(SessionError(why))
        elif not self._give_up(why):
            self._restart(index)

    def _give_up(self, why: str) -> bool:
        """Count an end of a worker before all were ready once. Whether there were too many, so that the server ends."""
        if not self.all_ready.is_set() and not self.failure:
            self._early_ends += 1
            if self._early_ends > _EARLY_ENDS:
                self.failure = SessionError(why)
                self.failed.set()
        return self.failure is not None

    def _restart(self, index: int) -> None:
        self.metrics.restarts.labels(str(index)).inc()
        pauses = self._serving.pauses
        pause, pauses[index] = pauses[index], min(_LONGEST_PAUSE_S, 2 * pauses[index])  # until it is ready again
        self._spawn(self._start(self._serving, index, pause))

    def _pump(self) -> None:
        """Send batches to workers with room, idle ones first."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        idle = set[int]()  # groups with an idle worker whose next batch is not due yet
        for held in range(BATCHES_PER_WORKER):
            for worker in self.workers:
                if worker.state != "ready" or len(worker.running) != held or (held and worker.retrying):
                    continue
                group = worker.generation.number
                items = self._batcher.take(now, idle=held == 0, group=group)
                if not items:
                    idle |= {group} if held == 0 else set()
                    continue
                self._batches += 1
                worker.retrying = items[0].lane[0] == ALONE
                worker.running[self._batches] = Sent(items, now, math.inf if worker.running else now)
                tasks = tuple(item.task for item in items if item.task is not None)
                worker.channel.send(Batch(self._batches, items[0].model, tasks))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due := [time for time in map(self._batcher.due, idle) if time is not None]:
            self._timer = loop.call_at(max(min(due), now), self._pump)
        for generation in [one for one in self._generations.values() if self._leaves(one)]:
            held = any(worker.running for worker in generation.live())
            if not held and all(item.group != generation.number for item in self._batcher.items()):
                self._retire(generation)

    async def _watch(self) -> None:
        """Kill workers that are stuck: with work that nobody waits for, or while they open their models."""
        loop = asyncio.get_running_loop()
        grace = _GRACE_S
        while True:
            await asyncio.sleep(_WATCH_S)
            now = loop.time()
            if self.models:
                grace = max(_GRACE_S, 2 * max(facts.run_s for facts in self.models.values()))
            for worker in self.workers:
                if worker.state == "starting":
                    silent, opening = now - worker.heard, now - worker.begun
                    if silent > _SILENCE_S or opening > self.config.start_timeout_s:
                        log.error(
                            "worker %d is stuck: %.0f s of opening models, silent for %.0f s", worker.index, opening, silent
                        )
                        worker.kill()
                elif worker.running and worker.state == "ready":
                    number, sent = next(iter(worker.running.items()))
                    if now - max(sent.abandoned, sent.first) > grace:
                        log.error("worker %d is stuck with what nobody waits for; it is killed and replaced", worker.index)
                        for other in [other for other in worker.running if other != number]:  # it did not run these yet
                            for item in worker.running.pop(other).items:
                                if item.state != "left":
                                    self._batcher.requeue(item)
                        worker.kill()


def _starting() -> Refused:
    return Refused(503, "starting", "the models are being loaded; try again soon", retry_after=2)


def _replaced() -> Refused:
    text = "the models were replaced while this request waited for them, and no worker is left that holds the old ones; send it again"
    return Refused(503, "replaced", text, retry_after=1)


class ClientDisconnected(Exception):
    """The client has closed its connection."""


class Calls:
    """Submits the tasks of requests; handles timeouts and clients that disconnect."""

    def __init__(self, config: ServeConfig, pool: Pool, metrics: Metrics) -> None:
        self.config, self.pool, self.metrics = config, pool, metrics
        self.stopping = False

    def model(self, name: str | None) -> ModelFacts:
        """The model of a request; without a name the only one.

        Raises:
            Refused: not loaded yet, no such model, or no name with several models.
        """
        models = self.pool.models
        if not models:
            raise _starting()
        if name is None:
            if len(models) > 1:
                raise bad(f"say which model: {', '.join(models)}")
            return next(iter(models.values()))
        if name not in models:
            raise Refused(404, "no_model", f"there is no model '{name[:100]}'; served are: {', '.join(models)}")
        return models[name]

    async def run(
        self,
        request: Request,
        model: ModelFacts,
        tasks: list[ImageTask] | list[TensorTask],
        timeout_ms: float | None,
    ) -> tuple[list[Answer], list[Item]]:
        """Results of all tasks of a request, in order.

        Raises:
            Refused: the queue is full, a deadline passed, or a task was refused.
            ClientDisconnected: the client closed the connection; waiting tasks are cancelled.
        """
        own = timeout_ms is not None and timeout_ms / 1e3 < self.config.timeout_s
        limit = timeout_ms / 1e3 if own and timeout_ms is not None else self.config.timeout_s
        now = self.model(model.name)
        if isinstance(tasks[0], TensorTask) and (now.inputs, now.outputs, now.max_batch) != (
            model.inputs,
            model.outputs,
            model.max_batch,
        ):
            raise _replaced()
        model = now
        items = self.pool.submit(model.name, tasks, [self._lane(model, task) for task in tasks])
        # Ends with the last result, or with the first refused task.
        answers = asyncio.gather(*(item.future for item in items))
        answers.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs that nobody asked
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((answers, gone), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if answers.done():
                return answers.result(), items
            if gone.done():
                self.metrics.refused.labels("disconnected").inc()
                raise ClientDisconnected
            if own:
                raise Refused(408, "deadline", f"there is no answer within the {timeout_ms:g} ms that the request allows")
            raise Refused(
                504, "deadline", f"there is no answer within {limit:g} s; the server is too busy, or the model too slow"
            )
        except Refused as refusal:
            if len(items) == 1 or not answers.done():
                raise
            number = next(n for n, item in enumerate(items) if item.future.done() and item.future.exception() is refusal)
            message = f"image {number}: {refusal.message}"
            raise Refused(refusal.status, refusal.code, message, retry_after=refusal.retry_after) from None
        finally:
            unfinished = [item for item in items if not item.future.done()]
            gone.cancel()
            answers.cancel()
            if unfinished:
                self.pool.leave(unfinished)

    def _lane(self, model: ModelFacts, task: ImageTask | TensorTask) -> Hashable:
        """Lane of a task: tensors of the same shapes, or images whose tensors have one size, may share a batch."""
        if isinstance(task, TensorTask):
            return ("tensors", *((name, array.shape[1:]) for name, array in task.feeds.items()))
        # An image that is rotated by its EXIF orientation may wait in another lane than it should; the worker splits a batch by
        # the sizes that it decodes.
        size_hw = task.data.shape[:2] if isinstance(task.data, np.ndarray) else stored_size(task.data)
        given = model.spec.input
        return "images" if size_hw is None else ("images", tensor_size(size_hw, given, model.only_hw, sizes=model.sizes))


async def _disconnected(request: Request) -> None:
    """Returns when the client closes the connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def milliseconds(since: float) -> float:
    return round((time.perf_counter() - since) * 1e3, 3)
