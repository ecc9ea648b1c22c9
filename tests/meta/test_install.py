"""The installation of `make setup`: uv gets what pip is configured with."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "install.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pip_settings(monkeypatch, tmp_path):
    """pip's configuration is one file and one variable; nothing of this machine."""
    for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "CONSTRAINT", "TRUSTED_HOST", "NO_INDEX", "CERT"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nextra-index-url =\n  https://a/simple\n  https://b/simple\nfind-links = one\n[list]\nformat = json\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_FIND_LINKS", "two")


def test_what_pip_is_configured_with(script, pip_settings):
    found = script.configured()
    assert found["extra-index-url"].split() == ["https://a/simple", "https://b/simple"]
    assert found["find-links"] == "two" and "format" not in found  # the environment is stronger; another command's


def test_options_of_uv(script):
    settings = {"extra-index-url": "\nhttps://a\nhttps://b", "find-links": "x", "no-index": "true", "cert": "c"}
    passed_on = ["--extra-index-url=https://a", "--extra-index-url=https://b", "--find-links=x", "--no-index"]
    plain = script.uv_command({"no-index": "false"}, ["numpy"])
    assert script.uv_command(settings, ["numpy"]) == [*plain[:-1], *passed_on, "numpy"]


def test_pip_installs_where_uv_fails(script, monkeypatch):
    monkeypatch.setattr(script, "pip", lambda *arguments, **options: type("Done", (), {"returncode": 1}))
    assert not script.uv_install(["numpy"])
