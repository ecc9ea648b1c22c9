"""Images in, detections out, through any session."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .decode import check_threshold, decode
from .detections import Detections
from .images import ImageSource, load_image
from .preprocess import SizeHW, check_size, group_by_size, preprocess
from .session import Session
from .spec import PIXEL_VALUES, ModelSpec


class Detector:
    """Finds objects: `Detector.open("bundle/")(["street.jpg"])`.

    session: what runs the model; the detector closes it.
    threshold: keep scores above it. classes: names or ids to keep, default all.
    batch_size: images a run, default: what the session was made for (its fixed or largest batch), else 1.
    size_hw: another (height, width) of the input, for models with a dynamic size.
    max_detections: keep at most so many for each image.

    Raises:
        SpecError: unknown class names, or a size that the model cannot take.
        ValueError: threshold, batch_size or max_detections out of range.
    """

    def __init__(
        self,
        session: Session,
        *,
        threshold: float = 0.5,
        batch_size: int | None = None,
        size_hw: SizeHW | None = None,
        classes: Sequence[str | int] | None = None,
        max_detections: int | None = None,
    ) -> None:
        check_threshold(threshold)
        for name, value in (("batch_size", batch_size), ("max_detections", max_detections)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        self.session = session
        self.spec = session.spec
        self.threshold = threshold
        self.max_detections = max_detections
        self.class_ids: Collection[int] | None = None
        if classes is not None:
            self.class_ids = frozenset(self.spec.class_ids([str(name) for name in classes]))
        shape = next((info.shape for info in session.inputs if info.name == PIXEL_VALUES), ())
        self._fixed_batch = shape[0] if shape and isinstance(shape[0], int) and shape[0] > 0 else None
        if size_hw is None and self.spec.input.dynamic and all(isinstance(side, int) for side in shape[2:]):
            size_hw = shape[2:] or None  # an engine of one size from a model of many
        if size_hw is not None:
            size_hw = (int(size_hw[0]), int(size_hw[1]))
        check_size(self.spec.input, size_hw)
        self.size_hw = size_hw
        limit = self._fixed_batch or session.max_batch
        self.batch_size = min(batch_size or limit or 1, limit or batch_size or 1)

    @classmethod
    def open(
        cls,
        ref: str | os.PathLike,
        *,
        device: str | None = None,
        backend: str | None = None,
        provider: str = "cpu",
        threads: int | None = None,
        spec: ModelSpec | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> Detector:
        """Open a bundle, ONNX file, engine or checkpoint; see `sessions.open_session` and `Detector`."""
        from .sessions import open_session

        session = open_session(
            ref,
            backend=backend or "auto",
            provider=provider,
            device=device,
            threads=threads,
            spec=spec,
            trust_remote_code=trust_remote_code,
        )
        try:
            return cls(session, **options)
        except BaseException:
            session.close()
            raise

    def __call__(self, images: Sequence[ImageSource]) -> list[Detections]:
        """Detect in every image; the result has the same length and order.

        images: arrays (H, W, 3) uint8 RGB, or anything that `load_image` takes.

        Raises:
            ImageError: an image that cannot be read. SessionError: the model failed.
        """
        if isinstance(images, (str, bytes, os.PathLike, np.ndarray)) or not isinstance(images, Iterable):
            raise TypeError(
                f"give a list of images, also for one: detector([image]); got {type(images).__name__}"
            )
        return list(self.stream(images))

    def stream(self, images: Iterable[ImageSource]) -> Iterator[Detections]:
        """Detect in images as they come, in order; holds one batch of images in memory."""
        source = iter(images)
        while chunk := [load_image(image) for image in itertools.islice(source, self.batch_size)]:
            yield from self._chunk(chunk)

    def _chunk(self, images: list[NDArray[np.uint8]]) -> list[Detections]:
        results: list[Detections | None] = [None] * len(images)
        sizes = [(image.shape[0], image.shape[1]) for image in images]
        for group in group_by_size(sizes, self.spec, size_hw=self.size_hw):
            for index, found in zip(group, self._batch([images[i] for i in group]), strict=True):
                results[index] = found
        return results  # type: ignore[return-value]  # every index is in one group

    def _batch(self, images: list[NDArray[np.uint8]]) -> list[Detections]:
        count = len(images)
        if self._fixed_batch:  # the model cannot run fewer: repeat the last image and forget its results
            images = images + [images[-1]] * (self._fixed_batch - count)
        batch = preprocess(images, self.spec, size_hw=self.size_hw)
        return decode(
            self.session.run(batch.feeds),
            self.spec,
            batch.original_sizes_hw,
            threshold=self.threshold,
            class_ids=self.class_ids,
            max_detections=self.max_detections,
        )[:count]

    def close(self) -> None:
        """Release the model."""
        self.session.close()

    def __enter__(self) -> Detector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
