"""Writes of files and folders that are whole or not there, also after kill -9 and a power cut, their digests, and the one reader of the text and
JSON files that people write."""

from __future__ import annotations

import codecs
import contextlib
import errno
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import tempfile
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .errors import DetrtError, GateError, MissingPackageError, OutputError, SpecError, number_of, one_line

TEMPORARY = ".tmp"  # ends the names of what is not finished
_TEMPORARY_NAME = re.compile(r"\.(.+)\.(?:\d+|[0-9a-f]{8})" + re.escape(TEMPORARY))  # of files a number
_LONGEST_NAME = 200  # bytes, in the name of what is not finished: file systems take 255
# In the names of folders among the temporary files of the system. Hosts can share these, and some file systems lock for each host alone, so
# that the locks of another host say nothing.
SCRATCH = "detrt-" + re.sub(r"[^\w.-]", "_", platform.node())
_TMPDIR = "set TMPDIR to a folder with more room that you may write, such as: TMPDIR=$HOME/tmp detrt ..."
_FULL, _NEARLY_FULL = 1 << 20, 64 << 20  # bytes that are free; some writes ask for all of their room at once
_NO_ROOM, _NOT_ALLOWED = (errno.ENOSPC, errno.EDQUOT), (errno.EACCES, errno.EPERM, errno.EROFS)
_FOLDER = "cannot write '{}': a folder has that name; give another output path"


# Bytes. A manifest with 1203 labels has 0.1 MB, an index of weights a few; annotations of large data sets have hundreds.
_LONGEST_TEXT, _LONGEST_JSON, LONGEST_DATA_SET = 16 << 20, 64 << 20, 2 << 30
_MOST_VALUES = 1_000_000  # of YAML, a few lines of which can repeat what they have millions of times
# UTF-32 first: its mark starts with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LINE_END = re.compile("\r\n|\r|\n")


def read_text(
    path: Path | str | os.PathLike, what: str, error: type[DetrtError] = SpecError, *, most: int = _LONGEST_TEXT, advice: str = ""
) -> str:
    """A text file: UTF-8, with a byte order mark or without one, or UTF-16 or UTF-32 with theirs.

    Args:
        what: the file in messages, e.g. "labels file". error: the kind to raise. most: bytes that are read. advice: what to do besides,
            e.g. "build it again".

    Raises:
        DetrtError: of the kind `error`: missing, too large, or not text.
    """
    path, more = Path(path), f"; {advice}" if advice else ""
    try:
        if path.stat().st_size > most:
            raise error(f"the {what} '{path}' has {path.stat().st_size} bytes; at most {most} are read: give a text file{more}")
        return decode_text(path.read_bytes())
    except FileNotFoundError:
        raise error(f"there is no {what} '{path}'; check the path{more}") from None
    except OSError as failure:
        raise error(f"the {what} '{path}' cannot be read: {failure.strerror}; give a text file{more}") from None
    except UnicodeError as failure:
        raise error(f"the {what} '{path}' is not UTF-8 text ({failure}); save it as UTF-8{more}") from None


def decode_text(data: bytes) -> str:
    """The text of a file's bytes, without its byte order mark. Raises UnicodeError for what is no text."""
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as failure:
        raise UnicodeError(f"{failure.reason} at byte {failure.start}") from None
    if "\0" in text:
        raise UnicodeError("it has zero bytes")
    return text


def lines_of(text: str) -> list[str]:
    """The lines of a text without spaces around them; an empty line keeps its place, those at the end are left out.

    Only LF, CRLF and CR end a line: `str.splitlines` also splits at characters that names and words may hold.
    """
    lines = [line.strip() for line in _LINE_END.split(text)]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def read_lines(
    path: Path | str | os.PathLike, what: str, error: type[DetrtError] = SpecError, *, most: int = _LONGEST_TEXT
) -> list[str]:
    """`lines_of` a file; raises what `read_text` raises."""
    return lines_of(read_text(path, what, error, most=most))


_NUMBERED = re.compile(r"(\d{1,9})(?:\s*[:;,=|)\].](?!\d)\s*|\s+)\S")  # no decimal


