"""Does a candidate detect the same things as a reference? Facts, tensors, slots, detections, AP, verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Session
from ..backends.prompted import model_spec
from ..data.images import ImageSource, load_image
from ..data.postprocess import decode
from ..data.preprocess import SizeHW, group_by_size, preprocess
from ..detections import Detections
from ..errors import GateError, SessionError
from ..spec import PIXEL_VALUES
from ..system import CountProgress
from ..text.prompts import Prompt
from .batching import another_size, padding_rows, shapes_to_run, slot_rows
from .matching import Gate, ImageMatch, gate_for, match, paired_scores
from .models import Side, ask, default_reference, open_side, precision_of, spec_differences, text_differences
from .report import Picture, VerifyReport
from .tensors import can_force, decodes_alone, forced_rows

if TYPE_CHECKING:
    from ..models.source import Source

DIVERGENCE = ("auto", "always", "never")


def verify(
    reference: str | Path | Session | Source | None,
    candidate: str | Path | Session,
    images: Sequence[ImageSource],
    *,
    gate: Gate | None = None,
    gate_changes: Mapping[str, float] | None = None,
    batch_size: int = 2,
    trust_remote_code: bool = False,
    progress: CountProgress | None = None,
    ground_truth: Path | str | None = None,
    slots: bool = True,
    batches: Sequence[int] | None = None,
    divergence: str = "never",
    pictures: int = 0,
    labels: Path | str | None = None,
    family: str | None = None,
    tokenizer: Path | str | None = None,
    prompt: str | Sequence[str] | Prompt | None = None,
    task: str = "",
    opening: Mapping[str, Any] | None = None,
    say: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Compare two models on images.

    reference, candidate: a bundle, ONNX file, engine or checkpoint reference, or an open session; the
    reference may also be a Source, or None for the checkpoint that the bundle was made from. Sessions
    that are passed in stay open.
    gate: None: that of the candidate's precision (`compare.GATES`). gate_changes: fields that replace its.
    ground_truth: COCO annotations of the images, for the AP of both. slots: run every slot of a batch.
    batches: batches of that, instead of the profile's. divergence: search where the graphs part "auto"
    (when something fails), "always" or "never". pictures: keep so many of the worst for the report.
    labels: class names of a checkpoint whose bundle was built with names of its own; family: of a ckpt:FILE.
    tokenizer: of a checkpoint that takes a prompt and has none.
        For the checkpoint that a bundle was made from, both are by default those that the bundle records.
    prompt, task: what models that take a prompt are asked for: a text, or a list of class names.
    opening: of a bundle or file as the candidate: backend and device, as `open_session` takes them.

    Raises:
        PromptError: no prompt for a model that takes one, the reverse, or a bad prompt.
        SessionError: no images, or heads of different sizes. DetrtError: see the models' own loaders;
            no reference. GateError is not raised: ask `report.passed` or call `require`.
    """
    if not len(images):
        raise SessionError("verify needs at least one image; give --images DIR")
    if divergence not in DIVERGENCE:
        raise SessionError(f"divergence must be one of {', '.join(DIVERGENCE)}; got {divergence!r}")
    say = say or (lambda text: None)
    sides: list[Side] = []
    try:
        own = family if isinstance(candidate, (str, Path)) and str(candidate).startswith("ckpt:") else None
        cand = open_side(candidate, trust=trust_remote_code, family=own, opening=opening)
        sides.append(cand)
        ask(cand, prompt, task)
        if reference is None:
            if isinstance(candidate, Session):
                raise SessionError("an open session does not say what it was made from; give a reference")
            reference = default_reference(candidate)
            family, labels = family or cand.options.get("family"), labels or cand.options.get("labels")
            tokenizer = tokenizer or cand.options.get("tokenizer")
        like = model_spec(cand.session)
        ref = open_side(reference, trust=trust_remote_code, like=like, labels=labels, family=family, tokenizer=tokenizer)
        sides.append(ref)
        ask(ref, prompt, task)
        facts = spec_differences(ref.session.spec, cand.session.spec) + text_differences(ref.session, cand.session)
        precision = precision_of(cand)
        gate = replace(gate or gate_for(precision), **(gate_changes or {}))
        notes = [side.session.info.note for side in (ref, cand) if side.session.info.notes]
        broken: list[str] = []
        found = list(_detections(ref.session, cand.session, images, batch_size, progress, broken))
        matches = tuple(match(a, b, gate) for a, b in found)
        first = [load_image(image) for image in images[:batch_size]]
        say("comparing tensors")
        rows = _tensor_rows(ref.session, cand.session, first, notes)
        slot_checks, padding = (), ()
        if slots:
            say("running every slot of a batch")
            slot_checks = tuple(slot_rows(cand.session, first, gate, shapes_to_run(cand.session, batches)))
            padding = tuple(padding_rows(cand.session, first, gate))
        names = tuple(_name(image, index) for index, image in enumerate(images))
        ap = None
        if ground_truth is not None:
            say("average precision")
            ap = _average_precision(Path(ground_truth), names, found, (ref.session.spec, cand.session.spec), notes)
        report = VerifyReport(
            ref.session.info.name,
            cand.session.info.name,
            gate,
            matches,
            tuple(rows),
            tuple(notes),
            precision,
            tuple(facts),
            slot_checks,
            padding,
            ap,
            names=names,
            broken=tuple(broken),
            precision_map=_precision_map(cand) if pictures or divergence == "always" else {},
            scores=tuple(pair for a, b in found for pair in paired_scores(a, b, gate)) if pictures else (),
            pictures=_worst(images, names, found, matches, pictures),
        )
        if divergence == "always" or (divergence == "auto" and not report.passed):
            from .localize import with_divergence

            report = with_divergence(report, ref, cand, first, say)
        return report
    finally:
        for side in sides:
            side.close()


