"""A loaded checkpoint: module, spec and origin."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from typing import TYPE_CHECKING, Any

from ..bundle import Provenance
from ..spec import DETECTION, INSTANCE_SEGMENTATION, DecodeSpec, InputSpec, ModelSpec
from .families import MASK_CLASS, TESTED, Family

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import nn

VERSIONED = ("detrt", "torch", "transformers", "onnx", "onnxruntime", "openvino", "onnxslim", "numpy")


def auto_class(family: Family, architectures: Sequence[str] | None) -> Any:
    """transformers' Auto class that loads a checkpoint. architectures: of its config; None for a detector."""
    import transformers

    name = next(iter(architectures or ()), "")
    if name in family.classes:
        return family.classes[name]()
    if family.auto:
        return getattr(transformers, family.auto)
    if name.endswith(MASK_CLASS):
        return transformers.AutoModelForInstanceSegmentation
    return transformers.AutoModelForZeroShotObjectDetection if family.text else transformers.AutoModelForObjectDetection


def config_of(family: Family, settings: Mapping[str, Any]) -> Any:
    """transformers' config of a family. settings: with those of its parts as dictionaries. The backbone is one of transformers: before 5.2
    the default is one of timm."""
    from transformers import CONFIG_MAPPING

    settings = dict(settings)
    for part in {"backbone_config", "text_config"} & set(settings):
        inner = dict(settings[part])
        settings[part] = CONFIG_MAPPING[inner.pop("model_type")](**inner)
    cls = CONFIG_MAPPING[family.model_type]
    if "use_timm_backbone" in inspect.signature(cls.__init__).parameters:
        settings |= {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    return cls(**settings)


def from_config(family: Family, config: Any, **options: Any) -> Any:
    """A module of a config, with random weights, of the class that loads its checkpoints."""
    cls = auto_class(family, config.architectures)
    make = cls.from_config if hasattr(cls, "from_config") else cls._from_config  # of the Auto classes, and of a model
    return make(config, **options)


def why_untested() -> str:
    """Why a checkpoint is not loaded by the installed version of transformers, or "" for a version that detrt was tested with."""
    version = transformers_version()
    if version is None or version in TESTED:
        return ""
    return (
        f"would be loaded by transformers {version}, which detrt was not tested with; tested: {', '.join(TESTED)}. "
        f"Install one of them (pip install transformers=={TESTED[-1]}), or add `allow_untested_transformers`: the export is then "
        "compared with PyTorch, and fails where they differ"
    )


def why_unsupported(family: Family) -> str:
    """Why a family is not read with the installed transformers, which lacks it or has it in another form than detrt exports, or ""."""
    version = transformers_version()
    package = f"transformers.models.{family.model_type.replace('-', '_')}"
    if version is None or not family.model_type:
        return ""
    having = TESTED[TESTED.index(family.since) :]
    if (version not in TESTED or version in having) and importlib.util.find_spec(package) is not None:
        return ""
    return (
        f"is {family.title}, which detrt does not read with transformers {version}, but with {', '.join(having)}: "
        f"pip install transformers=={having[-1]}"
    )


def checkpoint_inside(folder: Path) -> str:
    """The end of a message on a folder without a checkpoint: the latest one that a training run left in it; "" for none."""
    found = [path.parent for path in folder.glob("checkpoint-*/config.json")]
    numbered = [(int(number), path) for path in found if (number := path.name.rpartition("-")[2]).isdecimal()]
    return f"; the latest checkpoint of the training run in it is '{max(numbered)[1]}'" if numbered else ""


def versions() -> dict[str, str]:
    """Installed versions of the packages that shape a result."""
    found = ((package, installed_version(package)) for package in VERSIONED)
    return {package: version for package, version in found if version is not None}


@cache
def installed_version(package: str) -> str | None:
    """Installed version of a package; None without it."""
    from importlib.metadata import PackageNotFoundError, version  # slow to load, which help need not wait for

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def transformers_version() -> str | None:
    """Installed version of transformers; None without it."""
    return installed_version("transformers")


def now() -> str:
    """The time of a provenance, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def parameters_of(module: nn.Module) -> int:
    """Number of a module's weights, those that are shared once."""
    return sum(p.numel() for p in module.parameters())


def provenance_of(module: nn.Module, source: str, sha256: str) -> Provenance:
    """Where a module that was loaded now is from."""
    return Provenance(source, sha256, parameters_of(module), versions=versions(), created=now())


def make_spec(family: Family, module: nn.Module, input_spec: InputSpec, labels: Mapping[int, str] | None = None) -> ModelSpec:
    """ModelSpec of a model with fixed classes. labels: class names by column of the head; None for the config's own."""
    config: Any = module.config
    names = [name if isinstance(name, str) else name[0] if getattr(config, name[1]) else "" for name in family.queries]
    queries = next((int(count) for name in names if (count := getattr(config, name, None))), 0)
    queries *= int(getattr(config, family.patterns, 0) or 1) if family.patterns else 1
    classes = int(config.num_labels)
    if family.max_detections is None:
        keep = queries
    else:
        keep = min(family.max_detections, queries * classes)
    if labels is None:  # names read from lines of a file often keep the end of the line
        stated = {key: name.strip() if isinstance(name, str) else name for key, name in (config.id2label or {}).items()}
        labels = {key: name for key, name in stated.items() if name != ""}
    # The config of a detector has the field as well: the class tells whether there is a mask head.
    masks = bool(family.masks_at) or type(module).__name__.endswith(MASK_CLASS)
    decode = DecodeSpec(
        family.activation,
        family.select,
        queries,
        classes,
        keep,
        nms=family.nms,
        nms_iou=family.nms_iou,
        mask_stride=family.masks_at or (int(config.mask_downsample_ratio) if masks else 0),
        reading_order=family.reading_order,
        quads=family.quads,
    )
    return ModelSpec(family.name, input_spec, decode, labels, task=INSTANCE_SEGMENTATION if masks else DETECTION)


@dataclass(frozen=True, slots=True)
class Source:
    """A loaded checkpoint: float32 module in eval mode on the CPU, its facts and its origin.

    notes: what was decided while loading, for a log.
    tokenizer: of a prompted model, a file of the `tokenizers` library (JSON); None for others.
    processor: file of the image processor that `spec.input` was read from; None where it is stated or the authors'.
    """

    module: nn.Module
    spec: ModelSpec
    family: Family
    provenance: Provenance
    notes: tuple[str, ...] = ()
    tokenizer: bytes | None = None
    processor: Path | None = None
