"""`detrt info` and `detrt doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import DetrtError, install_hint
from ..models.load import LoadOptions
from .options import Given, command

Json = Annotated[str | None, typer.Option("--json", help="As JSON to this file; - is stdout.")]


@command
def info(
    load: Given[LoadOptions],
    model: Annotated[str | None, typer.Argument(help="Bundle, .onnx, .engine or checkpoint.")] = None,
    families: Annotated[bool, typer.Option("--families", help="List every family and what it supports.")] = False,
    json_file: Json = None,
) -> None:
    """Say what a model is, or list the families."""
    from . import show
    from .describe import describe, family_rows

    show.check_json(json_file)
    if families == (model is not None):
        raise DetrtError("say what to show: detrt info MODEL, or detrt info --families")
    if families:
        if load.flags():
            raise DetrtError(f"{load.flags()[0][0]} has no effect with --families; leave it out")
        rows = family_rows()
        if json_file:
            show.write_json(rows, json_file)
        if json_file != "-":
            columns = ("family", "decode", "size", "mask", "multiple of", "deformable", "original files", "example")
            show.table("", columns, [[_cell(row[column]) for column in columns] for row in rows])
            for row in rows:
                if row["why fixed"]:
                    print(f"{row['family']}: fixed size, because {row['why fixed']}.")
        return
    data = describe(str(model), load.make())
    if json_file:
        show.write_json(data, json_file)
    if json_file != "-":
        show.table(str(model), ("", ""), _flat(data))


def doctor(json_file: Json = None) -> None:
    """Say what is installed, which targets work here, and what to install for the rest."""
    from ..system import diagnose
    from . import show

    show.check_json(json_file)
    found = diagnose()
    if json_file:
        show.write_json(found.to_dict(), json_file)
    if json_file == "-":
        return
    machine = found.machine
    print(
        f"{machine['system']}, Python {machine['python']}, {machine['cores']} cores, {machine['memory_gib']} GiB memory, "
        f"{machine['disk_free_gib']} GiB free here"
    )
    for gpu in found.gpus:
        print(
            f"GPU: {gpu['name']}, compute capability {gpu['compute_cap']}, driver {gpu['driver_version']}, {gpu['memory.total']}"
        )
    if not found.gpus:
        print("GPU: none found (nvidia-smi does not answer)")
    rows = [("yes" if t.works else "no", t.name, t.detail) for t in found.targets]
    show.table("what works here", ("", "", ""), rows)
    show.table(
        "packages",
        ("package", "version", "for", "extra"),
        [(p.name, p.version or "-", p.purpose, f"[{p.extra}]" if p.extra else "") for p in found.packages],
    )
    missing = next((p.extra for p in found.packages if p.extra and not p.version), "")
    if missing:
        print(f"to install an extra, e.g. [{missing}], {install_hint(missing)}")


def _cell(value: object) -> str:
    """A list, such as of the formats, says yes or no in a table; its words are in the JSON."""
    return ("yes" if value else "no") if isinstance(value, list) else str(value)


def _flat(data: object, prefix: str = "") -> list[tuple[str, str]]:
    """Nested JSON as rows of dotted name and value."""
    if isinstance(data, dict):
        return [row for key, value in data.items() for row in _flat(value, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return [row for i, value in enumerate(data) for row in _flat(value, f"{prefix}[{i}]")]
    return [(prefix, ", ".join(map(str, data)) if isinstance(data, (list, tuple)) else str(data))]
