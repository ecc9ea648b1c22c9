"""What a model repository of Triton Inference Server is configured for. Options are derived from it, so it loads no library."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial

from ..backends.targets import BACKEND, check_backend, needs_gpu
from ..data.arguments import IMAGE_DECODER, INPUT_SIZE, REQUEST_THRESHOLD, check_image_decoder
from ..errors import SpecError, check_one_of, check_range
from ..spec import Precision, parse_numbers
from ..system import CPU, parse_devices

MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
BUNDLE = "bundle"  # folder in a version of a model


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """Configuration of a model in a repository.

    name: of the model; None: the folder of the bundle. version: its folder in the model. backend, threads, size, image_decoder,
    threshold: as `ServeConfig` takes them. devices: as `detrt.system.parse_devices` returns them; empty: the CPU, or the first GPU for a backend that needs one. instances: on each
    device. precision: the model is not loaded where another one was opened; "" takes any. max_batch: largest batch.
    preferred_batch: at most `max_batch`. queue: largest number of waiting requests; 0: no limit. rows: of every output, for clients
    that need fixed shapes; None: as many as there are detections. environment: folder of the Python environment that has detrt, on
    Triton's machine; None: that of Triton.

    Raises:
        SpecError: a value out of range, or devices of different kinds.
    """

    name: str | None = field(default=None, metadata={"help": "Name of the model; default: the bundle's folder."})
    version: int = field(default=1, metadata={"help": "Version of the model; the others that are there stay."})
    backend: str = field(default="auto", metadata=BACKEND)
    devices: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "cpu, or comma-separated GPUs: 0,1; default: cpu, or 0 with a backend that needs one.",
            "flag": "device",
            "parse": parse_devices,
        },
    )
    instances: int = field(default=1, metadata={"help": "Model instances on each device."})
    precision: str = field(default="", metadata={"help": "Load the model only where it runs in this precision, such as fp16."})
    max_batch: int = field(default=8, metadata={"help": "Largest batch size."})
    max_delay_ms: float = field(default=2.0, metadata={"help": "Max queue delay of a request, milliseconds."})
    preferred_batch: tuple[int, ...] = field(
        default=(),
        metadata={
            "help": "Preferred batch sizes, comma-separated: 4,8.",
            "parse": partial(parse_numbers, flag="preferred_batch"),
        },
    )
    queue: int = field(default=0, metadata={"help": "Longest queue, requests; more are refused; 0: no limit."})
    threshold: float = field(default=0.5, metadata=REQUEST_THRESHOLD)
    rows: int | None = field(
        default=None, metadata={"help": "Detections in every output, filled up with 0; default: as many as there are."}
    )
    size: tuple[int, int] | None = field(default=None, metadata=INPUT_SIZE)
    threads: int | None = field(
        default=None,
        metadata={"help": "Threads of an instance; default: the cores divided by the instances.", "panel": "Advanced"},
    )
    image_decoder: str = field(default="cpu", metadata={**IMAGE_DECODER, "panel": "Advanced"})
    environment: str | None = field(
        default=None,
        metadata={
            "help": "Python environment with detrt, as Triton's machine has it; default: Triton's own.",
            "panel": "Advanced",
        },
    )

    def __post_init__(self) -> None:
        check_backend(self.backend, SpecError)
        if self.name is not None and not MODEL_NAME.fullmatch(self.name):
            raise SpecError(f"`name` must be letters, digits, '_', '-' and '.', at most 128; got {self.name!r}")
        if self.precision:
            check_one_of("`precision`", self.precision, tuple(Precision), SpecError)
        check_image_decoder(self.image_decoder)
        if self.environment is not None and not self.environment.startswith(("/", "$$TRITON_MODEL_DIRECTORY")):
            raise SpecError(f"`environment` must be the whole path of a folder on Triton's machine; got {self.environment!r}")
        for name, low, high in (
            ("version", 1, 2**31 - 1),
            ("instances", 1, 256),
            ("max_batch", 1, 1024),
            ("max_delay_ms", 0, 10_000),
            ("queue", 0, 1_000_000),
            ("threshold", 0, 1),
            ("rows", 1, 100_000),
            ("threads", 1, 1024),
        ):
            if (value := getattr(self, name)) is not None:
                check_range(f"`{name}`", value, low, high, SpecError)
        if wrong := [size for size in self.preferred_batch if not 1 <= size <= self.max_batch]:
            raise SpecError(f"`preferred_batch` must be from 1 to `max_batch={self.max_batch}`; got {wrong[0]}")
        if not self.devices and needs_gpu(self.backend):
            object.__setattr__(self, "devices", ("cuda:0",))
        kinds = {one.partition(":")[0] for one in self.devices}
        if len(kinds) > 1 or (self.devices and not self.gpus and len(set(self.devices)) > 1):
            raise SpecError(
                f"`device`: a model of Triton runs on NVIDIA GPUs or on one other device; got {','.join(self.devices)!r}"
            )

    @property
    def device(self) -> str:
        """The parameter of the model: "cuda", whose number Triton gives to each instance, or the device."""
        return "cuda" if self.gpus else self.devices[0] if self.devices else CPU

    @property
    def gpus(self) -> list[int]:
        """Numbers of the GPUs, each once; empty: none is named."""
        return list(dict.fromkeys(int(one.partition(":")[2]) for one in self.devices if one.startswith("cuda:")))
