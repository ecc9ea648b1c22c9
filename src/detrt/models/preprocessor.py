"""InputSpec from a checkpoint's preprocessor_config.json, or from the family's defaults."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import SourceError, SpecError
from ..spec import RESAMPLES, InputSpec
from .families import IMAGENET_MEAN, IMAGENET_STD, Family


def read_input_spec(folder: Path | None, family: Family, config: Any) -> InputSpec:
    """Preprocessing of a checkpoint's images.

    Args:
        folder: of a checkpoint in transformers format; its preprocessor_config.json is read if it has one. None for
            a checkpoint without a folder: the family's row has the authors' settings.

    Raises:
        SourceError: the preprocessor file is damaged or asks for something that detrt does not do.
    """
    data: dict[str, Any] = {}
    path = folder / "preprocessor_config.json" if folder is not None else None
    if path is not None and path.is_file():
        try:
            data = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise SourceError(f"'{path}' is not readable JSON: {error}") from None
        if not isinstance(data, dict):
            raise SourceError(f"'{path}' must hold a JSON object")
        data = {key: value for key, value in data.items() if value is not None}  # null is "the default"
    try:
        return _input_spec(data, family, config)
    except (TypeError, ValueError, LookupError, SpecError) as error:
        origin = f"'{path}'" if path is not None else f"the configuration of this {family.title}"
        raise SourceError(f"{origin} has a value that detrt cannot use: {error}") from None


def _input_spec(data: dict[str, Any], family: Family, config: Any) -> InputSpec:
    multiple = multiple_of(family, config)
    size = _size(data, family, config)
    normalize = bool(data.get("do_normalize", family.normalize))
    mean = tuple(data.get("image_mean", IMAGENET_MEAN)) if normalize else (0.0, 0.0, 0.0)
    std = tuple(data.get("image_std", IMAGENET_STD)) if normalize else (1.0, 1.0, 1.0)
    resample = int(data.get("resample", 2))
    if not 0 <= resample < len(RESAMPLES):
        raise ValueError(f"resample {resample}, which is not one of Pillow's 0..{len(RESAMPLES) - 1}")
    common = {
        "resample": RESAMPLES[resample],
        "rescale": float(data.get("rescale_factor", 1 / 255)) if data.get("do_rescale", True) else 1.0,
        "mean": mean,
        "std": std,
        "mask": family.mask,
        "multiple_of": multiple,
    }
    if "height" in size:
        height, width = (_round_up(int(size[k]), multiple) for k in ("height", "width"))
        return InputSpec("stretch", height, width, dynamic=family.dynamic, **common)
    short = int(size["shortest_edge"])
    long = int(size.get("longest_edge") or 0) or None
    if not family.dynamic:
        side = _round_up(short, multiple)
        return InputSpec("stretch", side, side, dynamic=False, **common)
    # The usual image is 4:3; this is the size that engines are tuned for.
    width = min(round(short * 4 / 3), long or 10**6)
    height = _round_down(short, multiple)
    return InputSpec(
        "shortest_edge",
        height,
        max(multiple, _round_down(width, multiple)),
        shortest_edge=short,
        longest_edge=long,
        dynamic=True,
        **common,
    )


def _size(data: dict[str, Any], family: Family, config: Any) -> dict[str, Any]:
    size = data.get("size")
    if isinstance(size, int):  # files written before 2023: size and max_size
        size = {"shortest_edge": size, "longest_edge": data.get("max_size")}
    if isinstance(size, dict) and ("shortest_edge" in size or {"height", "width"} <= set(size)):
        return size
    if size is not None:
        raise ValueError(f"size {size!r}")
    if family.shortest_edge:
        return {"shortest_edge": 800, "longest_edge": 1333}
    side = getattr(getattr(config, "backbone_config", None), "image_size", None) if family.name == "rf_detr" else None
    return {"height": side or family.size, "width": side or family.size}


def multiple_of(family: Family, config: Any) -> int:
    """The number that both sides of the input must be a multiple of."""
    if isinstance(family.multiple_of, int):
        return family.multiple_of
    if family.multiple_of == "patch":
        return _one(config.patch_size)
    backbone = config.backbone_config
    windows = int(backbone.num_windows)
    # LW-DETR counts the windows of an image, RF-DETR those along one side.
    along_side = math.isqrt(windows) if family.name == "lw_detr" else windows
    return _one(backbone.patch_size) * along_side


def _one(value: Any) -> int:
    return int(next(iter(value))) if isinstance(value, Iterable) else int(value)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _round_down(value: int, multiple: int) -> int:
    return max(multiple, value // multiple * multiple)
