"""The compiler process: `python -m detrt.backends.inductor.worker FD`.

PyTorch's compiler takes minutes and gigabytes, and a failing C++ compiler may crash its process, so it runs in a process of its
own. The request: {"ref", "loading", "spec", "config", "precision", "package"}.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import GateError, one_line
from ...models.contract import contract
from ...models.load import load_source
from ...spec import ModelSpec, Precision
from ...system import Progress, cpu_flags, peak_memory_mib, repeating
from ...text.tensors import CLASSES_AXIS, PHRASES_AXIS, TOKENS_AXIS
from ..base import Outputs
from ..child_process import answer_parent
from ..compare import differences_of_runs, require_near
from .capture import CapturedGraph
from .compile import compile_package
from .config import CPU_FLAGS, InductorConfig
from .package import Run, is_artifact, load_package
from .passes import prepare, tune_for_gpu
from .ties import run_with_ties
from .types import low_fraction, lower_types

TELL_SECONDS = 1.0
# Files of PyTorch's compiler -> what it does there.
STEPS = {
    "_inductor/cpp_builder.py": "waiting for the C++ compiler",
    "_inductor/async_compile.py": "waiting for kernels",
    "_inductor/runtime/": "timing kernels",
    "_inductor/select_algorithm.py": "timing kernels",
    "_inductor/scheduler.py": "planning kernels",
    "_inductor/fx_passes/": "simplifying",
    "_inductor/graph.py": "lowering operators",
    "/_functorch/": "tracing",
    "torch/export/": "tracing",
}


def build(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Compile the package at request["package"] and return its facts.

    Raises:
        DetrtError: the model or the machine does not allow it. GateError: its outputs differ from those of the model.
    """
    config = InductorConfig.from_dict(request["config"])
    spec = ModelSpec.from_dict(request["spec"])
    precision = Precision(request["precision"])
    package = Path(request["package"])
    start = time.monotonic()
    progress(0.0, "loading the checkpoint")
    source = load_source(request["ref"], **request["loading"])
    if config.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == Precision.TF32
    progress(0.05, "capturing the model")
    torch.set_grad_enabled(False)
    batches, lengths = config.batches, None
    if spec.text is not None:
        batches = config.batch[::2] if config.batch else (1, 1)
        lengths = config.lengths(spec.text, spec.decode.num_classes)
    tokens, names = lengths or (None, None)
    captured = prepare(source, spec, batches, Precision.FP32, config.device, tokens, names=names or None)
    expected = [t.float().cpu() for t in captured.graph(*captured.inputs)]
    fraction = 1.0
    if precision.bits == 16:
        lower_types(captured.graph, precision)
        fraction = low_fraction(captured.graph, precision)
        if config.device == "cuda":
            tune_for_gpu(captured)
    with _telling(lambda text: progress(0.2, f"compiling with PyTorch Inductor, minutes: {text}")):
        compile_package(captured, package, tune="max" if config.tune == "max" else "", form=config.package_form)
    progress(0.95, "comparing with PyTorch")
    run = load_package(package, config.device)
    errors = _differences_of(captured, captured.inputs, expected, _run(run, captured.inputs), precision)
    _require_equal(errors, precision)
    if spec.text is None:
        _require_batches(run, captured, expected, batches, precision)
    inputs, outputs = contract(spec)
    low, high = batches
    fixed = {"batch": low} if low == high else {}
    if lengths is not None:
        fixed |= {TOKENS_AXIS: lengths[0], CLASSES_AXIS: lengths[1], PHRASES_AXIS: lengths[1]}
    return {
        "torch": torch.__version__,
        "compute_capabilities": _capabilities(config.device),
        "profile": {i.name: _profile(i.shape, {**fixed, "batch": low}, {**fixed, "batch": high}) for i in inputs},
        "inputs": [_tensor_facts(i, fixed) for i in inputs],
        "outputs": [_tensor_facts(o, fixed) for o in outputs],
        "nodes": len(captured.graph.graph.nodes),
        "share": round(fraction, 4),
        "errors": errors,
        "machine": _machine(config.device),
        "format": "artifact" if is_artifact(package) else "aoti",
        "build_seconds": round(time.monotonic() - start, 3),
        "peak_memory_mib": round(peak_memory_mib()),
        "size": package.stat().st_size,
    }


