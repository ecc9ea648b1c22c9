"""Device memory with its pinned host copy, one pair for each input and output; grown and reused."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


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

    def upload(self, array: NDArray, stream: int) -> None:
        """Copy an array of any strides to the device, asynchronously."""
        assert self._view is not None
        staging = self._view[: array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(staging, array)
        if array.nbytes:
            self._cuda.copy_to_device(self.device, self._host, array.nbytes, stream)

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
