"""ONNX Runtime."""

from ..target import Build, Target

TARGET = Target(
    name="onnxruntime",
    kind="onnx",
    words="an ONNX file",
    opener=f"{__name__}.opening:OPENER",
    builder=f"{__name__}.building:BUILDER",
    config=f"{__name__}.config:GraphConfig",
    suffixes=(".onnx",),
    others=("onnxruntime-rtx",),
    devices=("cpu", "cuda", "tensorrt"),
    reads_load=True,
    takes_spec=True,
    title="ONNX Runtime",
    builds=(Build("onnx", takes=("devices",)),),
    gpu_names=("onnxruntime-rtx",),
)
