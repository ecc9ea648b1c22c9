"""Look into a running PyTorch model: its top-k selections, and what its modules return."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..errors import ExportError
from ..tasks.reading_order import near_cuts
from .families import BY_NAME
from .families.base import modeling_name


@contextlib.contextmanager
def _by_selections() -> Iterator[None]:
    """Models of transformers with the functions that their families compute by selections, as their graphs have them."""
    with contextlib.ExitStack() as stack:
        for family in BY_NAME.values():
            module = sys.modules.get(modeling_name(family)) if family.by_selections else None
            for name, get in family.by_selections.items() if module is not None else ():
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, get())
        yield


@contextlib.contextmanager
def recorded_topk() -> Iterator[list[Tensor]]:
    """The indices of the calls of `torch.topk` and `torch.argsort` in the block, in call order."""
    found: list[Tensor] = []
    original, original_method, sort = torch.topk, torch.Tensor.topk, torch.argsort

    def recording(values: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(values, *args, **kwargs)
        found.append(result.indices)
        return result

    def recording_order(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append(sort(values, *args, **kwargs))
        return found[-1]

    torch.topk = torch.Tensor.topk = recording  # type: ignore[assignment, method-assign]
    torch.argsort = recording_order  # type: ignore[assignment]
    try:
        with _by_selections():
            yield found
    finally:
        torch.topk, torch.Tensor.topk, torch.argsort = original, original_method, sort  # type: ignore[method-assign]


@contextlib.contextmanager
def module_outputs(model: nn.Module, only: Collection[str] | None = None) -> Iterator[list[tuple[str, Tensor]]]:
    """(module path, float output) of every module call in the block, in the order in which they return.

    The path is that of a traced graph: a second call of a module has "_1" after its name. A module that
    returns several tensors gives each of them. only: paths of the modules to listen to; None: all.
    """
    found: list[tuple[str, Tensor]] = []
    calls: Counter[str] = Counter()

    def hook(path: str) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            number = calls[path]
            calls[path] += 1
            name = f"{path}_{number}" if number else path
            # A copy: residual sums are often added in place.
            found.extend((name, tensor.detach().clone()) for tensor in _tensors(output))

        return keep

    handles = [module.register_forward_hook(hook(path)) for path, module in _listened(model, only)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def module_paths(session: Any) -> list[str]:
    """Paths of the modules inside a TorchSession's detector that a graph can be compared with.

    Convolutions are left out: a graph folds the normalisation after them into their weights.
    """
    modules = session.module.model.named_modules()
    return [path for path, module in modules if path and not isinstance(module, nn.modules.conv._ConvNd)]


def run_modules(
    session: Any, feeds: Any, chosen: tuple[Sequence[Any], Sequence[Any] | None] | None, only: Collection[str]
) -> list[tuple[str, NDArray]]:
    """(module path, float32 array) of some modules' outputs in one run of a TorchSession, in call order.

    chosen: what to force, as `forced_choices` takes it, or None.
    """
    with (
        contextlib.nullcontext() if chosen is None else forced_choices(*chosen),
        module_outputs(session.module.model, only) as found,
    ):
        session.run(feeds)
    return [(path, tensor.float().cpu().numpy()) for path, tensor in found]


def _listened(model: nn.Module, only: Collection[str] | None) -> Iterator[tuple[str, nn.Module]]:
    return ((path, module) for path, module in model.named_modules() if path and (only is None or path in only))


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)


@contextlib.contextmanager
def forced_choices(selections: Sequence[Any], cuts: Sequence[Any] | None = None) -> Iterator[None]:
    """`forced_topk`, and of a model that cuts numbers to integers `forced_cuts`. cuts: None for other models."""
    with forced_topk(selections), contextlib.nullcontext() if cuts is None else forced_cuts(cuts):
        yield


@contextlib.contextmanager
def recorded_cuts() -> Iterator[list[Tensor]]:
    """Integers that the calls of `Tensor.long` on floats in the block return, in call order."""
    found: list[Tensor] = []
    original = torch.Tensor.long

    def recording(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = original(tensor, *args, **kwargs)
        if tensor.is_floating_point():
            found.append(result)
        return result

    torch.Tensor.long = recording  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        torch.Tensor.long = original  # type: ignore[method-assign]


@contextlib.contextmanager
def forced_cuts(values: Sequence[Any]) -> Iterator[None]:
    """Make the calls of `Tensor.long` on floats in the block return the given integers, in call order.

    PP-DocLayoutV2 cuts coordinates to integers, which choose rows of a table: where one lies at an integer, rounding alone chooses another
    row. A number that `near_cuts` excludes keeps its own.

    values: integer arrays or tensors, on any device.

    Raises:
        ExportError: another number of calls, or integers of another shape.
    """
    remaining = list(values)
    original = torch.Tensor.long

    def forced(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        own = original(tensor, *args, **kwargs)
        if not tensor.is_floating_point():
            return own
        if not remaining:
            raise ExportError("the graph cuts fewer numbers to integers than the PyTorch model")
        given = torch.as_tensor(remaining.pop(0), device=tensor.device)
        if given.shape != own.shape:
            raise ExportError(f"integers have shape {tuple(given.shape)}, PyTorch's {tuple(own.shape)}")
        return torch.where(near_cuts(tensor, given), given, own)

    torch.Tensor.long = forced  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.long = original  # type: ignore[method-assign]
    if remaining:
        raise ExportError("the graph cuts more numbers to integers than the PyTorch model")


@contextlib.contextmanager
def forced_topk(indices: Sequence[Any]) -> Iterator[None]:
    """Make the calls of `torch.topk` and `torch.argsort` in the block return what is at the given indices, in call order.

    indices: integer arrays or tensors, on any device.

    Two runtimes order ties, and near-ties within rounding, differently; everything after the selection
    then belongs to other queries. Forcing one's selection on the other makes their tensors comparable.

    Raises:
        ExportError: more calls than indices, or a selection of another shape.
    """
    remaining = list(indices)
    original, original_method, sort = torch.topk, torch.Tensor.topk, torch.argsort

    def forced_order(values: torch.Tensor, dim: int = -1, **kwargs: Any) -> torch.Tensor:
        length = values.shape[dim]
        return forced(values.to(torch.int64), length, dim, largest=kwargs.get("descending", False)).indices  # type: ignore[no-any-return]

    def forced(values: torch.Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
        if not remaining:
            raise ExportError("the graph has fewer top-k selections than the PyTorch model")
        index = torch.as_tensor(remaining.pop(0), device=values.device)
        expected = original(values, k, dim, *args, **kwargs)
        if index.shape != expected.indices.shape:
            raise ExportError(
                f"the graph selects {index.shape[-1]} of an image's positions or queries, the PyTorch model {k}; read the checkpoint "
                "with the `queries` and `decoder_layers` that the graph was exported with (detrt info shows them)"
            )
        return torch.return_types.topk((values.gather(dim, index), index))

    torch.topk = torch.Tensor.topk = forced  # type: ignore[assignment, method-assign]
    torch.argsort = forced_order  # type: ignore[assignment]
    try:
        with _by_selections():
            yield
    finally:
        torch.topk, torch.Tensor.topk, torch.argsort = original, original_method, sort  # type: ignore[method-assign]
    if remaining:
        raise ExportError("the graph has more top-k selections than the PyTorch model")
