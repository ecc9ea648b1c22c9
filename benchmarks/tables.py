"""The tables of docs/results/benchmarks-gpu.md from the rows of measure_inductor.py.

python benchmarks/tables.py ROWS.jsonl                      print them
python benchmarks/tables.py ROWS.jsonl DOCUMENT             write those of the document into it, between its `table` comments
python benchmarks/tables.py ROWS.jsonl --run M --base COMMIT   print the rows of docs/results/figures/speed.jsonl, as run M
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from measure_inductor import PLAIN, RECENT, SAMPLING, SIZES
from program import file, make_parser, run

TITLES = {
    "detr": "DETR-R50", "rt_detr_v2": "RT-DETRv2-R50", "d_fine": "D-FINE-L", "deformable_detr": "Deformable DETR-R50, two-stage",
    "grounding_dino": "Grounding DINO-T, 6 tokens", "co_dino-swin-l": "Co-DINO Swin-L", "rt_detr": "RT-DETR-R50",
    "deimv2": "DEIMv2-L", "lw_detr": "LW-DETR", "rf_detr": "RF-DETR", "omdet_turbo": "OmDet-Turbo", "dino": "DINO-R50",
    "conditional_detr": "Conditional DETR-R50", "dab_detr": "DAB-DETR-R50", "table-transformer": "Table Transformer-R18",
    "yolos": "YOLOS-tiny",
    "ecseg": "ECSeg-L", "ecdet": "ECDet-L", "d_fine-seg": "D-FINE-seg-L", "rf_detr-seg": "RF-DETR-Seg-M", "rf_detr-large": "RF-DETR-L",
    "rf_detr-xlarge": "RF-DETR-XL", "rf_detr-2xlarge": "RF-DETR-2XL", "mm_grounding_dino": "MM-Grounding-DINO-T, LLMDet-T", "sam3": "SAM 3, one phrase",
    "owlvit": "OWL-ViT-B, patches of 32, one name", "owlv2": "OWLv2-B, patches of 16, one name",
    "eomt": "EoMT-L", "eomt_dinov3": "EoMT-L, DINOv3", "pp_doclayout_v2": "PP-DocLayoutV2", "pp_doclayout_v3": "PP-DocLayoutV3", "pp_doclayout_v4": "PP-DocLayoutV4",
}  # fmt: skip
# Milliseconds in FP16 that were to be reached at batch 1, and by DETR at batch 4.
TARGETS = {
    "detr": 1.4, "rt_detr_v2": 1.8, "d_fine": 2.0, "deformable_detr": 2.6, "grounding_dino": 6.0, "co_dino-swin-l": 12.0,
}  # fmt: skip
_MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Rows:
    """Rows by kind, model, precision and batch."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.rows: dict[tuple[str, str, str, int], dict] = {}
        for row in map(json.loads, lines):
            if "job" not in row:
                continue
            kind, model, _, precision, batch, *how = row["job"].split("|")
            if not how:
                self.rows[kind, model.removeprefix("random:"), precision, int(batch)] = row

    def row(self, kind: str, model: str, precision: str = "fp16", batch: int = 1) -> dict:
        return self.rows.get((kind, model, precision, batch), {})

    def ms(self, kind: str, model: str, precision: str = "fp16", batch: int = 1) -> str:
        row = self.row(kind, model, precision, batch)
        if "p50_ms" in row:
            return number(row["p50_ms"]) + ("*" if row.get("run", 1) > 1 else "")
        return "" if row.get("error", "no row").startswith("no ") else "fails"

    def ratio(self, kind: str, model: str, batch: int = 1) -> str:
        theirs, ours = (self.row(k, model, "fp16", batch).get("p50_ms") for k in (kind, "ours"))
        return f"{theirs / ours:.1f}" if theirs and ours else ""


def number(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def table(columns: list[str], rows: Iterable[list[str]], left: int = 1) -> str:
    head = ["---"] * left + ["---:"] * (len(columns) - left)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [columns, head, *rows])


def size(rows: Rows, model: str) -> str:
    row = next((row for (_, name, *_), row in rows.rows.items() if name == model and "height" in row), None)
    return f"{row['height']}x{row['width']}" if row else (SIZES | RECENT)[model]


