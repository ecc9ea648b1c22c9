"""Operators by their numerical role: one table for ONNX graphs (`detrt.precision`) and PyTorch graphs (the compiled packages).

Rows name the same concept in both spellings. ONNX names are operator types, ATen names those of the schema without
namespace and overload. Needs neither onnx nor torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import EngineError
from ..files import what_it_is

# Operators of deformable attention that only a TensorRT plugin runs: detrt's and NVIDIA's, and how many axes their output has.
MSDA_DOMAIN, MSDA = "detrt", "MSDeformAttn"
NVIDIA_DOMAIN, NVIDIA_MSDA = "trt.plugins", "MultiscaleDeformableAttnPlugin_TRT"
PLUGIN_NODES = {MSDA: 3, NVIDIA_MSDA: 4}
# Protobuf tags of ModelProto's fields: what the first byte of an ONNX file can be.
_FIRST_BYTES = frozenset((0x08, 0x12, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42, 0x72, 0xA2, 0xCA, 0xD2))


def named_in(model: str | os.PathLike[str] | bytes, operators: Iterable[str]) -> list[str]:
    """Those of `operators` that an ONNX model, a file or its bytes, has nodes of, without parsing it."""
    with contextlib.ExitStack() as closing:
        content: bytes | mmap.mmap
        if isinstance(model, bytes):
            content = model
        else:
            file = closing.enter_context(open(model, "rb"))
            content = closing.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        # Found as NodeProto's field op_type: tag 0x22, length, text.
        return [name for name in operators if content.find(b"\x22" + bytes((len(name),)) + name.encode()) >= 0]


# Larger finite constants are fills that mean "never", such as attention masks of finfo.min.
FILL_LIMIT = 1e30
FILL_VALUE = 16384.0  # exp(-16384) is 0, and twice of it is still finite in FP16


@dataclass(frozen=True, slots=True)
class Operators:
    """One role: the operators that have it, in ONNX and in ATen."""

    onnx: frozenset[str]
    aten: frozenset[str]

    @classmethod
    def of(cls, *rows: tuple[str, str]) -> Operators:
        """From rows of (ONNX names, ATen names), separated by blanks."""
        return cls(*(frozenset(name for row in rows for name in row[side].split()) for side in (0, 1)))

    def __or__(self, other: Operators) -> Operators:
        return Operators(self.onnx | other.onnx, self.aten | other.aten)


# Matmuls and convolutions, which run in the low precision.
GEMM = Operators.of(
    ("Conv ConvTranspose", "conv1d conv2d conv_transpose2d convolution"),
    ("MatMul Gemm", "linear matmul mm bmm addmm baddbmm"),
    ("Einsum", "einsum"),
    ("", "scaled_dot_product_attention"),
)
# Their results do not fit 16-bit types: powers and sums overflow, angles and logarithms lose their digits. PyTorch's own
# normalization kernels compute statistics in FP32, ONNX leaves that open.
WIDE = Operators.of(
    ("Pow Sqrt Reciprocal Exp", "pow sqrt rsqrt reciprocal exp"),
    ("Log", "log logit"),
    ("Sin Cos Tan Asin Acos Atan", "sin cos"),
    ("ReduceSum Sum CumSum", "sum cumsum"),
    ("ReduceMean Mean GlobalAveragePool", "mean var var_mean"),
    ("ReduceProd", "prod"),
    ("ReduceL1 ReduceL2 ReduceSumSquare LpNormalization", "norm linalg_vector_norm"),
    ("ReduceLogSum ReduceLogSumExp", ""),
    ("InstanceNormalization GroupNormalization BatchNormalization", ""),
    ("Floor Ceil Round Mod", "floor ceil round remainder"),
    ("Range OneHot EyeLike", ""),
)
# Comparisons of two values: BF16 holds integers to 256 only, so the operands must be FP32, not only their producers.
COMPARE = Operators.of(
    ("Equal Greater Less GreaterOrEqual LessOrEqual", "eq ne gt lt ge le"),
    ("ArgMax ArgMin NonMaxSuppression", ""),  # in PyTorch of one tensor in one type
)
# Their inputs decide an index, a ranking or a comparison, and stay FP32 from the last matmul on.
DECIDE = COMPARE | Operators.of(
    ("TopK ArgMax ArgMin", "topk top_k sort argsort argmax argmin"),
    ("Floor Ceil Round", "floor ceil round"),
    ("Mod", "remainder floor_divide"),
    ("Sin Cos", "sin cos"),
    ("Log", "log logit"),
    ("GridSample", "grid_sampler grid_sampler_2d"),
    ("Range", ""),
    (" ".join(PLUGIN_NODES), ""),  # in PyTorch, `backends.inductor.types` handles the op
)
# Of these, only one input decides: its position.
DECIDING_INPUT = {"TopK": 0, "GridSample": 1, MSDA: 2, NVIDIA_MSDA: 3}
# A walk back from coordinates ends at these: their results are features, and rounding those is harmless.
BARRIER = Operators.of(
    ("LayerNormalization GroupNormalization BatchNormalization InstanceNormalization", "layer_norm group_norm batch_norm"),
    ("MaxPool AveragePool GlobalAveragePool", "max_pool2d avg_pool2d"),
    ("GridSample", ""),
    ("LSTM Attention", ""),
    (" ".join(PLUGIN_NODES), ""),
)
# The following roles are for ONNX graphs only.
# Operators that return values of their inputs, their negatives or zeros, and nothing new.
MOVEMENT = frozenset((
    "Reshape", "Transpose", "Concat", "Slice", "Gather", "GatherElements", "GatherND", "Unsqueeze", "Squeeze",
    "Expand", "Tile", "Pad", "Split", "Flatten", "Identity", "ScatterND", "ScatterElements", "DepthToSpace",
    "SpaceToDepth", "MaxPool", "Relu", "Neg", "Abs", "Where",
))  # fmt: skip
ELEMENTWISE = frozenset((
    "Add", "Sub", "Mul", "Div", "Min", "Max", "Clip", "Sigmoid", "Tanh", "Sqrt", "Reciprocal", "Pow", "Log", "Exp",
    "Neg", "Abs", "Relu", "Where",
))  # fmt: skip
# Discontinuous operators: rounding may put two equal computations on different sides of a step.
STEPS = COMPARE.onnx - {"NonMaxSuppression"} | {"Floor", "Ceil", "Round"}


def kernel_margins(
    wide: Sequence[int],
    narrow: Sequence[int],
    wide_pads: Sequence[tuple[int, int]],
    narrow_pads: Sequence[tuple[int, int]],
    dilations: Sequence[int],
) -> list[tuple[int, int]] | None:
    """How many zeros make a narrow kernel of a convolution a wide one that computes the same: (before, after) of each axis.

    Both read one image with the same strides and dilations. None: the narrow kernel does not lie inside of the wide one.

    Args:
        wide, narrow: sides of the kernels.
        wide_pads, narrow_pads: (before, after) of the image's padding, pixels.
    """
    margins = []
    for axis, step in enumerate(dilations):
        before, after = (outer - own for outer, own in zip(wide_pads[axis], narrow_pads[axis], strict=True))
        if before < 0 or after < 0 or before % step or before + after != (wide[axis] - narrow[axis]) * step:
            return None
        margins.append((before // step, after // step))
    return margins


def kernel_over_blocks(side: int, padding: int, stride: int) -> tuple[int, int, tuple[int, int]]:
    """One axis of a convolution's kernel over blocks of `stride` pixels, which it moves along by one block.

    Args:
        side: of the kernel. padding: zeros before the image, pixels.

    Returns:
        The first and the last block that it reads, relative to the block of its output, and how many zeros before and after the
        kernel make it as long as these blocks.
    """
    first, last = -padding // stride, (side - 1 - padding) // stride
    return first, last, (-padding - stride * first, stride * (last + 1) - side + padding)


def plugin_operators(model_onnx: Path) -> list[str]:
    """Operators in an ONNX file that only a TensorRT plugin runs, without loading it."""
    return named_in(model_onnx, PLUGIN_NODES)


def check_model_file(path: Path) -> None:
    """Refuse what cannot be an ONNX model, before anything is loaded.

    Raises:
        EngineError: missing, a folder, unreadable, empty, or text.
    """
    if path.is_dir():
        raise EngineError(f"'{path}' is a folder; give the .onnx file in it")
    if not path.is_file():
        raise EngineError(f"there is no ONNX file '{path}'; make one with: `export(MODEL, output=OUT)`")
    try:
        with open(path, "rb") as file:
            start = file.read(64)
    except OSError as error:
        raise EngineError(f"'{path}' cannot be read: {error.strerror}") from None
    if not start:
        raise EngineError(f"'{path}' is empty (0 bytes); export or download it again")
    if (words := what_it_is(path)) and start[0] not in _FIRST_BYTES:
        raise EngineError(f"'{path}' is {words}")
    if start[0] not in _FIRST_BYTES:
        raise EngineError(f"'{path}' is not an ONNX model (it begins with {start[:8]!r}); give an .onnx file")
