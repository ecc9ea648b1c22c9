"""NVIDIA's execution provider for RTX GPUs, which ONNX Runtime loads from a package of its own: `onnxruntime-ep-nv-tensorrt-rtx`."""

from __future__ import annotations

from functools import cache
from typing import Any

from ...errors import MissingPackageError, SessionError
from ...system import check_driver

PACKAGE = "onnxruntime-ep-nv-tensorrt-rtx"
BACKEND = EXTRA = "onnxruntime-rtx"
_NEEDS = "it needs an RTX GPU (30 series or newer) and an NVIDIA driver with CUDA 13; without them use `device=cpu`"


def rtx_device(onnxruntime: Any, number: int) -> Any:
    """The OrtEpDevice of a GPU, whose provider is registered first.

    Raises:
        MissingPackageError: the provider's package is not installed.
        SessionError: no driver of a GPU, an ONNX Runtime without plug-in providers, a provider that cannot be loaded, or no such GPU.
    """
    if not hasattr(onnxruntime, "register_execution_provider_library"):
        raise SessionError(f"`backend={BACKEND}` needs onnxruntime 1.24 or newer; got {onnxruntime.__version__}: upgrade it")
    check_driver(f"`backend={BACKEND}`", SessionError, "use `backend=onnxruntime`")
    try:
        import onnxruntime_ep_nv_tensorrt_rtx as package
    except ImportError:
        raise MissingPackageError(PACKAGE, EXTRA, f"`backend={BACKEND}`") from None
    name = package.get_ep_name()
    try:
        _register(onnxruntime, name, package.get_library_path())
    except Exception as error:  # onnxruntime's exceptions share no base class
        why = str(error).rpartition("with error: ")[2].strip()
        raise SessionError(f"NVIDIA's provider for RTX GPUs cannot be loaded ({why}): {_NEEDS}") from None
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == name]
    if not devices:
        raise SessionError(f"NVIDIA's provider finds no RTX GPU here: {_NEEDS}")
    if number >= len(devices):
        last = len(devices) - 1
        raise SessionError(
            f"there is no RTX GPU cuda:{number}; NVIDIA's provider finds cuda:0{f' to cuda:{last}' if last else ''}"
        )
    return devices[number]


@cache
def _register(onnxruntime: Any, name: str, library: str) -> None:
    """Once in a process: ONNX Runtime refuses a second time."""
    onnxruntime.register_execution_provider_library(name, library)
