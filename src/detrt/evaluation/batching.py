"""Batch-invariance check: results must not depend on the position in the batch, on the other images or on padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Feeds, Outputs, Session
from ..backends.compare import relative_error
from ..data.matching import Gate, match, within
from ..data.postprocess import decode
from ..data.preprocess import SizeHW, needs_equal_sizes, preprocess, resize
from ..errors import SessionError
from ..spec import PIXEL_MASK, PIXEL_VALUES

# Batch sizes of a model without a profile.
_BATCHES = (1, 2, 4)


def shapes_to_run(session: Session, batches: Sequence[int] | None = None) -> list[tuple[int, SizeHW]]:
    """(batch, (height, width)) of the minimum, optimum and maximum of the profile of an engine.

    A model without a profile runs batches 1, 2 and 4 at its default size, and, if the size is symbolic, batch 3 at another size.
    batches: other batch sizes, limited to the maximum of the model.
    """
    facts, default_hw = session.spec.input, session.spec.input.size_hw
    pixels = session.info.pixel_shape
    profile = session.info.profile.get(PIXEL_VALUES)
    if profile is not None:
        points = [(shape[0], (shape[2], shape[3])) for shape in profile]
        if batches:
            points = [(b, points[1][1]) for b in batches]
        return list(dict.fromkeys(points))
    if isinstance(pixels[0], int):
        counts: Sequence[int] = (pixels[0],)
    else:
        counts = batches or _BATCHES
    sides = tuple(side if isinstance(side, int) else default_hw[i] for i, side in enumerate(pixels[2:]))
    points = [(b, (sides[0], sides[1])) for b in counts if b <= (session.info.max_batch or b)]
    if facts.dynamic and not any(isinstance(side, int) for side in pixels[2:]):
        points.append((min(3, max(counts)), another_size(session)))
    return list(dict.fromkeys(points))


def another_size(session: Session) -> SizeHW:
    """A size that the model takes, of another aspect ratio than its default; smaller, where that surely has a position for each query."""
    facts = session.spec.input
    step = facts.multiple_of
    for fractions in ((0.5, 0.75), (1.5, 0.75)):
        height, width = (
            max(step, round(side * fraction / step) * step) for side, fraction in zip(facts.size_hw, fractions, strict=True)
        )
        if _has_room(session, height, width):
            break
    return height, width


def _has_room(session: Session, height: int, width: int) -> bool:
    """Whether a map of a sixteenth of the size, which every family has, has a position for each query."""
    return height * width >= 256 * session.spec.decode.num_queries


def slot_rows(
    session: Session, images: Sequence[NDArray[np.uint8]], gate: Gate, shapes: Sequence[tuple[int, SizeHW]]
) -> Iterator[dict[str, Any]]:
    """Rows of batch, height, width, slot, error (relative), passed, text.

    Each slot has a different image. If raw outputs differ by more than the gate, which can be due to a tie of two queries, the
    detections decide.
    """
    smallest = min((batch for batch, _ in shapes), default=1) if _smallest_matters(session) else 1
    for batch, size_hw in shapes:
        distinct = different_images(images, batch, session)
        where = {"batch": batch, "height": size_hw[0], "width": size_hw[1]}
        batch_inputs = preprocess(distinct, session.spec, size_hw=_size(session, size_hw))
        try:
            batched = session.run(batch_inputs.feeds)
        except SessionError as error:
            yield {**where, "slot": -1, "error": float("inf"), "passed": False, "text": str(error)}
            continue
        for slot in range(batch):
            order = [(slot + i) % batch for i in range(min(smallest, batch))]
            if order == list(range(batch)):
                continue  # the same run
            feeds = {name: np.ascontiguousarray(array[order]) for name, array in batch_inputs.feeds.items()}
            try:
                single = session.run(feeds)
            except SessionError as error:
                yield {**where, "batch": len(order), "slot": slot, "error": float("inf"), "passed": False, "text": str(error)}
                continue
            error, same = _compare(session, single, batched, slot, batch_inputs.original_sizes_hw[slot], gate)
            yield {**where, "slot": slot, "error": error, "passed": same, "text": ""}


def padding_rows(session: Session, images: Sequence[NDArray[np.uint8]], gate: Gate) -> Iterator[dict[str, Any]]:
    """Rows of height, width, slot, error, passed: the result must not depend on the content of the padding."""
    if not session.spec.input.mask:
        return
    count = session.info.fixed_batch or 1
    distinct = different_images(images, count, session)
    batch_inputs = preprocess(distinct, session.spec, size_hw=_size(session, _square(session)))
    mask = batch_inputs.feeds[PIXEL_MASK]
    if mask.all():
        return
    other = dict(batch_inputs.feeds)
    fill = np.array(200 if session.spec.input.normalize_in_graph else 2.5, other[PIXEL_VALUES].dtype)
    other[PIXEL_VALUES] = np.where(mask[:, None].astype(bool), other[PIXEL_VALUES], fill)
    expected, outputs = session.run(batch_inputs.feeds), session.run(other)
    height, width = mask.shape[1:]
    for slot in range(count):
        sizes = batch_inputs.original_sizes_hw[slot]
        error, same = _compare(session, _one(expected, slot), outputs, slot, sizes, gate)
        yield {"height": height, "width": width, "slot": slot, "error": error, "passed": same}


def slot_feeds(session: Session, images: Sequence[NDArray[np.uint8]], batch: int, size_hw: SizeHW) -> Feeds:
    """The feeds of `slot_rows` for a shape, e.g. for a divergence search."""
    return preprocess(different_images(images, batch, session), session.spec, size_hw=_size(session, size_hw)).feeds


def _compare(session: Session, single: Outputs, batched: Outputs, slot: int, size_hw: SizeHW, gate: Gate) -> tuple[float, bool]:
    error = max(relative_error(single[name][0], batched[name][slot]) for name in single)
    if error <= gate.tensor:
        return error, True
    try:
        a = decode(_one(single, 0), session.spec, [size_hw], threshold=0.0)[0]
        b = decode(_one(batched, slot), session.spec, [size_hw], threshold=0.0)[0]
    except SessionError:
        return float("inf"), False
    matched = match(a, b, gate)
    return error, within(matched, gate) and matched.compared > 0


def _one(outputs: Outputs, slot: int) -> Outputs:
    return {name: array[slot : slot + 1] for name, array in outputs.items()}


def different_images(images: Sequence[NDArray[np.uint8]], count: int, session: Session) -> list[NDArray[np.uint8]]:
    """`count` images, all different; of one size if the model cannot pad."""
    distinct = []
    for index in range(count):
        image, variant = images[index % len(images)], index // len(images)
        if variant % 2:
            image = image[:, ::-1]
        if variant // 2:
            image = np.roll(image, 17 * (variant // 2), axis=0)
        if needs_equal_sizes(session.spec.input):
            image = resize(np.ascontiguousarray(image), images[0].shape[:2], session.spec.input.resample)  # type: ignore[arg-type]
        distinct.append(np.ascontiguousarray(image))
    return distinct


def _size(session: Session, size_hw: SizeHW) -> SizeHW | None:
    return size_hw if session.spec.input.dynamic else None


def _square(session: Session) -> SizeHW:
    """A square size, which images of another aspect ratio fill only with padding."""
    facts = session.spec.input
    for side in (min(facts.size_hw) // 2, max(facts.size_hw)):
        side = max(facts.multiple_of, side // facts.multiple_of * facts.multiple_of)
        if _has_room(session, side, side):
            break
    return side, side


def _smallest_matters(session: Session) -> bool:
    return bool(session.info.profile) or session.info.fixed_batch is not None
