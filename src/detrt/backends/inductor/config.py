"""Configuration of a compiled package. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ...errors import EngineError, check_range, check_timeout
from ...spec import LARGEST_BATCH, LARGEST_SIDE, Precision, TextSpec, Triple, triple_text

TARGET = "inductor"
NATIVE = "machine code of PyTorch's compiler"
DEVICES = ("cpu", "cuda")
TUNES = ("default", "max")
FORMS = ("auto", "aoti", "artifact")
DEFAULT_BATCH = (1, 1, 8)
DEFAULT_TOKENS, MAX_PROMPT_TOKENS = 64, 1024
# Instruction sets that a compiler uses by itself where the CPU has them; AMX and the like it only uses where it is told to.
CPU_FLAGS = re.compile(
    r"ssse3|sse4_[12]|avx(?!512_vp2)\w*|fma4?|f16c|bmi[12]|abm|popcnt|movbe|gfni|vaes|vpclmulqdq|xop|asimd\w*|sve\w*|i8mm|bf16|fphp|atomics"
)
PRECISIONS = tuple(kind for kind in Precision if not kind.quantized)


@dataclass(frozen=True, slots=True)
class InductorConfig:
    """How to compile a package. All values are checked here, before any work.

    Args:
        device: "cpu" or "cuda"; a package runs on the kind of processor that compiled it.
        batch: (min, opt, max); three equal numbers compile for that batch only, which is fastest. None: 1 to 8 on a CPU, 1 on
            a GPU.
        height: (n, n, n) pixels; a package has one size. None: the default size of the model.
        width: as `height`.
        tune: "max" tries many kernels for every matmul and convolution, which takes minutes; GPU only.
        form: "aoti" is a package for Python and C++; "artifact" is for Python on a GPU. "auto": see `package_form`.
        tokens: of a model that takes a prompt: longest prompt in tokens, and longest class list if it takes class names. None:
            64, or the maximum of the model.
        timeout_seconds: limit of the build. None: no limit.

    Raises:
        EngineError: a value that is not allowed.
    """

    device: str = "cpu"
    batch: Triple | None = None
    height: Triple | None = None
    width: Triple | None = None
    tune: str = field(
        default="default",
        metadata={
            "help": "Kernel search on a GPU: default, or max, which takes minutes.",
            "panel": "Engine",
            "needs": {"target": (TARGET,)},
        },
    )
    form: str = field(
        default="auto",
        metadata={
            "help": "Form of the package: aoti (also for C++), artifact (Python, GPU only), or auto.",
            "panel": "Engine",
            "needs": {"target": (TARGET,)},
        },
    )
    tokens: int | None = field(
        default=None,
        metadata={"help": "Longest prompt of a package, tokens; default 64.", "panel": "Prompt", "needs": {"target": (TARGET,)}},
    )
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("device", DEVICES), ("tune", TUNES), ("form", FORMS)):
            if getattr(self, name) not in allowed:
                raise EngineError(f"`{name}` must be {' or '.join(allowed)} for `targets=inductor`; got {getattr(self, name)!r}")
        if self.device == "cpu" and self.tune == "max":
            # PyTorch 2.13's own matmul kernels are wrong for a range of batches, and 5 % faster for a single one.
            raise EngineError("`tune=max` is for `device=cuda`; leave it out, or build for cuda alone")
        if self.device == "cpu" and self.form == "artifact":
            raise EngineError("`form=artifact` is for `device=cuda`; a package for the CPU is always aoti")
        for name, largest in (("batch", LARGEST_BATCH), ("height", LARGEST_SIDE), ("width", LARGEST_SIDE)):
            value = getattr(self, name)
            if value is None:
                continue
            object.__setattr__(self, name, tuple(value))
            if len(value) != 3 or not all(type(n) is int and 1 <= n <= largest for n in value) or sorted(value) != list(value):
                raise EngineError(f"`{name}` must be one number or MIN,OPT,MAX from 1 to {largest}, rising; got {value}")
        for name in ("height", "width"):
            value = getattr(self, name)
            if value is not None and value[0] != value[2]:
                raise EngineError(
                    f"`targets=inductor` compiles each package for one size; got `{name}={triple_text(value)}`; give one "
                    "number, or several sizes: `size=480x640,640x480`"
                )
        if (self.height is None) != (self.width is None):
            raise EngineError("give both height and width, or neither")
        if self.tokens is not None:
            check_range("`tokens`", self.tokens, 4, MAX_PROMPT_TOKENS, EngineError, integer=True)
        check_timeout(self.timeout_seconds, EngineError)

    @property
    def batches(self) -> tuple[int, int]:
        """Smallest and largest batch."""
        low, _, high = self.batch or (DEFAULT_BATCH if self.device == "cpu" else (1, 1, 1))
        return low, high

    def lengths(self, text: TextSpec, num_classes: int) -> tuple[int, int]:
        """(tokens, class names or phrases) that a package of a prompted model takes; 0 where only tokens count."""
        return text.prompt_kind.fixed_lengths(text, num_classes, self.tokens, DEFAULT_TOKENS)

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
        names = {f.name for f in fields(cls)}
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in names})


def package_name(
    device: str, compute_capability: int | None, precision: str = "fp32", size_hw: tuple[int, int] | None = None
) -> str:
    """File name of a package in a bundle: `model.inductor-cpu.pt2`, `model.inductor-sm90.fp16.pt2`.

    size_hw: given if the bundle has packages of several sizes: `model.inductor-sm90-800x1066.fp16.pt2`.
    """
    device_label = "cpu" if device == "cpu" or compute_capability is None else f"sm{compute_capability}"
    if size_hw is not None:
        device_label += f"-{size_hw[0]}x{size_hw[1]}"
    return f"model.{TARGET}-{device_label}{'' if precision in ('fp32', 'tf32') else '.' + precision}.pt2"
