"""Sessions: a loaded model in PyTorch, ONNX Runtime, TensorRT or a compiled package, behind one interface."""
