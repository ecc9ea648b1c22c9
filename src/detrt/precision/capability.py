"""Which GPUs compute in which precision, and whether an engine has layers of the precision that was requested."""

from __future__ import annotations

from collections.abc import Sequence

from ..backends.tensorrt import EngineConfig
from ..bundle import EngineFacts
from ..errors import EngineError, GateError
from .config import PrecisionConfig

# Oldest compute capability with tensor cores (or, for FP32, matrix products in TensorRT-RTX) of a type.
SINCE = {"fp16": 75, "int8": 75, "bf16": 80, "tf32": 80, "fp32": 80, "fp8": 89}


def has(sm: int, precision: str) -> bool:
    """Whether a GPU of compute capability `sm`, e.g. 89, computes in `precision`."""
    return sm >= SINCE[precision]


def check_capability(precision: str, engines: Sequence[EngineConfig]) -> list[str]:
    """Refuse engines that cannot run a type; returns warnings.

    precision: one of SINCE, as `PrecisionConfig.target` (or "tf32") gives it.

    Raises:
        EngineError: a compute capability that lacks the type; says which have it, and what to choose.
    """
    warnings = []
    for config in engines:
        lacking = [sm for sm in config.sms if not has(sm, precision)]
        if lacking:
            kept = [str(sm) for sm in config.sms if has(sm, precision)]
            instead = [name for name in ("fp16", "bf16", "int8") if all(has(sm, name) for sm in config.sms)]
            choose = f"--sm {','.join(kept)}, or " if kept else ""
            raise EngineError(
                f"{precision} does not run on compute capability {', '.join(map(str, lacking))} "
                f"(it needs {SINCE[precision]} or newer); choose {choose}--precision {' or '.join(instead)}"
            )
        if config.target == "tensorrt-rtx" and precision == "int8":
            warnings.append(
                "NVIDIA documents INT8 in TensorRT-RTX for the weights of matrix products only; this graph also "
                "quantises convolutions and activations. It builds, but a gain in speed is not promised: "
                "measure it against --precision fp16"
            )
    return warnings


def check_before(config: PrecisionConfig, engines: Sequence[EngineConfig]) -> list[str]:
    """What can be known before minutes of work: GPUs that lack the type, images that are not there.

    Returns warnings.

    Raises:
        EngineError: a GPU without the type. ImageError: no calibration images.
    """
    if config.calibration is not None:
        from .calibrate import find

        find(config.calibration, config.calibration_images)
    precision = "tf32" if config.precision == "tf32" else config.target
    return check_capability(precision, engines) if precision != "fp32" else []


# TensorRT's name of each low type among the types of an engine's layers.
_ENGINE_TYPE = {"fp16": "HALF", "bf16": "BF16", "int8": "INT8", "fp8": "FP8"}
_LOW = frozenset(_ENGINE_TYPE.values())


def check_engine(facts: EngineFacts, config: PrecisionConfig) -> None:
    """Compare the types of an engine's layers with what was asked for.

    Raises:
        GateError: the engine lacks the low type (a silent upgrade), or has one that was not asked for.
    """
    types, target = dict(facts.layer_types), config.target
    if not types:
        return
    wanted = {_ENGINE_TYPE[name] for name in (target, config.sixteen) if name in _ENGINE_TYPE}
    missing = [kind for kind in wanted if not types.get(kind)]
    extra = [kind for kind in _LOW - wanted if types.get(kind)]
    if missing or extra:
        text = ", ".join(f"{kind} {count}" for kind, count in types.items())
        fault = f"has no {', '.join(sorted(missing))} layer" if missing else f"also has {', '.join(sorted(extra))} layers"
        raise GateError(
            f"--precision {config.precision} was asked for, but the engine {fault} (layer outputs by type: {text}); "
            "build it again from the checkpoint with the --precision that you want"
        )
