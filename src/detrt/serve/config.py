"""Choices of the server."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data.images import MAX_PIXELS
from ..detector import IMAGE_DECODERS
from ..errors import SessionError
from ..system import usable_cores

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and the name that requests give it. ref: anything that `detrt.open_session` takes."""

    name: str
    ref: str


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """How to serve.

    max_batch: images a run. max_delay_ms: how long an image waits for others while a worker has nothing to do.
    workers: processes for each device; None: two that share the cores of a CPU, one for each GPU.
    devices: as `detrt.system.parse_devices` returns them. threads: of each CPU worker; None: its share of the cores.
    size_hw: another (height, width) of the input, for models with a dynamic size. image_decoder: as `detrt.Detector` takes it.
    queue: images that may wait; None: 32 batches for each worker, at least 256. Beyond it requests are refused (429).
    timeout_s: longest time from a request to its answer. body_timeout_s: longest time for a body to arrive.
    drain_s: longest time that requests have to finish after SIGTERM.
    max_body_mib: of one request. max_held_mib: of all request bodies that the server holds at a time.
    max_pixels: of one image. max_images: in one request. threshold: where a request gives none.
    api_key: what requests must show; None: nothing. access_log: print a line for each request.

    Raises:
        SessionError: a value out of range, or no model.
    """

    models: tuple[ServedModel, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 8
    max_delay_ms: float = 2.0
    workers: int | None = None
    devices: tuple[str, ...] = ("cpu",)
    threads: int | None = None
    backend: str = "auto"
    size_hw: tuple[int, int] | None = None
    image_decoder: str = "cpu"
    queue: int | None = None
    timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    drain_s: float = 30.0
    max_body_mib: int = 32
    max_held_mib: int = 512
    max_pixels: int = 50_000_000
    max_images: int = 32
    threshold: float = 0.5
    api_key: str | None = None
    access_log: bool = False

    def __post_init__(self) -> None:
        if not self.models:
            raise SessionError("there is no model to serve; give a bundle folder: detrt serve BUNDLE")
        names = [model.name for model in self.models]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise SessionError(f"two models have the name '{twice[0]}'; give one of them another: other-name={twice[0]}")
        ranges: dict[str, tuple[float, float]] = {
            "port": (0, 65535),
            "max_batch": (1, 1024),
            "max_delay_ms": (0, 10_000),
            "workers": (1, 256),
            "threads": (1, 1024),
            "queue": (1, 1_000_000),
            "timeout_s": (0.01, 86_400),
            "body_timeout_s": (0.01, 86_400),
            "drain_s": (0, 86_400),
            "max_body_mib": (1, 4096),
            "max_held_mib": (1, 1_000_000),
            "max_pixels": (1, MAX_PIXELS),
            "max_images": (1, 10_000),
            "threshold": (0, 1),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                option = "--" + name.removesuffix("_s").replace("_", "-")
                raise SessionError(f"{option} must be from {low:g} to {high:g}; got {value:g}")
        if self.max_held_mib < self.max_body_mib:
            raise SessionError(
                f"--max-held-mib ({self.max_held_mib}) must be at least --max-body-mib ({self.max_body_mib}), or no such body "
                "is ever taken"
            )
        if self.image_decoder not in IMAGE_DECODERS:
            raise SessionError(f"--image-decoder must be {' or '.join(IMAGE_DECODERS)}; got {self.image_decoder!r}")
        if not self.devices:
            raise SessionError("there is no device to run on; give --devices cpu or --devices 0")
        if self.api_key is not None and not re.fullmatch(r"[\x21-\x7e]{8,512}", self.api_key):
            raise SessionError("an API key must have 8 to 512 printable ASCII characters without spaces; make another one")

    @property
    def places(self) -> tuple[str, ...]:
        """The device of each worker process."""
        return tuple(device for device in self.devices for _ in range(self.workers or self._usual_workers(device)))

    def threads_on(self, device: str) -> int:
        """Threads of one worker: of the model on a CPU, of the decoder of images on a GPU."""
        if self.threads is not None:
            return self.threads
        share = max(1, usable_cores() // max(1, len(self.places)))
        return share if device == "cpu" else min(4, share)

    @property
    def queue_size(self) -> int:
        return self.queue if self.queue is not None else max(256, 32 * self.max_batch * len(self.places))

    @property
    def max_body(self) -> int:
        """Bytes."""
        return self.max_body_mib * MIB

    def _usual_workers(self, device: str) -> int:
        # Two, so that one goes on while the other is replaced; they also decode images side by side.
        return min(2, usable_cores()) if device == "cpu" and len(self.devices) == 1 else 1


def named_models(references: Sequence[str]) -> tuple[ServedModel, ...]:
    """`BUNDLE` or `NAME=BUNDLE` -> models; the name of a bundle is that of its folder.

    Raises:
        SessionError: a name that an address cannot hold.
    """
    models = []
    for text in references:
        name, equals, ref = text.partition("=")
        if not equals or os.path.exists(text):
            ref = text
            scheme, colon, rest = text.partition(":")
            plain = rest if colon and "/" not in scheme else text
            path = Path(os.path.abspath(plain))
            name = path.stem if path.suffix.lower() in (".onnx", ".engine", ".plan") else path.name
        if not ref:
            raise SessionError(f"'{text}' names no model; write NAME=BUNDLE")
        if not _NAME.fullmatch(name):
            raise SessionError(
                f"the name of a model has 1 to 100 letters, digits, '.', '_' and '-'; got '{name}': give another one, name={ref}"
            )
        models.append(ServedModel(name, ref))
    return tuple(models)
