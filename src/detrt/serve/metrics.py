"""Metrics of the server for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters and histograms of one server; all times are seconds."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        disable_created_metrics()  # a series more for each counter and histogram, with the time of its first value
        self.registry = CollectorRegistry()
        shared = {"registry": self.registry}
        self.requests = Counter(
            "detrt_requests", "Requests by route, method and status of the answer", ("route", "method", "status"), **shared
        )
        self.request_seconds = Histogram(
            "detrt_request_seconds", "From the head of a request to its answer", ("route",), buckets=_SECONDS, **shared
        )
        self.images = Counter("detrt_images", "Images answered", ("model",), **shared)
        self.detections = Counter("detrt_detections", "Objects found", ("model",), **shared)
        self.refused = Counter(
            "detrt_refused",
            "Requests without a result, by reason: queue_full, memory_full, deadline, disconnected, worker_died, bad_image, ...",
            ("reason",),
            **shared,
        )
        self.queue_seconds = Histogram(
            "detrt_queue_seconds", "From the queue to a worker", ("model",), buckets=_SECONDS, **shared
        )
        self.decode_seconds = Histogram("detrt_decode_seconds", "Decoding an image file", ("model",), buckets=_SECONDS, **shared)
        self.model_seconds = Histogram(
            "detrt_model_seconds", "Resizing, running the model and reading boxes, a run", ("model",), buckets=_SECONDS, **shared
        )
        self.batch_size = Histogram("detrt_batch_size", "Images in a run of the model", ("model",), buckets=_BATCHES, **shared)
        self.restarts = Counter("detrt_worker_restarts", "Worker processes that were replaced", ("worker",), **shared)
        self.retried = Counter("detrt_retried_images", "Images that were run again because their worker died", **shared)
        self.loads = Counter("detrt_model_loads", "Loads of models into a running server, by outcome", ("outcome",), **shared)
        self.body_bytes = Counter("detrt_body_bytes", "Bytes of request bodies that were read", **shared)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge whose value is computed when it is read."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)
