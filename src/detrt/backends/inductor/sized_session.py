"""Several packages of one model, each for one size, as one session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...data.preprocess import SizeHW, size_words
from ...data.raw_image import Picture
from ...errors import SessionError
from ...spec import PIXEL_VALUES
from ..base import Feeds, Outputs
from .session import InductorSession

if TYPE_CHECKING:
    from ..gpu.decoder import GpuDecoder
    from ..gpu.runner import Pending


class SizedSession:
    """Runs each batch with the session of its size; what is not about size is that of the first session.

    sessions: of one model and device, in the order of preference. sizes: (height, width) of each; a `Detector` gives
    every picture the size whose aspect ratio is nearest to its own, the first of equal ones.
    """

    def __init__(self, sessions: Sequence[InductorSession]) -> None:
        first = sessions[0]
        self._sessions = {_size(session): session for session in sessions}
        self.sizes = tuple(self._sessions)
        self.spec, self.inputs, self.outputs = first.spec, first.inputs, first.outputs
        self.backend, self.path, self.facts = first.backend, Path(first.path), first.facts
        self.min_batch = max(session.min_batch for session in sessions)
        self.max_batch = min(session.max_batch for session in sessions)
        self.note = ""

    def run(self, feeds: Feeds) -> Outputs:
        """Run one batch.

        Raises:
            SessionError: as `InductorSession.run`; a size that is none of `sizes`.
        """
        return self.of(tuple(feeds[PIXEL_VALUES].shape[2:]) if PIXEL_VALUES in feeds else None).run(feeds)

    @property
    def pictures(self) -> SizedSession | None:
        """Itself, where the sessions resize on their device."""
        return self if next(iter(self._sessions.values())).pictures is not None else None

    def submit(
        self, images: Sequence[NDArray[np.uint8] | Picture], size_hw: SizeHW | None = None, batch: int | None = None
    ) -> Pending:
        """As `PictureRunner.submit`."""
        runner = self.of(size_hw).pictures
        assert runner is not None
        return runner.submit(images, size_hw, batch)

    def decoder(self) -> GpuDecoder:
        """As `PictureRunner.decoder`."""
        runner = self.of(None).pictures
        assert runner is not None
        return runner.decoder()

    def of(self, size_hw: SizeHW | None) -> InductorSession:
        """The session of a size, or of the first. Raises SessionError: none is for that size."""
        if size_hw is None:
            size_hw = self.sizes[0]
        if size_hw not in self._sessions:
            raise SessionError(f"no package is for {size_hw[0]}x{size_hw[1]}; there are {size_words(self.sizes)}")
        return self._sessions[size_hw]

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()

    def __enter__(self) -> SizedSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _size(session: InductorSession) -> SizeHW:
    shape = next(info.shape for info in session.inputs if info.name == PIXEL_VALUES)
    return int(shape[2]), int(shape[3])
