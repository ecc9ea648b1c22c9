"""Which GPUs compute in which precision, and whether an engine has layers of the requested precision."""

from __future__ import annotations

from collections.abc import Sequence

from ..backends.tensorrt import EngineConfig
from ..errors import EngineError
from ..spec import Precision
from .config import PrecisionConfig


def supports(sm: int, precision: Precision) -> bool:
    """Whether a GPU of compute capability `sm`, e.g. 89, computes in `precision`."""
    return sm >= precision.min_compute_capability


def check_capability(precision: Precision, engines: Sequence[EngineConfig]) -> None:
    """Raise for engines that cannot run a precision.

    Raises:
        EngineError: a compute capability, or a library, without the precision.
    """
    for config in engines:
        if config.target == "tensorrt-rtx" and precision == Precision.INT8:
            raise EngineError(
                "TensorRT-RTX has INT8 for the weights of matmuls only, by NVIDIA's documentation, and detrt's INT8 graphs quantize "
                "convolutions and activations: version 1.6 fails on them. Choose --precision fp8 (compute capability 89 and newer) or "
                "fp16, or --target tensorrt"
            )
        lacking = [sm for sm in config.sms if not supports(sm, precision)]
        if lacking:
            capable = [str(sm) for sm in config.sms if supports(sm, precision)]
            alternatives = [name for name in (Precision.FP16, Precision.BF16) if all(supports(sm, name) for sm in config.sms)]
            advice = f"--sm {','.join(capable)}, or " if capable else ""
            raise EngineError(
                f"{precision} does not run on compute capability {', '.join(map(str, lacking))} "
                f"(it needs {precision.min_compute_capability} or newer); choose {advice}--precision {' or '.join(alternatives)}"
            )


def check_before(config: PrecisionConfig, engines: Sequence[EngineConfig], *, alone: bool = False) -> list[str]:
    """Check before minutes of work that the GPUs support the type and that the images exist; returns warnings.

    alone: whether nothing but the ONNX graph is built, which ONNX Runtime then has to run.

    Raises:
        EngineError: a GPU without the type. ImageError: no calibration images.
    """
    if config.calibration is not None:
        from .calibrate import find_images

        find_images(config.calibration, config.calibration_images)
    precision = Precision.TF32 if config.precision == Precision.TF32 else config.target
    if precision != Precision.FP32:
        check_capability(precision, engines)
    warnings = []
    if alone and precision == Precision.BF16:
        warnings.append(
            "ONNX Runtime has no convolutions in BF16 on CPUs, where this graph then does not run; add an engine or a package "
            "(--target tensorrt or inductor), or take --precision fp16"
        )
    return warnings
