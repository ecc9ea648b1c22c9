"""`detrt serve`: an HTTP server for detectors. A front process batches requests; worker processes run them.

    client ── front process: app, kserve (HTTP) ─ batcher (queue) ─ scheduler ── worker processes: worker

The front process never decodes an image and never runs a model, so that a crash of a decoder or a model affects only a worker,
which is replaced. Nothing here imports the web packages before the server is started.
"""

from __future__ import annotations

from .config import ServeConfig, named_models

__all__ = ["ServeConfig", "named_models"]
