"""`detrt bench`: export, build and latency figures of checkpoints on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DetrtError


def bench(
    models: Annotated[
        list[str],
        typer.Argument(help="Checkpoints (hf:org/name, folders, embedded:shapes, random:FAMILY), or bundles and files of them."),
    ],
    size: Annotated[str | None, typer.Option(help="Input size, HEIGHTxWIDTH or one number; default: the model's.")] = None,
    batch: Annotated[int, typer.Option(help="Images a run.")] = 1,
    batches: Annotated[str | None, typer.Option(help="With bundles: several batches, such as 1,4,16.")] = None,
    backends: Annotated[
        str | None, typer.Option(help="With bundles: onnxruntime, inductor, tensorrt; default: all that run here.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="With bundles: latency against batch as SVG to this file.")] = None,
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
    """Measure checkpoints (sizes, times, memory, latency against transformers) or bundles (each back end that runs here)."""
    from ..bench import BenchConfig, bench_models
    from ..bench_bundles import is_built
    from . import choices, show

    show.check_json(json_file)
    tall, wide = choices.sizes(size, None, None)
    built = [is_built(model) for model in models]
    if built and all(built):
        size_hw = (tall[0], wide[0]) if tall and wide else None
        _bundles(models, batches or str(batch), size_hw, repeats, warmup, threads, backends, plot, json_file)
        return
    if any(built):
        raise DetrtError("give checkpoints or bundles, not both in one run: they are measured in different ways")
    for name, value in (("--batches", batches), ("--backends", backends), ("--plot", plot)):
        if value is not None:
            raise DetrtError(f"{name} {value} is for bundles; leave it out for checkpoints")
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


def _bundles(
    models: list[str],
    batches: str,
    size_hw: tuple[int, int] | None,
    repeats: int,
    warmup: int,
    threads: int | None,
    backends: str | None,
    plot: Path | None,
    json_file: str | None,
) -> None:
    from ..bench_bundles import RunConfig, bench_bundles, write_plot
    from . import show

    if not all(part.strip().isdecimal() for part in batches.split(",")):
        raise DetrtError(f"--batches must be whole numbers with commas, such as 1,4,16; got {batches!r}")
    wanted = tuple(part.strip() for part in (backends or "").split(",") if part.strip())
    unknown = sorted(set(wanted) - {"onnxruntime", "inductor", "tensorrt"})
    if unknown:
        raise DetrtError(f"--backends must be of onnxruntime, inductor, tensorrt; got {', '.join(unknown)}")
    config = RunConfig(tuple(int(part) for part in batches.split(",")), size_hw, repeats, warmup, threads, wanted)
    with show.progress() as step:
        report = bench_bundles(models, config, step)
    if plot is not None:
        write_plot(report, plot)
    if json_file:
        show.write_json(report, json_file)
    if json_file == "-":
        return
    show.notes(f"{skip['model']} with {skip['backend']}: {skip['why']}" for skip in report["skipped"])
    columns = ("model", "back end", "scope", "batch", "size", "p50 ms", "p90 ms", "p99 ms", "images/s", "open s", "peak MiB")
    rows = [
        (
            row["model"],
            row["backend"],
            row["scope"].replace("_", " "),
            str(row["batch"]),
            f"{row['height']}x{row['width']}",
            *(f"{row[key]:.2f}" for key in ("p50_ms", "p90_ms", "p99_ms")),
            f"{row['images_per_s']:.1f}",
            f"{row['open_s']:.2f}",
            str(row["peak_memory_mib"]),
        )
        for row in report["rows"]
    ]
    show.table("", columns, rows, right=range(3, len(columns)))


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
