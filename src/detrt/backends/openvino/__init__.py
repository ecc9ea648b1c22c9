"""The target `openvino`: ONNX -> OpenVINO IR, and running it on Intel CPUs."""
