"""Code that a model brings runs with consent only: of the caller, of the environment, or because it was built here."""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import cli, write_images, write_onnx  # noqa: F401 - fixture

from detrt.backends.targets import native_code
from detrt.bundle import Bundle, BundleFile, EngineFacts
from detrt.errors import EngineError, SourceError, SpecError
from detrt.files import sha256_of
from detrt.models import trust

MACHINE_CODE = "machine code of PyTorch's compiler"


@pytest.fixture(autouse=True)
def nobody_consents(monkeypatch, tmp_path):
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    monkeypatch.setenv(trust.STORE, str(tmp_path / "trusted"))


@pytest.mark.parametrize(
    ("kind", "options", "what"),
    [
        ("inductor", {}, MACHINE_CODE),
        ("inductor", {"format": "artifact"}, MACHINE_CODE),
        ("engine", {"plugins": ["/x/libp.so"]}, "the plugin libraries /x/libp.so"),
        ("engine", {"version_compatible": True}, "TensorRT's own runtime code"),
        ("engine", {}, ""),
        ("openvino", {}, ""),
    ],
)
def test_what_holds_native_code(kind, options, what, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    assert native_code(kind, EngineFacts("any", "1", (), "fp32", {}, "", options=options)) == what
    if not what:
        trust.require(path, what)
        return
    with pytest.raises(EngineError, match=r"holds native code.*`trust_remote_code`.*DETRT_TRUST_REMOTE_CODE=1"):
        trust.require(path, what)
    with trust.allowing(True):
        trust.require(path, what)
    with pytest.raises(EngineError), trust.allowing(False):
        trust.require(path, what)
    trust.remember(path)
    trust.require(path, what)
    path.write_bytes(b"y")  # another content under the same name
    with pytest.raises(EngineError):
        trust.require(path, what)


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_the_environment_consents(text, tmp_path, monkeypatch):
    monkeypatch.setenv(trust.VARIABLE, text)
    trust.require(tmp_path / "none", MACHINE_CODE)


@pytest.mark.parametrize("text", ["", "0", "False", "no"])
def test_the_environment_refuses(text, monkeypatch):
    monkeypatch.setenv(trust.VARIABLE, text)
    assert not trust.is_allowed()
    with trust.allowing(True):
        assert trust.is_allowed()


def test_another_word_is_no_answer(monkeypatch):
    monkeypatch.setenv(trust.VARIABLE, "maybe")
    with pytest.raises(SpecError, match="must be 1 .* or 0; got 'maybe'"):
        trust.is_allowed()


def test_no_store_is_no_error(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    for value in ("off", str(path / "below-a-file")):
        monkeypatch.setenv(trust.STORE, value)
        trust.remember(path)
        assert not trust.is_built_here(path)


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A working folder with a bundle whose package nobody here built."""
    monkeypatch.chdir(tmp_path)
    write_onnx(tmp_path / "model.onnx")
    write_images(tmp_path / "in")
    from detrt.pipeline import build

    build("model.onnx", "bundle")
    package = tmp_path / "bundle/model.inductor-cpu.pt2"
    package.write_bytes(b"native code")
    torch = pytest.importorskip("torch", reason="needs the 'export' extra")
    facts = EngineFacts(
        "inductor-cpu",
        torch.__version__,
        (),
        "fp32",
        {"pixel_values": {key: [1, 3, 8, 12] for key in ("min", "opt", "max")}},
        "",
        inputs=({"name": "pixel_values", "dtype": "uint8", "shape": [1, 3, 8, 12]},),
        outputs=(),
    )
    bundle = Bundle.open("bundle")
    entry = BundleFile("inductor", package.name, sha256_of(package), package.stat().st_size, facts)
    Bundle(bundle.folder, bundle.spec, bundle.provenance, (*bundle.files, entry)).save()
    return package


def test_a_bundle_of_strangers_runs_its_graph_and_says_why(cli, stranger, monkeypatch):
    loaded = []
    monkeypatch.setattr(
        "detrt.backends.inductor.package.load_package",
        lambda *a, **k: loaded.append(a) or (_ for _ in ()).throw(EngineError("damaged")),
    )
    said = " ".join(cli("detect", "bundle", "in").err.split())
    assert "onnxruntime-cpu" in said and "holds native code" in said and not loaded
    error = cli("detect", "bundle", "in", "--backend", "inductor", code=2).err
    assert "--trust-remote-code" in error and not loaded
    cli("detect", "bundle", "in", "--trust-remote-code")
    assert len(loaded) == 1
    monkeypatch.setenv(trust.VARIABLE, "1")
    cli("detect", "bundle", "in")
    assert len(loaded) == 2
    monkeypatch.delenv(trust.VARIABLE)
    trust.remember(stranger)
    cli("detect", "bundle", "in")
    assert len(loaded) == 3


def test_info_says_so(cli, stranger):
    assert cli("info", "bundle", "--json", "-").json["holds_native_code"] == [f"{stranger.name}: {MACHINE_CODE}, built elsewhere"]
    assert "holds native code" in cli("info", "bundle").out
    trust.remember(stranger)
    assert "built by this user on this machine" in cli("info", "bundle", "--json", "-").json["holds_native_code"][0]


def test_a_flag_of_one_command_ends_with_it(cli, stranger):
    cli("detect", "bundle", "in", "--trust-remote-code", "--backend", "onnxruntime")
    assert not trust.is_allowed()


def test_python_files_of_a_checkpoint_ask_the_same(tmp_path, monkeypatch, tiny):
    from checkpoint_folders import save_folder

    from detrt.models.load import load_source

    folder = save_folder(tiny("rt_detr"), tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "configuration_x.Config"}}))
    with pytest.raises(SourceError, match="runs its own code.*`trust_remote_code` or set DETRT_TRUST_REMOTE_CODE=1"):
        load_source(str(folder))
    monkeypatch.setenv(trust.VARIABLE, "1")
    with pytest.raises(SourceError, match="cannot be loaded"):  # the file is not there, and was looked for
        load_source(str(folder))
    shutil.rmtree(folder)
