"""What opens the files of one backend, and what it is told: the part of a `Target` that may import what runs it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..bundle import Bundle, BundleFile, text_encoder_beside
from ..data.arguments import check_device, check_integer
from ..errors import DetrtError, EngineError, SpecError
from ..models.load_options import FLAGS, LoadOptions
from ..spec import ModelSpec, TextSpec

if TYPE_CHECKING:
    from .base import BaseSession
    from .target import Target


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The arguments of `open_session` of these names. tuning: what is given for one backend alone, see `Target.tuning`.

    Raises:
        ArgumentError: a value of a wrong type.
    """

    backend: str = "auto"
    device: str | None = None
    threads: int | None = None
    tuning: Mapping[str, Any] = field(default_factory=dict)
    spec: ModelSpec | None = None
    eager_kernels: bool = False
    emulate_low_precision: bool = False
    load: LoadOptions = field(default_factory=LoadOptions)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", check_device(self.device))
        object.__setattr__(self, "threads", check_integer(self.threads, "threads"))
        object.__setattr__(self, "tuning", {name: value for name, value in self.tuning.items() if value is not None})

    def given(self) -> dict[str, Any]:
        """What is not the default, by the name of its argument."""
        usual = SessionOptions()
        own = [one.name for one in fields(self) if one.name not in ("tuning", "load")]
        found = {name: getattr(self, name) for name in own if getattr(self, name) != getattr(usual, name)}
        load = {one.name: getattr(self.load, one.name) for one in fields(self.load)}
        return {**found, **self.tuning, **{name: value for name, value in load.items() if value != getattr(usual.load, name)}}

    @property
    def device_kind(self) -> str:
        """The device without its number; "" where none is named."""
        return (self.device or "").strip().lower().partition(":")[0]


@dataclass(slots=True)
class FileSearch:
    """The search for a file of a bundle that runs here.

    reasons: why files that were tried do not run, each with its next step. note: what is said about the session that opens, whichever it is. open_graph: opens
    the ONNX graph of the bundle on the CPU, rounded as it says.
    """

    bundle: Bundle
    options: SessionOptions
    open_graph: Callable[[], BaseSession]
    reasons: list[str] = field(default_factory=list)
    note: str = ""

    def reject(self, entry: BundleFile, error: DetrtError) -> None:
        """Keep why a file does not run here, with its name."""
        text = str(error)
        self.reasons.append(text if entry.path in text else f"{entry.path}: {text}")

    @property
    def why(self) -> str:
        """The reasons in one text; a next step that all end with stands there once."""
        first, *others = self.reasons or [""]
        ends = [first[found.start() :] for found in re.finditer(r"[;.] ", first)] if others else []
        end = next((one for one in ends if all(reason.endswith(one) for reason in others)), "")
        return "; ".join(reason.removesuffix(end) for reason in self.reasons) + end


class Parts(Protocol):
    """The files that belong to one model: a `Bundle`, or those beside a file."""

    @property
    def folder(self) -> Path: ...

    def of_kind(self, kind: str) -> list[BundleFile]: ...

    def checked_path(self, entry: BundleFile, *beside: str) -> Path: ...


@dataclass(frozen=True, slots=True)
class FilesBeside:
    """What lies beside a file that is opened by its path, as a bundle of its folder; nothing says what was built.

    model: the file. text: of its spec.
    """

    model: Path
    text: TextSpec

    @property
    def folder(self) -> Path:
        return self.model.parent

    def of_kind(self, kind: str) -> list[BundleFile]:
        """Other kinds than those of `TextSpec.parts` are text encoders of the backend of the file."""
        name = self.text.parts.get(kind, text_encoder_beside(self.model).name if kind.startswith("text-") else "")
        path = self.folder / name
        return [BundleFile(kind, name, "", path.stat().st_size)] if path.is_file() and path != self.model else []

    def checked_path(self, entry: BundleFile, *beside: str) -> Path:
        return self.folder / entry.path


class Opener(ABC):
    """Opens the files of one backend."""

    @abstractmethod
    def open_file(self, path: Path, options: SessionOptions) -> BaseSession:
        """A file alone, without its text encoder. Raises SessionError: it does not run there."""

    def measured_on(self, entries: Sequence[BundleFile], devices: Sequence[str]) -> Sequence[str | None]:
        """The devices on which a benchmark runs it; None: its own. entries: of its files in a bundle. devices: what is asked for."""
        return [None]

    @abstractmethod
    def choose(self, search: FileSearch) -> tuple[BaseSession, BundleFile] | None:
        """The first file of a bundle that runs here, and its entry; why others do not goes to `search.reasons`.

        Raises:
            SpecError: a damaged file, which is no reason to take another one.
        """

    def open_text_encoder(self, parts: Parts, detector: BaseSession, options: SessionOptions) -> tuple[BaseSession | None, str]:
        """The backend's own text encoder of a detector, and a note; None: the ONNX file of it runs."""
        return None, ""

    def refusal(self, search: FileSearch, row: Target) -> DetrtError:
        """What is said where only this backend, which has the row, may run the bundle, and cannot."""
        *others, build = (one.name for one in row.builds)
        folder, what = search.bundle.folder, row.words.partition(" ")[2]
        none = f"it holds none. Build one with: `build({folder}, targets={build})`" + "".join(f", or {one}" for one in others)
        return EngineError(f"no {what} of the bundle '{folder}' can run here: {search.why or none}")

    def check(self, search: FileSearch, session: BaseSession, entry: BundleFile) -> None:
        """Look at what `choose` gave, with its text encoder. Raises GateError: it must not run."""
        return


class GraphOpener(Opener):
    """Opens ONNX files, which every bundle has: what runs beside a detector of any backend, too."""

    @abstractmethod
    def open_part(self, path: Path, spec: ModelSpec, options: SessionOptions) -> BaseSession:
        """A part that lies beside a detector, on the CPU: a text encoder, or an encoder of query images."""

    @abstractmethod
    def run_graph(self, model: bytes | Path, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run a graph of any inputs and outputs once on the CPU; output name -> array."""


def refuse_reading(what: str, load: LoadOptions, *, may_have_code: bool = True) -> None:
    """Raise SpecError where it is said how a model is read that says it itself. what: the model and what it is, in words.
    may_have_code: whether its code may be trusted; an ONNX file has none."""
    for option in load.typed():
        raise SpecError(
            f"{option} says how a checkpoint is read; {what} and has its own; leave it out, or give it to detrt build"
        )
    for name in FLAGS:
        if getattr(load, name) and not (may_have_code and name == "trust_remote_code"):
            raise SpecError(f"`{name}` says how a checkpoint is loaded, and {what}; leave it out")


def part_path(parts: Parts, kind: str, name: str) -> Path:
    """The file of a kind that a model with a prompt needs. Raises SpecError: it is not there."""
    entries = [entry for entry in parts.of_kind(kind) if entry.path == name] or parts.of_kind(kind)
    if not entries:
        what = {"tokenizer": "tokenizer", "text": "text encoder", "query": "encoder of query images"}[kind]
        raise SpecError(
            f"'{parts.folder}' has no {what} '{name}', which the model needs to read a prompt; copy it there from where the model was "
            "exported, or build it again with detrt build"
        )
    return parts.checked_path(entries[0])
