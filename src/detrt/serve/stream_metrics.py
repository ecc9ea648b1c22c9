"""Metrics of live sources for Prometheus, over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..data.streams import LiveStreams
from ..errors import OutputError

_COUNTS = {
    "received": "Frames that arrived",
    "processed": "Frames that were detected in",
    "dropped": "Frames that a newer one overtook",
    "damaged": "Frames that could not be decoded",
    "connections": "Times that a camera was connected",
}


class _Collector:
    """Reads the counts at each scrape."""

    def __init__(self, streams: LiveStreams) -> None:
        self._streams = streams

    def collect(self) -> Iterator[Any]:
        counts = {source.path: one for source, one in self._streams.snapshot().items()}
        for name, text in _COUNTS.items():
            family = CounterMetricFamily(f"detrt_stream_{name}", text, labels=["camera"])
            for camera, one in counts.items():
                family.add_metric([camera], getattr(one, name))
            yield family
        latency = GaugeMetricFamily(
            "detrt_stream_latency_seconds", "From arrival to detections, last 1000 frames", labels=["camera", "quantile"]
        )
        for camera, one in counts.items():
            if latencies := one.latencies_s:
                for quantile in (0.5, 0.9, 0.99):
                    latency.add_metric([camera, f"{quantile:g}"], float(np.quantile(latencies, quantile)))
        yield latency


@contextlib.contextmanager
def serve_metrics(streams: LiveStreams, host: str, port: int) -> Iterator[int]:
    """Serve the counts at /metrics; yields the port, which `port` 0 leaves to the system. Raises OutputError."""
    registry = CollectorRegistry()
    registry.register(_Collector(streams))  # type: ignore[arg-type]  # it has `collect`, which is all
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise OutputError(f"`metrics={host}:{port}` cannot be served: {error.strerror}; give another port") from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
