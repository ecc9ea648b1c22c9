"""What a backend is to the rest of detrt: one row of plain data, exported by the backend's folder. `targets.py` is their list."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..system import Ability

if TYPE_CHECKING:
    from .building import Builder
    from .search import Opener


@dataclass(frozen=True, slots=True)
class Build:
    """Something that `build` makes for a backend.

    name: as `build` takes it. here: building it for this machine and running it. device: for which it is built then; "": its own.
    from_checkpoint: the checkpoint is read again, so that an ONNX file is not enough.
    takes: fields of `SharedOptions` that say something about it.
    """

    name: str
    here: Ability | None = None
    device: str = ""
    from_checkpoint: bool = False
    takes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """A backend. Rows are made without importing what runs it.

    Attributes:
        name: as `open_session` takes it. others: more names of it, which choose among its libraries.
        kind: of its files in a bundle, and of a file alone. suffixes: by which a file alone is known.
        words: what such a file is, with its article.
        opener: module and name of its `Opener`, such as "detrt.backends.openvino.opening:OPENER".
        builder, config: of its `Builder`, and of the class of what it is told; "": nothing of it is built.
        devices: kinds of device for which it is taken where no backend is named.
        reads_load: a file may need to be told how it is read (`LoadOptions`). takes_spec: and its spec.
        tuning: arguments of opening that are for it alone. tuned_by: the class of which they are the fields, which checks them; "": it has
            none. title: its name in messages about them.
        builds: what can be built for it, best first.
        abilities: what `doctor` looks for.
        native: what native code each of its files holds, in words.
        placement: where INT8 is placed for it, of `precision.config.PLACEMENTS`; "": it takes any.
        gpu_names: those of its names that run on a GPU only.
        sidecar: its files say what they are in a file beside them.
    """

    name: str
    kind: str
    words: str
    opener: str
    suffixes: tuple[str, ...] = ()
    builder: str = ""
    config: str = ""
    others: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    reads_load: bool = False
    takes_spec: bool = False
    tuning: tuple[str, ...] = ()
    tuned_by: str = ""
    title: str = ""
    builds: tuple[Build, ...] = ()
    abilities: tuple[Ability, ...] = ()
    native: str = ""
    placement: str = ""
    gpu_names: tuple[str, ...] = ()
    sidecar: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.others)

    def opened_by(self) -> Opener:
        """Its `Opener`; imports the module that has it."""
        return named(self.opener)  # type: ignore[no-any-return]

    def built_by(self) -> Builder:
        """Its `Builder`; imports the module that has it."""
        return named(self.builder)  # type: ignore[no-any-return]

    def config_class(self) -> type:
        """The class of its configs; imports the module that has it."""
        return named(self.config)  # type: ignore[no-any-return]

    def tuning_class(self) -> type:
        """The class of its `tuning`; imports the module that has it."""
        return named(self.tuned_by)  # type: ignore[no-any-return]

    def takes(self, config: Any) -> bool:
        """Whether an object says what is built for this backend."""
        module, _, name = self.config.partition(":")
        return any((one.__module__, one.__qualname__) == (module, name) for one in type(config).__mro__)


def named(reference: str) -> Any:
    """What "module:name" names; imports the module."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)
