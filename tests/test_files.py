from __future__ import annotations

import errno
import hashlib
import os

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


def test_a_folder_may_be_written(tmp_path):
    with files.writing(tmp_path / "out") as temporary:
        temporary.mkdir()
        (temporary / "a").touch()
    assert (tmp_path / "out/a").is_file()
    with pytest.raises(ValueError, match="x"), files.writing(tmp_path / "other") as temporary:
        temporary.mkdir()
        raise ValueError("x")
    assert os.listdir(tmp_path) == ["out"]


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
