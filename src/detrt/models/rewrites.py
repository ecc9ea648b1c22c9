"""Scoped replacements of library code that tracing needs.

`with rewrites(model, family.rewrites):` patches transformers, and restores it on exit. The row of a family names the
places whose code each rewrite relies on, with fingerprints of their source, and a place that has
changed is an error, not a silent miss. Every rewrite computes the same function as the original: a
test compares the outputs with and without it, and every export is compared with the plain model.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import ExportError
from ..graph.border import STEADY
from .families import BY_NAME, TESTED
from .ops.msda import ms_deform_attn
from .source import transformers_version

_MISSING = object()
Patch = tuple[Any, str, Any]  # object, attribute, replacement
Wanted = Mapping[str, Mapping[str, tuple[str, ...]]]  # as `Family.rewrites`


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One replacement. patches: gives the patches for a modeling module and a model. Which code it relies on is in the row of the
    family, see `Family.rewrites`."""

    why: str
    patches: Callable[[ModuleType, nn.Module], list[Patch]]


def traced_sizes(shapes: Sequence[Sequence[Any]] | Tensor) -> Tensor:
    """(levels, 2) int64 tensor of sizes that stay symbolic while tracing."""
    if isinstance(shapes, Tensor):
        return shapes
    rows = [torch.stack([torch.as_tensor(side, dtype=torch.int64) for side in pair]) for pair in shapes]
    return torch.stack(rows)


class TorchForTracing:
    """`torch` for one modeling module, with the two calls that turn traced sizes into constants replaced."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        if isinstance(data, (list, tuple)) and data and isinstance(data[0], (list, tuple)):
            return traced_sizes(data).to(dtype=dtype or torch.int64, device=device)
        return torch.as_tensor(data, dtype=dtype, device=device)

    @staticmethod
    def linspace(start: Any, end: Any, steps: Any, dtype: Any = None, device: Any = None) -> Tensor:
        # Every use has unit step, so a range of symbolic length plus the start is the same numbers.
        return torch.arange(steps, device=device).to(dtype) + start


def _deformable_module_forward(
    self: nn.Module,
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_spatial_shapes_list: Sequence[Sequence[Any]],
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    return sampled(value, value_spatial_shapes_list, sampling_locations, attention_weights)


def sampled(value: Tensor, shapes: Sequence[Sequence[Any]], locations: Tensor, weights: Tensor) -> Tensor:
    """Deformable attention with as many points in each level. locations: (b, q, heads, levels, points, 2); weights: without the last."""
    levels, points = locations.shape[3:5]
    return ms_deform_attn(
        value, traced_sizes(shapes), locations.flatten(3, 4), weights.flatten(3, 4), [int(points)] * int(levels), False
    )


def _deformable_function(
    value: Tensor,
    value_spatial_shapes: Sequence[Sequence[Any]] | Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    num_points_list: list[int],
    method: str = "default",
) -> Tensor:
    return ms_deform_attn(
        value,
        traced_sizes(value_spatial_shapes),
        sampling_locations,
        attention_weights,
        [int(points) for points in num_points_list],
        method == "discrete",
    )


def _msda_patches(module: ModuleType, model: nn.Module) -> list[Patch]:
    if hasattr(module, "MultiScaleDeformableAttention"):
        return [(module.MultiScaleDeformableAttention, "forward", _deformable_module_forward)]
    patches: list[Patch] = [(module, "multi_scale_deformable_attention_v2", _deformable_function)]
    # D-FINE and DEIMv2 bind the function to each instance when they are built.
    for child in model.modules():
        if hasattr(child, "ms_deformable_attn_core"):
            patches.append((child, "ms_deformable_attn_core", _deformable_function))
    return patches


def _shape_patches(module: ModuleType, model: nn.Module) -> list[Patch]:
    return [(module, "torch", TorchForTracing())]


def _frozen_position_patches(module: ModuleType, model: nn.Module) -> list[Patch]:
    """Position tables for the one size that is exported, computed by the model's own code beforehand."""
    patches: list[Patch] = []
    for child in model.modules():
        if type(child).__name__.endswith("Dinov2Embeddings") and hasattr(child, "interpolate_pos_encoding"):
            original, tables = child.interpolate_pos_encoding, {}

            def frozen(embeddings: Tensor, height: Any, width: Any, original: Any = original, tables: dict = tables) -> Tensor:
                size = (int(height), int(width))
                if size not in tables:
                    if torch.jit.is_tracing():
                        raise ExportError(f"the position table for {size} was not computed before tracing")
                    tables[size] = original(embeddings, *size).detach().clone()
                return tables[size]

            patches.append((child, "interpolate_pos_encoding", frozen))
    if not patches:
        raise ExportError("rewrite 'frozen_positions' found no DINOv2 embeddings to patch in this model")
    return patches


