"""Less than a model was trained with: boxes without masks; and fewer queries and decoder layers, which its authors evaluate without
further training.

RT-DETR (Zhao et al., arXiv:2304.08069, section 4.4): decoder layers from the end. D-FINE, DEIMv2 and ECDet: `eval_idx` and `num_queries` of
their configs. RF-DETR (Robinson et al., arXiv:2511.09554): both, queries by the score of their proposals. In all of them the queries
are the best positions of the encoder, so that fewer are the first of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import SourceError, number_of
from ..spec import DETECTION
from .families import BY_NAME
from .source import parameters_of

if TYPE_CHECKING:
    from torch import nn

    from ..bundle import Provenance
    from .source import Source

_HEADS = ("class_embed", "bbox_embed", "lqe_layers")  # of each decoder layer, in the detector, its decoder or both


def reduced(source: Source, queries: int | None, decoder_layers: int | None) -> Source:
    """A source with the first queries and decoder layers of another, whose module is changed in place.

    Args:
        queries, decoder_layers: how many; None keeps all.

    Raises:
        SourceError: a family that its authors do not evaluate so, or a number that the model does not have.
    """
    if queries is None and decoder_layers is None:
        return source
    family, module, spec = source.family, source.module, source.spec
    name, value = ("queries", queries) if queries is not None else ("decoder_layers", decoder_layers)
    if not family.reducible:
        known = ", ".join(one.title for one in BY_NAME.values() if one.reducible)
        raise SourceError(
            f"`{name}={value}`: {family.title} is not made for fewer queries or decoder layers than it was trained with; its authors "
            f"evaluate so: {known}. Leave it out"
        )
    notes = []
    outer: Any = module
    detector = outer.model if hasattr(outer.model, "model") else outer  # a mask head has the detector inside
    if queries is not None:
        total = spec.decode.num_queries
        _check("queries", queries, total)
        if getattr(detector.config, "learn_initial_query", False):
            raise SourceError(f"`queries={queries}`: this {family.title} has learned queries, of which none can be left out")
        for owner in (detector, detector.model):
            owner.config.num_queries = queries
            if hasattr(owner, "num_queries"):
                owner.num_queries = queries
        most = queries if family.max_detections is None else min(spec.decode.max_detections, queries * spec.decode.num_classes)
        spec = spec.with_decode(num_queries=queries, max_detections=most)
        notes.append(f"{queries} of {number_of(total, 'query')}")
    if decoder_layers is not None:
        total = len(detector.model.decoder.layers)
        _check("decoder_layers", decoder_layers, total)
        if spec.has_masks and decoder_layers < total:
            raise SourceError(
                f"`decoder_layers={decoder_layers}`: {family.title} predicts masks from all of its {number_of(total, 'decoder layer')} or from the "
                "last; leave it out, or give `queries` or `no_masks`"
            )
        _drop_layers(detector, decoder_layers)
        notes.append(f"{decoder_layers} of {number_of(total, 'decoder layer')}")
    return replace(source, spec=spec, notes=(*source.notes, ", ".join(notes)), provenance=_counted(source, module))


def without_masks(source: Source) -> Source:
    """The detector of a model with a mask head, whose module is changed in place.

    Raises:
        SourceError: it has no mask head.
    """
    spec, module = source.spec, source.module
    if not spec.has_masks:
        raise SourceError(f"`no_masks` is for models with masks, and this {source.family.title} has boxes alone; leave it out")
    spec = replace(spec, task=DETECTION, decode=replace(spec.decode, mask_stride=0))
    if spec.text is not None:  # its boxes do not depend on the mask head, which is left out of the graph
        return replace(source, spec=spec, notes=(*source.notes, "no masks"))
    detector: Any = module.model
    if source.family.masks_at:
        detector = module  # its boxes start from its masks
    elif not hasattr(detector, "model"):
        # A class of `detrt.models.layers`: the detector of transformers with a head.
        detector = module
        for name in [name for name in (*module._modules, *module._parameters) if name.startswith("mask_")]:
            delattr(detector, name)
        detector.__class__ = type(module).__base__
    return replace(source, module=detector, spec=spec, provenance=_counted(source, detector), notes=(*source.notes, "no masks"))


def _counted(source: Source, module: nn.Module) -> Provenance:
    """The provenance with the parameters of what is left."""
    return replace(source.provenance, parameters=parameters_of(module))


def _check(name: str, value: int, total: int) -> None:
    if not 1 <= value <= total:
        raise SourceError(f"`{name}` must be from 1 to {total} for this model; got {value}")


def _drop_layers(detector: Any, count: int) -> None:
    """Keep the first decoder layers and their heads, in place; the result is that of the last one kept."""
    from torch import nn

    decoder: nn.Module = detector.model.decoder
    decoder.layers = decoder.layers[:count]  # type: ignore[index,assignment]
    for owner in (detector, decoder):
        for name in _HEADS:
            heads = getattr(owner, name, None)
            if isinstance(heads, nn.ModuleList):
                setattr(owner, name, heads[:count])
        if hasattr(owner, "eval_idx"):
            owner.eval_idx = count - 1
        owner.config.decoder_layers = count
        if hasattr(owner.config, "eval_idx"):
            owner.config.eval_idx = count - 1
