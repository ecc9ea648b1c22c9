"""The commands that run models, without what Windows does not have: modules of POSIX, and functions and signals of Linux."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import place  # noqa: F401 - fixture

from detrt.errors import SessionError

# Modules and names that Python's documentation marks as "Availability: Unix" or "not Windows".
RUN = """
import json, os, signal, sys
# These ask sys.platform what they may use, which says Linux here.
import av, numpy, onnxruntime, PIL.Image, rich.console, rich.progress, rich.table, tempfile, typer, uuid
class Absent:
    names = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "curses", "uvloop"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
for name in Absent.names & set(sys.modules):
    del sys.modules[name]
for name in ("fork", "forkpty", "sched_getaffinity", "sysconf", "sysconf_names", "getuid", "geteuid", "getgid", "setsid", "killpg",
             "mkfifo", "uname", "getpgid", "chown", "O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGCHLD", "SIGQUIT", "alarm", "pthread_kill"):
    if hasattr(signal, name):
        delattr(signal, name)
from detrt.cli import main
codes = {line: main(line.split()) for line in json.loads(sys.argv[1])}
print(json.dumps(codes), file=sys.stderr)
"""


def test_commands(place):
    pytest.importorskip("av", reason="needs the 'video' extra")
    from detrt.data.video import video_writer

    with video_writer(place / "clip.mp4", fps=20, size=(16, 24)) as write:
        from detrt.data.images import load_image

        for name in ("blue", "black", "blue"):
            write(load_image(place / f"in/{name}.png"))
    lines = [
        "info bundle",
        "detect bundle in --json images.jsonl --save-dir runs --csv o.csv --quiet",
        "detect bundle clip.mp4 --json video.jsonl --quiet",
        "detect bundle clip.mp4 --live --json live.jsonl --quiet",
    ]
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(lines)], cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr.strip().splitlines()[-1]) == dict.fromkeys(lines, 0)
    counts = {name: len((place / name).read_text().splitlines()) for name in ("images.jsonl", "video.jsonl", "live.jsonl")}
    assert counts["images.jsonl"] == 2 and counts["video.jsonl"] == 3 and 1 <= counts["live.jsonl"] <= 3
    assert (place / "runs/blue.png").is_file()


def test_worker_processes_say_that_they_need_posix(monkeypatch):
    from detrt.backends.worker_process import Worker

    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SessionError, match=r"WSL 2.*docs/guide/windows\.md"):
        Worker([sys.executable, "-c", "pass"])
