"""The import rules of docs/reference/architecture.md, read from the import statements of every module, lazy imports included."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from branches import folded

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "detrt"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# Packages and top-level modules in import order: each imports only from rows above its own, and freely within its row's
# own package. Names in one row do not import each other.
ORDER: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("class_names", "files", "system"),
    ("text",),
    ("spec",),
    ("tasks",),
    ("detections",),
    ("data", "graph"),
    ("bundle",),
    ("models",),
    ("backends",),
    ("export", "detector"),
    ("evaluation",),
    ("precision", "jobs"),
    ("pipeline", "bench"),
    ("serve",),
    ("cli",),
    ("__init__", "__main__"),  # the public names and the entry point
)
# Arrows against that order or inside a row, each with its reason; docs/reference/architecture.md names the same ones.
EXCEPTIONS: dict[tuple[str, str], str] = {}
MAX_PACKAGES, MAX_TOP_LEVEL, MAX_EXCEPTIONS = 13, 11, 3

# Heavy library -> the files and folders that may import it: its one door. Everything else asks the door.
DOORS: dict[str, tuple[str, ...]] = {
    "torch": (
        "models/",
        "export/",
        "backends/torch/session.py",
        "backends/torch/threads.py",
        "backends/inductor/",
        "backends/gpu/",
        "backends/onnxruntime/gpu.py",
        "backends/tensorrt/gpu.py",
        "bench/",
    ),
    "transformers": ("models/", "export/", "backends/torch/session.py", "bench/"),
    "triton": ("*_triton*.py", "models/ops/msda_launch.py"),
    "onnx": ("graph/", "precision/", "export/", "backends/tensorrt/v8/write_out.py"),
    "onnxslim": ("graph/slim.py",),
    "onnxruntime": ("backends/onnxruntime/session.py",),
    "openvino": ("backends/openvino/runtime.py",),
    "tokenizers": ("text/tokenizer.py", "models/"),
    "tensorrt": (),
    "tensorrt_rtx_bindings": (),
    "av": ("data/video.py",),
    "cv2": ("data/live.py",),
    "trackers": ("data/track.py",),
    "nvidia": ("backends/gpu/decoder.py",),
    "matplotlib": ("data/figure.py", "bench/plot.py"),
    "cuda": ("backends/tensorrt/cuda.py",),
    "ray": ("jobs/ray/actors.py",),
    "pyarrow": ("jobs/ray/parquet.py",),
    "fsspec": ("jobs/ray/storage.py",),
    "fastapi": ("serve/",),
    "starlette": ("serve/",),
    "pydantic": ("serve/",),
    "python_multipart": ("serve/",),
    "uvicorn": ("serve/server.py", "serve/protocol.py"),
    "uvloop": ("serve/server.py",),
    "prometheus_client": ("serve/metrics.py", "serve/stream_metrics.py"),
}
# Libraries that a command must not need before it uses them: imported inside functions only.
# What a command, a session or a job loads before it knows what it needs: none of these libraries. The exceptions are named.
LIGHT = (
    "__init__",
    "bundle",
    "cli",
    "data",
    "detector",
    "errors",
    "evaluation",
    "files",
    "jobs",
    "pipeline",
    "spec",
    "system",
    "text",
)
HEAVY = frozenset(
    (
        "torch",
        "transformers",
        "triton",
        "onnx",
        "onnxruntime",
        "openvino",
        "tokenizers",
        "fastapi",
        "uvicorn",
        "matplotlib",
        "ray",
        "av",
    )
)
LAZY = ("onnxruntime", "openvino", "av", "nvidia", "matplotlib", "ray", "pyarrow", "fsspec", "uvloop", "onnxslim")


ADDRESS = re.compile(r"detrt(?:\.\w+)+(?::\w+)?")


def _by_text(node: ast.AST) -> tuple[int, str, str] | None:
    """(level, name, "call", "text" or "row") of a text that is an import: import_module("a.b"), a row's "detrt.a.b:NAME", and relative
    ones, whose call has `__package__` or `__name__` beside them."""
    if isinstance(node, ast.Call) and (given := [*node.args, *(one.value for one in node.keywords)]):
        name = folded(given[0])
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        beside = any(isinstance(one, ast.Name) and one.id in ("__package__", "__name__") for one in given[1:])
        if name is not None and (called in ("import_module", "__import__") or (beside and name.startswith("."))):
            bare = name.lstrip(".")
            return len(name) - len(bare), bare, "call"
    text = folded(node)
    if text is None or not ADDRESS.fullmatch(text):
        return None
    name, colon, _ = text.partition(":")
    return 0, name, "row" if colon else "text"


@cache
def statements(path: Path) -> list[tuple[ast.AST, bool]]:
    """(import, whether it runs when the module is loaded): statements, and texts that name a module. Blocks for type checkers are left
    out."""
    found: list[tuple[ast.AST, bool]] = []

    def walk(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                found.append((child, top))
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                walk(ast.Module(child.orelse, []), top)
            else:
                if _by_text(child) is not None:
                    found.append((child, top))
                walk(child, top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    walk(ast.parse(path.read_text("utf-8")), True)
    return found


@cache
def _targets(package: Path, module: str) -> list[tuple[tuple[str, ...], bool, bool]]:
    """(dotted name as parts, whether at load, whether in a row) of everything that a module imports, however it is written: relative, absolute, and
    by a text. Names of this package start with "detrt"; those inside it are resolved."""
    path = package / module
    here = ("detrt", *Path(module).parent.parts)

    def resolved(level: int, name: str | None) -> tuple[str, ...]:
        parts = tuple(name.split(".")) if name else ()
        return (*here[: len(here) - level + 1], *parts) if level else parts

    found = []
    for node, top in statements(path):
        if isinstance(node, ast.Import):
            found += [(tuple(alias.name.split(".")), top, False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolved(node.level, node.module)
            # of another library its own name says enough; of this one each name may be a module
            names = [(*base, alias.name) for alias in node.names] if base[:1] == ("detrt",) else [base]
            found += [(name, top, False) for name in names]
        else:
            level, name, form = _by_text(node)
            parts = resolved(level, name)
            if form == "call" or _file_of(package, parts[:2]) is not None:
                found.append((parts, top and form == "call", form == "row"))
    return found


def _file_of(package: Path, parts: tuple[str, ...]) -> Path | None:
    path = package.joinpath(*parts[1:])
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def outside(module: str) -> list[tuple[str, bool]]:
    """Top-level packages of other libraries that a module imports, and whether at load."""
    return [(parts[0], top) for parts, top, _ in _targets(PACKAGE, module) if parts[0] != "detrt"]


def inside(module: str, at_load: bool = False, rows: bool = True) -> list[str]:
    """Modules of detrt that a module imports, when it is loaded or later, as paths; rows: or names in a row, "detrt.a.b:NAME"."""
    return _inside(PACKAGE, module, at_load, rows)


@cache
def _inside(package: Path, module: str, at_load: bool, rows: bool) -> list[str]:
    found = []
    for parts, top, in_row in _targets(package, module):
        if parts[0] != "detrt" or (at_load and not top) or (in_row and not rows):
            continue
        for length in range(len(parts), 0, -1):
            target = _file_of(package, parts[:length])
            if target is not None:
                found.append(target.relative_to(package).as_posix())
                break
    return found


def unit(module: str) -> str:
    """The package or top-level module that a file belongs to."""
    return module.partition("/")[0].removesuffix(".py")


def arrows() -> dict[tuple[str, str], list[str]]:
    """(unit, unit) -> the imports from the first to the second."""
    found = defaultdict(list)
    for module in MODULES:
        for target in inside(module):
            if unit(target) != unit(module):
                found[unit(module), unit(target)].append(f"{module} imports {target}")
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Circles of a graph, each once."""
    found, done = [], set()

    def visit(node: str, trail: list[str]) -> None:
        if node in trail:
            found.append([*trail[trail.index(node) :], node])
        elif node not in done:
            for target in sorted(graph.get(node, ())):
                visit(target, [*trail, node])
            done.add(node)

    for node in sorted(graph):
        visit(node, [])
    return found


