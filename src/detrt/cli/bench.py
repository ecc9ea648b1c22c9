"""`detrt bench`: export, build and latency figures of checkpoints on this machine."""

from __future__ import annotations

from collections.abc import Callable
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
    plot: Annotated[Path | None, typer.Option(help="With bundles: plots of all that was measured, FILE.svg or FILE.png.")] = None,
    prompt: Annotated[str | None, typer.Option(help="With bundles that take one: 'a cat. a remote control.'")] = None,
    scopes: Annotated[
        str | None, typer.Option(help="With bundles: of kernel (GPU work alone), forward, end-to-end; default: all.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="With bundles: their checkpoint, timed in transformers as well; one, or one for each bundle.",
            metavar="CHECKPOINT",
        ),
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="With --against: also under torch.compile.")] = False,
    ground_truth: Annotated[
        Path | None, typer.Option(help="With bundles: annotations in COCO's format, for average precision; needs --images.")
    ] = None,
    images: Annotated[Path | None, typer.Option(help="With --ground-truth: the folder of its pictures.")] = None,
    parts: Annotated[
        bool, typer.Option("--parts", help="With bundles: time by module and kind of step, and the share of the roofline.")
    ] = False,
    provider: Annotated[
        str | None, typer.Option(help="With bundles: of ONNX Runtime, cpu, cuda or both with a comma; default: all it has.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With bundles: of packages, engines and --against: cpu, cuda:0, or both; default: all.")
    ] = None,
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
    from ..bench.bundles import is_built
    from ..bench.checkpoints import BenchConfig, bench_models
    from . import options as choices
    from . import show

    show.check_json(json_file)
    tall, wide = choices.sizes(size, None, None)
    built = [is_built(model) for model in models]
    bundles = {
        "--batches": batches, "--backends": backends, "--plot": plot, "--prompt": prompt,
        "--against": against or None, "--compile": compiled or None, "--ground-truth": ground_truth, "--images": images,
        "--parts": parts or None, "--device": device, "--provider": provider, "--scopes": scopes,
    }  # fmt: skip
    size_hw = (tall[0], wide[0]) if tall and wide else None
    if built and all(built):
        from ..bench.bundles import RunConfig

        config_of_bundles = RunConfig(
            batches=_numbers(batches or str(batch)),
            size_hw=size_hw,
            repeats=repeats,
            warmup=warmup,
            threads=threads,
            scopes=tuple(name.replace("-", "_") for name in _names(scopes)),
            backends=_backends(backends),
            providers=_names(provider),
            devices=_names(device),
            prompt=prompt,
            against=tuple(against or ()),
            compile=compiled,
            annotations=ground_truth,
            images=images,
            parts=parts,
        )
        _bundles(models, config_of_bundles, plot, json_file)
        return
    if any(built):
        raise DetrtError("give checkpoints or bundles, not both in one run: they are measured in different ways")
    for name, value in bundles.items():
        if value is not None:
            raise DetrtError(f"{name} is for bundles; leave it out for checkpoints")
    config = BenchConfig(
        size_hw=size_hw,
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


def _numbers(batches: str) -> tuple[int, ...]:
    if not all(part.strip().isdecimal() for part in batches.split(",")):
        raise DetrtError(f"--batches must be whole numbers with commas, such as 1,4,16; got {batches!r}")
    return tuple(int(part) for part in batches.split(","))


def _names(listed: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (listed or "").split(",") if part.strip())


def _backends(backends: str | None) -> tuple[str, ...]:
    wanted = _names(backends)
    unknown = sorted(set(wanted) - {"onnxruntime", "inductor", "tensorrt"})
    if unknown:
        raise DetrtError(f"--backends must be of onnxruntime, inductor, tensorrt; got {', '.join(unknown)}")
    return wanted


def _bundles(models: list[str], config: Any, plot: Path | None, json_file: str | None) -> None:
    from ..bench.bundles import bench_bundles
    from ..bench.plot import check_plot, write_plot
    from . import show

    if plot is not None:
        check_plot(plot)
    with show.progress() as step:
        report = bench_bundles(models, config, step)
    if plot is not None:
        write_plot(report, plot)
    if json_file:
        show.write_json(report, json_file)
    if json_file == "-":
        return
    _show_notes(report)
    show.table("", *_table(report["rows"]), right=range(3, 14))
    for row in report["rows"]:
        if row.get("msda_calls"):
            print(
                f"deformable attention in {row['model']} {row['backend']}, batch {row['batch']}: {row['msda_ms']:.3f} of "
                f"{row['p50_ms']:.3f} ms of GPU work ({100 * row['msda_share']:.0f} %), {row['msda_calls']} of {row['kernels']} kernels"
            )
    for part in report["parts"]:
        _show_parts(part)


def _show_notes(report: dict[str, Any]) -> None:
    """Each reason once, with all that it holds for."""
    from . import show

    for key, text in (("skipped", "why"), ("notes", "note")):
        reasons: dict[str, list[str]] = {}
        for entry in report[key]:
            what = f"{entry['model']} with {entry['backend']}" + (
                f", {entry['scope']}" if entry.get("scope", "all") != "all" else ""
            )
            reasons.setdefault(entry[text], []).append(what)
        show.notes(f"{_some(list(dict.fromkeys(whom)))}: {why}" for why, whom in reasons.items())


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """(column titles, cells); columns without a figure are left out."""
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("model", lambda r: r["model"]),
        ("back end", lambda r: r["backend"]),
        ("scope", lambda r: r["scope"].replace("_", " ")),
        ("batch", lambda r: str(r["batch"])),
        ("size", lambda r: f"{r['height']}x{r['width']}"),
        ("p50 ms", lambda r: f"{r['p50_ms']:.2f}"),
        ("p90 ms", lambda r: f"{r['p90_ms']:.2f}"),
        ("p99 ms", lambda r: f"{r['p99_ms']:.2f}"),
        ("images/s", lambda r: f"{r['images_per_s']:.1f}"),
        ("build s", lambda r: _figure(r, "build_s", 1)),
        ("open s", lambda r: _figure(r, "open_s", 2)),
        ("peak MiB", lambda r: str(r["peak_memory_mib"])),
        ("GPU MiB", lambda r: _figure(r, "gpu_memory_mib", 0)),
        ("AP", lambda r: _figure(r, "AP", 4)),
    ]
    cells = [[cell(row) for row in rows] for _, cell in columns]
    kept = [index for index, column in enumerate(cells) if any(column)]
    return [columns[i][0] for i in kept], [list(row) for row in zip(*(cells[i] for i in kept), strict=True)]


def _figure(row: dict[str, Any], key: str, digits: int) -> str:
    return "" if row.get(key) is None else f"{row[key]:.{digits}f}"


def _show_parts(part: dict[str, Any]) -> None:
    from . import show

    for key, title in (("modules", "module"), ("kinds", "kind of step")):
        shown = [[name, f"{100 * share:.1f}"] for name, share in list(part[key].items())[:12] if share >= 0.0005]
        if shown:
            show.table(f"{part['model']} {part['backend']}, batch {part['batch']}", (title, "% of the time"), shown, right=(1,))
    if roofline := part["roofline"]:
        print(
            f"roofline: {roofline['gflop']:.1f} GFLOP and {roofline['gbyte']:.3f} GB of products need {roofline['bound_ms']:.2f} ms at "
            f"{roofline['gflops']:.0f} GFLOP/s and {roofline['gbytes_per_s']:.0f} GB/s (measured here): "
            f"{100 * roofline['share']:.0f} % of the forward time"
        )


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

    build = ["", "", ""]  # absent with --no-engine
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
