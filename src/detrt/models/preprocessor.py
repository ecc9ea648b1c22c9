"""InputSpec from a checkpoint's image processor file, from `--resize`, or from the family's defaults.

transformers writes `preprocessor_config.json` beside a model whose image processor is saved, and
`processor_config.json` with the same object under "image_processor" where a processor of images and
text is. A key is understood, known to have no effect on pixels, or refused by name: a value that is
silently left out gives a detector that finds nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..errors import SourceError, SpecError
from ..spec import LARGEST_SIDE, RESAMPLES, InputSpec
from .families import IMAGENET_MEAN, IMAGENET_STD, Family, processors

FILES = ("processor_config.json", "preprocessor_config.json")  # the order in which transformers looks for them
FAMILY_DEFAULT = "family-default"
CHOICE = (
    "state it with `resize=HEIGHTxWIDTH` (stretch), `resize=shortest:SHORT,LONG` or `resize=fit:HEIGHTxWIDTH` (aspect ratio "
    f"kept, padded), or take the authors' preprocessing of the family with `preprocess={FAMILY_DEFAULT}`"
)

# Keys that say nothing about pixels, or of which only an empty value or the one here does not.
_IDLE = (
    *("format", "do_convert_annotations", "image_processor_type", "feature_extractor_type", "processor_class", "auto_map"),
    *("model_input_names", "default_to_square", "return_segmentation_masks", "masks_path", "return_tensors", "device"),
    *(
        "disable_grouping",
        "input_data_format",
        "_valid_processor_keys",
        "valid_processor_keys",
        "use_fast",
        "backend",
        "crop_size",
        *("mask_size", "mask_pad_size"),  # of the maps that models are trained on
    ),
)
_IDLE_VALUES = {"data_format": "channels_first", "do_convert_rgb": True}
_READ = (
    *("do_resize", "size", "max_size", "resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
    *("do_pad", "pad_and_return_pixel_mask", "pad_size", "do_split_image", "rescale", "size_divisor"),
)


@dataclass(frozen=True, slots=True)
class Resize:
    """What `--resize` states. mode: of `InputSpec`; size: (height, width), or (shortest edge, longest edge)."""

    mode: str
    size: tuple[int, int]


def parse_resize(text: str) -> Resize:
    """ "640", "480x640", "shortest:800,1333" or "fit:480x640" -> Resize. Raises SourceError."""
    found = re.fullmatch(r"(?:(fit|stretch):)?(\d{1,5})(?:x(\d{1,5}))?|shortest:(\d{1,5}),(\d{1,5})", text.strip().lower())
    sides = [int(part) for part in (found.groups()[1:] if found else ()) if part]
    if not found or not all(1 <= side <= LARGEST_SIDE for side in sides) or (found[4] and sides[0] > sides[1]):
        raise SourceError(
            f"`resize` must be HEIGHTxWIDTH such as 640x640, shortest:SHORT,LONG such as shortest:800,1333, or fit:HEIGHTxWIDTH "
            f"such as fit:480x480; got {text!r}"
        )
    mode = "shortest_edge" if found[4] else {"fit": "max_size"}.get(found[1], "stretch")
    return Resize(mode, (sides[0], sides[-1]))


def read_processor(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The image processor of a checkpoint folder, and its file; None where there is none.

    Raises:
        SourceError: the file is damaged.
    """
    for name in FILES:
        path = folder / name
        if not path.is_file():
            continue
        data = files.read_json(path, "image processor", SourceError)
        if not isinstance(data, dict):
            raise SourceError(f"'{path}' must hold a JSON object")
        if name == FILES[0]:
            if "image_processor" not in data:  # a file of an older version, of the tokenizer alone
                continue
            data = data["image_processor"]
            if not isinstance(data, dict):
                raise SourceError(f"'{path}' must hold a JSON object under \"image_processor\"")
        # null is "the default"; of what is done or not, transformers reads it as false.
        stated = (key for key, value in data.items() if value is not None or key.startswith("do_"))
        return path, {key: False if data[key] is None else data[key] for key in stated}
    return None


