"""What each TensorRT version reads and computes, and which of its results are known to be wrong: one table for all of detrt.

`build` rewrites a graph for a version by it, `build` and `info` warn by it, `doctor` names what is installed by it, and
docs/reference/tensorrt-versions.md shows it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib import import_module

from ...errors import EngineError
from ...models.families import having
from ...models.families.base import (
    DINOV3,
    INT8_CROSS_ATTENTION,
    SAMPLING_ENCODER,
)
from .rows import Fault, Numbers, Version

# Folders beside this module with the rows and faults of a generation that needs more than rows.
GENERATIONS: tuple[str, ...] = (
    "v8",
)  # fmt: skip
_OLDER = [import_module(f".{name}", __package__) for name in GENERATIONS]

_16 = ("fp16", "bf16", "int8", "fp8")
VERSIONS: tuple[Version, ...] = (
    *(row for older in _OLDER for row in older.VERSIONS),
    Version(
        "tensorrt", (10, 3), 20, _16, scatter_reduction=False, cumsum=False, msda_plugin="1",
        state="not run; NVIDIA calls strong typing complete from 10.12 on; JetPack 6 has 10.3",
    ),
    Version("tensorrt", (10, 8), 20, _16, scatter_reduction=False, msda_plugin="1", state="not run"),
    Version("tensorrt", (10, 9), 20, _16, msda_plugin="1", state="not run"),
    Version("tensorrt", (10, 11), 20, _16, msda_plugin="2", state="not run"),
    Version("tensorrt", (10, 12), 22, _16, msda_plugin="2", state="not run; oldest that NVIDIA recommends for strong typing"),
    Version("tensorrt", (11, 0), 22, _16, msda_plugin="2", state="not run; JetPack 7.2.2 has 11.4"),
    Version("tensorrt-rtx", (1, 0), 22, _16, plugins="", by_level_for=SAMPLING_ENCODER, blocks=True, state="not run"),
    Version("tensorrt-rtx", (1, 4), 22, _16, plugins="", by_level_for=SAMPLING_ENCODER, blocks=True, state="1.4.0 and 1.6.1 run on H100s and H200s, which NVIDIA does not list"),
    Version(
        "tensorrt-rtx", (1, 7), 22, _16, grid_sample_linear=True, plugins="", by_level_for=SAMPLING_ENCODER, blocks=True,
        state="engines are built and read here; not run on a GPU, and it refuses an H100",
    ),
)  # fmt: skip
OLDEST: Mapping[str, Numbers] = {
    target: min(v.since for v in VERSIONS if v.target == target) for target in ("tensorrt", "tensorrt-rtx")
}


FAULTS: tuple[Fault, ...] = (
    Fault(
        "GridSample in deformable attention samples wrongly", (10, 13), None, "warn", "`msda=gather`, the default",
        "NVIDIA/TensorRT#4813 #4646, lightly-train#917, pytorch/TensorRT#4074", layers=("GRID_SAMPLE",),
    ),
    Fault(
        "GridSample of opset 20 and newer takes the nearest pixel", (10, 0), None, "avoided", "the name of the mode before opset 20, in the copy that is parsed",
        "onnx/onnx-tensorrt#1060", layers=("GRID_SAMPLE",),
    ),
    Fault(
        "GridSample of opset 20 and newer takes the nearest pixel", (1, 0), (1, 7), "avoided", "the name of the mode before opset 20, in the copy that is parsed",
        "onnx/onnx-tensorrt#1060", target="tensorrt-rtx", layers=("GRID_SAMPLE",),
    ),
    Fault(
        "a MaxPool and a convolution that read one Pad, the stem of HGNetV2: results differ from run to run", (1, 6), None, "avoided",
        "padding as part of both, in every graph", "seen with 1.6.1 on an H100", target="tensorrt-rtx", layers=("POOLING",),
    ),
    Fault(
        "FP32 products are computed in TF32, whatever the builder's flag says", (1, 6), None, "avoided",
        "NVIDIA_TF32_OVERRIDE=0 while it builds and runs, or `tf32`", "docs/results/tensorrt-rtx-graphs.md#fp32-is-fp32",
        target="tensorrt-rtx", precisions=("fp32",),
    ),
    Fault(
        "0.5 / 50 is less than 0.01, so that proposals on the border of the image are other ones", (1, 6), None, "avoided",
        "a comparison with a number beside the border, in every graph", "docs/results/tensorrt-rtx-graphs.md#faults",
        target="tensorrt-rtx", layers=("ELEMENTWISE",),
    ),
    Fault(
        "sums of an FP8 MatMul with scales of channels overflow FP16", (1, 6), None, "avoided", "one scale for its weights",
        "docs/results/tensorrt-rtx-graphs.md#scales", target="tensorrt-rtx", precisions=("fp8",), layers=("MATRIX_MULTIPLY",),
    ),
    Fault(
        "an FP8 convolution with one scale finds nothing", (1, 6), None, "avoided", "a scale for each channel of its weights",
        "docs/results/tensorrt-rtx-graphs.md#scales", target="tensorrt-rtx", precisions=("fp8",), layers=("CONVOLUTION",),
    ),
    Fault(
        "the builder has no BF16 ConvTranspose", (1, 7), None, "avoided", "FP32 for it", "seen with 1.7.1", target="tensorrt-rtx",
        precisions=("bf16",), layers=("DECONVOLUTION",),
    ),
    Fault(
        "the runtime refuses GPUs of compute capability 90", (1, 7), None, "refuse", "TensorRT-RTX 1.6, or `targets=tensorrt`",
        "seen with 1.7.1 on an H100", target="tensorrt-rtx", sms=(90,),
    ),
    Fault(
        "NMS in the graph has no kernel", (1, 7), None, "refuse", "`nms=checkpoint`, whose rule runs behind the engine",
        "seen with 1.7.1", target="tensorrt-rtx", layers=("NMS",),
    ),
    Fault(
        "LayerNormalization written out in FP16", (10, 13), None, "avoided", "opset 17 or newer, below which nothing is exported",
        "PogChamper/dfine-cpp", precisions=("fp16",),
    ),
    Fault(
        "DINOv3 backbone in FP16 gives one class for everything", (10, 3), (10, 6), "refuse",
        "TensorRT 10.6 or newer, or `precision=fp32`", "NVIDIA/TensorRT#4723, DEIMv2#53 #112, Savant#1183",
        precisions=("fp16",), layers=("SOFTMAX",), families=DINOV3,
    ),
    Fault(
        "DINOv3 backbone is wrong also in FP32", (10, 4), (10, 5), "refuse", "another version of TensorRT",
        "NVIDIA/TensorRT#4742", layers=("SOFTMAX",), families=DINOV3,
    ),
    Fault(
        "fused attention in 16 bits", (10, 0), (10, 17), "warn", "a newer TensorRT, or `precision=fp32`", "NVIDIA/TensorRT#4837",
        sms=(120,), precisions=("fp16", "bf16"), layers=("SOFTMAX",),
    ),
    Fault(
        "the builder crashes over an encoder with deformable attention in BF16", (11, 0), None, "warn", "`precision=fp16` or fp32",
        "NVIDIA/TensorRT#4842", sms=(120,), precisions=("bf16",), families=SAMPLING_ENCODER,
    ),
    Fault(
        "fused attention, also in FP32", (10, 7), (10, 8), "warn", "another version of TensorRT", "NVIDIA/TensorRT#4333 #4328",
        sms=(89,), layers=("SOFTMAX",),
    ),
    Fault(
        "batches above 1", (10, 11), (10, 12), "warn", "`batch=1`", "NVIDIA/TensorRT#4853", sms=(89, 120), batch=True,
    ),
    Fault("batches above 1", (11, 1), (11, 2), "warn", "`batch=1`", "NVIDIA/TensorRT#4853", sms=(89, 120), batch=True),
    Fault(
        "INT8 output projection behind FP16 attention", (11, 0), None, "warn", "`qdq_placement=tensorrt`, the default for engines",
        "roboflow/rf-detr quantize.py", precisions=("int8",), layers=("SOFTMAX",),
    ),
    Fault(
        "INT8 MatMul, bias and GELU before an FP16 layer gives NaN", (10, 16), (11, 4), "warn",
        "`qdq_placement=tensorrt`, which quantizes both layers of an MLP or neither", "roboflow/rf-detr quantize.py", precisions=("int8",), layers=("UNARY",),
    ),
    Fault(
        "INT8 cross-attention of RT-DETR (AP 19.4 instead of 47.7)", (10, 0), None, "warn", "`keep_fp32=model.decoder`",
        "jacksonsc007/RTDETR_TensorRT_Deployment", precisions=("int8",), families=INT8_CROSS_ATTENTION,
    ),
    *(fault for older in _OLDER for fault in older.FAULTS),
)  # fmt: skip


def version_tuple(version: str) -> Numbers:
    """ "10.3.0.post1" -> (10, 3, 0): the leading numbers."""
    numbers = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def same_version(a: str, b: str) -> bool:
    """Whether two version texts name one release, as far as both go: "10.3.0" of the Python package is the library's
    "10.3.0.26", and "10.13.3.9.post1" is "10.13.3.9"."""
    x, y = version_tuple(a), version_tuple(b)
    length = min(len(x), len(y))
    return length >= 3 and x[:length] == y[:length]


def row_of(target: str, version: str) -> Version:
    """The row of a version.

    Raises:
        EngineError: a version older than the first row.
    """
    numbers = version_tuple(version)
    rows = [row for row in VERSIONS if row.target == target and row.since <= numbers[: len(row.since)]]
    if not rows:
        raise EngineError(f"{target} {version} is older than {'.'.join(map(str, OLDEST[target]))}, the oldest that detrt knows")
    return max(rows, key=lambda row: row.since)


def faults_of(
    target: str,
    version: str,
    *,
    sm: int,
    precisions: Collection[str],
    layers: Collection[str],
    family: str,
    largest_batch: int,
) -> tuple[Fault, ...]:
    """Known faults that an engine may have, but for those that detrt avoids by itself."""
    numbers = version_tuple(version)
    return tuple(
        fault
        for fault in FAULTS
        if fault.target == target
        and fault.action != "avoided"
        and fault.hits(numbers, sm, precisions, layers, family, largest_batch)
    )


def check_faults(faults: Sequence[Fault], version: str) -> list[str]:
    """Warnings about known faults.

    Raises:
        EngineError: a fault that leaves nothing to use.
    """
    for fault in faults:
        if fault.action == "refuse":
            raise EngineError(
                f"TensorRT {version} has a known fault that leaves nothing to use here: {fault.what} ({fault.source}). Use {fault.instead}"
            )
    return [f"TensorRT {version} has a known fault that this engine may have: {f.what} ({f.source}); {f.instead}" for f in faults]


def _range(since: Numbers, before: Numbers | None) -> str:
    first = ".".join(map(str, since))
    return f"{first} and newer" if before is None else f"{first} up to, not with, {'.'.join(map(str, before))}"


def tables() -> str:
    """Both tables in Markdown, as docs/reference/tensorrt-versions.md has them."""
    lines = [
        "| library | from | opset | types beside FP32 | typed | written out for it | faster forms | INT64 | plugins | NVIDIA's plugins | state |",
        "| --- | --- | ---: | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in VERSIONS:
        cells = (
            row.target,
            ".".join(map(str, row.since)),
            str(row.opset),
            ", ".join(row.types),
            row.typed,
            ", ".join(row.written_out()) or "-",
            ", ".join(row.faster_forms()) or "-",
            row.integers,
            row.plugins or "none",
            row.plugin_words(),
            row.state,
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| fault | versions | compute capability | types | what detrt does | instead | documented in |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for fault in FAULTS:
        cells = (
            fault.what + (f" ({', '.join(having(fault.families))})" if fault.families else ""),
            _range(fault.since, fault.before),
            ", ".join(map(str, fault.sms)) or "any",
            ", ".join(fault.precisions) or "any",
            {"avoided": "avoids it", "warn": "warns", "refuse": "refuses"}[fault.action],
            fault.instead,
            fault.source,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
