"""The tables of docs/results/benchmarks-gpu.md from the rows of measure_inductor.py.

python benchmarks/tables.py ROWS.jsonl            print them
python benchmarks/tables.py ROWS.jsonl DOCUMENT   write them into the document, between its `table` comments
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from measure_inductor import PLAIN, RECENT, SAMPLING, SIZES

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
KINDS = ("matmul", "convolutions", "attention", "deformable attention", "fused elementwise, norms", "top-k", "other")
_MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Rows:
    """Rows by kind, model, precision and batch."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.rows: dict[tuple[str, str, str, int], dict] = {}
        for row in map(json.loads, lines):
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
    columns = [
        "model", "size", "eager FP32", "eager FP16", "compile FP16", "plain Triton op FP16", "detrt FP16", "target",
        "eager FP16 / detrt", "compile / detrt", "plain Triton op / detrt",
    ]  # fmt: skip
    found = []
    for model, batch in [(model, 1) for model in ordered()] + [("detr", 4)]:
        title = TITLES[model] + (f", batch {batch}" if batch > 1 else "")
        cells = [rows.ms("eager", model, "fp32", batch)]
        cells += [rows.ms(kind, model, "fp16", batch) for kind in ("eager", "compile", "patched")]
        target = 3.0 if batch == 4 else TARGETS.get(model)
        ratios = [rows.ratio(kind, model, batch) for kind in ("eager", "compile", "patched")]
        ours = rows.ms("ours", model, "fp16", batch)
        bold = f"**{ours.rstrip('*')}**" + "\\*" * ours.endswith("*") if ours else ""
        found.append([title, size(rows, model), *cells, bold, f"{target or ''}", *ratios])
    return table(columns, found, 2)


def recent(rows: Rows) -> str:
    """Milliseconds at batch sizes 1 and 8."""
    kinds = ("eager", "compile", "ours")
    columns = [
        "model",
        "size",
        *(f"{kind} b{batch}" for batch in (1, 8) for kind in ("eager", "compile", "detrt", "compile / detrt,")),
    ]
    found = []
    for model in RECENT:
        cells = [
            [*(rows.ms(kind, model, "fp16", batch) for kind in kinds), rows.ratio("compile", model, batch)] for batch in (1, 8)
        ]
        found.append([TITLES[model], size(rows, model), *cells[0], *cells[1]])
    return table(columns, found, 2)


def batches(rows: Rows) -> str:
    columns = ["model", *(f"{p} b{b}" for p in ("FP16", "BF16", "FP32") for b in (1, 4, 16)), "TF32 b1"]
    return table(
        columns,
        [
            [TITLES[model]]
            + [rows.ms("ours", model, precision, batch) for precision in ("fp16", "bf16", "fp32") for batch in (1, 4, 16)]
            + [rows.ms("ours", model, "tf32")]
            for model in ordered()
        ],
    )


def agreement(rows: Rows) -> str:
    columns = [
        "model",
        "FP16 logits",
        "boxes",
        "twins",
        "twins, own selection",
        "BF16 logits",
        "boxes",
        "twins",
        "FP32 logits",
        "boxes",
    ]
    found = []
    for model in ordered():
        cells = [TITLES[model]]
        for precision in ("fp16", "bf16"):
            row = rows.row("ours", model, precision)
            cells += [*_errors(row.get("forced_errors")), _share(row.get("forced_matched"))]
            cells += [_share(row.get("matched"))] if precision == "fp16" else []
        found.append([*cells, *_errors(rows.row("ours", model, "fp32").get("errors"))])
    return table(columns, found)


def _errors(errors: list[float] | None) -> list[str]:
    return [f"{error:.0e}".replace("e-0", "e-") for error in errors] if errors else ["", ""]


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"


def costs(rows: Rows) -> str:
    """Building and opening on one core of sixteen busy ones, and memory."""
    columns = ["model", "compiling, s", "package, MB", "opening, s", "work memory b1, MiB", "b4", "b16"]
    found = []
    for model in ordered():
        row = rows.row("ours", model)
        cells = [f"{row[key]:.0f}" if key in row else "" for key in ("build_s", "package_mb")]
        cells += [f"{row['open_s']:.1f}" if "open_s" in row else ""]
        memory = [rows.row("ours", model, "fp16", batch).get("memory_mib") for batch in (1, 4, 16)]
        found.append([TITLES[model], *cells, *("" if m is None else str(m) for m in memory)])
    return table(columns, found)


def kinds(rows: Rows) -> str:
    from detrt.bench.profile import kind_of_kernel

    found = []
    for model in ordered():
        row = rows.row("ours", model)
        if "kernels" not in row:
            continue
        sums = dict.fromkeys(KINDS, 0.0)
        for name, _, took in row["kernels"]:
            kind = kind_of_kernel(name)
            sums[kind if kind in sums else "other"] += took / 1e3
        count = sum(times for _, times, _ in row["kernels"])
        cells = [f"{took:.2f}" if took >= 0.005 else "" for took in sums.values()]
        found.append([TITLES[model], *cells, str(count), rows.ms("ours", model)])
    return table(["model", *KINDS, "kernels", "all"], found)


def ordered() -> list[str]:
    return [*TARGETS, *(m for m in SAMPLING if m not in TARGETS), *(m for m in SIZES if m not in TARGETS and m not in SAMPLING)]


TABLES = {"latency": latency, "recent": recent, "batches": batches, "agreement": agreement, "costs": costs, "kinds": kinds}


def filled(text: str, rows: Rows) -> str:
    """A document with its tables made again."""
    return _MARK.sub(lambda found: f"{found[1]}{TABLES[found[2]](rows)}{found[3]}", text)


def main() -> int:
    rows = Rows(Path(sys.argv[1]).read_text("utf-8").splitlines())
    if len(sys.argv) > 2:
        document = Path(sys.argv[2])
        document.write_text(filled(document.read_text("utf-8"), rows), "utf-8")
    else:
        print("\n".join(f"{name}\n\n{make(rows)}" for name, make in TABLES.items()))
    return 0


assert set(TITLES) == {*SIZES, *RECENT} and set(PLAIN) >= set(SAMPLING)


if __name__ == "__main__":
    sys.exit(main())
