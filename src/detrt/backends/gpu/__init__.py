"""Pictures to detections on the device that runs the model; see docs/gpu.md."""
