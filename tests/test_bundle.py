from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from runtime_cases import make_spec

from detrt import files
from detrt.bundle import (
    MANIFEST,
    Bundle,
    BundleFile,
    EngineFacts,
    Provenance,
    files_with,
    open_whole,
    read_sidecar,
    sidecar_path,
    write_sidecar,
    writing_bundle,
)
from detrt.errors import EngineError, OutputError, SpecError

FACTS = EngineFacts(
    "tensorrt-rtx",
    "1.2.3",
    (86, 89),
    "fp32",
    {"pixel_values": {"min": [1], "opt": [2], "max": [4]}},
    "ab" * 32,
    7,
    1.5,
)


@pytest.fixture
def bundle(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"onnx")
    (tmp_path / "model.engine").write_bytes(b"engine")
    rows = tuple(
        BundleFile(kind, f"model.{kind}", files.sha256_of(tmp_path / f"model.{kind}"), size, facts)
        for kind, size, facts in (("onnx", 4, None), ("engine", 6, FACTS))
    )
    made = Bundle(tmp_path, make_spec(), Provenance("hf:a/b", "cd", 12, {"opset": 17}, {"torch": "2"}), rows)
    assert made.save() == tmp_path / MANIFEST
    return made


def test_engines_of_before_the_first_release_are_refused(bundle):
    path = bundle.folder / MANIFEST
    text = path.read_text(encoding="utf-8")
    assert text.count('"runtime_version"') == 1
    path.write_text(text.replace('"runtime_version"', '"tensorrt_version"'), encoding="utf-8")
    with pytest.raises(SpecError, match=r"tensorrt_version.*`build\(.*/model.onnx, output=.*, targets=tensorrt-rtx\)`"):
        Bundle.open(bundle.folder)


