"""The page of the server in a real browser."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs the 'serve' extra")

from browser import browser, needs_browser  # noqa: F401 - a fixture
from cli_support import write_onnx
from onnx_models import make_spec
from serve_support import Server, png
from text_models import write_text_bundle
from tiny_exports import SHARED

from detrt import Detector

pytestmark = needs_browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory, exported):
    folder = tmp_path_factory.mktemp("served")
    write_onnx(folder / "toy.onnx")
    write_onnx(folder / "masked.onnx", make_spec(masks=True))
    write_text_bundle(folder / "prompted")
    (folder / "shown").symlink_to(exported("owlv2", **SHARED["owlv2"]).path.parent)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    models = ("toy.onnx", "masked.onnx"), {"asked": "prompted", "shown": "shown/model.onnx"}
    served = [folder / name for name in models[0]] + [f"{name}={folder / path}" for name, path in models[1].items()]
    with Server(*served, "--workers", 1) as running:
        yield running


def test_page(server, folder, browser, tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select, WebDriverWait

    page = browser

    image = np.full((60, 90, 3), (40, 90, 255), np.uint8)
    with Detector.open(folder / "toy.onnx", threads=1, threshold=0.05) as detector:
        (expected,) = detector([image])
    wait = WebDriverWait(page, 30)

    def labels() -> list[str]:
        return page.execute_script("return [...document.querySelectorAll('#found li')].map(row => row.children[1].textContent)")

    def above(threshold: float) -> list[str]:
        return [label for label, score in zip(expected.labels, expected.scores, strict=True) if score > threshold]

    page.get(server.address)
    wait.until(lambda _: "toy · 3 classes" in page.find_element(By.ID, "about").text)
    file = tmp_path / "<img src=x onerror=alert(1)>.png"
    file.write_bytes(png(image))
    page.find_element(By.ID, "file").send_keys(str(file))
    assert 0 < len(above(0.9)) < len(above(0.5))
    wait.until(lambda _: labels() == above(0.5))
    # The boxes lie where the detections are, as shares of the image.
    boxes = page.execute_script(
        "return [...document.querySelectorAll('.box')].map(b => [b.style.left, b.style.top, b.style.width, b.style.height])"
    )
    x0, y0, x1, y1 = (expected.boxes_xyxy / [90, 60, 90, 60] * 100)[: len(boxes)].T
    wanted = np.stack([x0, y0, x1 - x0, y1 - y0], axis=1)
    np.testing.assert_allclose([[float(side.rstrip("%")) for side in box] for box in boxes], wanted, atol=0.1)
    assert page.find_element(By.ID, "total").text.endswith(" ms")
    # The threshold hides without asking the server again.
    page.execute_script("const t = document.getElementById('threshold'); t.value = 0.9; t.dispatchEvent(new Event('input'))")
    assert labels() == above(0.9)
    assert page.execute_script("return JSON.parse(document.getElementById('json').textContent).model") == "toy"
    # Masks are drawn over the image, and gone with another model's boxes.
    painted = (
        "const c = document.getElementById('masks'); const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
    )
    painted += " return d.filter((v, i) => i % 4 === 3 && v > 127).length"
    assert page.execute_script(painted) == 0
    Select(page.find_element(By.ID, "model")).select_by_visible_text("masked")
    with Detector.open(folder / "masked.onnx", threads=1, threshold=0.9) as detector:
        (masked,) = detector([image])
    wait.until(lambda _: labels() == list(masked.labels) and labels())
    assert page.execute_script(painted) == masked.masks.to_array().any(0).sum()
    # A model that takes a prompt asks for one.
    Select(page.find_element(By.ID, "model")).select_by_visible_text("asked")
    wait.until(lambda _: "needs a prompt" in page.find_element(By.ID, "error").text)
    # Boxes, times and JSON of the other model do not stand under the new name.
    assert labels() == [] and not page.execute_script("return document.querySelector('.box')")
    assert page.execute_script("return document.getElementById('json').textContent") == ""
    page.find_element(By.ID, "prompt").send_keys("red. blue.\n")
    wait.until(lambda _: page.execute_script("return document.getElementById('json').textContent.includes('red. blue.')"))
    assert not page.find_element(By.ID, "error").is_displayed()
    # One that also finds by an image takes either.
    assert not page.find_element(By.ID, "show").is_displayed()
    Select(page.find_element(By.ID, "model")).select_by_visible_text("shown")
    wait.until(lambda _: page.find_element(By.ID, "show").is_displayed())
    query = tmp_path / "it.png"
    query.write_bytes(png(image[10:50, 20:60]))
    page.find_element(By.ID, "query").send_keys(str(query))
    wait.until(lambda _: page.execute_script("return document.getElementById('json').textContent.includes('\"label\": \"it\"')"))
    assert page.find_element(By.ID, "prompt").get_property("value") == ""
    page.find_element(By.ID, "prompt").send_keys("a cat.\n")
    wait.until(lambda _: page.execute_script("return document.getElementById('json').textContent.includes('a cat')"))
    assert page.find_element(By.ID, "query").get_property("value") == ""
    # What cannot be read is told.
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    page.find_element(By.ID, "file").send_keys(str(bad))
    wait.until(lambda _: "is not an image" in page.find_element(By.ID, "error").text)
    severe = [entry["message"] for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in severe if "status of 400" not in message] == []
