"""`detrt info` and `detrt doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..backends.open import kind_of
from ..bundle import Bundle, read_sidecar
from ..errors import DetrtError
from ..spec import ModelSpec

Json = Annotated[str | None, typer.Option("--json", help="As JSON to this file; - is stdout.")]


def info(
    model: Annotated[str | None, typer.Argument(help="Bundle, .onnx, .engine or checkpoint.")] = None,
    family: Annotated[str | None, typer.Option(help="Family of ckpt:FILE, where its keys do not tell.")] = None,
    labels: Annotated[Path | None, typer.Option(help="Class names of a checkpoint: a text file, one a line, or JSON.")] = None,
    families: Annotated[bool, typer.Option("--families", help="List every family and what it supports.")] = False,
    json_file: Json = None,
) -> None:
    """Say what a model is, or list the families."""
    from . import show

    show.check_json(json_file)
    if families == (model is not None):
        raise DetrtError("say what to show: detrt info MODEL, or detrt info --families")
    if families:
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
    data = describe(str(model), family=family, labels=labels)
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
        ("package", "version", "for", "install with"),
        [(p.name, p.version or "-", p.purpose, "" if p.version else p.install) for p in found.packages],
    )


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


# Facts about a model or about the families, as JSON-ready values.
def describe(ref: str, *, family: str | None = None, labels: Path | str | None = None) -> dict[str, Any]:
    """What a bundle, ONNX file, engine or checkpoint is. family, labels: for checkpoints, see `load_source`.

    Raises:
        DetrtError: nothing there, or damaged.
    """
    kind = kind_of(ref)
    if kind == "bundle":
        bundle = Bundle.open(ref)
        entries = []
        for entry in bundle.files:
            path = bundle.path_of(entry)
            row: dict[str, Any] = {"path": entry.path, "kind": entry.kind, "bytes": entry.size, "present": path.is_file()}
            if entry.engine is not None:
                facts = entry.engine
                row["engine"] = {
                    "target": facts.target,
                    "tensorrt": facts.tensorrt_version,
                    "compute_capabilities": list(facts.compute_capabilities),
                    "precision": facts.precision,
                    "layers": facts.layers,
                    "profile": {k: dict(v) for k, v in facts.profile.items()},
                }
            entries.append(row)
        origin = bundle.provenance
        return {
            "kind": kind,
            **spec_facts(bundle.spec),
            "source": origin.source,
            "checkpoint_sha256": origin.checkpoint_sha256,
            "parameters": origin.parameters,
            "created": origin.created,
            "versions": dict(origin.versions),
            **{key: origin.options[key] for key in ("family", "labels", "loading") if key in origin.options},
            "files": entries,
        }
    if kind == "engine":
        spec, facts = read_sidecar(Path(ref))
        return {
            "kind": kind,
            **spec_facts(spec),
            "target": facts.target,
            "tensorrt": facts.tensorrt_version,
            "compute_capabilities": list(facts.compute_capabilities),
            "precision": facts.precision,
            "layers": facts.layers,
            "profile": {k: dict(v) for k, v in facts.profile.items()},
        }
    if kind == "onnx":
        from .. import graph

        summary = graph.summarise(graph.load(ref, weights=False))
        facts_of_graph = {
            "nodes": summary.nodes,
            "opset": summary.opset,
            "weights": summary.weight_elements,
            "inputs": {k: f"{t} {' x '.join(map(str, s))}" for k, (t, s) in summary.inputs.items()},
            "outputs": {k: f"{t} {' x '.join(map(str, s))}" for k, (t, s) in summary.outputs.items()},
            "operators": dict(summary.operators),
        }
        return {"kind": kind, **spec_facts(graph.read_spec(ref)), **facts_of_graph}
    from ..models.load import load_source

    source = load_source(ref, family=family, labels=labels)
    notes = {"loading": list(source.notes)} if source.notes else {}
    return {"kind": kind, **spec_facts(source.spec), "parameters": source.provenance.parameters, **notes}


def spec_facts(spec: ModelSpec) -> dict[str, Any]:
    """A spec in words and numbers."""
    entry, rule = spec.input, spec.decode
    return {
        "name": spec.name,
        "family": spec.family,
        "size": f"{entry.height}x{entry.width}" + (" (symbolic)" if entry.dynamic else " (fixed)"),
        "resize": entry.resize + (f" {entry.shortest_edge}, at most {entry.longest_edge}" if entry.shortest_edge else ""),
        "multiple_of": entry.multiple_of,
        "input": f"{entry.dtype}, " + ("normalised in the graph" if entry.normalize_in_graph else "normalised by the caller"),
        "mean": list(entry.mean),
        "std": list(entry.std),
        "mask": entry.mask,
        "decode": f"{rule.activation}, {rule.select}, {rule.max_detections} of {rule.num_queries} queries"
        + (", in the graph" if rule.in_graph else "")
        + (f", scores from {rule.score_threshold:g}" if rule.score_threshold else ""),
        **(
            {"nms": f"{rule.nms}, IoU {rule.nms_iou:g}" + (", in the graph" if rule.nms_in_graph else "")}
            if rule.nms != "none"
            else {}
        ),
        **_finds(spec),
    }


def _finds(spec: ModelSpec) -> dict[str, str]:
    """The classes, or what the prompt of a model that takes one can be."""
    text = spec.text
    if text is None:
        names = list(spec.labels.values())
        return {"classes": f"{spec.decode.num_classes}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"}
    what = "phrases" if text.kind == "tokens" else f"up to {spec.decode.num_classes} class names, and a task"
    tower = f"text tower {text.tower}" if text.tower else "one graph"
    return {"prompt": f"{what}, up to {text.max_tokens} tokens{' each' if text.kind == 'classes' else ''}; {tower}"}


def family_rows() -> list[dict[str, Any]]:
    """One row a family: what it supports, and why not where it does not."""
    from ..models.families import BY_NAME
    from ..models.load import formats_of

    rows = []
    for family in BY_NAME.values():
        keeps = "num_queries" if family.max_detections is None else str(family.max_detections)
        rows.append(
            {
                "family": family.name,
                "title": family.title,
                "model_type": family.model_type,
                "decode": f"{family.activation}, {family.select}, {keeps}",
                "size": "symbolic" if family.dynamic else "fixed",
                "why fixed": family.fixed_reason,
                "batch": "symbolic",
                "mask": "yes" if family.mask else "no",
                "multiple of": str(family.multiple_of),
                "deformable": "yes" if family.deformable else "no",
                "original files": formats_of(family.name),
                "rewrites": list(family.rewrites),
                "example": f"hf:{family.example}" if family.example else f"ckpt:{family.name}.pth",
            }
        )
    return rows
