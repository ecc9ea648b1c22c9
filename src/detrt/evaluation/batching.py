"""Every slot of a batch must give what its image gives alone, and padding must not matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Feeds, Outputs, Session, relative_error
from ..data.postprocess import decode
from ..data.preprocess import SizeHW, needs_equal_sizes, preprocess, resize
from ..errors import SessionError
from ..spec import PIXEL_MASK, PIXEL_VALUES
from .matching import Gate, match

# Batches of a model without a profile: one, two, and one that no power of a kernel's tile hides.
_BATCHES = (1, 2, 4)


def shapes_to_run(session: Session, batches: Sequence[int] | None = None) -> list[tuple[int, SizeHW]]:
    """(batch, (height, width)) of the profile's minimum, optimum and maximum; of an engine from the engine.

    A model without a profile runs batches 1, 2 and 4 at its usual size, and, where the size is symbolic,
    batch 3 at one that is not its usual one. batches: other batches, bounded by what the model takes.
    """
    facts, usual = session.spec.input, session.spec.input.size_hw
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
    sides = tuple(side if isinstance(side, int) else usual[i] for i, side in enumerate(pixels[2:]))
    points = [(b, (sides[0], sides[1])) for b in counts if b <= (session.info.max_batch or b)]
    if facts.dynamic and not any(isinstance(side, int) for side in pixels[2:]):
        points.append((min(3, max(counts)), another_size(session)))
    return list(dict.fromkeys(points))


def another_size(session: Session) -> SizeHW:
    """A size that is not the usual one, smaller and of another aspect ratio, that the model can take."""
    facts = session.spec.input
    step = facts.multiple_of
    height, width = (max(step, round(side * share / step) * step) for side, share in zip(facts.size_hw, (0.5, 0.75), strict=True))
    return height, width


def slot_rows(
    session: Session, images: Sequence[NDArray[np.uint8]], gate: Gate, shapes: Sequence[tuple[int, SizeHW]]
) -> Iterator[dict[str, Any]]:
    """Rows of batch, height, width, slot, error (relative), passed, text.

    Each slot holds another picture. Where raw outputs differ by more than the gate, which a tie of two
    queries is enough for, the detections decide.
    """
    smallest = min((batch for batch, _ in shapes), default=1) if _smallest_matters(session) else 1
    for batch, size_hw in shapes:
        pictures = different_images(images, batch, session)
        where = {"batch": batch, "height": size_hw[0], "width": size_hw[1]}
        given = preprocess(pictures, session.spec, size_hw=_size(session, size_hw))
        try:
            together = session.run(given.feeds)
        except SessionError as error:
            yield {**where, "slot": -1, "error": float("inf"), "passed": False, "text": str(error)}
            continue
        for slot in range(batch):
            order = [(slot + i) % batch for i in range(min(smallest, batch))]
            if order == list(range(batch)):
                continue  # it would be the same run
            feeds = {name: np.ascontiguousarray(array[order]) for name, array in given.feeds.items()}
            try:
                alone = session.run(feeds)
            except SessionError as error:
                yield {**where, "batch": len(order), "slot": slot, "error": float("inf"), "passed": False, "text": str(error)}
                continue
            error, same = _compare(session, alone, together, slot, given.original_sizes_hw[slot], gate)
            yield {**where, "slot": slot, "error": error, "passed": same, "text": ""}


def padding_rows(
    session: Session, images: Sequence[NDArray[np.uint8]], gate: Gate, size_hw: SizeHW | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of height, width, slot, error, passed: another content of the padding must change nothing."""
    if not session.spec.input.mask:
        return
    count = session.info.fixed_batch or 1
    pictures = different_images(images, count, session)
    given = preprocess(pictures, session.spec, size_hw=_size(session, size_hw or _square(session)))
    mask = given.feeds[PIXEL_MASK]
    if mask.all():
        return
    other = dict(given.feeds)
    fill = np.array(200 if session.spec.input.normalize_in_graph else 2.5, other[PIXEL_VALUES].dtype)
    other[PIXEL_VALUES] = np.where(mask[:, None].astype(bool), other[PIXEL_VALUES], fill)
    plain, filled = session.run(given.feeds), session.run(other)
    height, width = mask.shape[1:]
    for slot in range(count):
        sizes = given.original_sizes_hw[slot]
        error, same = _compare(session, _one(plain, slot), filled, slot, sizes, gate)
        yield {"height": height, "width": width, "slot": slot, "error": error, "passed": same}


def slot_feeds(session: Session, images: Sequence[NDArray[np.uint8]], batch: int, size_hw: SizeHW) -> Feeds:
    """The feeds that `slot_rows` used for a shape, e.g. to search where they go wrong."""
    return preprocess(different_images(images, batch, session), session.spec, size_hw=_size(session, size_hw)).feeds


def _compare(session: Session, alone: Outputs, together: Outputs, slot: int, size_hw: SizeHW, gate: Gate) -> tuple[float, bool]:
    error = max(relative_error(alone[name][0], together[name][slot]) for name in alone)
    if error <= gate.tensor:
        return error, True
    try:
        a = decode(_one(alone, 0), session.spec, [size_hw], threshold=0.0)[0]
        b = decode(_one(together, slot), session.spec, [size_hw], threshold=0.0)[0]
    except SessionError:
        return float("inf"), False
    found = match(a, b, gate)
    allowed = gate.unmatched * found.compared
    same = max(found.missing, found.extra) <= allowed and found.box_px <= gate.box_px and found.score <= gate.score
    return error, same and found.compared > 0


def _one(outputs: Outputs, slot: int) -> Outputs:
    return {name: array[slot : slot + 1] for name, array in outputs.items()}


def different_images(images: Sequence[NDArray[np.uint8]], count: int, session: Session) -> list[NDArray[np.uint8]]:
    """As many pictures as asked for, no two equal, of one size where the model cannot pad."""
    pictures = []
    for index in range(count):
        picture, turn = images[index % len(images)], index // len(images)
        if turn % 2:
            picture = picture[:, ::-1]
        if turn // 2:
            picture = np.roll(picture, 17 * (turn // 2), axis=0)
        if needs_equal_sizes(session.spec.input):
            picture = resize(np.ascontiguousarray(picture), images[0].shape[:2], session.spec.input.resample)  # type: ignore[arg-type]
        pictures.append(np.ascontiguousarray(picture))
    return pictures


def _size(session: Session, size_hw: SizeHW) -> SizeHW | None:
    return size_hw if session.spec.input.dynamic else None


def _square(session: Session) -> SizeHW:
    """A size into which no picture of another aspect ratio fits without padding."""
    facts = session.spec.input
    side = max(facts.multiple_of, min(facts.size_hw) // 2 // facts.multiple_of * facts.multiple_of)
    return side, side


def _smallest_matters(session: Session) -> bool:
    return bool(session.info.profile) or session.info.fixed_batch is not None
