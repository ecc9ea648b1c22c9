"""The bundle: a folder with `detrt.json` and the files it names, and the sidecar of one engine.

`detrt.json` holds the ModelSpec, where the model came from, and every file with its digest, so that
a runtime needs nothing else and notices a file that is not the one that was built.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from . import files
from .data.arguments import check_path
from .errors import DetrtError, EngineError, OutputError, SpecError, one_line
from .graph.external import data_locations
from .spec import SCHEMA, ModelSpec, Precision

MANIFEST = files.MANIFEST
PROVENANCE_KEY = "detrt.provenance"  # of the metadata of an ONNX file


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a model came from.

    source: the reference it was loaded from; a path is absolute, and a hub id has its revision. checkpoint_sha256: digest over the weight files.
    options: the caller's choices. versions: package name -> version. parameters: number of weights.
    """

    source: str
    checkpoint_sha256: str = ""
    parameters: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str = ""

    @property
    def has_random_weights(self) -> bool:
        """Whether its scores are nearly equal, so that rounding alone changes which queries are selected."""
        return self.source.startswith("random:")

    def to_json(self) -> str:
        """For the metadata of an ONNX file."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Provenance:
        """Read `to_json`'s form. Raises SpecError."""
        try:
            provenance = cls(**files.parse_json(text))
        except (TypeError, ValueError) as error:
            raise SpecError(f"the ONNX file says in a damaged form where it comes from ({error}); export it again") from None
        _check_types("the provenance in the ONNX file", provenance, _PROVENANCE_TYPES)
        return provenance


