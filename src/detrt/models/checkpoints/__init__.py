"""Original checkpoints: which model a state dict is, its sizes, its key map, and the module with its weights.

A format is a module of this package. It has

    recognise(keys)       the variant that the keys belong to, or None
    settings(shapes, assumed, variant, report)
                          what `build` takes, from tensor shapes and what they do not tell; "family" may hold fields of the
                          family's row that differ in this file
    TABLE, table(shapes)  its key map, see `key_map`
    SKIPPED, skipped(shapes)
                          key pattern -> why the module does not need it

and, where it needs them: RELATIVES (key pattern -> the related model that it tells, which is refused),
build(settings, variant), facts(settings), values(shapes) (tensors in the module's form instead of the file's),
prepare(module, shapes) before the weights are copied, finish(module) and check(module, shapes) after it, names_start(file), and
input_spec(config, family, attend_padding=...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import SourceError
from ...spec import ModelSpec
from ..families import BY_NAME, Family
from ..labels import choose
from ..preprocessor import read_input_spec
from ..source import auto_class, make_spec
from . import d_fine, deformable_detr, deimv2, detr, dino, edgecrafter, grounding_dino, mm_grounding_dino, rf_detr, rt_detr
from .assumed import Assumed
from .key_map import LoadReport, Table, first_match, fit, rename
from .shapes import Shapes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .state_file import StateFile


class Format(NamedTuple):
    """module: of the format. family: name of the family's row. titles: whose checkpoints they are."""

    module: ModuleType
    family: str
    titles: tuple[str, ...]


# variant, as `--family` names it -> its format
FORMATS: dict[str, Format] = {
    "detr": Format(detr, "detr", ("facebookresearch DETR",)),
    "detr-dc5": Format(detr, "detr", ("facebookresearch DETR, DC5",)),
    "deformable_detr": Format(deformable_detr, "deformable_detr", ("fundamentalvision Deformable DETR",)),
    "deformable_detr-dc5": Format(deformable_detr, "deformable_detr", ("fundamentalvision Deformable DETR, DC5",)),
    "rt_detr": Format(rt_detr, "rt_detr", ("lyuwenyu RT-DETR",)),
    "rt_detr_v2": Format(rt_detr, "rt_detr_v2", ("lyuwenyu RT-DETRv2",)),
    "rt_detr_v2-discrete": Format(rt_detr, "rt_detr_v2", ("lyuwenyu RT-DETRv2, discrete sampling",)),
    "deim-rt_detr_v2": Format(rt_detr, "rt_detr_v2", ("DEIM on RT-DETRv2",)),
    "d_fine": Format(d_fine, "d_fine", ("Peterande D-FINE",)),
    "d_fine_seg": Format(d_fine, "d_fine", ("ArgoHA D-FINE-seg",)),
    "deim": Format(d_fine, "d_fine", ("DEIM on D-FINE",)),
    "rt_detr_v4": Format(d_fine, "d_fine", ("RT-DETRs RT-DETRv4",)),
    "deimv2": Format(deimv2, "deimv2", ("Intellindust DEIMv2",)),
    "ecdet": Format(edgecrafter, "ecdet", ("Intellindust ECDet",)),
    "ecseg": Format(edgecrafter, "ecdet", ("Intellindust ECSeg",)),
    "rf_detr": Format(rf_detr, "rf_detr", ("Roboflow RF-DETR",)),
    "grounding_dino": Format(grounding_dino, "grounding_dino", ("IDEA-Research Grounding DINO",)),
    "mm_grounding_dino": Format(
        mm_grounding_dino, "mm_grounding_dino", ("mmdetection MM-Grounding-DINO", "iSEE-Laboratory LLMDet")
    ),
    "co_dino": Format(dino, "co_dino", ("Sense-X Co-DETR", "mmdetection CO-DETR")),
    "dino": Format(dino, "dino", ("IDEA-Research DINO", "mmdetection DINO")),
}

