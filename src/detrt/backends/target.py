"""What a backend is to the rest of detrt: one row of plain data, exported by the backend's folder. `targets.py` is their list."""

from __future__ import annotations

from dataclasses import dataclass

from ..system import Ability


@dataclass(frozen=True, slots=True)
class Build:
    """Something that `build` makes for a backend.

    name: as `build` takes it. here: building it for this machine and running it. device: for which it is built then; "": its own.
    from_checkpoint: the checkpoint is read again, so that an ONNX file is not enough.
    """

    name: str
    here: Ability | None = None
    device: str = ""
    from_checkpoint: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A backend. Rows are made without importing what runs it.

    name: as `open_session` takes it. kind: of its files in a bundle. builds: what can be built for it, best first.
    abilities: what `doctor` looks for.
    """

    name: str
    kind: str
    builds: tuple[Build, ...] = ()
    abilities: tuple[Ability, ...] = ()
