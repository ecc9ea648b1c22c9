"""Names of tensors that a Triton repository and its Python models share."""

IMAGE = "image"  # (n, 1) bytes of an encoded image
ORIGINAL_SIZE = "original_size"  # (n, 2) int64, (height, width)
NAMES = "names"  # (n, max_detections) bytes, class names


def input_name(tensor: str) -> str:
    """Name of a detector's output where it is an input; two tensors of one Triton model may not share a name."""
    return f"model_{tensor}"
