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
    kinds = ("eager", "compile", "patched")
    columns = ["model", "size", "eager", "compile", "plain Triton op", "detrt", "target", "eager / detrt", "compile / detrt"]
    found = []
    for model, batch in [(model, 1) for model in ordered()] + [("detr", 4)]:
        title = TITLES[model] + (f", batch {batch}" if batch > 1 else "")
        cells = [rows.ms(kind, model, "fp16", batch) for kind in kinds]
        target = 3.0 if batch == 4 else TARGETS.get(model)
        ratios = [rows.ratio(kind, model, batch) for kind in kinds[:2]]
        ours = rows.ms("ours", model, "fp16", batch)
        bold = f"**{ours.rstrip('*')}**" + "\\*" * ours.endswith("*") if ours else ""
        found.append([title, size(rows, model), *cells, bold, f"{target or ''}", *ratios])
    return table(columns, found, 2)


def recent(rows: Rows) -> str:
    """Milliseconds at batch sizes 1 and 8."""
    kinds = ("compile", "ours")
    columns = ["model", "size", *(f"{kind} b{batch}" for batch in (1, 8) for kind in ("compile", "detrt", "compile / detrt,"))]
    found = []
    for model in RECENT:
        cells = [
            [*(rows.ms(kind, model, "fp16", batch) for kind in kinds), rows.ratio("compile", model, batch)] for batch in (1, 8)
        ]
        found.append([TITLES[model], size(rows, model), *cells[0], *cells[1]])
    return table(columns, found, 2)


def ordered() -> list[str]:
    return [*TARGETS, *(m for m in SAMPLING if m not in TARGETS), *(m for m in SIZES if m not in TARGETS and m not in SAMPLING)]


TABLES = {"latency": latency, "recent": recent}


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
