"""What detrt asks of the system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from detrt import system

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


def test_a_driver_outside_the_path_of_the_linker_is_found(tmp_path):
    """As in WSL and in containers; in a process of its own, because libraries find it by name from then on."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux")
    (tmp_path / "cuda.c").write_text("int cuInit(unsigned flags) { return 100; }\n")
    place = tmp_path / "nvidia" / "lib64"
    place.mkdir(parents=True)
    library = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(place / "libcuda.so.1"), str(tmp_path / "cuda.c")]
    subprocess.run([compiler, *library], check=True)
    (place / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU, 580, 1 MiB, 9.0'\n")
    (place / "nvidia-smi").chmod(0o755)
    code = f"""
import ctypes
from detrt import system
system._DRIVER_FOLDERS = ()
if system.has_driver():
    print("here")
else:
    system._DRIVER_FOLDERS = ({str(tmp_path)!r}, {str(place)!r})
    print(system.has_driver(), ctypes.CDLL("libcuda.so.1").cuInit(0), system.compute_capabilities_here())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found in ("True 100 (90,)", "here")


def test_the_folders_of_the_driver_are_the_usual_ones():
    assert {"/usr/lib/wsl/lib", "/usr/local/nvidia/lib64"} <= set(system._DRIVER_FOLDERS)
    assert all(os.path.isabs(folder) and "stubs" not in folder for folder in system._DRIVER_FOLDERS)
