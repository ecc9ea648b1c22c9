"""Peak memory of this process."""

from __future__ import annotations

import sys


def peak_memory_mib() -> float:
    """Largest resident memory of this process so far, MiB; 0 where the system does not tell.

    Linux's `ru_maxrss` survives fork and exec, so a child starts with its parent's peak; `VmHWM` is its own.
    """
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 2**10
    except OSError:
        pass  # not Linux, or /proc is not mounted: ask the other way
    try:
        import resource
    except ImportError:  # Windows has no such module
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
