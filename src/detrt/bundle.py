"""The bundle: a folder with `detrt.json` and the files it names, and the sidecar of one engine.

`detrt.json` holds the ModelSpec, where the model came from, and every file with its digest, so that
a runtime needs nothing else and notices a file that is not the one that was built.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from . import files
from .errors import EngineError, OutputError, SpecError
from .spec import SCHEMA, ModelSpec, Precision

MANIFEST = "detrt.json"
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
            provenance = cls(**json.loads(text))
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

    target: "tensorrt-rtx", "tensorrt", "inductor-cpu" or "inductor-cuda" (then tensorrt_version is PyTorch's), "openvino" (then it
        is OpenVINO's). compute_capabilities: e.g. (86, 89).
    profile: input name -> {"min": [...], "opt": [...], "max": [...]}. precision: e.g. "fp32".
    onnx_sha256: digest of the ONNX file it was built from. layers: number of network layers.
    options: the caller's choices. inputs, outputs: {"name", "dtype", "shape"}, a symbolic axis is its name.
    layer_types: TensorRT type -> number of layer outputs. multiply_adds: TensorRT type -> multiply-adds of the convolutions and matmuls
        that the engine inspector describes; empty where it describes none. kernels: kind -> number of kernels, "all" among them, where the builder lists them
        (`backends.tensorrt.kernels`). peak_memory_mib: of the builder process, MiB.
    activation_bytes: GPU memory that one execution context needs beside the weights; 0 where TensorRT did not say.
    cpu_speed: of an OpenVINO model beside the ONNX file; None where it was not timed.
    """

    target: str
    tensorrt_version: str
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
    multiply_adds: Mapping[str, int] = field(default_factory=dict)
    kernels: Mapping[str, int] = field(default_factory=dict)
    peak_memory_mib: int = 0
    activation_bytes: int = 0
    cpu_speed: CpuSpeed | None = None

    @property
    def lowest_precision(self) -> Precision:
        """The lowest type that its layers have; TF32 where FP32 layers may compute in it."""
        present = set(self.precision.lower().replace("float8", "fp8").split("+"))
        low = next((kind for kind in reversed(Precision) if kind in present - {Precision.FP32}), None)
        return low or (Precision.TF32 if self.options.get("tf32") else Precision.FP32)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineFacts:
        if not isinstance(data, Mapping):
            raise SpecError(f"engine facts must be a JSON object; got {data!r}")
        known = {f.name for f in fields(cls)}
        unknown = set(data) - known
        if unknown:
            raise SpecError(f"engine facts have unknown fields {sorted(unknown)}; allowed: {sorted(known)}")
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
    **dict.fromkeys(("target", "tensorrt_version", "precision", "onnx_sha256"), str),
    **dict.fromkeys(("profile", "options", "layer_types", "multiply_adds", "kernels"), Mapping),
    **dict.fromkeys(("compute_capabilities", "inputs", "outputs"), _LIST),
    **dict.fromkeys(("layers", "build_seconds", "peak_memory_mib", "activation_bytes"), (int, float)),
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

    def path_of(self, entry: BundleFile) -> Path:
        return self.folder / entry.path

    def of_kind(self, kind: str) -> list[BundleFile]:
        return [entry for entry in self.files if entry.kind == kind]

    def names(self) -> set[str]:
        """Names of the files that belong to the bundle: those it lists, and the sidecars of engines and packages."""
        listed = {entry.path for entry in self.files}
        return listed | {sidecar_path(Path(entry.path)).as_posix() for entry in self.files if entry.engine is not None}

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
                engine = None if row.get("engine") is None else EngineFacts.from_dict(row["engine"])
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
        return cls(folder, ModelSpec.from_dict(data["spec"]), provenance, tuple(entries))

    def checked_path(self, entry: BundleFile) -> Path:
        """Path of a file after comparing its digest with the manifest.

        Raises:
            SpecError: the file is missing, truncated, or not the one that was built.
        """
        path = self.path_of(entry)
        check_digest(path, entry.sha256, entry.size)
        return path


