"""Run a checkpoint with PyTorch: the reference that everything else is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from .errors import SessionError
from .export.config import ExportConfig
from .export.contract import exported_spec
from .export.module import ExportModule
from .export.onnx import forced_topk
from .session import Feeds, Outputs, TensorInfo, check_feeds
from .spec import (
    BOXES,
    LABELS,
    LOGITS,
    NUM_DETECTIONS,
    PIXEL_MASK,
    PIXEL_VALUES,
    PRED_BOXES,
    SCORES,
    TARGET_SIZES,
    ModelSpec,
)

if TYPE_CHECKING:
    from .sources import Source


class TorchSession:
    """A Session over the plain model, without rewrites.

    source: the checkpoint. device: "cpu", "cuda" or "cuda:N". spec: the contract of inputs and
    outputs; the default takes raw uint8 pixels and gives logits and boxes.

    Raises:
        SessionError: a device that is not there.
    """

    def __init__(self, source: Source, *, device: str = "cpu", spec: ModelSpec | None = None) -> None:
        try:
            self._device = torch.device(device)
            if self._device.type == "cuda" and not torch.cuda.is_available():
                raise SessionError(f"device {device!r}: PyTorch sees no CUDA device here; use --device cpu")
            self.spec = spec or exported_spec(source, ExportConfig())
            self._module = ExportModule(source.module, self.spec).eval().to(self._device)
        except (RuntimeError, ValueError) as error:
            raise SessionError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None
        self.backend = f"torch-{self._device.type}"
        self.max_batch: int | None = None
        self.note = ""
        self.inputs, self.outputs = contract(self.spec)
        self.selections: list[np.ndarray] | None = None

    def run(self, feeds: Feeds) -> Outputs:
        """Run the model. With `selections` set, its top-k calls return those indices (see `forced_topk`)."""
        check_feeds(self.inputs, feeds)
        tensors = [torch.from_numpy(np.ascontiguousarray(feeds[i.name])).to(self._device) for i in self.inputs]
        try:
            with torch.inference_mode():
                if self.selections is None:
                    results = self._module(*tensors)
                else:
                    with forced_topk([torch.from_numpy(s).to(self._device) for s in self.selections]):
                        results = self._module(*tensors)
        except RuntimeError as error:
            raise SessionError(f"PyTorch failed: {' '.join(str(error).split())[:400]}") from error
        arrays = (r.float().cpu().numpy() if r.is_floating_point() else r.cpu().numpy() for r in results)
        return dict(zip((info.name for info in self.outputs), arrays, strict=True))

    def close(self) -> None:
        self._module = torch.nn.Identity()  # type: ignore[assignment]


def contract(spec: ModelSpec) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """Inputs and outputs of a graph by its spec."""
    height, width = ("height", "width") if spec.input.dynamic else spec.input.size_hw
    inputs: list[TensorInfo] = [TensorInfo(PIXEL_VALUES, spec.input.dtype, ("batch", 3, height, width))]
    if spec.input.mask:
        inputs.append(TensorInfo(PIXEL_MASK, "int64", ("batch", height, width)))
    rule = spec.decode
    if not rule.in_graph:
        columns = rule.num_classes + (rule.activation == "softmax")
        outputs: Sequence[TensorInfo] = (
            TensorInfo(LOGITS, "float32", ("batch", rule.num_queries, columns)),
            TensorInfo(PRED_BOXES, "float32", ("batch", rule.num_queries, 4)),
        )
    else:
        inputs.append(TensorInfo(TARGET_SIZES, "int64", ("batch", 2)))
        outputs = (
            TensorInfo(BOXES, "float32", ("batch", rule.max_detections, 4)),
            TensorInfo(SCORES, "float32", ("batch", rule.max_detections)),
            TensorInfo(LABELS, "int64", ("batch", rule.max_detections)),
            TensorInfo(NUM_DETECTIONS, "int64", ("batch",)),
        )
    return tuple(inputs), tuple(outputs)