def test_round_trip(bundle):
    found = Bundle.open(bundle.folder)
    assert found == bundle
    assert [entry.path for entry in found.of_kind("engine")] == ["model.engine"]
    assert found.files[1].engine.compute_capabilities == (86, 89)
    assert found.checked_path(found.files[0]) == bundle.folder / "model.onnx"


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"onn", ["3 bytes", "says 4"]), (b"ONNX", ["SHA-256"]), (None, ["missing"])],
)
def test_files_are_checked(bundle, data, words):
    path = bundle.folder / "model.onnx"
    path.write_bytes(data) if data is not None else path.unlink()
    with pytest.raises(SpecError) as caught:
        bundle.checked_path(bundle.files[0])
    assert all(word in str(caught.value) for word in [*words, "model.onnx"])


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("spec"), ["'spec'"]),
        (lambda d: d.update(schema=9), ["schema 9"]),
        (lambda d: d.update(files=3), ["damaged"]),
        (lambda d: d.update(files=[5]), ["damaged"]),
        (lambda d: d["files"][0].pop("sha256"), ["sha256"]),
        (lambda d: d["files"][0].update(size="x"), ["size", "'x'"]),
        (lambda d: d["files"][0].update(path="../secret"), ["../secret", "refused"]),
        (lambda d: d["files"][0].update(path="/etc/passwd"), ["/etc/passwd"]),
        (lambda d: d["files"][0].update(path=7), ["path", "7"]),
        (lambda d: d["files"][0].update(path="a\0b"), ["'a\\x00b'", "cannot be", "refused"]),
        *(
            (lambda d, name=name: d["files"][0].update(path=name), [f"'{name}'", "cannot be", "refused"])
            for name in ("", ".", "./")
        ),
        (lambda d: d["files"][0].update(path="\ud800"), ["'\\ud800'", "cannot be", "refused"]),
        (lambda d: d["files"][0].update(path="sub/" + "n" * 256), ["cannot be", "refused"]),
        (lambda d: d["spec"]["input"].update(rescale=10**400), ["rescale", "1000"]),
        (lambda d: d["spec"]["decode"].update(nms_iou=10**400), ["nms_iou", "1000"]),
        (lambda d: d["files"][0].update(size=float("inf")), ["size", "inf"]),
        (lambda d: d["files"][1]["engine"].update(precision=16), ["precision", "16"]),
        (lambda d: d["files"][1]["engine"].update(compute_capabilities=["8.9"]), ["8.9"]),
        (lambda d: d["files"][1]["engine"].update(profile=None), ["profile"]),
        (lambda d: d["files"][1]["engine"].update(profile={"pixel_values": None}), ["profile", "None"]),
        (lambda d: d["files"][1]["engine"]["profile"]["pixel_values"].pop("opt"), ["profile", "'max'"]),
        (lambda d: d["files"][1]["engine"]["profile"]["pixel_values"].update(min=["1"]), ["profile", "'1'"]),
        (lambda d: d["files"][1]["engine"].update(inputs=[{"name": "x", "shape": [1]}]), ["inputs", "'x'"]),
        (lambda d: d["files"][1]["engine"].update(outputs=[{"name": [], "dtype": "int64", "shape": [1]}]), ["outputs", "[]"]),
        (
            lambda d: d["files"][1]["engine"].update(outputs=[{"name": "x", "dtype": "int64", "shape": [None]}]),
            ["outputs", "None"],
        ),
        (lambda d: d["files"][1]["engine"].update(outputs=["logits"]), ["outputs", "'logits'"]),
        (lambda d: d["files"][1]["engine"].update(kernels={"all": "many"}), ["kernels", "'many'"]),
        (lambda d: d["files"][1]["engine"].update(environment={"NVIDIA_TF32_OVERRIDE": 0}), ["environment", "0"]),
        (lambda d: d["files"][1]["engine"].update(environment={"NVIDIA_TF32_OVERRIDE": "\0"}), ["environment", "x00"]),
        (lambda d: d["files"][1]["engine"].update(options={"plugins": 1}), ["options", "1"]),
        (lambda d: d["files"][1]["engine"].update(options={"plugins": "lib.so"}), ["options", "lib.so"]),
        (lambda d: d["provenance"].update(source=None), ["source", "None"]),
        (lambda d: d["files"][1]["engine"].update(colour=1), ["colour"]),
        (lambda d: d["files"][1]["engine"].pop("target"), ["target"]),
        (lambda d: d["files"][1].update(engine="fast"), ["'fast'"]),
        (lambda d: d.update(provenance={"x": 1}), ["damaged"]),
        (lambda d: d.update(provenance=None), ["damaged"]),
        (lambda d: d["spec"]["input"].update(resize="crop"), ["'crop'"]),
    ],
)
def test_damaged_manifest(bundle, change, words):
    path = bundle.folder / MANIFEST
    edit(path, change)
    with pytest.raises(SpecError) as caught:
        Bundle.open(bundle.folder)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(("text", "words"), [("{", ["JSON"]), ("[]", ["list"]), (None, ["detrt build"])])
def test_no_manifest(tmp_path, text, words):
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(SpecError) as caught:
        Bundle.open(tmp_path)
    assert all(word in str(caught.value) for word in [*words, str(tmp_path)])


def test_sidecar(tmp_path):
    engine = tmp_path / "model.engine"
    with pytest.raises(EngineError, match=r"no engine '.*model.engine'"):
        read_sidecar(engine)
    engine.write_bytes(b"engine")
    with pytest.raises(EngineError, match=r"no sidecar 'model.engine.json'"):
        read_sidecar(engine)
    assert write_sidecar(engine, make_spec(), FACTS) == sidecar_path(engine)
    assert read_sidecar(engine) == (make_spec(), FACTS)
    engine.write_bytes(b"engine, another")
    with pytest.raises(EngineError, match=r"15 bytes, its manifest says 6"):
        read_sidecar(engine)
    engine.write_bytes(b"engine")
    edit(sidecar_path(engine), lambda d: d.pop("spec"))
    with pytest.raises(EngineError, match="'spec'"):
        read_sidecar(engine)
    sidecar_path(engine).write_text("{")
    with pytest.raises((EngineError, SpecError), match="JSON"):
        read_sidecar(engine)


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def write_next(bundle, folder):
    """In place of `bundle`: another graph, another engine, and no model.engine any more."""
    (folder / "model.onnx").write_bytes(b"next")
    (folder / "other.engine").write_bytes(b"other!")
    rows = [BundleFile("onnx", "model.onnx", files.sha256_of(folder / "model.onnx"), 4)]
    rows += [BundleFile("engine", "other.engine", files.sha256_of(folder / "other.engine"), 6, FACTS)]
    Bundle(folder, bundle.spec, bundle.provenance, tuple(rows)).save()


