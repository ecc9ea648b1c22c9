from __future__ import annotations

import json

import pytest
from runtime_cases import make_spec

from detrt import files
from detrt.bundle import (
    MANIFEST,
    Bundle,
    BundleFile,
    EngineFacts,
    Provenance,
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
        (lambda d: d["files"][0].update(size=float("inf")), ["size", "inf"]),
        (lambda d: d["files"][1]["engine"].update(precision=16), ["precision", "16"]),
        (lambda d: d["files"][1]["engine"].update(compute_capabilities=["8.9"]), ["8.9"]),
        (lambda d: d["files"][1]["engine"].update(profile=None), ["profile"]),
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


@pytest.mark.parametrize("failing", range(1, 5))
def test_a_bundle_is_written_whole_or_not_at_all(bundle, failing, monkeypatch):
    """Stopped at any of the renames: graph moved away, graph moved in, engine moved in, manifest."""
    before, rename, calls = contents(bundle.folder), files.os.replace, []

    def stop(source, target):
        calls.append(target)
        if len(calls) == failing + 1:  # the first one writes the new manifest, in its own folder
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr("os.replace", stop)
    with pytest.raises(KeyboardInterrupt), writing_bundle(bundle.folder) as folder:
        write_next(bundle, folder)
    assert contents(bundle.folder) == before and len(calls) > failing


def test_a_file_of_the_user_is_in_the_way(bundle):
    (bundle.folder / "other.engine").write_text("of the user")
    before = contents(bundle.folder)
    with pytest.raises(OutputError, match=r"other.engine.*move it"), writing_bundle(bundle.folder) as folder:
        write_next(bundle, folder)
    assert contents(bundle.folder) == before
