"""Which class a caller means: one rule for the command line, Python, the server, DeepStream and annotations.

A number is a class id. A text is a name: exactly as the model has it; otherwise without regard to case and spaces, where that is one name
only; otherwise `id:3`, or `3` where the model has no names of digits. A name stands for all ids that have it. `cpp/src/spec.cpp` has
the same rule in C++; both are tested with the table `tests/data/class_names.json`.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Generic, TypeVar

from .errors import SpecError, check_range

Key = TypeVar("Key")
ClassKey = str | int
_ID = "id:"
_SHOWN = 20


def folded(name: str) -> str:
    """A name without case and with single spaces."""
    return " ".join(name.lower().split())


class NameIndex(Generic[Key]):
    """Keys by name: by its exact form first, then by each of `folds`, which make different names equal."""

    def __init__(self, names: Mapping[Key, str], folds: Sequence[Callable[[str], str]] = (folded,)) -> None:
        self._forms: list[tuple[Callable[[str], str], dict[str, dict[Key, str]]]] = []
        for fold in (str, *folds):
            found: dict[str, dict[Key, str]] = {}
            for key, name in names.items():
                found.setdefault(fold(name), {})[key] = name
            self._forms.append((fold, found))

    def keys(self, wanted: str) -> list[Key]:
        """The keys of all entries that are called `wanted`; none: [].

        Raises:
            SpecError: several names are equal to it only after folding.
        """
        for fold, names in self._forms:
            found = names.get(fold(wanted), {})
            if len(set(found.values())) > 1:
                several = ", ".join(repr(name) for name in dict.fromkeys(found.values()))
                raise SpecError(f"{wanted!r} may be {several}; write the name exactly as it is there")
            if found:
                return list(found)
        return []


def class_ids(labels: Mapping[int, str], count: int, wanted: Iterable[ClassKey]) -> list[int]:
    """Class ids of names and ids, each once, in the order of `wanted` and of the ids of a name.

    labels: names by id; ids without one go up to `count`, the number of classes.

    Raises:
        SpecError: nothing is wanted, or a class that the model does not have; the message lists close ones.
    """
    if isinstance(wanted, (str, bytes)) or not isinstance(wanted, Iterable):
        raise SpecError(f"classes are a list of names and ids, such as [{wanted!r}]; got {wanted!r}")
    wanted = list(wanted)
    if not wanted:
        raise SpecError("the list of classes is empty, which would keep nothing; name at least one class, or leave the list out")
    classes = _Classes(labels, count)
    return list(dict.fromkeys(one for key in wanted for one in classes.ids(key)))


def class_thresholds(labels: Mapping[int, str], count: int, wanted: Iterable[tuple[ClassKey, float]]) -> dict[int, float]:
    """Class id -> threshold, from names and ids; see `class_ids`.

    Raises:
        SpecError: an unknown class, one that is named twice, or a number that is no score.
    """
    found: dict[int, float] = {}
    classes = _Classes(labels, count)
    for key, threshold in wanted:
        check_range(f"the threshold of class {key!r}", threshold, 0, 1, SpecError)
        for class_id in classes.ids(key):
            if class_id in found:
                raise SpecError(
                    f"the class {labels.get(class_id, str(class_id))!r} (id {class_id}) has two thresholds; give it one"
                )
            found[class_id] = float(threshold)
    return found


def shared_names(labels: Mapping[int, str]) -> dict[str, list[int]]:
    """Names that several classes have -> their ids."""
    ids: dict[str, list[int]] = {}
    for class_id, name in labels.items():
        ids.setdefault(name, []).append(class_id)
    return {name: found for name, found in ids.items() if len(found) > 1}


def name_notes(labels: Mapping[int, str]) -> tuple[str, ...]:
    """A line for the user of a model in which names are no keys, or none."""
    several = shared_names(labels)
    if not several:
        return ()
    shown = "; ".join(f"{name!r}: {', '.join(map(str, ids))}" for name, ids in list(several.items())[:5])
    more = f" and {len(several) - 5} more" if len(several) > 5 else ""
    return (
        f"names that several classes have, by id: {shown}{more}; a name stands for all of them, id:{next(iter(several.values()))[0]} for one",
    )


def split_classes(text: str) -> tuple[str, ...]:
    """The names and ids of a comma-separated text. Double quotes hold a name that has commas or outer spaces: `"a, b",car`; two of them
    inside stand for one.

    Raises:
        SpecError: nothing in it, or a quote that does not end.
    """
    found = []
    for name, rest in _items(text):
        if rest:
            raise SpecError(f"{rest!r} stands behind the quoted name {name!r} in {text!r}; put a comma between names")
        found.append(name)
    if not found:
        raise SpecError(f"a list of classes names at least one, such as person,car; got {text!r}")
    return tuple(found)


def parse_class_thresholds(text: str) -> tuple[tuple[str, float], ...]:
    """`person=0.6,"a, b"=0.4` -> (("person", 0.6), ("a, b", 0.4)).

    Raises:
        SpecError: nothing in it, a part that is no CLASS=SCORE, or a class that is named twice.
    """
    found: list[tuple[str, float]] = []
    for name, rest in _items(text):
        if rest is None:
            name, equals, number = name.rpartition("=")
            name = name.strip()
        else:
            equals, number = rest[:1], rest[1:]
        try:
            threshold = float(number) if equals == "=" else math.nan
        except ValueError:
            threshold = math.nan
        if not 0 <= threshold <= 1 or (not name and rest is None):
            raise SpecError(f"thresholds of classes are CLASS=SCORE with scores from 0 to 1, comma-separated; got {text!r}")
        found.append((name, threshold))
    if not found:
        raise SpecError(f"thresholds of classes are CLASS=SCORE, such as person=0.6,car=0.4; got {text!r}")
    if len(dict(found)) < len(found):
        raise SpecError(f"thresholds of classes name one class twice; got {text!r}")
    return tuple(found)


def _items(text: str) -> Iterable[tuple[str, str | None]]:
    """(name, what stands behind its quotes; None: it has none) of each comma-separated part that is not blank."""
    at = 0
    while at <= len(text):
        while text[at : at + 1].isspace():
            at += 1
        if text[at : at + 1] != '"':
            end = _next_comma(text, at)
            if name := text[at:end].strip():
                yield name, None
            at = end + 1
            continue
        name, at = "", at + 1
        while True:
            end = text.find('"', at)
            if end < 0:
                raise SpecError(
                    f'a quote does not end in {text!r}; write names that have commas as "a, b", and a quote inside as two'
                )
            name, at = name + text[at:end], end + 1
            if text[at : at + 1] != '"':
                break
            name, at = name + '"', at + 1
        end = _next_comma(text, at)
        yield name, text[at:end].strip()
        at = end + 1


def _next_comma(text: str, at: int) -> int:
    """Where the next comma stands, or the text ends."""
    found = text.find(",", at)
    return len(text) if found < 0 else found


class _Classes:
    """The classes of a model. labels: names by id. count: number of classes."""

    def __init__(self, labels: Mapping[int, str], count: int) -> None:
        self.labels, self.count = labels, count
        self._index = NameIndex(labels)

    @cached_property
    def _has_numbers(self) -> bool:
        """Whether a class is called by a number, for which a number would be taken."""
        return any(label.strip().isdecimal() for label in self.labels.values())

    def ids(self, key: ClassKey) -> list[int]:
        """The ids of a name, or the id. Raises SpecError."""
        if isinstance(key, str):
            return self._named(key)
        try:
            if isinstance(key, bool):
                raise TypeError
            class_id = operator.index(key)
        except TypeError:
            raise SpecError(f"a class is a name or an id, such as 'person' or 0; got {key!r} ({type(key).__name__})") from None
        if not 0 <= class_id < self.count:
            raise SpecError(f"this model has no class of the id {class_id}; its ids are 0 to {self.count - 1}")
        return [class_id]

    def _named(self, name: str) -> list[int]:
        if found := self._index.keys(name):
            return found
        digits = name.strip()
        if digits.lower().startswith(_ID):
            digits = digits[len(_ID) :]
        elif self._has_numbers:
            digits = ""
        if digits.isascii() and digits.isdecimal() and len(digits) < 10 and int(digits) < self.count:
            return [int(digits)]
        raise SpecError(f"this model has no class {name!r}; {self._hint(name)}")

    def _hint(self, name: str) -> str:
        names = dict.fromkeys(self.labels.values())
        longer = [label for label in names if "," in label and folded(name) in map(folded, label.split(","))]
        if longer:
            return f'names that have commas stand in double quotes: "{longer[0]}"'
        if name.strip().isdecimal():
            return f"ids are written id:{name.strip()}, where names are numbers, and go from 0 to {self.count - 1}"
        by_fold = {folded(label): label for label in names}
        close = [by_fold[one] for one in difflib.get_close_matches(folded(name), by_fold, n=3)]
        if close:
            return f"did you mean {', '.join(close)}?"
        shown = list(names)[:_SHOWN]
        return f"it has: {', '.join(shown)}{' ...' if len(names) > len(shown) else ''}"
