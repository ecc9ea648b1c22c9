"""Add the installed transformers to the rows of the families: `python -m detrt.models.write_fingerprints`.

Run it after reading the diff of every place that has changed, and after `make test-transformers` passes with that version; the
oldest version first. A family that the version lacks, or that does not export with it, has a newer version in its `since`.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import transformers

from .families import FILES, TESTED, Family
from .families.base import modeling_name
from .rewrites import find, fingerprint


def is_read(family: Family, version: str) -> bool:
    """Whether a family is read with a version, by its row; with one that was not tested it is."""
    return bool(family.model_type) and (version not in TESTED or TESTED.index(version) >= TESTED.index(family.since))


def collect(file: ModuleType) -> dict[str, str]:
    """Place -> fingerprint of the installed code, of every rewrite of the families in a file."""
    found = {}
    for family in file.FAMILIES:
        if is_read(family, transformers.__version__):
            module = importlib.import_module(modeling_name(family))
            found |= {place: fingerprint(find(module, place)) for places in family.rewrites.values() for place in places}
    return found


def with_fingerprints(source: str, found: dict[str, str]) -> str:
    """The text of a family's file whose fingerprints are those of `found`, too."""
    lines = source.splitlines(keepends=True)
    rows = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict)]
    pairs = [(key.value, value) for row in rows for key, value in zip(row.keys, row.values, strict=True)
             if isinstance(key, ast.Constant) and key.value in found and isinstance(value, ast.Tuple)]  # fmt: skip
    for place, value in sorted(pairs, key=lambda pair: -pair[1].lineno):
        known = ast.literal_eval(value)
        if found[place] in known or value.end_lineno is None:
            continue
        first, last = value.lineno - 1, value.end_lineno - 1
        before, after = lines[first][: value.col_offset], lines[last][value.end_col_offset :]
        lines[first : last + 1] = [f"{before}{(*known, found[place])!r}{after}"]
    return "".join(lines)


def main() -> None:
    for file in FILES:
        path = Path(str(file.__file__))
        path.write_text(with_fingerprints(path.read_text("utf-8"), collect(file)), "utf-8")
    if transformers.__version__ not in TESTED:
        path = Path(__file__).with_name("families") / "base.py"
        text = path.read_text("utf-8")
        path.write_text(
            text.replace(f"TESTED = {TESTED!r}".replace("'", '"'), f"TESTED = {(*TESTED, transformers.__version__)!r}"), "utf-8"
        )


if __name__ == "__main__":
    main()
