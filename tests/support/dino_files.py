"""State dicts of DINO and Co-DINO, loaded as the product loads them."""

from __future__ import annotations

from detrt.models.checkpoints.loader import load, recognise, spec_of


def load_dino(state, *, variant=None, labels=None, stored=tuple("abcdefg"), name="model"):
    """(module, spec, family, report). stored: the small models have seven classes, which no label set has."""
    variant = variant or recognise(state)
    module, family, report = load(state, variant, {}, name)
    return module, spec_of(module, family, report, labels=labels, stored=stored, first=None, ref=name), family, report
