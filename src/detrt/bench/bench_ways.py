"""Which back ends of a built model `detrt bench` measures, and how long each took to build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..backends.base import Session
from ..backends.open import kind_of
from ..bundle import Bundle, EngineFacts
from ..errors import SessionError


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a model, as `open_session` takes it."""

    backend: str
    provider: str = "cpu"
    device: str | None = None

    def __str__(self) -> str:
        place = self.provider if self.backend == "onnxruntime" else self.device
        return f"{self.backend}-{place}" if place else self.backend


def ways_of(ref: str, backends: Sequence[str], providers: Sequence[str], devices: Sequence[str]) -> list[Way]:
    """The ways that a bundle or a file of one offers: TensorRT, packages, ONNX Runtime, the processors in the order given.

    backends: which; empty for all. providers, devices: empty for what ONNX Runtime and the bundle have.

    Raises:
        SessionError: the model has none of the back ends that are asked for.
    """
    kind = kind_of(ref)
    if kind == "bundle":
        bundle = Bundle.open(Path(ref))
        have = {"tensorrt": "engine", "inductor": "inductor", "onnxruntime": "onnx"}
        there = [backend for backend, what in have.items() if bundle.of_kind(what)]
        packaged = {_device(entry.engine) for entry in bundle.of_kind("inductor")}
    else:
        there = [{"onnx": "onnxruntime", "engine": "tensorrt", "inductor": "inductor"}[kind]]
        packaged = {None}
    wanted = [backend for backend in there if not backends or backend in backends]
    if not wanted:
        raise SessionError(f"nothing of '{ref}' runs with {', '.join(backends)}; it has {', '.join(there) or 'no model'}")
    ways: list[Way] = []
    for backend in wanted:
        if backend == "onnxruntime":
            ways += [Way(backend, provider=provider) for provider in providers or _providers()]
        elif backend == "tensorrt":
            ways += [Way(backend, device=d) for d in devices if d.startswith("cuda")] if devices else [Way(backend)]
        else:
            chosen = devices or sorted(packaged, key=lambda d: d == "cpu")
            ways += [Way(backend, device=device) for device in chosen]
    return ways


def build_seconds(ref: str, session: Session, size_hw: tuple[int, int]) -> float | None:
    """What building the file took: of a package or an engine its own build, of an ONNX file its export and conversion.

    None where nobody wrote it down.
    """
    facts = getattr(session, "facts", None)
    if hasattr(session, "of"):  # several packages, one for each size
        facts = session.of(size_hw).facts
    if isinstance(facts, EngineFacts):
        return round(facts.build_seconds, 3)
    if kind_of(ref) != "bundle":
        return None
    seconds = Bundle.open(Path(ref)).provenance.options.get("seconds", {})
    found = [took for stage, took in seconds.items() if stage == "export" or stage.startswith("precision")]
    return round(sum(found), 3) if found else None


def _device(facts: EngineFacts | None) -> str | None:
    return None if facts is None else facts.target.removeprefix("inductor-")


def _providers() -> tuple[str, ...]:
    from ..backends.onnxruntime.session import available_providers

    return tuple(p for p in ("cpu", "cuda") if p in available_providers())
