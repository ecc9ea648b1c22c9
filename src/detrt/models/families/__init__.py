"""The families that detrt exports, one file each; a row says what is known of one, see `base.Family`.

Nothing outside this folder names a family: all other code goes through these rows. A family of one's own is registered with
`register`, for as long as the process runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from ...errors import SourceError
from .base import IMAGENET_MEAN, IMAGENET_STD, MASK_CLASS, TESTED, Family, Format, Processor, RandomModel, Upstream

__all__ = [
    "BY_NAME",
    "FILES",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "MASK_CLASS",
    "TESTED",
    "Family",
    "Format",
    "Processor",
    "RandomModel",
    "by_model_type",
    "first_example",
    "formats",
    "having",
    "processors",
    "random_models",
    "register",
    "upstreams",
]

# In the order in which they are listed.
_NAMES = (
    *("detr", "table_transformer", "conditional_detr", "dab_detr", "deformable_detr"),
    *("rt_detr", "rt_detr_v2", "d_fine", "deimv2", "pp_doclayout", "lw_detr", "rf_detr", "yolos", "eomt", "mask2former"),
    *("grounding_dino", "mm_grounding_dino", "omdet_turbo", "sam3", "owl", "dino", "ecdet", "ltdetr_v2"),
)
FILES = tuple(import_module(f".{name}", __name__) for name in _NAMES)
BY_NAME: dict[str, Family] = {}


def register(*families: Family) -> None:
    """Add families, so that all of detrt knows them.

    Raises:
        SourceError: a name that another family has, or that is taken for a checkpoint file or a random model.
    """
    for family in families:
        variants, models = formats(), dict(random_models())
        taken = [one.name for one in family.formats if one.name in variants]
        taken += [one.name for one in family.random if one.name in models]
        taken += [family.name] * (family.name in BY_NAME)
        if taken:
            raise SourceError(
                f"there is a family, checkpoint format or random model of the name {taken[0]!r} already; choose another"
            )
        BY_NAME[family.name] = family


def by_model_type() -> dict[str, Family]:
    """`model_type` of a config.json of transformers -> family; that of larger models -> the family of the detector inside."""
    rows = [family for family in BY_NAME.values() if not family.own]
    return {kind: family for family in rows for kind in (family.model_type, *family.inside)}


def formats() -> dict[str, tuple[Family, Format]]:
    """Variant, as `--family` names it -> the family and the format of its checkpoint files."""
    return {one.name: (family, one) for family in BY_NAME.values() for one in family.formats}


def random_models() -> Iterator[tuple[str, tuple[Family, RandomModel]]]:
    """Name -> the family and a model of random weights."""
    for family in BY_NAME.values():
        for model in family.random:
            yield model.name, (family, model)


def having(trait: str) -> tuple[str, ...]:
    """Names of the families of whose engines something was measured or reported; see `Family.engines`."""
    return tuple(family.name for family in BY_NAME.values() if trait in family.engines)


def upstreams() -> list[Upstream]:
    """The authors' models that `--family` names for a folder in transformers format."""
    return [family.upstream for family in BY_NAME.values() if family.upstream is not None]


def first_example() -> str:
    """A checkpoint on the hub, for messages."""
    return next(family.example for family in BY_NAME.values())


def processors() -> dict[str, Processor]:
    """Name of an image processor of transformers -> its row."""
    return {family.processor.name: family.processor for family in BY_NAME.values()}


register(*(family for file in FILES for family in file.FAMILIES))