@contextlib.contextmanager
def _telling(say: Callable[[str], None]) -> Iterator[None]:
    """Say every second what PyTorch's compiler does in this thread: it calls nothing on its way, so its stack is read."""
    mine, start = threading.get_ident(), time.monotonic()

    def tell() -> None:
        say(f"{time.monotonic() - start:.0f} s, {_step_of(sys._current_frames().get(mine))}")

    say("begun")
    with repeating(tell, TELL_SECONDS, "detrt-tell"):
        yield


def _step_of(frame: FrameType | None) -> str:
    """What the innermost known function of a stack does."""
    while frame is not None:
        for place, step in STEPS.items():
            if place in frame.f_code.co_filename.replace(os.sep, "/"):
                return step
        frame = frame.f_back
    return "writing the graph"


def _require_equal(errors: dict[str, float], precision: Precision) -> None:
    """16-bit types are judged by detections, with detrt verify; here they must only be finite."""
    limit = precision.output_tolerance if precision.bits == 32 else np.inf
    found = [(f"'{name}'", error, "") for name, error in errors.items()]
    advice = ". Try another version of torch, or use `targets=onnx`"
    require_near(found, limit, "the compiled model differs from PyTorch", advice)


def _run(run: Run, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [t.float().cpu() for t in run(*inputs)]


def named(names: Sequence[str], tensors: Sequence[Tensor]) -> Outputs:
    """Outputs by name, as arrays."""
    return {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}


def _differences_of(
    captured: CapturedGraph, inputs: Sequence[Tensor], expected: Sequence[Tensor], outputs: Sequence[Tensor], precision: Precision
) -> dict[str, float]:
    """Output -> difference of a package; in FP32 to PyTorch with the selections of the package, where they differ by ties."""
    names, limit = captured.outputs, precision.output_tolerance
    got = named(names, outputs)

    def follow() -> tuple[list[Outputs], list[Outputs]] | None:
        if precision.bits != 32:
            return None
        return [named(names, run_with_ties(captured.graph, inputs, expected, outputs, limit))], [got]

    return differences_of_runs([named(names, expected)], [got], limit, follow)


def _require_batches(
    run: Run, captured: CapturedGraph, expected: Sequence[Tensor], batches: tuple[int, int], precision: Precision
) -> None:
    """The smallest and largest batch must give the same result for each image as the traced batch."""
    traced = len(captured.inputs[0])
    for count in {*batches} - {traced}:
        rows = torch.arange(count) % traced
        inputs = [t[rows.to(t.device)].contiguous() for t in captured.inputs]
        try:
            outputs = _run(run, inputs)
        except Exception as error:  # what compiled code raises shares no base class
            text = one_line(error, 200)
            raise GateError(
                f"the compiled model does not run at batch {count} of the range {batches[0]} to {batches[1]}: {text}; no file was "
                "written. Build one batch alone with `batch=NUMBER`"
            ) from None
        errors = _differences_of(captured, inputs, [t[rows] for t in expected], outputs, precision)
        _require_equal(errors, precision)


def _profile(shape: tuple[int | str, ...], low: dict[str, int], high: dict[str, int]) -> dict[str, list[int]]:
    small, large = ([axis if isinstance(axis, int) else lengths[axis] for axis in shape] for lengths in (low, high))
    return {"min": small, "opt": small, "max": large}


def _tensor_facts(info: Any, fixed: dict[str, int]) -> dict[str, Any]:
    return {"name": info.name, "dtype": info.dtype, "shape": [fixed.get(str(axis), axis) for axis in info.shape]}


def _capabilities(device: str) -> list[int]:
    if device == "cpu":
        return []
    major, minor = torch.cuda.get_device_capability()
    return [major * 10 + minor]


def _machine(device: str) -> dict[str, Any]:
    """cpu_flags: what the C++ compiler may have used, which PyTorch tells to compile for the CPU that it runs on."""
    flags = sorted(filter(CPU_FLAGS.fullmatch, cpu_flags()))
    facts: dict[str, Any] = {"cpu_capability": torch.backends.cpu.get_cpu_capability(), "cpu_flags": flags}
    if device == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return facts


def main(arguments: list[str]) -> int:
    answer_parent(int(arguments[0]), build)
    # Exit without waiting for the process pool of the compiler.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