def test_files_of_an_earlier_bundle_give_way(bundle):
    (bundle.folder / "model.engine.json").write_text("{}")
    (bundle.folder / "notes").mkdir()
    (bundle.folder / "notes" / "model.engine").write_text("of the user")
    with writing_bundle(bundle.folder) as folder:
        write_next(bundle, folder)
    assert sorted(contents(bundle.folder)) == [MANIFEST, "model.onnx", "notes/model.engine", "other.engine"]
    found = Bundle.open(bundle.folder)
    assert [found.checked_path(entry).name for entry in found.files] == ["model.onnx", "other.engine"]


OLD, NEW = ({"model.onnx": b"onnx", "model.engine": b"engine"}, {"model.onnx": b"next", "other.engine": b"other!"})


def listed(folder):
    """Name -> content of the files that the bundle lists, each compared with the manifest."""
    found = Bundle.open(folder)
    return {Path(entry.path).name: found.checked_path(entry).read_bytes() for entry in found.files}


KILLED = """
import os, sys
from pathlib import Path
sys.path[:0] = [sys.argv[3], sys.argv[4]]
from test_bundle import Bundle, write_next, writing_bundle
left = int(sys.argv[2])

def dying(call):
    def wrapped(*arguments, **options):
        global left
        left -= 1
        if not left:
            os._exit(9)
        return call(*arguments, **options)
    return wrapped

folder = Path(sys.argv[1])
old = Bundle.open(folder)
for name in ("replace", "rename", "link", "unlink", "rmdir", "mkdir", "fsync"):
    setattr(os, name, dying(getattr(os, name)))
with writing_bundle(folder) as fresh:
    write_next(old, fresh)
print(left)
"""


