"""Parity: does a candidate detect the same things as a reference? Facts, tensors, slots, detections, AP, verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Session
from ..backends.open import kind_of, refuse_load_options
from ..backends.prompted import model_spec
from ..data.arguments import check_integer, check_kind, check_list, check_model, many_images
from ..data.coco import CocoDataset
from ..data.datasets import load_dataset
from ..data.images import ImageSource, load_image
from ..data.matching import Gate, Pairing, gate_for, match_classes, match_pairs
from ..data.postprocess import decode
from ..data.preprocess import SizeHW, group_by_size, preprocess
from ..detections import Detections
from ..errors import ClosedSessionError, GateError, SessionError, check_one_of, number_of
from ..models.load_options import RECORDED, LoadChanges, LoadOptions, changed, check_changes
from ..spec import PIXEL_VALUES, ModelSpec, Precision
from ..system import CountProgress
from ..text.prompts import Prompt
from .batching import another_size, padding_rows, shapes_to_run, slot_rows
from .models import Side, bound, default_reference, is_foreign, open_side, precision_of, spec_differences, text_differences
from .published import with_published
from .report import Example, VerifyReport
from .tensors import can_force, forced_rows, one_decodes_in_graph

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..models.source import Source

Pair = tuple[Detections, Detections]  # of the reference and the candidate in one image
DIVERGENCE = ("auto", "always", "never")


def verify(
    reference: str | Path | Session | Source | None,
    candidate: str | Path | Session,
    images: Sequence[ImageSource],
    *,
    gate: Gate | None = None,
    gate_changes: Mapping[str, Any] | None = None,
    batch_size: int = 2,
    progress: CountProgress | None = None,
    ground_truth: Path | str | None = None,
    slots: bool = True,
    batches: Sequence[int] | None = None,
    divergence: str = "never",
    report_images: int = 0,
    prompt: str | Sequence[str] | Prompt | None = None,
    task: str = "",
    opening: Mapping[str, Any] | None = None,
    say: Callable[[str], None] | None = None,
    load: LoadOptions | None = None,
    **changes: Unpack[LoadChanges],
) -> VerifyReport:
    """Compare two models on images: facts, detections, tensors, batch slots, padding, AP.

    Args:
        reference: a bundle, ONNX file, engine or checkpoint reference, a Source, or an open session, which stays open; None:
            the checkpoint that the bundle was made from.
        candidate: as the reference, but no Source.
        images: files or (height, width, 3) uint8 RGB arrays.
        gate: None: that of the candidate's precision (`matching.GATES`).
        gate_changes: fields that replace those of the gate.
        batch_size: images that run together for the detections.
        progress: called with (done, all) images. ground_truth: COCO annotations of the images, for the AP of both.
        slots: check batch invariance: every slot of a batch, and the padding.
        batches: batch sizes of that check, instead of the profile's.
        divergence: search the first diverging node: "always", "never" or "auto" (on a failure, and for a report below FP32).
        report_images: number of the worst images in the HTML report.
        prompt, task: for models that take a prompt: a text, or a list of class names.
        opening: of a bundle or file as the candidate: backend and device, as `open_session` takes them.
        say: called with the name of each step.
        load: how a checkpoint, or an ONNX file of another exporter, is read. What it leaves open is as a bundle records it of what
            it was made from.
        changes: fields of `LoadOptions` by name, e.g. `labels="names.txt"`.

    Raises:
        PromptError: no prompt for a model that takes one, the reverse, or a bad prompt.
        SessionError: no images, or heads of different sizes.
        DetrtError: no reference, or a model that does not open. A failure is not raised: see `report.passed` and `require`.
    """
    check_changes(verify, changes)
    check_kind(gate, "gate", Gate)
    batch_size = check_integer(batch_size, "batch_size") or 1
    images = list(many_images(images))
    for side in (candidate,) if reference is None else (reference, candidate):
        if not hasattr(side, "spec"):
            check_model(side)
    if batches is not None:
        check_list(batches, "batches", "of batch sizes, such as [1, 4]")
    if not images:
        raise SessionError("verify needs at least one image; give `images=DIR`")
    check_one_of("`divergence`", divergence, DIVERGENCE, SessionError)
    say = say or (lambda text: None)
    annotations = None if ground_truth is None else load_dataset(ground_truth)  # a damaged file is found before minutes of work
    with ExitStack() as stack:
        ref, cand = _open_sides(reference, candidate, stack, changed(load, changes), opening, (prompt, task))
        report = _begin(ref, cand, gate, gate_changes or {})
        report, found, pairings = _with_detections(report, ref.session, cand.session, images, batch_size, progress)
        first = [load_image(image) for image in images[:batch_size]]
        say("comparing tensors")
        report = _with_tensors(report, ref.session, cand.session, first)
        say("comparing with transformers' processor")
        report = with_published(report, ref, cand, first, _found_alone(cand.session, first, found, report))
        if slots:
            say("running every slot of a batch")
            shapes = shapes_to_run(cand.session, batches)
            report = replace(
                report,
                slots=tuple(slot_rows(cand.session, first, report.gate, shapes)),
                padding=tuple(padding_rows(cand.session, first, report.gate)),
            )
        if annotations is not None:
            say("average precision")
            report = _with_ap(report, annotations, found, (ref.session.spec, cand.session.spec))
        if report_images or divergence == "always":
            report = replace(report, precision_map=_precision_map(cand))
        if report_images:
            report = _with_examples(report, images, found, pairings, report_images)
        # In FP32 a graph that passes is compared with an export of itself: nothing to see, at half of the run's time.
        wanted = not report.passed or (report_images > 0 and report.precision != Precision.FP32)
        if divergence == "always" or (divergence == "auto" and wanted):
            from .localize import with_divergence

            report = with_divergence(report, ref, cand, first, say)
        return report


def require(report: VerifyReport) -> None:
    """Raises:
    GateError: the candidate is outside the gate.
    """
    if not report.passed:
        where = f"; {report.divergence.sentence()}" if report.divergence is not None and report.divergence.first else ""
        raise GateError(
            f"{report.candidate} does not detect what {report.reference} detects: " + "; ".join(report.failures) + where
        )


def _open_sides(
    reference: Any,
    candidate: Any,
    stack: ExitStack,
    load: LoadOptions,
    opening: Mapping[str, Any] | None,
    prompt: tuple[Any, str],
) -> tuple[Side, Side]:
    """(reference, candidate), opened and bound to the prompt; `stack` closes them.

    load: how the reference is read, before what the candidate records of it; of a candidate that is a ckpt:FILE the family holds too.
    """
    sides = [side for side in (reference, candidate) if isinstance(side, (str, Path))]
    if len(sides) == 2 and not any(kind_of(side) == "checkpoint" or is_foreign(side) for side in sides):
        refuse_load_options(candidate, kind_of(candidate), load)
    theirs = LoadOptions(trust_remote_code=load.trust_remote_code, allow_untested_transformers=load.allow_untested_transformers)
    if isinstance(candidate, (str, Path)):
        if str(candidate).startswith("ckpt:"):
            theirs = replace(theirs, family=load.family)
        elif is_foreign(candidate):
            theirs = replace(load, trust_remote_code=False)  # there is no code in an ONNX file
    cand = open_side(candidate, theirs, opening=opening)
    stack.callback(cand.close)
    cand.session = bound(cand.session, cand.name, *prompt)
    if reference is None:
        if isinstance(candidate, Session):
            raise SessionError("an open session does not say what it was made from; give a reference")
        reference = default_reference(candidate)
        recorded = {name: cand.options[name] for name in RECORDED if getattr(load, name) is None and name in cand.options}
        load = replace(load, **recorded)
    ref = open_side(reference, load, like=model_spec(cand.session))
    stack.callback(ref.close)
    fixed = ref.session.info.text is None and not ref.session.prompts
    if (ref.session.info.text and not cand.session.prompts) or (fixed and prompt[0] is not None):
        kinds = ("has fixed classes", "takes a prompt")[:: 1 if fixed else -1]
        raise SessionError(
            f"the reference '{ref.name}' {kinds[0]} and the candidate '{cand.name}' {kinds[1]}; they cannot be the same detector: "
            "give another `against`"
        )
    ref.session = bound(ref.session, ref.name, *prompt)
    return ref, cand


def _begin(ref: Side, cand: Side, gate: Gate | None, changes: Mapping[str, Any]) -> VerifyReport:
    """The report before anything has run: backends, gate, facts and notes of both sides."""
    facts = spec_differences(ref.session.spec, cand.session.spec) + text_differences(ref.session, cand.session)
    precision = precision_of(cand)
    notes = [side.session.info.note for side in (ref, cand) if side.session.info.notes]
    return VerifyReport(
        ref.session.info.name,
        cand.session.info.name,
        replace(gate or gate_for(precision), **changes),
        (),
        sources=(ref.origin, cand.origin),
        notes=tuple(notes),
        precision=precision,
        facts=tuple(facts),
    )


def _with_detections(
    report: VerifyReport,
    ref: Session,
    cand: Session,
    images: Sequence[ImageSource],
    size: int,
    progress: CountProgress | None,
) -> tuple[VerifyReport, list[Pair], list[Pairing]]:
    broken: list[str] = []
    found = list(_detections(ref, cand, images, size, progress, broken))
    names = tuple(str(image) if isinstance(image, (str, Path)) else f"image {i}" for i, image in enumerate(images))
    pairings = [match_pairs(a, b, report.gate) for a, b in found]
    matches = tuple(pairing.summary() for pairing in pairings)
    done = replace(report, images=matches, classes=match_classes(pairings), names=names, broken=tuple(broken))
    return done, found, pairings


def _with_tensors(report: VerifyReport, ref: Session, cand: Session, images: list[NDArray]) -> VerifyReport:
    def without(why: str) -> VerifyReport:
        return replace(report, notes=(*report.notes, f"no tensor level: {why}"))

    if one_decodes_in_graph(ref, cand):
        return without("one side decodes in its graph, the plain model of a prompted checkpoint does not")
    if not can_force(ref, cand):
        return without(f"the selections of {cand.info.name} and {ref.info.name} cannot be read and forced")
    sizes: list[SizeHW | None] = [None]
    pixels = next(info.shape for info in cand.inputs if info.name == PIXEL_VALUES)
    if cand.spec.input.dynamic and not any(isinstance(side, int) for side in pixels[2:]):
        sizes.append(another_size(cand))
    report = replace(report, tensors=tuple(forced_rows(ref, cand, images, sizes)))
    if report.differences and report.tensors and report.worst_tensor <= report.gate.tensor:
        ties = (
            f"ties: with the same selections both sides compute the same (largest tensor difference {report.worst_tensor:.2g}), so other "
            "queries were selected among scores that tie within rounding, as of random weights"
        )
        report = replace(report, notes=(*report.notes, ties))
    return report


def _detections(
    ref: Session,
    cand: Session,
    images: Sequence[ImageSource],
    size: int,
    progress: CountProgress | None,
    broken: list[str],
) -> Iterable[Pair]:
    """(reference's, candidate's) of each image; where the candidate fails, why goes into `broken`."""
    size, done = min(size, cand.info.max_batch or size), 0
    for start in range(0, len(images), size):
        loaded = [load_image(image) for image in images[start : start + size]]
        # A low threshold on both sides: the gate cuts by itself, after the pairing.
        wanted = _detect(ref, loaded, 0.0)
        try:
            got = _detect(cand, loaded, 0.0)
        except ClosedSessionError:
            raise
        except SessionError as error:  # NaN, or it does not run: a result of this check, not a wrong call
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


def _found_alone(session: Session, images: list[NDArray], found: Sequence[Pair], report: VerifyReport) -> list[Detections]:
    """The candidate's detections in single images: a model finds something else in one that is padded to its neighbour's size."""
    if session.spec.input.one_size or len(images) == 1 or report.broken:
        return [pair[1] for pair in found]
    return [_detect(session, [image], 0.0)[0] for image in images]


def _with_ap(
    report: VerifyReport, dataset: CocoDataset, found: Sequence[Pair], specs: tuple[ModelSpec, ModelSpec]
) -> VerifyReport:
    from .coco import SEGM, chosen_iou_type, score_rows

    path = dataset.path
    annotated, ids = dataset.subset(report.names)
    notes = report.notes
    if left_out := len(ids) - sum(i is not None for i in ids):
        notes += (f"{left_out} of {number_of(len(ids), 'image')} have no annotations in '{path}' and do not count for the AP",)
    for image, (reference, _) in zip(ids, found, strict=True):
        if image is not None:
            annotated.check_size(image, reference.image_size_hw)
    ap: dict[str, Any] = {"images": len(annotated.images)}
    iou_type = chosen_iou_type(None, specs[0].has_masks, "", annotated)
    if specs[0].has_masks:
        notes += () if iou_type == SEGM else (f"the AP is that of boxes: not every annotation in '{path}' has a mask",)
        ap["iou_type"] = iou_type
    for side, spec, key in zip(range(2), specs, ("reference", "candidate"), strict=True):
        categories = dataset.category_ids(spec)
        rows = [row for i, pair in zip(ids, found, strict=True) if i is not None for row in pair[side].to_coco(i, categories)]
        ap[key] = dict(score_rows(annotated, rows, iou_type)[0])
    return replace(report, ap=ap, notes=notes)


def _precision_map(side: Side) -> dict[str, dict[str, int]]:
    if side.graph is None:
        return {}
    from ..graph.view import precision_map
    from .models import view_of

    return precision_map(view_of(side.graph))


def _with_examples(
    report: VerifyReport, images: Sequence[ImageSource], found: Sequence[Pair], pairings: Sequence[Pairing], count: int
) -> VerifyReport:
    """The worst images, and the scores of all pairs, for the HTML report."""
    matches = report.images
    order = sorted(range(len(images)), key=lambda i: (-(matches[i].missing + matches[i].extra), -matches[i].box_px))
    examples = tuple(Example(report.names[i], load_image(images[i]), *found[i], matches[i]) for i in order[:count])
    scores = tuple(pair for pairing in pairings for pair in pairing.scores())
    return replace(report, examples=examples, scores=scores)
