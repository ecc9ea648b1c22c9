"""Access to `openvino`: the library, its devices, and the types that they compute in."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import MissingPackageError, SessionError
from ...spec import Precision

# Folder of compiled models: those opened once open several times faster the next time.
CACHE_VARIABLE = "DETRT_OPENVINO_CACHE"
# Precision -> OpenVINO's name for the type, and for the capability of a device.
_TYPES = {Precision.BF16: ("bf16", "BF16"), Precision.FP16: ("f16", "FP16")}


def package(purpose: str) -> Any:
    """The module `openvino`.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        with _without_telemetry():
            import openvino
    except ImportError:
        raise MissingPackageError("openvino", "openvino", purpose) from None
    return openvino


@contextlib.contextmanager
def _without_telemetry() -> Iterator[None]:
    """Import without the package `openvino_telemetry`.

    OpenVINO sends an event to Google Analytics and writes an identifier into the home folder each time it is imported, and does not ask.
    """
    name = "openvino_telemetry"
    if name in sys.modules or "openvino" in sys.modules:  # the caller's own choice
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules.pop(name, None)


@cache
def core() -> Any:
    """The one Core of this process."""
    return package("running OpenVINO models").Core()


def devices() -> tuple[str, ...]:
    """What OpenVINO can run on here, by its own names: "CPU", "GPU", "GPU.1", "NPU"."""
    return tuple(core().available_devices)


def device_name(device: str | None) -> str:
    """ "cpu", "xpu:1" or "npu" as OpenVINO calls it: "CPU", "GPU.1", "NPU"; None is the CPU.

    Raises:
        SessionError: OpenVINO finds no such device here.
    """
    kind, _, number = (device or "cpu").lower().partition(":")
    name = {"cpu": "CPU", "xpu": "GPU", "npu": "NPU"}.get(kind)
    if name is None:
        raise SessionError(f"OpenVINO runs on cpu, xpu (Intel GPU) and npu; got the device {device!r}")
    here = devices()
    full = f"{name}.{number}" if number else name
    # One GPU is called GPU, several are GPU.0 and GPU.1.
    if full not in here and not (number in ("", "0") and any(one.partition(".")[0] == name for one in here)):
        raise SessionError(
            f"OpenVINO finds no device {device!r} here; it finds {', '.join(here)}. Install the driver of the device, or use "
            "`device=cpu`"
        )
    return full if full in here else name


def inference_type(precision: str, device: str) -> tuple[str, str]:
    """(type that a model computes in, what to tell about it), for a model of this precision on a device.

    The type is always set: by itself OpenVINO computes FP32 models in BF16 where a processor has it, which is another model,
    and a type that a processor lacks is emulated, ten times slower. What an INT8 model does not quantize is FP32.
    """
    present = [Precision(part) for part in precision.lower().split("+") if part in tuple(Precision)]
    low = next((kind for kind in present if kind in _TYPES), None)
    if low is None:
        return "f32", ""
    name, capability = _TYPES[low]
    if capability in core().get_property(device, "OPTIMIZATION_CAPABILITIES"):
        return name, ""
    processor = core().get_property(device, "FULL_DEVICE_NAME")
    return "f32", f"the model is {precision}, and {processor} has no {capability}: it is computed in FP32"


def cache_folder() -> Path | None:
    """The folder that the environment names for compiled models."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else None


def version() -> str:
    """Of the library, e.g. "2026.4.1"."""
    return str(package("OpenVINO").__version__).partition("-")[0]


def short(error: BaseException) -> str:
    """The last line of what OpenVINO raises: those before it name places in its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:400]
