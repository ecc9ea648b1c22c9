"""What detrt asks of the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FREED = """
from detrt.system import return_freed_memory

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) >> 10

blocks = [b"x" * (100 << 10) for _ in range(2000)]
top = b"x" * 1000  # above them, so that the allocator cannot shrink its heap by itself
tops = [bytes(5000) for _ in range(100)]
del blocks
kept = resident()
return_freed_memory()
print(kept - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps freed memory")
def test_freed_memory_goes_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 150
