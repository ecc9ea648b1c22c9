"""What is warned of in files that are read: several frames of an image, of which the first is read, and damage in a video."""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from ..errors import printable

if TYPE_CHECKING:
    from PIL import Image

# Not MPO: beside its first image a photograph of a phone has a smaller one, a map of brightness or the view of the other eye.
_FRAMES = ("GIF", "PNG", "WEBP", "AVIF", "HEIF")
_SUBFILE_TYPE, _REDUCED_OR_MASK = 254, 1 | 4  # a tag of TIFF and its bits
_MOST_PAGES = 1000  # that are counted: each is a header somewhere in the file


class FramesWarning(Warning):  # no UserWarning: readers in threads ignore those of Pillow, for the whole process
    """An image file has several frames, of which only the first is read."""


class DamageWarning(Warning):
    """A video has damaged parts, whose frames were decoded as far as they can be."""


def warn_of_frames(image: Image.Image, name: str) -> None:
    """Warn where a file, whose pixels were read, has more frames than that. name: of the file in messages."""
    count = 1
    with contextlib.suppress(Exception), warnings.catch_warnings():  # Pillow's parsers raise nearly anything for damaged frames
        for category in (UserWarning, RuntimeWarning):  # Pillow's, of tags and sizes
            warnings.simplefilter("ignore", category)
        if image.format == "TIFF":
            count = _pages(image)
        elif image.format in _FRAMES and getattr(image, "is_animated", False):
            count = image.n_frames  # type: ignore[attr-defined]
    if count < 2:
        return
    what, advice = "frames", "convert it to a video for all of them, such as: ffmpeg -i FILE FILE.mp4"
    if image.format == "TIFF":
        what, advice = "pages", "save the others as files of their own"
    warnings.warn(FramesWarning(f"{name} has {count} {what}, and only the first is read; {advice}"), stacklevel=3)


def _pages(image: Any) -> int:
    """Pages of a TIFF file, without masks and smaller copies of the first: thumbnails and levels of a pyramid."""
    if not getattr(image, "is_animated", False):
        return 1
    width, height = image.size
    count = 1
    for index in range(1, _MOST_PAGES):
        try:
            image.seek(index)
        except EOFError:
            break
        is_small = 2 * image.size[0] <= width and 2 * image.size[1] <= height
        count += not (is_small or int(image.tag_v2.get(_SUBFILE_TYPE, 0)) & _REDUCED_OR_MASK)
    return count


def show_frames_once() -> None:
    """Show damage in one line, and the first warning of frames of this process, of the others that there are some; inside
    `catch_warnings`."""
    shown, usual = [], warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *others: Any, **named: Any) -> None:
        text = str(message)
        if issubclass(category, DamageWarning):
            print(f"warning: {printable(text)}", file=sys.stderr)
            return
        if not issubclass(category, FramesWarning):
            usual(message, category, *others, **named)
            return
        if len(shown) < 2 and text not in shown:
            shown.append(text)
            line = (
                text if len(shown) == 1 else "other files have several frames or pages as well, of which only the first is read"
            )
            print(f"warning: {printable(line)}", file=sys.stderr)

    warnings.showwarning = show
