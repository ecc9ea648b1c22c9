"""The few CUDA calls that a session needs, through `cuda.bindings.runtime`. Every status is checked.

Addresses are plain integers; sizes are bytes. `fake.FakeCuda` has the same methods over host memory.
"""

from __future__ import annotations

import importlib
from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import EngineError, MissingPackageError, SessionError
from ..gpu.staging import COPY_CHUNK_BYTES

# cudaError_t values that mean "there is nothing to run on": no driver, no device, driver not loaded.
_NO_DEVICE = (3, 34, 100, 101)
_OLD_DRIVER = 35
_OUT_OF_MEMORY = 2
MOST_PARTS = 16  # of one upload: handing out more of them costs more than it saves


class Cuda:
    """One process's view of the GPUs. Every call works on the device that `use_device` chose.

    Raises:
        MissingPackageError: cuda-python is not installed.
    """

    def __init__(self) -> None:
        try:
            self._runtime: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError:
            raise MissingPackageError("cuda-python", "gpu", "running TensorRT engines") from None

    def device_count(self) -> int:
        """Number of usable GPUs; 0 without a driver.

        Raises:
            EngineError: the driver is too old for this CUDA.
        """
        status, count = self._runtime.cudaGetDeviceCount()
        if int(status) == _OLD_DRIVER:  # also what CUDA says where there is no driver, whose version is 0 then
            if not int(self._checked("cudaDriverGetVersion", self._runtime.cudaDriverGetVersion())):
                return 0
            raise EngineError(
                "the NVIDIA driver is older than the CUDA of the installed cuda-python. For CUDA 13 install driver 580 or newer; for "
                "an older driver use CUDA 12: pip install 'cuda-python<13' tensorrt-cu12. Or run the ONNX file: "
                "`backend=onnxruntime`"
            )
        return 0 if int(status) in _NO_DEVICE else int(self._checked("cudaGetDeviceCount", (status, count)))

    def check_device(self, device: int) -> None:
        """Raises EngineError where there is no such GPU."""
        count = self.device_count()
        if count == 0:
            raise EngineError(
                "no CUDA device: this machine has no NVIDIA GPU, or no driver for it; check with nvidia-smi. Without a GPU, run the ONNX file: `backend=onnxruntime`"
            )
        if not 0 <= device < count:
            raise EngineError(f"there is no CUDA device {device}; allowed: 0 to {count - 1}")

    def use_device(self, device: int) -> None:
        """Make `device` current for the calling thread."""
        self._checked("cudaSetDevice", self._runtime.cudaSetDevice(device))

    def compute_capability(self, device: int) -> int:
        """E.g. 89 for 8.9."""
        names = self._runtime.cudaDeviceAttr
        major = self._attribute(names.cudaDevAttrComputeCapabilityMajor, device)
        return 10 * major + self._attribute(names.cudaDevAttrComputeCapabilityMinor, device)

    def device_name(self, device: int) -> str:
        properties = self._checked("cudaGetDeviceProperties", self._runtime.cudaGetDeviceProperties(device))
        name = properties.name
        return name.decode("utf-8", "replace").rstrip("\0") if isinstance(name, bytes) else str(name)

    def _attribute(self, attribute: Any, device: int) -> int:
        return int(self._checked("cudaDeviceGetAttribute", self._runtime.cudaDeviceGetAttribute(attribute, device)))

    def alloc(self, nbytes: int) -> int:
        """Device memory; the address is a multiple of 256."""
        return int(self._checked("cudaMalloc", self._runtime.cudaMalloc(nbytes), nbytes))

    def free(self, address: int) -> None:
        self._checked("cudaFree", self._runtime.cudaFree(address))

    def alloc_host(self, nbytes: int) -> int:
        """Pinned host memory: only from and to it are copies asynchronous."""
        return int(self._checked("cudaMallocHost", self._runtime.cudaMallocHost(nbytes), nbytes))

    def free_host(self, address: int) -> None:
        self._checked("cudaFreeHost", self._runtime.cudaFreeHost(address))

    def host_view(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes of host memory as an array; it must not outlive the memory."""
        return host_view(address, nbytes)

    def copy_to_device(self, device_address: int, host_address: int, nbytes: int, stream: int) -> None:
        """Asynchronous: the host memory must not change before the stream is synchronised."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._checked(
            "cudaMemcpyAsync",
            self._runtime.cudaMemcpyAsync(device_address, host_address, nbytes, kind, stream),
        )

    def copy_to_host(self, host_address: int, device_address: int, nbytes: int, stream: int) -> None:
        """Asynchronous: the host memory holds the data after the stream is synchronised."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._checked(
            "cudaMemcpyAsync",
            self._runtime.cudaMemcpyAsync(host_address, device_address, nbytes, kind, stream),
        )

    def create_stream(self) -> int:
        # Non-blocking: work on the default stream, such as PyTorch's, must not serialise with it.
        flags = self._runtime.cudaStreamNonBlocking
        return int(self._checked("cudaStreamCreateWithFlags", self._runtime.cudaStreamCreateWithFlags(flags)))

    def destroy_stream(self, stream: int) -> None:
        self._checked("cudaStreamDestroy", self._runtime.cudaStreamDestroy(stream))

    def synchronize(self, stream: int) -> None:
        """Wait for the stream; errors of kernels and copies before it are raised here."""
        self._checked("cudaStreamSynchronize", self._runtime.cudaStreamSynchronize(stream))

    def begin_capture(self, stream: int) -> None:
        # Thread-local: other threads may allocate while this one records.
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._checked("cudaStreamBeginCapture", self._runtime.cudaStreamBeginCapture(stream, mode))

    def end_capture(self, stream: int) -> Any:
        """The recorded graph, as an executable one that `launch` takes."""
        graph = self._checked("cudaStreamEndCapture", self._runtime.cudaStreamEndCapture(stream))
        try:
            return self._checked("cudaGraphInstantiate", self._runtime.cudaGraphInstantiate(graph, 0))
        finally:
            self._checked("cudaGraphDestroy", self._runtime.cudaGraphDestroy(graph))

    def clear_error(self) -> None:
        """Forget the last error: a failed capture leaves one that the next kernel launch would report."""
        self._runtime.cudaGetLastError()

    def launch(self, graph: Any, stream: int) -> None:
        self._checked("cudaGraphLaunch", self._runtime.cudaGraphLaunch(graph, stream))

    def destroy_graph(self, graph: Any) -> None:
        self._checked("cudaGraphExecDestroy", self._runtime.cudaGraphExecDestroy(graph))

    def _checked(self, call: str, result: tuple[Any, ...], nbytes: int | None = None) -> Any:
        """The value of a (status, value) answer.

        Raises:
            SessionError: the status is not success.
        """
        status = result[0]
        if int(status) != 0:
            _, text = self._runtime.cudaGetErrorString(status)
            text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
            if int(status) == _OUT_OF_MEMORY:
                size = f" for {nbytes / 2**20:.1f} MiB" if nbytes is not None else ""
                raise SessionError(
                    f"the GPU is out of memory ({call}{size}); use a smaller batch, close other programs "
                    "on the GPU, or build the engine with a smaller max of `batch`, `height` and `width`"
                )
            raise SessionError(f"{call} failed: {text} (cudaError {int(status)})")
        return result[1] if len(result) > 1 else None


def host_view(address: int, nbytes: int) -> NDArray[np.uint8]:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


# Device memory with its pinned host copy, one pair for each input and output; grown and reused.
class IoBuffer:
    """nbytes of device memory at `device` and as many pinned host bytes.

    `cuda` is a `cuda.Cuda` or the fake of it.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self.device = 0
        self._host = 0
        self._view: NDArray[np.uint8] | None = None
        self.nbytes = 0

    def ensure(self, nbytes: int) -> bool:
        """Make room for nbytes; True when the addresses changed. The content is lost then."""
        nbytes = max(1, nbytes)
        if nbytes <= self.nbytes:
            return False
        self.free()
        self.device = self._cuda.alloc(nbytes)
        try:
            self._host = self._cuda.alloc_host(nbytes)
        except BaseException:
            self.free()
            raise
        self._view = self._cuda.host_view(self._host, nbytes)
        self.nbytes = nbytes
        return True

    def upload(self, array: NDArray, dtype: str, stream: int, pool: Executor | None = None) -> None:
        """Copy an array of any strides to the device as `dtype`, asynchronously.

        pool: threads that share the copy of a large array to pinned memory; each part goes up while the next ones are copied.
        """
        assert self._view is not None
        nbytes = nbytes_of(array.shape, dtype)
        staging = self._view[:nbytes].view(dtype)
        size = max(COPY_CHUNK_BYTES, -(-nbytes // MOST_PARTS))
        if pool is None or nbytes <= size or not array.flags.c_contiguous:
            np.copyto(staging.reshape(array.shape), array, casting="unsafe")
            if nbytes:
                self._cuda.copy_to_device(self.device, self._host, nbytes, stream)
            return
        rows = size // staging.itemsize
        parts = [slice(start, start + rows) for start in range(0, array.size, rows)]
        copies = [pool.submit(np.copyto, staging[part], array.reshape(-1)[part], "unsafe") for part in parts]
        for part, copied in zip(parts, copies, strict=True):
            copied.result()
            start = part.start * staging.itemsize
            self._cuda.copy_to_device(self.device + start, self._host + start, staging[part].nbytes, stream)

    def start_download(self, nbytes: int, stream: int) -> None:
        if nbytes:
            self._cuda.copy_to_host(self._host, self.device, nbytes, stream)

    def downloaded(self, shape: tuple[int, ...], dtype: str) -> NDArray:
        """A new array of what was downloaded; call it after the stream was synchronised."""
        assert self._view is not None
        nbytes = nbytes_of(shape, dtype)
        return self._view[:nbytes].view(dtype).reshape(shape).copy()

    def free(self) -> None:
        device, host = self.device, self._host
        self.device = self._host = self.nbytes = 0
        self._view = None
        if device:
            self._cuda.free(device)
        if host:
            self._cuda.free_host(host)


def nbytes_of(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
