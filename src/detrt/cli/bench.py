"""`detrt bench`: export, build and latency results of checkpoints and bundles on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from ..bench.config import BenchConfig
from ..errors import number_of
from ..models.load_options import LoadOptions
from .options import Given, Json, command

Models = Annotated[
    list[str],
    typer.Argument(help="Checkpoints (hf:org/name, folders, embedded:shapes, random:FAMILY), or bundles and files of them."),
]


@command
def bench(
    models: Models,
    load: LoadOptions,
    choices: Given[BenchConfig],
    json_file: Json = None,
) -> None:
    """Measure checkpoints (sizes, times, memory, latency against transformers) or bundles (each backend that runs here)."""
    from ..bench.run import bench as run
    from . import show

    show.check_json(json_file)
    with show.progress() as step:
        report = run(models, choices.make(load=load), step)
    if json_file:
        show.write_json(report, json_file)
    if json_file != "-":
        _print(report)


def _print(report: dict[str, Any]) -> None:
    from . import show

    machine, rows = report["machine"], report["rows"]
    memory = f"{machine['memory_gib']} GiB"
    print(f"{show.machine_line(machine, memory)}; medians of {number_of(report['config']['repeats'], 'run')}")
    _print_notes(report)
    columns, keys = (CHECKPOINT_COLUMNS, 1) if "latency" in rows[0] else (BUNDLE_COLUMNS, 4)
    cells = [[cell(row) for row in rows] for _, cell in columns]
    shown = [index for index, column in enumerate(cells) if any(column)]  # columns without any result are left out
    right = [place for place, index in enumerate(shown) if columns[index][0] not in LEFT_ALIGNED]
    show.table("", [columns[i][0] for i in shown], list(zip(*(cells[i] for i in shown), strict=True)), right=right, keys=keys)
    for row in rows:
        if row.get("msda_calls"):
            print(
                f"deformable attention in {row['model']} {row['backend']}, batch {row['batch']}: {row['msda_ms']:.3f} of "
                f"{row['p50_ms']:.3f} ms of GPU work ({100 * row['msda_share']:.0f} %), {row['msda_calls']} of {number_of(row['kernels'], 'kernel')}"
            )
    for part in report["parts"]:
        _print_parts(part)


def _print_notes(report: dict[str, Any]) -> None:
    """Each reason once, with everything that it holds for."""
    from . import show

    for key, text in (("skipped", "why"), ("notes", "note")):
        reasons: dict[str, list[str]] = {}
        for entry in report[key]:
            scope = f", {entry['scope']}" if entry.get("scope", "all") != "all" else ""
            reasons.setdefault(entry[text], []).append(f"{entry['model']} with {entry['backend']}{scope}")
        show.notes(f"{_some(list(dict.fromkeys(models)))}: {why}" for why, models in reasons.items())


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _print_parts(part: dict[str, Any]) -> None:
    from . import show

    about = f"{part['model']} {part['backend']}, batch {part['batch']}"
    show.table(about, ("stage", "ms"), [[name, f"{ms:.3f}"] for name, ms in part["stages"].items()], right=(1,))
    for key, title in (("modules", "module"), ("kinds", "kind of operator")):
        shown = [[name, f"{100 * fraction:.1f}"] for name, fraction in list(part[key].items())[:12] if fraction >= 0.0005]
        if shown:
            show.table(about, (title, "% of the time"), shown, right=(1,))
    if layers := sorted(part["layers"].items(), key=lambda item: -item[1])[:LAYERS_SHOWN]:
        show.table(about, ("layer, each waited for", "ms"), [[_shortened(name), f"{ms:.3f}"] for name, ms in layers], right=(1,))
    if roofline := part["roofline"]:
        print(
            f"roofline: {roofline['gflop']:.1f} GFLOP and {roofline['gbyte']:.3f} GB of matmuls and convolutions need "
            f"{roofline['bound_ms']:.2f} ms at {roofline['gflops']:.0f} GFLOP/s and {roofline['gbytes_per_s']:.0f} GB/s "
            f"(measured here): {100 * roofline['share']:.0f} % of the forward time"
        )


LAYERS_SHOWN = 20


def _shortened(layer: str) -> str:
    """First and last node of a fused layer, which may name hundreds."""
    nodes = layer.split(" + ")
    return layer if len(nodes) < 3 else f"{nodes[0]} + ... + {nodes[-1]}"


Cell = Callable[[dict[str, Any]], str]
LEFT_ALIGNED = ("model", "backend", "scope")


def _number(key: str, digits: int, scale: float = 1.0) -> Cell:
    return lambda row: "" if row.get(key) is None else f"{row[key] * scale:.{digits}f}"


def _size(row: dict[str, Any]) -> str:
    return f"{row['height']}x{row['width']}"


def _median_ms(row: dict[str, Any], backend: str, scope: str) -> float | None:
    """Median latency of a checkpoint with a backend ("onnxruntime") on any device."""
    medians = {(r["backend"].split("-")[0], r["scope"]): r["p50_ms"] for r in row["latency"]}
    return medians.get((backend, scope))


def _latency(backend: str, scope: str) -> Cell:
    def cell(row: dict[str, Any]) -> str:
        median = _median_ms(row, backend, scope)
        return "" if median is None else f"{median:.1f}"

    return cell


def _ratio(scope: str) -> Cell:
    def cell(row: dict[str, Any]) -> str:
        library, own, ours = (_median_ms(row, backend, scope) for backend in ("transformers", "pytorch", "onnxruntime"))
        theirs = own if library is None else library
        return "" if theirs is None or ours is None else f"{theirs / ours:.2f}"

    return cell


def _model(row: dict[str, Any]) -> str:
    from ..bench.plot import short

    return short(row["model"])


BUNDLE_COLUMNS: Sequence[tuple[str, Cell]] = (
    ("model", _model),
    ("backend", lambda row: row["backend"]),
    ("scope", lambda row: row["scope"].replace("_", " ")),
    ("batch", _number("batch", 0)),
    ("size", _size),
    ("p50 ms", _number("p50_ms", 2)),
    ("p90 ms", _number("p90_ms", 2)),
    ("p99 ms", _number("p99_ms", 2)),
    ("images/s", _number("images_per_s", 1)),
    ("build s", _number("build_s", 1)),
    ("open s", _number("open_s", 2)),
    ("peak MiB", _number("peak_memory_mib", 0)),
    ("GPU MiB", _number("gpu_memory_mib", 0)),
    ("AP", _number("AP", 4)),
)
CHECKPOINT_COLUMNS: Sequence[tuple[str, Cell]] = (
    ("model", lambda row: row["model"].removeprefix("random:")),
    ("size", _size),
    ("params M", _number("parameters", 1, 1e-6)),
    ("nodes", _number("nodes", 0)),
    ("load s", _number("load_seconds", 1)),
    ("export s", _number("export_seconds", 1)),
    ("check s", _number("check_seconds", 1)),
    ("peak MiB", _number("peak_memory_mib", 0)),
    ("build s", _number("build_seconds", 1)),
    ("engine MB", _number("engine_bytes", 1, 1e-6)),
    ("build MiB", _number("build_peak_memory_mib", 0)),
    ("transformers ms", _latency("transformers", "forward")),
    ("PyTorch ms", _latency("pytorch", "forward")),  # of a model that transformers does not have
    ("ONNX Runtime ms", _latency("onnxruntime", "forward")),
    ("speed-up", _ratio("forward")),
    ("end-to-end ms", _latency("onnxruntime", "end_to_end")),
    ("end-to-end speed-up", _ratio("end_to_end")),
)
