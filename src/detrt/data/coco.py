"""Image ids and categories of a COCO annotation file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePath

from ..errors import OutputError
from ..spec import ModelSpec

# Names that lists of the 80 COCO classes take over from the older VOC names.
_ALIASES = {
    "aeroplane": "airplane",
    "motorbike": "motorcycle",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}


class CocoImages:
    """Image and category ids of a COCO annotation file.

    Raises:
        OutputError: the file is missing, damaged or not a COCO file.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        try:
            data = json.loads(self.path.read_text("utf-8"))
            images = [(str(row["file_name"]), int(row["id"])) for row in data["images"]]
            self.categories = {str(row["name"]): int(row["id"]) for row in data["categories"]}
        except FileNotFoundError:
            raise OutputError(f"there is no COCO file '{self.path}'; check the path") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OutputError(
                f"'{self.path}' is not a COCO annotation file ({error!r}); it needs 'images' with 'id' and "
                "'file_name', and 'categories' with 'id' and 'name'"
            ) from None
        # Datasets name files with or without folders, so every tail of a name is kept; a tail that two
        # images share identifies neither.
        self._ids: dict[tuple[str, ...], int | None] = {}
        for name, image_id in images:
            parts = PurePath(name).parts
            for start in range(len(parts)):
                tail = parts[start:]
                self._ids[tail] = None if self._ids.get(tail, image_id) != image_id else image_id

    def image_id(self, image: str) -> int:
        """Id of an image by the longest tail of its path that the file knows."""
        parts = PurePath(image).parts
        for start in range(len(parts)):
            found = self._ids.get(parts[start:])
            if found is not None:
                return found
        what = "several images" if self._ids.get(parts[-1:], 0) is None else "no image"
        raise OutputError(f"'{self.path}' has {what} with the file name '{PurePath(image).name}'; got '{image}'")

    def category_ids(self, spec: ModelSpec) -> Mapping[int, int]:
        """Class id -> category id, by name; old VOC names of COCO classes count as the new ones."""
        by_name = {_plain(name): category for name, category in self.categories.items()}
        found = {}
        for class_id, label in spec.labels.items():
            name = _plain(label)
            category = by_name.get(name, by_name.get(_ALIASES.get(name, name)))
            if category is not None:
                found[class_id] = category
        if not found:
            raise OutputError(
                f"'{self.path}' and the model have no class in common: {sorted(self.categories)[:5]} ... "
                f"against {list(spec.labels.values())[:5]} ...; leave the COCO file out to write class ids"
            )
        return found


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", " ")
