"""A GPU session played by ONNX Runtime on the CPU."""

from __future__ import annotations

import pytest

from detrt.backends.gpu.runner import GpuRunner
from detrt.backends.onnxruntime.session import OnnxSession

torch = pytest.importorskip("torch")


class OnDevice(OnnxSession):
    """An ONNX session on the CPU whose images go through the runner of a device, of the CPU by default."""

    device = torch.device("cpu")

    @property
    def image_runner(self):
        if not hasattr(self, "_images"):
            self._images = GpuRunner(self.spec, self.inputs, self.outputs, self.device, self._prepare)
        return self._images

    def _prepare(self, inputs, finish):
        def step():
            found = self.run({name: tensor.cpu().numpy() for name, tensor in inputs.items()})
            return finish({name: torch.from_numpy(found[name]).to(self.device) for name in (info.name for info in self.outputs)})

        results = step()

        def run():
            for kept, fresh in zip(results, step(), strict=True):
                kept.copy_(fresh)

        return run, results
