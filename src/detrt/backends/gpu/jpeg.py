"""JPEG files decoded by an NVIDIA GPU, through nvImageCodec: the only module that imports `nvidia`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import MissingPackageError, SessionError

PACKAGE = "nvidia-nvimgcodec-cu13"
# Chroma is interpolated as Pillow does it; without, pixels of 4:2:0 files differ by 48 levels and not by 1.
OPTIONS = ":fancy_upsampling=1"
MOST_KEPT, LARGEST_KEPT = 16, 1 << 24  # pictures whose memory is kept, and pixels of one


class JpegDecoder:
    """Decodes on one GPU. Not for several threads at once.

    index: of the CUDA device. threads: of the CPU, for what the GPU leaves to it. engines: use the JPEG engines of the GPU
    where it has them, whose pixels are nearer to Pillow's than those of its other cores.

    Raises:
        MissingPackageError: nvImageCodec is not installed. SessionError: it cannot decode there.
    """

    def __init__(self, index: int, threads: int = 1, *, engines: bool = True) -> None:
        # Its own lines on standard error about files that it cannot decode: the CPU decodes them, or says what is wrong.
        os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
        try:
            from nvidia import nvimgcodec
        except ImportError:
            raise MissingPackageError(PACKAGE, "decode", "decoding JPEG files on the GPU") from None
        kinds = [nvimgcodec.BackendKind.GPU_ONLY, nvimgcodec.BackendKind.HYBRID_CPU_GPU]
        backends = [nvimgcodec.Backend(kind) for kind in [nvimgcodec.BackendKind.HW_GPU_ONLY] * engines + kinds]
        try:
            self._decoder: Any = nvimgcodec.Decoder(
                device_id=index, max_num_cpu_threads=threads, backends=backends, options=OPTIONS
            )
        except RuntimeError as error:
            raise SessionError(
                f"nvImageCodec cannot decode on cuda:{index}: {error}; it needs nvJPEG: pip install 'detrt[decode]'"
            ) from error
        self._images: list[Any] = []  # their memory is used again: taking it anew costs more than decoding
        self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)

    def decode(self, files: Sequence[bytes]) -> list[Tensor | None]:
        """(height, width, 3) uint8 RGB as stored, in files' order, ready on the current stream; None: it could not.

        The pixels stay until the next call on that stream.
        """
        given: dict[str, Any] = {"params": self._params, "cuda_stream": torch.cuda.current_stream().cuda_stream}
        if len(self._images) >= len(files):
            torch.cuda.current_stream().synchronize()  # what was read of them last
            given["images"] = self._images[: len(files)]
        images = self._decoder.decode(list(files), **given)
        if any(image is not None and image.height * image.width > LARGEST_KEPT for image in images):
            self._images = []
        elif "images" not in given and len(files) <= MOST_KEPT and None not in images:
            self._images = list(images)
        return [None if image is None else torch.from_dlpack(image) for image in images]
