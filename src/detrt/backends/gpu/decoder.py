"""Decoding of JPEG files and videos on the GPU that runs the model, with the CPU as the fallback."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...data.images import ImageSource, load_encoded
from ...data.raw_image import ORIENTATIONS, EncodedImage, LoadedImage, RawImage
from ...errors import ImageError, MissingPackageError, SessionError, install_hint, number_of
from .yuv import GpuImage


class Jpegs(Protocol):
    """Decodes JPEG files, as `JpegDecoder` does."""

    def decode(self, files: Sequence[bytes]) -> list[Tensor | None]: ...


class GpuDecoder:
    """Decodes for a model on `device`. Thread-safe.

    jpegs: decoder of JPEG files; None: nvImageCodec, loaded for the first file.

    Its pixels of a JPEG file are not Pillow's (docs/guide/compiled-packages.md); those of a video are FFmpeg's, bit for bit.
    """

    def __init__(self, device: torch.device, threads: int = 1, jpegs: Jpegs | None = None) -> None:
        self.index = device.index or 0
        self._device, self._threads, self._jpegs = device, threads, jpegs
        # Above the stream of the model (`runner.stream_for`): its short kernels go between those of the model.
        self._stream: Any = torch.cuda.Stream(device, priority=-2) if device.type == "cuda" else None
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self.counts = {"files on the GPU": 0, "files on the CPU": 0, "videos on the GPU": 0, "videos on the CPU": 0}

    def check(self) -> None:
        """Load the JPEG decoder. Raises MissingPackageError."""
        with self._lock:
            if self._jpegs is None:
                self._jpegs = JpegDecoder(self.index, self._threads)

    def open(self, source: ImageSource | RawImage) -> LoadedImage:
        """Read an image; a JPEG file stays encoded. Raises ImageError."""
        if isinstance(source, RawImage):
            return source
        opened = load_encoded(source)
        if isinstance(opened, np.ndarray) and not isinstance(source, np.ndarray):
            self._count("files on the CPU", 1)
        return opened

    def decode(self, opened: Sequence[LoadedImage | ImageError]) -> list[LoadedImage | ImageError]:
        """Decode the files that are still encoded, as one batch. A file that the GPU cannot decode goes to the CPU; if that
        fails too, the result has the error in its position.

        Raises:
            MissingPackageError: nvImageCodec is not installed.
        """
        results = list(opened)
        indices = [i for i, file in enumerate(results) if isinstance(file, EncodedImage)]
        if not indices:
            return results
        self.check()
        encoded: list[EncodedImage] = [results[i] for i in indices]  # type: ignore[misc]
        for index, file, decoded in zip(indices, encoded, self._decode_or_split(encoded), strict=True):
            self._count("files on the GPU" if decoded is not None else "files on the CPU", 1)
            try:
                results[index] = file.rgb() if decoded is None else decoded
            except ImageError as error:
                results[index] = error
        return results

    def _decode_or_split(self, files: Sequence[EncodedImage]) -> list[GpuImage | None]:
        try:
            return self._decode_batch(files)
        except RuntimeError:  # out of GPU memory, or a file that the library rejects: one at a time
            return [None] if len(files) == 1 else [decoded for file in files for decoded in self._decode_or_split([file])]

    def _decode_batch(self, files: Sequence[EncodedImage]) -> list[GpuImage | None]:
        with self._lock, torch.inference_mode():
            if self._stream is None:
                decoded, ready = self._upright(files), None
            else:
                with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                    decoded = self._upright(files)
                    ready = torch.cuda.Event()
                    ready.record()
        # Pixels of another size than the header says would be another image.
        return [
            GpuImage(t, ready) if t is not None and tuple(t.shape) == file.shape else None
            for t, file in zip(decoded, files, strict=True)
        ]

    def _upright(self, files: Sequence[EncodedImage]) -> list[Tensor | None]:
        """Copies in PyTorch's memory, because the library reuses its own."""
        assert self._jpegs is not None
        tensors = self._jpegs.decode([file.data for file in files])
        return [
            None if pixels is None else upright_tensor(pixels, file.orientation).clone(memory_format=torch.contiguous_format)
            for pixels, file in zip(tensors, files, strict=True)
        ]

    def enter(self) -> None:
        """Make the CUDA context of the device current in this thread, for FFmpeg."""
        torch.cuda.set_device(self._device)

    def mark(self) -> Any:
        """A CUDA event after the last frame of FFmpeg, which works on the default stream of the device."""
        event = torch.cuda.Event()
        event.record(torch.cuda.default_stream(self._device))
        return event

    def count_video(self, on_gpu: bool) -> None:
        """Count a video."""
        self._count("videos on the GPU" if on_gpu else "videos on the CPU", 1)

    def __str__(self) -> str:
        """Counts of what was decoded where, e.g. "40 files on the GPU, 2 files on the CPU"."""
        kinds = [(noun, where) for noun in ("file", "video") for where in ("on the GPU", "on the CPU")]
        found = ((self.counts[f"{noun}s {where}"], noun, where) for noun, where in kinds)
        return ", ".join(f"{number_of(number, noun)} {where}" for number, noun, where in found if number) or "nothing"

    def _count(self, what: str, number: int) -> None:
        with self._counting:
            self.counts[what] += number


