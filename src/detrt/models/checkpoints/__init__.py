"""Original checkpoints by family: which one a state dict is, its config, and its name map."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...errors import SourceError
from ..families import BY_NAME, Family
from . import d_fine, deimv2, detr, grounding_dino, rf_detr, rt_detr
from . import deformable_detr as deformable
from .key_map import LoadReport, fit, rename
from .shapes import Shapes

if TYPE_CHECKING:
    from torch import Tensor, nn

# variant -> (module of its map, name in the family table, whose code it is)
FORMATS: dict[str, tuple[ModuleType, str, str]] = {
    "detr": (detr, "detr", "facebookresearch DETR"),
    "detr-dc5": (detr, "detr", "facebookresearch DETR, DC5"),
    "deformable_detr": (deformable, "deformable_detr", "fundamentalvision Deformable DETR"),
    "deformable_detr-dc5": (deformable, "deformable_detr", "fundamentalvision Deformable DETR, DC5"),
    "rt_detr": (rt_detr, "rt_detr", "lyuwenyu RT-DETR"),
    "rt_detr_v2": (rt_detr, "rt_detr_v2", "lyuwenyu RT-DETRv2"),
    "rt_detr_v2-discrete": (rt_detr, "rt_detr_v2", "lyuwenyu RT-DETRv2, discrete sampling"),
    "deim-rt_detr_v2": (rt_detr, "rt_detr_v2", "DEIM on RT-DETRv2"),
    "d_fine": (d_fine, "d_fine", "Peterande D-FINE"),
    "deim": (d_fine, "d_fine", "DEIM on D-FINE"),
    "deimv2": (deimv2, "deimv2", "Intellindust DEIMv2"),
    "rf_detr": (rf_detr, "rf_detr", "Roboflow RF-DETR"),
    "grounding_dino": (grounding_dino, "grounding_dino", "IDEA-Research Grounding DINO"),
}


def recognise(keys: Iterable[str]) -> str | None:
    """The variant that the keys belong to; None for other models. "d_fine" may also be DEIM on D-FINE."""
    known = set(keys)
    for name, module in (
        ("grounding_dino", grounding_dino),
        ("detr", detr),
        ("deformable_detr", deformable),
        ("rf_detr", rf_detr),
        ("deimv2", deimv2),
        ("d_fine", d_fine),
    ):
        if module.recognise(known):
            return name
    return rt_detr.recognise(known)


def load(state: Mapping[str, Tensor], variant: str, args: Mapping[str, Any], ref: str) -> tuple[nn.Module, Family, LoadReport]:
    """The transformers module of a state dict, with every key used or named.

    Raises:
        SourceError: keys that are missing, unexpected or misshapen, or a related model that is out of reach.
    """
    format_, family_name, title = FORMATS[variant]
    told = recognise(state)
    if told is not None and FORMATS[told][0] is not format_:
        raise SourceError(
            f"'{ref}' has the keys of {FORMATS[told][2]}, not of {title}: it is another family; leave --family out or "
            f"give --family {told}"
        )
    family = BY_NAME[family_name]
    report = LoadReport(format=title)
    shapes = Shapes(state, ref)
    found = format_.settings(shapes, dict(args), variant, report)
    dilated = bool(found.pop("dilation", False))
    normalize = bool(found.pop("normalize", family.normalize))
    side = report.inferred.pop("size", None)
    report.inferred = {**_facts(found, dilated), **({"size": side} if side else {})}
    module = _build(family, variant, found, ref)
    if hasattr(format_, "prepare"):
        format_.prepare(module, shapes)
    table = format_.table(shapes) if hasattr(format_, "table") else format_.TABLE
    stored = {**state, **format_.values(shapes)} if hasattr(format_, "values") else state
    skipped = {**format_.TRAINING_ONLY, **(format_.not_run(shapes) if hasattr(format_, "not_run") else {})}
    fit(module, rename(stored, table, skipped, report), state, report, ref)
    if hasattr(format_, "finish"):
        format_.finish(module)
    if dilated:
        from .timm import dilate_last_stage

        dilate_last_stage(module.model.backbone.model)  # type: ignore[union-attr,arg-type]
    if side:
        family = replace(family, size=int(side))
    if normalize != family.normalize:
        family = replace(family, normalize=normalize)
    return module.eval().requires_grad_(False), family, report


def _facts(found: Mapping[str, Any], dilated: bool) -> dict[str, object]:
    """The settings that people know a model by."""
    backbone = found["backbone_config"]
    levels = found.get("num_feature_levels", 1)
    facts: dict[str, object] = {"classes": found["num_labels"]} if "num_labels" in found else {}
    facts |= {
        "queries": found.get("two_stage_num_proposals") if found.get("two_stage") else found["num_queries"],
        "width": found["d_model"],
        "encoder layers": found.get("encoder_layers", 0),
        "decoder layers": found["decoder_layers"],
        "levels": levels,
    }
    if "decoder_n_points" in found:
        facts["points"] = found["decoder_n_points"]
    depth = backbone.get("stage_num_blocks") or backbone.get("depths") or backbone.get("num_hidden_layers")
    facts["backbone"] = (
        f"{backbone['model_type']} {depth} x "
        f"{backbone.get('hidden_sizes') or backbone.get('hidden_size') or backbone.get('embed_dim')}"
    )
    if dilated:
        facts["dilation"] = "yes"
    if "two_stage" in found:
        facts["two-stage"] = "yes" if found["two_stage"] else "no"
        facts["box refinement"] = "yes" if found["with_box_refine"] else "no"
    return facts


def _build(family: Family, variant: str, settings: dict[str, Any], ref: str) -> nn.Module:
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoModelForObjectDetection, AutoModelForZeroShotObjectDetection

    backbone = dict(settings.pop("backbone_config"))
    try:
        inner = CONFIG_MAPPING[backbone.pop("model_type")](**backbone)
        if family.text:
            text = dict(settings.pop("text_config"))
            settings["text_config"] = CONFIG_MAPPING[text.pop("model_type")](**text)
        config = CONFIG_MAPPING[family.model_type](backbone_config=inner, **settings)
        config._attn_implementation = "eager"
        with torch.random.fork_rng(devices=[]):
            if variant == "deimv2":
                from ..arch.deimv2 import PublishedDeimv2

                return PublishedDeimv2(config)
            if variant.startswith("deim"):
                from ..arch import deimv2 as deim

                return (deim.DeimDFine if variant == "deim" else deim.DeimRtDetrV2)(config)
            auto = AutoModelForZeroShotObjectDetection if family.text else AutoModelForObjectDetection
            return auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    except (
        StrictDataclassError,
        ValueError,
        TypeError,
        RuntimeError,
        AttributeError,
        ZeroDivisionError,
    ) as error:
        raise SourceError(
            f"'{ref}': its tensors give sizes that {family.title} cannot have: {' '.join(str(error).split())[:300]}"
        ) from None
