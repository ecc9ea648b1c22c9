"""What builds the files of one backend for a bundle, and the work that all of them share: the part of a `Target` that `build` needs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..bundle import BundleFile, EngineFacts, Provenance
from ..errors import MissingPackageError
from ..models.contract import ExportConfig
from ..models.families import Family
from ..models.load_options import LoadOptions
from ..spec import ModelSpec, Precision
from ..system import StageProgress

if TYPE_CHECKING:
    from ..precision import PrecisionConfig
    from .base import Session
    from .shared import SharedOptions

MODEL = "model.onnx"
ScoredImages = tuple[float | None, int]  # AP (0..1), None without objects, and how many images it was measured on


@dataclass(frozen=True, slots=True)
class Stage:
    """One finished stage: name, seconds, bytes written, and a verdict as text."""

    name: str
    seconds: float
    size: int
    verdict: str


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What is asked of a build. source: the checkpoint, or the ONNX file. from_graph: the graph is there already."""

    source: str
    export: ExportConfig
    precision: PrecisionConfig
    load: LoadOptions
    from_graph: bool


class Work:
    """The stages of one build, in a folder that is not the bundle yet.

    Attributes:
        folder: where files go. graphs: where the graph lies.
        stages: the finished stages.
        warnings: of all stages. notes: what was decided on the way.
        entries: the files of the bundle.
        spec, provenance: of the graph.
        average_precision: measures an opened model on annotated calibration images; None where there are none.
        plain: of a graph whose precision this build lowered, the one that its engine has to be faster than, where a builder compares the two.
    """

    spec: ModelSpec
    provenance: Provenance
    average_precision: Callable[[Session], ScoredImages | None] | None = None
    plain: Path | None = None

    def __init__(self, folder: Path, precision: PrecisionConfig, say: StageProgress, warnings: Iterable[str]) -> None:
        self.folder = self.graphs = folder
        self.precision = precision
        self.say = say
        self.stages: list[Stage] = []
        self.warnings = list(warnings)
        self.notes: list[str] = []
        self.entries: list[BundleFile] = []

    @property
    def graph_precision(self) -> Precision | None:
        """Precision of the graph; None where nothing says it."""
        if self.precision.target != Precision.FP32:
            return self.precision.target
        if recorded := self.recorded_precision:
            return Precision(recorded["precision"])
        return Precision.FP32 if "export" in self.provenance.options else None

    @property
    def recorded_precision(self) -> Mapping[str, Any]:
        """Choices and outcome of the precision stage that wrote the graph; empty where nothing says them."""
        recorded = self.provenance.options.get("precision")
        return recorded if isinstance(recorded, Mapping) else {}

    def add(self, name: str, kind: str, facts: EngineFacts | None = None) -> None:
        """Enter a file of the folder; one of the same name gives way."""
        self.entries = [*(one for one in self.entries if one.path != name), entry_of(self.folder, name, kind, facts)]

    def record(self, name: str, facts: Mapping[str, Any]) -> None:
        """Put the facts of a stage into the provenance, in place of earlier ones."""
        self.provenance = replace(self.provenance, options={**self.provenance.options, name: facts})

    def done(self, name: str, start: float, size: int, verdict: str) -> None:
        self.stages.append(Stage(name, time.perf_counter() - start, size, verdict))


def entry_of(folder: Path, name: str, kind: str, facts: EngineFacts | None = None) -> BundleFile:
    path = folder / name
    return BundleFile(kind, name, files.sha256_of(path), path.stat().st_size, facts)


class Trial(ABC):
    """Builds graphs of one model as `build` would, and times them on this machine, for the search of `precision=auto`.

    where: what builds and runs them, in words; what was measured elsewhere is not comparable.
    """

    where: str

    @abstractmethod
    def open(self, graph: Path) -> Session:
        """The detector of an ONNX file, built and opened. Raises EngineError."""

    @abstractmethod
    def times(self, session: Session, plain: Session) -> tuple[float, float]:
        """Median milliseconds of a run of each, run in turns. Raises SessionError."""


class Builder(ABC):
    """Builds the files of one backend. Its configs are objects of one class, `Target.config`."""

    def configs_for(self, asked: SharedOptions, make: Callable[..., Any]) -> list[Any]:
        """The configs of what is asked of this backend. make: its config, from fields; it has the choices that are for it alone."""
        return [make()]

    def resolved(self, configs: Sequence[Any], plan: BuildPlan) -> Sequence[Any]:
        """The configs, with what follows from the plan."""
        return configs

    @abstractmethod
    def check(self, configs: Sequence[Any], plan: BuildPlan) -> None:
        """Refuse what cannot be built, before any work. Raises DetrtError."""

    def missing(self, configs: Sequence[Any]) -> list[MissingPackageError]:
        """Packages that are not installed."""
        return []

    def check_family(self, configs: Sequence[Any], family: Family) -> None:
        """Refuse what a family cannot be built to, when the checkpoint is known and nothing is exported yet. Raises ExportError."""
        return

    def adds(self, configs: Sequence[Any]) -> bool:
        """Whether it does something to a bundle that has its graph."""
        return True

    def has_tf32(self, configs: Sequence[Any]) -> bool:
        """Whether something of it computes a graph in FP32 with TF32 where that is asked for."""
        return False

    def compares(self, configs: Sequence[Any]) -> bool:
        """Whether `ExportConfig.check` says something about the files, so that it has an effect without an export."""
        return False

    def trial(self, configs: Sequence[Any], spec: ModelSpec) -> Trial | None:
        """What builds and times graphs here for the search of precisions; None: it runs them in ONNX Runtime."""
        return None

    def prepare(self, configs: Sequence[Any], work: Work) -> None:
        """What other backends may use, before any of them is built."""
        return

    @abstractmethod
    def build(self, configs: Sequence[Any], plan: BuildPlan, work: Work) -> None:
        """Write the files into `work.folder` and enter them. Raises DetrtError."""

    def finish(self, configs: Sequence[Any], work: Work) -> None:
        """What is done with the whole bundle."""
        return