# Models whose keys are like those of a format and that are not read.
RELATIVES = (
    ("decoder.keypoint_embedding.weight", "an ECPose of EdgeCrafter, for keypoints; detrt reads ECDet and ECSeg"),
    ("detr.transformer.**", "a facebookresearch DETR for panoptic segmentation; detrt reads the detectors"),
    (
        "transformer.decoder.layers.0.sa_qcontent_proj.**",
        "a Conditional DETR or DAB-DETR under its authors' names; detrt reads them in transformers' format, e.g. "
        "hf:microsoft/conditional-detr-resnet-50",
    ),
)


def recognise(keys: Iterable[str]) -> str | None:
    """The variant that the keys belong to; None for other models. "d_fine" may also be DEIM on D-FINE or RT-DETRv4."""
    known = set(keys)
    for format_ in (
        grounding_dino,
        mm_grounding_dino,
        detr,
        deformable_detr,
        rf_detr,
        deimv2,
        edgecrafter,
        d_fine,
        rt_detr,
        dino,
    ):
        if variant := format_.recognise(known):
            return variant
    return None


def tells(keys: Iterable[str]) -> bool:
    """Whether keys are those of a model that is read, or of one that is refused by name."""
    return recognise(keys) is not None or first_match(keys, RELATIVES) is not None


def refuse_relatives(state: Mapping[str, Tensor], ref: str, of_format: Table = ()) -> None:
    """Raise SourceError for a model of `RELATIVES`. of_format: such a table of one format."""
    found = first_match(state, (*RELATIVES, *of_format))
    if found is not None:
        raise SourceError(f"'{ref}' is {found[1]} (it has the key '{found[0]}')")


