"""The C++ compiler that PyTorch calls, and whether PyTorch can load what it links."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from ...errors import EngineError

# Of torch._inductor.cpu_vec_isa; a compiler for another processor refuses them.
VECTORS = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8")  # fmt: skip
VECTORS_KNOWN = "TORCHINDUCTOR_VEC_ISA_OK"
INSTALL = "install one (Debian, Ubuntu: apt-get install g++), or name it in the environment variable CXX"


def compiler() -> str:
    """Path of the C++ compiler to call: the one in CXX, or the first on the PATH, that has a shared libstdc++.

    Raises:
        EngineError: there is none.
    """
    seen: list[str] = []
    for path in _candidates():
        if links_shared(path):
            return path
        seen.append(path)
    if seen:
        raise EngineError(
            f"`targets=inductor` needs a C++ compiler with a shared C++ library; {', '.join(seen)} has none, so that it would link "
            f"its own copy into the package, which PyTorch cannot load; {INSTALL}"
        )
    raise EngineError(f"`targets=inductor` needs a C++ compiler, and neither g++ nor clang++ is on the PATH; {INSTALL}")


def _candidates() -> Iterator[str]:
    named = os.environ.get("CXX", "").split()[:1]
    if named and shutil.which(named[0]) is None:
        raise EngineError(f"CXX names the C++ compiler '{named[0]}', which is not there; unset CXX, or {INSTALL}")
    # Others are tried if CXX names an incomplete compiler.
    for name in (*named, "g++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            yield path


def compiler_environment() -> dict[str, str]:
    """What PyTorch's compiler is told of the C++ compiler in the environment of its process.

    By itself it compiles and loads a program with PyTorch's headers for each vector extension of the processor, several seconds each,
    which shows whether the C++ compiler knows it; an empty program shows that at once. A package is compared with PyTorch in any case.

    Raises:
        EngineError: there is no such compiler.
    """
    path = compiler()
    told = {VECTORS_KNOWN: os.environ[VECTORS_KNOWN]} if VECTORS_KNOWN in os.environ else {}
    return {"CXX": path, **(told or ({VECTORS_KNOWN: "1"} if knows_vectors(path) else {}))}


@functools.cache
def knows_vectors(path: str) -> bool:
    """Whether a compiler for x86-64 knows the vector extensions that PyTorch's compiler uses."""
    command = [path, *VECTORS, "-fsyntax-only", "-x", "c++", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@functools.cache
def links_shared(path: str) -> bool:
    """Whether a compiler links the C++ library as a shared one.

    With a static copy the package has its own locales and type information beside PyTorch's, and crashes when it is loaded.
    A compiler that was copied without its `libstdc++.so.6` uses the static library silently.
    """
    if not sys.platform.startswith("linux"):
        return True
    command = [path, "-print-file-name=libstdc++.so"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    found = done.stdout.strip()
    # The compiler prints the bare name if it has no such file; a broken link counts as missing, too.
    return done.returncode == 0 and os.path.isabs(found) and os.path.isfile(found)
