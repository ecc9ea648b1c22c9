"""The candidate compared with transformers' own processor and post-processing, which read the checkpoint's folder themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Session
from ..backends.prompted import unbound
from ..data.matching import Gate, match, match_pairs
from ..data.preprocess import preprocessing_words
from ..data.token_labels import TEXT_THRESHOLD
from ..detections import Detections
from ..detector import Detector
from ..errors import GateError, MissingPackageError, number_of
from ..models.contract import exported_spec
from ..spec import InputSpec, ModelSpec
from ..text.prompts import Prompt
from .models import Side, config_like
from .report import PublishedMatch, TokenMatch, VerifyReport

if TYPE_CHECKING:
    from ..models.published import PublishedDetector, PublishedOutputs

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
    from ..models.published import PIXEL_TOLERANCE, PublishedDetector, PublishedPrompt, open_processor, pixel_error

    processor, why_not = open_processor(source.processor)
    if processor is None:
        return replace(report, notes=(*report.notes, why_not))
    done = PublishedMatch(type(processor).__name__, PIXEL_TOLERANCE)
    own, given = source.spec, cand.session.spec
    expected = own if cand.session.info.compiled else exported_spec(source, config_like(cand))
    if _pixels_differ(expected.input, given.input) and not cand.session.info.compiled:
        difference = (
            f"the candidate's preprocessing is {preprocessing_words(given.input)}; by its checkpoint and the options of its build it "
            f"is {preprocessing_words(expected.input)}; if it was stated, give the same `resize` or `preprocess`"
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
    prompt = cand.session.prompts[0] if cand.session.prompts else None
    if prompt is not None and prompt.of_images:
        note = "no end result of transformers: it reports the scores of an image query relative to the best one of an image"
        return replace(report, published=done, notes=(*report.notes, note))
    if prompt is not None and len(prompt.chunks) > 1:
        note = f"no end result of transformers: the {number_of(len(prompt.prompt.phrases), 'class name')} are more than one of its prompts takes"
        return replace(report, published=done, notes=(*report.notes, note))
    try:
        detector = PublishedDetector(source, processor, None if prompt is None else PublishedPrompt.of(prompt.prompt))
    except MissingPackageError as error:
        return replace(report, published=done, notes=(*report.notes, f"no end result of transformers: {error}"))
    outputs = [detector.run(image) for image in images]
    theirs = [detector.detections(one) for one in outputs]
    matches = tuple(match(a, b, report.gate) for a, b in zip(theirs, found, strict=False))
    done = replace(done, images=matches)
    if prompt is not None and not prompt.prompt.listed and own.text.prompt_kind.token_scores and not given.decode.in_graph:
        done = replace(done, by_tokens=tuple(_by_tokens(detector, outputs, cand.session, prompt.prompt, images, report.gate)))
    return replace(report, published=done)


def _by_tokens(
    detector: PublishedDetector,
    outputs: Sequence[PublishedOutputs],
    candidate: Session,
    prompt: Prompt,
    images: Sequence[NDArray[np.uint8]],
    gate: Gate,
) -> Iterable[TokenMatch]:
    """The candidate with `--phrases tokens`, which is transformers' own rule: scores over all tokens, and labels of token text."""
    ours = Detector(unbound(candidate), prompt=prompt, phrases="tokens", threshold=0.0)
    for image, out in zip(images, outputs, strict=True):
        # A token within the tolerance of the threshold may be in a label or not: these hold the least and the most of them.
        least, theirs, most = (detector.by_tokens(out, TEXT_THRESHOLD + change) for change in (gate.score, 0.0, -gate.score))
        found = _of_one_class(ours(image))
        numbered = replace(theirs, labels=tuple(map(str, range(len(theirs)))))
        pairing = match_pairs(numbered, found, gate)
        wrong = []
        for r, c in pairing.compared:
            i, label = int(pairing.ref.labels[r]), pairing.cand.labels[c]
            if not (_has_letters_of(label, least.labels[i]) and _has_letters_of(most.labels[i], label)):
                wrong.append((label, theirs.labels[i]))
        yield TokenMatch(match(theirs, found, gate), tuple(wrong))


def _has_letters_of(text: str, part: str) -> bool:
    """Whether a label has all tokens of another one, in order: what remains of a text after some of its tokens were left out."""
    letters = iter(_letters(text))
    return all(letter in letters for letter in _letters(part))


def _letters(label: str) -> str:
    # Dots are left out of our labels; "##" is a piece of a word whose beginning is not there.
    return "".join(c for c in label if c not in " .#")


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