def load(
    state: Mapping[str, Tensor],
    variant: str,
    args: Mapping[str, Any],
    ref: str,
    *,
    stated: Mapping[str, str] | None = None,
    queries: int | None = None,
) -> tuple[nn.Module, Family, LoadReport]:
    """The module of a state dict, with every key used or named.

    Args:
        args: of the training script, as the file has them. stated, queries: see `Assumed`.

    Raises:
        SourceError: keys that are missing, unexpected or misshapen, or a related model that is not read.
    """
    format_, family_name, titles = FORMATS[variant]
    refuse_relatives(state, ref, getattr(format_, "RELATIVES", ()))
    told = recognise(state)
    if told is not None and FORMATS[told].module is not format_:
        raise SourceError(
            f"'{ref}' has the keys of {FORMATS[told].titles[0]}, not of {titles[0]}: it is another family; leave --family "
            f"out or give --family {told}"
        )
    shapes = Shapes(state, ref)
    report = LoadReport(format=" or ".join(titles))
    assumed = Assumed(args, ref, stated, queries)
    settings = format_.settings(shapes, assumed, variant, report)
    assumed.check()
    report.notes += assumed.notes()
    changes = settings.pop("family", {})
    family = replace(BY_NAME[family_name], **changes)
    if "feat_strides" in settings:
        height, width = family.size or (0, 0)
        most = sum((height // stride) * (width // stride) for stride in settings["feat_strides"])
        if settings["num_queries"] > most:
            raise SourceError(
                f"--queries must be from 1 to {most}, the positions of {height}x{width} pixels; got {settings['num_queries']}"
            )
    dilated = bool(settings.pop("dilation", False))
    report.inferred = format_.facts(settings) if hasattr(format_, "facts") else _facts(settings, dilated)
    if "size" in changes:
        report.inferred["size"] = "x".join(map(str, family.size or ()))
    module = _without_initial_weights(
        lambda: format_.build(settings, variant) if hasattr(format_, "build") else _build(family, variant, settings, ref)
    )
    if hasattr(format_, "prepare"):
        format_.prepare(module, shapes)
    table = format_.table(shapes) if hasattr(format_, "table") else format_.TABLE
    skipped = format_.skipped(shapes) if hasattr(format_, "skipped") else format_.SKIPPED
    stored = {**state, **format_.values(shapes)} if hasattr(format_, "values") else state
    fit(module, rename(stored, table, skipped, report), state, report, ref)
    if hasattr(format_, "finish"):
        format_.finish(module)
    if hasattr(format_, "check"):
        format_.check(module, shapes)
    if dilated:
        from .timm import dilate_last_stage

        dilate_last_stage(module.model.backbone.model)  # type: ignore[union-attr,arg-type]
    return module.eval().requires_grad_(False), family, report


def _without_initial_weights(build: Callable[[], nn.Module]) -> nn.Module:
    """A module whose weights are not set, which takes a tenth of the time of drawing them: `fit` sets or refuses each."""
    from transformers.initialization import no_init_weights

    with no_init_weights():  # leaves out that weights are tied, too
        module = build()
    if hasattr(module, "tie_weights"):
        module.tie_weights()  # type: ignore[operator]
    return module


def names_start(variant: str, file: StateFile) -> int | None:
    """Column of the head that the first of a file's class names is for; None where its format has one name for each column."""
    format_ = FORMATS[variant].module
    return int(format_.names_start(file)) if hasattr(format_, "names_start") else None


def spec_of(
    variant: str,
    module: nn.Module,
    family: Family,
    report: LoadReport,
    *,
    labels: Path | str | None,
    stored: Mapping[int, str] | Sequence[str],
    first: int | None,
    ref: str,
) -> ModelSpec:
    """ModelSpec of a model with fixed classes that `load` gave. No preprocessor file lies beside an original
    checkpoint: the authors' settings are in the family's row or in the format.

    Args:
        labels: a file of class names. stored, first: class names in the checkpoint, see `labels.choose`.

    Raises:
        SourceError: no class names. SpecError: labels that do not fit the head.
    """
    config: Any = module.config
    names, note = choose(int(config.num_labels), file=labels, stored=stored, first=first, ref=ref)
    report.notes.append(note)
    format_ = FORMATS[variant].module
    if hasattr(format_, "input_spec"):
        entry = format_.input_spec(config, family, attend_padding=getattr(module, "attend_padding", False))
    else:
        entry = read_input_spec(None, family, config)
    return make_spec(family, module, entry, names)


def _facts(settings: Mapping[str, Any], dilated: bool) -> dict[str, object]:
    """The sizes that people know a model by."""
    backbone = settings["backbone_config"]
    facts: dict[str, object] = {"classes": settings["num_labels"]} if "num_labels" in settings else {}
    facts |= {
        "queries": settings.get("two_stage_num_proposals") if settings.get("two_stage") else settings["num_queries"],
        "width": settings["d_model"],
        "encoder layers": settings.get("encoder_layers", 0),
        "decoder layers": settings["decoder_layers"],
        "levels": settings.get("num_feature_levels", 1),
    }
    if "decoder_n_points" in settings:
        facts["points"] = settings["decoder_n_points"]
    depth = backbone.get("stage_num_blocks") or backbone.get("depths") or backbone.get("num_hidden_layers")
    facts["backbone"] = (
        f"{backbone['model_type']} {depth} x "
        f"{backbone.get('hidden_sizes') or backbone.get('hidden_size') or backbone.get('embed_dim')}"
    )
    if dilated:
        facts["dilation"] = "yes"
    if "two_stage" in settings:
        facts["two-stage"] = "yes" if settings["two_stage"] else "no"
        facts["box refinement"] = "yes" if settings["with_box_refine"] else "no"
    return facts


def _build(family: Family, variant: str, settings: dict[str, Any], ref: str) -> nn.Module:
    """The transformers class of a family, or detrt's of DEIM and DEIMv2, with weights that are not set yet."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    backbone = dict(settings.pop("backbone_config"))
    try:
        inner = CONFIG_MAPPING[backbone.pop("model_type")](**backbone)
        if family.text:
            text = dict(settings.pop("text_config"))
            settings["text_config"] = CONFIG_MAPPING[text.pop("model_type")](**text)
        config = CONFIG_MAPPING[family.model_type](backbone_config=inner, **settings)
        config._attn_implementation = "eager"
        with torch.random.fork_rng(devices=[]):
            if variant.startswith("deim") or variant == "rt_detr_v4":
                from ..arch import deimv2 as arch

                own = {"deimv2": arch.PublishedDeimv2, "deim-rt_detr_v2": arch.DeimRtDetrV2}
                own |= dict.fromkeys(("deim", "rt_detr_v4"), arch.DeimDFine)
                return own[variant](config)
            auto = auto_class(family, config.architectures)
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
