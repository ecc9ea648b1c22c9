"""What of a precision is refused or warned of before minutes of work."""

from __future__ import annotations

from ..errors import GraphError
from ..spec import Precision
from .config import PrecisionConfig


def check_before(config: PrecisionConfig, *, alone: bool = False, tf32: bool = False) -> list[str]:
    """Check before minutes of work that images, and annotations for a budget in AP, are named where they are needed, and exist; returns
    warnings.

    alone: whether nothing but the ONNX graph is built, which ONNX Runtime then has to run. tf32: whether something that is built has TF32.

    Raises:
        GraphError: none are named, or TF32 is asked for where nothing has it. ImageError: they are not there.
        MissingPackageError: pycocotools is not installed.
    """
    if config.precision == Precision.TF32 and not tf32:
        raise GraphError(
            "`precision=tf32` has no effect here: an ONNX graph stays in FP32, and TF32 is how an engine, or a package for a GPU, computes it. "
            "Leave it out, or build with `targets=tensorrt-rtx`, tensorrt, or inductor and `device=cuda`"
        )
    config.check_images()
    if config.calibration is not None:
        from .calibrate import find_images

        _, annotated = find_images(config.calibration, config.calibration_images)
        if config.budget is not None and config.budget[0] == "ap":
            from ..data.datasets import folder_of_images, load_dataset
            from ..evaluation.coco import read_dataset

            if annotated is None:
                raise GraphError("`budget=ap=...` needs annotations: give a COCO file to `calibration`, or `budget=drift=0.01`")
            read_dataset(annotated, folder_of_images(load_dataset(annotated, annotations=False)), config.ap_images)
    warnings = []
    if alone and config.target == Precision.BF16:
        warnings.append(
            "ONNX Runtime has no convolutions in BF16 on CPUs, where this graph then does not run; add an engine or a package "
            "(`targets=tensorrt` or inductor), or take `precision=fp16`"
        )
    if alone and config.target == Precision.INT8 and config.qdq_placement is None:
        warnings.append(
            "this INT8 graph is placed for TensorRT, and slower than FP32 on a CPU; for OpenVINO and ONNX Runtime there give "
            "`qdq_placement=cpu`, for TensorRT `qdq_placement=tensorrt`"
        )
    return warnings
