"""Images of the cases in tests/data/*_cases.json."""

from __future__ import annotations

import numpy as np


def image_of(stored: dict) -> np.ndarray:
    """The image of a case: its pixels, or (a * y + b * x + c * channel + x * y // 7) mod 256."""
    if "pixels" in stored:
        return np.array(stored["pixels"], np.uint8).reshape(stored["shape"])
    y, x, channel = np.indices(stored["shape"])
    a, b, c = stored["gradient"]
    return ((a * y + b * x + c * channel + x * y // 7) % 256).astype(np.uint8)
