"""The caller's choices for one compiled package. No torch is needed to make or check them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..engine.config import LARGEST_BATCH, LARGEST_SIDE, Triple
from ..errors import EngineError

TARGET = "inductor"
DEVICES = ("cpu", "cuda")
TUNES = ("default", "max")
FORMS = ("auto", "aoti", "artifact")
DEFAULT_BATCH = (1, 1, 8)
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


@dataclass(frozen=True, slots=True)
class InductorConfig:
    """How to compile a package. Every value is checked here, before any work.

    device: "cpu" or "cuda"; a package runs on the kind of processor that compiled it. batch: (min, opt, max); one number
    for all three compiles for that batch alone, which is fastest. None: 1 to 8 on a CPU, 1 on a GPU.
    height, width: (n, n, n) in pixels; a package has one size. None: the model's usual one.
    tune: "max" tries many kernels for every product and convolution, which takes minutes.
    form: "aoti" is a package that C++ opens, too; "artifact" is for Python alone, and for a GPU. "auto": see `package_form`.
    timeout_seconds: the build is stopped after it. None: no limit.

    Raises:
        EngineError: a value that is not allowed.
    """

    device: str = "cpu"
    batch: Triple | None = None
    height: Triple | None = None
    width: Triple | None = None
    tune: str = "default"
    form: str = "auto"
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("device", DEVICES), ("tune", TUNES), ("form", FORMS)):
            if getattr(self, name) not in allowed:
                raise EngineError(f"--{name} must be {' or '.join(allowed)} for --target inductor; got {getattr(self, name)!r}")
        if self.device == "cpu" and self.form == "artifact":
            raise EngineError("--form artifact is for --device cuda; a package for the CPU is always aoti")
        for name, largest in (("batch", LARGEST_BATCH), ("height", LARGEST_SIDE), ("width", LARGEST_SIDE)):
            value = getattr(self, name)
            if value is None:
                continue
            object.__setattr__(self, name, tuple(value))
            if len(value) != 3 or not all(type(n) is int and 1 <= n <= largest for n in value) or sorted(value) != list(value):
                raise EngineError(f"--{name} must be one number or MIN,OPT,MAX from 1 to {largest}, rising; got {value}")
        for name in ("height", "width"):
            value = getattr(self, name)
            if value is not None and value[0] != value[2]:
                raise EngineError(
                    f"--target inductor compiles for one size; got --{name} {','.join(map(str, value))}; give one number, and "
                    "build another bundle for another size"
                )
        if (self.height is None) != (self.width is None):
            raise EngineError("give both height and width, or neither")
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise EngineError(f"--timeout must be more than 0 seconds; got {self.timeout_seconds}")

    @property
    def batches(self) -> tuple[int, int]:
        """Smallest and largest batch."""
        low, _, high = self.batch or (DEFAULT_BATCH if self.device == "cpu" else (1, 1, 1))
        return low, high

    @property
    def package_form(self) -> str:
        """ "aoti" or "artifact"."""
        if self.form != "auto":
            return self.form
        return "aoti" if self.device == "cpu" else "artifact"

    @property
    def label(self) -> str:
        return f"{TARGET}-{self.device}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> InductorConfig:
        known = {f.name for f in fields(cls)}
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in known})


def package_name(device: str, compute_capability: int | None, precision: str = "fp32") -> str:
    """File of a package in a bundle: `model.inductor-cpu.pt2`, `model.inductor-sm90.fp16.pt2`."""
    place = "cpu" if device == "cpu" or compute_capability is None else f"sm{compute_capability}"
    return f"model.{TARGET}-{place}{'' if precision in ('fp32', 'tf32') else '.' + precision}.pt2"
