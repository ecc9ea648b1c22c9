"""Configuration of the server."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..backends.targets import BACKEND, TARGETS, check_backend, needs_gpu, tuned
from ..data.arguments import IMAGE_DECODER, INPUT_SIZE, REQUEST_THRESHOLD, check_image_decoder
from ..data.images import FAST_FORMATS, MAX_PIXELS, parse_image_formats
from ..errors import SessionError, check_range
from ..models.load_options import LoadOptions
from ..system import CPU, parse_devices, usable_cores
from .hosts import parse_hosts, parse_origins

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and its name in requests. ref: as for `detrt.open_session`. load: how a checkpoint is read, or an ONNX file of another
    exporter."""

    name: str
    ref: str
    load: LoadOptions = field(default_factory=LoadOptions)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Configuration of the server. All values are checked here.

    max_batch: largest batch. max_delay_ms: longest time that an image waits for others while a worker is idle.
    workers: processes per device; None: two that share the cores of a CPU, one per GPU.
    devices: as `detrt.system.parse_devices` returns them; empty: the CPU, or the first GPU with the backend "tensorrt".
    threads: per CPU worker; None: cores divided by workers. tuning: as of `SessionOptions`; where OpenVINO's `performance` is
        "throughput", a worker divides a batch among its streams.
    size: another (height, width) of the input, for models with a dynamic size. image_decoder: as `detrt.Detector` takes it.
    queue: largest number of waiting images; None: 32 batches per worker, at least 256. Further requests are refused (429).
    timeout_s: longest time from a request to its response. body_timeout_s: longest time for a body to arrive.
    drain_s: longest time that requests have to finish after SIGTERM.
    max_body_mib: of one request. max_held_mib: of all request bodies in memory.
    max_pixels: of one image. max_images: in one request. image_formats: of Pillow, that are read; the usual ones are decoded fast.
    max_prompt_runs: of the model for one image; a list of class names that is longer than the model takes needs several.
    start_timeout_s: longest time for a worker to open its models. threshold: default of a request.
    allowed_hosts, allowed_origins: as `detrt.serve.hosts.parse_hosts` and `parse_origins` return them; empty: see `Hosts`.
    api_key: that requests must send; None: none. access_log: print a line for each request.
    spelled: names options of the server in answers as its operator types them.

    Raises:
        SessionError: a value out of range, or no model.
    """

    models: tuple[ServedModel, ...]
    host: str = field(
        default="127.0.0.1",
        metadata={"help": "Address to listen on; 0.0.0.0 is every one."},
    )
    port: int = field(
        default=8000,
        metadata={"help": "Port; 0 takes a free one.", "flag": "port p"},
    )
    max_batch: int = field(
        default=8,
        metadata={"help": "Largest batch size.", "panel": "Size"},
    )
    max_delay_ms: float = field(
        default=2.0,
        metadata={"help": "Max queue delay of an image while a worker is idle, milliseconds."},
    )
    workers: int | None = field(
        default=None,
        metadata={"help": "Worker processes per device; default: 2 on a CPU, 1 on a GPU."},
    )
    devices: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "cpu, or comma-separated GPUs: 0,1 or cuda:all; default: cpu, and cuda:0 with `backend=tensorrt`.",
            "flag": "device",
            "parse": parse_devices,
        },
    )
    threads: int | None = field(
        default=None,
        metadata={"help": "Threads of a CPU worker; default: the cores divided by the workers.", "panel": "Advanced"},
    )
    backend: str = field(
        default="auto",
        metadata=BACKEND,
    )
    tuning: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[int, int] | None = field(default=None, metadata=INPUT_SIZE)
    image_decoder: str = field(default="cpu", metadata=IMAGE_DECODER)
    queue: int | None = field(
        default=None,
        metadata={"help": "Longest queue, images; more are refused with 429.", "panel": "Advanced"},
    )
    timeout_s: float = field(
        default=30.0,
        metadata={"help": "Longest time of a request, seconds.", "flag": "timeout", "panel": "Advanced"},
    )
    body_timeout_s: float = field(
        default=30.0,
        metadata={"help": "Longest time for a body to arrive, seconds.", "flag": "body-timeout", "panel": "Advanced"},
    )
    drain_s: float = field(
        default=30.0,
        metadata={"help": "Longest time for requests to finish after SIGTERM, seconds.", "flag": "drain", "panel": "Advanced"},
    )
    max_body_mib: int = field(
        default=32,
        metadata={"help": "Largest body, MiB.", "panel": "Advanced"},
    )
    max_held_mib: int = field(
        default=512,
        metadata={"help": "Memory of all bodies together, MiB.", "panel": "Advanced"},
    )
    max_pixels: int = field(
        default=50_000_000,
        metadata={"help": "Largest image, pixels.", "panel": "Advanced"},
    )
    max_images: int = field(
        default=32,
        metadata={"help": "Largest number of images per request.", "panel": "Advanced"},
    )
    image_formats: tuple[str, ...] = field(
        default=FAST_FORMATS,
        metadata={
            "help": "Image formats that are read, comma-separated, by name or suffix.",
            "panel": "Advanced",
            "parse": parse_image_formats,
        },
    )
    max_prompt_runs: int = field(
        default=8,
        metadata={"help": "Largest number of runs that the class names of a prompt may need.", "panel": "Advanced"},
    )
    start_timeout_s: float = field(
        default=600.0,
        metadata={
            "help": "Longest time for a worker to open its models, seconds.",
            "flag": "start-timeout",
            "panel": "Advanced",
        },
    )
    threshold: float = field(default=0.5, metadata=REQUEST_THRESHOLD)
    allowed_hosts: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Names that requests may have in Host, comma-separated, or *; default: those of the loopback if `host` is one, else all.",
            "panel": "Advanced",
            "parse": parse_hosts,
        },
    )
    allowed_origins: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Origins of other servers' pages, such as https://app.example, or *; default: as `allowed_hosts`.",
            "panel": "Advanced",
            "parse": parse_origins,
        },
    )
    api_key: str | None = None
    access_log: bool = field(
        default=False,
        metadata={"help": "A line for each request on stderr.", "flag": "access-log"},
    )
    spelled: Callable[[str], str] = str

    def __post_init__(self) -> None:
        if not self.models:
            raise SessionError("there is no model to serve; give a bundle folder: detrt serve BUNDLE")
        check_backend(self.backend, SessionError)
        for name in self.tuning:
            tuned(name)
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
            "max_prompt_runs": (1, 1000),
            "start_timeout_s": (1, 86_400),
            "threshold": (0, 1),
        }
        for name, (low, high) in ranges.items():
            if (value := getattr(self, name)) is not None:
                check_range(f"`{name}`", value, low, high, SessionError)
        if self.max_held_mib < self.max_body_mib:
            raise SessionError(
                f"`max_held_mib` ({self.max_held_mib}) must be at least `max_body_mib` ({self.max_body_mib}), or no such body "
                "is ever taken"
            )
        check_image_decoder(self.image_decoder)
        if not self.devices:
            object.__setattr__(self, "devices", ("cuda:0",) if needs_gpu(self.backend) else (CPU,))
        if self.api_key is not None and not re.fullmatch(r"[\x21-\x7e]{8,512}", self.api_key):
            raise SessionError("an API key must have 8 to 512 printable ASCII characters without spaces; make another one")

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each worker process."""
        return tuple(device for device in self.devices for _ in range(self.workers or self._usual_workers(device)))

    def threads_on(self, device: str) -> int:
        """Threads of one worker: of the model on a CPU, of the decoder of images on a GPU."""
        if self.threads is not None:
            return self.threads
        share = max(1, usable_cores() // max(1, len(self.worker_devices)))
        return share if device == "cpu" else min(4, share)

    @property
    def queue_size(self) -> int:
        return self.queue if self.queue is not None else max(256, 32 * self.max_batch * len(self.worker_devices))

    @property
    def max_body(self) -> int:
        """Bytes."""
        return self.max_body_mib * MIB

    def _usual_workers(self, device: str) -> int:
        # Two, so that one continues while the other is replaced; they also decode in parallel.
        return min(2, usable_cores()) if device == "cpu" and len(self.devices) == 1 else 1


def named_models(references: Sequence[str]) -> tuple[ServedModel, ...]:
    """`BUNDLE` or `NAME=BUNDLE` -> models; the default name of a bundle is that of its folder.

    Raises:
        SessionError: a name that is not allowed in a URL.
    """
    suffixes = [suffix for target in TARGETS for suffix in target.suffixes]
    models = []
    for text in references:
        name, equals, ref = text.partition("=")
        if not equals or os.path.exists(text):
            ref = text
            scheme, colon, rest = text.partition(":")
            plain = rest if colon and "/" not in scheme else text
            path = Path(os.path.abspath(plain))
            name = path.stem if path.suffix.lower() in suffixes else path.name
        if not ref:
            raise SessionError(f"'{text}' names no model; write NAME=BUNDLE")
        if not _NAME.fullmatch(name):
            raise SessionError(
                f"the name of a model has 1 to 100 letters, digits, '.', '_' and '-'; got '{name}': give another one, name={ref}"
            )
        models.append(ServedModel(name, ref))
    return tuple(models)
