"""Standard streams that are closed, full, or whose reader has gone."""

from __future__ import annotations

import contextlib
import os
import sys

from ..system import lose_unwritten_messages


def open_streams() -> None:
    """Give streams that the caller has closed (`>&-`) a descriptor that the next file cannot take: writing to stdout fails there, as GNU's
    tools have it, and what goes to stderr is lost; so is what a stderr that is there does not take. Characters that stdout has not are escaped."""
    for number, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # takes the lowest number that is free, which is this one
            if number and getattr(sys, name := ("", "stdout", "stderr")[number]) is None:
                setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - the stream of the process
    if sys.stdout is not None and sys.stdout is sys.__stdout__:  # not one that a caller has put there
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    lose_unwritten_messages()


def drop_unwritten() -> None:
    """What stdout does not take any more would be tried again at exit, and change the exit code."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        give_stdout_a_sink()


def give_stdout_a_sink() -> None:
    """Python flushes standard output once more at exit, and would complain again."""
    with contextlib.suppress(OSError, ValueError):  # a stdout that was replaced has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
