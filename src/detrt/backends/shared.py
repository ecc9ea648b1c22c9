"""What is asked of the builders of all backends alike, and the configs that they make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import EngineError
from ..spec import Triple, triple_text
from . import targets
from .target import Build, Target

AUTO = "auto"


def builds() -> dict[str, tuple[Target, Build]]:
    """Name of each thing that `build` makes for a backend -> its backend and itself; the ONNX graph alone last."""
    return {build.name: (target, build) for target in targets.TARGETS for build in target.builds}


def names_taking(name: str) -> tuple[str, ...]:
    """The builds about which a field of `SharedOptions` says something."""
    return tuple(build.name for _, build in builds().values() if name in build.takes)


@dataclass(frozen=True, slots=True)
class SharedOptions:
    """What is built, and what several backends take.

    names: of builds, such as "tensorrt", or "auto" alone. devices: to build for, or to try the graph on.
    batch, height, width: (min, opt, max); sides in pixels. sizes: (height, width) of one file each.
    timeout_seconds: limit of each build.

    Raises:
        EngineError: an unknown name, or sizes that nothing of what is built takes.
    """

    names: tuple[str, ...]
    devices: tuple[str, ...] = ()
    batch: Triple | None = None
    height: Triple | None = None
    width: Triple | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        known = builds()
        *others, graph = known
        allowed = f"{', '.join(others)}, {graph} (no engine) or {AUTO}"
        if not self.names:
            raise EngineError(f"`targets` must be {allowed}; got nothing")
        for name in self.names:
            row = next((target for target in targets.TARGETS if name in target.names and target.builds), None)
            if name not in (*known, AUTO) and row is not None:
                build = row.builds[-1].name
                raise EngineError(f"`targets={name}` is now `targets={build}`, {row.words}, which {row.title} runs")
            if name not in (*known, AUTO):
                raise EngineError(f"`targets` must be {allowed}, or a comma-separated list of them; got {name!r}")
        if AUTO in self.names and len(self.names) > 1:
            raise EngineError(f"`targets={AUTO}` chooses by itself; got {','.join(self.names)}; give one of the two")
        if AUTO not in self.names:
            self._check_sizes()

    def _check_sizes(self) -> None:
        of_size, of_sizes = names_taking("height"), names_taking("sizes")
        shaped = [name for name in self.names if name in of_size]
        if len(self.sizes) > 1 and (not shaped or not set(shaped) <= set(of_sizes)):
            raise EngineError(
                f"`size={','.join(f'{height}x{width}' for height, width in self.sizes)}` names several sizes, which "
                f"`targets={' or '.join(of_sizes)}` compiles a package for each; got `targets={','.join(self.names)}`; give one size, or a range "
                "with `height` and `width`"
            )
        for name in ("height", "width"):
            sides = getattr(self, name)
            if sides is not None and sides[0] != sides[2] and not shaped:
                raise EngineError(
                    f"`{name}={triple_text(sides)}` is a range, which has no effect without an engine or package target; leave "
                    "it out, or give one number"
                )

    def resolved(self, *, checkpoint: bool) -> SharedOptions:
        """The same, with what "auto" stands for on this machine; the ONNX graph alone where nothing faster can be built.

        checkpoint: a checkpoint is there to build from, not an ONNX file alone.
        """
        if self.names != (AUTO,):
            return self
        found = targets.fastest_build(checkpoint=checkpoint)
        if found is None:
            return replace(self, names=(targets.GRAPH.builds[-1].name,), devices=())
        return replace(self, names=(found.name,), devices=(found.device,) if found.device else ())


def configs_of(asked: SharedOptions, makers: Mapping[str, Callable[..., Any]] | None = None) -> list[Any]:
    """The configs of all that is asked, for `build`.

    makers: name of a backend -> what makes its config from fields; default: its class.

    Raises:
        EngineError: a value that is not allowed.
    """
    found: list[Any] = []
    for target in targets.TARGETS:
        names = tuple(name for name in asked.names if name in [build.name for build in target.builds])
        if names:
            make = (makers or {}).get(target.name) or target.config_class()
            found += target.built_by().configs_for(_taken(asked, names), make)
    return found


def _taken(asked: SharedOptions, names: tuple[str, ...]) -> SharedOptions:
    """What is asked of these builds: sizes are of those that take them."""
    sizes = {"sizes": (), "height": None, "width": None}
    left_out = {field: empty for field, empty in sizes.items() if not set(names) & set(names_taking(field))}
    return replace(asked, names=names, **left_out)  # type: ignore[arg-type]
