"""The candidate compared with transformers' own processor and post-processing, which read the checkpoint's folder themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Backend
from ..data.preprocess import preprocessing_words
from ..detections import Detections
from ..errors import GateError, MissingPackageError
from ..models.contract import exported_spec
from ..spec import InputSpec, ModelSpec
from .matching import match
from .models import Side, config_like
from .report import PublishedMatch, VerifyReport

# What decides the pixels; of a graph with symbolic sides, height and width only name the usual size.
_PIXEL_FIELDS = ("resize", "height", "width", "shortest_edge", "longest_edge", "max_height", "max_width", "pad", "mask")


def with_published(
    report: VerifyReport, ref: Side, cand: Side, images: Sequence[NDArray[np.uint8]], found: Sequence[Detections]
) -> VerifyReport:
    """The report with the comparison; as it was for a reference that is no folder in transformers format.

    found: the candidate's detections in the images, from score 0 on.
    """
    source = ref.source
    if source is None or source.processor is None:
        return report
    from ..models.published import PIXEL_TOLERANCE, PublishedDetector, open_processor, pixel_error

    processor, why_not = open_processor(source.processor)
    if processor is None:
        return replace(report, notes=(*report.notes, why_not))
    done = PublishedMatch(type(processor).__name__, PIXEL_TOLERANCE)
    own, given = source.spec, cand.session.spec
    expected = own if cand.session.info.backend is Backend.INDUCTOR else exported_spec(source, config_like(cand))
    if _pixels_differ(expected.input, given.input) and cand.session.info.backend is not Backend.INDUCTOR:
        difference = (
            f"the candidate's preprocessing is {preprocessing_words(given.input)}; by its checkpoint and the options of its build it "
            f"is {preprocessing_words(expected.input)}; if it was stated, give the same --resize or --preprocess"
        )
        return replace(report, published=replace(done, differences=(difference,)))
    chosen = _chosen_otherwise(own, given)
    try:
        done = replace(done, pixels=pixel_error(processor, own if chosen else given, images))
    except GateError as error:
        done = replace(done, differences=(str(error),))
    if chosen:
        note = f"the end result is not compared with transformers' own: another {chosen} was chosen when the candidate was built"
        return replace(report, published=done, notes=(*report.notes, note))
    prompt = cand.session.prompts[0].prompt if cand.session.prompts else None
    try:
        detector = PublishedDetector(source, processor, None if prompt is None else prompt.text)
        theirs = [detector.detect(image, 0.0) for image in images]
    except MissingPackageError as error:
        return replace(report, published=done, notes=(*report.notes, f"no end result of transformers: {error}"))
    if prompt is not None:  # names of tokens there, of whole phrases here: boxes and scores are compared
        theirs, found = [_of_one_class(one) for one in theirs], [_of_one_class(one) for one in found]
    matches = tuple(match(a, b, report.gate) for a, b in zip(theirs, found, strict=False))
    return replace(report, published=replace(done, images=matches))


def _pixels_differ(a: InputSpec, b: InputSpec) -> bool:
    fields = [name for name in _PIXEL_FIELDS if name not in ("height", "width") or a.one_size]
    return any(getattr(a, name) != getattr(b, name) for name in fields)


def _chosen_otherwise(own: ModelSpec, candidate: ModelSpec) -> str:
    """The choice by which a candidate's detections differ from its checkpoint's; "" for none."""
    if _pixels_differ(own.input, candidate.input):
        return "input size"
    if own.decode.nms != candidate.decode.nms:
        return "NMS"
    return "number of detections" if candidate.decode.max_detections < own.decode.max_detections else ""


def _of_one_class(found: Detections) -> Detections:
    return replace(found, class_ids=np.zeros(len(found), np.int64))