@contextlib.contextmanager
def writing_bundle(output: Path | str) -> Iterator[Path]:
    """Give a temporary folder whose files, `detrt.json` among them, become those of the bundle `output` if the block succeeds.

    In a bundle that is there already, files of the same name are replaced, and those of the earlier bundle that the new
    `detrt.json` does not list are removed; other files stay. `detrt.json` is replaced last, atomically. If anything fails, the
    folder stays as it was.

    Raises:
        OutputError: `output` cannot be written, or is a folder with files that is no bundle.
    """
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise OutputError(f"cannot write the bundle '{output}': it is a file; give a folder with -o")
    place = Path(os.path.realpath(output))  # behind a link, so that the folder is written and not the link to it
    exists = place.is_dir()
    if exists and not (place / MANIFEST).is_file() and any(place.iterdir()):
        raise OutputError(f"cannot write the bundle '{output}': the folder holds other files; give a new or empty folder with -o")
    # Inside a folder that is there: it may be a volume of its own, where nothing outside can be renamed into it.
    hidden = f".{place.name}.{uuid.uuid4().hex[:8]}.tmp"
    temporary = place / hidden if exists else place.with_name(hidden)
    try:
        with files.making_parents(place):
            try:
                temporary.mkdir()
                yield temporary
                if exists:
                    _move_in(temporary, place)
                else:
                    os.replace(temporary, place)
            finally:
                files.remove(temporary)
    except OSError as error:
        raise files.output_error(output, error) from error
    except OutputError as error:
        # The caller knows the place that was given, not the temporary folder.
        raise OutputError(str(error).replace(str(temporary), str(output))) from error


def _move_in(temporary: Path, place: Path) -> None:
    """Replace the files of a bundle by those of `temporary`; all or none, also for Ctrl-C."""
    names = sorted((path.name for path in temporary.iterdir()), key=lambda name: name == MANIFEST)
    stale: set[str] = set()
    if (place / MANIFEST).is_file():
        with contextlib.suppress(SpecError):  # a damaged manifest does not say which files are its own
            own = Bundle.open(place).names()
            stale = {name for name in own - Bundle.open(temporary).names() if Path(name).name == name}
            for name in names:
                if name != MANIFEST and name not in own and os.path.lexists(place / name):
                    raise OutputError(f"cannot write '{place / name}': a file that is not of this bundle has that name; move it")
    backup = temporary / ".replaced"
    backup.mkdir()
    moved: list[str] = []
    try:
        for name in [*names, *sorted(stale)]:
            moved.append(name)
            # The old manifest stays until the new one takes its place in one step; it is copied for the way back.
            if name == MANIFEST and (place / name).is_file():
                (backup / name).write_bytes((place / name).read_bytes())
            elif os.path.lexists(place / name):
                os.replace(place / name, backup / name)
            if name not in stale:
                os.replace(temporary / name, place / name)
    except BaseException:
        for name in moved:
            if (backup / name).exists():
                os.replace(backup / name, place / name)
            elif name in names and not (temporary / name).exists():
                (place / name).unlink()
        raise


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
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"'{path}' cannot be read as JSON ({error}); build it again with detrt build") from None
    if not isinstance(data, dict):
        raise SpecError(f"'{path}' must hold a JSON object; got {type(data).__name__}; build it again")
    return data


def text_encoder_beside(model: Path) -> Path:
    """The file of the text encoder that belongs to a detector's: `text.` for `model.` at the start of its name."""
    return model.with_name(model.name.replace("model", "text", 1))


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
    path = sidecar_path(engine)
    if not engine.is_file():
        raise EngineError(f"there is no engine '{engine}'; build one with: detrt build MODEL -o OUT")
    if not path.is_file():
        raise EngineError(f"'{engine}' has no sidecar '{path.name}'; detrt cannot know what it is. Build it with detrt build")
    data = read_json(path)
    try:
        check_digest(engine, data["sha256"], data["size"])
        return ModelSpec.from_dict(data["spec"]), EngineFacts.from_dict(data["engine"])
    except KeyError as error:
        raise EngineError(f"'{path}' has no field {error}; build the engine again with detrt build") from None
    except SpecError as error:
        raise EngineError(str(error)) from None
