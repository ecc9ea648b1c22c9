"""A model that takes a prompt: its detector, its text tower and its tokenizer behind one Session.

The text tower runs once for each prompt that is new; what it made is kept (`CACHE_SIZE` prompts, `NAMES_SIZE`
class names of kind "classes"), so that a video, a folder or a server pays for the text once.
`PromptedSession.bind` gives a session of fixed classes, which everything that runs a detector can use.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PromptError, SessionError
from ..spec import (
    ATTENTION_MASK,
    CLASS_FEATURES,
    CLASS_MASK,
    INPUT_IDS,
    PHRASE_MASK,
    TASK_FEATURES,
    TASK_MASK,
    TEXT_FEATURES,
    TEXT_POSITION_IDS,
    TEXT_SELF_MASK,
    ModelSpec,
    TextSpec,
)
from ..text.prompts import Prompt
from ..text.tokenizer import Asked, ClassPart, Part, PromptTokenizer, TokenPart
from .base import TOWER_INPUTS, Feeds, Outputs, Session, TensorInfo, text_inputs

if TYPE_CHECKING:
    from .bound import BoundSession

CACHE_SIZE = 64  # prompts, and tasks; one of 256 tokens is 0.8 MB, a usual one of 16 tokens 20 kB
NAMES_SIZE = 4096  # class names, of 2 kB each
# TensorRT prepares kernels, and records a CUDA graph, for every new combination of input shapes; prompts are padded
# to a multiple of this, so that there are at most 16 of them. The masks make it exact. ONNX Runtime has no such cost.
ENGINE_BUCKET = 16

# Axis of the number of tokens, or of classes, of every text input.
_TOKEN_AXES = {
    INPUT_IDS: (1,),
    ATTENTION_MASK: (1,),
    TEXT_FEATURES: (1,),
    TEXT_SELF_MASK: (1, 2),
    TEXT_POSITION_IDS: (1,),
    PHRASE_MASK: (2,),
    TASK_FEATURES: (1,),
    TASK_MASK: (1,),
}
_CLASS_AXES = {CLASS_FEATURES: (1,), CLASS_MASK: (1,)}
_PHRASE_AXES = {PHRASE_MASK: (1,)}


class PromptedSession:
    """A Session of a model with a text part.

    detector: takes images and text features (or token ids, where the model is one graph). tower: the text
    tower, None for a model of one graph. tokenizer: of the model. cache_size: prompts whose features are kept.
    Closing it closes both sessions.

    Raises:
        SessionError: a tower is missing, or is not one.
    """

    def __init__(
        self, detector: Session, tokenizer: PromptTokenizer, tower: Session | None = None, *, cache_size: int = CACHE_SIZE
    ) -> None:
        if detector.spec.text is None:
            raise SessionError("this model has fixed classes and takes no prompt; open it without a tokenizer")
        if cache_size < 1:
            raise SessionError(f"cache_size must be at least 1; got {cache_size}")
        needed = bool(detector.spec.text.tower)
        if needed != (tower is not None):
            what = f"needs its text tower '{detector.spec.text.tower}'" if needed else "is one graph and has no text tower"
            raise SessionError(f"this model {what}; open the bundle or the ONNX file with detrt.open_session")
        if tower is not None and {info.name for info in tower.inputs} != set(TOWER_INPUTS):
            raise SessionError(f"the text tower must take {list(TOWER_INPUTS)}; got {[i.name for i in tower.inputs]}")
        self.detector, self.tower, self.tokenizer = detector, tower, tokenizer
        self.spec: ModelSpec = detector.spec
        self.text: TextSpec = detector.spec.text
        self.inputs: tuple[TensorInfo, ...] = detector.inputs
        self.outputs: tuple[TensorInfo, ...] = detector.outputs
        self.backend, self.max_batch = detector.backend, detector.max_batch
        self.note: str = getattr(detector, "note", "")
        # What else sessions tell about themselves, where the detector does.
        for name in ("path", "facts", "profile", "gpu_name"):
            if hasattr(detector, name):
                setattr(self, name, getattr(detector, name))
        self._lock = threading.RLock()
        self._asked: _Kept = _Kept(cache_size)
        self._features, self._names = _Kept(cache_size), _Kept(NAMES_SIZE)
        # Two graphs run one after the other, so both must take a length.
        both = [detector] if tower is None else [detector, tower]
        self._tokens = _Lengths(both, _TOKEN_AXES, limit=self.text.max_tokens)
        most = self.spec.decode.num_classes if self.text.kind == "classes" else None
        self._classes = _Lengths([detector], _CLASS_AXES, limit=most)
        self._phrases = _Lengths([detector], _PHRASE_AXES)

    def ask(self, prompt: str | Sequence[str] | Prompt, task: str = "") -> Asked:
        """A prompt made ready: parsed, tokenised, and in parts where a list is longer than the model takes.

        Raises:
            PromptError: nothing to look for, too many tokens, or a task for a model without one.
        """
        parsed = self.tokenizer.parse(prompt, task)
        with self._lock:
            if (asked := self._asked.get(parsed)) is None:
                most = self._classes.high if self.text.kind == "classes" else self._phrases.high
                made = self.tokenizer.ask(parsed, max_tokens=self._tokens.high, max_phrases=most)
                asked = self._asked.put(parsed, made)
        return asked

    def bind(
        self,
        prompts: str | Sequence[str] | Prompt | Asked,
        *,
        task: str = "",
        phrases: str = "best",
        every_class: bool = False,
    ) -> BoundSession:
        """A session of fixed classes, the phrases of one prompt or of a list of class names; see `BoundSession`."""
        from .bound import BoundSession

        asked = prompts if isinstance(prompts, Asked) else self.ask(prompts, task)
        return BoundSession(self, [asked], phrases=phrases, every_class=every_class)

    def with_parts(self, detector: Session, tower: Session | None) -> PromptedSession:
        """The same model run by other sessions, e.g. ones that round."""
        made = PromptedSession(detector, self.tokenizer, tower, cache_size=self._asked.size)
        made.note = "; ".join(dict.fromkeys(note for note in (self.note, made.note) if note))
        return made

    def text_feeds(self, parts: Sequence[Part]) -> Feeds:
        """The text inputs of the detector for a batch, one part of a prompt for each image."""
        names = {info.name for info in self.inputs}
        feeds = self._class_feeds(parts) if self.text.kind == "classes" else self._token_feeds(parts)
        return {name: array for name, array in feeds.items() if name in names}

    def run(self, feeds: Feeds) -> Outputs:
        """Run the detector; feeds hold the images and the text inputs (see `text_feeds`)."""
        missing = [name for name in text_inputs(self.spec) if name not in feeds]
        if missing:
            raise PromptError(
                f"this model finds what a prompt names, and there is none (inputs {missing} are not fed); give --prompt "
                "(Python: Detector.open(..., prompt=...), or session.bind(prompt))"
            )
        return self.detector.run(feeds)

    def close(self) -> None:
        self.detector.close()
        if self.tower is not None:
            self.tower.close()

    def __enter__(self) -> PromptedSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _token_feeds(self, parts: Sequence[Part]) -> dict[str, NDArray]:
        given = [part for part in parts if isinstance(part, TokenPart)]
        count, length = len(given), self._tokens.fit(max(part.length for part in given))
        ids = np.full((count, length), self.text.pad_id, np.int64)
        mask = np.zeros((count, length), np.int64)
        for row, part in enumerate(given):
            ids[row, : part.length] = part.ids
            mask[row, : part.length] = 1
        feeds = {INPUT_IDS: ids, ATTENTION_MASK: mask}
        if self.spec.decode.in_graph:
            most = self._phrases.fit(max(len(part.phrase_mask) for part in given))
            phrases = np.zeros((count, most, length), np.int64)
            for row, part in enumerate(given):
                phrases[row, : len(part.phrase_mask), : part.length] = part.phrase_mask
            feeds[PHRASE_MASK] = phrases
        if self.tower is None:
            return feeds
        made = [self._tower_row(part.ids) for part in given]
        width = made[0][TEXT_FEATURES].shape[-1]
        features = np.zeros((count, length, width), np.float32)
        # A token of the padding looks at itself only: without anything to look at, a softmax is not a number.
        self_mask = np.tile(np.eye(length, dtype=np.int64), (count, 1, 1))
        positions = np.zeros((count, length), np.int64)
        for row, (part, kept) in enumerate(zip(given, made, strict=True)):
            n = part.length
            features[row, :n] = kept[TEXT_FEATURES]
            self_mask[row, :n, :n] = kept[TEXT_SELF_MASK]
            positions[row, :n] = kept[TEXT_POSITION_IDS]
        return {**feeds, TEXT_FEATURES: features, TEXT_SELF_MASK: self_mask, TEXT_POSITION_IDS: positions}

    def _class_feeds(self, parts: Sequence[Part]) -> dict[str, NDArray]:
        given = [part for part in parts if isinstance(part, ClassPart)]
        count = len(given)
        names = self._kept_rows(self._names, CLASS_FEATURES, [ids for part in given for ids in part.names])
        sentences = self._kept_rows(self._features, TEXT_FEATURES, [part.task for part in given])
        most = self._classes.fit(max(len(part.names) for part in given))
        length = self._tokens.fit(max(len(part.task) for part in given))
        classes = np.zeros((count, most, names[given[0].names[0].tobytes()].shape[-1]), np.float32)
        class_mask = np.zeros((count, most), np.int64)
        tasks = np.zeros((count, length, sentences[given[0].task.tobytes()].shape[-1]), np.float32)
        task_mask = np.zeros((count, length), np.int64)
        for row, part in enumerate(given):
            for column, ids in enumerate(part.names):
                classes[row, column] = names[ids.tobytes()]
            class_mask[row, : len(part.names)] = 1
            n = len(part.task)
            tasks[row, :n] = sentences[part.task.tobytes()]
            task_mask[row, :n] = 1
        return {CLASS_FEATURES: classes, CLASS_MASK: class_mask, TASK_FEATURES: tasks, TASK_MASK: task_mask}

    def _tower_row(self, ids: NDArray) -> dict[str, NDArray]:
        # Made one at a time, so that what is kept does not depend on the neighbours in a batch.
        with self._lock:
            kept = self._features.get(ids.tobytes())
            return self._features.put(ids.tobytes(), self._run_tower([ids])[0]) if kept is None else kept

    def _kept_rows(self, kept: _Kept, output: str, rows: Sequence[NDArray]) -> dict[bytes, NDArray]:
        """One output of the tower for each row of token ids, in one run for all that are new."""
        with self._lock:
            found = {ids.tobytes(): kept.get(ids.tobytes()) for ids in rows}
            new = {ids.tobytes(): ids for ids in rows if found[ids.tobytes()] is None}
            for key, row in zip(new, self._run_tower(list(new.values())), strict=True):
                found[key] = kept.put(key, row[output])
        return found

    def _run_tower(self, rows: Sequence[NDArray]) -> list[dict[str, NDArray]]:
        """What the tower makes of each row of token ids, without the padding."""
        assert self.tower is not None
        results = []
        size = min(self.tower.max_batch or len(rows), len(rows)) if rows else 0
        fixed = next(info.shape[0] for info in self.tower.inputs if info.name == INPUT_IDS)
        for start in range(0, len(rows), size or 1):
            some = rows[start : start + size]
            count = fixed if isinstance(fixed, int) else len(some)
            length = self._tokens.fit(max(len(ids) for ids in some))
            ids = np.full((count, length), self.text.pad_id, np.int64)
            mask = np.zeros((count, length), np.int64)
            for row in range(count):
                given = some[min(row, len(some) - 1)]
                ids[row, : len(given)] = given
                mask[row, : len(given)] = 1
            made = self.tower.run({INPUT_IDS: ids, ATTENTION_MASK: mask})
            for row, given in enumerate(some):
                results.append(_row(made, row, len(given)))
        return results


def _row(made: Outputs, row: int, length: int) -> dict[str, NDArray]:
    cut: dict[str, Callable[[NDArray], NDArray]] = {
        TEXT_FEATURES: lambda a: a[row, :length],
        TEXT_SELF_MASK: lambda a: a[row, :length, :length],
        TEXT_POSITION_IDS: lambda a: a[row, :length],
        CLASS_FEATURES: lambda a: a[row],
    }
    # Copies: a view would keep the padded arrays of the whole batch.
    kept = {name: np.array(cut[name](array)) for name, array in made.items() if name in cut}
    for name in (TEXT_FEATURES, CLASS_FEATURES):
        if name in kept and not np.isfinite(kept[name]).all():
            raise SessionError(
                f"the text tower returned NaN or infinite values in '{name}': numbers overflowed inside it; build it again "
                "with --precision fp32"
            )
    return kept


class _Lengths:
    """Which lengths of an axis some sessions take: from their engines' profiles, and from fixed axes."""

    def __init__(self, sessions: Sequence[Session], axes: dict[str, tuple[int, ...]], limit: int | None = None) -> None:
        self.low, self.high, self.step = 1, limit, 1
        for session in sessions:
            if session.backend.startswith("tensorrt"):
                self.step = ENGINE_BUCKET
            profile = getattr(session, "profile", {})
            for info in session.inputs:
                for axis in axes.get(info.name, ()):
                    length = info.shape[axis]
                    low, high = (1, None) if isinstance(length, str) else (length, length)
                    if info.name in profile:
                        low, high = int(profile[info.name][0][axis]), int(profile[info.name][2][axis])
                    self.low = max(self.low, low)
                    if high is not None:
                        self.high = high if self.high is None else min(self.high, high)

    def fit(self, length: int) -> int:
        """The shortest length that the sessions take, at least `length`; the padding is masked."""
        length = max(self.low, -(-length // self.step) * self.step)
        return length if self.high is None else min(length, self.high)


class _Kept:
    """The entries that were used last."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: Hashable, value: Any) -> Any:
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self.size:
            self._entries.popitem(last=False)
        return value