def read_names(
    path: Path | str | os.PathLike, what: str, error: type[DetrtError] = SpecError, *, most: int = _LONGEST_TEXT, advice: str = ""
) -> list[str]:
    """`read_lines` of a list of names. advice: where the marks that are refused belong to the names.

    Raises:
        DetrtError: also for a file of another format by its suffix, for a comment in the first line, and for lines that all have a rising
            number in front, a dash, quotation marks or a comma behind, or are JSON, as other formats of lists have.
    """
    if (suffix := Path(path).suffix.lower()) in _NO_LISTS:
        raise error(f"the {what} '{path}' is a file {suffix}; give a text file with the names alone, one per line")
    lines = read_lines(path, what, error, most=most)
    if lines and re.match(r"#\s*[a-z]", lines[0], re.IGNORECASE):
        raise error(f"the {what} '{path}' begins with a comment ({one_line(lines[0], 40)!r}); remove it: every line is a name")
    if marks := _marks([line for line in lines if line]):
        raise error(
            f"the {what} '{path}' has {marks} at every name; write the names alone, one per line"
            + (f"; {advice}" if advice else "")
        )
    return lines


# Suffixes of files that name classes beside other things.
_NO_LISTS = (".csv", ".tsv", ".jsonl", ".ndjson", ".pbtxt", ".xml", ".toml", ".ini", ".cfg", ".data", ".py", ".html", ".md")


def _marks(lines: list[str]) -> str:
    """What all lines of a list have beside names; "" for nothing."""
    if len(lines) < 2:
        return ""
    if all(numbered := [_NUMBERED.match(line) for line in lines]):
        numbers = [int(found[1]) for found in numbered if found]
        if all(after > before for before, after in itertools.pairwise(numbers)):
            return f"a number ({one_line(lines[0], 40)!r})"
    if all(line.startswith("- ") for line in lines):
        return f"a dash ({one_line(lines[0], 40)!r})"
    if all(line.rstrip(",")[:1] in tuple("\"'") and line.rstrip(",")[-1] == line[0] for line in lines):
        return f"quotation marks ({one_line(lines[0], 40)})"
    if all(line.startswith("{") and line.endswith("}") for line in lines):
        return f"an object of JSON ({one_line(lines[0], 40)})"
    return f"a comma ({one_line(lines[0], 40)!r})" if all(line.endswith(",") for line in lines[:-1]) else ""


def read_json(
    path: Path | str | os.PathLike,
    what: str,
    error: type[DetrtError] = SpecError,
    *,
    most: int = _LONGEST_JSON,
    advice: str = "",
    unique: bool = False,
) -> Any:
    """The value in a JSON file, in the encodings of `read_text`; `most` and `advice` as there. unique: a key that is there twice is an error.

    Raises:
        DetrtError: of the kind `error`: missing, not text, not JSON, or nested too deeply.
    """
    text = read_text(path, what, error, most=most, advice=advice)
    try:
        return parse_json(text, unique=unique)
    except ValueError as failure:
        raise error(f"the {what} '{path}' cannot be read as JSON: {failure}" + (f"; {advice}" if advice else "")) from None