class _SteadyBorder(TorchFunctionMode):
    """Compares positions with numbers beside the border (`detrt.graph.border`); of any family."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(args) == 2 and isinstance(args[1], float):
            for compare, (on_border, beside) in _STEADY:
                if func is compare and args[1] == on_border:
                    args = args[0], beside
        return func(*args, **(kwargs or {}))


_STEADY = ((Tensor.gt, STEADY["Greater"]), (Tensor.lt, STEADY["Less"]))

REWRITES: dict[str, Rewrite] = {
    "msda": Rewrite("deformable attention becomes one op, lowered late", _msda_patches),
    "symbolic_shapes": Rewrite(
        "torch.as_tensor and torch.linspace turn symbolic sizes into constants without an error", _shape_patches
    ),
    "frozen_positions": Rewrite(
        "the antialiased bicubic resize of the position table exists in no TensorRT version", _frozen_position_patches
    ),
    # Nothing is replaced: detrt's own modules compute what these places compute, and must know when they change.
    "tensors_only": Rewrite(
        "prompted detectors are traced as detrt's own modules over the library's weights", lambda module, model: []
    ),
}


def rewrite_of(name: str) -> Rewrite:
    """A rewrite by the name that the rows of the families have it under."""
    own = {name: given for family in BY_NAME.values() for name, given in family.own_rewrites.items()}
    return REWRITES[name] if name in REWRITES else own[name]()


def fingerprint(function: Any) -> str:
    """First 16 hex digits of the SHA-256 of a function's source, white space at line ends ignored.

    Empty where there is no source to read, as for compiled functions and in frozen applications.
    """
    try:
        source = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""
    text = "\n".join(line.rstrip() for line in source.splitlines())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def modeling_module(model: nn.Module) -> ModuleType:
    """The transformers modeling module that a model's class comes from, also for remote-code subclasses."""
    for cls in type(model).__mro__:
        if cls.__module__.startswith("transformers.models."):
            return sys.modules[cls.__module__]
    raise ExportError(f"{type(model).__name__} is not built on a transformers model class")


def find(module: ModuleType, place: str) -> Any:
    """The function named by `place` inside a module, or None."""
    found: Any = module
    for part in place.split("."):
        found = inspect.getattr_static(found, part, None) if found is not module else getattr(found, part, None)
    return getattr(found, "__func__", found)


def check_places(module: ModuleType, wanted: Wanted) -> None:
    """Compare the code that the rewrites rely on with the code they were written for.

    A version of transformers that was not tested may have other code: loading asked for permission, and the comparison with PyTorch
    decides.

    Raises:
        ExportError: a place has changed or is gone; the message names it and the tested versions.
    """
    version = transformers_version()
    for name, places in wanted.items():
        if not places:
            raise ExportError(f"rewrite '{name}' has no place in {module.__name__}; it does not belong to this family")
        for place, known in places.items():
            function = find(module, place)
            if function is None or (version in TESTED and fingerprint(function) not in known):
                state = "is gone" if function is None else "has changed"
                raise ExportError(
                    f"{module.__name__}.{place} {state} in transformers {version}, so the rewrite "
                    f"'{name}' cannot be trusted; detrt was tested with transformers {', '.join(TESTED)}: "
                    f"pip install transformers=={TESTED[-1]}"
                )


@contextlib.contextmanager
def rewrites(model: nn.Module, wanted: Wanted) -> Iterator[None]:
    """Trace or capture a model with the rewrites of its family and a steady border inside the block."""
    with patched(model, wanted), _SteadyBorder():
        yield


@contextlib.contextmanager
def patched(model: nn.Module, wanted: Wanted) -> Iterator[None]:
    """Apply rewrites of a model's family inside the block and restore everything after it."""
    undo: list[Patch] = []
    module = modeling_module(model) if wanted else None
    try:
        for name, places in wanted.items():
            assert module is not None
            check_places(module, {name: places})
            for target, attribute, replacement in rewrite_of(name).patches(module, model):
                undo.append((target, attribute, vars(target).get(attribute, _MISSING)))
                setattr(target, attribute, replacement)
        yield
    finally:
        for target, attribute, original in reversed(undo):
            if original is _MISSING:
                delattr(target, attribute)
            else:
                setattr(target, attribute, original)
