"""Damage of result files: a run that goes on takes none with another content."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("pyarrow.parquet", reason="needs the 'ray' extra")

from detrt.errors import OutputError
from detrt.jobs.ray.parquet import part_facts, read_results, results_to_bytes


@pytest.fixture(scope="module")
def part():
    generator = np.random.default_rng(5)
    rows = []
    for image_id in range(1, 41):
        found = [
            {"label": f"class {k % 3}", "class_id": k % 3, "score": float(np.float32(score)), "box_xyxy": [float(v) for v in box]}
            for k, (score, box) in enumerate(zip(generator.random(6), generator.random((6, 4)).astype(np.float32), strict=True))
        ]
        rows.append(
            {"image_id": image_id, "image": f"{image_id}.jpg", "width": 64, "height": 48, "error": None, "detections": found}
        )
    rows[3] |= {"width": None, "height": None, "error": "damaged", "detections": []}
    return results_to_bytes(rows, {"model": "m", "threshold": 0.5})


def accepted(part, at, value):
    """Whether a part with a changed byte is taken although its rows differ."""
    damaged = bytearray(part)
    damaged[at] ^= value
    if part_facts(bytes(damaged)) is None:
        return False
    return json.dumps(read_results(bytes(damaged), "p")) != json.dumps(read_results(part, "p"))


def test_a_whole_part_is_taken(part):
    facts = part_facts(part)
    assert facts.image_ids == tuple(range(1, 41)) and facts.bad == 1 and facts.detections == 39 * 6


def check(part, count):
    generator, refused = np.random.default_rng(count), 0
    for at, bit in zip(generator.integers(0, len(part), count), generator.integers(0, 8, count), strict=True):
        assert not accepted(part, at, 1 << bit), f"bit {bit} of byte {at}"
        damaged = bytearray(part)
        damaged[at] ^= 1 << bit
        refused += part_facts(bytes(damaged)) is None
    assert refused > count / 2


def test_single_bits(part):
    check(part, 40)


@pytest.mark.slow
def test_many_single_bits(part):
    check(part, 400)


@pytest.mark.parametrize("change", ["cut", "sector", "empty", "older"])
def test_other_damage(part, change):
    data = {"cut": part[:-100], "sector": part[:600] + bytes(512) + part[1112:], "empty": b""}.get(change)
    if change == "older":  # of a version that wrote no digest
        import io

        import pyarrow.parquet as parquet

        target = io.BytesIO()
        table = parquet.read_table(io.BytesIO(part))
        parquet.write_table(table.replace_schema_metadata({b"detrt": b"{}"}), target)
        data = target.getvalue()
    assert part_facts(data) is None


def test_results_that_a_checksum_finds_damaged_are_not_read(part):
    at = part.index(b"\x28\xb5\x2f\xfd") + 12  # in the first page, after the start of its compressed data
    with pytest.raises(OutputError, match="damaged"):
        read_results(part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :], "p")
