"""`--devices 0,1`: which processors to run on, and opening a model on exactly one of them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from typing import Any

from ..cores import usable_cores
from ..errors import DetrtError, SessionError
from .base import Session
from .open import kind_of, open_session

CPU = "cpu"
_FORM = "numbers of GPUs and 'cpu' with commas, or all; e.g. 0,1 or cuda:0,cuda:1 or cpu,cpu"


def parse_devices(text: str) -> tuple[str, ...]:
    """ "0,1" -> ("cuda:0", "cuda:1"); also "cuda:1", "cpu", and "all" for every GPU.

    A device may be named several times: that many processes then share it.

    Raises:
        SessionError: another form, or "all" where there is no GPU.
    """
    found = []
    for part in (piece.strip().lower() for piece in text.split(",")):
        match = re.fullmatch(r"(?:(?:cuda|gpu):?)?(\d{1,4})", part)
        if match:
            found.append(f"cuda:{int(match[1])}")
        elif part == CPU:
            found.append(CPU)
        elif part in ("cuda", "gpu"):
            found.append("cuda:0")
        elif part == "all":
            found += _every_gpu()
        else:
            raise SessionError(f"--devices takes {_FORM}; got {text!r}")
    return tuple(found)


def _every_gpu() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    else:
        try:
            done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SessionError(
                f"--devices all: nvidia-smi, which lists the GPUs, cannot be run ({error}); name them: 0,1"
            ) from None
        count = len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE))
    if not count:
        raise SessionError("--devices all: there is no NVIDIA GPU here; name the devices, e.g. --devices cpu,cpu")
    return [f"cuda:{index}" for index in range(count)]


def cpu_threads(devices: Sequence[str]) -> int:
    """Threads for one worker, so that one worker for each of `devices` shares the cores of this machine."""
    return max(1, usable_cores() // max(1, len(devices)))


def open_on(ref: str | os.PathLike, device: str, *, backend: str = "auto", threads: int | None = None, **options: Any) -> Session:
    """Open a model on one device; never on the CPU where a GPU was asked for.

    device: "cpu" or "cuda:N". ONNX files get it as the provider of ONNX Runtime, engines and checkpoints as
    their device; of a bundle the engine that suits the GPU, else its ONNX file. threads, options: see `open_session`.

    Raises:
        SessionError: the model cannot run there; the message says why. DetrtError: as `open_session`.
    """
    kind = kind_of(ref)
    if device == CPU:
        if kind == "engine":
            raise SessionError(f"'{os.fspath(ref)}' is a TensorRT engine, which needs a GPU; got the device cpu")
        if kind == "bundle":
            return open_session(ref, backend="onnxruntime" if backend == "auto" else backend, threads=threads, **options)
        return open_session(ref, backend=backend, device=CPU if kind == "checkpoint" else None, threads=threads, **options)
    if kind in ("checkpoint", "engine"):
        return open_session(ref, backend=backend, device=device, threads=threads, **options)
    if kind == "onnx" or backend == "onnxruntime":
        return open_session(ref, backend=backend, provider=device, threads=threads, **options)
    session = open_session(ref, backend=backend, device=device, threads=threads, **options)
    if not session.backend.endswith("cpu"):
        return session
    why = getattr(session, "note", "")
    session.close()
    try:
        return open_session(ref, backend="onnxruntime", provider=device, threads=threads, **options)
    except DetrtError as error:
        raise SessionError(f"'{os.fspath(ref)}' cannot run on {device}: {why}; {error}") from None
