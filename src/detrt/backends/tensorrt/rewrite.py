"""The graph that a parser gets: the ONNX file itself, or a copy in the dialect of a version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import GraphError
from ...models.families import having
from ...spec import ModelSpec
from .config import EngineConfig
from .rows import Version

SELECTIONS_RETURNED = "selections returned"  # of `Rewritten.changes`


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A graph for a parser.

    Attributes:
        path: the file to parse.
        low: whether the typed graph computes in FP16; for builders without strong typing.
        changes: operator -> how many nodes were written in another form.
        plugin_is_faster: whether detrt's plugin, which was not given, would take the place of gathers in this FP16 graph.
        inputs, outputs: {"name", "dtype", "shape"} of the ONNX file, where the parser would change them; else None.
    """

    path: Path
    low: bool = False
    changes: Mapping[str, int] = field(default_factory=dict)
    plugin_is_faster: bool = False
    inputs: tuple[Mapping[str, Any], ...] | None = None
    outputs: tuple[Mapping[str, Any], ...] | None = None


def rewrite(
    onnx: Path, row: Version, config: EngineConfig, spec: ModelSpec, folder: Path, plugins: frozenset[str] = frozenset()
) -> Rewritten:
    """Write the graph that a version's parser reads into `folder`, where it needs another one than the file.

    plugins: operators of loaded plugins that may take the place of others (`Dialect.plugins`).

    Raises:
        GraphError: what cannot be written out or in an opset that the version reads, or a type that it lacks.
    """
    return row.spoken().rewrite(onnx, row, config, spec, folder, plugins)


def rewrite_typed(onnx: Path, row: Version, config: EngineConfig, spec: ModelSpec, folder: Path) -> Rewritten:
    """`rewrite` for a builder that obeys the types of the graph. Raises GraphError."""
    from ... import graph
    from ...graph.blocks import convolve_blocks
    from ...graph.dialect import for_typed_parser
    from ...graph.msda_plugin import set_plugin_version
    from ...graph.raise_msda import gather_by_level
    from ...graph.selections import return_selections

    try:
        model = graph.load(onnx)
    except GraphError:
        return Rewritten(onnx)  # the parser says what is wrong with the file
    changes: Counter[str] = Counter()
    if config.return_selections:
        changes[SELECTIONS_RETURNED] = len(return_selections(model))
    if spec.family in having(row.by_level_for):
        changes["gathers by level"] = gather_by_level(model)
    changes += for_typed_parser(
        model,
        opset=row.opset,
        cumsum=row.cumsum,
        grid_sample_linear=row.grid_sample_linear,
        scatter_reduction=row.scatter_reduction,
    )
    if row.blocks:
        changes["convolutions over blocks"] = convolve_blocks(model)
    if row.msda_plugin:
        changes["plugin versions"] = set_plugin_version(model, row.msda_plugin)
    if not +changes:
        return Rewritten(onnx)
    path = folder / "model.onnx"
    graph.save(model, path)
    return Rewritten(path, changes=dict(+changes))
