"""The target `openvino`: ONNX -> OpenVINO IR, and running it on Intel CPUs."""

from ...system import Ability
from ..target import Build, Target

_HERE = Ability("build and run OpenVINO models", ("openvino",))

TARGET = Target(
    name="openvino",
    kind="openvino",
    words="an OpenVINO model",
    opener=f"{__name__}.opening:OPENER",
    builder=f"{__name__}.building:BUILDER",
    config=f"{__name__}.config:OpenVinoConfig",
    suffixes=(".xml",),
    devices=("cpu", "xpu", "npu"),
    tuning=("performance", "streams"),
    tuned_by=f"{__name__}.config:OpenVinoRun",
    title="OpenVINO",
    builds=(Build("openvino", _HERE, takes=("timeout_seconds",)),),
    abilities=(_HERE,),
    sidecar=True,
    placement="cpu",
)
