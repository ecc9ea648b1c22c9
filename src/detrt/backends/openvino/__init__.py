"""The target `openvino`: ONNX -> OpenVINO IR, and running it on Intel CPUs."""

from ...system import Ability
from ..target import Build, Target

_HERE = Ability("build and run OpenVINO models", ("openvino",))

TARGET = Target(name="openvino", kind="openvino", builds=(Build("openvino", _HERE),), abilities=(_HERE,))
