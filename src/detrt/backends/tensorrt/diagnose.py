"""Turns what the parser, the builder and the operating system say into a cause and a next step."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import one_line
from ...graph.names import module_path

_SHOWN = 5
_SHOWN_CHARACTERS = 500
HUNG_EXIT_CODE = 75  # of a builder process that ended itself, because the builder neither returned nor said anything
NO_KERNEL = r"Could not find any implementation"
_NO_DEVICE = r"cudaError (35|100|999)|no CUDA-capable device|CUDA driver version is insufficient"


@dataclass(frozen=True, slots=True)
class ParserFault:
    """One error of the ONNX parser. node: e.g. "/model/encoder/layers.0/self_attn/MatMul", or ""."""

    node: str
    operator: str
    description: str
    code: str = ""
    file: str = ""


# (pattern in the description, cause and next step). The first match wins, so the narrow ones come first.
_PARSE_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"[Aa]ntialias",
        "TensorRT cannot resize with antialiasing. The model resizes its position embeddings inside the "
        "graph: export it with one fixed input size, so that the resized table is a constant",
    ),
    (
        r"MSDeformAttn|ms_deform_attn|MultiscaleDeformableAttn",
        "the graph holds deformable attention as one node, and its plugin is not loaded. For TensorRT 10 and 11 give the "
        "library with `plugins` (docs/guide/plugin.md); otherwise export with `msda=gather`",
    ),
    (
        r"[Pp]lugin not found|[Pp]lugin creator|getPluginCreator|not found in plugin registry",
        "TensorRT has neither an importer nor a plugin for this operator. For deformable attention export "
        "with `msda=gather`; otherwise replace the operator at export, or load its plugin library",
    ),
    (
        r"Failed to import initializer",
        "weights are missing or damaged. Where they are in a separate data file, keep it beside the .onnx "
        "file under the name that it was saved with",
    ),
    (
        r"ParseFromCodedStream|ParseFromString|Failed to parse the ONNX model",
        "the file is not a whole ONNX model: truncated, or of another kind. Export or download it again",
    ),
    (
        r"must have same input types|must have the same type|types Float and Half|[Tt]ype mismatch",
        "engines are strongly typed: the graph's own types decide, and nothing is cast by itself. Convert "
        "the precision again so that casts are inserted around this node",
    ),
    (
        r"[Oo]pset",
        "the opset of the graph is too new for this parser. Export it with opset 17",
    ),
)

_BUILD_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"Turing \(SM75\)",
        "TensorRT-RTX has no such FP32 product for Turing. Leave 75 out of `sms`, or convert an FP32 model with `precision=fp16`; graphs in FP16 may "
        "keep such a product in FP32",
    ),
    (
        r"within workspace limit",
        "the scratch memory limit is too small. Raise `workspace_mib` or leave it out",
    ),
    (
        r"Quantized constant .* only allowed before DQ",
        "the quantised graph holds a quantised value that no DequantizeLinear follows. Quantise only Conv, Gemm and MatMul",
    ),
    (
        r"invalid shape profile|min <= common <= max",
        "two axes with one name have different sizes. Export the model again with a name of its own for each axis",
    ),
    (
        r"libnvinfer_lean",
        "a version compatible engine needs the lean runtime library, which is not installed. Leave version_compatible out",
    ),
    (
        _NO_DEVICE,
        "no CUDA device. This build needs a GPU and its driver; the target tensorrt-rtx builds without "
        "one when `sms` names the GPUs",
    ),
    (
        # The windows of a Swin backbone, padded to a multiple of their size; an "OutOfMemory" beside it is a consequence.
        r"getRegionBlockSize",
        "TensorRT cannot bound the memory of this graph while height and width are symbolic. Give one image size and one batch size "
        "(`height=H`, `width=W`, `batch=N`)",
    ),
    (
        r"[Oo]ut ?[Oo]f ?[Mm]emory|OutOfMemory|cudaError 2\b|bad_alloc|[Rr]equested size was",
        "there is not enough memory. Lower the max of `batch`, `height` and `width`, or change `workspace_mib`: less where the GPU is full, "
        "more where that limit is what was reached",
    ),
    (
        NO_KERNEL,
        "TensorRT has no kernel for a part of the graph. Raise `workspace_mib`, export with "
        "`msda=gather`, or use a newer TensorRT",
    ),
    (
        r"data-dependent shape",
        "a shape depends on the values of a tensor. Export the model with a fixed number of detections",
    ),
    (
        r"missing dimensions in profile|MIN<=OPT<=MAX|no optimization profile",
        "the profile does not fit the graph. Check `batch`, `height` and `width`",
    ),
    (
        r"Network must have at least one output",
        "the file holds no network: it is empty, truncated, or not an ONNX model. Export or download it again",
    ),
    (
        r"compute ?[Cc]apability|Unsupported SM|not supported on .*SM",
        "the target GPUs do not have what the graph needs. Give newer ones only, for example `sms=89,120`",
    ),
)


def parse_failure(onnx_name: str, faults: Sequence[ParserFault], logged: Sequence[str], version: str) -> str:
    """Message for an ONNX file that TensorRT's parser refused."""
    lines = [f"TensorRT {version} cannot read '{onnx_name}'"]
    for fault in faults[:_SHOWN]:
        where = ""
        if fault.node or fault.operator:
            path = module_path(fault.node)
            where = f"node '{fault.node or '(no name)'}' (operator {fault.operator or 'unknown'}"
            where += f", module {path}): " if path else "): "
        kind = f" [{fault.code}]" if fault.code else ""
        lines.append(f"  {where}{_told(fault.description)}{kind}")
    if len(faults) > _SHOWN:
        lines.append(f"  and {len(faults) - _SHOWN} more")
    if not faults:
        lines += [f"  {_told(text)}" for text in logged[:_SHOWN]] or ["  the parser gave no reason"]
    text = " ".join(f"{fault.operator} {fault.description}" for fault in faults) or " ".join(logged)
    if (hint := _hint(_PARSE_HINTS, text)) is None:
        operators = sorted({fault.operator for fault in faults if fault.code == "UNSUPPORTED_NODE" and fault.operator})
        hint = (
            f"TensorRT has no importer for {', '.join(operators)} as it is used here. Replace it at "
            "export; for deformable attention use `msda=gather`"
            if operators
            else "export the model again with opset 17; if the node is part of deformable attention, with `msda=gather`"
        )
    return "\n".join([*lines, f"  {hint}"])


