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


@pytest.fixture
def temporaries(tmp_path, monkeypatch):
    """The folder of the system's temporary files."""
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def shrink(monkeypatch, free):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: type("Usage", (), {"total": 8 << 20, "free": free}))


@pytest.mark.parametrize(
    ("error", "free", "said"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            0,
            "the disk is full, with 8.0 MiB in all.*more than the 3.0 MiB that it had",
        ),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "{}/part"), 1 << 40, "the disk is full"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), 1 << 40, "your quota is used up"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "{}/part"), 1 << 40, "Permission denied"),
        (RuntimeError("the compiler ended with exit code 1"), 0, r"the disk is full.*it ended with: the compiler"),
        (RuntimeError("write of {}/part: No space left on device"), 2 << 20, "the disk is full"),
        (OutputError("cannot write '{}/part': the disk is full; give another output path"), 0, "the disk is full, with"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_fails_for_want_of_room_among_temporary_files_says_so(temporaries, monkeypatch, error, free, said):
    shrink(monkeypatch, free)
    words = rf"^cannot write temporary files to '{temporaries}': .*TMPDIR="
    with pytest.raises(OutputError, match=words) as found, files.scratch() as folder:
        (folder / "part").write_bytes(bytes(3 << 20))
        if isinstance(error, OSError):
            raise type(error)(error.errno, error.strerror, *([error.filename.format(folder)] if error.filename else []))
        raise type(error)(str(error).format(folder))
    assert found.match(said) and os.listdir(temporaries) == []


@pytest.mark.parametrize(
    ("error", "free"),
    [
        (ValueError("a bug"), 1 << 40),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1 << 40),  # of another disk
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/elsewhere/out"), 0),
        (OutputError("cannot write '/elsewhere/out': the disk is full"), 0),
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/elsewhere/in"), 1 << 40),
        (BrokenPipeError(), 0),
        (KeyboardInterrupt(), 0),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_other_errors_beside_temporary_files_stay_what_they_are(temporaries, monkeypatch, error, free):
    shrink(monkeypatch, free)
    with pytest.raises(type(error)) as found, files.scratch():
        raise error
    assert found.value is error and os.listdir(temporaries) == []


def test_a_full_disk_in_the_message_of_a_compiler(temporaries):
    said = RuntimeError("g++ " * 500 + "fatal error: error writing to /tmp/ccA.s: No space left on device")
    found = files.room_error(said)
    assert found is not None and (found.errno, found.filename) == (errno.ENOSPC, str(temporaries))
    assert files.room_error(RuntimeError("error: expected ';'")) is None


def test_temporary_files_without_a_place(monkeypatch, tmp_path):
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(OutputError, match=r"No such file or directory; set TMPDIR"), files.scratch():
        pass
    monkeypatch.setattr(files.tempfile, "tempdir", None)
    monkeypatch.setattr(files.tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "gone")])
    with pytest.raises(OutputError, match=r"^no folder for temporary files.*TMPDIR="), files.scratch():
        pass


@pytest.mark.parametrize(
    ("variable", "place", "why"),
    [("TMPDIR", "gone", "does not exist"), ("TMPDIR", "file", "is a file"), ("TEMP", "gone/deeper", "does not exist")],
)
def test_a_place_for_temporary_files_that_is_none_is_not_replaced_by_another(monkeypatch, tmp_path, variable, place, why):
    """Python takes /tmp then, which may be the small disk that TMPDIR is to spare."""
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / place))
    with pytest.raises(OutputError, match=f"^{variable} is '{tmp_path / place}', which {why}.*set TMPDIR to"), files.scratch():
        pass
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(files.tempfile, "tempdir", None)
    with files.scratch() as folder:
        assert folder.parent == tmp_path


def test_a_folder_that_another_program_removed(temporaries):
    with pytest.raises(OutputError, match="another program removed"), files.scratch() as folder:
        folder.rmdir()
        (folder / "part").write_text("x")


def test_temporary_files_of_a_killed_process_go_with_the_next(temporaries):
    with files.scratch() as used:
        (used / "part").write_text("x")
        killed = used.with_name(f".{files.SCRATCH}.0123abcd.tmp")
        killed.mkdir()
        (killed / "part").write_text("x")
        assert stat.S_IMODE(used.stat().st_mode) == 0o700
        with files.scratch() as other:
            assert sorted(temporaries.iterdir()) == sorted([used, other])
    assert os.listdir(temporaries) == []


def test_temporary_files_of_another_host_stay(temporaries, monkeypatch):
    """Where file systems lock for each host alone, they look as if they were left."""
    monkeypatch.setattr(files, "SCRATCH", "detrt-other")
    with files.scratch() as other:
        monkeypatch.undo()
        monkeypatch.setattr(files.tempfile, "tempdir", str(temporaries))
        fcntl = pytest.importorskip("fcntl")
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
        with files.scratch() as own:
            assert own != other and own.is_dir() and other.is_dir()


def test_a_folder_that_cannot_be_listed_takes_temporary_files(temporaries, monkeypatch):
    """Such as a /tmp of mode 1733."""

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(files.Path, "iterdir", refuse)
    with files.scratch() as folder:
        (folder / "part").write_text("1")
    assert os.listdir(temporaries) == []


def test_nothing_else_makes_temporary_files():
    """So that `scratch` words each refusal, and removes what is left."""
    for what, wanted in (("tempfile", {"files.py"}), ("temporary_files()", {"files.py", "worker.py"})):
        users = {p.name for p in Path(files.__file__).parent.rglob("*.py") if what in p.read_text("utf-8")}
        assert users == wanted  # the models that workers of a cluster unpack stay
