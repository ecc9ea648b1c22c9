"""`detrt build` with a TensorRT 8.5 builder that times each tactic once: engines come sooner, and some of their kernels are slower.

    python benchmarks/quick_build.py build BUNDLE --target tensorrt --batch 1

DEVICE_ATTRIBUTES names the library of device_attributes.c, which builds beside each other need on some drivers. NVRTC_CACHE names
that of nvrtc_cache.c and NVRTC_CACHE_FOLDER where it keeps compiled kernels, for the builds of a host to share. BUILDER_LOG names a
file for every message of the builder, each behind the seconds since its start: what it times, and where it hangs.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

from detrt.backends.tensorrt import bindings, build, worker

WORKER = "--worker"


def install(variable: str, *arguments: bytes) -> None:
    """Install the library that the environment variable names, if it is set."""
    library = os.environ.get(variable)
    if library and (code := ctypes.CDLL(library).install(*arguments)):
        raise RuntimeError(f"{library} could not be installed: it returned {code}, see its source")


def hurry() -> None:
    """Change the builder of this process."""
    configure, capability = worker._builder_config, worker._sms_of_this_gpu

    def once(*arguments: Any) -> Any:
        config = configure(*arguments)
        for name in ("min_timing_iterations", "avg_timing_iterations"):
            if hasattr(config, name):
                setattr(config, name, 1)
        return config

    def with_table(*arguments: Any) -> tuple[int, ...]:
        found = capability(*arguments)  # initialises CUDA
        install("DEVICE_ATTRIBUTES", b"libcuda.so.1", b"cuDeviceGetAttribute")
        install("NVRTC_CACHE", b"libnvinfer.so.8", os.environ.get("NVRTC_CACHE_FOLDER", "nvrtc-cache").encode())
        return found

    worker._builder_config, worker._sms_of_this_gpu = once, with_table


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
