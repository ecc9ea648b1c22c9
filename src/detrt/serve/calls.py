"""Between HTTP and the pool: waiting for the items of a request, as long as somebody wants them."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Hashable

from PIL import Image
from starlette.requests import Request

from .batcher import Item
from .config import ServeConfig
from .errors import Refused
from .messages import Answer, ImageTask, ModelFacts, TensorTask
from .metrics import Metrics
from .scheduler import Pool

# Formats whose headers Pillow reads in Python; no C decoder touches a picture in the front process.
_PEEKED = ("JPEG", "PNG", "BMP", "GIF")


class ClientLeft(Exception):
    """The client closed its connection; there is nobody to answer."""


class Calls:
    """Runs the tasks of requests."""

    def __init__(self, config: ServeConfig, pool: Pool, metrics: Metrics) -> None:
        self.config, self.pool, self.metrics = config, pool, metrics
        self.stopping = False

    def model(self, name: str | None) -> ModelFacts:
        """The model that a request names; without a name the only one.

        Raises:
            Refused: not loaded yet, no such model, or no name where there are several.
        """
        models = self.pool.models
        if not models:
            raise Refused(503, "starting", "the models are being loaded; try again soon", retry_after=2)
        if name is None:
            if len(models) > 1:
                raise Refused(400, "bad_request", f"say which model: {', '.join(models)}")
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
        """Answers to all tasks of a request, in their order.

        Raises:
            Refused: the queue is full, a deadline passed, or a task was refused (the message says which).
            ClientLeft: the client closed the connection; what still waited is forgotten.
        """
        own = timeout_ms is not None and timeout_ms / 1e3 < self.config.timeout_s
        limit = timeout_ms / 1e3 if own and timeout_ms is not None else self.config.timeout_s
        lanes = [self._lane(model, task) for task in tasks]
        items = self.pool.submit(model.name, tasks, lanes)
        answers = asyncio.ensure_future(_all(items))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((answers, gone), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if answers.done():
                return answers.result(), items
            if gone.done():
                self.metrics.refused.labels("disconnected").inc()
                raise ClientLeft
            if own:
                raise Refused(408, "deadline", f"there is no answer within the {timeout_ms:g} ms that the request allows")
            raise Refused(
                504, "deadline", f"there is no answer within {limit:g} s; the server is too busy, or the model too slow"
            )
        finally:
            gone.cancel()
            answers.cancel()
            self.pool.leave(items)

    def _lane(self, model: ModelFacts, task: ImageTask | TensorTask) -> Hashable:
        if isinstance(task, TensorTask):
            return ("tensors", *((name, array.shape[1:]) for name, array in task.feeds.items()))
        if model.spec.input.resize != "shortest_edge" or model.spec.input.mask:
            return "images"
        return ("images", self.pool.lane_of(model.name, peeked_size(task.data)))


async def _all(items: list[Item]) -> list[Answer]:
    answers = []
    for number, item in enumerate(items):
        try:
            answers.append(await item.future)
        except Refused as refusal:
            if len(items) == 1:
                raise
            raise Refused(
                refusal.status, refusal.code, f"image {number}: {refusal.message}", retry_after=refusal.retry_after
            ) from None
    return answers


async def _disconnected(request: Request) -> None:
    """Returns when the client closes the connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def peeked_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) from the header of an image file, None where it does not tell.

    It only chooses who shares a batch; what the worker decodes decides. A photograph that is turned by its EXIF data
    may so wait in another lane than it should.
    """
    try:
        with Image.open(io.BytesIO(data), formats=_PEEKED) as image:
            return image.height, image.width
    except Exception:  # damaged files raise anything; the worker words what is wrong
        return None


def milliseconds(since: float) -> float:
    return round((time.perf_counter() - since) * 1e3, 3)
