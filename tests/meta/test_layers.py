"""The import rules of docs/architecture.md, read from the import statements of every module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "detrt"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# package -> files and folders that may import it when they are loaded, and those that may inside functions only.
ALWAYS: dict[str, tuple[str, ...]] = {
    "torch": ("sources/", "export/", "torch_session.py", "models/", "kernels/", "inductor/", "on_device/"),
    "transformers": ("sources/", "export/", "torch_session.py", "models/"),
    "triton": ("kernels/triton_*.py",),
    "onnx": ("graph/", "precision/"),
    "onnxslim": (),
    "onnxruntime": (),
    "tokenizers": ("sources/",),
    "tensorrt": (),
    "tensorrt_rtx_bindings": (),
    "av": (),
    "nvidia": (),
    "matplotlib": (),
    "cuda": (),
    "ray": (),
    "pyarrow": (),
    "fsspec": (),
    "fastapi": ("serve/",),
    "starlette": ("serve/",),
    "pydantic": ("serve/",),
    "python_multipart": ("serve/",),
    "uvicorn": ("serve/protocol.py",),
    "uvloop": (),
    "prometheus_client": ("serve/metrics.py",),
}
INSIDE: dict[str, tuple[str, ...]] = {
    "torch": ("bench.py", "bench_against.py", "bench_device.py", "bench_parts.py", "inductor_session.py"),
    "transformers": ("bench.py", "bench_against.py"),
    "onnx": ("export/onnx.py",),
    "onnxslim": ("graph/",),
    "onnxruntime": ("onnx_session.py",),
    "tokenizers": ("tokens.py",),
    "av": ("video.py",),
    "nvidia": ("on_device/jpeg.py",),
    "matplotlib": ("bench_plots.py",),
    "uvicorn": ("serve/server.py",),
    "uvloop": ("serve/server.py",),
    "ray": ("cluster/on_ray.py",),
    "pyarrow": ("cluster/tables.py",),
    "fsspec": ("cluster/places.py",),
}
# Layers from the bottom up; a module imports from its own layer and from those below it. Prefixes; the first fits.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors.py", "spec.py", "detections.py", "files.py", "memory.py", "cores.py", "__init__.py"),
    ("bundle.py", "session.py", "compare.py"),
    (
        "images.py",
        "pictures.py",
        "jpeg_header.py",
        "video.py",
        "reading.py",
        "preprocess.py",
        "resampling.py",
        "decode.py",
        "scenes.py",
        "scenes_shapes.py",
        "scenes_phrases.py",
        "suppress.py",
    ),
    ("prompts.py", "text_decode.py", "tokens.py", "prompted.py", "bound.py"),
    (
        "sources/",
        "export/",
        "graph/",
        "engine/",
        "onnx_session.py",
        "onnx_binding.py",
        "torch_session.py",
        "models/",
        "kernels/",
        "inductor/",
        "inductor_session.py",
        "sized_session.py",
        "on_device/",
    ),
    ("sessions.py", "detector.py", "devices.py"),
    ("",),  # all others: parity, bench, pipeline, draw, outputs, ...
    ("cli/",),
)


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    path = Path(module)
    return any(module.startswith(p) if p.endswith("/") else path.match(p) for p in patterns)


def statements(module: str) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """(import statement, whether it runs when the module is loaded); blocks for type checkers are left out."""
    found: list[tuple[ast.Import | ast.ImportFrom, bool]] = []

    def walk(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                found.append((child, top))
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            else:
                walk(child, top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    walk(ast.parse((PACKAGE / module).read_text("utf-8")), True)
    return found


def outside(module: str) -> list[tuple[str, bool]]:
    """Top-level packages that a module imports, and whether at load."""
    found = []
    for node, top in statements(module):
        if isinstance(node, ast.Import):
            found += [(alias.name.partition(".")[0], top) for alias in node.names]
        elif not node.level and node.module:
            found.append((node.module.partition(".")[0], top))
    return found


def inside(module: str) -> list[str]:
    """Modules of detrt that a module imports when it is loaded, as paths."""
    found = []
    for node, top in statements(module):
        if not top or not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = (PACKAGE / module).parent
        for _ in range(node.level - 1):
            base = base.parent
        parts = node.module.split(".") if node.module else []
        for names in ([*parts, alias.name] for alias in node.names):
            for length in (len(names), len(names) - 1):
                path = base.joinpath(*names[:length])
                target = next((p for p in (path.with_suffix(".py"), path / "__init__.py") if length and p.is_file()), None)
                if target is not None:
                    found.append(target.relative_to(PACKAGE).as_posix())
                    break
    return found


def layer_of(module: str) -> int:
    """The lowest layer that names the module, the cli before the layer of all others."""
    if module.startswith("cli/") or module == "__main__.py":
        return len(LAYERS) - 1
    for level, names in enumerate(LAYERS):
        if names != ("",) and any(module == n or (n.endswith("/") and module.startswith(n)) for n in names):
            return level
    return len(LAYERS) - 2


@pytest.mark.parametrize("package", ALWAYS)
def test_one_door(package):
    wrong = []
    for module in MODULES:
        for name, top in outside(module):
            allowed = matches(module, ALWAYS[package]) or (not top and matches(module, INSIDE.get(package, ())))
            if name == package and not allowed:
                wrong.append(f"{module} imports {package}" + (" at load" if top else " in a function"))
    assert not wrong, wrong


def test_imports_by_name():
    """What import statements do not show: TensorRT and CUDA each have their one module, and so has transformers' code."""
    found = {m: (PACKAGE / m).read_text("utf-8") for m in MODULES}
    by_name = {m for m, text in found.items() if re.search(r"import_module\((?!f\"\.)", text)}
    assert by_name == {"engine/trt.py", "engine/cuda.py", "export/make_places.py"}
    named = {m for m, text in found.items() if '"tensorrt_rtx_bindings"' in text}
    assert named == {"engine/trt.py", "doctor.py"}  # doctor looks whether it is there, and does not load it


def test_imports_go_one_way():
    wrong = []
    for module in MODULES:
        for target in inside(module):
            if layer_of(target) > layer_of(module):
                wrong.append(f"{module} imports {target}")
    assert not wrong, f"upwards, or a new module of a low layer that LAYERS does not name yet: {wrong}"


def test_no_circles():
    """No module needs itself while it is loaded."""
    graph = {module: {t for t in inside(module) if t != module and not t.endswith("__init__.py")} for module in MODULES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"a circle: {' -> '.join([*trail[trail.index(module) :], module])}"
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_nothing_imports_the_command_line():
    others = [m for m in MODULES if not m.startswith("cli/") and m != "__main__.py"]
    assert [m for m in others if any(t.startswith("cli/") for t in inside(m))] == []


def test_the_test_sees_violations(tmp_path, monkeypatch):
    """A rule that finds nothing proves nothing."""
    (tmp_path / "graph").mkdir()
    (tmp_path / "errors.py").write_text("import torch\nfrom .cli import main\n")
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli/__init__.py").write_text("main = 1\n")
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    monkeypatch.setitem(globals(), "MODULES", ["errors.py", "cli/__init__.py"])
    for check, word in ((lambda: test_one_door("torch"), "torch"), (test_imports_go_one_way, "cli/__init__.py")):
        with pytest.raises(AssertionError, match=word):
            check()
