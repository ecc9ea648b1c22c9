"""What a new user of the server meets: loading, Swagger, the curl lines of the guide with a large photograph, clear refusals."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs the 'serve' extra")
pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import write_onnx
from onnx_models import make_spec
from PIL import Image
from serve_support import Server
from text_models import write_text_bundle

from detrt.cli import main

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "serving.md"
LARGE_BYTES = 5_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    write_onnx(folder / "toy.onnx", dynamic=True, multiple_of=4)
    write_text_bundle(folder / "prompted")
    with Server(folder / "toy.onnx", f"prompted={folder / 'prompted'}", "--workers", 1) as running:
        yield running


def test_notes_are_spelled_as_options(monkeypatch, capsys, tmp_path):
    """Of a bundle whose compiled package was built elsewhere, for example."""
    facts = SimpleNamespace(
        name="toy", spec=make_spec(), takes_prompt=False, size_hw=(8, 12), backend="onnxruntime-cpu", max_batch=8,
        note="not run; `backend=onnxruntime` runs the other",
    )  # fmt: skip
    monkeypatch.setattr(
        "detrt.serve.server.serve", lambda config, *, on_ready, **_: on_ready("http://127.0.0.1:1", {"toy": facts})
    )
    assert main(["serve", str(write_onnx(tmp_path / "toy.onnx"))]) == 0
    assert "    note: not run; --backend onnxruntime runs the other\n" in capsys.readouterr().out


def get(address):
    with urllib.request.urlopen(address, timeout=30) as answer:
        return answer.headers, answer.read()


def test_loading_prints_what_it_does(server):
    lines = server.log.splitlines()
    assert lines[0].startswith("loading toy, prompted in 1 worker;")
    assert re.fullmatch(r"  1 of 1 worker ready after \d+ s", lines[1])
    assert lines.index(lines[1]) < next(i for i, line in enumerate(lines) if line.startswith("ready at"))


def test_swagger_comes_from_this_server(server):
    """No other host, no inline code: both would be stopped by a firewall or by the page's own policy."""
    pytest.importorskip("fastapi_offline", reason="needs the 'serve' extra")
    headers, body = get(f"{server.address}/docs")
    page = body.decode()
    assert headers["content-type"].startswith("text/html") and "default-src 'self'" in headers["content-security-policy"]
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert links and not [link for link in links if "//" in link] and not re.search(r"<script>(?!</script>)", page)
    sizes = {link: len(get(f"{server.address}/{link}")[1]) for link in links}
    assert sizes["docs/swagger-ui.js"] > 500_000 and sizes["docs/swagger-ui.css"] > 50_000
    assert "openapi.json" in get(f"{server.address}/docs.js")[1].decode()
    assert json.loads(get(f"{server.address}/openapi.json")[1])["paths"]


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("base64")), reason="needs curl and base64")
def test_documented_curl_lines_with_a_large_photograph(server, tmp_path):
    """An argument may have 128 KiB on Linux, and a photograph has megabytes."""
    noise = np.random.default_rng(0).integers(0, 256, (1700, 1700, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "street.jpg", quality=98, subsampling=0)
    Image.fromarray(noise[:64, :64]).save(tmp_path / "yard.png")
    assert (tmp_path / "street.jpg").stat().st_size > LARGE_BYTES
    (block,) = (text for text in re.findall(r"```sh\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL) if "base64" in text)
    script = (
        block.replace("localhost:8000", server.address.removeprefix("http://"))
        .replace("car,dog", "red,blue")
        .replace("cars", "toy")
    )
    commands = re.split(r"\n(?=curl|\{)", script.strip())
    assert len(commands) >= 4
    for command in commands:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "images" in json.loads(done.stdout), f"{command}\n{done.stdout[:300]}"


def test_sizes_that_the_model_cannot_take_are_refused_in_words(server):
    """Not in those of ONNX Runtime, with a file and a line of its source."""
    row = {"name": "pixel_values", "shape": [1, 3, 10, 13], "datatype": "UINT8", "data": [0] * 390}
    request = urllib.request.Request(
        f"{server.address}/v2/models/toy:graph/infer",
        json.dumps({"inputs": [row]}).encode(),
        {"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    message = json.loads(caught.value.read())["error"]
    assert caught.value.code == 400 and "multiples of 4; the nearest are 8 and 12" in message and ".cc" not in message


def test_the_guide_lists_every_status(server):
    listed = set(re.findall(r"^\| (\d{3}) \|", GUIDE.read_text("utf-8"), re.MULTILINE))
    source = Path(__file__).resolve().parents[2] / "src" / "detrt" / "serve"
    sent = {
        code for path in source.glob("*.py") for code in re.findall(r"(?:Refused|status=)\(?(\d{3})\b", path.read_text("utf-8"))
    }
    assert {"404", "405", "415"} <= listed and sent - listed == set()


@pytest.mark.slow
def test_a_checkpoint_is_served_as_it_is_said_to_be_read(tmp_path):
    """`--labels` reaches the checkpoint, and not the bundle beside it."""
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    (tmp_path / "names.txt").write_text("".join(f"thing {index}\n" for index in range(12)))
    write_onnx(tmp_path / "toy.onnx", dynamic=True, multiple_of=4)
    ours = ("shapes=embedded:shapes", "--labels", tmp_path / "names.txt")
    write_text_bundle(tmp_path / "prompted")
    with Server(f"prompted={tmp_path / 'prompted'}", *ours, "--workers", 1) as running:
        models = {model["name"]: model for model in json.loads(get(f"{running.address}/v1/models")[1])["models"]}
    assert models["shapes"]["classes"] == [f"thing {index}" for index in range(12)]
