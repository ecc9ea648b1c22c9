"""The table of TensorRT versions: rows, known faults, and the page that shows them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from detrt.backends.tensorrt.versions import FAULTS, VERSIONS, check_faults, faults_of, row_of, same_version, tables
from detrt.cli.spellings import spelled
from detrt.errors import EngineError
from detrt.models.families import having

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/tensorrt-versions.md"


def faults(version, target="tensorrt", **changes):
    facts = {"sm": 90, "precisions": {"fp32"}, "layers": {"SOFTMAX"}, "family": "detr", "largest_batch": 1}
    return faults_of(target, version, **(facts | changes))


@pytest.mark.parametrize(
    ("version", "since"),
    [("8.5.3.1", (8, 5)), ("8.6.1", (8, 6)), ("10.3.0", (10, 3)), ("10.7.0.23", (10, 3)), ("10.8.0.43", (10, 8)), ("10.9.0.34", (10, 9)),
     ("10.13.3.9.post1", (10, 12)), ("11.4.1", (11, 0))],
)  # fmt: skip
def test_a_version_has_the_newest_row_that_is_not_newer(version, since):
    assert row_of("tensorrt", version).since == since


def test_what_is_too_old_is_refused():
    with pytest.raises(EngineError, match=r"8\.5"):
        row_of("tensorrt", "8.4.3")


def test_one_release_has_several_spellings():
    assert same_version("10.3.0", "10.3.0.26") and same_version("10.13.3.9.post1", "10.13.3.9")
    assert not same_version("10.3.0", "10.3.1.2") and not same_version("10.3", "10.3.0.26")


def test_known_faults_of_a_version():
    assert not faults("8.5.3.1") and not faults("10.12.0", precisions={"fp16"}, largest_batch=8)
    (dinov3,) = faults("10.3.0", family="deimv2", precisions={"fp16", "fp32"})
    with pytest.raises(EngineError, match=r"DINOv3.*10\.6"):
        check_faults([dinov3], "10.3.0")
    assert not faults("10.6.0", family="deimv2", precisions={"fp16"})
    assert faults("10.4.0", family="deimv2") and not faults("10.5.0", family="deimv2")
    assert faults("10.16.1", sm=120, precisions={"fp16"}) and not faults("10.16.1", sm=89, precisions={"fp16"})
    assert faults("10.11.0", sm=89, layers=(), largest_batch=2) and not faults("10.11.0", sm=89, layers=(), largest_batch=1)
    assert faults("11.2.1", family="dino", sm=120, precisions={"bf16"}) and not faults(
        "11.2.1", family="dino", sm=120, precisions={"fp16"}
    )
    (told,) = check_faults(faults("11.1.0", layers={"GRID_SAMPLE"}), "11.1.0")
    assert "GridSample" in told and "`msda=gather`" in told
    assert not faults("1.7.1", target="tensorrt-rtx", sm=89, layers={"GRID_SAMPLE"})


ADVISED = [(fault, family) for fault in FAULTS if "keep_fp32=" in fault.instead for family in having(fault.families)]


@pytest.mark.parametrize(("fault", "family"), ADVISED, ids=lambda value: value if isinstance(value, str) else "")
def test_layers_that_are_advised_to_stay_in_fp32_are_in_the_graph(exported, fault, family):
    onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
    from detrt.precision.apply import unmatched_patterns

    (pattern,) = re.findall(r"keep_fp32=([^`]+)`", fault.instead)
    assert unmatched_patterns(onnx.load(exported(family).path), [pattern]) == []


def test_rows_and_faults_are_well_formed():
    assert all(fault.action in ("avoided", "warn", "refuse") and fault.source for fault in FAULTS)
    assert all(fault.before is None or fault.since < fault.before for fault in FAULTS)
    assert len({(row.target, row.since) for row in VERSIONS}) == len(VERSIONS)


def test_the_page_shows_the_table():
    assert spelled(tables()) in PAGE.read_text("utf-8"), (
        "write docs/reference/tensorrt-versions.md again from spelled(versions.tables())"
    )
