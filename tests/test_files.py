from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

import pytest

from detrt import files
from detrt.errors import OutputError


def test_digest(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"x" * 3_000_000)
    assert files.sha256_of(path) == hashlib.sha256(b"x" * 3_000_000).hexdigest()


def test_write_replaces_and_makes_folders(tmp_path):
    path = tmp_path / "new/deep/file.txt"
    files.write_text(path, "ä")
    files.write_bytes(path, b"second")
    assert path.read_bytes() == b"second" and os.listdir(path.parent) == ["file.txt"]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), BrokenPipeError()], ids=repr)
def test_nothing_is_left_of_a_failure(tmp_path, error):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(type(error)), files.writing(path) as temporary:
        temporary.write_text("half")
        raise error
    assert os.listdir(tmp_path) == ["file.txt"] and path.read_text() == "old"


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(tmp_path):
    path = tmp_path / "out"
    with files.writing(path) as first, files.writing(path) as second:
        first.write_text("first")
        second.write_text("second")
        files.check_place(path)
        assert len({first, second}) == 2 and len(os.listdir(tmp_path)) == 2
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["out"]  # the outer block ends last
    first.write_text("of a killed process")
    files.write_text(path, "next")
    assert path.read_text() == "next" and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_of_ours_stays(tmp_path, kind):
    path, other = tmp_path / "out", tmp_path / "other"
    other.write_text("theirs")
    with files.writing(path) as temporary:
        pass
    {"link": lambda: temporary.symlink_to(other), "pipe": lambda: os.mkfifo(temporary), "folder": temporary.mkdir}[kind]()
    files.write_text(path, "ours")
    assert path.read_text() == "ours" and other.read_text() == "theirs" and os.path.lexists(temporary)


def test_a_pipe_is_written_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.check_place(pipe)
    files.write_text(pipe, "ä")
    assert os.read(reader, 10).decode() == "ä" and pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]
    os.close(reader)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_finished_file_goes_into_a_pipe(tmp_path):
    (tmp_path / "finished").write_bytes(b"content")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.put(tmp_path / "finished", pipe)
    assert os.read(reader, 10) == b"content" and pipe.is_fifo()
    os.close(reader)
    files.put(tmp_path / "finished", tmp_path / "place")
    assert (tmp_path / "place").read_bytes() == b"content" and not (tmp_path / "finished").exists()


def test_the_place_is_named_not_the_temporary_folder(tmp_path):
    with (
        pytest.raises(OutputError, match=r"out/graph' is bad") as caught,
        files.temporary_folder(tmp_path, "out") as folder,
        files.naming_place(folder, tmp_path / "out"),
    ):
        raise OutputError(f"'{folder}/graph' is bad")
    assert "tmp'" not in str(caught.value) and str(folder) not in str(caught.value)


def test_the_name_of_an_open_file_stays_a_link(tmp_path):
    with open(tmp_path / "out", "w") as out:
        name = tmp_path / "stdout"  # as /dev/stdout is one
        name.symlink_to(f"/proc/self/fd/{out.fileno()}")
        files.write_text(name, "x")
    assert name.is_symlink() and (tmp_path / "out").read_text() == "x"


def test_a_device_that_is_full(tmp_path):
    device = tmp_path / "full"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
    except PermissionError:
        device = Path("/dev/full")  # this user may not replace it
    with pytest.raises(OutputError, match="the disk is full"):
        files.write_text(device, "x")
    assert device.is_char_device()


def test_place_that_cannot_be_written(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"folder': a folder has that name"):
        files.write_text(tmp_path / "folder", "x")
    with pytest.raises(OutputError, match=r"file/below.txt': a part of the path is a file"):
        files.write_text(tmp_path / "file/below.txt", "x")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EACCES, "no permission"),
        (errno.EROFS, "no permission"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_operating_system_errors(tmp_path, number, words):
    with pytest.raises(OutputError, match=rf"a.json.*{words}"), files.writing(tmp_path / "a.json"):
        raise OSError(number, os.strerror(number))
    assert os.listdir(tmp_path) == []
