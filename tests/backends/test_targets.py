"""A backend is one folder and one line: a toy one is listed, opened and refused like the others, and no list of cases names any."""

from __future__ import annotations

import ast
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from branches import mentions
from onnx_models import make_model, make_spec

from detrt.backends import targets
from detrt.backends.open import kind_of, open_session
from detrt.bundle import Bundle, BundleFile, Provenance
from detrt.errors import EngineError, SessionError, SpecError
from detrt.files import sha256_of

PACKAGE = Path(targets.__file__).parents[1]
INIT = """
from detrt.backends.target import Build, Target

TARGET = Target(
    name="toy", kind="toy", words="a toy model", opener=f"{__name__}.opening:OPENER", suffixes=(".toy",), builder=f"{__name__}.opening:BUILDER",
    config=f"{__name__}.opening:ToyConfig", devices=("cpu", "abacus"),
    tuning=("performance",), title="Toy", builds=(Build("toys"),),
)
"""
OPENING = """
from detrt.backends.base import BaseSession
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.building import Builder
from detrt.backends.search import Opener
from detrt.errors import EngineError, SessionError


class ToyOpener(Opener):
    def open_file(self, path, options):
        session = OnnxSession(path.with_name("model.onnx"))
        session.add_note(f"a toy on {options.device}")
        return session

    def choose(self, search):
        for entry in search.bundle.of_kind("toy"):
            path = search.bundle.checked_path(entry)
            if path.read_bytes() != b"broken":
                return self.open_file(path, search.options), entry
            search.reasons.append(f"{entry.path}: broken")
        return None

    def refusal(self, search, row):
        return SessionError(f"no toy: {'; '.join(search.reasons)}")


class ToyConfig:
    def __init__(self, content=b"toy"):
        self.content = content


class ToyBuilder(Builder):
    def check(self, configs, plan):
        if any(not config.content for config in configs):
            raise EngineError("an empty toy")

    def build(self, configs, plan, work):
        for config in configs:
            (work.folder / "model.toy").write_bytes(config.content)
            work.add("model.toy", "toy")
            work.done("toy", 0.0, len(config.content), "made")


OPENER, BUILDER = ToyOpener(), ToyBuilder()
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The folder of a toy backend, and its line in the list."""
    folder = tmp_path / "code" / "toy_backend"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(INIT)
    (folder / "opening.py").write_text(OPENING)
    monkeypatch.syspath_prepend(folder.parent)
    import toy_backend

    assert "toy_backend.opening" not in sys.modules, "a row is made without what runs it"
    monkeypatch.setattr(targets, "TARGETS", (toy_backend.TARGET, *targets.TARGETS))
    yield toy_backend.TARGET
    for name in ("toy_backend", "toy_backend.opening"):
        sys.modules.pop(name, None)


@pytest.fixture
def bundle(tmp_path):
    def write(content=b"toy"):
        folder = tmp_path / "bundle"
        folder.mkdir(exist_ok=True)
        (folder / "model.onnx").write_bytes(make_model(make_spec()))
        (folder / "model.toy").write_bytes(content)
        entries = [
            BundleFile(kind, f"model.{kind}", sha256_of(folder / f"model.{kind}"), (folder / f"model.{kind}").stat().st_size)
            for kind in ("onnx", "toy")
        ]
        Bundle(folder, make_spec(), Provenance("toy", "0" * 64, 1), tuple(entries)).save()
        return folder

    return write


def test_a_toy_backend_opens_its_files(toy, bundle):
    folder = bundle()
    assert kind_of(folder / "model.toy") == "toy" and "toy" in targets.backend_names()
    for ref, options in (
        (folder, {}),
        (folder, {"backend": "toy"}),
        (folder, {"device": "abacus:0"}),
        (folder / "model.toy", {}),
    ):
        with open_session(ref, **options) as session:
            assert session.info.note == f"a toy on {options.get('device')}"
            assert session.run({"pixel_values": np.zeros((1, 3, 8, 12), np.uint8)})
    with open_session(folder, backend="onnxruntime") as session:
        assert session.info.note == ""
    with open_session(folder, spec=make_spec()) as session:
        assert session.info.note == ""  # a spec is for the ONNX file


