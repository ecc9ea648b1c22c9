"""ONNX Runtime."""

from ..target import Build, Target

TARGET = Target(name="onnxruntime", kind="onnx", builds=(Build("onnx"),))
