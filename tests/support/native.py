"""Where the C++ runtime is built, how its programs are run, and the tensors of the small model that tests it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from detrt.bundle import Bundle, BundleFile, EngineFacts, Provenance
from detrt.files import sha256_of
from detrt.spec import ModelSpec

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("DETRT_CPP_BUILD", ROOT / "build/cpp/test"))
SIDES, QUERIES, CLASSES, LARGEST = (32, 40), 12, 3, 8


def run(*command, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240, **options)


def tensors(*, masks: bool = False) -> tuple[tuple[dict, ...], tuple[dict, ...]]:
    inputs = ({"name": "pixel_values", "dtype": "uint8", "shape": ["batch", 3, *SIDES]},)
    outputs = (
        {"name": "logits", "dtype": "float32", "shape": ["batch", QUERIES, CLASSES]},
        {"name": "pred_boxes", "dtype": "float32", "shape": ["batch", QUERIES, 4]},
    )
    maps = {"name": "mask_logits", "dtype": "float32", "shape": ["batch", QUERIES, SIDES[0] // 4, SIDES[1] // 4]}
    return inputs, (*outputs, maps) if masks else outputs


def small_module():
    """A detector of 12 places whose scores and boxes follow from the pixels; large enough to notice a wrong pixel."""
    import torch

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.features = torch.nn.Conv2d(3, 16, 8, stride=8)
            self.heads = torch.nn.Linear(16, CLASSES + 4)

        def forward(self, pixel_values):
            pixels = pixel_values.to(torch.float32) / 255
            tokens = self.features(pixels).relu().flatten(2).transpose(1, 2)[:, :QUERIES]
            raw = self.heads(tokens) * 6
            return raw[..., :CLASSES], raw[..., CLASSES:].sigmoid()

    return Tiny().eval()


def package(module, spec: ModelSpec, folder: Path) -> Path:
    """The module compiled for the CPU, in a bundle as `detrt build --target inductor` writes it; the path of the package."""
    import torch

    from detrt.backends.inductor.compile import options_for

    pixels = torch.zeros((2, 3, *SIDES), dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1, max=LARGEST)
    program = torch.export.export(module, (pixels,), dynamic_shapes=({0: batch},))
    path = folder / "model.inductor-cpu.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options_for("cpu"))
    inputs, outputs = tensors(masks=spec.has_masks)
    facts = EngineFacts(
        "inductor-cpu",
        torch.__version__,
        (),
        "fp32",
        {"pixel_values": {key: [count, 3, *SIDES] for key, count in (("min", 1), ("opt", 1), ("max", LARGEST))}},
        "",
        inputs=inputs,
        outputs=outputs,
    )
    entry = BundleFile("inductor", path.name, sha256_of(path), path.stat().st_size, facts)
    Bundle(folder, spec, Provenance("test"), (entry,)).save()
    return path
