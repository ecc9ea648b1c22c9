"""What of a precision is refused or warned of before minutes of work."""

from __future__ import annotations

from ..spec import Precision
from .config import PrecisionConfig


def check_before(config: PrecisionConfig, *, alone: bool = False) -> list[str]:
    """Check before minutes of work that images are named where they are needed, and exist; returns warnings.

    alone: whether nothing but the ONNX graph is built, which ONNX Runtime then has to run.

    Raises:
        GraphError: none are named. ImageError: they are not there.
    """
    config.check_images()
    if config.calibration is not None:
        from .calibrate import find_images

        find_images(config.calibration, config.calibration_images)
    warnings = []
    if alone and config.target == Precision.BF16:
        warnings.append(
            "ONNX Runtime has no convolutions in BF16 on CPUs, where this graph then does not run; add an engine or a package "
            "(`targets=tensorrt` or inductor), or take `precision=fp16`"
        )
    return warnings
