"""The list of backends, and what follows from it alone. A backend joins detrt with its folder and a line here."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ..bundle import Bundle, EngineFacts
from ..errors import ArgumentError, DetrtError, check_one_of, install_hint
from ..models import trust
from ..spec import Precision
from ..system import PACKAGES, Ability, able
from . import inductor, onnxruntime, openvino, tensorrt, torch
from .target import Build, Target

if TYPE_CHECKING:
    from .search import GraphOpener

TARGETS: tuple[Target, ...] = (tensorrt.TARGET, inductor.TARGET, openvino.TARGET, onnxruntime.TARGET)  # best first
GRAPH = onnxruntime.TARGET  # runs what every bundle has, and what lies beside a detector
CHECKPOINT = torch.TARGET  # of what no bundle has


def graph_opener() -> GraphOpener:
    """What opens ONNX files; imports the module that has it."""
    from .search import GraphOpener

    opener = GRAPH.opened_by()
    assert isinstance(opener, GraphOpener)
    return opener


def row_of(kind: str) -> Target | None:
    """The backend of a kind of file; None: a bundle."""
    return next((target for target in (*TARGETS, CHECKPOINT) if target.kind == kind), None)


def backend_names() -> tuple[str, ...]:
    """What `open_session` takes as `backend`."""
    return ("auto", *(name for target in (*reversed(TARGETS), CHECKPOINT) for name in target.names))


def check_backend(backend: object, error: type[DetrtError]) -> None:
    """Raise `error` where it is none of `backend_names`; for what is built, with the backend that runs it."""
    check_no_target(backend, "backend", backend_names(), error)
    check_one_of("`backend`", backend, backend_names(), error)


def check_no_target(backend: object, name: str, allowed: Collection[str], error: type[DetrtError]) -> None:
    """Raise `error` where a target stands for a backend, with the backend that runs it. name: of the argument."""
    runs = next((target.name for target in TARGETS if backend in [build.name for build in target.builds]), backend)
    if runs != backend and backend not in allowed:
        raise error(f"`{name}={backend}` is a target; what is built for it runs with `{name}={runs}`")


# Metadata of the option `backend`.
BACKEND = {"help": f"{', '.join(backend_names()[:-1])} or {backend_names()[-1]}."}


def tuned(name: str) -> Target:
    """The backend that an argument of opening is for. Raises ArgumentError: none."""
    owner = next((target for target in TARGETS if name in target.tuning), None)
    if owner is None:
        known = [name for target in TARGETS for name in target.tuning]
        raise ArgumentError(f"tuning may name {', '.join(known)}; got {name!r}")
    return owner


def needs_gpu(backend: str) -> bool:
    """Whether a backend, as `open_session` takes it, runs on a GPU only."""
    return any(backend in target.gpu_names for target in TARGETS)


def native_code(kind: str, facts: EngineFacts) -> str:
    """What native code a file of a kind has the machine run, in words; "" for none."""
    row = row_of(kind)
    return (row.native if row is not None else "") or trust.native_code(facts.options)


def abilities() -> list[Ability]:
    """What `doctor` looks for, in its order."""
    return [ability for target in reversed(TARGETS) for ability in target.abilities]


def fastest_build(*, checkpoint: bool) -> Build | None:
    """The best of what this machine can build and run; None: nothing better than the ONNX graph alone.

    checkpoint: a checkpoint is there to build from, not an ONNX file alone.
    """
    builds = [build for target in TARGETS for build in target.builds if build.here and (checkpoint or not build.from_checkpoint)]
    works = able([build.here for build in builds if build.here])
    return next((build for build in builds if build.here in works), None)


def faster_than(bundle: Bundle) -> tuple[Build, str] | None:
    """What makes a bundle of its graph alone faster here, and what to install for it first; None: nothing, or it has it already."""
    if any(bundle.of_kind(target.kind) for target in TARGETS if any(build.here for build in target.builds)):
        return None
    recorded = bundle.provenance.options.get("precision") or {}
    quantized = Precision(recorded.get("precision", "fp32")).quantized
    checkpoint = not bundle.provenance.source.lower().endswith(".onnx") and not quantized
    if (build := fastest_build(checkpoint=checkpoint)) is not None:
        return build, ""
    for target in TARGETS:
        for build in target.builds:
            if build.here and not build.here.on_gpu and (checkpoint or not build.from_checkpoint):
                return build, install_hint(PACKAGES[build.here.packages[0]][1])
    return None