def read_yaml(
    path: Path | str | os.PathLike, what: str, error: type[DetrtError] = SpecError, *, extra: str, advice: str = ""
) -> Any:
    """The value in a YAML file, in the encodings of `read_text`. extra: of detrt, which brings PyYAML.

    Numbers, dates, yes and no are text as it is written: YAML would read the names 010 and 12:30 as 8 and 750.

    Raises:
        DetrtError: of the kind `error`: missing, not text, or not YAML. MissingPackageError: no PyYAML.
    """
    try:
        import yaml
    except ImportError:
        raise MissingPackageError("yaml", extra, f"reading '{path}'") from None
    text = read_text(path, what, error, advice=advice)
    try:
        value = yaml.load(text, _as_written(yaml))
    except RecursionError:
        raise error(f"the {what} '{path}' is not YAML that can be read: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as failure:
        raise error(f"the {what} '{path}' is not YAML: {one_line(failure, 400)}") from None
    if _count(value, _MOST_VALUES) == _MOST_VALUES:
        raise error(f"the {what} '{path}' has a million values or more, with all that *NAME repeats; give a smaller file")
    return value


def _count(value: Any, most: int) -> int:
    """Values in lists and mappings, one that is repeated each time; up to `most`."""
    found, waiting = 0, [value]
    while waiting and found < most:
        one = waiting.pop()
        found += 1
        if isinstance(one, (list, dict)):
            waiting.extend(itertools.islice(one if isinstance(one, list) else itertools.chain(one, one.values()), most - found))
    return found


def _as_written(yaml: Any) -> Any:
    """A loader of PyYAML for which a plain word is null, the sign of a merge, or text; a key that is there twice is an error."""
    words = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar = {
            letter: [pair for pair in pairs if pair[0] in words]
            for letter, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _check_unique(key.value for key, _ in node.value if isinstance(key.value, str) and key.tag != words[1])
            return super().construct_mapping(node, deep)

    return Loader


def _check_unique(keys: Iterable[str]) -> None:
    """Raises ValueError for a key that is there twice, of which readers take the last."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"it has the key {one_line(key, 40)!r} twice")
        seen.add(key)


_PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".tar")  # suffixes
# First bytes of what is taken for another file -> what it is, and what to do.
_TAKEN_FOR_ANOTHER = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; run: git lfs pull"),
    (b"<", "a web page or another text, as a failed download leaves it; download the file again"),
    (b"\x1f\x8b", "compressed with gzip; unpack it"),
    (b"BZh", "compressed with bzip2; unpack it"),
    (b"\xfd7zXZ", "compressed with xz; unpack it"),
    (b"7z\xbc\xaf", "an archive of 7-Zip; unpack it"),
    (b"\x89HDF", "an HDF5 file, as Keras writes it; detrt reads PyTorch and ONNX"),
)


def what_it_is(path: Path | str) -> str:
    """What a file is that a reader of its suffix cannot read, and what to do, in words; "" where its first bytes do not tell."""
    suffix = Path(path).suffix.lower()
    try:
        with open(path, "rb") as file:
            start = file.read(64)
        if start.startswith(b"PK\3\4"):
            return _of_archive(zipfile.ZipFile(path).namelist(), suffix)
    except (OSError, zipfile.BadZipFile):
        return ""
    if start[8:10] == b'{"':
        return "" if suffix == ".safetensors" else "a safetensors file; let its name end with .safetensors"
    if start.startswith(b"\x80"):
        return "" if suffix in _PICKLES else "a pickle, as PyTorch writes it; let its name end with .pth"
    return next((words for mark, words in _TAKEN_FOR_ANOTHER if start.lstrip(b"\xef\xbb\xbf \r\n").startswith(mark)), "")


def _of_archive(names: Sequence[str], suffix: str) -> str:
    last = {name.rpartition("/")[2] for name in names}
    if "constants.pkl" in last:
        return "a TorchScript program, not a checkpoint; give the checkpoint that it was made from"
    if "archive_format" in last:
        return "a program of torch.export, not a checkpoint; give the checkpoint that it was made from"
    if "data.pkl" in last:
        return "" if suffix in _PICKLES else "a checkpoint of PyTorch; let its name end with .pth"
    return f"an archive of {number_of(len(names), 'file')} ({', '.join(names[:3])}); unpack it"


def parse_json(text: str | bytes | bytearray, *, finite: bool = False, unique: bool = False) -> Any:
    """The value of a JSON text. Raises ValueError, also for one that is nested too deeply, with `finite` for NaN and Infinity, and with `unique`
    for a key that an object has twice.
    """
    options: dict[str, Any] = {"object_pairs_hook": _unique_object} if unique else {}
    try:
        return json.loads(text, parse_constant=_refuse_constant if finite else None, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as failure:  # of an integer with thousands of digits: then comes Python's advice
        raise ValueError(str(failure).partition(";")[0]) from None


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_unique(key for key, _ in pairs)
    return dict(pairs)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it has the number {name}")


def is_file_name(path: str) -> bool:
    """Whether a path that a file names may be one: file systems take no zero bytes, only what can be encoded, and 255 bytes of a name."""
    try:
        name = os.fsencode(path)
    except UnicodeError:
        return False
    return b"\0" not in name and max(map(len, name.split(b"/"))) <= 255


def folder_of_user(variable: str, usual: str) -> Path | None:
    """detrt's folder among the files of the user; None for a user without a home folder.

    variable: of the environment, which may name the folder of all programs, e.g. XDG_CACHE_HOME. usual: where it is otherwise, e.g. "~/.cache".
    """
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get(variable) or usual).expanduser() / "detrt"
    return None


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# What a folder holds that is read as one: a bundle by its manifest, a checkpoint as a whole; of other folders what is no text.
MANIFEST = "detrt.json"
_MODEL = (".safetensors", ".onnx", ".bin", ".pt", ".pth", ".engine", "config.json")
_TEXTS = (".json", ".jsonl", ".csv", ".txt", ".html", ".md")
_kept: frozenset[str] = frozenset()  # real paths of files that the running command reads


@dataclass(frozen=True, slots=True)
class Output:
    """A path that is going to be written. name: how the caller names it. text: whether a text comes there, and not a folder or an image."""

    path: Path
    name: str
    text: bool = False


def refuse_replacing(outputs: Sequence[Output], inputs: Iterable[Path | str]) -> None:
    """Compare every path that is written with every one that is read, and with the others; before any work.

    An existing file that a text would replace must be a text.

    Raises:
        OutputError: an output is an input or a part of one, two are one path, or a text would replace something else.
    """
    inputs = [Path(path) for path in inputs]
    seen: dict[str, Output] = {}
    for one in outputs:
        place = os.path.realpath(one.path)
        if (other := seen.setdefault(place, one)) is not one:
            raise OutputError(f"{other.name} and {one.name} both write '{one.path}'; give each output its own path")
        if not one.path.is_file():
            continue
        for read in inputs:
            if _same(one.path, read) or (read.is_dir() and _is_part(read, Path(place))):
                raise OutputError(f"{one.name} '{one.path}' would replace what is read ('{read}'); give another output path")
        if one.path.name == MANIFEST:
            raise OutputError(f"{one.name} '{one.path}' would replace the manifest of a bundle; give another output path")
        if one.text and not _is_text(one.path):
            raise OutputError(
                f"{one.name} would replace '{one.path}', which is no text; give another output path, or remove it first"
            )


@contextlib.contextmanager
def keeping(inputs: Iterable[Path | str]) -> Iterator[None]:
    """Refuse to write any of these files inside the block."""
    global _kept
    before = _kept
    _kept = before | {os.path.realpath(path) for path in inputs if os.path.isfile(path)}
    try:
        yield
    finally:
        _kept = before


def _same(path: Path, other: Path) -> bool:
    try:
        return other.is_file() and os.path.samefile(path, other)
    except OSError:
        return False


def _is_part(folder: Path, file: Path) -> bool:
    """Whether an existing file belongs to what is read in a folder."""
    place = Path(os.path.realpath(folder))
    if not file.is_relative_to(place):
        return False
    manifest = place / MANIFEST
    if manifest.is_file():
        name = file.relative_to(place).as_posix()
        with contextlib.suppress(OSError):
            return name == MANIFEST or name.removesuffix(".json") in manifest.read_text("utf-8", errors="replace")
    if any(one.name.endswith(_MODEL) for one in place.iterdir()):
        return True
    return file.suffix.lower() not in _TEXTS


def _is_text(path: Path) -> bool:
    if _is_stream(path):
        return True
    with naming(path), open(path, "rb") as file:
        start = file.read(4096)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return b"\0" not in start


@contextlib.contextmanager
def writing(path: Path | str, *, may_be_read: bool = False) -> Iterator[Path]:
    """Give an empty temporary file beside `path`; rename it to `path` if the block succeeds, else remove it. A device or a pipe is given itself.

    may_be_read: files that are kept (`keeping`) are replaced as well: by their own content, or with all that belongs to them.

    What was written is on the disk before it has its name, so that a power cut leaves the old content or the new. The block writes the
    file and does not replace it: a lock on it tells others that it is in use. What a killed process left of it is removed by the next one.

    Raises:
        OutputError: the folder cannot be written, the disk is full, or the file is kept (`keeping`).
    """
    path = Path(path)
    with naming(path):  # a name may be too long to look at
        is_stream = _is_stream(path)
    if not may_be_read and os.path.realpath(path) in _kept and not is_stream:
        raise OutputError(f"'{path}' is read and would be replaced; give another output path")
    if not path.name:  # "." and "/", which have no name to put another beside
        raise OutputError(_FOLDER.format(path))
    if is_stream:
        with naming(path):
            yield path
        return
    with naming(path), making_parents(path), _temporary_file(path) as temporary:
        yield temporary
        if path.is_dir():
            raise OutputError(_FOLDER.format(path))
        move(temporary, path)


def move(source: Path, target: Path) -> None:
    """Rename a finished file or folder to its place, in the order that survives a power cut: content, name.

    Raises:
        OSError: it cannot be written, or renamed.
    """
    sync(source)
    os.replace(source, target)
    sync_names(target.parent)


def put(source: Path, target: Path) -> None:
    """`move` a finished file, or write its content where the target is a device or a pipe. Raises OSError."""
    if _is_stream(target):
        target.write_bytes(source.read_bytes())
    else:
        move(source, target)


def sync(path: Path) -> None:
    """Wait until a file, or all files of a folder, are on the disk. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        for one in path.iterdir():
            sync(one)
        sync_names(path)
    elif path.is_file():
        handle = os.open(path, os.O_RDWR)  # Windows flushes only what may be written
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_names(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can."""
    with contextlib.suppress(OSError):  # Windows opens no folders, and some file systems cannot
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _lock(path: Path, *, wait: bool = False) -> int | None:
    """Lock a file or a folder; a descriptor that holds the lock until it is closed, or None where the system cannot lock it.

    Raises:
        BlockingIOError: another process holds it, or has removed or renamed the file. OSError: it cannot be opened.
    """
    try:
        import fcntl
    except ImportError:
        return None
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise BlockingIOError(errno.EAGAIN, "removed", str(path)) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if not path.exists() or not os.path.samestat(os.fstat(handle), path.stat()):
            raise BlockingIOError(errno.EAGAIN, "replaced", str(path))
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:  # such as a network file system without locks
        os.close(handle)
        return None
    return handle


def short_name(name: str, longest: int) -> str:
    """A name, or its start and a digest of it, so that names stay apart, where it has more than `longest` bytes (at least 40)."""
    if len(os.fsencode(name)) <= longest:
        return name
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    start = name
    while len(os.fsencode(start)) > longest - 17:
        start = start[:-1]
    return f"{start}-{digest}"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a block with this folder."""
    handle = _lock(folder, wait=True)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


@contextlib.contextmanager
def temporary_folder(parent: Path, name: str, *, mode: int = 0o777) -> Iterator[Path]:
    """Make a hidden folder in `parent`, which exists until the block ends; `remove_dead`, which comes first, tells by a lock that it is in use.

    mode: permissions, less those that the process masks.

    Raises:
        OSError: it cannot be made.
    """
    remove_dead(parent, name)
    while True:
        path = parent / f".{short_name(name, _LONGEST_NAME)}.{uuid.uuid4().hex[:8]}{TEMPORARY}"
        path.mkdir(mode)
        try:
            handle = _lock(path)
            break
        except BlockingIOError:  # `remove_dead` came between
            continue
    try:
        yield path
    finally:
        remove(path)
        if handle is not None:
            os.close(handle)


def temporary_files() -> Path:
    """Where the system has temporary files: the folder in TMPDIR, or /tmp where none is set.

    Raises:
        OutputError: the folder that is set cannot be written, where Python takes another one without a word, or none can.
    """
    for variable in ("TMPDIR", "TEMP", "TMP"):  # as tempfile looks for it
        if place := os.environ.get(variable):
            if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
                break
            there = "may not be written" if os.path.isdir(place) else "is a file" if os.path.exists(place) else "does not exist"
            raise OutputError(
                f"{variable} is '{place}', which {there}, so that temporary files have no place; make that folder, or {_TMPDIR}"
            )
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        raise OutputError(
            f"no folder for temporary files can be written: neither /tmp nor /var/tmp and the working folder; {_TMPDIR}"
        ) from None


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder of the user's own where the system has temporary files (TMPDIR), which exists until the block ends.

    Raises:
        OutputError: there is no place for it, or what the block writes does not fit, also where another library says so in its own
            error, or says nothing of the disk.
    """
    parent = temporary_files()
    with contextlib.ExitStack() as closing:
        try:
            path = closing.enter_context(temporary_folder(parent, SCRATCH, mode=0o700))
        except OSError as error:
            raise OutputError(f"cannot write temporary files to '{parent}': {error.strerror}; {_TMPDIR}") from error
        try:
            yield path
        except Exception as error:
            if (why := _why_unwritten(path, error)) is None:
                raise
            raise OutputError(
                why if _TMPDIR in why else f"cannot write temporary files to '{parent}': {why}; {_TMPDIR}"
            ) from error


def _why_unwritten(folder: Path, error: Exception) -> str | None:
    """What of a temporary folder ended the work in it with an error; None where that was something else.

    Only some errors of writes have the name of the file, and those of other libraries may say nothing of the disk.
    """
    if isinstance(error, (BrokenPipeError, GateError, MissingPackageError)):
        return None
    text = str(error)
    if isinstance(error, OutputError):
        if str(folder) not in text:
            return None
        if _TMPDIR in text:  # of a child process, whose TMPDIR the folder is
            return text.replace(str(folder), str(folder.parent))
    cause = error.__cause__ if isinstance(error, OutputError) else error
    if not folder.is_dir():
        return "another program removed the folder while it was in use"
    named = os.fsdecode(cause.filename) if isinstance(cause, OSError) and cause.filename is not None else ""
    inside = str(folder) in (named or text)
    if named and not inside:
        return None
    number = cause.errno if isinstance(cause, OSError) else next((one for one in _NO_ROOM if os.strerror(one) in text), None)
    usage = shutil.disk_usage(folder)
    if number == errno.EDQUOT or (number == errno.ENOSPC and (inside or usage.free < _NEARLY_FULL)) or usage.free < _FULL:
        had = sum(one.lstat().st_size for one in folder.rglob("*") if not one.is_dir())
        if number == errno.EDQUOT:
            what = "your quota is used up"
        else:  # a compiler removes what it could not write to the end
            what, had = f"the disk is full, with {_mib(usage.total)} in all", had + usage.free
        said = "" if number in _NO_ROOM else f" (it ended with: {one_line(text, 200)})"
        return f"{what}, and the work needs more than the {_mib(had)} that it had{said}"
    return str(cause.strerror) if isinstance(cause, OSError) and inside and cause.errno in _NOT_ALLOWED else None


def room_error(error: Exception) -> OSError | None:
    """What an error of another program, which names no file, says of a full disk, as an error about the temporary files; None: nothing."""
    number = next((one for one in _NO_ROOM if os.strerror(one) in str(error)), None)
    return None if number is None else OSError(number, os.strerror(number), tempfile.gettempdir())


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def remove_dead(parent: Path, name: str = "") -> bool:
    """Remove the temporary folders in `parent` whose process has ended without removing them; returns whether others are in use.

    name: only those of this name.
    """
    try:
        paths = list(parent.iterdir()) if parent.is_dir() else []
    except PermissionError:  # a folder for all users may let each write, and none list what is there
        return False
    in_use = False
    for path in paths:
        found = _TEMPORARY_NAME.fullmatch(path.name)
        if found is None or (name and short_name(name, _LONGEST_NAME) != found[1]) or path.is_symlink() or not path.is_dir():
            continue
        in_use |= _remove_dead(path)
    return in_use


def _remove_dead(path: Path) -> bool:
    """Remove a temporary file or folder that no process uses; returns whether one does, False where the system cannot tell."""
    try:
        handle = _lock(path)
    except BlockingIOError:
        return path.exists()
    except OSError:  # another user's
        return False
    if handle is not None:
        remove(path)
        os.close(handle)
    return False


@contextlib.contextmanager
def _temporary_file(path: Path) -> Iterator[Path]:
    """Make an empty hidden file beside `path`, which the block renames or removes; a block that fails removes it. The names are few, so
    that the next process finds what a killed one left, and removes it, without a look at the whole folder.

    Raises:
        OSError: it cannot be made.
    """
    for number in itertools.count():
        temporary = path.with_name(f".{short_name(path.name, _LONGEST_NAME)}.{number}{TEMPORARY}")
        if temporary.is_file() and not temporary.is_symlink():
            _remove_dead(temporary)
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            handle = _lock(temporary)
            break
        except (FileExistsError, BlockingIOError):  # in use, or `_remove_dead` came between
            continue
    try:
        yield temporary
    except BaseException:
        remove(temporary)
        raise
    finally:
        if handle is not None:
            os.close(handle)


def _is_stream(path: Path) -> bool:
    """Whether a file renamed to `path` would replace what programs share: /dev/null, a named pipe, /dev/stdout, >(jq)."""
    links = (os.path.realpath(path.parent) + "/", os.readlink(path) if path.is_symlink() else "")
    return path.exists() and not path.is_dir() and (not path.is_file() or any(link.startswith("/proc/") for link in links))


@contextlib.contextmanager
def naming(path: Path | str | os.PathLike) -> Iterator[None]:
    """Name `path` in the errors of the operating system.

    Raises:
        OutputError: in place of any OSError but a BrokenPipeError.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of stdout, or of `path`, has gone, which is not an error
        raise
    except OSError as error:
        raise output_error(path, error) from error


@contextlib.contextmanager
def naming_place(temporary: Path, place: Path) -> Iterator[None]:
    """Name the place that was given, not the temporary folder, in errors about what is written to the folder first.

    Raises:
        OutputError: in place of another one, and as `naming` does.
    """
    try:
        with naming(place):
            yield
    except OutputError as error:
        raise OutputError(str(error).replace(str(temporary), str(place))) from error


@contextlib.contextmanager
def making_parents(path: Path) -> Iterator[None]:
    """Make the folders above `path`; those that were made here go again if the block fails.

    Raises:
        OSError: a folder cannot be made.
    """
    made = [folder for folder in path.parents if not folder.exists()]  # the innermost first
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
        for folder in made:
            sync_names(folder.parent)
    except BaseException:
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: something else was put there meanwhile
                folder.rmdir()
        raise


def remove(path: Path) -> None:
    """Remove a file or a folder where there is one."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def output_error(path: Path | str | os.PathLike, error: OSError) -> OutputError:
    """Turn an operating system error into one that says what to do."""
    if error.errno in _NO_ROOM:
        return OutputError(f"cannot write '{path}': the disk is full; free space or give another output path")
    if error.errno in _NOT_ALLOWED:
        return OutputError(f"cannot write '{path}': no permission; give an output path that you may write")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return OutputError(f"cannot write '{path}': a part of the path is a file, not a folder")
    return OutputError(f"cannot write '{path}': {error.strerror or error}; give another output path")


def check_place(path: Path | str) -> None:
    """Find out before minutes of work whether a file can be written at `path`; leaves nothing there.

    Raises:
        OutputError: as `writing` would.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise OutputError(_FOLDER.format(path))
        if _is_stream(path):
            return
        folder = path.absolute().parent
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        with _temporary_file(folder / path.name) as probe:
            probe.unlink()
    except OSError as error:
        raise output_error(path, error) from error


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write a whole file atomically."""
    with writing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path | str, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def remove_unfinished(folder: Path, names: Iterable[str]) -> None:
    """Remove the temporary files that `writing` files of these names in a folder left when it was killed; nobody may be writing them."""
    wanted = {short_name(name, _LONGEST_NAME) for name in names}
    for path in folder.iterdir():
        found = _TEMPORARY_NAME.fullmatch(path.name)
        if found is not None and found[1] in wanted and not path.is_dir():
            remove(path)
