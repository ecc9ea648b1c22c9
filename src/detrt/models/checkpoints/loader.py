"""Original checkpoints: which model a state dict is, its sizes, its key map, and the module with its weights, by the formats that families
have (`families.base.Format`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SourceError, one_line
from ...spec import ModelSpec
from ..families import BY_NAME, Family, Format, formats
from ..labels import choose
from ..preprocessor import authors_input
from ..source import config_of, from_config, make_spec
from .assumed import Assumed
from .key_map import LoadReport, Table, first_match, fit, rename
from .shapes import Shapes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .state_file import StateFile


def recognise(keys: Iterable[str]) -> str | None:
    """The variant that the keys belong to; None for other models. "d_fine" may also be DEIM on D-FINE or RT-DETRv4."""
    known = set(keys)
    for recogniser in dict.fromkeys(one.recognise for _, one in formats().values()):
        if variant := recogniser(known):
            return variant
    return None


def _relatives() -> Table:
    """Key pattern -> a model whose keys are like those of a family and that is not read."""
    return tuple(line for family in BY_NAME.values() for line in family.relatives)


def tells(keys: Iterable[str]) -> bool:
    """Whether keys are those of a model that is read, or of one that is refused by name."""
    return recognise(keys) is not None or first_match(keys, _relatives()) is not None


def refuse_relatives(state: Mapping[str, Tensor], ref: str, of_format: Table = ()) -> None:
    """Raise SourceError for a model like a family that is not read. of_format: such a table of one format."""
    found = first_match(state, (*_relatives(), *of_format))
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
    family, format_ = formats()[variant]
    refuse_relatives(state, ref, format_.relatives)
    told = recognise(state)
    if told is not None and formats()[told][1].recognise is not format_.recognise:
        raise SourceError(
            f"'{ref}' has the keys of {formats()[told][1].titles[0]}, not of {format_.titles[0]}: it is another family; leave `family` "
            f"out or give `family={told}`"
        )
    shapes = Shapes(state, ref)
    report = LoadReport(format=" or ".join(format_.titles))
    assumed = Assumed(args, ref, stated, queries)
    settings = format_.settings(shapes, assumed, variant, report)
    assumed.check()
    report.notes += assumed.notes()
    changes = settings.pop("family", {})
    family = replace(family, **changes)
    if "feat_strides" in settings:
        height, width = family.size or (0, 0)
        most = sum((height // stride) * (width // stride) for stride in settings["feat_strides"])
        if settings["num_queries"] > most:
            raise SourceError(
                f"`queries` must be from 1 to {most}, the positions of {height}x{width} pixels; got {settings['num_queries']}"
            )
    dilated = bool(settings.pop("dilation", False))
    report.inferred = format_.facts(settings) if format_.facts is not None else _facts(settings, dilated)
    if "size" in changes:
        report.inferred["size"] = "x".join(map(str, family.size or ()))
    if "edges" in changes:
        report.inferred["edges"] = "{} to {} pixels".format(*family.edges)
    module = _without_initial_weights(
        lambda: format_.build(settings, variant) if format_.build is not None else _build(family, format_, settings, ref)
    )
    if format_.prepare is not None:
        format_.prepare(module, shapes)
    table = format_.table(shapes) if callable(format_.table) else format_.table
    skipped = format_.skipped(shapes) if callable(format_.skipped) else format_.skipped
    stored = {**state, **format_.values(shapes)} if format_.values is not None else state
    fit(module, rename(stored, table, skipped, report), state, report, ref)
    if format_.finish is not None:
        format_.finish(module)
    if format_.check is not None:
        format_.check(module, shapes)
    if dilated:
        from .timm import dilate_last_stage

        dilate_last_stage(module)
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
    _, format_ = formats()[variant]
    return format_.names_start(file) if format_.names_start is not None else None


def spec_of(
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
    checkpoint: the authors' settings are in the family's row.

    Args:
        labels: a file of class names. stored, first: class names in the checkpoint, see `labels.choose`.

    Raises:
        SourceError: no class names. SpecError: labels that do not fit the head.
    """
    config: Any = module.config
    published = {count: (family.title, names) for one in family.formats for count, names in one.class_names.items()}
    names, note = choose(int(config.num_labels), file=labels, stored=stored, first=first, published=published, ref=ref)
    report.notes.append(note)
    return make_spec(family, module, authors_input(family, module), names)


def _facts(settings: Mapping[str, Any], dilated: bool) -> dict[str, object]:
    """The sizes that people know a model by."""
    backbone = settings["backbone_config"]
    facts: dict[str, object] = {"classes": settings["num_labels"]} if "num_labels" in settings else {}
    facts |= {
        "queries": settings.get("two_stage_num_proposals") if settings.get("two_stage") else settings["num_queries"],
        "width": settings["d_model"] if "d_model" in settings else settings["hidden_size"],
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


def _build(family: Family, format_: Format, settings: dict[str, Any], ref: str) -> nn.Module:
    """The class of a family or of one of its formats, with weights that are not set yet."""
    import torch
    from huggingface_hub.errors import StrictDataclassError

    try:
        config = config_of(family, settings)
        config._attn_implementation = "eager"
        with torch.random.fork_rng(devices=[]):
            if format_.model is not None:
                return format_.model()(config)  # type: ignore[no-any-return]
            return from_config(family, config, dtype=torch.float32, attn_implementation="eager")  # type: ignore[no-any-return]
    except (
        StrictDataclassError,
        ValueError,
        TypeError,
        RuntimeError,
        AttributeError,
        ZeroDivisionError,
    ) as error:
        raise SourceError(f"'{ref}': its tensors give sizes that {family.title} cannot have: {one_line(error, 300)}") from None
