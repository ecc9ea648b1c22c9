"""Simulated cameras. As a program: sends H.264 in MPEG-TS over TCP, in a process of its own; see `Camera`."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np

BITS, BLOCK = 24, 12  # of the number that is drawn into each frame, and pixels of a bit


def draw_number(camera: int, number: int, size_hw: tuple[int, int]) -> np.ndarray:
    """A grey frame with the camera and the number of the frame as black and white blocks."""
    image = np.full((*size_hw, 3), 128, np.uint8)
    for bit in range(BITS):
        white = (camera << 16 | number) >> bit & 1
        row, column = divmod(bit, 8)
        image[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK] = 255 * white
    return image


def read_number(image: np.ndarray) -> tuple[int, int]:
    """(camera, number) of a frame of `draw_number`."""
    value = 0
    for bit in range(BITS):
        row, column = divmod(bit, 8)
        block = image[row * BLOCK + 3 : (row + 1) * BLOCK - 3, column * BLOCK + 3 : (column + 1) * BLOCK - 3]
        value |= int(block.mean() > 128) << bit
    return value >> 16, value & 0xFFFF


@contextlib.contextmanager
def cameras(*connections: list[dict[str, Any]], fps: float = 25, count: int = 1) -> Iterator[list[str]]:
    """Addresses of `count` cameras. Each serves one client after another, with one list of steps for each:

    {"frames": n, "size": [height, width]}: send n frames, one every 1/fps seconds. {"sleep": seconds}: send nothing. Numbers of frames go on from step to step and from client to client.
    """
    running = []
    try:
        for camera in range(count):
            task = json.dumps({"camera": camera, "fps": fps, "connections": connections})
            running.append(subprocess.Popen([sys.executable, __file__, task], stdout=subprocess.PIPE, text=True))
        yield [f"tcp://127.0.0.1:{int(process.stdout.readline())}" for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
            process.stdout.close()


class _Client:
    """One client of a camera."""

    def __init__(self, av: ModuleType, connection: socket.socket, camera: int, fps: float) -> None:
        self._av, self._camera, self._fps = av, camera, fps
        self._container = av.open(connection.makefile("wb", buffering=0), "w", format="mpegts")
        self._stream = self._container.add_stream("libx264", rate=round(fps))
        self._stream.width, self._stream.height, self._stream.pix_fmt = 128, 96, "yuv420p"
        self._encoder: Any = None

    def send(self, number: int, size_hw: tuple[int, int]) -> None:
        height, width = size_hw
        if self._encoder is None or (self._encoder.height, self._encoder.width) != size_hw:
            encoder = self._encoder = self._av.CodecContext.create("libx264", "w")
            encoder.width, encoder.height, encoder.pix_fmt, encoder.framerate = width, height, "yuv420p", round(self._fps)
            encoder.time_base, encoder.gop_size = Fraction(1, 90000), 10
            encoder.options = {"preset": "ultrafast", "tune": "zerolatency"}
        frame = self._av.VideoFrame.from_ndarray(draw_number(self._camera, number, size_hw), "rgb24")
        frame.pts = round(number / self._fps / self._encoder.time_base)
        frame.time_base = self._encoder.time_base
        for packet in self._encoder.encode(frame):
            packet.stream = self._stream
            self._container.mux(packet)


def main(task: dict[str, Any]) -> None:
    import av  # before a client connects: on a busy machine this takes longer than clients wait for data

    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    number = 0
    for steps in task["connections"]:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            client, due = _Client(av, connection, task["camera"], task["fps"]), time.monotonic()
            for step in steps:
                size_hw = tuple(step.get("size", (96, 128)))
                for _ in range(step.get("frames", 0)):
                    client.send(number, size_hw)
                    number += 1
                    due += 1 / task["fps"]
                    time.sleep(max(0.0, due - time.monotonic()))
                if "sleep" in step:
                    select.select([connection], [], [], step["sleep"])  # or until the client has gone
                    due = time.monotonic()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