def build_failure(onnx_name: str, logged: Sequence[str], version: str) -> str:
    """Message for a network that was read and could not be built."""
    lines = [f"TensorRT {version} read '{onnx_name}' and could not build an engine from it"]
    lines += [f"  {_told(text)}" for text in logged[:_SHOWN]] or ["  the builder gave no reason"]
    operation = re.search(r"operation '([^']+)'", " ".join(logged))
    if operation and (path := module_path(operation.group(1))):
        lines.append(f"  in module {path}")
    hint = _hint(_BUILD_HINTS, " ".join(logged))
    return "\n".join(
        [
            *lines,
            f"  {hint or 'try `optimization_level=0`, or fewer GPUs in `sms`, to find the part that fails'}",
        ]
    )


def open_failure(engine_name: str, logged: Sequence[str], version: str) -> str:
    """Message for an engine that TensorRT would not open."""
    text = " ".join(logged)
    if re.search(_NO_DEVICE, text):
        return (
            f"no CUDA device: TensorRT {version} cannot open '{engine_name}' without an NVIDIA GPU and its "
            "driver; check with nvidia-smi, or run the ONNX file: `backend=onnxruntime`"
        )
    told = "; ".join(_told(line) for line in logged[:_SHOWN]) or "it gave no reason"
    hint = _hint(_BUILD_HINTS, text) if re.search(r"[Mm]emory", text) else None
    advice = hint or "build the engine again with this version: `build(MODEL, output=OUT)`"
    return f"TensorRT {version} refused the engine '{engine_name}': {told}; {advice}"


def ended(return_code: int, log_tail: str) -> str:
    """Message for a builder process that ended without an answer."""
    if return_code < 0:
        try:
            name = signal.Signals(-return_code).name
        except ValueError:
            name = f"signal {-return_code}"
        if name == "SIGKILL":
            cause = (
                "the builder process was killed by the system (SIGKILL), most likely for lack of memory. "
                "Lower the max of `batch`, `height` and `width`, or free memory"
            )
        else:
            cause = (
                f"the builder process crashed ({name}); nothing was written. This is a fault inside "
                "TensorRT: try one batch size and one image size, another version of it, or `msda=gather`"
            )
    elif return_code == HUNG_EXIT_CODE:
        cause = (
            "the builder of TensorRT hangs: it said nothing for minutes, before it timed a kernel, and was stopped; nothing was written. Its "
            "optimizer does not return for some quantized graphs. Try `precision=fp16`, or another version of TensorRT"
        )
    else:
        cause = f"the builder process ended with exit code {return_code} and no answer; nothing was written"
    tail = [line.strip() for line in log_tail.splitlines() if line.strip()][-3:]
    return "\n".join([cause, *(f"  {_told(line)}" for line in tail)])


def activation_bytes(logged: Sequence[str]) -> int:
    """Scratch memory of one execution context, from the builder's log; 0 where it says nothing."""
    found = re.findall(r"Total Activation Memory: (\d+)", "\n".join(logged))
    return int(found[-1]) if found else 0


def large_activation(nbytes: int, profile: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    """Warning for an engine that needs much scratch memory; names its largest shapes."""
    largest = ", ".join(f"{name} {'x'.join(map(str, shapes['max']))}" for name, shapes in profile.items())
    return (
        f"each context of this engine needs {nbytes / 2**30:.1f} GiB of GPU memory for activations at {largest}; lower the max of "
        "`batch`, `height` and `width` where fewer or smaller images are enough"
    )


def alike_once(messages: Sequence[str]) -> list[str]:
    """Remarks that differ in the node or in numbers only, once each; says how many more there were. Cut to a line."""
    groups: dict[str, list[str]] = {}
    for message in messages:
        alike = re.sub(r"\d+", "0", re.sub(r"^\S*/\S*: ", "", message))
        groups.setdefault(alike, []).append(message)
    return [_told(first) + (f" (and {len(more)} alike)" if more else "") for first, *more in groups.values()]


def _hint(hints: Sequence[tuple[str, str]], text: str) -> str | None:
    return next((hint for pattern, hint in hints if re.search(pattern, text)), None)


def _told(text: str) -> str:
    # The tail of TensorRT's lines names its own source files, which tell a caller nothing.
    lines = [line.strip() for line in text.splitlines() if line.strip() and "catchCudaError" not in line]
    return one_line(re.sub(r"\s*In \w+ at /_src/\S+?:\d+", "", " ".join(lines)), _SHOWN_CHARACTERS)
