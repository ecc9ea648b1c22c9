"""`detrt bench`: export, build and latency figures of checkpoints on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..errors import DetrtError


def bench(
    models: Annotated[list[str], typer.Argument(help="Checkpoints: hf:org/name, folders, embedded:shapes, random:FAMILY.")],
    size: Annotated[str | None, typer.Option(help="Input size, HEIGHTxWIDTH or one number; default: the model's.")] = None,
    batch: Annotated[int, typer.Option(help="Images a run.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed runs.")] = 7,
    warmup: Annotated[int, typer.Option(help="Runs before the clock starts.")] = 2,
    threads: Annotated[int | None, typer.Option(help="Threads of PyTorch and ONNX Runtime; default: all cores.")] = None,
    msda: Annotated[str, typer.Option(help="Deformable attention as: auto, gather, gridsample.")] = "auto",
    fixed: Annotated[bool, typer.Option("--fixed/--symbolic", help="Fix the size in the graph, or keep it symbolic.")] = False,
    engine: Annotated[bool, typer.Option("--engine/--no-engine", help="Also build a TensorRT-RTX engine.")] = True,
    torch: Annotated[bool, typer.Option("--torch/--no-torch", help="Also time the plain transformers model.")] = True,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a checkpoint.")
    ] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="All figures to this file; - is stdout.")] = None,
) -> None:
    """Measure checkpoints: parameters, nodes, times, sizes, memory, and latency against transformers."""
    from ..bench import BenchConfig, bench_models
    from . import choices, show

    show.check_json(json_file)
    tall, wide = choices.sizes(size, None, None)
    config = BenchConfig(
        size_hw=(tall[0], wide[0]) if tall and wide else None,
        batch=batch,
        repeats=repeats,
        warmup=warmup,
        threads=threads,
        engine=engine,
        torch=torch,
        msda=msda,
        fixed=fixed,
    )
    if not models:
        raise DetrtError("give at least one checkpoint, e.g. detrt bench embedded:shapes")
    with show.progress() as step:
        report = bench_models(models, config, trust_remote_code=trust_remote_code, progress=step)
    if json_file:
        show.write_json(report, json_file)
    if json_file == "-":
        return
    machine = report["machine"]
    versions = machine["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "onnxruntime") if name in versions)
    print(
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {named}; batch {batch}, medians of {repeats} runs"
    )
    show.table("", COLUMNS, [_row(row) for row in report["rows"]], right=range(1, len(COLUMNS)))


COLUMNS = (
    "model", "size", "params M", "nodes", "load s", "export s", "check s", "peak MiB",
    "build s", "engine MB", "build MiB", "transformers ms", "ONNX Runtime ms", "ratio", "end-to-end ms", "ratio",
)  # fmt: skip


def _row(row: dict[str, Any]) -> list[str]:
    found = {(r["backend"].split("-")[0], r["scope"]): r["p50_ms"] for r in row["latency"]}

    def ms(backend: str, scope: str) -> str:
        value = found.get((backend, scope))
        return "" if value is None else f"{value:.1f}"

    def ratio(scope: str) -> str:
        both = [found.get((backend, scope)) for backend in ("transformers", "onnxruntime")]
        return "" if None in both else f"{both[0] / both[1]:.2f}"

    build = ["", "", ""]
    if "build_seconds" in row:  # absent with --no-engine
        build = ["", "", ""]
    if "build_seconds" in row:
        build = [f"{row['build_seconds']:.1f}", f"{row['engine_bytes'] / 1e6:.1f}", f"{row['build_peak_memory_mib']:.0f}"]
    return [
        row["model"].removeprefix("random:"),
        f"{row['height']}x{row['width']}",
        f"{row['parameters'] / 1e6:.1f}",
        str(row["nodes"]),
        f"{row['load_seconds']:.1f}",
        f"{row['export_seconds']:.1f}",
        f"{row['check_seconds']:.1f}",
        f"{row['peak_memory_mib']:.0f}",
        *build,
        ms("transformers", "forward"),
        ms("onnxruntime", "forward"),
        ratio("forward"),
        ms("onnxruntime", "end_to_end"),
        ratio("end_to_end"),
    ]