def test_every_unit_has_a_place():
    units = {unit(m) for m in MODULES}
    listed = [name for row in ORDER for name in row]
    assert units == set(listed), f"in the tree only: {units - set(listed)}; in ORDER only: {set(listed) - units}"
    assert len(listed) == len(set(listed))
    packages = {u for u in units if (PACKAGE / u).is_dir()}
    assert len(packages) <= MAX_PACKAGES and len(units - packages) <= MAX_TOP_LEVEL


def test_imports_go_one_way():
    row = {name: n for n, names in enumerate(ORDER) for name in names}
    wrong = {pair: found for pair, found in arrows().items() if row[pair[1]] >= row[pair[0]] and pair not in EXCEPTIONS}
    assert not wrong, wrong


def test_exceptions_are_needed():
    assert len(EXCEPTIONS) <= MAX_EXCEPTIONS
    assert set(EXCEPTIONS) <= set(arrows()), "an exception that nothing uses any more"


def test_no_circles_of_packages():
    graph = defaultdict(set)
    for source, target in arrows():
        graph[source].add(target)
    assert circles(graph) == []


def test_no_circles_of_modules():
    """Lazy imports count; a row, which is data, may name what reads it. A package's __init__ hands on names of its own modules, so imports
    of it are not arrows here."""
    graph = {
        m: {t for t in inside(m, rows=False) if t != m and not t.endswith("__init__.py")}
        for m in MODULES
        if not m.endswith("__init__.py")
    }
    assert circles(graph) == []


@pytest.mark.parametrize("package", DOORS)
def test_one_door(package):
    def allowed(module: str) -> bool:
        return any(module.startswith(d) if d.endswith("/") else Path(module).match(d) for d in DOORS[package])

    found = [(module, top) for module in MODULES for name, top in outside(module) if name == package]
    assert not [module for module, _ in found if not allowed(module)]
    assert package not in LAZY or not [module for module, top in found if top]


