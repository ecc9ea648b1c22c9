"""`detrt serve`: an HTTP server for detectors. One front process takes requests and makes batches; worker processes run them.

    client ── front process: app, kserve (HTTP) ─ batcher (what waits) ─ pool (who runs it) ── worker processes: runner

The front process never decodes an image and never runs a model, so that whatever an image does to a decoder or a
model happens to a worker, which is replaced. Nothing here imports the web packages before the server is started.
"""

from __future__ import annotations

from .config import ServeConfig, named_models

__all__ = ["ServeConfig", "named_models"]
