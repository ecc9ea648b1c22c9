"""Which GPUs compute in which precision, and whether an engine has layers of the precision that was requested."""

from __future__ import annotations

from collections.abc import Sequence

from ..backends.tensorrt import EngineConfig
from ..bundle import EngineFacts
from ..errors import EngineError, GateError
from ..spec import Precision
from .config import PrecisionConfig


def has(sm: int, precision: Precision) -> bool:
    """Whether a GPU of compute capability `sm`, e.g. 89, computes in `precision`."""
    return sm >= precision.min_compute_capability


def check_capability(precision: Precision, engines: Sequence[EngineConfig]) -> list[str]:
    """Refuse engines that cannot run a precision; returns warnings.

    Raises:
        EngineError: a compute capability that lacks the precision; says which have it, and what to choose.
    """
    warnings = []
    for config in engines:
        lacking = [sm for sm in config.sms if not has(sm, precision)]
        if lacking:
            kept = [str(sm) for sm in config.sms if has(sm, precision)]
            instead = [
                name for name in (Precision.FP16, Precision.BF16, Precision.INT8) if all(has(sm, name) for sm in config.sms)
            ]
            choose = f"--sm {','.join(kept)}, or " if kept else ""
            raise EngineError(
                f"{precision} does not run on compute capability {', '.join(map(str, lacking))} "
                f"(it needs {precision.min_compute_capability} or newer); choose {choose}--precision {' or '.join(instead)}"
            )
        if config.target == "tensorrt-rtx" and precision == Precision.INT8:
            warnings.append(
                "NVIDIA documents INT8 in TensorRT-RTX for the weights of matrix products only; this graph also "
                "quantizes convolutions and activations. It builds, but a gain in speed is not promised: "
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
    precision = Precision.TF32 if config.precision == Precision.TF32 else config.target
    return check_capability(precision, engines) if precision != Precision.FP32 else []


def check_engine(facts: EngineFacts, target: Precision) -> None:
    """Compare the types of an engine's layers with the precision of its graph.

    Raises:
        GateError: the engine lacks the low type (a silent upgrade), or has one that was not asked for.
    """
    types = dict(facts.layer_types)
    if not types:
        return
    low = {kind.tensorrt for kind in Precision if kind.bits < 32}
    wanted = low & {target.tensorrt, target.base.tensorrt}
    missing = [kind for kind in wanted if not types.get(kind)]
    extra = [kind for kind in low - wanted if types.get(kind)]
    if missing or extra:
        text = ", ".join(f"{kind} {count}" for kind, count in types.items())
        fault = f"has no {', '.join(sorted(missing))} layer" if missing else f"also has {', '.join(sorted(extra))} layers"
        raise GateError(
            f"--precision {target} was asked for, but the engine {fault} (layer outputs by type: {text}); "
            "build it again from the checkpoint with the --precision that you want"
        )
