"""The measured tables in docs are those of the rows beside them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

from tables import TABLES, Rows, filled

RESULTS = ROOT / "docs" / "results"
DOCUMENT, ROWS = RESULTS / "benchmarks-gpu.md", RESULTS / "figures" / "benchmarks-gpu.jsonl"


def test_tables_of_gpu_figures():
    text = DOCUMENT.read_text("utf-8")
    rows = Rows(ROWS.read_text("utf-8").splitlines())
    assert all(f"<!-- table: {name} -->" in text for name in TABLES)
    assert filled(text, rows) == text, f"python benchmarks/tables.py {ROWS.relative_to(ROOT)} {DOCUMENT.relative_to(ROOT)}"
