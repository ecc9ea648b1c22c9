"""Run a checkpoint with PyTorch: the reference that everything else is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from .errors import SessionError
from .export.config import ExportConfig
from .export.contract import contract, exported_spec
from .export.module import ExportModule
from .export.onnx import forced_topk
from .session import Feeds, Outputs, check_feeds
from .spec import ModelSpec

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
