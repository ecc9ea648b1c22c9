"""The public names of the package: what is listed loads, and loading the package loads nothing heavy."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import detrt

HEAVY = ("torch", "transformers", "onnx", "onnxslim", "onnxruntime", "tensorrt", "tensorrt_rtx_bindings", "PIL", "numpy")


def test_list_is_sorted_and_has_no_doubles():
    assert detrt.__all__ == sorted(set(detrt.__all__))


@pytest.mark.parametrize("name", detrt.__all__)
def test_every_name_loads(name):
    if name in ("ExportConfig", "export_onnx", "load_source"):
        pytest.importorskip("transformers", reason="needs the 'export' extra")
    assert getattr(detrt, name) == getattr(detrt, name) is not None
    assert name in dir(detrt)


def test_list_equals_what_resolves():
    assert set(detrt.__all__) == {*detrt._HOMES, "__version__"}


def test_unknown_name():
    with pytest.raises(AttributeError, match="'nothing'"):
        detrt.nothing  # noqa: B018


def test_types_for_checkers_are_the_same_names():
    """The names under TYPE_CHECKING are what editors see."""
    import ast
    from pathlib import Path

    tree = ast.parse(Path(detrt.__file__).read_text("utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == dict(detrt._HOMES.items())


def test_import_loads_nothing_heavy():
    code = f"import sys, detrt; print([n for n in {HEAVY!r} if n in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("name", sorted(detrt._ELSEWHERE))
def test_a_hint_hides_no_module(name):
    """`from detrt import NAME` asks the package before it looks for a module."""
    assert importlib.util.find_spec(f"detrt.{name}") is None
