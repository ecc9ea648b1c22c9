"""The fake of `cuda.Cuda`: host memory in place of the GPU's. See `fake`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from detrt.backends.tensorrt.cuda import host_view
from detrt.errors import EngineError, SessionError


class FakeCuda:
    """`cuda.Cuda` over host memory. `calls` counts what was done; `alive` what was not given back."""

    def __init__(self, compute_capability: int = 89, devices: int = 1, memory_limit: int = 1 << 30) -> None:
        self._capability, self._devices, self._limit = compute_capability, devices, memory_limit
        self._blocks: dict[str, dict[int, NDArray[np.uint8]]] = {"device": {}, "host": {}}
        self._streams: dict[int, list[Callable[[], None]]] = {}
        self._recording: tuple[int, list[Callable[[], None]]] | None = None
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self._next_handle = 1
        self.fail_capture = False
        self.calls: Counter[str] = Counter()

    @property
    def alive(self) -> int:
        blocks = sum(len(held) for held in self._blocks.values())
        return blocks + len(self._streams) + len(self._graphs)

    def device_count(self) -> int:
        return self._devices

    def check_device(self, device: int) -> None:
        if self._devices == 0:
            raise EngineError("no CUDA device: this is the fake of a machine without a GPU")
        if not 0 <= device < self._devices:
            raise EngineError(f"there is no CUDA device {device}; allowed: 0 to {self._devices - 1}")

    def use_device(self, device: int) -> None:
        self.check_device(device)

    def compute_capability(self, device: int) -> int:
        return self._capability

    def device_name(self, device: int) -> str:
        return f"Fake GPU {device}"

    def alloc(self, nbytes: int) -> int:
        held = sum(block.size for block in self._blocks["device"].values())
        if held + nbytes > self._limit:
            raise SessionError(f"the GPU is out of memory (fake: {nbytes} bytes over a limit of {self._limit})")
        return self._new_block("device", nbytes)

    def free(self, address: int) -> None:
        self._run_all()  # cudaFree waits for the device.
        del self._blocks["device"][address]

    def alloc_host(self, nbytes: int) -> int:
        return self._new_block("host", nbytes)

    def free_host(self, address: int) -> None:
        self._run_all()
        del self._blocks["host"][address]

    def host_view(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        return self.memory("host", address, nbytes)

    def copy_to_device(self, device_address: int, host_address: int, nbytes: int, stream: int) -> None:
        def copy() -> None:
            self.memory("device", device_address, nbytes)[:] = self.memory("host", host_address, nbytes)

        self.enqueue(copy, stream)

    def copy_to_host(self, host_address: int, device_address: int, nbytes: int, stream: int) -> None:
        def copy() -> None:
            self.memory("host", host_address, nbytes)[:] = self.memory("device", device_address, nbytes)

        self.enqueue(copy, stream)

    def create_stream(self) -> int:
        handle = self._handle()
        self._streams[handle] = []
        return handle

    def destroy_stream(self, stream: int) -> None:
        del self._streams[stream]

    def synchronize(self, stream: int) -> None:
        self.calls["synchronize"] += 1
        self._refuse_while_recording("synchronize")
        work, self._streams[stream] = self._streams[stream], []
        for operation in work:
            operation()

    def begin_capture(self, stream: int) -> None:
        self._refuse_while_recording("begin_capture")
        self._recording = (stream, [])

    def end_capture(self, stream: int) -> int:
        if self._recording is None or self._recording[0] != stream:
            raise SessionError("fake: end_capture without begin_capture")
        (_, work), self._recording = self._recording, None
        if self.fail_capture:
            raise SessionError("fake: operation not permitted when stream is capturing")
        self.calls["capture"] += 1
        handle = self._handle()
        self._graphs[handle] = work
        return handle

    def clear_error(self) -> None:
        self.calls["clear_error"] += 1

    def launch(self, graph: int, stream: int) -> None:
        self.calls["launch"] += 1
        for operation in self._graphs[graph]:
            self.enqueue(operation, stream)

    def destroy_graph(self, graph: int) -> None:
        del self._graphs[graph]

    def enqueue(self, operation: Callable[[], None], stream: int) -> None:
        """What kernels do: run later, in the order of the stream, or be recorded."""
        if self._recording is not None and self._recording[0] == stream:
            self._recording[1].append(operation)
        else:
            self._streams[stream].append(operation)

    def memory(self, kind: str, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes inside one allocation; SessionError outside of all."""
        for start, block in self._blocks[kind].items():
            if start <= address and address + nbytes <= start + block.size:
                return host_view(address, nbytes)
        raise SessionError(f"fake: illegal {kind} memory access, {nbytes} bytes at {address:#x}")

    def _new_block(self, kind: str, nbytes: int) -> int:
        self._refuse_while_recording(f"{kind} allocation")
        self.calls[f"alloc {kind}"] += 1
        block = np.full(nbytes, 0xCD, np.uint8)
        self._blocks[kind][block.ctypes.data] = block
        return int(block.ctypes.data)

    def _run_all(self) -> None:
        for stream in self._streams:
            self.synchronize(stream)

    def _refuse_while_recording(self, what: str) -> None:
        if self._recording is not None:
            raise SessionError(f"fake: {what} is not permitted while a stream is recorded")

    def _handle(self) -> int:
        self._next_handle += 1
        return self._next_handle
