"""Nothing that detrt runs asks the network, or leaves a file in the home folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import place, run_process  # noqa: F401 - fixtures
from network_recorder import NetworkRecorder

import detrt

DOCKERFILE = Path(__file__).resolve().parents[2] / "Dockerfile"


@pytest.fixture
def left(tmp_path_factory, monkeypatch):
    """Processes from here on are those of a user who set nothing and whose home folder is empty. -> what they left and asked."""
    home = tmp_path_factory.mktemp("home")
    recorder = NetworkRecorder(tmp_path_factory.mktemp("recorder"))
    for name in os.environ:
        if name in detrt.NO_TELEMETRY or name.startswith(("HF_", "TRANSFORMERS_", "XDG_", "DO_NOT_TRACK")):
            monkeypatch.delenv(name)
    for name, value in {**recorder.environment, "HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    return lambda: [str(path) for path in home.rglob("*") if not path.is_dir()] + recorder.calls


ASKS = {
    "a connection": ("import socket; socket.socket().connect_ex(('192.0.2.1', 9))", "connect 192.0.2.1"),
    "IPv6": ("import socket; socket.socket(socket.AF_INET6).connect_ex(('2001:db8::1', 9))", "connect 2001:db8::1"),
    "a datagram": (
        "import socket, contextlib as c\nwith c.suppress(OSError): socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('192.0.2.2', 9))",
        "sendto 192.0.2.2",
    ),
    "a name": (
        "import socket, contextlib as c\nwith c.suppress(OSError): socket.create_connection(('telemetry.example', 9))",
        "getaddrinfo telemetry.example",
    ),
    "a child": (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', \"import socket; socket.socket().connect_ex(('192.0.2.3', 9))\"])",
        "connect 192.0.2.3",
    ),
}


@pytest.mark.parametrize("what", ASKS)
def test_the_recorder_sees(what, tmp_path):
    program, expected = ASKS[what]
    own = NetworkRecorder(tmp_path)
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **own.environment}, check=True, timeout=60)
    assert own.calls == [expected]


def ran(*arguments):
    result = run_process(*arguments)
    assert result.code == 0, result.err


def test_commands(left, place):
    image = {"id": 1, "file_name": "blue.png", "width": 24, "height": 16}
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 24, 16], "area": 384, "iscrowd": 0}
    categories = [{"id": 1 + i, "name": name} for i, name in enumerate(("red", "green", "blue"))]
    Path("truth.json").write_text(json.dumps({"images": [image], "annotations": [box], "categories": categories}))
    ran("build", "model.onnx", "-o", "built", "--target", "onnx")
    ran("detect", "built", "in", "--json", "found.json", "--save-dir", "drawn")
    ran("eval", "built", "--images", "in", "--ground-truth", "truth.json")
    assert left() == []


def test_server(left, place):
    pytest.importorskip("fastapi", reason="needs the 'serve' extra")
    import httpx
    from serve_support import Server

    with Server("bundle", "--workers", 1) as server:
        answer = httpx.post(f"{server.address}/v1/detect", files={"images": Path("in/blue.png").read_bytes()}, timeout=60)
        assert answer.status_code == 200, answer.text
    assert left() == []


@pytest.mark.slow
def test_checkpoint(left, tmp_path):
    """With the libraries that load checkpoints, and every target that needs no GPU."""
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    ran("build", "embedded:shapes", "-o", tmp_path / "bundle", "--target", "onnx,openvino")
    ran("demo-data", tmp_path / "scenes", "--count", "4")
    ran("verify", tmp_path / "bundle", "--images", tmp_path / "scenes" / "images")
    for backend in ("onnxruntime", "openvino"):
        ran(
            "detect",
            tmp_path / "bundle",
            tmp_path / "scenes" / "images",
            "--backend",
            backend,
            "--json",
            tmp_path / f"{backend}.json",
        )
    assert left() == []


def test_the_choice_of_the_environment_stands(monkeypatch):
    program = f"import os, detrt; print(*(os.environ[name] for name in {list(detrt.NO_TELEMETRY)}))"
    for name in detrt.NO_TELEMETRY:
        monkeypatch.setenv(name, "own")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"own"}


def test_images_and_cpp_say_the_same():
    """Both images also for a Python that is not detrt's, and the C++ runtime, which knows ONNX Runtime only."""
    said = re.findall(r"^ENV (.*TELEMETRY.*)$", DOCKERFILE.read_text("utf-8"), re.MULTILINE)
    assert [dict(pair.split("=") for pair in line.split()) for line in said] == [detrt.NO_TELEMETRY] * 2
    source = (DOCKERFILE.parent / "cpp/onnxruntime/backend.cpp").read_text("utf-8")
    assert re.findall(r'setenv\("(\w+)", "(\w+)", 0\)', source) == [
        ("ORT_DISABLE_TELEMETRY", detrt.NO_TELEMETRY["ORT_DISABLE_TELEMETRY"])
    ]
