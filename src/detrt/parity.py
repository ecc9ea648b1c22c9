"""Does a candidate detect the same things as a reference? Tensors, matched detections, verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .compare import Gate, ImageMatch, match
from .decode import decode
from .errors import GateError, SessionError
from .images import ImageSource, load_image
from .preprocess import group_by_size, preprocess
from .session import Session
from .sessions import kind_of, open_session
from .spec import ModelSpec

if TYPE_CHECKING:
    from .sources import Source


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of `verify`.

    tensors: one row a run: batch, output, relative error (selections forced); empty where the
    candidate's selections cannot be read (engines). images: one ImageMatch an image.
    """

    reference: str
    candidate: str
    gate: Gate
    images: tuple[ImageMatch, ...]
    tensors: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def compared(self) -> int:
        return sum(m.compared for m in self.images)

    @property
    def failures(self) -> list[str]:
        """What is outside the gate, in words; empty when the candidate passes."""
        found = []
        missing, extra = sum(m.missing for m in self.images), sum(m.extra for m in self.images)
        if missing or extra:
            found.append(f"{missing} detections missing and {extra} extra of {self.compared} compared")
        for name, worst in (("box_px", self.worst_box_px), ("score", self.worst_score), ("tensor", self.worst_tensor)):
            allowed = getattr(self.gate, name)
            if not worst <= allowed:
                found.append(f"{name} differs by {worst:.3g}, allowed {allowed:g}")
        if not self.compared:
            found.append("nothing was compared: the reference detects nothing in these images")
        return found

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def worst_box_px(self) -> float:
        return max((m.box_px for m in self.images), default=0.0)

    @property
    def worst_score(self) -> float:
        return max((m.score for m in self.images), default=0.0)

    @property
    def worst_tensor(self) -> float:
        return max((row["error"] for row in self.tensors), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "compared": self.compared,
            "worst": {"box_px": self.worst_box_px, "score": self.worst_score, "tensor": self.worst_tensor},
            "failures": self.failures,
            "passed": self.passed,
        }


def verify(
    reference: str | Path | Session | Source,
    candidate: str | Path | Session,
    images: Sequence[ImageSource],
    *,
    gate: Gate = Gate(),  # noqa: B008 - frozen
    batch_size: int = 2,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Compare two models on images.

    reference, candidate: a bundle, ONNX file, engine or checkpoint reference, or an open session; the
    reference may also be a Source. Sessions that are passed in stay open.

    Raises:
        SessionError: no images, or classes that differ. GateError is not raised: ask `report.passed`
            or call `require`.
    """
    if not len(images):
        raise SessionError("verify needs at least one image; give --images DIR")
    opened: list[Session] = []
    try:
        cand = _open(candidate, opened, trust_remote_code)
        ref = _open(reference, opened, trust_remote_code, like=cand.spec)
        if dict(ref.spec.labels) != dict(cand.spec.labels):
            raise SessionError("the two models have different classes; they cannot be the same detector")
        notes = [note for note in (getattr(s, "note", "") for s in (ref, cand)) if note]
        # A low threshold on both sides: the gate cuts by itself, after the pairing.
        floor = 0.0
        matches: list[ImageMatch] = []
        for chunk in _chunks(images, batch_size, cand):
            loaded = [load_image(image) for image in chunk]
            a, b = _detect(ref, loaded, floor), _detect(cand, loaded, floor)
            matches.extend(match(x, y, gate) for x, y in zip(a, b, strict=True))
            if progress:
                progress(len(matches), len(images))
        tensors = _forced_tensors(ref, cand, [load_image(i) for i in images[:batch_size]])
        return VerifyReport(ref.backend, cand.backend, gate, tuple(matches), tuple(tensors), tuple(notes))
    finally:
        for session in opened:
            session.close()


def require(report: VerifyReport) -> None:
    """Raises:
    GateError: the candidate is outside the gate.
    """
    if not report.passed:
        raise GateError(f"{report.candidate} does not detect what {report.reference} detects: " + "; ".join(report.failures))


def _open(model: Any, opened: list[Session], trust: bool, like: ModelSpec | None = None) -> Session:
    if isinstance(model, Session):
        return model
    from .sources import Source, load_source

    if isinstance(model, Source) or kind_of(model) == "checkpoint":
        from .torch_session import TorchSession

        source = model if isinstance(model, Source) else load_source(str(model), trust_remote_code=trust)
        session: Session = TorchSession(source, spec=_same_contract(source.spec, like) if like else None)
    else:
        session = open_session(model)
    opened.append(session)
    return session


def _same_contract(facts: ModelSpec, like: ModelSpec) -> ModelSpec:
    """A checkpoint's own facts (mean, std, labels, decode rule) with the tensors that the candidate takes.

    Facts are not copied from the candidate, so that a bundle with a wrong mean or label is found out.
    """
    shape = ("resize", "height", "width", "shortest_edge", "longest_edge", "dynamic", "mask", "dtype", "normalize_in_graph")
    spec = facts.with_input(**{name: getattr(like.input, name) for name in shape})
    return spec.with_decode(in_graph=like.decode.in_graph, max_detections=like.decode.max_detections)


def _chunks(images: Sequence[ImageSource], size: int, candidate: Session) -> Iterable[Sequence[ImageSource]]:
    size = min(size, candidate.max_batch or size)
    for start in range(0, len(images), size):
        yield images[start : start + size]


def _detect(session: Session, images: list[np.ndarray], floor: float) -> list[Any]:
    sizes = [image.shape[:2] for image in images]
    results: list[Any] = [None] * len(images)
    for group in group_by_size(sizes, session.spec):
        batch = preprocess([images[i] for i in group], session.spec)
        found = decode(session.run(batch.feeds), session.spec, batch.original_sizes_hw, threshold=floor)
        for index, detections in zip(group, found, strict=True):
            results[index] = detections
    return results


def _forced_tensors(ref: Session, cand: Session, images: list[np.ndarray]) -> list[dict[str, Any]]:
    """Relative error of raw outputs with the candidate's selections forced on PyTorch."""
    from .onnx_session import OnnxSession

    if not ref.backend.startswith("torch") or not isinstance(cand, OnnxSession):
        return []
    if cand.path is None:
        return []
    from . import graph
    from .export.onnx import relative_error
    from .graph.clean import topk_outputs, with_outputs

    model = graph.load(cand.path)
    names = topk_outputs(model)
    probe = OnnxSession(with_outputs(model, names).SerializeToString(), cand.spec)
    rows = []
    try:
        sizes = [image.shape[:2] for image in images]
        for group in group_by_size(sizes, ref.spec):
            feeds = preprocess([images[i] for i in group], ref.spec).feeds
            got = probe.run(feeds)
            ref.selections = [got[name] for name in names]  # type: ignore[attr-defined]
            want = ref.run(feeds)
            rows += [{"batch": len(group), "output": n, "error": relative_error(want[n], got[n])} for n in want]
    finally:
        ref.selections = None  # type: ignore[attr-defined]
        probe.close()
    return rows