def test_a_toy_backend_is_refused_like_the_others(toy, bundle):
    folder = bundle(b"broken")
    with open_session(folder) as session:
        assert "model.toy: broken" in session.info.note and session.info.name == "onnxruntime-cpu"
    for options in ({"backend": "toy"}, {"device": "abacus"}):
        with pytest.raises(SessionError, match="no toy: model.toy: broken"):
            open_session(folder, **options)
    with pytest.raises(SessionError, match="is a toy model, which runs with toy; got backend 'onnxruntime'"):
        open_session(folder / "model.toy", backend="onnxruntime")
    with pytest.raises(SpecError, match="is a toy model and has its own"):
        open_session(folder / "model.toy", spec=make_spec())


def test_a_toy_backend_is_built(toy, tmp_path):
    from toy_backend.opening import ToyConfig

    from detrt.pipeline import build

    (tmp_path / "model.onnx").write_bytes(make_model(make_spec()))
    with pytest.raises(EngineError, match="an empty toy"):
        build(tmp_path / "model.onnx", tmp_path / "out", targets=[ToyConfig(b"")])
    assert not (tmp_path / "out").exists(), "a refusal comes before any work"
    with pytest.raises(EngineError, match="no backend builds from 3"):
        build(tmp_path / "model.onnx", tmp_path / "out", targets=[3])
    report = build(tmp_path / "model.onnx", tmp_path / "out", targets=[ToyConfig()])
    assert [stage.name for stage in report.stages] == ["copy", "toy"]
    assert [entry.kind for entry in report.bundle.files] == ["onnx", "toy"]
    with open_session(tmp_path / "out") as session:
        assert session.info.note == "a toy on None"


def test_targets_are_named_or_configured(toy, tmp_path):
    from detrt.backends.shared import SharedOptions, builds, configs_of, names_taking
    from detrt.pipeline import build

    assert list(builds()) == ["toys", "tensorrt-rtx", "tensorrt", "inductor", "openvino", "onnx"]
    assert [config.content for config in configs_of(SharedOptions(("toys", "onnx")))[:1]] == [b"toy"]
    assert [
        config.content for config in configs_of(SharedOptions(("toys",)), {"toy": lambda: toy.config_class()(b"chosen")})
    ] == [b"chosen"]
    assert names_taking("batch") == ("tensorrt-rtx", "tensorrt", "inductor")
    (tmp_path / "model.onnx").write_bytes(make_model(make_spec()))
    for names, words in (
        (["lego"], "must be toys, tensorrt-rtx.* or auto.*got 'lego'"),
        (["onnxruntime"], "onnxruntime` is now .*onnx"),
        (["auto", "toys"], "auto` chooses by itself"),
    ):
        with pytest.raises(EngineError, match=words):
            build(tmp_path / "model.onnx", tmp_path / "out", targets=names)
    with pytest.raises(EngineError, match="several sizes"):
        SharedOptions(("toys",), sizes=((1, 2), (3, 4)))
    with pytest.raises(EngineError, match="height=1,2,3` is a range"):
        SharedOptions(("toys",), height=(1, 2, 3))
    report = build(tmp_path / "model.onnx", tmp_path / "out", targets=["toys"])
    assert [entry.kind for entry in report.bundle.files] == ["onnx", "toy"]


def test_rows_are_whole():
    kinds = [target.kind for target in (*targets.TARGETS, targets.CHECKPOINT)]
    suffixes = [suffix for target in targets.TARGETS for suffix in target.suffixes]
    names = [name for target in (*targets.TARGETS, targets.CHECKPOINT) for name in target.names]
    for values in (kinds, suffixes, names):
        assert len(set(values)) == len(values)
    assert set(targets.backend_names()) == {"auto", *names}
    for target in (*targets.TARGETS, targets.CHECKPOINT):
        assert target.opened_by() and target.words and target.title
        if target.tuning:
            assert {one.name for one in fields(target.tuning_class())} == set(target.tuning)