def require(report: VerifyReport) -> None:
    """Raises:
    GateError: the candidate is outside the gate.
    """
    if not report.passed:
        where = f"; {report.divergence.sentence()}" if report.divergence is not None and report.divergence.first else ""
        raise GateError(
            f"{report.candidate} does not detect what {report.reference} detects: " + "; ".join(report.failures) + where
        )


def _tensor_rows(ref: Session, cand: Session, images: list[NDArray], notes: list[str]) -> list[dict[str, Any]]:
    if decodes_alone(ref, cand):
        notes.append("no tensor level: one side decodes in its graph, the plain model of a prompted checkpoint does not")
        return []
    if not can_force(ref, cand):
        notes.append(f"no tensor level: the selections of {cand.info.name} and {ref.info.name} cannot be read and forced")
        return []
    sizes: list[SizeHW | None] = [None]
    pixels = next(info.shape for info in cand.inputs if info.name == PIXEL_VALUES)
    if cand.spec.input.dynamic and not any(isinstance(side, int) for side in pixels[2:]):
        sizes.append(another_size(cand))
    return list(forced_rows(ref, cand, images, sizes))


def _detections(
    ref: Session,
    cand: Session,
    images: Sequence[ImageSource],
    size: int,
    progress: CountProgress | None,
    broken: list[str],
) -> Iterable[tuple[Detections, Detections]]:
    """(reference's, candidate's) of each image; where the candidate fails, why goes into `broken`."""
    size, done = min(size, cand.info.max_batch or size), 0
    for start in range(0, len(images), size):
        loaded = [load_image(image) for image in images[start : start + size]]
        # A low threshold on both sides: the gate cuts by itself, after the pairing.
        wanted = _detect(ref, loaded, 0.0)
        try:
            got = _detect(cand, loaded, 0.0)
        except SessionError as error:  # NaN, or it does not run: a result of this check, not a wrong call
            if "is closed" in str(error):
                raise
            broken.append(str(error))
            got = [found[:0] for found in wanted]
        yield from zip(wanted, got, strict=True)
        done += len(loaded)
        if progress:
            progress(done, len(images))


def _detect(session: Session, images: list[np.ndarray], floor: float) -> list[Any]:
    sizes = [image.shape[:2] for image in images]
    shape = next(info.shape for info in session.inputs if info.name == PIXEL_VALUES)
    fixed = shape[0] if isinstance(shape[0], int) else None
    results: list[Any] = [None] * len(images)
    for group in group_by_size(sizes, session.spec):
        step = fixed or len(group)
        for start in range(0, len(group), step):
            part = group[start : start + step]
            filled = part + [part[-1]] * (step - len(part) if fixed else 0)
            batch = preprocess([images[i] for i in filled], session.spec)
            found = decode(session.run(batch.feeds), session.spec, batch.original_sizes_hw, threshold=floor)
            for index, detections in zip(part, found, strict=False):
                results[index] = detections
    return results


def _name(image: ImageSource, index: int) -> str:
    return str(image) if isinstance(image, (str, Path)) else f"image {index}"


def _average_precision(
    path: Path, names: Sequence[str], found: Sequence[tuple[Detections, Detections]], specs: tuple, notes: list[str]
) -> dict[str, Any]:
    from ..data.coco import load_coco
    from .coco import score_rows

    data = load_coco(path)
    chosen, ids = data.subset(names)
    if left_out := len(names) - sum(i is not None for i in ids):
        notes.append(f"{left_out} of {len(names)} images have no annotations in '{path}' and do not count for the AP")
    result: dict[str, Any] = {"images": len(chosen.images)}
    for side, spec, key in zip(range(2), specs, ("reference", "candidate"), strict=True):
        categories = data.category_ids(spec)
        rows = [row for i, pair in zip(ids, found, strict=True) if i is not None for row in pair[side].to_coco(i, categories)]
        result[key] = dict(score_rows(chosen, rows)[0])
    return result


def _precision_map(side: Side) -> dict[str, dict[str, int]]:
    if side.graph is None:
        return {}
    from ..graph.view import precision_map
    from .models import view_of

    return precision_map(view_of(side.graph))


def _worst(
    images: Sequence[ImageSource],
    names: Sequence[str],
    found: Sequence[tuple[Detections, Detections]],
    matches: Sequence[ImageMatch],
    count: int,
) -> tuple[Picture, ...]:
    order = sorted(range(len(images)), key=lambda i: (-(matches[i].missing + matches[i].extra), -matches[i].box_px))
    return tuple(Picture(names[i], load_image(images[i]), *found[i], matches[i]) for i in order[:count])