def upright_tensor(pixels: Tensor, orientation: int) -> Tensor:
    """(height, width, 3) as stored -> as seen, for an orientation of EXIF; the twin of `data.raw_image.upright`."""
    exchanged, rows, columns = ORIENTATIONS.get(orientation, ORIENTATIONS[1])
    if exchanged:
        pixels = pixels.transpose(0, 1)
    reversed_axes = [axis for axis, flipped in enumerate((rows, columns)) if flipped]
    return pixels.flip(reversed_axes) if reversed_axes else pixels


PACKAGE = "nvidia-nvimgcodec-cu13"

# Chroma is interpolated as Pillow does it; without, pixels of 4:2:0 files differ by 48 levels and not by 1.
OPTIONS = ":fancy_upsampling=1"
MAX_REUSED_IMAGES, MAX_REUSED_PIXELS = 16, 1 << 24  # images whose memory is reused, and largest size of one


class JpegDecoder:
    """Decodes JPEG files on one NVIDIA GPU with nvImageCodec. Not thread-safe.

    Args:
        index: of the CUDA device.
        threads: CPU threads for the stages that the GPU leaves to the CPU.
        engines: use the JPEG engines of the GPU if it has them; their pixels are nearer to Pillow's than those of its cores.

    Raises:
        MissingPackageError: nvImageCodec is not installed.
        SessionError: nvImageCodec cannot decode on this GPU.
    """

    def __init__(self, index: int, threads: int = 1, *, engines: bool = True) -> None:
        # nvImageCodec writes to standard error about each file that it cannot decode; the CPU decodes those or raises.
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
                f"nvImageCodec cannot decode on cuda:{index}: {error}; it needs nvJPEG; {install_hint('decode')}"
            ) from error
        self._images: list[Any] = []  # reused, because allocation costs more than decoding
        self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)

    def decode(self, files: Sequence[bytes]) -> list[Tensor | None]:
        """(height, width, 3) uint8 RGB as stored, in files' order, ready on the current stream; None: could not be decoded.

        The pixels are valid until the next call on that stream.
        """
        options: dict[str, Any] = {"params": self._params, "cuda_stream": torch.cuda.current_stream().cuda_stream}
        if len(self._images) >= len(files):
            torch.cuda.current_stream().synchronize()  # earlier reads of that memory
            options["images"] = self._images[: len(files)]
        images = self._decoder.decode(list(files), **options)
        if any(image is not None and image.height * image.width > MAX_REUSED_PIXELS for image in images):
            self._images = []
        elif "images" not in options and len(files) <= MAX_REUSED_IMAGES and None not in images:
            self._images = list(images)
        return [None if image is None else torch.from_dlpack(image) for image in images]
