"""What each TensorRT version reads and computes, and which of its results are known to be wrong: one table for all of detrt.

`build` rewrites a graph for a version by it, `build` and `info` warn by it, `doctor` names what is installed by it, and
docs/reference/tensorrt-versions.md shows it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...errors import EngineError
from ...models.families import having
from ...models.families.base import (
    DINOV3,
    INT8_CROSS_ATTENTION,
    LAYER_NORM_PLUGIN_IS_FASTER,
    ONE_PHRASE,
    PLUGIN_IS_FASTER,
    SAMPLING_ENCODER,
    SIGMOID_IN_FP16,
    SYMBOLIC_PLUGIN,
)

# Integers in brackets are sizes of versions: (10, 12) is 10.12 and any build of it.
Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Version:
    """A range of TensorRT versions that read and compute the same.

    Attributes:
        target: "tensorrt" or "tensorrt-rtx".
        since: first version of the range; it ends before the next row of the target.
        opset: newest ONNX opset that the parser reads.
        lacks: operators that graphs of detrt may hold and the parser does not import.
        shape_range: whether the parser obeys 'start' and 'end' of Shape.
        scatter_reduction: whether it takes the attribute 'reduction' of ScatterND, also where that says "none".
        cumsum: whether CumSum is an operator of its own, and no loop, which a CUDA graph does not record.
        grid_sample_linear: whether GridSample takes the mode "linear", as opset 20 calls it; else that means the nearest pixel.
        int64: whether INT64 tensors stay INT64; else they become INT32, inputs and outputs included.
        types: what layers compute in beside FP32.
        strongly_typed: whether the types of the graph decide; else flags and constraints of the builder.
        plugins: interface of plugin layers, "" where there are none.
        msda_plugin: newest version of NVIDIA's MultiscaleDeformableAttnPlugin_TRT, "" where there is none.
        plugin_for: which families' graphs get nodes of that plugin in place of gathers, because it was measured to be faster; as
            `Family.engines` calls them, "" for none.
        layer_norm_for: which families' FP16 graphs get NVIDIA's LayerNorm plugin where the library has it, as it was measured to be faster.
        sigmoid_for: in which families' FP16 graphs a Sigmoid that must compute in FP32 is written out. Myelin lowers it with a one in
            FP16, finds two types in a sum and gives up the FP16 form of the whole node around it.
        by_level_for: which families' deformable attention gathers level by level, because it was measured to be faster.
        one_phrase: whether phrases with queries of their own (SAM 3) run one at a time: with several the builder did not end.
        state: what is known about detrt with it.
    """

    target: str
    since: Numbers
    opset: int
    types: tuple[str, ...]
    lacks: frozenset[str] = frozenset()
    shape_range: bool = True
    scatter_reduction: bool = True
    cumsum: bool = True
    grid_sample_linear: bool = False
    int64: bool = True
    strongly_typed: bool = True
    plugins: str = "IPluginV3"
    msda_plugin: str = ""
    plugin_for: str = ""
    layer_norm_for: str = ""
    sigmoid_for: str = ""
    by_level_for: str = ""
    one_phrase: bool = False
    state: str = ""


_16 = ("fp16", "bf16", "int8", "fp8")
VERSIONS: tuple[Version, ...] = (
    Version(
        "tensorrt", (8, 5), 17, ("fp16",),
        # The parser has InstanceNormalization, as a plugin that fails in a build without cuDNN ("pluginV2Runner::allocateResources").
        frozenset(("LayerNormalization", "GroupNormalization", "InstanceNormalization", "Mod", "Mish", "Gelu", "IsInf", "CastLike", "ArgMax of integers")),
        shape_range=False, scatter_reduction=False, cumsum=False, int64=False, strongly_typed=False, plugins="IPluginV2DynamicExt",
        msda_plugin="1", plugin_for=PLUGIN_IS_FASTER, layer_norm_for=LAYER_NORM_PLUGIN_IS_FASTER,
        sigmoid_for=SIGMOID_IN_FP16, one_phrase=True,
        state="run on H100s and H200s in FP32 and FP16; JetPack 5 has 8.5.2",
    ),
    Version(
        "tensorrt", (8, 6), 17, ("fp16",), frozenset(("Mish", "Gelu", "CastLike")),
        shape_range=False, scatter_reduction=False, cumsum=False, int64=False, strongly_typed=False, plugins="IPluginV2DynamicExt",
        msda_plugin="1", state="not tried",
    ),
    Version(
        "tensorrt", (10, 3), 20, _16, scatter_reduction=False, cumsum=False, msda_plugin="1",
        state="not run; NVIDIA calls strong typing complete from 10.12 on; JetPack 6 has 10.3",
    ),
    Version("tensorrt", (10, 8), 20, _16, scatter_reduction=False, msda_plugin="1", state="not run"),
    Version("tensorrt", (10, 9), 20, _16, msda_plugin="1", state="not run"),
    Version("tensorrt", (10, 11), 20, _16, msda_plugin="2", state="not run"),
    Version("tensorrt", (10, 12), 22, _16, msda_plugin="2", state="not run; oldest that NVIDIA recommends for strong typing"),
    Version("tensorrt", (11, 0), 22, _16, msda_plugin="2", state="not run; JetPack 7.2.2 has 11.4"),
    Version("tensorrt-rtx", (1, 0), 22, _16, plugins="", by_level_for=SAMPLING_ENCODER, state="not run"),
    Version("tensorrt-rtx", (1, 4), 22, _16, plugins="", by_level_for=SAMPLING_ENCODER, state="1.4.0 and 1.6.1 run on H100s and H200s, which NVIDIA does not list"),
    Version(
        "tensorrt-rtx", (1, 7), 22, _16, grid_sample_linear=True, plugins="", by_level_for=SAMPLING_ENCODER,
        state="engines are built and read here; not run on a GPU, and it refuses an H100",
    ),
)  # fmt: skip
OLDEST: Mapping[str, Numbers] = {
    target: min(v.since for v in VERSIONS if v.target == target) for target in ("tensorrt", "tensorrt-rtx")
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Results that are wrong without an error, or a builder that does not return, in a range of versions.

    Attributes:
        what: the fault in a few words.
        since, before: versions that have it; no `before`: none is known without it. target: which library.
        sms: compute capabilities it was seen on; empty: several, or any.
        precisions: types of the graph that bring it out; empty: any.
        layers: kinds of layers, as TensorRT names them, one of which a network must hold.
        families: which families have it, as `Family.engines` calls them; "": any with such layers.
        batch: whether it needs more than one image a run.
        action: "avoided" by how detrt writes graphs, "warn", or "refuse".
        instead: what to do.
        source: where it is documented.
    """

    what: str
    since: Numbers
    before: Numbers | None
    action: str
    instead: str
    source: str
    target: str = "tensorrt"
    sms: tuple[int, ...] = ()
    precisions: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    families: str = ""
    batch: bool = False

    def hits(
        self, version: Numbers, sm: int, precisions: Collection[str], layers: Collection[str], family: str, largest_batch: int
    ) -> bool:
        """Whether an engine may have this fault."""
        return (
            self.since <= version[: len(self.since)]
            and (self.before is None or version[: len(self.before)] < self.before)
            and (not self.sms or sm in self.sms)
            and (not self.precisions or bool(set(self.precisions) & set(precisions)))
            and (not self.layers or bool(set(self.layers) & set(layers)))
            and (not self.families or family in having(self.families))
            and (not self.batch or largest_batch > 1)
        )


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
        "the runtime refuses GPUs of compute capability 90", (1, 7), None, "refuse", "TensorRT-RTX 1.6, or `targets=tensorrt`",
        "seen with 1.7.1 on an H100", target="tensorrt-rtx", sms=(90,),
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
        "INT8 cross-attention of RT-DETR (AP 19.4 instead of 47.7)", (10, 0), None, "warn", "`keep_fp32=decoder`",
        "jacksonsc007/RTDETR_TensorRT_Deployment", precisions=("int8",), families=INT8_CROSS_ATTENTION,
    ),
    Fault(
        "engines of symbolic shapes are wrong at other sizes or prompt lengths than the usual one", (8, 5), (8, 6), "avoided",
        "the preview feature FASTER_DYNAMIC_SHAPES_0805", "docs/results/tensorrt.md#symbolic-shapes",
    ),
    Fault(
        "NVIDIA's plugin for deformable attention runs in FP16 although its layers are constrained to FP32", (8, 5), (8, 6), "avoided",
        "an output type of FP32 without a constraint of precision", "docs/results/tensorrt.md#nvidias-plugin-in-fp16", precisions=("fp16",), layers=("PLUGIN_V2",),
    ),
    Fault(
        "a MatMul that is constrained to FP32 because it overflows FP16 is stored in FP16", (8, 5), (8, 6), "avoided",
        "the scale of attention moved in front of its product, which fits then", "docs/results/tensorrt.md#an-fp32-product-in-fp16", precisions=("fp16",),
    ),
    Fault(
        "Deformable DETR of symbolic size with a plugin loses a fifth of its detections", (8, 5), (8, 6), "avoided",
        "gathers, which such graphs keep", "docs/results/tensorrt.md#symbolic-shapes", families=SYMBOLIC_PLUGIN, layers=("PLUGIN_V2",),
    ),
    Fault(
        "the builder does not end within 20 minutes for several phrases, or for prompts of several lengths", (8, 5), (8, 6), "avoided",
        "one phrase a run, padded as published; add `batch=1`, the only batch size that was compared", "docs/results/tensorrt.md#sam-3", families=ONE_PHRASE,
    ),
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