def latency(rows: Rows) -> str:
    """Milliseconds at batch 1, and of DETR at batch 4."""
    kinds = ("eager", "compile")
    columns = ["model", "size", *kinds, "detrt", "target", "compile / detrt"]
    found = []
    for model, batch in [(model, 1) for model in ordered()] + [("detr", 4)]:
        title = TITLES[model] + (f", batch {batch}" if batch > 1 else "")
        cells = [rows.ms(kind, model, "fp16", batch) for kind in (*kinds, "ours")]
        target = 3.0 if batch == 4 else TARGETS.get(model)
        found.append([title, size(rows, model), *cells, f"{target or ''}", rows.ratio("compile", model, batch)])
    return table(columns, found, 2)


def recent(rows: Rows) -> str:
    """Milliseconds at batch sizes 1 and 8."""
    columns = ["model", "size", *(f"{kind} b{batch}" for batch in (1, 8) for kind in ("compile", "detrt"))]
    found = [
        [TITLES[model], size(rows, model), *(rows.ms(kind, model, "fp16", b) for b in (1, 8) for kind in ("compile", "ours"))]
        for model in RECENT
    ]
    return table(columns, found, 2)


def ordered() -> list[str]:
    return [*TARGETS, *(m for m in SAMPLING if m not in TARGETS), *(m for m in SIZES if m not in TARGETS and m not in SAMPLING)]


# Dense FP16 TFLOPS of tensor cores, and TB/s of memory, SXM: NVIDIA's data sheets.
PEAK = {"H100": 989, "H200": 989}
BANDWIDTH = {"H100": 3.35, "H200": 4.8}
KINDS = {  # what a kernel does -> parts of its name, looked for in this order
    "deformable attention": ("msda", "deform"),
    "attention": ("fmha", "flash", "attention", "mem_eff", "sdpa", "window"),
    "convolution": ("conv", "depthwise", "fprop", "winograd", "cudnn", "implicit"),
    "matmul": ("gemm", "linear_gelu", "linear_rows", "ffn_rows", "cutlass", "nvjet", "cublas", "triton_tem", "splitk"),
    "selection": ("topk", "top_k", "sort", "radix", "gather"),
    "norm and sum": ("triton_red", "triton_per", "reduce", "softmax", "norm"),
    "elementwise": ("triton_poi", "elementwise", "vectorized", "cat"),
    "copy": ("memcpy", "memset", "copy"),
}  # fmt: skip
_KEYS = ("base", "compile", "patched", "eager")


def speed(rows: Rows) -> str:
    """Median and quartiles of each model beside its peers, and the share of the GPU's FP16 peak."""
    found = []
    kinds = [*_KEYS, *sorted({kind for kind, *_ in rows.rows} - {*_KEYS, "ours", "captured"})]
    kinds = [kind for kind in kinds if any(one == kind for one, *_ in rows.rows)]
    for model, precision, batch in dict.fromkeys(key[1:] for key in rows.rows):
        ours = rows.row("ours", model, precision, batch)
        cells = [_quartiles(rows, "ours", model, precision, batch)]
        for kind in kinds:
            theirs = rows.row(kind, model, precision, batch)
            ratio = ours["p50_ms"] / theirs["p50_ms"] if "p50_ms" in ours and "p50_ms" in theirs else 0
            cells += [_quartiles(rows, kind, model, precision, batch), f"{ratio:.3f}" if ratio else ""]
        used = _of_peak(ours, precision)
        streams = number(ours["two_streams_ms"]) if "two_streams_ms" in ours else ""
        found.append(
            [TITLES.get(model, model), size(rows, model), precision, f"{batch}", *cells, streams, f"{used:.0%}" if used else ""]
        )
    head = [
        "model",
        "size",
        "type",
        "batch",
        "detrt",
        *(c for kind in kinds for c in (kind, f"detrt / {kind}")),
        "two streams",
        "of peak",
    ]
    return table(head, found, 3)


def _of(limits: Mapping[str, float], row: dict) -> float:
    """The limit of the row's GPU; 0 of others."""
    return next((value for name, value in limits.items() if name in row.get("device", "")), 0)