@dataclass(frozen=True, slots=True)
class CpuSpeed:
    """What a bundle's OpenVINO model and its ONNX file took when the bundle was built: the least of several runs.

    processor: its name. threads: of each backend. batch: images per run, of the usual size. onnxruntime_version: e.g. "1.31.1".
    openvino_ms, onnxruntime_ms: milliseconds per run.
    """

    processor: str
    threads: int
    batch: int
    openvino_ms: float
    onnxruntime_ms: float
    onnxruntime_version: str

    @property
    def prefers_onnx(self) -> bool:
        return self.onnxruntime_ms < self.openvino_ms


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine was built for, kept in its sidecar.

    target: "tensorrt-rtx", "tensorrt", "inductor-cpu", "inductor-cuda" or "openvino". runtime_version: of the library that built it
        and runs it: TensorRT, PyTorch or OpenVINO. compute_capabilities: e.g. (86, 89).
    profile: input name -> {"min": [...], "opt": [...], "max": [...]}. precision: e.g. "fp32".
    onnx_sha256: digest of the ONNX file it was built from. layers: number of network layers.
    options: the caller's choices. inputs, outputs: {"name", "dtype", "shape"}, a symbolic axis is its name.
    layer_types: TensorRT type -> number of layer outputs. kernels: kind -> number of kernels, "all" among them, where the builder
        lists them (`backends.tensorrt.kernels`). peak_memory_mib: of the builder process, MiB.
    environment: variables that the process that runs it must have as they were when it was built, e.g. {"NVIDIA_TF32_OVERRIDE": "0"}.
    activation_bytes: GPU memory that one execution context needs beside the weights; 0 where TensorRT did not say.
    cpu_speed: of an OpenVINO model beside the ONNX file; None where it was not timed.
    """

    target: str
    runtime_version: str
    compute_capabilities: tuple[int, ...]
    precision: str
    profile: Mapping[str, Mapping[str, list[int]]]
    onnx_sha256: str
    layers: int = 0
    build_seconds: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Mapping[str, Any], ...] = ()
    outputs: tuple[Mapping[str, Any], ...] = ()
    layer_types: Mapping[str, int] = field(default_factory=dict)
    kernels: Mapping[str, int] = field(default_factory=dict)
    peak_memory_mib: int = 0
    activation_bytes: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    cpu_speed: CpuSpeed | None = None

    @property
    def lowest_precision(self) -> Precision:
        """The lowest type that its layers have; TF32 where FP32 layers may compute in it."""
        present = set(self.precision.lower().replace("float8", "fp8").split("+"))
        low = next((kind for kind in reversed(Precision) if kind in present - {Precision.FP32}), None)
        return low or (Precision.TF32 if self.options.get("tf32") else Precision.FP32)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], again: str = "") -> EngineFacts:
        """again: what is to be built again where another version wrote them, and how."""
        if not isinstance(data, Mapping):
            raise SpecError(f"engine facts must be a JSON object; got {data!r}")
        known = {f.name for f in fields(cls)}
        unknown = set(data) - known
        if unknown:
            raise SpecError(
                f"engine facts have unknown fields {sorted(unknown)}; allowed: {sorted(known)}. Another version of detrt wrote them; build "
                f"{again or 'the engine again with detrt build'}"
            )
        try:
            facts = cls(**data)
        except TypeError as error:
            raise SpecError(f"engine facts are not complete: {error}") from None
        _check_types("engine facts", facts, _ENGINE_TYPES)
        if not all(type(c) is int and c > 0 for c in facts.compute_capabilities):
            raise SpecError(f"engine facts: compute_capabilities must be numbers such as 89; got {facts.compute_capabilities}")
        object.__setattr__(facts, "compute_capabilities", tuple(facts.compute_capabilities))
        for name in ("inputs", "outputs"):
            object.__setattr__(facts, name, tuple(getattr(facts, name)))
        for name, whole in _ENGINE_VALUES.items():
            if not whole(value := getattr(facts, name)):
                raise SpecError(
                    f"engine facts: {name} is damaged; got {one_line(repr(value), 200)}; build {again or 'the engine again'}"
                )
        if data.get("cpu_speed") is not None:
            try:
                speed = CpuSpeed(**data["cpu_speed"])
            except TypeError as error:
                raise SpecError(f"engine facts: cpu_speed is not complete: {error}") from None
            _check_types("engine facts: cpu_speed", speed, _SPEED_TYPES)
            object.__setattr__(facts, "cpu_speed", speed)
        return facts


_LIST = (list, tuple)
_ENGINE_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("target", "runtime_version", "precision", "onnx_sha256"), str),
    **dict.fromkeys(("profile", "options", "layer_types", "kernels", "environment"), Mapping),
    **dict.fromkeys(("compute_capabilities", "inputs", "outputs"), _LIST),
    **dict.fromkeys(("layers", "build_seconds", "peak_memory_mib", "activation_bytes"), (int, float)),
}


def _has(value: object, **kinds: type | tuple[type, ...]) -> bool:
    """Whether it is an object with fields of these kinds, among others."""
    return isinstance(value, Mapping) and all(isinstance(value.get(name), kind) for name, kind in kinds.items())


def _all_of(values: Iterable[object], *kinds: type) -> bool:
    return all(type(value) in kinds for value in values)


def _are_tensors(values: Sequence[Any]) -> bool:
    return all(_has(one, name=str, dtype=str, shape=_LIST) and _all_of(one["shape"], str, int) for one in values)


def _is_profile(value: Mapping[str, Any]) -> bool:
    rows = list(value.values())
    return all(_has(one, min=_LIST, opt=_LIST, max=_LIST) and all(_all_of(side, int) for side in one.values()) for one in rows)


# What a field of the right type must hold, as far as it is read.
_ENGINE_VALUES: dict[str, Callable[[Any], bool]] = {
    "profile": _is_profile,
    **dict.fromkeys(("inputs", "outputs"), _are_tensors),
    **dict.fromkeys(("layer_types", "kernels"), lambda counts: _all_of(counts.values(), int)),
    "environment": lambda variables: all(isinstance(one, str) and "\0" not in one for one in variables.values()),
    "options": lambda options: isinstance(options.get("plugins") or (), _LIST) and _all_of(options.get("plugins") or (), str),
}
_SPEED_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("processor", "onnxruntime_version"), str),
    **dict.fromkeys(("threads", "batch"), int),
    **dict.fromkeys(("openvino_ms", "onnxruntime_ms"), (int, float)),
}
_PROVENANCE_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("source", "checkpoint_sha256", "created"), str),
    **dict.fromkeys(("options", "versions"), Mapping),
    "parameters": int,
}
_FILE_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("kind", "path", "sha256"), str),
    "size": int,
}


def _check_types(where: str, record: object, types: Mapping[str, type | tuple[type, ...]]) -> None:
    for name, kind in types.items():
        value = getattr(record, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise SpecError(f"{where}: {name} has the value {value!r} of a wrong type")


@dataclass(frozen=True, slots=True)
class BundleFile:
    """One file of a bundle. kind: "onnx", "engine", "inductor", "openvino" and others; path is relative to the bundle."""

    kind: str
    path: str
    sha256: str
    size: int
    engine: EngineFacts | None = None


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk. Open with `Bundle.open`, write with `Bundle.save`."""

    folder: Path
    spec: ModelSpec
    provenance: Provenance
    files: tuple[BundleFile, ...]
    _compared: dict[str, tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # path -> its state then

    def path_of(self, entry: BundleFile) -> Path:
        return self.folder / entry.path

    def of_kind(self, kind: str) -> list[BundleFile]:
        return [entry for entry in self.files if entry.kind == kind]

    def names(self) -> set[str]:
        """Names of the files that belong to the bundle: those it lists, and the sidecars of engines and packages."""
        listed = {entry.path for entry in self.files}
        return listed | {sidecar_path(Path(entry.path)).as_posix() for entry in self.files if entry.engine is not None}

    @property
    def digest(self) -> str:
        """SHA-256 of what the bundle holds: of its spec, and of the names and digests of its files; not of when it was built."""
        rows = sorted((entry.kind, _own_name(entry.path), entry.sha256) for entry in self.files)
        return hashlib.sha256(json.dumps([self.spec.to_dict(), rows], sort_keys=True).encode()).hexdigest()

    def save(self) -> Path:
        """Write `detrt.json` atomically; the files themselves must be in place."""
        data = {
            "schema": SCHEMA,
            "spec": self.spec.to_dict(),
            "provenance": asdict(self.provenance),
            "files": [asdict(entry) for entry in self.files],
        }
        path = self.folder / MANIFEST
        files.write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        return path

    @classmethod
    def open(cls, folder: Path | str) -> Bundle:
        """Read `detrt.json`; files are checked when they are used (see `checked_path`).

        Raises:
            SpecError: no manifest, damaged JSON, wrong fields, or paths that leave the folder.
        """
        check_path(folder, "folder", needed=True)
        folder = Path(folder)
        path = folder / MANIFEST
        data = read_json(path)
        for key in ("schema", "spec", "provenance", "files"):
            if key not in data:
                raise SpecError(f"'{path}' has no field {key!r}; build the bundle again with detrt build")
        if data["schema"] != SCHEMA:
            raise SpecError(f"'{path}' has schema {data['schema']!r}; this detrt reads {SCHEMA}; build it again")
        try:
            entries = []
            for row in data["files"]:
                engine = None
                if row.get("engine") is not None:
                    engine = EngineFacts.from_dict(row["engine"], _again(folder, data["files"], row["engine"]))
                entry = BundleFile(row["kind"], row["path"], row["sha256"], row["size"], engine)
                _check_types(f"'{path}': files", entry, _FILE_TYPES)
                entries.append(entry)
            provenance = Provenance(**data["provenance"])
            _check_types(f"'{path}': provenance", provenance, _PROVENANCE_TYPES)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SpecError(f"'{path}' is damaged ({error!r}); build the bundle again with detrt build") from None
        for entry in entries:
            relative = Path(entry.path)
            if relative.is_absolute() or ".." in relative.parts:
                raise SpecError(f"'{path}' names the file '{entry.path}' outside its own folder; refused")
            if not relative.name or not files.is_file_name(entry.path):
                raise SpecError(f"'{path}' names a file that cannot be, {one_line(repr(entry.path), 60)}; refused")
        return cls(folder, ModelSpec.from_dict(data["spec"]), provenance, tuple(entries))

    def checked_path(self, entry: BundleFile, *beside: str) -> Path:
        """Path of a file after comparing its digest with the manifest, and those of all files that are opened with it: what an ONNX file
        names, and `beside`, in the same folder, whatever the manifest says of them.

        Raises:
            SpecError: one of them is missing, truncated, not the one that was built, or not in the manifest.
        """
        path = self.path_of(entry)
        self._compare(entry)
        listed = {_plain(other.path): other for other in self.files}
        for name in (*_opened_with(entry, path), *beside):
            other = listed.get(_plain(os.path.join(os.path.dirname(entry.path), name)))
            if other is None:
                raise SpecError(
                    f"'{path}' keeps values in '{name}', which '{self.folder / MANIFEST}' does not list; build the bundle again with "
                    "detrt build"
                )
            self._compare(other)
        return path

    def _compare(self, entry: BundleFile) -> None:
        """Compare a file with the manifest, once as long as it is the same file and nobody writes to it."""
        path = self.path_of(entry)
        before = _state_of(path)
        if before is None or self._compared.get(entry.path) != before:
            check_digest(path, entry.sha256, entry.size)
            if before is not None:
                self._compared[entry.path] = before


def _again(folder: Path, rows: Sequence[Mapping[str, Any]], facts: Any) -> str:
    """What builds a file of a bundle again, from the graph beside it, whose name another version may have chosen."""
    graph = next((row["path"] for row in rows if row["kind"] == "onnx"), "model.onnx")
    target = facts.get("target", "NAME") if isinstance(facts, Mapping) else "NAME"
    target = str(target).removesuffix("-cpu").removesuffix("-cuda")
    return f"the bundle again: `build({folder / graph}, output={folder}, targets={target})`"


@contextlib.contextmanager
def writing_bundle(output: Path | str) -> Iterator[Path]:
    """Give a temporary folder whose files, `detrt.json` among them, become those of the bundle `output` if the block succeeds.

    In a bundle that is there already, files of the same name are replaced, and those of the earlier bundle that the new
    `detrt.json` does not list are removed; other files stay. One rename of `detrt.json` puts the new bundle in the place of the
    earlier one: whatever fails, and also after kill -9 or a power cut, one of the two is there, whole. What killed processes left is
    removed here. Where no bundle is yet, one build at a time can make it.

    Raises:
        OutputError: `output` cannot be written, is a folder with files that is no bundle, another build is making it, or changed it
            meanwhile.
    """
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise OutputError(f"cannot write the bundle '{output}': it is a file; give a folder with `output`")
    place = Path(os.path.realpath(output))  # behind a link, so that the folder is written and not the link to it
    in_use = [files.remove_dead(place.parent, place.name), files.remove_dead(place)]
    exists, held = place.is_dir(), (place / MANIFEST).is_file()
    if not held and any(in_use):  # its own output would be refused in the end
        raise OutputError(
            f"another build is making the bundle '{output}'; wait until it has ended, or give another folder with `output`"
        )
    if exists and not held and any(place.iterdir()):
        raise OutputError(
            f"cannot write the bundle '{output}': the folder holds other files; give a new or empty folder with `output`"
        )
    with (
        files.naming(output),
        files.making_parents(place),
        # Inside a folder that is there: it may be a volume of its own, where nothing outside can be renamed into it.
        files.temporary_folder(place if exists else place.parent, place.name) as temporary,
        files.naming_place(temporary, output),
    ):
        yield temporary
        if not held and (place / MANIFEST).is_file():  # of one that began at the same moment, or on a file system without locks
            raise OutputError(f"another build made the bundle '{output}' meanwhile; give another folder with `output`")
        if exists:
            _move_in(temporary, place)
        else:
            files.move(temporary, place)


# While a bundle is replaced its new files lie in a folder of this name inside of it, and have their own names after that: no name of
# the earlier bundle has another content before the manifest says so.
_GENERATION = re.compile(r"\..+\.[0-9a-f]{8}\.files")
_STALE = ".stale"  # in that folder: names of the earlier bundle that go


def check_outside(path: Path) -> None:
    """Raise OutputError for a file of a bundle that something else than `writing_bundle` would replace: the bundle would not open again."""
    if path.is_file() and (path.parent / MANIFEST).is_file():
        raise OutputError(f"'{path.parent}' is a bundle, whose '{path.name}' would be replaced; give another output path")


def _move_in(temporary: Path, place: Path) -> None:
    """Replace the files of a bundle by those of `temporary`: at every moment `detrt.json` names the old ones or the new ones, whole."""
    with files.locked(place):
        _settle(place)
        old, new = _readable(place), Bundle.open(temporary)
        moved = {path.name for path in temporary.iterdir()} - {MANIFEST}
        own = old.names() if old is not None else _names_of_unread(place)
        stale = {name for name in own - new.names() - moved if Path(name).name == name}
        if old is not None:
            for name in sorted(moved - own):
                if os.path.lexists(place / name):
                    raise OutputError(f"cannot write '{place / name}': a file that is not of this bundle has that name; move it")
            held = {(entry.path, entry.sha256) for entry in old.files}
            if any(entry.path not in moved and (entry.path, entry.sha256) not in held for entry in new.files):
                raise OutputError(f"the bundle '{place}' was changed by another build meanwhile; run the command again")
        (temporary / _STALE).write_text("".join(f"{name}\n" for name in sorted(stale)), "utf-8")
        files.sync(temporary)
        generation = temporary.with_name(temporary.name.removesuffix(files.TEMPORARY) + ".files")
        try:
            os.rename(temporary, generation)
            files.sync_names(place)
            _named(new, place, lambda path: f"{generation.name}/{path}" if path in moved else path).save()
        except OutputError as error:
            raise error.__cause__ or error from None  # the caller names the bundle, not its manifest
        finally:
            _settle(place)


def finish_replacement(folder: Path | str) -> None:
    """Give the files of a bundle their own names where a build was killed after it had replaced the bundle."""
    folder = Path(folder)
    if any(_GENERATION.fullmatch(path.name) for path in folder.iterdir()):
        with files.locked(folder):
            _settle(folder)


def _settle(place: Path) -> None:
    """Give the files in the folder that `detrt.json` names their own names, and remove all such folders.

    It may end anywhere, such as on a full disk: the bundle is whole then too, and the next build goes on.
    """
    bundle = _readable(place)
    if bundle is None:
        return
    with contextlib.suppress(OSError, OutputError):
        named = {Path(entry.path).parts[0] for entry in bundle.files} & {path.name for path in place.iterdir()}
        for folder in sorted(place / name for name in named if _GENERATION.fullmatch(name)):
            for name in (folder / _STALE).read_text("utf-8").splitlines():
                files.remove(place / Path(name).name)
            for path in folder.iterdir():
                if path.name not in (MANIFEST, _STALE):
                    with files.writing(place / path.name, may_be_read=True) as temporary:  # a graph that is built from
                        _link(path, temporary)
        if any(_GENERATION.fullmatch(name) for name in named):
            _named(bundle, place, _own_name).save()
        for path in place.iterdir():
            if _GENERATION.fullmatch(path.name):
                files.remove(path)
        files.remove_unfinished(place, [MANIFEST, *(Path(name).name for name in bundle.names())])
        files.sync_names(place)


def _link(source: Path, target: Path) -> None:
    """Put another name of a file in the place of `target`, or a copy where the file system has one name for each. Raises OSError."""
    try:
        target.unlink()
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _own_name(path: str) -> str:
    """Of a file that still lies in the folder of its generation, the name that it will have."""
    return Path(path).name if _GENERATION.fullmatch(Path(path).parts[0]) else path


def _named(bundle: Bundle, folder: Path, name: Callable[[str], str]) -> Bundle:
    """The bundle in `folder`, with other paths of its files."""
    return replace(bundle, folder=folder, files=tuple(replace(entry, path=name(entry.path)) for entry in bundle.files))


def _readable(folder: Path) -> Bundle | None:
    """The bundle in a folder; None where there is none, or a damaged manifest, which does not say which files are its own."""
    try:
        return Bundle.open(folder)
    except SpecError:
        return None


def _names_of_unread(folder: Path) -> set[str]:
    """`Bundle.names` of a manifest that another version wrote, as far as it says them; what is damaged says none."""
    try:
        rows = [row for row in read_json(folder / MANIFEST)["files"] if isinstance(row["path"], str)]
        return {name for row in rows for name in (row["path"], *[f"{row['path']}.json"] * bool(row.get("engine")))}
    except (SpecError, KeyError, TypeError, AttributeError):
        return set()


class _Closable(Protocol):
    def close(self) -> None: ...


_Opened = TypeVar("_Opened", bound=_Closable)
_OPENINGS = 5  # of a bundle that is replaced again and again meanwhile


def open_whole(folder: Path | str, open_parts: Callable[[Bundle], _Opened]) -> _Opened:
    """What `open_parts` opens of one bundle: done again where a build replaced the bundle meanwhile, so that its parts belong together.

    Raises:
        SpecError: see `Bundle.open`; and what `open_parts` raises.
    """
    path = Path(folder) / MANIFEST
    for last in (*[False] * (_OPENINGS - 1), True):
        before = _content(path)
        try:
            opened = open_parts(Bundle.open(folder))
        except DetrtError:
            if last or before == _content(path):
                raise
        else:
            if before == _content(path):
                return opened
            opened.close()
    raise SpecError(f"the bundle '{folder}' is replaced by builds all the time; open it when they have ended")


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


# Kinds of files that are ONNX graphs, which may name files with their values.
_GRAPHS = ("onnx", "onnx-fused", "text", "query")


def _opened_with(entry: BundleFile, path: Path) -> list[str]:
    """Names, relative to the folder of `path`, of the files that are opened with a file without being asked for.

    Raises:
        SpecError: an ONNX file that is damaged where it names them.
    """
    return _locations(path) if entry.kind in _GRAPHS else []


def _locations(path: Path) -> list[str]:
    try:
        return data_locations(path)
    except ValueError as error:
        raise SpecError(f"'{path}' is no ONNX file that can be read ({error}); build the bundle again with detrt build") from None


def _plain(path: str) -> str:
    return os.path.normpath(path).replace(os.sep, "/")


def _state_of(path: Path) -> tuple[int, ...] | None:
    """What changes whenever a file is written or replaced; None where it was written so lately that it might not."""
    try:
        found = path.stat()
    except OSError:
        return None
    if time.time_ns() - found.st_ctime_ns < _CLOCK_STEP_NS:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


_CLOCK_STEP_NS = 2_000_000_000  # FAT counts in steps of two seconds, others in milliseconds


def check_digest(path: Path, sha256: str, size: int | None = None) -> None:
    if not path.is_file():
        raise SpecError(f"'{path}' is missing; build the bundle again with detrt build")
    actual = path.stat().st_size
    if size is not None and actual != size:
        raise SpecError(f"'{path}' has {actual} bytes, its manifest says {size}: truncated or replaced; build it again")
    if files.sha256_of(path) != sha256:
        raise SpecError(f"'{path}' is not the file that was built (its SHA-256 differs from the manifest); build it again")


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SpecError(f"'{path}' does not exist; '{path.parent}' is not a detrt bundle. Make one with: detrt build")
    data = files.read_json(path, "manifest", advice="build it again with detrt build")
    if not isinstance(data, dict):
        raise SpecError(f"'{path}' must hold a JSON object; got {type(data).__name__}; build it again")
    return data


def text_encoder_beside(model: Path) -> Path:
    """The file of the text encoder that belongs to a detector's: `text.` for `model.` at the start of its name."""
    return model.with_name(model.name.replace("model", "text", 1))


def files_with(model: Path) -> list[Path]:
    """A model file and all that is opened with it, in the order of their names: values, sidecar, and of one that takes a prompt its
    encoders and its tokenizer, which are known by how their names begin.

    Raises:
        SpecError: an ONNX file that is damaged where it names its files.
    """
    begins = (model.name, f"{model.stem}.bin", "text.", "tokenizer.", "query.")
    beside = {one for one in model.parent.iterdir() if one.name.startswith(begins)}
    if model.suffix.lower() == ".onnx":
        beside |= {model.parent / name for name in _locations(model)}
    return [one for one in sorted({model, *beside}) if one.is_file()]


def sidecar_path(engine: Path) -> Path:
    return engine.with_name(engine.name + ".json")


def write_sidecar(engine: Path, spec: ModelSpec, facts: EngineFacts) -> Path:
    """Write `<engine>.json` beside an engine: spec, facts, digest of the engine."""
    data = {
        "schema": SCHEMA,
        "spec": spec.to_dict(),
        "engine": asdict(facts),
        "sha256": files.sha256_of(engine),
        "size": engine.stat().st_size,
    }
    path = sidecar_path(engine)
    files.write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    return path


def read_sidecar(engine: Path) -> tuple[ModelSpec, EngineFacts]:
    """Spec and facts of an engine, after comparing its digest.

    Raises:
        EngineError: no sidecar, or the engine is not the file that the sidecar describes.
    """
    spec, facts, compare = open_sidecar(engine)
    compare()
    return spec, facts


def open_sidecar(engine: Path) -> tuple[ModelSpec, EngineFacts, Callable[[], None]]:
    """Spec and facts of an engine, and what compares its digest, for a caller that may not need to: of a large file it takes seconds.

    Raises:
        EngineError: no sidecar, or a damaged one; and from the comparison where the engine is not the file that the sidecar describes.
    """
    path = sidecar_path(engine)
    if not engine.is_file():
        raise EngineError(f"there is no engine '{engine}'; build one with: `build(MODEL, output=OUT)`")
    if not path.is_file():
        raise EngineError(f"'{engine}' has no sidecar '{path.name}'; detrt cannot know what it is. Build it with detrt build")
    data = read_json(path)

    def compare() -> None:
        try:
            check_digest(engine, data["sha256"], data["size"])
        except SpecError as error:
            raise EngineError(str(error)) from None

    try:
        data["sha256"], data["size"]
        return ModelSpec.from_dict(data["spec"]), EngineFacts.from_dict(data["engine"]), compare
    except KeyError as error:
        raise EngineError(f"'{path}' has no field {error}; build the engine again with detrt build") from None
    except SpecError as error:
        raise EngineError(str(error)) from None
