"""The measured tables in docs are those of the rows beside them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

from tables import TABLES, Rows, figures, filled

RESULTS = ROOT / "docs" / "results"
DOCUMENT, ROWS = RESULTS / "benchmarks-gpu.md", RESULTS / "figures" / "benchmarks-gpu.jsonl"


def test_tables_of_gpu_figures():
    text = DOCUMENT.read_text("utf-8")
    rows = Rows(ROWS.read_text("utf-8").splitlines())
    assert all(f"<!-- table: {name} -->" in text for name in TABLES)
    assert filled(text, rows) == text, f"python benchmarks/tables.py {ROWS.relative_to(ROOT)} {DOCUMENT.relative_to(ROOT)}"


def test_rows_of_speed_are_made_from_what_was_measured():
    """What one call measured becomes the rows that are published, in figures and in form."""
    kernels = [
        ["linear_rows_kernel", 20, 81.2],
        ["attention_kernel", 14, 117.8],
        ["sm90_xmma_fprop", 3, 40.0],
        ["triton_poi", 9, 12.0],
    ]
    about = {"height": 800, "width": 1066, "device": "NVIDIA H200", "gflop": 1240.8, "moved_mb": 1218.2}
    ours = {"p50_ms": 4.607, "quartiles_ms": [4.597, 4.615], "two_streams_ms": 4.067, "kernels": kernels}
    base = {"p50_ms": 5.0, "quartiles_ms": [4.9, 5.1], "kernels": [["cutlass_gemm", 30, 100.0]]}
    other = {"p50_ms": 9.0, "quartiles_ms": [8.0, 10.0]}
    kinds = {"ours": ours, "base": base, "compile": other, "rtx-authors": other}
    measured = [json.dumps({"job": f"{kind}|random:detr|800x1066|fp16|8"} | about | row) for kind, row in kinds.items()]
    made = {row.get("table", "beside"): row for row in figures(Rows(measured), "M", "4de2d35")}
    assert made["beside"]["ms"] == "4.607 (4.597 to 4.615)" and made["beside"]["4de2d35, ms"] == "5.000 (4.900 to 5.100)"
    assert made["beside"]["ratio"] == "0.92" and made["beside"]["launches"] == "30 → 46"
    assert made["beside"]["matmul, us"] == "100 → 81" and made["beside"]["model"] == "DETR-R50, batch size 8"
    assert made["budget"]["from memory"] == "254" and made["budget"]["at peak"] == "1255" and made["budget"]["rest"] == "12"
    assert made["throughput"]["images/s"] == 1736 and made["throughput"]["of the FP16 peak"] == "27 %"
    assert made["peers"]["what"] == "TensorRT-RTX, the authors' graph" and made["peers"]["ms"] == "9.000 (8.000 to 10.000)"
    published = [json.loads(line) for line in (RESULTS / "figures" / "speed.jsonl").read_text("utf-8").splitlines()]
    for table, row in made.items():
        like = [set(one) for one in published if one.get("table", "beside") == table]
        assert set(row) in like, (table, set(row))


MARK = re.compile(r"<!-- rows: (\S+) -->\n((?:\|.*\n)+)")
PAGES = {path: MARK.findall(path.read_text("utf-8")) for path in sorted(RESULTS.glob("*.md"))}


def cells(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def test_marked_tables_have_rows_of_the_file_beside_them():
    """Each row of a table below `<!-- rows: FILE -->` is a row of that file, cell by cell."""
    assert any(PAGES.values())
    for page, tables in PAGES.items():
        for name, table in tables:
            rows = [json.loads(line) for line in (RESULTS / name).read_text("utf-8").splitlines()]
            columns, _, *lines = map(cells, table.splitlines())
            wrong = [
                line
                for line in lines
                if not any(all(row.get(c, "") == v for c, v in zip(columns, line, strict=True)) for row in rows)
            ]
            assert not wrong, f"{page.name}: not in {name}: {wrong[:3]}"


def test_the_number_of_models_that_tensorrt_rtx_ran():
    """hardware.md counts the models of the rows, timed or compared, by precision."""
    rows = [json.loads(line) for line in (RESULTS / "figures" / "tensorrt-rtx.jsonl").read_text("utf-8").splitlines()]
    ran = {(row["model"], row["precision"]) for row in rows if "precision" in row and {"kernel time", "verdict"} & set(row)}
    found = dict.fromkeys(("FP16", "FP32", "BF16"), 0) | Counter(precision for _, precision in ran)
    stated = re.search(r"\[(\d+) models in FP16, (\d+) in FP32, (\d+) in BF16\]", (RESULTS / "hardware.md").read_text("utf-8"))
    assert stated and [int(number) for number in stated.groups()] == [found["FP16"], found["FP32"], found["BF16"]]


def test_rows_name_a_run_that_is_described():
    """Date, machine, versions and command of every row that names a run."""
    for path in sorted((RESULTS / "figures").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        described = {row["run"] for row in rows if row.get("table") == "runs"}
        assert all({"date", "machine", "versions", "command"} <= set(row) for row in rows if row.get("table") == "runs"), (
            path.name
        )
        if described:
            assert {row["run"] for row in rows if "run" in row} == described, path.name


def test_benchmarks_reproduce_what_is_published():
    """Each program is named by the page that its row in benchmarks/README.md links, or belongs to another program."""
    folder = ROOT / "benchmarks"
    programs = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix == ".py"}
    readme = (folder / "README.md").read_text("utf-8")
    listed = dict(re.findall(r"^\| `([\w/.]+)` .*\]\(\.\./([^)]+)\) \|$", readme, re.MULTILINE))
    unnamed = [name for name, page in listed.items() if Path(name).name not in (ROOT / page).read_text("utf-8")]
    assert unnamed == [] and set(listed) <= programs
    texts = {name: (folder / name).read_text("utf-8") for name in programs}
    lone = [
        n for n in programs - set(listed) if not any(re.search(rf"\b{Path(n).stem}\b", t) for o, t in texts.items() if o != n)
    ]
    assert lone == []