def _of_peak(row: dict, precision: str) -> float:
    """Fraction of the FP16 peak of its GPU; 0 where that is not known."""
    peak = _of(PEAK, row)
    return row["gflop"] / row["p50_ms"] / peak if peak and "gflop" in row and "p50_ms" in row and precision != "fp32" else 0


def _quartiles(rows: Rows, *key: Any) -> str:
    row = rows.row(*key)
    if "quartiles_ms" not in row:
        return rows.ms(*key)
    low, high = row["quartiles_ms"]
    return f"{row['p50_ms']:.3f} ({low:.3f} to {high:.3f})"


def budget(rows: Rows) -> str:
    """Where the time of each package goes: microseconds and launches by kind of kernel, beside what weights and arithmetic need."""
    found = []
    kinds = [*KINDS, "other"]
    for (kind, model, precision, batch), row in rows.rows.items():
        if kind not in ("ours", "base") or not row.get("kernels"):
            continue
        sums = _by_kind(row)
        total = sum(us for us, _ in sums.values())
        cells = [f"{us:.0f} ({count:.0f})" if count else "" for us, count in sums.values()]
        facts = [
            f"{row['p50_ms'] * 1e3:.0f}",
            f"{total:.0f}",
            f"{len(row['kernels'])}",
            f"{sum(n for _, n in sums.values()):.0f}",
        ]
        facts += [f"{row.get(key, '')}" for key in ("weights_mb", "moved_mb", "gflop")]
        found.append([f"{TITLES.get(model, model)}, {kind}", f"{precision} b{batch}", *facts, *cells])
    head = ["model", "job", "graph us", "kernels us", "kernels", "launches", "weights FP32 MB", "moved MB", "GFLOP", *kinds]
    return table(head, found, 2) if found else ""


def _by_kind(row: dict) -> dict[str, list[float]]:
    """Kind of kernel -> [microseconds, launches]."""
    sums: dict[str, list[float]] = {name: [0, 0] for name in (*KINDS, "other")}
    for name, launches, us in row["kernels"]:
        entry = sums[_kind_of(name)]
        entry[0], entry[1] = entry[0] + us, entry[1] + launches
    return sums


def _kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def compiling(rows: Rows) -> str:
    """Seconds that packages take to compile and open, with the compiler's longest phases (some contain others)."""
    found = []
    for (kind, model, precision, batch), row in rows.rows.items():
        if kind in ("ours", "base") and "inductor_s" in row:
            longest = ", ".join(f"{name} {seconds}" for name, seconds in list(row.get("phases_s", {}).items())[:8])
            facts = [f"{row.get(key, '')}" for key in ("build_s", "capture_s", "inductor_s", "open_s", "package_mb")]
            found.append([f"{TITLES.get(model, model)}, {kind}", f"{precision} b{batch}", *facts, longest])
    return table(["model", "job", "all s", "capture s", "inductor s", "open s", "MB", "phases"], found, 2) if found else ""


_WHAT = {
    "eager": "transformers", "compile": "`torch.compile`", "rtx": "TensorRT-RTX, {} graph", "ort": "ONNX Runtime CUDA, {} graph"
}  # fmt: skip
_WHOSE = {"detrt": "detrt's", "authors": "the authors'", "transformers": "transformers'"}


