"""One-shot child processes: answers, errors of every kind, progress, and ends without an answer."""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from detrt.backends.child_process import run_child
from detrt.backends.worker_process import MAX_DEATHS, after_death, how_ended
from detrt.errors import EngineError, GateError, MissingPackageError, OutputError, SessionError

HEAD = "import os, sys, time\nfrom pathlib import Path\nfrom detrt.backends.child_process import answer_parent\n"


def run(body: str, request=None, **options):
    """`body` is that of work(request, progress)."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    code = f"{HEAD}def work(request, progress):\n{lines}answer_parent(int(sys.argv[1]), work)\n"
    return run_child((sys.executable, "-c", code), request or {}, what="compiler", **options)


def test_answers_keep_their_types():
    request = {"path": "x" * 300_000, "pair": (1, 2)}  # larger than what a socket holds
    answer = run("return {**request, 'folder': os.listdir('.')}", request)
    assert answer == {**request, "folder": ["log.txt"]}


def test_progress_is_passed_on_at_most_ten_times_a_second():
    seen = []
    body = "for i in range(40):\n    progress(i / 40, f'step {i}')\n    time.sleep(0.01)\nreturn 7"
    start = time.monotonic()
    assert run(body, progress=lambda fraction, text: seen.append((fraction, text))) == 7
    assert seen[0] == (0.0, "step 0") and 2 <= len(seen) <= 1 + 10 * (time.monotonic() - start) and seen == sorted(seen)


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("from detrt.errors import GateError\nraise GateError('not equal')", GateError, "^not equal$"),
        (
            "from detrt.errors import MissingPackageError\nraise MissingPackageError('av', 'video', 'a video')",
            MissingPackageError,
            "^a video needs the package 'av'",
        ),
        ("raise ZeroDivisionError('a bug')", EngineError, "the compiler process failed: ZeroDivisionError: a bug"),
        ("print('last words', flush=True)\nos._exit(7)", EngineError, r"(?s)compiler process ended with exit code 7.*last words"),
        ("os.kill(os.getpid(), 9)", EngineError, "compiler process was killed by SIGKILL .most likely for lack of memory"),
    ],
)
def test_errors(code, error, words):
    with pytest.raises(error, match=words) as found:
        run(code)
    assert "TensorRT" not in str(found.value)


def test_errors_of_the_system_keep_their_number():
    with pytest.raises(OSError) as found:
        run("raise OSError(28, 'no room', '/x')")
    assert (found.value.errno, found.value.filename) == (errno.ENOSPC, "/x")


def test_a_time_limit():
    start = time.monotonic()
    with pytest.raises(SessionError, match="longer than 0.5 seconds"):
        run("time.sleep(60)", timeout_seconds=0.5, error=SessionError)
    with pytest.raises(EngineError, match=r"Raise `timeout_seconds`, or use less of it$"):
        run("time.sleep(60)", timeout_seconds=0.1, quicker="less of it")
    assert time.monotonic() - start < 30


def test_processes_that_the_child_forked_do_not_keep_its_end_secret(tmp_path):
    """They hold the child's end of the socket."""
    forked = tmp_path / "pid"
    code = f"pid = os.fork()\nif pid == 0:\n    time.sleep(60)\n    os._exit(0)\nPath({str(forked)!r}).write_text(str(pid))\nos._exit(3)"
    with pytest.raises(EngineError, match="exit code 3"):
        run(code)
    os.kill(int(forked.read_text()), signal.SIGKILL)  # it was there all the time


def test_work_is_tried_twice():
    class Work:
        deaths = 0

    first, second = Work(), Work()
    assert after_death([first]) == ([first], [])
    assert after_death([first, second]) == ([second], [first]) and MAX_DEATHS == first.deaths == 2


def test_ends_in_words():
    assert [how_ended(code) for code in (1, -9, -63)] == [
        "ended with exit code 1",
        "was killed by SIGKILL",
        "was killed by signal 63",
    ]


def test_temporary_files_of_the_process_are_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = run("import tempfile\nreturn [tempfile.mkdtemp(), tempfile.mkstemp()[1]]")
    assert all(Path(name).parent.parent == tmp_path for name in made) and not list(tmp_path.iterdir())


def test_a_full_disk_in_the_process_is_told_as_that_of_its_caller(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    body = (
        "import errno\nfrom detrt import files\nwith files.scratch() as folder:\n"
        "    raise OSError(errno.ENOSPC, 'no room', str(folder / 'part'))"
    )
    with pytest.raises(OutputError, match=f"^cannot write temporary files to '{tmp_path}': the disk is full.*TMPDIR="):
        run(body)
