"""kill -9 at each system call of a command that writes, renames or removes, with strace."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

CALLS = (
    "write,pwrite64,writev,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,link,linkat,symlink,symlinkat,ftruncate,"
    "fsync,fdatasync,fallocate,copy_file_range,sendfile"
)


def without_strace() -> str:
    """Why system calls cannot be made fatal here, or nothing."""
    if shutil.which("strace") is None:
        return "needs strace (apt-get install strace), which kills a process at a system call"
    tried = subprocess.run(["strace", "-qq", "-e", "trace=none", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"strace may trace no process here: {tried.stderr.strip()}"


Call = tuple[str, int]  # name of a system call, and its number among those of that name


def strace(folder: Path, options: list[str], arguments: tuple[str, ...]) -> int:
    """The exit code of a command whose main thread is traced."""
    done = subprocess.run(
        ["strace", "-qq", "-e", f"trace={CALLS}", *options, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"},
        timeout=300,
    )
    assert done.returncode in (0, -signal.SIGKILL, 128 + signal.SIGKILL), done.stderr
    return done.returncode


def calls_of(folder: Path, arguments: tuple[str, ...]) -> list[Call]:
    """The calls of a command, in order."""
    assert strace(folder, ["-o", "trace"], arguments) == 0
    counts: Counter[str] = Counter()
    calls = []
    for name in re.findall(r"^(\w+)\(", (folder / "trace").read_text("utf-8", "replace"), re.MULTILINE):
        counts[name] += 1
        calls.append((name, counts[name]))
    return calls


def kill(folder: Path, call: Call, arguments: tuple[str, ...]) -> None:
    """Run a command that ends at a call."""
    options = ["-o", os.devnull, "-e", f"inject={call[0]}:signal=KILL:when={call[1]}"]
    assert strace(folder, options, arguments) != 0, f"it never came to {call}"


def some_of(calls: list[Call], some: int | None) -> list[Call]:
    """So many of the calls, evenly, and the last one; None: all."""
    return calls if some is None else calls[:: -(-len(calls) // some)] + calls[-1:]