def figures(rows: Rows, run: str, base: str) -> Iterable[dict[str, Any]]:
    """Rows of speed.jsonl: each package beside that of the commit `base`, its budget, throughput and peers."""
    for (kind, model, precision, batch), ours in rows.rows.items():
        if kind != "ours" or "quartiles_ms" not in ours:
            continue
        key = model, precision, batch
        title = TITLES.get(model, model)
        about = {"run": run, "model": f"{title}, batch size {batch}" if batch > 1 else title, "size": size(rows, model)}
        ms, theirs = _quartiles(rows, "ours", *key), rows.row("base", *key)
        if "quartiles_ms" in theirs:
            beside = {
                "ms": ms,
                f"{base}, ms": _quartiles(rows, "base", *key),
                "ratio": f"{ours['p50_ms'] / theirs['p50_ms']:.2f}",
            }
            yield about | beside | _changes(ours, theirs)
        if ours.get("kernels"):
            yield {"run": run, "table": "budget", "model": about["model"]} | _budget(ours)
        if "two_streams_ms" in ours:
            yield {
                "run": run,
                "table": "throughput",
                "model": title,
                "batch": batch,
                "ms": ms,
                "two streams, ms": f"{ours['two_streams_ms']:.3f}",
                "of the FP16 peak": f"{_of_peak(ours, precision):.0%}".replace("%", " %"),
                "images/s": round(batch / ours["p50_ms"] * 1e3),
            }
        peers = [one for one, *rest in rows.rows if tuple(rest) == key and one.partition("-")[0] in _WHAT]
        for peer in ["ours", *peers] if peers else []:
            name, _, graph = peer.partition("-")
            what = _WHAT[name].format(_WHOSE.get(graph, graph)) if peer != "ours" else "package"
            yield {"table": "peers"} | about | {"what": what, "ms": _quartiles(rows, peer, *key)}


def _changes(ours: dict, theirs: dict) -> dict[str, str]:
    """Launches, and microseconds of the kinds that take most, before and after."""
    if not (ours.get("kernels") and theirs.get("kernels")):
        return {}
    after, before = _by_kind(ours), _by_kind(theirs)
    launches = [f"{sum(count for _, count in sums.values()):.0f}" for sums in (before, after)]
    kinds = ("attention", "convolution", "matmul")
    return {"launches": " → ".join(launches)} | {f"{kind}, us": f"{before[kind][0]:.0f} → {after[kind][0]:.0f}" for kind in kinds}


def _budget(row: dict) -> dict[str, str]:
    """Microseconds of a package: its graph, what arithmetic and memory need, and its kernels by kind."""
    sums, peak, bandwidth = _by_kind(row), _of(PEAK, row), _of(BANDWIDTH, row)
    shown = {"convolutions": "convolution", "matmuls": "matmul", "attention": "attention", "sampling": "deformable attention"}
    found = {"graph": f"{row['p50_ms'] * 1e3:.0f}", "launches": f"{sum(count for _, count in sums.values()):.0f}"}
    if peak and "gflop" in row:
        found |= {"GFLOP": f"{row['gflop']:.0f}", "at peak": f"{row['gflop'] / peak * 1e3:.0f}"}
    if bandwidth and "moved_mb" in row:
        found |= {"MB": f"{row['moved_mb']:.0f}", "from memory": f"{row['moved_mb'] / bandwidth:.0f}"}
    found |= {name: f"{sums[kind][0]:.0f}" if sums[kind][1] else "" for name, kind in shown.items()}
    return found | {"rest": f"{sum(us for kind, (us, _) in sums.items() if kind not in shown.values()):.0f}"}


TABLES = {"latency": latency, "recent": recent}


def filled(text: str, rows: Rows) -> str:
    """A document with its tables made again."""
    return _MARK.sub(lambda found: f"{found[1]}{TABLES[found[2]](rows)}{found[3]}", text)


def shown(rows: Rows) -> str:
    """The tables that say what one call of measure_inductor.py measured."""
    return "\n".join(f"{make.__name__}\n\n{made}" for make in (speed, budget, compiling) if (made := make(rows)))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("rows", type=file, metavar="ROWS.jsonl")
    parser.add_argument("document", type=file, nargs="?", metavar="DOCUMENT")
    parser.add_argument("--run", help="name of the run, for rows of speed.jsonl")
    parser.add_argument("--base", default="base", metavar="COMMIT", help="what --baseline of measure_inductor.py was")
    given = parser.parse_args()
    rows = Rows(given.rows.read_text("utf-8").splitlines())
    if given.document is not None:
        given.document.write_text(filled(given.document.read_text("utf-8"), rows), "utf-8")
    elif given.run is not None:
        for row in figures(rows, given.run, given.base):
            print(json.dumps(row, ensure_ascii=False))
    else:
        print(shown(rows))
    return 0


assert set(TITLES) == {*SIZES, *RECENT} and set(PLAIN) >= set(SAMPLING)


if __name__ == "__main__":
    run(main)
