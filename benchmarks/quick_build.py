"""`detrt build` with a TensorRT 8.5 builder that times each tactic once: engines come sooner, and some of their kernels are slower.

    python benchmarks/quick_build.py build BUNDLE --target tensorrt --batch 1

BUILDER_LOG names a file for every message of the builder, each behind the seconds since its start: what it times, and where it hangs.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from detrt.backends.tensorrt import bindings, build, worker

WORKER = "--worker"


def hurry() -> None:
    """Change the builder of this process."""
    configure = worker._builder_config

    def once(*arguments: Any, **named: Any) -> Any:
        config = configure(*arguments, **named)
        for name in ("min_timing_iterations", "avg_timing_iterations"):
            if hasattr(config, name):
                setattr(config, name, 1)
        return config

    worker._builder_config = once


def log_to(path: str) -> None:
    """Write what TensorRT logs in this process to a file, its verbose messages too."""
    start, make_logger = time.monotonic(), bindings._make_logger
    file = open(path, "w", buffering=1)  # open as long as the process

    def logger_to_file(module: Any, note: Any) -> Any:
        def write(severity: str, text: str) -> None:
            file.write(f"{time.monotonic() - start:.1f} {severity} {text}\n")
            note(severity, text)

        return make_logger(module, write)

    bindings._make_logger = logger_to_file


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        hurry()
        if log := os.environ.get("BUILDER_LOG"):
            log_to(log)
        sys.exit(worker.main(sys.argv[2:]))
    from detrt.cli import main

    build.WORKER_COMMAND = (sys.executable, os.path.abspath(__file__), WORKER)
    sys.exit(main(sys.argv[1:]))