def test_rows_import_nothing_that_runs_them():
    import subprocess

    code = (
        "import sys, detrt.backends.targets; heavy = 'torch onnx onnxruntime transformers openvino tensorrt tensorrt_rtx_bindings'; "
        "print([name for name in heavy.split() if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


FOLDERS = {target.opener.split(".")[2] for target in (*targets.TARGETS, targets.CHECKPOINT)}  # each names itself
# Not names of backends: packages and their versions, and what no text is.
OTHER_NAMES = {"system.py", "errors.py", "files.py", "models/source.py", "evaluation/html.py", "cli/show.py"}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        if module.as_posix() not in OTHER_NAMES and not (module.parts[0] == "backends" and module.parts[1] in FOLDERS):
            yield path


ROWS = [(row.names, (row.kind, *row.suffixes), [build.name for build in row.builds]) for row in targets.TARGETS]
# "onnx" is the graph, which every bundle has, and "engine" also what any backend built.
NAMES = {name for row in ROWS for part in row for name in part} - {"onnx", ".onnx", "engine"}


# Where the public names are, columns of measurements, names of other tools, and files of other programs.
OTHER_MEANINGS = {
    ("__init__.py", "tensorrt"),
    ("bench/reference.py", "inductor"),
    ("cli/bench.py", "onnxruntime"),
    ("cli/report.py", "openvino"),
    ("cli/report.py", "tensorrt"),
    ("cli/spellings.py", "inductor"),
    ("cli/spellings.py", "tensorrt"),
    ("data/datasets.py", ".xml"),
    ("serve/deepstream.py", ".engine"),
}


def test_no_list_of_cases():
    """A backend is named in its folder alone."""
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in modules()}
    found = {(name, word) for name, tree in trees.items() for _, word in mentions(tree, NAMES)}
    assert found - OTHER_MEANINGS == set(), "a row says it: `targets.GRAPH`, or an attribute of `Target`"
    assert not OTHER_MEANINGS - found, "an exception that nothing uses any more"
    assert len(trees) > 150


def test_opening_and_building_import_no_backend():
    """Nor does the command; what a backend alone can do goes through its row."""
    names = ["pipeline.py", "bundle.py", *(path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "cli").glob("*.py"))]
    names += [f"backends/{name}.py" for name in ("base", "open", "search", "shared", "target", "building")]
    names += [f"serve/{name}.py" for name in ("config", "messages", "worker", "triton_config")]
    for name in names:
        for node in ast.walk(ast.parse((PACKAGE / name).read_text("utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                parts = {
                    part
                    for one in (getattr(node, "module", ""), *(a.name for a in node.names))
                    for part in (one or "").split(".")
                }
                assert not parts & FOLDERS, f"{name}:{node.lineno}"


@pytest.mark.parametrize(
    "line",
    [
        'x == "toys"',
        'x in ("a", "toys")',
        '{"toys": 1}',
        "dict(toys=1)[x]",
        'd["toys"]',
        'd.get("toys")',
        'b.of_kind("toys")',
        'x.startswith("toys")',
        'TOY = "toys"',
        'TOY: str = "toys"',
        'class Backend(Enum):\n    TOY = "toys"\nx is Backend.TOY',
        'OWN = frozenset(("toys", "lego"))\nif x in OWN: pass',
        'match x:\n    case "toys" | "a": pass',
        'match x:\n    case {"toys": y}: pass',
        'open_session(ref, backend="toys")',
        'def f(x, own="toys"):\n    return x == own',
        'for own in ("lego", "toys"):\n    x = own == backend',
        'x = "TOYS".lower() == backend',
        'x = "to" + "ys" == backend',
        'x = "".join(["to", "ys"]) == backend',
        'x = re.match("lego|toys$", backend)',
        'x = f"{y}.toys"',
        "def toys(self): pass",
        'x = {"lego", "toys"} & {backend}',
        'x = operator.itemgetter("toys")(rows)',
    ],
)
def test_a_planted_case_is_found(line):
    assert mentions(ast.parse(line), {"toys"})
