"""Encoded images -> the inputs of a detector, inside Triton's Python backend."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from detrt.data.images import load_image
from detrt.data.preprocess import preprocess, size_words, tensor_size
from detrt.errors import DetrtError, ImageError
from detrt.serve.triton import IMAGE, ORIGINAL_SIZE
from detrt.spec import PIXEL_MASK, PIXEL_VALUES, read_spec_file


class TritonPythonModel:
    """image (n, 1) bytes -> pixel_values, pixel_mask where the detector has one, and original_size (n, 2) int64."""

    def initialize(self, args: dict[str, Any]) -> None:
        folder = Path(args["model_repository"], args["model_version"])
        self.spec = read_spec_file(folder / "spec.json")
        self.pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "detrt-decode")

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        encoded = pb_utils.get_input_tensor_by_name(request, IMAGE).as_numpy().reshape(-1)
        try:
            images = list(self.pool.map(load_image, [bytes(one) for one in encoded]))
            self._check_sizes([(image.shape[0], image.shape[1]) for image in images])
            batch = preprocess(images, self.spec)
        except DetrtError as error:  # the fault of this request alone
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error)))
        names = [PIXEL_VALUES] + [PIXEL_MASK] * self.spec.input.mask
        tensors = [pb_utils.Tensor(name, batch.feeds[name]) for name in names]
        sizes = np.array(batch.original_sizes_hw, np.int64)
        return pb_utils.InferenceResponse(output_tensors=[*tensors, pb_utils.Tensor(ORIGINAL_SIZE, sizes)])

    def _check_sizes(self, sizes: list[tuple[int, int]]) -> None:
        """Raise ImageError where the images of a request would change each other's results, by padding."""
        made = sorted({tensor_size(size, self.spec.input) for size in sizes})
        if len(made) > 1:
            raise ImageError(
                f"this model takes images of one size in a request, and after resizing these have {size_words(made)}; send a request for "
                "each size, such as for each image: those of one size run together"
            )

    def finalize(self) -> None:
        self.pool.shutdown()
