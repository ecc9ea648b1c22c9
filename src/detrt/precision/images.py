"""Calibration images from a folder or a COCO annotation file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from ..backends.base import Feeds
from ..data.images import IMAGE_SUFFIXES, ImageSource
from ..errors import ImageError


class Prompted(Sequence[ImageSource]):
    """Calibration images of a model that takes a prompt, with the text inputs of each.

    texts: what the detector is fed beside one image; a list of several (a prompt that the model takes in parts) is given
    to the images in turn.
    """

    def __init__(self, images: Sequence[ImageSource], texts: Sequence[Feeds]) -> None:
        self.images, self.texts = images, texts

    def __len__(self) -> int:
        return len(self.images)

    @overload
    def __getitem__(self, index: int) -> ImageSource: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ImageSource]: ...

    def __getitem__(self, index: int | slice) -> ImageSource | Sequence[ImageSource]:
        return Prompted(self.images[index], self.texts) if isinstance(index, slice) else self.images[index]

    def text_of(self, index: int) -> Feeds:
        return self.texts[index % len(self.texts)]


def find(path: Path, limit: int) -> tuple[list[Path], Path | None]:
    """Calibration images in name order, at most `limit`, evenly spread, and the COCO file if it is one.

    A COCO file names its images; they are looked for beside it, in `images/`, in the folder that the file is
    named after (instances_val2017.json: val2017/), also one level up.

    Raises:
        ImageError: nothing there, or images that the file names are missing.
    """
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
        if not found:
            raise ImageError(f"the calibration folder '{path}' has no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
        return _spread(found, limit), None
    if not path.is_file():
        raise ImageError(f"there is no calibration folder or COCO file '{path}'; give --calibration DIR or FILE.json")
    try:
        data = json.loads(path.read_text("utf-8"))
        names = [str(image["file_name"]) for image in data["images"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImageError(f"'{path}' is not a COCO annotation file ({error!r}); give one, or a folder of images") from None
    folder = images_of(path, names)
    return _spread([folder / name for name in names], limit), path


def images_of(path: Path, names: Sequence[str]) -> Path:
    """The folder with the images of a COCO file.

    Raises:
        ImageError: no known place has all of them.
    """
    kind = path.stem.rpartition("_")[2]
    places = [base / sub for base in (path.parent, path.parent.parent) for sub in ("", "images", kind, f"images/{kind}")]
    for place in places:
        if names and all((place / name).is_file() for name in names):
            return place
    raise ImageError(
        f"the {len(names)} images of '{path}' are in none of {', '.join(map(str, places))}; put the file beside them"
    )


def _spread(paths: list[Path], limit: int) -> list[Path]:
    if len(paths) <= limit:
        return paths
    return [paths[i * len(paths) // limit] for i in range(limit)]
