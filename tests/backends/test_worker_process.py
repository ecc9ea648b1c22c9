"""Messages between processes: what is large goes beside the pickle, without a copy of the whole."""

from __future__ import annotations

import asyncio
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from detrt.backends import worker_process
from detrt.backends.worker_process import Bulk, Channel, module_command, packed

KIB = 1024
ARRAY = np.arange(100 * KIB, dtype=np.int64).reshape(100, KIB)
MESSAGES = {
    "nothing large": ("a", 1, Bulk(b"x" * KIB), np.arange(3)),
    "a body": {"body": Bulk(bytes(range(256)) * 4 * KIB)},
    "one body twice": (lambda body: (body, body))(Bulk(b"y" * 100 * KIB)),
    "arrays": {"a": ARRAY, "b": ARRAY.T, "read only": np.broadcast_to(np.float32(2), (300, 300))},
    "empty": (Bulk(), np.zeros((0, 3)), b""),
}


def same(found, sent) -> bool:
    if isinstance(sent, dict):
        return found.keys() == sent.keys() and all(same(found[key], sent[key]) for key in sent)
    if isinstance(sent, tuple):
        return len(found) == len(sent) and all(map(same, found, sent))
    if isinstance(sent, np.ndarray):
        return found.dtype == sent.dtype and found.flags.writeable >= sent.flags.writeable and np.array_equal(found, sent)
    return type(found) is type(sent) and found == sent


@pytest.mark.parametrize("sent", MESSAGES.values(), ids=MESSAGES)
def test_messages_arrive(sent):
    left, right = map(Channel, socket.socketpair())
    sending = threading.Thread(target=left.send, args=(sent,))
    sending.start()
    assert same(right.receive(), sent)
    sending.join()
    left.close()
    with pytest.raises(EOFError):
        right.receive()
    right.close()


@pytest.mark.parametrize("sent", MESSAGES.values(), ids=MESSAGES)
def test_messages_arrive_in_an_event_loop(sent, monkeypatch):
    from detrt.serve.process import LoopWorker

    ours, theirs = socket.socketpair()
    worker = object.__new__(LoopWorker)  # without its process
    worker.channel, other = Channel(ours), Channel(theirs)

    async def run():
        found, ended = [], asyncio.Event()
        await worker.connect(found.append, ended.set)
        worker.send(sent)  # and back, as a process answers with what it was given
        await asyncio.to_thread(lambda: (other.send(other.receive()), other.close()))
        await asyncio.wait_for(ended.wait(), 60)
        return found

    (found,) = asyncio.run(run())
    assert same(found, sent)


def test_large_buffers_are_sent_as_they_are():
    body, array = Bulk(10_000 * KIB), np.zeros(100 * KIB)
    head, *buffers = packed({"body": body, "array": array, "small": Bulk(KIB)})
    assert len(head) < 3 * KIB
    assert buffers[0].obj is body and np.shares_memory(np.frombuffer(buffers[1]), array)


def test_what_was_received_is_not_copied():
    body = Bulk(b"z" * 100 * KIB)
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(body, protocol=5, buffer_callback=buffers.append)
    received = Bulk(buffers[0].raw())
    assert pickle.loads(text, buffers=[received]) is received


def test_a_worker_that_never_ends_ends_with_its_parent():
    ours, theirs = socket.socketpair()
    code = (
        "import sys, detrt.backends.worker_process as worker\n"
        "def work(channel):\n"
        "    channel.send('begun')\n"
        "    while True: pass\n"
        "worker._EXIT_SECONDS = 0.2\n"
        "worker.work_for_parent(int(sys.argv[1]), work)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        channel = Channel(ours)
        try:
            assert channel.receive() == "begun"
            time.sleep(0.5)
            assert process.poll() is None
            channel.close()
            assert process.wait(60) == 1
        finally:
            process.kill()


def test_a_module_of_the_current_folder_is_not_run(tmp_path):
    """In a folder of somebody else, a server would run its json.py in each of its workers."""
    for name in ("json", "runpy", "sitecustomize", "numpy", "detrt", "tool"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([*module_command("json.tool"), "-", "--compact"], input='{"a": 1}', **options)
    assert done.stdout == '{"a":1}\n' and done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
    subprocess.run([sys.executable, "-m", "json.tool"], input="{}", **options)
    assert (tmp_path / "ran").exists()


def test_no_worker_is_started_by_another_command():
    """`python -m` has the current folder first in its search of modules."""
    package = Path(worker_process.__file__).parents[1]
    assert [path.name for path in package.rglob("*.py") if re.search(r'sys\.executable, "-[mc]"', path.read_text("utf-8"))] == [
        "worker_process.py"
    ]
