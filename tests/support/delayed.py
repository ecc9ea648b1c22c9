"""Sessions that stand in for engines of a GPU: their time is what a test says, on a clock that nothing else moves."""

from __future__ import annotations

from detrt.backends.onnxruntime.session import OnnxSession


class Clock:
    """In the place of the module `time`; `sleep` alone moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Delayed(OnnxSession):
    """A run takes `delay` seconds of `clock`."""

    clock: Clock
    delay = 0.0

    def run(self, feeds, *given):
        self.clock.sleep(self.delay)
        return super().run(feeds, *given)
