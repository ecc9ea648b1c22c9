"""Long work in a process of its own: the caller's side, and the side of that process.

The two talk by files: a request, an answer, and lines of progress. A crash, a signal or a time limit ends the process and
leaves the caller with an error that says why.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import files
from ..errors import DetrtError, EngineError
from .tensorrt import diagnose as explain

# progress(fraction 0..1, what is being done)
Progress = Callable[[float, str], None]

_POLL_SECONDS = 0.05
_TERMINATE_SECONDS = 2.0
_LOG_TAIL_BYTES = 4000
_PROGRESS_SECONDS = 0.1
_PARENT_SECONDS = 1.0


def run_child(
    command: Sequence[str],
    request: Mapping[str, Any],
    timeout_seconds: float | None,
    progress: Progress | None,
    *,
    what: str,
    environment: Callable[[Path], Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """Run `command REQUEST.json` and return its answer; kill it whatever happens here.

    request: gets the paths "answer" and "progress" added; other paths in it must be absolute, since the process works in
    an empty folder. environment: that folder -> variables to add. what: name of the process in messages. An answer whose
    "ok" is false has the "kind" of a DetrtError and its "message".

    Raises:
        EngineError: no answer, a failure of the process itself, or the time limit. OSError: of the process.
    """
    with tempfile.TemporaryDirectory(prefix=f"detrt-{what}-") as folder_name:
        folder = Path(folder_name)
        paths = {name: folder / f"{name}.json" for name in ("request", "answer", "progress")}
        full = {**request, "answer": str(paths["answer"]), "progress": str(paths["progress"])}
        paths["request"].write_text(json.dumps(full), "utf-8")
        log = folder / "log.txt"
        with open(log, "wb") as log_file:
            process = subprocess.Popen(
                [*command, str(paths["request"])],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                # An empty working folder: a json.py of the caller's must not shadow the library's.
                cwd=folder,
                env={**_environment(), **(environment(folder) if environment else {})},
                # Ctrl-C in a terminal reaches this process, which then ends the child itself.
                start_new_session=True,
            )
            try:
                _wait(process, timeout_seconds, paths["progress"], progress)
            finally:
                _end(process)
        if not paths["answer"].is_file():
            raise EngineError(explain.ended(process.returncode, _tail(log)))
        answer: dict[str, Any] = json.loads(paths["answer"].read_text("utf-8"))
        if answer["ok"]:
            return answer
        if answer["kind"] == "os":
            raise OSError(answer["errno"], answer["message"])  # files.writing turns it into an OutputError.
        if answer["kind"] == "internal":
            last = _tail(log).strip().splitlines()[-1:] or [""]
            raise EngineError(f"the {what} process failed: {answer['message']}\n  {last[0]}")
        return answer


def answer_parent(request_path: Path, work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """In the child: do the work of a request and write the answer, whatever becomes of it."""
    request = json.loads(request_path.read_text("utf-8"))
    _end_with_parent()
    answer: dict[str, Any]
    try:
        answer = {"ok": True, **work(request)}
    except OSError as error:
        answer = {"ok": False, "kind": "os", "errno": error.errno, "message": str(error)}
    except DetrtError as error:
        answer = {"ok": False, "kind": type(error).__name__, "message": str(error)}
    except Exception as error:
        import traceback

        traceback.print_exc()
        answer = {"ok": False, "kind": "internal", "message": f"{type(error).__name__}: {error}"}
    files.write_text(Path(request["answer"]), json.dumps(answer))


class ProgressFile:
    """Appends {"fraction", "text"} lines, at most ten a second."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_s = 0.0

    def __call__(self, fraction: float, text: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _PROGRESS_SECONDS
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"fraction": round(fraction, 4), "text": text}) + "\n")


def _wait(
    process: subprocess.Popen[bytes],
    timeout_seconds: float | None,
    progress_path: Path,
    progress: Progress | None,
) -> None:
    deadline_s = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    seen = 0
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            if progress:
                seen = _relay(progress_path, seen, progress)
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise EngineError(
                    f"the build took longer than {timeout_seconds:g} seconds and was stopped; nothing was "
                    "written. Raise --timeout, lower --optimization-level, or use a smaller profile"
                ) from None


def _relay(path: Path, seen: int, progress: Progress) -> int:
    """Pass on the newest complete line after byte `seen`; return how far was read."""
    if not path.is_file():
        return seen
    with open(path, "rb") as file:
        file.seek(seen)
        complete, newline, _ = file.read().rpartition(b"\n")
    if newline:
        event = json.loads(complete.rpartition(b"\n")[2])
        progress(event["fraction"], event["text"])
    return seen + len(complete) + len(newline)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait(_TERMINATE_SECONDS * 5)


def _end_with_parent() -> None:
    """A builder must not outlive a caller that was killed: nobody would read its answer."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _environment() -> dict[str, str]:
    """The child must find the detrt that is running here, however that was found."""
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in paths)}


def _tail(path: Path) -> str:
    data = path.read_bytes()[-_LOG_TAIL_BYTES:]
    return data.decode("utf-8", "replace")
