"""Tests leave nothing in the home folder of whoever runs them: kernels of a fake GPU were found there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from detrt.backends.tensorrt.session import default_runtime_cache
from detrt.bundle import EngineFacts
from detrt.models import trust

FACTS = EngineFacts("tensorrt-rtx", "1.7.1.116", (89,), "fp32", {}, "")
SOURCES = Path(__file__).resolve().parents[2] / "src/detrt"


def test_a_test_that_removes_a_variable_fails(tmp_path, monkeypatch):
    engine = tmp_path / "model.engine"
    engine.write_bytes(b"engine")
    assert default_runtime_cache(engine, FACTS, "Fake GPU 0") is None and Path(os.environ[trust.STORE]) != Path.home()
    monkeypatch.delenv("DETRT_RUNTIME_CACHE")
    monkeypatch.delenv(trust.STORE)
    for uses in (lambda: default_runtime_cache(engine, FACTS, "Fake GPU 0"), lambda: trust.remember(tmp_path)):
        with pytest.raises(AssertionError, match="set HOME to a folder of the test"):
            uses()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    found = default_runtime_cache(engine, FACTS, "Fake GPU 0")
    assert found is not None and found.parent == tmp_path / "home/.cache/detrt"


def test_one_function_leads_to_the_home_folder():
    """It is called by its module, where the tests replace it."""
    ways = re.compile(r"Path\.home\(|\bHOME\b.*environ|environ.*\bHOME\b|import .*\bfolder_of_user|(?<!files\.)folder_of_user\(")
    found = {
        f"{path.relative_to(SOURCES)}: {line.strip()}"
        for path in SOURCES.rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if ways.search(line)
    }
    assert found == {"files.py: def folder_of_user(variable: str, usual: str) -> Path | None:"}
