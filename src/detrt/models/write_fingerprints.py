"""Add the installed transformers to `fingerprints.py`: `python -m detrt.models.write_fingerprints [FAMILY ...]`.

Run it after reading the diff of every place that has changed, and after `make test-transformers` passes with that version; the
oldest version first. FAMILY: exists in that version and does not export with it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection
from pathlib import Path

import transformers

from .families import FAMILIES
from .fingerprints import FINGERPRINTS, LACKING
from .rewrites import REWRITES, find, fingerprint


def collect(without: Collection[str] = ()) -> tuple[dict[str, str], tuple[str, ...]]:
    """ "modeling_module:place" -> fingerprint, for every rewrite of every family, and the families that are missing.

    Args:
        without: families that are left out, and count as missing.
    """
    found, lacking = {}, []
    for family in FAMILIES:
        package = family.model_type.replace("-", "_")
        try:
            module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
        except ModuleNotFoundError:
            module = None
        if module is None or family.name in without:
            lacking.append(family.name)
            continue
        for name in family.rewrites:
            for place in REWRITES[name].places:
                function = find(module, place)
                if function is not None:
                    found[f"modeling_{package}:{place}"] = fingerprint(function)
    return found, tuple(lacking)


def main() -> None:
    found, lacking = collect(sys.argv[1:])
    versions = {**LACKING, transformers.__version__: lacking}
    places = {
        place: tuple(dict.fromkeys((*FINGERPRINTS.get(place, ()), *([found[place]] if place in found else []))))
        for place in sorted({*FINGERPRINTS, *found})
    }
    lines = [
        '"""Fingerprints of the library code that the rewrites rely on. Written by write_fingerprints.py."""',
        "",
        "# Version of transformers that the export tests ran with -> families that it lacks, or that do not export with it.",
        f"LACKING: dict[str, tuple[str, ...]] = {versions!r}",
        "TESTED = tuple(LACKING)",
        "",
        f"FINGERPRINTS: dict[str, tuple[str, ...]] = {places!r}",
        "",
    ]
    Path(__file__).with_name("fingerprints.py").write_text("\n".join(lines), "utf-8")


if __name__ == "__main__":
    main()
