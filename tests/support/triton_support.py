"""Triton Inference Server as a process of its own, from the wheel that `make triton` puts under build/."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import psutil
import pytest
from ports import free_port
from serve_support import START_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "build/triton-2.51"
PACKAGES = ENVIRONMENT / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
SERVER = PACKAGES / "pytriton/tritonserver"
STUB = SERVER / f"python_backend_stubs/{sys.version_info.major}.{sys.version_info.minor}/triton_python_backend_stub"


def require_triton() -> None:
    """Skip the tests of this module where the server cannot be had."""
    if not STUB.is_file():
        pytest.skip("Triton Inference Server is not there for this Python: make triton", allow_module_level=True)
    library = sysconfig.get_config_var("INSTSONAME") or ""
    if not library.startswith("libpython") or ".so" not in library:
        pytest.skip("Triton's Python backend needs a Python with a shared library", allow_module_level=True)
    missing = subprocess.run(["ldd", SERVER / "bin/tritonserver"], capture_output=True, text=True, env=_variables())
    if "not found" in missing.stdout + missing.stderr:
        pytest.skip(f"Triton's server does not run here: {missing.stdout + missing.stderr}", allow_module_level=True)


def _variables() -> dict[str, str]:
    libraries = f"{PACKAGES / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}"
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, (libraries, os.environ.get("LD_LIBRARY_PATH"))))}


class Triton:
    """A running server; http, grpc, metrics: addresses. environment: of its Python models."""

    def __init__(
        self, repository: Path, *options: str, environment: Path | None = None, starts: bool = True, one_thread: bool = True
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        backend = Path(self._folder.name, "backends/python")
        backend.mkdir(parents=True)
        for file in [*(SERVER / "backends/python").iterdir(), STUB]:
            (backend / file.name).symlink_to(file)
        ports = [free_port() for _ in range(3)]
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in ports)
        self._log = Path(self._folder.name, "log")
        variables = _variables() | ({"OMP_NUM_THREADS": "1"} if one_thread else {})
        environment = environment or ENVIRONMENT
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                [
                    str(SERVER / "bin/tritonserver"),
                    f"--model-repository={repository}",
                    f"--backend-directory={backend.parent}",
                    *(f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")),
                    *(f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)),
                    "--disable-auto-complete-config",  # which would start every model twice
                    "--allow-cpu-metrics=false",
                    "--exit-timeout-secs=5",
                    *options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**variables, "PATH": f"{environment / 'bin'}:{variables['PATH']}"},
            )
        wait_until(lambda: "Started Metrics Service" in self.log or self.process.poll() is not None, START_S)
        if starts and self.process.poll() is not None:
            raise AssertionError(f"Triton did not start: {self.log}")

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def stubs(self, model: str) -> list[psutil.Process]:
        """The processes of a model's instances."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in children if one.is_running() and f"/{model}/" in " ".join(one.cmdline())]

    def __enter__(self) -> Triton:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self._folder.cleanup()
