"""Facts about a model or about the families, as JSON-ready values."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..backends.open import kind_of, refuse_load_options
from ..backends.targets import native_code, row_of
from ..bundle import Bundle, EngineFacts, read_sidecar
from ..class_names import shared_names
from ..data.preprocess import preprocessing_words
from ..errors import GraphError, SessionError, SourceError, SpecError, number_of, printable
from ..models import trust
from ..models.load_options import LoadOptions
from ..spec import ModelSpec


def describe(ref: str, load: LoadOptions | None = None) -> dict[str, Any]:
    """What a bundle, ONNX file, engine or checkpoint is. load: how a checkpoint is read.

    Raises:
        DetrtError: nothing there, or damaged.
    """
    kind = kind_of(ref)
    if load is not None and kind not in ("checkpoint", "onnx"):
        refuse_load_options(ref, kind, load)
    if kind == "bundle":
        bundle = Bundle.open(ref)
        entries, native = [], list[str]()
        for entry in bundle.files:
            path = bundle.path_of(entry)
            row: dict[str, Any] = {"path": entry.path, "kind": entry.kind, "bytes": entry.size, "present": path.is_file()}
            if row["present"] and path.stat().st_size != entry.size:
                row["bytes_found"] = path.stat().st_size
            if entry.engine is not None:
                row["engine"] = engine_facts(entry.engine)
                if what := native_code(entry.kind, entry.engine):
                    native.append(f"{entry.path}: {what}, {_consent(path)}")
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
            **{
                key: origin.options[key]
                for key in ("family", "labels", "resize", "preprocess", "loading")
                if key in origin.options
            },
            **({"holds_native_code": native} if native else {}),
            "files": entries,
        }
    if (row := row_of(kind)) is not None and row.sidecar:
        spec, facts = read_sidecar(Path(ref))
        return {
            "kind": kind,
            **spec_facts(spec),
            **engine_facts(facts),
            **({"holds_native_code": f"{what}, {_consent(Path(ref))}"} if (what := native_code(kind, facts)) else {}),
        }
    if kind == "onnx":
        return {"kind": kind, **_onnx_facts(Path(ref), load)}
    from ..models.load import load_source

    source = load_source(ref, load)
    notes = {"loading": list(source.notes)} if source.notes else {}
    return {"kind": kind, **spec_facts(source.spec), "parameters": source.provenance.parameters, **notes}


def kernel_rows(ref: str) -> list[dict[str, Any]]:
    """{"engine", "kind", "kernels"} of each kind of kernel of the engines of a bundle, or of one, as their builder counted them; "all" first.

    Raises:
        DetrtError: nothing there, damaged, or no builder counted any.
    """
    source = kind_of(ref)
    if source == "bundle":
        engines = [(entry.path, entry.engine) for entry in Bundle.open(ref).files if entry.engine is not None]
    else:
        row = row_of(source)
        engines = [(Path(ref).name, read_sidecar(Path(ref))[1])] if row is not None and row.sidecar else []
    rows = [
        {"engine": name, "kind": kind, "kernels": number}
        for name, facts in engines
        for kind, number in facts.kernels.items()
        if number
    ]
    if not rows:
        raise SessionError(
            f"'{ref}' has no engine whose kernels were counted, as the builder of TensorRT-RTX does, without a GPU; build one with: "
            f"detrt build {ref if source == 'bundle' else 'MODEL -o OUT'} --target tensorrt-rtx"
        )
    return rows


def _consent(path: Path) -> str:
    return "built by this user on this machine" if path.is_file() and trust.is_built_here(path) else "built elsewhere"


def _onnx_facts(path: Path, load: LoadOptions | None) -> dict[str, Any]:
    """An ONNX file: its spec, or how one of another exporter is read or what it does not say, and its graph."""
    from .. import graph

    summary = graph.summarise(graph.load(path, weights=False))
    facts: dict[str, Any] = {
        "nodes": summary.nodes,
        "opset": summary.opset,
        "weights": summary.weight_elements,
        "inputs": {k: f"{t} {' x '.join(map(str, s))}" for k, (t, s) in summary.inputs.items()},
        "outputs": {k: f"{t} {' x '.join(map(str, s))}" for k, (t, s) in summary.outputs.items()},
        "operators": dict(summary.operators),
    }
    spec = graph.find_spec(path)
    if spec is not None:
        return {**spec_facts(spec), **facts}
    from ..backends.targets import graph_opener
    from ..models.foreign import read_foreign

    try:
        foreign = read_foreign(path, load, graph_opener().run_graph)
    except (GraphError, SessionError, SpecError, SourceError) as error:
        return {"not known": str(error), **facts}
    return {**spec_facts(foreign.spec), "layout": foreign.graph.layout.name, "loading": list(foreign.notes), **facts}


def engine_facts(facts: EngineFacts) -> dict[str, Any]:
    """What an engine was built for and what it needs, as JSON-ready values."""
    return {
        "target": facts.target,
        "version": facts.runtime_version,
        "compute_capabilities": list(facts.compute_capabilities),
        "precision": facts.precision,
        "layers": facts.layers,
        **(
            {"kernels": ", ".join(f"{number} {kind}" for kind, number in facts.kernels.items() if number)}
            if facts.kernels
            else {}
        ),
        "profile": {k: dict(v) for k, v in facts.profile.items()},
        **({"cpu_speed": asdict(facts.cpu_speed)} if facts.cpu_speed else {}),
        **({"activation_mib": round(facts.activation_bytes / 2**20, 1)} if facts.activation_bytes else {}),
    }


def spec_facts(spec: ModelSpec) -> dict[str, Any]:
    """A spec as text and numbers."""
    entry, rule = spec.input, spec.decode
    return {
        "name": spec.name,
        "family": spec.family,
        "origin": spec.origin,
        "size": f"{entry.height}x{entry.width}" + (" (symbolic)" if entry.dynamic else " (fixed)"),
        "resize": entry.resize + (f" {entry.shortest_edge}, at most {entry.longest_edge}" if entry.shortest_edge else ""),
        "preprocessing": preprocessing_words(entry),
        "multiple_of": entry.multiple_of,
        "input": f"{entry.dtype}, " + ("normalised in the graph" if entry.normalize_in_graph else "normalised by the caller"),
        "mean": list(entry.mean),
        "std": list(entry.std),
        "mask": entry.mask,
        "decode": f"{rule.activation}, {rule.select}, at most {number_of(rule.max_detections, 'detection')} of {number_of(rule.num_queries, 'query')}"
        + (", in the graph" if rule.in_graph else "")
        + (f", scores from {rule.score_threshold:g}" if rule.score_threshold else ""),
        **(
            {"nms": f"{rule.nms}, IoU {rule.nms_iou:g}" + (", in the graph" if rule.nms_in_graph else "")}
            if rule.nms != "none"
            else {}
        ),
        **({"task": f"{spec.task}, masks at 1/{rule.mask_stride:g} of the input's size"} if spec.has_masks else {}),
        **_finds(spec),
    }


def _finds(spec: ModelSpec) -> dict[str, str]:
    """The classes, or what the prompt of a model that takes one can be."""
    text = spec.text
    if text is None:
        names = [printable(name) for name in spec.labels.values()]  # cells of tables keep their line breaks
        several = shared_names(spec.labels)
        shared = f" (of several ids: {', '.join(map(repr, several))})" if several else ""
        return {"classes": f"{spec.decode.num_classes}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}{shared}"}
    text_encoder = f"text encoder {text.encoder}" if text.encoder else "one graph"
    if text.query_encoder:
        text_encoder += f"; encoder of query images {text.query_encoder}"
    return {"prompt": f"{text.prompt_kind.describe(spec)}; {text_encoder}"}


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
                "fewer queries": "yes" if family.reducible else "no",
                "licence": family.licence,
                "example": f"hf:{family.example}" if family.example else f"ckpt:{family.name}.pth",
            }
        )
    return rows