def replace_and_die(bundle, at):
    """Replace `bundle` in a process that ends at its call number `at` of those that change the disk; its exit code and output."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", KILLED, str(bundle.folder), str(at), str(here), str(here / "support")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 9), done.stderr
    return done


def check_survival(bundle, at):
    """The old bundle or the new one is there, and the next replacement leaves nothing but its own files."""
    done = replace_and_die(bundle, at)
    found = listed(bundle.folder)
    assert found in (OLD, NEW), f"killed at call {at}"
    with writing_bundle(bundle.folder) as folder:
        write_next(bundle, folder)
    assert listed(bundle.folder) == NEW
    assert sorted(contents(bundle.folder)) == [MANIFEST, "model.onnx", "other.engine"], f"killed at call {at}"
    assert sorted(os.listdir(bundle.folder)) == [MANIFEST, "model.onnx", "other.engine"]
    return done.returncode, found


@pytest.mark.parametrize("at", [5, 12, 16, 19, 22, 26, 30, 36])
def test_a_killed_build_leaves_one_whole_bundle(bundle, at):
    check_survival(bundle, at)


@pytest.mark.slow
def test_a_build_killed_at_each_call_leaves_one_whole_bundle(bundle):
    outcomes = []
    for at in range(1, 500):
        for path in bundle.folder.iterdir():
            files.remove(path)
        for name, content in OLD.items():
            (bundle.folder / name).write_bytes(content)
        bundle.save()
        code, found = check_survival(bundle, at)
        if code == 0:
            break
        outcomes.append(found)
    assert outcomes[0] == OLD and outcomes[-1] == NEW and len(outcomes) > 30
    assert outcomes == sorted(outcomes, key=lambda one: one == NEW)  # one moment separates the two


@pytest.mark.parametrize("failing", range(1, 8))
def test_a_stopped_build_leaves_one_whole_bundle(bundle, failing, monkeypatch):
    rename, calls = files.os.replace, []

    def stop(source, target):
        calls.append(target)
        if len(calls) == failing:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr("os.replace", stop)
    with contextlib.suppress(KeyboardInterrupt), writing_bundle(bundle.folder) as folder:
        write_next(bundle, folder)
    assert listed(bundle.folder) in (OLD, NEW)


def test_a_living_build_is_not_removed(bundle):
    with writing_bundle(bundle.folder) as first:
        with writing_bundle(bundle.folder) as second:
            write_next(bundle, second)
        assert first.is_dir()
        write_next(bundle, first)
    assert listed(bundle.folder) == NEW


@pytest.mark.parametrize("exists", [False, True], ids=["new", "empty"])
def test_a_second_build_of_a_new_bundle_is_refused_before_its_work(bundle, exists, tmp_path_factory):
    """It was refused after it; in an empty folder it replaced the bundle of the first."""
    new = tmp_path_factory.mktemp("builds") / "new"
    if exists:
        new.mkdir()
    with writing_bundle(new) as first:
        with (
            pytest.raises(OutputError, match="another build is making the bundle .*; wait until it has ended"),
            writing_bundle(new),
        ):
            pytest.fail("its work began")
        write_next(bundle, first)
    assert listed(new) == NEW


@pytest.mark.parametrize("exists", [False, True], ids=["new", "empty"])
def test_a_new_bundle_is_not_replaced_by_a_build_that_could_not_see_the_first(bundle, exists, monkeypatch, tmp_path_factory):
    """As on a file system without locks."""
    new = tmp_path_factory.mktemp("builds") / "new"
    if exists:
        new.mkdir()
    monkeypatch.setattr(files, "remove_dead", lambda *_: False)
    with pytest.raises(OutputError, match="another build made the bundle .* meanwhile"), writing_bundle(new) as second:
        write_next(bundle, second)
        (second / "own.txt").write_text("second")
        shutil.copytree(bundle.folder, new, dirs_exist_ok=True)
    assert listed(new) == OLD and not (new / "own.txt").exists()


def test_a_bundle_that_another_build_changed_meanwhile(bundle):
    """A build that adds to a graph must not list a graph that is another one by now."""
    with pytest.raises(OutputError, match="changed by another build"), writing_bundle(bundle.folder) as adding:
        with writing_bundle(bundle.folder) as other:
            write_next(bundle, other)
        bundle_with = Bundle(adding, bundle.spec, bundle.provenance, bundle.files)
        bundle_with.save()
    assert listed(bundle.folder) == NEW


def test_a_reader_opens_one_bundle_while_it_is_replaced(bundle):
    class Parts:
        def __init__(self, found):
            self.files = {found.path_of(entry).name: found.checked_path(entry).read_bytes() for entry in found.files}

        def close(self):
            closed.append(self)

    closed, replaced = [], []

    def open_slowly(found):
        if not replaced:
            replaced.append(True)
            first = found.checked_path(found.files[0])
            with writing_bundle(bundle.folder) as folder:
                write_next(bundle, folder)
            assert first.read_bytes() == b"next"  # a name of the old bundle has the content of the new one
            return SimpleNamespace(files="mixed", close=lambda: closed.append("mixed"))
        return Parts(found)

    assert open_whole(bundle.folder, open_slowly).files == NEW
    assert closed == ["mixed"]


def with_values_in(path, name, where="initializer"):
    """An ONNX file whose tensor keeps its values in the file `name`."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: the model is made with it")
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[2], data_location=1)
    tensor.external_data.add(key="location", value=name)
    graph = onnx.GraphProto(name="g")
    model = onnx.ModelProto(ir_version=9, graph=graph)
    node = onnx.NodeProto(op_type="Constant", output=["w"])
    node.attribute.add(name="value", type=4).t.CopyFrom(tensor)
    if where == "initializer":
        model.graph.initializer.append(tensor)
    elif where == "constant":
        model.graph.node.append(node)
    elif where == "subgraph":
        model.graph.node.add(op_type="If").attribute.add(name="then_branch", type=5).g.node.append(node)
    elif where == "function":
        model.functions.add(name="f", domain="d").node.append(node)
    else:
        model.graph.sparse_initializer.add().values.CopyFrom(tensor)
    path.write_bytes(model.SerializeToString())


