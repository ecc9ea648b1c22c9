"""Files and videos decoded by the GPU that runs the model, where it can; by the CPU where it cannot."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.images import ImageSource, load_encoded
from ...data.raw_image import EncodedImage, RawImage
from ...errors import ImageError, MissingPackageError, SessionError, install_hint
from .yuv import GpuImage

Opened = NDArray[np.uint8] | RawImage


class Jpegs(Protocol):
    """What `JpegDecoder` does."""

    def decode(self, files: Sequence[bytes]) -> list[Tensor | None]: ...


class GpuDecoder:
    """Decodes for a model on `device`. For several threads at once.

    jpegs: what decodes JPEG files; None: nvImageCodec, loaded when the first file comes.

    Its pixels of a JPEG file are not Pillow's (docs/guide/compiled-packages.md); those of a video are FFmpeg's, bit for bit.
    """

    def __init__(self, device: torch.device, threads: int = 1, jpegs: Jpegs | None = None) -> None:
        self.index = device.index or 0
        self._device, self._threads, self._jpegs = device, threads, jpegs
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self.counts = {"files on the GPU": 0, "files on the CPU": 0, "videos on the GPU": 0, "videos on the CPU": 0}

    def check(self) -> None:
        """Load what decodes JPEG files. Raises MissingPackageError."""
        with self._lock:
            if self._jpegs is None:
                self._jpegs = JpegDecoder(self.index, self._threads)

    def open(self, source: ImageSource | RawImage) -> Opened:
        """Read an image; a JPEG file stays encoded. Raises ImageError."""
        if isinstance(source, RawImage):
            return source
        opened = load_encoded(source)
        if isinstance(opened, np.ndarray) and not isinstance(source, np.ndarray):
            self._count("files on the CPU", 1)
        return opened

    def decode(self, opened: Sequence[Opened | ImageError]) -> list[Opened | ImageError]:
        """Decode what is still encoded, together. A file that the GPU cannot decode goes to the CPU; where that fails too,
        its place has the error.

        Raises:
            MissingPackageError: nvImageCodec is not installed.
        """
        results = list(opened)
        places = [i for i, one in enumerate(results) if isinstance(one, EncodedImage)]
        if not places:
            return results
        self.check()
        encoded: list[EncodedImage] = [results[i] for i in places]  # type: ignore[misc]
        for place, one, made in zip(places, encoded, self._decoded(encoded), strict=True):
            self._count("files on the GPU" if made is not None else "files on the CPU", 1)
            try:
                results[place] = one.rgb() if made is None else made
            except ImageError as error:
                results[place] = error
        return results

    def _decoded(self, files: Sequence[EncodedImage]) -> list[GpuImage | None]:
        try:
            return self._together(files)
        except RuntimeError:  # out of GPU memory, or a file that the library rejects: one at a time
            return [None] if len(files) == 1 else [made for one in files for made in self._decoded([one])]

    def _together(self, files: Sequence[EncodedImage]) -> list[GpuImage | None]:
        with self._lock, torch.inference_mode():
            if self._stream is None:
                made, ready = self._upright(files), None
            else:
                with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                    made = self._upright(files)
                    ready = torch.cuda.Event()
                    ready.record()
        # Another size than the header's would be another picture.
        return [
            GpuImage(t, ready) if t is not None and tuple(t.shape) == one.shape else None
            for t, one in zip(made, files, strict=True)
        ]

    def _upright(self, files: Sequence[EncodedImage]) -> list[Tensor | None]:
        """Copies in PyTorch's memory, as the library's goes back to it with its picture."""
        assert self._jpegs is not None
        tensors = self._jpegs.decode([one.data for one in files])
        return [
            None if pixels is None else upright(pixels, one.orientation).clone(memory_format=torch.contiguous_format)
            for pixels, one in zip(tensors, files, strict=True)
        ]

    def enter(self) -> None:
        """Make the context of the device that of this thread, for FFmpeg."""
        torch.cuda.set_device(self._device)

    def mark(self) -> Any:
        """An event behind the frame that FFmpeg gave last: it works on the default stream of the device."""
        event = torch.cuda.Event()
        event.record(torch.cuda.default_stream(self._device))
        return event

    def found(self, on_gpu: bool) -> None:
        """Count a video."""
        self._count("videos on the GPU" if on_gpu else "videos on the CPU", 1)

    def __str__(self) -> str:
        """What was decoded where, e.g. "40 files on the GPU, 2 files on the CPU"."""
        return ", ".join(f"{number} {what}" for what, number in self.counts.items() if number) or "nothing"

    def _count(self, what: str, number: int) -> None:
        with self._counting:
            self.counts[what] += number


def upright(pixels: Tensor, orientation: int) -> Tensor:
    """(height, width, 3) as stored -> as seen, for an orientation of EXIF."""
    if orientation in (5, 7):
        pixels = pixels.transpose(0, 1)
    if orientation == 2:
        return pixels.flip(1)
    if orientation == 4:
        return pixels.flip(0)
    turns = {3: 2, 6: 3, 7: 2, 8: 1}.get(orientation, 0)
    return torch.rot90(pixels, turns, (0, 1)) if turns else pixels


# JPEG files decoded by an NVIDIA GPU, through nvImageCodec: the only module that imports `nvidia`.
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
                f"nvImageCodec cannot decode on cuda:{index}: {error}; it needs nvJPEG; {install_hint('decode')}"
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
