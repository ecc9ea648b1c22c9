"""What a model repository of Triton Inference Server is configured for. Options are derived from it, so it loads no library."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial

from ..errors import SpecError
from ..spec import parse_numbers
from ..system import CPU, parse_devices

BACKENDS = ("auto", "onnxruntime", "tensorrt")
MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """Configuration of the repository.

    name: of the ensemble, and prefix of the other names; None: the folder of the bundle. backend: "tensorrt" needs an engine of the
    target tensorrt; "auto" takes one if there is any, else ONNX Runtime. max_batch: largest batch; None: the largest batch of the
    engine, else 16. preferred_batch: at most `max_batch`. queue: largest number of waiting requests; 0: no limit.
    devices: as `detrt.system.parse_devices` returns them; empty: Triton chooses. instances: of the model, per GPU or on the CPU.
    ensemble: also write models that take encoded images and return boxes in pixels. plugin: library with the plugins of the engine.

    Raises:
        SpecError: a value out of range, or devices that Triton does not have.
    """

    name: str | None = field(default=None, metadata={"help": "Name of the model; default: the bundle's folder."})
    backend: str = field(default="auto", metadata={"help": "auto, onnxruntime or tensorrt."})
    max_batch: int | None = field(default=None, metadata={"help": "Largest batch size; default: the engine's, or 16."})
    max_delay_ms: float = field(default=2.0, metadata={"help": "Max queue delay of a request, milliseconds."})
    preferred_batch: tuple[int, ...] = field(
        default=(),
        metadata={
            "help": "Preferred batch sizes, comma-separated: 4,8.",
            "parse": partial(parse_numbers, flag="--preferred-batch"),
        },
    )
    queue: int = field(default=0, metadata={"help": "Longest queue, requests; more are refused; 0: no limit."})
    instances: int = field(default=1, metadata={"help": "Model instances on each device."})
    devices: tuple[str, ...] = field(
        default=(), metadata={"help": "GPUs 0,1 or cpu; default: Triton chooses.", "flag": "--device", "parse": parse_devices}
    )
    threshold: float = field(
        default=0.5,
        metadata={"help": "Lowest score that the ensemble keeps.", "flag": "--threshold -t", "needs": {"ensemble": ()}},
    )
    ensemble: bool = field(
        default=True,
        metadata={"help": "Encoded images in and boxes out, or the detector alone.", "flag": "--ensemble/--model-only"},
    )
    warmup: bool = field(
        default=True, metadata={"help": "Run the detector once when it is loaded.", "flag": "--warmup/--no-warmup"}
    )
    plugin: str | None = field(
        default=None, metadata={"help": "Library with the plugins of the engine, as Triton's machine has it."}
    )

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise SpecError(f"--backend must be one of {', '.join(BACKENDS)}; got {self.backend!r}")
        if self.name is not None and not MODEL_NAME.fullmatch(self.name):
            raise SpecError(f"--name must be letters, digits, '_', '-' and '.', at most 128; got {self.name!r}")
        if not 0 <= self.threshold <= 1:
            raise SpecError(f"--threshold must be from 0 to 1; got {self.threshold}")
        if self.instances < 1:
            raise SpecError(f"--instances must be at least 1; got {self.instances}")
        if self.max_batch is not None and not 1 <= self.max_batch <= 4096:
            raise SpecError(f"--max-batch must be from 1 to 4096; got {self.max_batch}")
        if not 0 <= self.max_delay_ms <= 10_000:
            raise SpecError(f"--max-delay-ms must be from 0 to 10000; got {self.max_delay_ms:g}")
        if self.queue < 0:
            raise SpecError(f"--queue must be 0 (any number) or more; got {self.queue}")
        self.check_preferred(self.max_batch)
        named = ",".join(self.devices)
        if wrong := [one for one in self.devices if one != CPU and not one.startswith("cuda:")]:
            raise SpecError(f"--device: a model of Triton runs on NVIDIA GPUs or on the CPU, not on {wrong[0]}; got {named!r}")
        if self.on_cpu and set(self.devices) != {CPU}:
            raise SpecError(f"--device: a model of Triton runs on GPUs or on the CPU, not on both; got {named!r}")
        if self.on_cpu and self.backend == "tensorrt":
            raise SpecError("--backend tensorrt needs a GPU; leave out --device cpu")

    def check_preferred(self, max_batch: int | None) -> None:
        """Raise SpecError for a preferred batch above the largest one; None: not known yet."""
        wrong = [size for size in self.preferred_batch if size < 1 or (max_batch is not None and size > max_batch)]
        if wrong:
            limit = "" if max_batch is None else f" {max_batch}"
            raise SpecError(f"--preferred-batch must be from 1 to --max-batch{limit}; got {wrong[0]}")

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are the CPU."""
        return CPU in self.devices

    @property
    def gpus(self) -> list[int]:
        """Numbers of the GPUs, each once; empty: none is named."""
        return list(dict.fromkeys(int(one.partition(":")[2]) for one in self.devices if one != CPU))
