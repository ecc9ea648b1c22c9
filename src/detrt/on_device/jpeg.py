"""JPEG files decoded by an NVIDIA GPU, through nvImageCodec: the only module that imports `nvidia`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import MissingPackageError

PACKAGE = "nvidia-nvimgcodec-cu13"
# Chroma is interpolated as Pillow does it; without, the edges of colours differ by up to 200 levels.
OPTIONS = ":fancy_upsampling=1"


class JpegDecoder:
    """Decodes on one GPU. Not for several threads at once.

    index: of the CUDA device. threads: of the CPU, for what the GPU leaves to it.

    Raises:
        MissingPackageError: nvImageCodec is not installed.
    """

    def __init__(self, index: int, threads: int = 1) -> None:
        try:
            from nvidia import nvimgcodec
        except ImportError:
            raise MissingPackageError(PACKAGE, "decode", "decoding JPEG files on the GPU") from None
        kinds = (nvimgcodec.BackendKind.HW_GPU_ONLY, nvimgcodec.BackendKind.GPU_ONLY, nvimgcodec.BackendKind.HYBRID_CPU_GPU)
        backends = [nvimgcodec.Backend(kind) for kind in kinds]
        self._decoder: Any = nvimgcodec.Decoder(device_id=index, max_num_cpu_threads=threads, backends=backends, options=OPTIONS)
        self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)

    def decode(self, files: Sequence[bytes]) -> list[Tensor | None]:
        """(height, width, 3) uint8 RGB as stored, in files' order, ready on the current stream; None: it could not."""
        stream = torch.cuda.current_stream().cuda_stream
        images = self._decoder.decode(list(files), params=self._params, cuda_stream=stream)
        return [None if image is None else torch.from_dlpack(image) for image in images]
