"""Ctrl-C and SIGTERM: the stack is unwound, which removes what was begun; and a process in a model that never ends is ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from ..system import RUN_THREAD

INTERRUPTED, TERMINATED = 130, 143
_GRACE_S = 10.0  # Python hears of a signal between two runs of a model, and a graph may need any time
_UNWIND_S = 20.0  # what is cleaned up may wait for a thread that never ends: one that reads a pipe into which nobody writes
_LOST = b"\0"  # no signal has this number


class Terminated(BaseException):
    """SIGTERM, as an exception: a BaseException, so that it is cleaned up after like Ctrl-C."""


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does. Where neither is heard for ten seconds, or comes again meanwhile, the process ends at once;
    and so it does where the stack is not unwound twenty seconds later.
    """
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield
        return
    heard = threading.Event()
    numbers_heard: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        numbers_heard.append(number)
        heard.set()
        raise _exception_of(number)

    # A shell has SIGINT ignored in what it runs in the background.
    numbers = [signal.SIGTERM] + [signal.SIGINT] * (signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        with _ending_unheard(heard, set(numbers), numbers_heard):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exception_of(number: int) -> type[BaseException]:
    return KeyboardInterrupt if number == signal.SIGINT else Terminated


@contextlib.contextmanager
def _ending_unheard(heard: threading.Event, numbers: set[int], numbers_heard: list[int]) -> Iterator[None]:
    if os.name != "posix":  # Windows takes sockets only, and stops its consoles otherwise
        yield
        return
    unwound = threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # written at once, while native code runs
    hook = sys.unraisablehook

    def notice(lost: sys.UnraisableHookArgs) -> None:
        """Python takes no exception out of `__del__` and of what native code calls: that of a signal is lost there, and comes again behind it."""
        if numbers_heard and issubclass(lost.exc_type, _exception_of(numbers_heard[-1])):
            os.write(writing, _LOST)  # and no thread: what is torn down may hold any lock
        else:
            hook(lost)

    sys.unraisablehook = notice

    def watch() -> None:
        came = False
        main = ctypes.c_ulong(threading.main_thread().ident or 0)
        while number := os.read(reading, 1):
            if number == _LOST:
                if not unwound.is_set():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(_exception_of(numbers_heard[-1])))
                continue
            # The handler may have run before this thread read the first one.
            if number[0] not in numbers or (came and heard.is_set() and not _model_runs()):
                continue
            if came:
                end(number[0])
            came = True
            threading.Thread(target=end_later, args=(number[0],), name="detrt-end", daemon=True).start()
        os.close(reading)

    def end_later(number: int) -> None:
        end_by = time.monotonic() + _GRACE_S
        if not heard.wait(_GRACE_S):
            end(number)
        if not unwound.wait(end_by - time.monotonic()) and (_model_runs() or not unwound.wait(_UNWIND_S)):
            end(number)

    def end(number: int) -> None:
        what = "a model ran" if _model_runs() or not heard.is_set() else "a file was read or closed"
        print(f"detrt: stopped while {what} that did not end; the next command removes hidden files", file=sys.stderr)
        os._exit(INTERRUPTED if number == signal.SIGINT else TERMINATED)

    threading.Thread(target=watch, name="detrt-signals", daemon=True).start()
    try:
        yield
    finally:
        if numbers_heard and _model_runs():  # a second signal ended the wait for it, and the interpreter would end under it
            end(numbers_heard[-1])
        sys.unraisablehook = hook
        signal.set_wakeup_fd(before)
        unwound.set()
        heard.set()
        os.close(writing)


def _model_runs() -> bool:
    """Whether a model still runs in a thread, which is waited for before it is closed; those without work end at once."""
    return any(thread.name.startswith(RUN_THREAD) for thread in threading.enumerate())
