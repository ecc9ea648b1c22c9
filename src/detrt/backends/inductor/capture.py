"""Capture of a tensors-only module as a functional graph of high-level ATen operators, the input of the passes.

The size is fixed; the batch may be symbolic. `torch.export` is used without its Python front end (`strict=False`),
because transformers' code needs none of it.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from ...errors import ExportError, one_line
from ...models.example_inputs import example_feeds
from ...models.nms_op import OP as NMS
from ...models.ops.msda import OP as MSDA
from ...models.rewrites import modeling_module, rewrites
from ...models.source import Source
from ...models.wrapper import ExportModule
from ...spec import PIXEL_MASK, ModelSpec
from ...text.tensors import AXES, CLASSES_AXIS, PHRASES_AXIS
from .nodes import move_constants

Range = tuple[int, int]
# (axis name -> smallest and largest length); an axis that is not here is fixed.
Ranges = Mapping[str, Range]


@dataclass(frozen=True)
class CapturedGraph:
    """A graph with its example inputs.

    graph: takes the tensors of `names` in that order, returns those of `outputs`. axes: input -> {axis: its name}, symbolic
    axes only. ranges: of their lengths.
    """

    graph: fx.GraphModule
    inputs: tuple[Tensor, ...]
    names: tuple[str, ...]
    outputs: tuple[str, ...]
    axes: Mapping[str, Mapping[int, str]]
    ranges: Ranges

    def exported(self) -> torch.export.ExportedProgram:
        """The graph as a program; traced again, so that its shapes and types are those of its present operators."""
        return _export(self.graph, self.inputs, self.names, self.axes, self.ranges)


def capture(source: Source, spec: ModelSpec, batch: Range, device: str = "cpu") -> CapturedGraph:
    """Capture a detector of fixed classes at the fixed size of `spec`, for batches from `batch[0]` to `batch[1]`.

    Moves the module of the source to the device.

    Raises:
        ExportError: the model cannot be exported, or has an operator that this target does not support.
    """
    module = ExportModule(source.module, spec).eval().to(device)
    low, high = batch
    count = low if low == high else min(max(2, low), high)
    feeds = example_feeds(spec, count, spec.input.size_hw)
    axes = {} if low == high else {name: {0: "batch"} for name in module.input_names}
    ranges = {} if low == high else {"batch": batch}
    return capture_module(module, source, feeds, axes, ranges, device)


def capture_text(
    source: Source, spec: ModelSpec, batch: Range, tokens: int, device: str = "cpu", names: int | None = None
) -> CapturedGraph:
    """As `capture`, for the detector of a prompted model and prompts of `tokens` tokens; names: length of its class list, or number of phrases."""
    from ...models.example_inputs import example_ids, image_feeds, text_feeds, torch_text_encoder
    from ...models.wrapper import TextExportModule

    count = batch[0]
    if not spec.input.mask and source.family.mask:
        masked_spec = replace(spec, input=replace(spec.input, mask=True))
        inner: Any = TextExportModule(source, masked_spec)
        module: Any = _WithoutMask(inner, inner.input_names, inner.output_names)
    else:
        module = TextExportModule(source, spec)
    feeds = image_feeds(spec, count, spec.input.size_hw)
    ids = example_ids(source, count, tokens)
    feeds |= text_feeds(source, spec, ids, torch_text_encoder(source, spec))
    counted = [name for name, axes in AXES.items() if name in feeds and axes[1] in (CLASSES_AXIS, PHRASES_AXIS)]
    for name in counted if names is not None else ():  # the rest is padding, as in every shorter list
        feeds[name] = feeds[name][:, :names]
        padding = [(0, 0), (0, names - feeds[name].shape[1])] + [(0, 0)] * (feeds[name].ndim - 2)
        feeds[name] = np.pad(feeds[name], padding)
    return capture_module(module.eval().to(device), source, feeds, {}, {}, device)


class _WithoutMask(nn.Module):
    """A prompted detector whose image always fills its tensor, so that it takes no mask."""

    def __init__(self, inner: nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.inner = inner
        self.input_names = [name for name in inputs if name != PIXEL_MASK]
        self.output_names = list(outputs)

    def forward(self, pixel_values: Tensor, *text: Tensor) -> Any:
        batch, _, height, width = pixel_values.shape
        mask = torch.ones(batch, height, width, dtype=torch.int64, device=pixel_values.device)
        return self.inner(pixel_values, mask, *text)


def capture_module(
    module: Any,
    source: Source,
    feeds: Mapping[str, np.ndarray],
    axes: Mapping[str, Mapping[int, str]],
    ranges: Ranges,
    device: str = "cpu",
) -> CapturedGraph:
    """As `capture`, for any tensors-only module with `input_names` and `output_names`."""
    inputs = tuple(torch.from_numpy(feeds[name]).to(device) for name in module.input_names)
    names = tuple(module.input_names)
    try:
        # Some models create tables without naming the device.
        default_device = contextlib.nullcontext() if device == "cpu" else torch.device(device)
        with (
            _capture_mode(source.module),
            torch.no_grad(),
            default_device,
            rewrites(source.module, source.family.rewrites),
        ):
            module(*inputs)  # fills the tables that some rewrites compute beforehand
            program = _export(module, inputs, names, axes, ranges)
            graph = _functional(program)
        move_constants(graph, torch.device(device))
    except ExportError:
        raise
    except Exception as error:  # torch.export's exceptions share no base class
        text = one_line(error, 500)
        raise ExportError(
            f"{source.family.title} cannot be captured by torch.export of torch {torch.__version__}: {text}"
        ) from error
    operators = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    if f"{NMS.replace('::', '.')}.default" in operators:
        raise ExportError("`targets=inductor` has no NMS in the graph; leave `nms=graph` out: NMS runs in post-processing")
    if source.family.deformable and not any(name.startswith(MSDA.replace("::", ".")) for name in operators):
        raise ExportError(f"{source.family.title}: no deformable attention was found in the captured graph")
    return CapturedGraph(graph, inputs, names, tuple(module.output_names), axes, ranges)


def _export(
    module: nn.Module,
    inputs: Sequence[Tensor],
    names: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
    ranges: Ranges,
) -> torch.export.ExportedProgram:
    shapes: Any = None
    if ranges:
        dims = {name: torch.export.Dim(name, min=low, max=high) for name, (low, high) in ranges.items()}
        shapes_of_inputs = [{axis: dims[name] for axis, name in axes.get(tensor, {}).items() if name in dims} for tensor in names]
        shapes = (tuple(shapes_of_inputs),)  # one entry for *args
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(_Positional(module), tuple(inputs), dynamic_shapes=shapes, strict=False)


class _Positional(nn.Module):
    """A module behind `*args`, so that symbolic axes are named the same way for every number of inputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Any:
        return self.inner(*inputs)


