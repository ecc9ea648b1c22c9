"""PyTorch on an NVIDIA GPU against PyTorch on the CPU: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from detrt.backends.torch.session import TorchSession
from detrt.data.matching import Gate
from detrt.data.scenes.scene import draw_scene
from detrt.evaluation.parity import verify
from detrt.models.hooks import forced_topk
from detrt.models.load import load_source

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    """TF32 keeps 10 bits of the mantissa; the gate is that of FP32."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("reference", ["embedded:shapes", "random:deformable_detr/tiny", "random:detr/tiny"])
def test_detections_on_the_gpu_equal_those_on_the_cpu(reference: str) -> None:
    source = load_source(reference)
    on_cpu = TorchSession(source)
    images = [draw_scene(seed).image for seed in range(900_000_100, 900_000_116)]
    on_gpu = TorchSession(load_source(reference), device="cuda:0")
    report = verify(on_cpu, on_gpu, images, gate=Gate(), batch_size=4)
    assert on_gpu.info.name == "torch-cuda"
    assert report.failures == []


@contextlib.contextmanager
def recorded_topk() -> Iterator[list[np.ndarray]]:
    """The indices of every `topk` in the block, in call order."""
    import torch

    found: list[np.ndarray] = []
    function, method = torch.topk, torch.Tensor.topk

    def kept(original):
        def topk(*args, **kwargs):
            result = original(*args, **kwargs)
            found.append(result[1].cpu().numpy())
            return result

        return topk

    torch.topk, torch.Tensor.topk = kept(function), kept(method)
    try:
        yield found
    finally:
        torch.topk, torch.Tensor.topk = function, method


FAMILIES = {
    "deformable_detr": 4,
    "rt_detr": 2,
    "rt_detr_v2": 2,
    "d_fine": 2,
    "deimv2": 2,
    "lw_detr": 2,
    "rf_detr": 2,
    "dino": 4,
    "grounding_dino": 4,
    "mm_grounding_dino": 4,
    "omdet_turbo": 2,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_deformable_family_runs_our_kernel_and_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the whole model, CPU against GPU, without decoding; the launches of the kernel are counted."""
    import torch

    import detrt.models.ops.msda_launch as launch
    from detrt.models.contract import ExportConfig, exported_spec
    from detrt.models.example_inputs import example_feeds, example_ids
    from detrt.text.kinds import token_feeds

    launches = []
    whole = launch.launch_msda
    monkeypatch.setattr(launch, "launch_msda", lambda *args, **kwargs: launches.append(1) or whole(*args, **kwargs))
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        source = load_source(f"random:{name}/tiny")
        spec = exported_spec(source, ExportConfig())
        if spec.text is not None and spec.text.prompt_kind.reads_ids:
            spec = replace(spec, text=replace(spec.text, encoder=""))  # the plain model reads token ids itself
        session = TorchSession(source, device=device, spec=spec)
        step = spec.input.multiple_of
        size = spec.input.size_hw if not spec.input.dynamic else (-(-96 // step) * step, -(-160 // step) * step)
        feeds = example_feeds(spec, batch=2, size_hw=size)
        if spec.text is not None:
            feeds |= token_feeds(example_ids(source, 2, 8), spec)
        rng = np.random.default_rng(0)
        for info in session.inputs:  # what a text encoder gives
            shape = [{"batch": 2}.get(axis, 4) if isinstance(axis, str) else axis for axis in info.shape]
            made = rng.normal(size=shape).astype("float32") if info.dtype == "float32" else np.ones(shape, info.dtype)
            feeds.setdefault(info.name, made)
        # Which of two equal scores comes first is up to the device; everything after a selection depends on it.
        if device == "cpu":
            with recorded_topk() as selections:
                results.append(session.run({info.name: feeds[info.name] for info in session.inputs}))
        else:
            with forced_topk(selections):
                results.append(session.run({info.name: feeds[info.name] for info in session.inputs}))
        assert session.info.note == ""
    assert len(launches) == FAMILIES[name]
    for key, expected in results[0].items():
        assert abs(results[1][key] - expected).max() < 2e-3 * max(abs(expected).max(), 1.0), key