def _plugin_words(row: Version) -> str:
    if not row.msda_plugin:
        return "none"
    used = f", used for {', '.join(having(row.plugin_for))}" if row.plugin_for else ""
    norm = f"; LayerNorm, used in FP16 for {', '.join(having(row.layer_norm_for))}" if row.layer_norm_for else ""
    return f"MSDA version {row.msda_plugin}{used}{norm}"


def tables() -> str:
    """Both tables in Markdown, as docs/reference/tensorrt-versions.md has them."""
    lines = [
        "| library | from | opset | types beside FP32 | typed | written out for it | INT64 | plugins | NVIDIA's plugins | state |",
        "| --- | --- | ---: | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in VERSIONS:
        written = sorted(row.lacks)
        if not row.shape_range:
            written.append("'start' and 'end' of Shape")
        if not row.scatter_reduction:
            written.append("'reduction' of ScatterND")
        if not row.cumsum:
            written.append("CumSum of floats" if row.strongly_typed else "CumSum of floats, of known length")
        if row.strongly_typed and not row.grid_sample_linear:
            written.append("'linear' of GridSample")
        if not row.strongly_typed:
            written.append("the scale of an FP32 MatMul of an FP16 graph, before it")
        if row.sigmoid_for:
            written.append(f"FP32 Sigmoid in FP16 graphs of {', '.join(having(row.sigmoid_for))}")
        cells = (
            row.target,
            ".".join(map(str, row.since)),
            str(row.opset),
            ", ".join(row.types),
            "strongly" if row.strongly_typed else "weakly",
            ", ".join(written) or "-",
            "yes" if row.int64 else "as INT32",
            row.plugins or "none",
            _plugin_words(row),
            row.state,
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| fault | versions | SM | types | what detrt does | instead | documented in |",
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