def _functional(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """Remove in-place operators, but keep high-level ones (linear, attention, norms)."""
    return module_of(program.run_decompositions({}))


@contextlib.contextmanager
def _capture_mode(model: nn.Module) -> Iterator[None]:
    """Patches for the time of a capture: `scaled_dot_product_attention` in every module of a transformers model that supports
    it (detrt loads models with eager attention, for tracing), and sizes as numbers."""
    library = modeling_of(model)
    checks: list[tuple[ModuleType, Any]] = []
    configs = {}
    for part in model.modules():
        config = getattr(part, "config", None)
        if getattr(type(part), "_supports_sdpa", False) and getattr(config, "_attn_implementation", None) == "eager":
            configs[id(config)] = config
    shape_as_tensor, interpolate = torch._shape_as_tensor, nn.functional.interpolate

    def by_rows(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Masks are resized with the batch as the channel axis, and on a GPU PyTorch branches on less than 4 channels.
        if input.ndim == 4 and not isinstance(input.shape[1], int):
            return interpolate(input.transpose(0, 1), *args, **kwargs).transpose(0, 1)
        return interpolate(input, *args, **kwargs)

    try:
        nn.functional.interpolate = by_rows
        for config in configs.values():
            config._attn_implementation = "sdpa"
        # Sizes are fixed, so nothing has to stay symbolic; the models read heights and widths only.
        torch._shape_as_tensor = lambda x: torch.tensor([n if isinstance(n, int) else -1 for n in x.shape])  # type: ignore[assignment]
        # len() of a tensor is the number of this batch, shape[0] is symbolic.
        for module in library:
            if hasattr(module, "torch_compilable_check"):
                checks.append((module, module.torch_compilable_check))
                module.torch_compilable_check = lambda *args, **kwargs: None  # reads numbers back from the device
            module.len = lambda x: x.shape[0] if isinstance(x, Tensor) else len(x)  # type: ignore[attr-defined]
        yield
    finally:
        for module in library:
            module.__dict__.pop("len", None)
        for module, check in checks:
            module.torch_compilable_check = check  # type: ignore[attr-defined]
        torch._shape_as_tensor = shape_as_tensor  # type: ignore[assignment]
        nn.functional.interpolate = interpolate
        for config in configs.values():
            config._attn_implementation = "eager"


def modeling_of(model: nn.Module) -> list[ModuleType]:
    """The transformers modeling modules of a model, none for detrt's own models."""
    try:
        return [modeling_module(model)]
    except ExportError:
        return []


def module_of(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """The module of a program, without the guards on its inputs that PyTorch 2.9 brought."""
    guards = "check_guards" in inspect.signature(program.module).parameters
    return program.module(**({"check_guards": False} if guards else {}))  # type: ignore[return-value]
