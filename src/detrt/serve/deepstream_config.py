"""What NVIDIA DeepStream is configured for. Options are derived from it, so it loads no library."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from ..class_names import parse_class_thresholds
from ..errors import SpecError, check_range
from ..spec import parse_size

RESIZERS = ("graph", "nvinfer")
FULL_HD = (1080, 1920)  # (height, width) of nvstreammux in the written application


@dataclass(frozen=True, slots=True)
class DeepStreamConfig:
    """Choices for nvinfer.

    frame_hw: of the frames that reach nvinfer, which are those of nvstreammux; None: FULL_HD, for models that stretch.
    size: input size of the detector; None: its own. resize: the "graph" resizes, exactly as detrt does, or "nvinfer", whose filters
        are others. no_masks: boxes alone, of a model that has masks.

    Raises:
        SpecError: out of range.
    """

    frame_hw: tuple[int, int] | None = field(
        default=None,
        metadata={
            "help": "HEIGHTxWIDTH of nvstreammux; default: 1080x1920, but none for models that keep the aspect ratio.",
            "flag": "frame",
            "parse": partial(parse_size, flag="frame"),
        },
    )
    size: tuple[int, int] | None = field(default=None, metadata={"help": "Input size: 640 or HEIGHTxWIDTH.", "parse": parse_size})
    resize: str = field(
        default="graph",
        metadata={"help": "The graph resizes frames, exactly as detrt does; or nvinfer, with less memory and other pixels."},
    )
    no_masks: bool = field(default=False, metadata={"help": "Boxes alone, of a model that has masks."})
    batch: int = field(default=1, metadata={"help": "Batch size: the number of streams."})
    threshold: float = field(default=0.5, metadata={"help": "Lowest score to keep.", "flag": "threshold t"})
    class_thresholds: tuple[tuple[str, float], ...] = field(
        default=(),
        metadata={
            "help": "Thresholds of classes: person=0.6,car=0.4; may be repeated.",
            "parse": parse_class_thresholds,
            "many": True,
        },
    )

    def __post_init__(self) -> None:
        from ..data.images import MAX_PIXELS

        if self.resize not in RESIZERS:
            raise SpecError(f"`resize` must be {' or '.join(RESIZERS)}; got {self.resize!r}")
        if self.batch < 1:
            raise SpecError(f"`batch` must be at least 1; got {self.batch}")
        check_range("`threshold`", self.threshold, 0, 1, SpecError)
        if self.frame_hw is not None and (min(self.frame_hw) < 2 or self.frame_hw[0] * self.frame_hw[1] > MAX_PIXELS):
            raise SpecError(f"`frame_hw` must be from 2x2 to {MAX_PIXELS} pixels; got {self.frame_hw[0]}x{self.frame_hw[1]}")
        if self.resize == "graph" and self.frame_hw is not None and any(side % 2 for side in self.frame_hw):
            height, width = self.frame_hw
            raise SpecError(
                f"`frame_hw` must be even numbers, as frames of video are; got {height}x{width}: give the height and width of nvstreammux, "
                "e.g. `frame_hw=1080x1920`"
            )
