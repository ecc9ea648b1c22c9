"""The rows of the families, and their random models by kind, as parameters of tests: a new family is in them without an edit."""

from __future__ import annotations

from typing import Any

from detrt.models.families import BY_NAME, random_models

FAMILIES = tuple(family for family in BY_NAME.values() if not family.own)  # of transformers

Models = dict[str, tuple[str, Any, Any]]  # name -> (family, full-size settings, tiny settings on top of them)
SIZES: Models = {}  # further published sizes of a model
TEXT_MODELS: Models = {}  # of families that take a prompt
OWN_MODELS: Models = {}  # without a configuration of transformers
MODELS: Models = {}  # all others
for _name, (_family, _model) in random_models():
    _kind = SIZES if _model.size else TEXT_MODELS if _family.text else OWN_MODELS if _family.build_random is not None else MODELS
    _kind[_name] = (_family.name, _model.full, _model.tiny)
