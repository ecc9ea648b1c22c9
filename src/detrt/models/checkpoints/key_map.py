"""Key maps: from the keys of a published checkpoint to the names of the module that runs it.

A map is a table of (original, target) lines, so that it can be read next to the authors' code:

    encoder.lateral_convs.#.**            model.encoder.lateral_convs.#.**
    decoder.layers.#.norm1.@              model.decoder.layers.#.self_attn_layer_norm.@
    decoder.layers.#.self_attn.in_proj_@  model.decoder.layers.#.self_attn.{q,k,v}_proj.@

`#` is a number, `@` one word without a dot, `**` the rest of the key; the target's marks are filled in
order. `{q,k,v}` splits a stacked matrix into so many equal parts along its first axis.
The first line that fits a key counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import SourceError, number_of
from ..checks import check_channels

if TYPE_CHECKING:
    from torch import Tensor, nn

Table = Sequence[tuple[str, str]]

_MARKS = {"#": r"(\d+)", "@": r"([A-Za-z0-9_]+)", "**": r"(.+)"}
_TOKEN = re.compile(r"\*\*|#|@")
_SPLIT = re.compile(r"\{([\w,]+)\}")
# A step counter that only matters while BatchNorm is trained.
COUNTERS = "num_batches_tracked"
_COUNTED = {
    COUNTERS: "step counter of BatchNorm",
    **dict.fromkeys(("total_ops", "total_params"), "counter that the profiler thop leaves in a model"),
}


@dataclass(slots=True)
class LoadReport:
    """Whose format a checkpoint file has, and what became of each of its keys.

    inferred: fact -> value, as read from tensor shapes. notes: decisions a user should know of.
    used: original key -> target names. skipped: original key -> why the module does not need it.
    """

    format: str = ""
    weights: str = ""
    inferred: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    used: dict[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """The report as one line of text."""
        head = f"{self.format} ({self.weights}): {self.sizes()}; {number_of(len(self.used), 'key')} used"
        if self.skipped:
            head += f", {len(self.skipped)} not needed at inference"
        parts = sorted({_part(key) for key in self.skipped if not key.endswith(COUNTERS)})
        return "; ".join([f"{head} ({', '.join(parts)})" if parts else head, *self.notes])

    def sizes(self) -> str:
        """`inferred` as text."""
        return ", ".join(f"{name} {value}" for name, value in self.inferred.items())


def _part(key: str) -> str:
    """The part of a model that a key belongs to: its first two words, three under a "transformer"."""
    words = key.split(".")
    return ".".join(words[: 3 if "transformer" in words[:2] else 2])


def compile_table(table: Table) -> list[tuple[re.Pattern[str], str]]:
    return [(_pattern(original), target) for original, target in table]


def first_match(keys: Iterable[str], table: Table) -> tuple[str, str] | None:
    """The first line of a table that any key fits: (key, second part of the line); None where none does."""
    keys = list(keys)
    for pattern, what in compile_table(table):
        found = next((key for key in keys if pattern.fullmatch(key)), None)
        if found is not None:
            return found, what
    return None


def _pattern(text: str) -> re.Pattern[str]:
    parts, last = [], 0
    for mark in _TOKEN.finditer(text):
        parts += [re.escape(text[last : mark.start()]), _MARKS[mark.group()]]
        last = mark.end()
    return re.compile("".join([*parts, re.escape(text[last:])]))


def _fill(target: str, values: Iterable[str]) -> str:
    found = iter(values)
    return _TOKEN.sub(lambda _: next(found), target)


def rename(state: Mapping[str, Tensor], table: Table, skipped: Mapping[str, str], report: LoadReport) -> dict[str, Tensor]:
    """Target names and tensors of every key of `state`; unknown keys are left out and not reported as used."""
    rules = compile_table(table)
    reasons = [(_pattern(text), why) for text, why in skipped.items()]
    renamed: dict[str, Tensor] = {}
    for key, tensor in state.items():
        why = _COUNTED.get(key.rpartition(".")[2])
        why = why or next((why for pattern, why in reasons if pattern.fullmatch(key)), None)
        if why is not None:
            report.skipped[key] = why
            continue
        for pattern, target in rules:
            match = pattern.fullmatch(key)
            if match is None:
                continue
            names, tensors = (target,), (tensor,)
            split = _SPLIT.search(target)
            if split:
                parts = split[1].split(",")
                if tensor.ndim < 1 or tensor.shape[0] % len(parts):
                    raise SourceError(
                        f"'{key}' has shape {list(tensor.shape)}; its first axis must divide by {len(parts)} ({', '.join(parts)})"
                    )
                names = tuple(target.replace(split[0], part) for part in parts)
                tensors = tensor.chunk(len(parts))
            names = tuple(_fill(name, match.groups()) for name in names)
            twice = [name for name in names if name in renamed]
            if twice:
                raise SourceError(f"'{key}' and another key are both '{twice[0]}'; the file mixes two models")
            renamed.update(zip(names, tensors, strict=True))
            report.used[key] = names
            break
    return renamed


def fit(
    module: nn.Module,
    renamed: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    report: LoadReport,
    ref: str,
) -> None:
    """Copy the renamed tensors into a module; every tensor of either side must have its counterpart.

    Raises:
        SourceError: missing, unexpected or misshapen tensors; the message counts them and names some.
    """
    wanted = {name: tensor for name, tensor in module.state_dict().items() if not name.endswith(COUNTERS)}
    groups = _aliases(module)
    given = {alias for name in renamed for alias in groups.get(name, (name,))}
    missing = sorted(set(wanted) - given)
    origin = {name: key for key, names in report.used.items() for name in names}
    unexpected = sorted(
        {
            *(set(state) - set(report.used) - set(report.skipped)),
            *(origin[n] for n in renamed if n not in wanted),
        }
    )
    misshapen = [
        f"{origin[n]} {list(t.shape)} instead of {list(wanted[n].shape)}"
        for n, t in renamed.items()
        if n in wanted and wanted[n].shape != t.shape
    ]
    problems = [
        f"{len(names)} {kind} (e.g. {', '.join(names[:3])})"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if names
    ]
    if misshapen:
        check_channels(module, ref, renamed)
    if problems:
        raise SourceError(
            f"'{ref}' does not fit {report.format} of {report.sizes()}: {'; '.join(problems)}. The file is incomplete or of "
            "another model; name the right one with `family`"
        )
    _untie(module, groups, renamed)
    module.load_state_dict({name: tensor.to(wanted[name].dtype) for name, tensor in renamed.items()}, strict=False)


def _aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Parameter name -> all names of the same parameter, where it has several."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {name: tuple(names) for names in by_id.values() if len(names) > 1 for name in names}


def _untie(module: nn.Module, groups: Mapping[str, tuple[str, ...]], renamed: Mapping[str, Tensor]) -> None:
    """Give the names of one parameter their own copies where the checkpoint has different values for them."""
    for names in set(groups.values()):
        given = [name for name in names if name in renamed]
        if all(renamed[name].equal(renamed[given[0]]) for name in given[1:]):
            continue
        for name in given[1:]:
            owner, _, leaf = name.rpartition(".")
            parent = module.get_submodule(owner)
            setattr(
                parent,
                leaf,
                type(getattr(parent, leaf))(getattr(parent, leaf).detach().clone(), requires_grad=False),
            )
