"""Facts of an original model that no tensor of its file tells: stated by the caller, else in the file's settings, else as published."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ArgumentError, SourceError, number_of

ACTIVATIONS = ("relu", "gelu", "silu")


class Assumed:
    """Answers for the facts of one file. What was taken as published is kept for `note`.

    Args:
        args: settings of the training in the file. stated: fact -> value, of `--assume`. queries: of `--queries`.
    """

    def __init__(
        self, args: Mapping[str, Any], ref: str, stated: Mapping[str, str] | None = None, queries: int | None = None
    ) -> None:
        self.args, self.ref = dict(args), ref
        self.stated: dict[str, str] = dict(stated or {})
        self._queries = queries
        self._own: list[str] = []  # what has an option of its own
        self._published: dict[str, str] = {}
        self._said: list[str] = []
        self._asked: list[str] = []

    def number(self, name: str, published: int, *keys: str, divides: int = 0) -> int:
        """A count, at least 1. keys: its names among the settings. divides: of heads, the channels that they share."""
        value = int(self._take(name, str(published), "an integer from 1", r"[1-9]\d{0,6}", keys))
        if divides and divides % value:
            raise SourceError(f"'{self.ref}': {name} must divide its {divides} channels; got {value}")
        return value

    def temperature(self, title: str, published: int) -> int:
        """The temperature of a position embedding, which IDEA-Research states for height and for width: detrt has one for both."""
        told = self._told(("pe_temperatureH", "pe_temperatureW"))
        self.need(title, pe_temperatureH=told, pe_temperatureW=told)
        return self.number("temperature", published, "pe_temperatureH", "pe_temperatureW", "pe_temperature")

    def numbers(self, name: str, published: Sequence[int], *keys: str) -> list[int]:
        """Integers, as 3+6+9."""
        text = self._take(name, _text(published), "integers such as 3+6+9", r"\d{1,6}(\+\d{1,6})*", keys)
        return [int(part) for part in text.split("+") if part]

    def choice(self, name: str, published: str, allowed: Sequence[str], *keys: str) -> str:
        """One of some words, which detrt computes."""
        return self._take(name, published, " or ".join(allowed), "|".join(map(re.escape, allowed)), keys)

    def queries(self, published: int, *keys: str) -> int:
        """Queries that are selected, of a model whose tensors do not depend on their number."""
        if self._queries is not None:
            if self._queries < 1:
                raise SourceError(f"`queries` must be at least 1; got {self._queries}")
            self._said.append(f"{number_of(self._queries, 'query')} as stated (published: {published})")
            return self._queries
        if (value := self._told(keys)) is None:
            self.own(number_of(published, "query"), "`queries`")
            return published
        return int(self._checked("queries", str(value), "an integer from 1", r"[1-9]\d{0,6}", "in its settings"))

    def own(self, fact: str, option: str) -> None:
        """Say a fact that was taken as published and that an option of its own changes."""
        self._own.append(f"{fact} ({option})")

    def need(self, title: str, **wanted: object) -> None:
        """Refuse a file whose settings say another value than the one that detrt computes, where they say any."""
        for key, value in wanted.items():
            got = self.args.get(key, value)
            if got is not None and _text(got) != _text(value) and not (value is None and not got):
                raise SourceError(
                    f"'{self.ref}' was trained with {key} = {got!r} (its own settings say so), and detrt computes {title} with {value!r} alone; export it with the authors' code, and build from that ONNX file"
                )

    def check(self) -> None:
        """Raise SourceError for a stated fact that was not asked for."""
        for name, value in self.stated.items():
            if name not in self._asked:
                takes = ", ".join(self._asked)
                hint = f"of this file no tensor tells: {takes}" if takes else "its tensors tell all; leave it out"
                raise SourceError(f"`assume={name}={value}`: '{self.ref}' has no such fact; {hint}")

    def notes(self) -> list[str]:
        """What was stated, and what was assumed, with the options that change it."""
        parts = [*self._own]
        if self._published:
            named = ", ".join(f"{name}={value}" for name, value in self._published.items())
            parts.append(f"{named} (`assume=NAME=VALUE`)")
        line = [f"assumed as published, no tensor tells: {', '.join(parts)}"] if parts else []
        return [*self._said, *line]

    def _take(self, name: str, published: str, kind: str, pattern: str, keys: Sequence[str]) -> str:
        self._asked.append(name)
        if name in self.stated:
            value = self._checked(name, self.stated[name], kind, pattern, f"by `assume={name}={self.stated[name]}`")
            self._said.append(f"{name} {value} as stated (published: {published})")
            return value
        if (told := self._told(keys)) is not None:
            return self._checked(name, _text(told), kind, pattern, "in its settings")
        self._published[name] = published
        return published

    def _told(self, keys: Sequence[str]) -> Any:
        """The first of these settings that the file has; None: it has none."""
        return next((self.args[key] for key in keys if self.args.get(key) is not None), None)

    def _checked(self, name: str, value: str, kind: str, pattern: str, where: str) -> str:
        text = value.strip().lower()
        if not re.fullmatch(pattern, text):
            raise SourceError(f"'{self.ref}': {name} must be {kind}; got {value!r} {where}")
        return text


def _text(value: object) -> str:
    """A value as `--assume` has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, (list, tuple)):
        return "+".join(map(str, value))
    return str(value)


def parse_assumed(text: str) -> dict[str, str]:
    """ "heads=4,activation=relu" as a dictionary.

    Raises:
        SourceError: another form, or a name twice.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (one.strip() for one in part.partition("="))
        if not equals or not name or not value:
            raise SourceError(f"`assume` must be comma-separated NAME=VALUE, such as heads=4,activation=gelu; got {text!r}")
        if name in found:
            raise SourceError(f"`assume` gives {name!r} twice: {text!r}")
        found[name] = value
    return found


def stated_text(value: object) -> str:
    """What a caller states, as `--assume` has it: a text of that form, or a dictionary.

    Raises:
        SourceError: see `parse_assumed`. ArgumentError: something else.
    """
    if isinstance(value, Mapping):
        value = ",".join(f"{name}={_text(one)}" for name, one in value.items())
    if not isinstance(value, str):
        raise ArgumentError(f"assume must be a text such as heads=4,activation=gelu, or a dictionary; got {type(value).__name__}")
    return ",".join(f"{name}={one}" for name, one in parse_assumed(value).items())