def entry_of(folder, kind, name):
    return BundleFile(kind, name, files.sha256_of(folder / name), (folder / name).stat().st_size)


@pytest.mark.parametrize("where", ["initializer", "constant", "subgraph", "function", "sparse"])
@pytest.mark.parametrize("kind", ["onnx", "onnx-fused", "text", "query"])
def test_values_outside_of_a_graph_are_compared(tmp_path, kind, where):
    (tmp_path / "w.bin").write_bytes(b"12345678")
    with_values_in(tmp_path / "a.onnx", "./w.bin", where)
    graph, values = entry_of(tmp_path, kind, "a.onnx"), entry_of(tmp_path, "weights", "w.bin")
    whole = Bundle(tmp_path, make_spec(), Provenance("x"), (graph, values))
    assert whole.checked_path(graph) == tmp_path / "a.onnx"
    with pytest.raises(SpecError, match=r"w.bin.*does not list"):
        Bundle(tmp_path, make_spec(), Provenance("x"), (graph,)).checked_path(graph)
    (tmp_path / "w.bin").write_bytes(b"1234567x")
    with pytest.raises(SpecError, match=r"w.bin.*SHA-256"):
        whole.checked_path(graph)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(SpecError, match=r"w.bin.*missing"):
        whole.checked_path(graph)


def test_files_beside_a_model_are_compared(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "m.xml").write_bytes(b"<net/>")
    (tmp_path / "sub" / "m.bin").write_bytes(b"weights")
    model, weights = entry_of(tmp_path, "openvino", "sub/m.xml"), entry_of(tmp_path, "openvino-weights", "sub/m.bin")
    whole = Bundle(tmp_path, make_spec(), Provenance("x"), (model, weights))
    assert whole.checked_path(model, "m.bin") == tmp_path / "sub" / "m.xml"
    with pytest.raises(SpecError, match=r"m.bin.*does not list"):
        Bundle(tmp_path, make_spec(), Provenance("x"), (model,)).checked_path(model, "m.bin")
    (tmp_path / "sub" / "m.bin").write_bytes(b"Weights")
    with pytest.raises(SpecError, match=r"m.bin.*SHA-256"):
        whole.checked_path(model, "m.bin")


def test_what_is_opened_with_a_model_file(tmp_path):
    with_values_in(tmp_path / "model.onnx", "values/w")
    (tmp_path / "values").mkdir()
    graph = ["model.onnx", "model.onnx.data", "model.onnx.json", "values/w"]
    engine = ["model.sm89.engine", "model.sm89.engine.json"]
    network = ["model.openvino.bin", "model.openvino.xml", "model.openvino.xml.json"]
    beside = ["query.onnx", "text.onnx", "text.onnx.data", "text.sm89.engine", "text.openvino.bin", "tokenizer.json"]
    for name in (*graph[1:], *engine, *network, *beside, "notes.txt", "other.onnx", "texture.png"):
        (tmp_path / name).write_bytes(b"1")
    for name, own in (("model.onnx", graph), ("model.sm89.engine", engine), ("model.openvino.xml", network)):
        found = [path.relative_to(tmp_path).as_posix() for path in files_with(tmp_path / name)]
        assert found == sorted([*own, *beside])


def test_a_graph_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "a.onnx").write_bytes(b"\x3a\xff\x01location")
    graph = entry_of(tmp_path, "onnx", "a.onnx")
    with pytest.raises(SpecError, match=r"a.onnx.*no ONNX file"):
        Bundle(tmp_path, make_spec(), Provenance("x"), (graph,)).checked_path(graph)


def test_a_file_of_the_user_is_in_the_way(bundle):
    (bundle.folder / "other.engine").write_text("of the user")
    before = contents(bundle.folder)
    with pytest.raises(OutputError, match=r"other.engine.*move it"), writing_bundle(bundle.folder) as folder:
        write_next(bundle, folder)
    assert contents(bundle.folder) == before