def loads(module: str, seen: set[str]) -> set[str]:
    """Libraries that are imported when a module is loaded, its own imports and their packages included."""
    if module in seen:
        return set()
    seen.add(module)
    found = {name for name, top in outside(module) if top}
    targets = inside(module, at_load=True)
    packages = [
        f"{parent.as_posix()}/__init__.py" for target in (module, *targets) for parent in Path(target).parents if parent.name
    ]
    for target in (*targets, *(package for package in packages if (PACKAGE / package).is_file())):
        found |= loads(target, seen)
    return found


def test_light_modules_load_nothing_heavy():
    """A machine that only runs bundles has neither torch nor onnx, and one command must not need what another does."""
    light = [m for m in MODULES if unit(m) in LIGHT] + [
        "backends/open.py",
        "backends/base.py",
        "backends/prompted.py",
        "serve/server.py",
    ]
    light += ["backends/onnxruntime/session.py", "backends/tensorrt/build.py", "backends/tensorrt/session.py"]
    wrong = {m: found for m in light if (found := loads(m, set()) & HEAVY)}
    assert not wrong, wrong


def test_imports_by_name():
    """What import statements do not show: TensorRT and CUDA each have their one module, and so has transformers' code."""
    found = {m: (PACKAGE / m).read_text("utf-8") for m in MODULES}
    by_name = {m for m, text in found.items() if re.search(r"import_module\((?!f\"\.)", text)}
    # target.py: what opens a backend, by its row
    assert by_name == {
        "backends/target.py",
        "backends/tensorrt/bindings.py",
        "backends/tensorrt/cuda.py",
        "models/write_fingerprints.py",
    }
    named = {m for m, text in found.items() if '"tensorrt_rtx_bindings"' in text}
    # doctor looks whether it is there, and messages name its extra; neither loads it.
    assert named == {"backends/tensorrt/bindings.py", "system.py", "errors.py"}


UPWARD = {
    "from .. import": "from ..cli import main\n",
    "from ... import module": "from .. import cli\n",
    "from detrt.x import": "from detrt.cli import main\n",
    "from detrt.x.y import": "from detrt.cli.a import f\n",
    "from detrt import module": "from detrt import cli\n",
    "from detrt import name": "from detrt import Detector\n",
    "import detrt.x": "import detrt.cli\n",
    "import detrt.x as": "import detrt.cli.a as a\n",
    "import detrt": "import detrt\n",
    "in a function": "def f():\n    from detrt.cli import main\n",
    "import_module, absolute": "import importlib\nimportlib.import_module('detrt.cli.a')\n",
    "import_module, relative": "from importlib import import_module\nimport_module('..cli', __package__)\n",
    "__import__": "__import__('detrt.cli')\n",
    "__import__ from a list": "__import__('detrt', fromlist=['cli'])\n",
    "import_module by its keyword": "import importlib\nimportlib.import_module(name='detrt.cli')\n",
    "import_module under another name": "from importlib import import_module as load\nload('..cli', __package__)\n",
    "import_module of parts": "import importlib\nimportlib.import_module('detrt' + '.cli')\n",
    "import_module of joined parts": "import importlib\nimportlib.import_module('.'.join(('detrt', 'cli')))\n",
    "sys.modules": "import sys\nsys.modules['detrt.cli']\n",
    "pkgutil": "import pkgutil\npkgutil.resolve_name('detrt.cli.a:f')\n",
    "a row's address": "OPENER = 'detrt.cli.a:OPENER'\n",
    "a name for an address": "HERE = 'detrt.cli'\ndef f():\n    import importlib\n    importlib.import_module(HERE)\n",
    "beside type checkers": "if TYPE_CHECKING:\n    pass\nelse:\n    from detrt.cli import main\n",
    "typing.TYPE_CHECKING or": "if TYPE_CHECKING or True:\n    from detrt.cli import main\n",
    "in a try": "try:\n    import x\nexcept ImportError:\n    from ..cli import main\n",
    "in a class": "class A:\n    from ..cli import main\n",
    "in a lambda": "f = lambda: __import__('detrt.cli')\n",
    "star": "from ..cli import *\n",
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A package of the given files in place of detrt."""

    def plant(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
        monkeypatch.setitem(globals(), "MODULES", list(files))

    return plant


@pytest.mark.parametrize("form", UPWARD)
def test_an_upward_import_is_seen_in_every_form(planted, form):
    """A rule that finds nothing proves nothing."""
    planted({"__init__.py": "", "cli/__init__.py": "", "cli/a.py": "", "data/__init__.py": "", "data/b.py": UPWARD[form]})
    with pytest.raises(AssertionError, match=r"data/b\.py imports"):
        test_imports_go_one_way()


def test_the_test_sees_violations(planted):
    planted(
        {
            "errors.py": "import torch\ndef f():\n    from .cli import main\n",
            "cli/__init__.py": "",
            "cli/a.py": "def f():\n    from detrt.cli.b import g\n",
            "cli/b.py": "from .a import f\nfrom ..errors import f\n",
        }
    )
    for check in (
        lambda: test_one_door("torch"),
        test_imports_go_one_way,
        test_no_circles_of_packages,
        test_no_circles_of_modules,
    ):
        with pytest.raises(AssertionError):
            check()