def read_input_spec(
    folder: Path | None,
    family: Family,
    config: Any,
    *,
    resize: str | None = None,
    preprocess: str | None = None,
    ref: str = "",
) -> InputSpec:
    """Preprocessing of a checkpoint's images.

    Args:
        folder: of a checkpoint in transformers format, with the file of its image processor. None for a checkpoint without
            a folder: the family's row has the authors' settings.
        config: of the model, in transformers' form.
        resize: the size of images, instead of the file's; see `parse_resize`.
        preprocess: "family-default" for the family's settings instead of the file's.
        ref: the checkpoint in messages; default: the folder.

    Raises:
        SourceError: there is no file and no choice, or the file is damaged or asks for something that detrt does not do.
    """
    if preprocess not in (None, FAMILY_DEFAULT):
        raise SourceError(f"`preprocess` must be {FAMILY_DEFAULT}; got {preprocess!r}")
    wanted = parse_resize(resize) if resize is not None else None
    found = read_processor(folder) if folder is not None and preprocess is None else None
    if found is None and folder is not None and preprocess is None and wanted is None:
        raise SourceError(
            f"'{ref or folder}' has neither {FILES[1]} nor {FILES[0]} with an image processor, so how its images are resized and "
            f"normalised is not known; save the image processor beside the model (processor.save_pretrained), {CHOICE}"
        )
    origin = f"'{found[0]}'" if found else f"the configuration of this {family.title}"
    try:
        data = _family_settings(family, config) if found is None else found[1]
        return _ConfigReader(data, family, config, stated=found is not None).input_spec(wanted)
    except _ResizeRefused as error:
        advice = "" if "`resize=" in str(error) else "; `resize=HEIGHTxWIDTH` stretches images to one size"
        raise SourceError(f"`resize={resize}` cannot be done: {error}{advice}") from None
    except _Refused as error:
        raise SourceError(f"{origin} says {error}; {CHOICE}") from None
    except (TypeError, ValueError, LookupError, SpecError) as error:
        what = f"`resize={resize}` for {family.title}" if wanted else f"{origin} has a value that detrt cannot use"
        raise SourceError(f"{what}: {error}") from None


def authors_input(family: Family, module: Any) -> InputSpec:
    """The authors' preprocessing of a model without a file of it."""
    if family.authors_input is None:
        return read_input_spec(None, family, module.config)
    return family.authors_input(module.config, family, attend_padding=getattr(module, "attend_padding", False))


class _Refused(Exception):
    """A setting that is understood and not supported: what it is, and why."""


class _ResizeRefused(_Refused):
    """The same of `--resize`, which the file did not say."""


