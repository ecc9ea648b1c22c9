"""`detrt info` and `detrt doctor`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from ..errors import DetrtError, install_hint, number_of
from ..models.families import TESTED
from ..models.load_options import LoadOptions
from .options import Given, Json, command


@command
def info(
    load: Given[LoadOptions],
    model: Annotated[str | None, typer.Argument(help="Bundle, .onnx, .engine or checkpoint.")] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Show how many kernels of each kind its TensorRT-RTX engines have.")
    ] = False,
    families: Annotated[bool, typer.Option("--families", help="List every family and what it supports.")] = False,
    json_file: Json = None,
) -> None:
    """Say what a model is, or list the families."""
    from . import show
    from .describe import describe, family_rows, kernel_rows

    show.check_json(json_file)
    if families == (model is not None):
        raise DetrtError("say what to show: detrt info MODEL, or detrt info --families")
    given = [flag for flag, _ in load.flags()]
    for flag, chosen in (("--families", families), ("--layers", layers)):
        if chosen and given:
            raise DetrtError(f"{given[0]} has no effect with {flag}; leave it out")
        given += [flag] * chosen
    if families:
        rows = family_rows()
        if json_file:
            show.write_json(rows, json_file)
        if json_file != "-":
            columns = ("family", "title", "size", "multiple of", "original files")
            heads = ("family", "", "size", "multiple", "original files")
            show.table("", heads, [_cells(row, columns) for row in rows])
            show.table("", ("an example of each",), [[row["example"]] for row in rows])
            show.table("", ("family", "licence of its code and weights"), [[row["family"], row["licence"]] for row in rows])
            for row in rows:
                if row["why fixed"]:
                    show.paragraph(f"{row['family']}: fixed size, because {row['why fixed']}.")
            print("more of each family, such as its decode rule: detrt info --families --json -")
        return
    if layers:
        kernels = kernel_rows(str(model))
        if json_file:
            show.write_json(kernels, json_file)
        if json_file != "-":
            show.table("", ("engine", "kind", "kernels"), [list(map(str, row.values())) for row in kernels], right=(2,))
            print("each kernel, with the types that it reads and writes: detrt build ... --target tensorrt-rtx --layers FILE")
        return
    data = describe(str(model), load.make())
    if json_file:
        show.write_json(data, json_file)
    if json_file != "-":
        _show_model(str(model), data)


def doctor(json_file: Json = None) -> None:
    """Say what is installed, which targets work here, and what to install for the rest."""
    from ..backends.targets import abilities
    from ..system import diagnose
    from . import show

    show.check_json(json_file)
    found = diagnose(abilities())
    if json_file:
        show.write_json({**found.to_dict(), "transformers_tested": TESTED}, json_file)
    if json_file == "-":
        return
    machine = found.machine
    print(
        f"{machine['system']}, Python {machine['python']}, {number_of(machine['cores'], 'core')}, {machine['memory_gib']} GiB memory, "
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
    installed = next(p.version for p in found.packages if p.name == "transformers")
    other = (
        f"; {installed} is not among them, and needs --allow-untested-transformers" if installed not in (None, *TESTED) else ""
    )
    show.paragraph(f"transformers versions tested: {', '.join(TESTED)}{other}")
    missing = next((p.extra for p in found.packages if p.extra and not p.version), "")
    if missing:
        print(f"to install an extra, e.g. [{missing}], {install_hint(missing)}")


def _cells(row: Mapping[str, Any], columns: Iterable[str]) -> list[str]:
    """A list, such as of the formats, says yes or no in a table; its words are in the JSON."""
    return [("yes" if row[name] else "no") if isinstance(row[name], list) else str(row[name]) for name in columns]


def _show_model(ref: str, data: Mapping[str, Any]) -> None:
    """The facts of `describe` as a page: names of fields become words, files a table of their own."""
    from . import show

    shown: dict[str, str] = {}
    parameters = data.get("parameters") or 0
    count = f", {parameters / 1e6:.1f} M parameters" if parameters else ""
    shown["model"] = f"{data.get('name', '')}, family {data.get('family', '')}{count}"
    if "source" in data:
        shown["made from"] = str(data["source"])
    if "created" in data:
        versions = data.get("versions", {})
        shown["built"] = f"{data['created']} with " + ", ".join(f"{name} {text}" for name, text in versions.items())
    if "size" in data:
        shown["input"] = f"{data['size']}, {data['input']}, sides a multiple of {data['multiple_of']}"
    if "checkpoint_sha256" in data:  # its 64 digits need the space
        shown["weights sha256"] = str(data["checkpoint_sha256"])
    done = {
        "checkpoint_sha256",
        "kind",
        "name",
        "family",
        "parameters",
        "source",
        "created",
        "versions",
        "size",
        "input",
        "multiple_of",
        "files",
    }
    shown |= {key.replace("_", " "): _words(value) for key, value in data.items() if key not in done}
    show.table(f"{ref}: {data['kind']}", ("", ""), list(shown.items()))
    if data.get("files"):
        rows = [(row["path"], show.human_size(row["bytes"]), _file_words(row)) for row in data["files"]]
        show.table("", ("file", "size", ""), rows, right=(1,))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key} {_words(one)}" for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_words, value))
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _file_words(row: Mapping[str, Any]) -> str:
    """What a file of a bundle is: its kind, and of an engine or package what it runs on and takes."""
    if not row["present"]:
        return f"{row['kind']}, MISSING"
    if "bytes_found" in row:
        return f"{row['kind']}, DAMAGED: it has {row['bytes_found']} bytes"
    facts = row.get("engine")
    if facts is None:
        return str(row["kind"])
    devices = ", ".join(map(str, facts["compute_capabilities"]))
    words = [f"{row['kind']} for {facts['target']}", str(facts["precision"]), f"compute capability {devices}" if devices else ""]
    for name, sides in facts["profile"].items():
        words.append(f"{name} " + " to ".join("x".join(map(str, shape)) for shape in dict.fromkeys(map(tuple, sides.values()))))
    if speed := facts.get("cpu_speed"):
        words.append(
            f"{speed['openvino_ms']:.4g} ms on {speed['processor']}, {number_of(speed['threads'], 'thread')} (ONNX Runtime "
            f"{speed['onnxruntime_ms']:.4g} ms)"
        )
    return ", ".join(filter(None, words))
