"""Writes `places.py` from the installed transformers: `python -m detrt.models.write_fingerprints`.

Run it after reading the diff of every place that has changed, and after the export tests pass.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import transformers

from .families import FAMILIES
from .rewrites import REWRITES, find, fingerprint


def collect() -> dict[str, str]:
    """ "modeling_module:place" -> fingerprint, for every rewrite of every family."""
    found = {}
    for family in FAMILIES:
        package = family.model_type.replace("-", "_")
        module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
        for name in family.rewrites:
            for place in REWRITES[name].places:
                function = find(module, place)
                if function is not None:
                    found[f"modeling_{package}:{place}"] = fingerprint(function)
    return dict(sorted(found.items()))


def main() -> None:
    lines = [
        '"""Fingerprints of the library code that the rewrites rely on. Written by make_places.py."""',
        "",
        f'TRIED = ("{transformers.__version__}",)',
        "",
        "FINGERPRINTS: dict[str, tuple[str, ...]] = {",
        *(f'    "{place}": ("{digest}",),' for place, digest in collect().items()),
        "}",
        "",
    ]
    Path(__file__).with_name("fingerprints.py").write_text("\n".join(lines), "utf-8")


if __name__ == "__main__":
    main()
