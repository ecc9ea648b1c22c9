"""Annotated copies of images and videos."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..data.draw import draw_detections
from ..data.given import read_input
from ..data.images import Input, load_image
from ..data.live import LiveSource
from ..data.result import WRITTEN_SUFFIXES, crops_of, save_image
from ..data.video import video_facts, video_writer
from ..errors import OutputError
from ..files import short_name, writing
from .run import ImageResult

_FRAME = re.compile(r"(.+)-\d{6,}")
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}  # by Windows
_LONGEST_FOLDER = 100  # bytes
_LIVE_FPS = 30  # in the header; the frames have their own times


class AnnotatedCopies:
    """Saves annotated copies of inputs to a folder, with the subfolders in which the inputs differ.

    Images keep their format (.jpg, .png, .webp, .bmp) or become `name.ext.png`; videos become MP4.

    Raises:
        OutputError: a copy would replace an input, or cannot be written.
    """

    def __init__(
        self,
        folder: Path | str,
        inputs: Sequence[Input],
        *,
        every: int = 1,
        font: str | os.PathLike | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.font = font
        self.every = every
        sources = {Path(os.path.abspath(source.path)): source for source in inputs}
        root = os.path.commonpath([path.parent for path in sources]) if sources else ""
        names = _copy_names({source: path.relative_to(root) for path, source in sources.items()})
        # Of a file that is given by two names there is one copy.
        self._paths = {source: self.folder / names[sources[Path(os.path.abspath(source.path))]] for source in inputs}
        for source, target in self._paths.items():
            replaced = sources.get(Path(os.path.abspath(target)))
            if replaced is not None and not replaced.address:
                raise OutputError(
                    f"the annotated copy of '{source.path}' would replace the input '{target}'; give another `save_dir`"
                )
        self._stack = contextlib.ExitStack()
        self._video: Input | None = None

    def save(self, found: ImageResult) -> None:
        """Draw and save one image, or the next frame of a video."""
        assert found.image is not None  # not an image of another process
        image = draw_detections(found.image, found.record.detections, font=self.font)
        path = self._paths[found.input]
        if found.input.kind == "video":
            if self._video != found.input:
                self.finish_video()
                facts, size_hw = video_facts(found.input.path, count=False), found.record.detections.image_size_hw
                writer = video_writer(path, fps=facts.fps / self.every, size=size_hw, pixel_aspect=facts.pixel_aspect)
                self._write = self._stack.enter_context(writer)
                self._video = found.input
            self._write(np.asarray(image), found.record.time_s)
            return
        save_image(image, path)

    def finish_video(self) -> None:
        """Finish the file of the last video; otherwise the next video or image finishes it."""
        self._stack.close()
        self._video = None

    def __enter__(self) -> AnnotatedCopies:
        return self

    def __exit__(self, *exc: object) -> None:
        # Through the stack, so that a failed video is removed and not finished.
        self._stack.__exit__(*exc)


class ObjectFiles:
    """Writes what was found in images and frames to folders: labels in YOLO's format, a file per image, and crops, a folder per class.

    Names are those of the images, `street.txt` and `person/street-0.jpg`, with the subfolders in which the inputs differ; frames of videos
    have their number, `drive-000012.txt`. Inputs whose files would have one name keep their suffix.

    Raises:
        OutputError: a file cannot be written.
    """

    def __init__(self, inputs: Sequence[Input], *, labels: Path | None, crops: Path | None) -> None:
        self._labels, self._crops = labels, crops
        paths = [Path(os.path.abspath(source.path)) for source in inputs]
        root = os.path.commonpath([path.parent for path in paths]) if paths else ""
        names = {source: path.relative_to(root) for source, path in zip(inputs, paths, strict=True)}
        self._names = _names_without_suffix(names)

    def save(self, found: ImageResult) -> None:
        """Write the files of one image or frame."""
        record, name = found.record, self._names[found.input]
        if record.frame is not None:
            name = name.with_name(f"{name.name}-{record.frame:06d}")
        if self._labels is not None:
            text = record.detections.to_yolo()
            with writing(self._labels / f"{name}.txt") as temporary:
                temporary.write_text(text, "utf-8")
        if self._crops is None:
            return
        pixels = load_image(read_input(found.input) if found.image is None else found.image)
        for number, (label, crop) in enumerate(zip(record.detections.labels, crops_of(pixels, record.detections), strict=True)):
            save_image(Image.fromarray(crop), self._crops / _folder_name(label) / f"{name}-{number}.jpg")


class StreamCopies:
    """Saves annotated videos of live sources to a folder: NAME.mp4, and NAME-2.mp4 after frames have changed their size.

    Frames have the times at which they arrived; those that were dropped are missing.

    Raises:
        OutputError: a video would replace a file that is read like a camera, or cannot be written.
    """

    def __init__(self, folder: Path | str, sources: Sequence[LiveSource], *, font: str | os.PathLike | None = None) -> None:
        self.folder, self.font = Path(folder), font
        names = [_stream_name(source.path) for source in sources]
        unique = [name if names.count(name) == 1 else f"{name}.{index + 1}" for index, name in enumerate(names)]
        self._names = dict(zip(sources, unique, strict=True))
        for source in sources:
            self._path(source, 1)  # now, rather than with the first frame
        self._stack = contextlib.ExitStack()
        self._files: dict[LiveSource, _StreamFile] = {}

    def save(self, found: ImageResult) -> None:
        """Draw and save one frame."""
        size_hw = found.record.detections.image_size_hw
        file = self._files.get(found.input)
        if file is None:
            file = self._files[found.input] = _StreamFile(self._stack.enter_context(contextlib.ExitStack()))
        if file.size_hw != size_hw:
            file.stack.close()
            file.number, file.size_hw = file.number + 1, size_hw
            path = self._path(found.input, file.number)
            file.write = file.stack.enter_context(video_writer(path, fps=_LIVE_FPS, size=size_hw))
        assert found.image is not None
        image = draw_detections(found.image, found.record.detections, font=self.font)
        file.write(np.asarray(image), found.record.time_s)

    def _path(self, source: LiveSource, number: int) -> Path:
        """Of the video of a source. number: from 1."""
        path = self.folder / f"{self._names[source]}{'' if number == 1 else f'-{number}'}.mp4"
        if os.path.abspath(path) in {os.path.abspath(one.address) for one in self._names if one.kind == "file"}:
            raise OutputError(f"the annotated video of '{source.path}' would replace the input '{path}'; give another `save_dir`")
        return path

    def __enter__(self) -> StreamCopies:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.__exit__(*exc)


@dataclass(slots=True)
class _StreamFile:
    """The open video of a live source. number: of the file, from 1."""

    stack: contextlib.ExitStack
    number: int = 0
    size_hw: tuple[int, int] | None = None
    write: Any = None


def _stream_name(path: str) -> str:
    """ "rtsp://cam.local:554/live?channel=1" -> "cam.local_554_live_channel_1"."""
    name = path.partition("://")[2] or Path(path).stem
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "camera"


def _copy_names(names: Mapping[Input, Path]) -> dict[Input, Path]:
    """The name of the copy of each input, in a format that is written, no two of them one."""
    found = {}
    taken = {_key(name) for name in names.values()}
    for source, name in names.items():
        suffixes, added = ((".mp4",), ".mp4") if source.kind == "video" else (WRITTEN_SUFFIXES, ".png")
        if name.suffix.lower() not in suffixes:
            name = name.with_name(name.name + added)
            while _key(name) in taken:  # of an input that has it, or of its copy
                name = name.with_name(name.name + added)
            taken.add(_key(name))
        found[source] = name
    return found


def _names_without_suffix(names: Mapping[Input, Path]) -> dict[Input, Path]:
    """The names without their suffix, where no other input has the same name then, nor the name of a frame of a video."""
    found = {source: name.with_suffix("") for source, name in names.items()}
    while True:
        used: dict[str, list[Input]] = {}
        for source, name in found.items():
            used.setdefault(_key(name), []).append(source)
        clashes = [sources for sources in used.values() if len(sources) > 1]
        for key, sources in used.items():
            if frame := _FRAME.fullmatch(key):
                videos = [source for source in used.get(frame[1], ()) if source.kind == "video"]
                clashes += [[*sources, *videos]] * bool(videos)
        again = {source: names[source] for sources in clashes for source in sources if found[source] != names[source]}
        if not again:
            return found
        found |= again


def _key(name: Path) -> str:
    """What a file system without upper and lower case tells names apart by."""
    return name.as_posix().casefold()


def _folder_name(label: str) -> str:
    """A folder for a class: its name, which may hold anything. What had to be changed, such as "..", gets a digest that tells it apart."""
    name = re.sub(r"[^\w -]+", "_", label).strip()
    if name == label and name and name.casefold() not in _RESERVED:
        return short_name(name, _LONGEST_FOLDER)
    return short_name(f"{name or '_'}-{hashlib.sha256(label.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}", _LONGEST_FOLDER)
