"""`detrt serve`: an HTTP server for detectors. A front process batches requests; worker processes run them.

    client ── front process: app, kserve_routes (HTTP) ─ batcher (queue) ─ scheduler ── worker processes: worker
                    └─ reader processes: reader (large bodies)

The front process never decodes an image, never runs a model and never parses a large body, so that what crashes, hangs or takes
memory there affects only a child, which is replaced. Nothing here imports the web packages before the server is started.
"""

from __future__ import annotations

from .config import ServeConfig, named_models

__all__ = ["ServeConfig", "named_models"]
