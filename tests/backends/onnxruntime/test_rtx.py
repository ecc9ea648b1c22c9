"""`--backend onnxruntime-rtx`: NVIDIA's provider, as far as a machine without its GPUs goes."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import cli  # noqa: F401 - a fixture
from onnx_models import make_model, make_spec

from detrt import system
from detrt.backends.onnxruntime import rtx
from detrt.backends.onnxruntime import session as onnx_session
from detrt.backends.open import open_session
from detrt.bench.config import BenchConfig
from detrt.bench.run import bench
from detrt.errors import MissingPackageError, SessionError

SPEC = make_spec(dynamic=True)
MODULE = "onnxruntime_ep_nv_tensorrt_rtx"


@pytest.fixture
def path(tmp_path):
    (tmp_path / "model.onnx").write_bytes(make_model(SPEC))
    return tmp_path / "model.onnx"


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package whose library is not there."""
    module = SimpleNamespace(get_ep_name=lambda: "Provider", get_library_path=lambda: str(tmp_path / "libprovider.so"))
    monkeypatch.setitem(sys.modules, MODULE, module)
    rtx._register.cache_clear()


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    monkeypatch.setattr(system, "has_driver", lambda: True)


def test_without_a_driver_no_package_is_asked_for(path, monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, None)
    monkeypatch.setattr(system, "has_driver", lambda: False)
    with pytest.raises(SessionError, match=r"there is no CUDA device.*use `backend=onnxruntime`$"):
        open_session(path, backend="onnxruntime-rtx")


def test_without_the_package(path, monkeypatch, cli):
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(MissingPackageError, match=r"onnxruntime-ep-nv-tensorrt-rtx.*onnxruntime-rtx"):
        open_session(path, backend="onnxruntime-rtx")
    cli.refused("detect", path, path, "--backend", "onnxruntime-rtx", "--device", "cpu", names="'cpu'", advice="cuda:0")


def test_a_library_that_cannot_be_loaded(path, package):
    """ONNX Runtime itself refuses it."""
    with pytest.raises(SessionError, match=r"cannot be loaded \(.*libprovider.so.*\): it needs an RTX GPU.*`device=cpu`"):
        open_session(path, backend="onnxruntime-rtx")


def test_without_a_gpu_and_a_number_that_is_not_there(path, package, monkeypatch):
    monkeypatch.setattr(onnxruntime, "register_execution_provider_library", lambda name, library: None)
    with pytest.raises(SessionError, match="finds no RTX GPU here"):
        open_session(path, backend="onnxruntime-rtx")
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: [SimpleNamespace(ep_name="Provider")])
    with pytest.raises(SessionError, match="no RTX GPU cuda:1.*finds cuda:0"):
        open_session(path, backend="onnxruntime-rtx", device="cuda:1")


def test_a_session_on_a_device_of_a_provider(path, monkeypatch):
    """The CPU provider's own OrtEpDevice stands for that of a GPU."""
    (device,) = (one for one in onnxruntime.get_ep_devices() if one.ep_name == "CPUExecutionProvider")
    asked = []
    monkeypatch.setattr(onnx_session, "rtx_device", lambda module, number: asked.append(number) or device)
    feeds = {"pixel_values": np.random.default_rng(0).integers(0, 256, (2, 3, 8, 12), np.uint8)}
    with open_session(path, backend="onnxruntime-rtx", device="cuda:1") as session, open_session(path) as reference:
        assert asked == [1] and session.info.name == "onnxruntime-rtx" and session.info.device == "cuda:1"
        want = reference.run(feeds)
        for name, array in session.run(feeds).items():
            np.testing.assert_array_equal(array, want[name])
    chosen = BenchConfig(
        backends=("onnxruntime-rtx", "onnxruntime"), providers=("cpu",), devices=("cuda:1",), repeats=1, warmup=0
    )
    rows = bench([str(path)], replace(chosen, scopes=("forward",)))["rows"]
    assert [row["backend"] for row in rows] == ["onnxruntime-cpu", "onnxruntime-rtx"] and asked == [1, 1]


@pytest.mark.skipif(find_spec(MODULE) is None, reason="needs the 'onnxruntime-rtx' extra")
def test_the_package_itself(path):
    rtx._register.cache_clear()
    with pytest.raises(SessionError, match="RTX GPU"):
        open_session(path, backend="onnxruntime-rtx", device="cuda:63")