def _family_settings(family: Family, config: Any) -> dict[str, Any]:
    """The authors' settings, as an image processor's file has them."""
    if family.processor.one_size:
        side = _one(config.image_size)
        return {"size": {"shortest_edge": side, "longest_edge": side}, "do_pad": True}
    if family.shortest_edge:
        size = dict(zip(("shortest_edge", "longest_edge"), family.edges, strict=True))
    else:
        multiple = multiple_of(family, config)
        # RF-DETR has one size for each position table, rounded up to its windows.
        side = 0 if family.size else -(-_one(_backbone(config).image_size) // multiple) * multiple
        height, width = family.size or (side, side)
        size = {"height": height, "width": width}
    return {"size": size, "do_normalize": family.normalize, "do_pad": family.mask or family.processor.square}


def _refuse_unknown(data: Mapping[str, Any], idle: Collection[str]) -> None:
    for key, value in data.items():
        if key in (*_READ, *_IDLE, *idle) or value in (False, "", [], {}) or _IDLE_VALUES.get(key) == value:
            continue
        if key in _IDLE_VALUES:
            raise _Refused(f"{key} {value!r}")
        raise _Refused(f"{key} {value!r}, which detrt does not know; remove the key if it has no effect")


class _ConfigReader:
    """One image processor's settings. stated: they come from a file, whose processor's class has defaults of its own."""

    def __init__(self, data: Mapping[str, Any], family: Family, config: Any, *, stated: bool) -> None:
        self._family, self._stated = family, stated
        self._multiple = multiple_of(family, config)
        name = str(data.get("image_processor_type") or data.get("feature_extractor_type") or family.processor.name)
        known = processors()
        found = known.get(re.sub(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", name))
        if found is None:
            names = ", ".join(f"{one}ImageProcessor" for one in known)
            raise _Refused(f"image_processor_type {name!r}, which detrt does not know; it knows {names}")
        _refuse_unknown(data, found.idle)
        self._processor = found
        self._data = {**found.settings, **data}
        for key, value in data.items():
            if key.startswith("do_") and value not in (True, False, None):
                raise _Refused(f"{key} {value!r}, which must be true or false (JSON without quotes)")
        if "rescale" in data:
            if not found.rescale_key:
                raise _Refused(f"rescale {data['rescale']!r}, which detrt does not know; remove the key if it has no effect")
            self._data["do_rescale"] = data["rescale"]
        if found.one_size:
            self._check_one_size(config)

    def _check_one_size(self, config: Any) -> None:
        """Images are padded to the size that their edges fit into."""
        data = self._data
        if data.get("do_split_image"):
            raise _Refused("do_split_image true: images are split for semantic segmentation, and detrt reads instance masks")
        side, size = _one(config.image_size), self._size()
        if size != {"shortest_edge": side, "longest_edge": side}:
            raise _Refused(f"size {size}; this {self._family.title} takes {side}x{side} only")
        if data["do_pad"]:
            data["pad_size"] = {"height": side, "width": side}

    def input_spec(self, wanted: Resize | None) -> InputSpec:
        data, family = self._data, self._family
        normalize = bool(data["do_normalize"])
        resample = int(data.get("resample", 2))
        if not 0 <= resample < len(RESAMPLES):
            raise ValueError(f"resample {resample}, which is not one of Pillow's 0..{len(RESAMPLES) - 1}")
        common: dict[str, Any] = {
            "resample": RESAMPLES[resample],
            "rescale": float(data.get("rescale_factor", 1 / 255)) if data.get("do_rescale", True) else 1.0,
            "mean": _three(data.get("image_mean", IMAGENET_MEAN)) if normalize else (0.0, 0.0, 0.0),
            "std": _three(data.get("image_std", IMAGENET_STD)) if normalize else (1.0, 1.0, 1.0),
            "mask": family.mask,
            "dynamic": family.dynamic,
            "multiple_of": self._multiple,
        }
        if self._processor.not_antialiased and (self._stated or not self._processor.authors_antialias):
            only, rounded = self._processor.not_antialiased
            if resample != only:
                raise _Refused(
                    f"resample {resample} of {self._processor.name}ImageProcessor, which does not antialias; detrt does that for {only} only"
                )
            common |= {"antialias": False, "dtype": "float32", "rounded": rounded}
        if self._processor.square and wanted is None:
            return self._square(resample, common)
        size = self._size() if wanted is None else _size_of(wanted)
        pad = self._pad_size(size) if wanted is None else _canvas_of(wanted)
        shaped = self._stretch if "height" in size else self._aspect
        rounds_down = self._processor.rounds_down
        if wanted is None and "shortest_edge" in size and rounds_down not in (0, self._multiple):
            raise _Refused(
                f"size {size} for a {self._processor.name}ImageProcessor, which rounds sides down to multiples of {rounds_down}; of "
                f"{self._family.title} that is not done"
            )
        try:
            return shaped(size, pad, common)
        except _Refused as error:
            if wanted is None:
                raise
            raise _ResizeRefused(*error.args) from None

    def _size(self) -> dict[str, int]:
        data = self._data
        if not data.get("do_resize", True):
            raise _Refused("do_resize false: its images keep their size, which depends on what resized them before")
        size = data["size"]
        if isinstance(size, int) and not isinstance(size, bool):  # files written before 2023: size and max_size
            size = {"shortest_edge": size, "longest_edge": data.get("max_size", 1333)}
        elif isinstance(size, (list, tuple)) and len(size) == 2:
            size = {"height": size[0], "width": size[1]}
        if isinstance(size, Mapping):
            # The order in which transformers looks for them, where a file has several.
            for pair in (("shortest_edge", "longest_edge"), ("max_height", "max_width"), ("height", "width")):
                if all(size.get(key) for key in pair):
                    return self._divided({key: int(size[key]) for key in pair})
        raise ValueError(f"size {size!r}; transformers resizes by shortest_edge and longest_edge, max_height and max_width, or "
                         "height and width")  # fmt: skip

    def _divided(self, size: dict[str, int]) -> dict[str, int]:
        """Sides rounded up to multiples of size_divisor."""
        divisor = int(self._data.get("size_divisor") or 1)
        if divisor > 1 and "height" not in size:
            raise _Refused(
                f"size_divisor {divisor} with size {size}: each side is rounded up by itself, so that images lose their aspect ratio"
            )
        return {key: -(-side // divisor) * divisor for key, side in size.items()}

    def _pad_size(self, size: Mapping[str, int]) -> dict[str, int] | None:
        data = self._data
        pad = data.get("pad_size")
        if not data.get("pad_and_return_pixel_mask", data.get("do_pad", True)) or pad is None:
            return None
        if isinstance(pad, int) and not isinstance(pad, bool):
            pad = {"height": pad, "width": pad}
        elif isinstance(pad, (list, tuple)) and len(pad) == 2:
            pad = {"height": pad[0], "width": pad[1]}
        if not isinstance(pad, Mapping) or not (pad.get("height") and pad.get("width")):
            raise ValueError(f"pad_size {pad!r}; it must have height and width")
        pad = {"height": int(pad["height"]), "width": int(pad["width"])}
        largest = size.get("longest_edge")
        for side in ("height", "width"):
            limit = largest or size.get(side) or size[f"max_{side}"]
            if limit > pad[side]:
                raise _Refused(f"pad_size {pad}, into which images of size {dict(size)} do not fit")
        return pad

    def _stretch(self, size: Mapping[str, int], pad: Mapping[str, int] | None, common: Mapping[str, Any]) -> InputSpec:
        if pad is not None and dict(pad) != dict(size):
            raise _Refused(f"pad_size {dict(pad)} around images of size {dict(size)}, which detrt does not do")
        self._check_multiple(size, "size")
        return InputSpec("stretch", size["height"], size["width"], **common)

    def _square(self, resample: int, common: Mapping[str, Any]) -> InputSpec:
        size = self._size()
        if resample != 2 or not self._data["do_pad"]:
            raise _Refused(
                f"resample {resample} and do_pad {self._data['do_pad']}; detrt does resample 2 with do_pad true for it"
            )
        self._check_multiple(size, "size")
        return InputSpec("square", size["height"], size["width"], antialias=False, dtype="float32", **common)

    def _aspect(self, size: Mapping[str, int], pad: Mapping[str, int] | None, common: Mapping[str, Any]) -> InputSpec:
        """Images that keep their aspect ratio, padded to one size or to the largest of their batch."""
        family = self._family
        sides = {**size, **(pad or {})}
        mode = "shortest_edge" if "shortest_edge" in size else "max_size"
        if pad is not None:
            if family.no_mask:
                raise _Refused(f"pad_size {dict(pad)} around images of size {dict(size)}: {family.title} {family.no_mask}")
            self._check_multiple(pad, "pad_size")
            if not common.get("antialias", True):
                raise _Refused(f"size {dict(size)}, which keeps the aspect ratio, for a processor that does not antialias")
            return InputSpec(mode, pad["height"], pad["width"], pad=True, **_edges(size), **common)
        if not family.dynamic:
            raise _Refused(f"size {dict(size)}, which keeps the aspect ratio: {family.title} takes one fixed size")
        if not family.mask and self._multiple > 1 and not (mode == "shortest_edge" and self._processor.rounds_down):
            raise _Refused(
                f"size {dict(size)}, which keeps the aspect ratio: {family.title} has no padding mask and needs sides that are "
                f"multiples of {self._multiple}"
            )
        if mode == "shortest_edge":
            # The usual image is 4:3; this is the size that engines are tuned for.
            height, width = sides["shortest_edge"], min(round(sides["shortest_edge"] * 4 / 3), sides["longest_edge"])
        else:
            height, width = sides["max_height"], sides["max_width"]
        height, width = (_round_down(side, self._multiple) for side in (height, width))
        return InputSpec(mode, height, width, **_edges(size), **common)

    def _check_multiple(self, size: Mapping[str, int], name: str) -> None:
        multiple = self._multiple
        if all(side % multiple == 0 for side in size.values()):
            return
        near = "x".join(str(-(-size[side] // multiple) * multiple) for side in ("height", "width"))
        raise _Refused(
            f"{name} {dict(size)}; {self._family.title} needs sides that are multiples of {multiple}, e.g. `resize={near}`"
        )


def _size_of(wanted: Resize) -> dict[str, int]:
    names = {"stretch": ("height", "width"), "max_size": ("max_height", "max_width")}
    return dict(zip(names.get(wanted.mode, ("shortest_edge", "longest_edge")), wanted.size, strict=True))


def _canvas_of(wanted: Resize) -> dict[str, int] | None:
    return dict(zip(("height", "width"), wanted.size, strict=True)) if wanted.mode == "max_size" else None


def _edges(size: Mapping[str, int]) -> dict[str, int]:
    return {key: value for key, value in size.items() if key not in ("height", "width")}


def _three(value: Any) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, Iterable) else (float(value),) * 3


def multiple_of(family: Family, config: Any) -> int:
    """The number that both sides of the input must be a multiple of."""
    if isinstance(family.multiple_of, int):
        return family.multiple_of
    if family.multiple_of == "patch":
        return _one(getattr(config, "patch_size", None) or _backbone(config).patch_size)
    if family.multiple_of == "image":
        return _one(_backbone(config).image_size)
    backbone = _backbone(config)
    windows = int(backbone.num_windows)
    # Windows along one side, or of the whole image.
    along_side = math.isqrt(windows) if family.multiple_of == "windows of image" else windows
    return _one(backbone.patch_size) * along_side


def _backbone(config: Any) -> Any:
    vision = getattr(config, "vision_config", config)
    return getattr(vision, "backbone_config", vision)


def _one(value: Any) -> int:
    return int(next(iter(value))) if isinstance(value, Iterable) else int(value)


def _round_down(value: int, multiple: int) -> int:
    return max(multiple, value // multiple * multiple)
