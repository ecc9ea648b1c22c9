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


def check_capability(precision: Precision, engines: Sequence[EngineConfig]) -> list[str]:
    """Raise for engines that cannot run a precision; returns warnings.

    Raises:
        EngineError: a compute capability without the precision.
    """
    warnings = []
    for config in engines:
        lacking = [sm for sm in config.sms if not supports(sm, precision)]
        if lacking:
            capable = [str(sm) for sm in config.sms if supports(sm, precision)]
            alternatives = [
                name for name in (Precision.FP16, Precision.BF16, Precision.INT8) if all(supports(sm, name) for sm in config.sms)
            ]
            advice = f"--sm {','.join(capable)}, or " if capable else ""
            raise EngineError(
                f"{precision} does not run on compute capability {', '.join(map(str, lacking))} "
                f"(it needs {precision.min_compute_capability} or newer); choose {advice}--precision {' or '.join(alternatives)}"
            )
        if config.target == "tensorrt-rtx" and precision == Precision.INT8:
            warnings.append(
                "NVIDIA documents INT8 in TensorRT-RTX for the weights of matmuls only; this graph also "
                "quantizes convolutions and activations. It builds, but a gain in speed is not promised: "
                "measure it against --precision fp16"
            )
    return warnings


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
    warnings = check_capability(precision, engines) if precision != Precision.FP32 else []
    if alone and precision == Precision.BF16:
        warnings.append(
            "ONNX Runtime has no convolutions in BF16 on CPUs, where this graph then does not run; add an engine or a package "
            "(--target tensorrt or inductor), or take --precision fp16"
        )
    return warnings
