"""Images to detections on the device that runs the model; see docs/guide/compiled-packages.md."""
