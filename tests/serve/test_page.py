"""The page of the server in a real browser."""

from __future__ import annotations

import time

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
        "const c = document.querySelector('.masks'); const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
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
    assert page.find_element(By.ID, "count").text == "No answer"
    severe = [entry["message"] for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in severe if "status of 400" not in message] == []


@pytest.fixture
def page(server, folder, browser, tmp_path):
    """The page with an image of two classes."""
    from selenium.webdriver.common.by import By

    browser.get(server.address)
    image = np.zeros((60, 90, 3), np.uint8)
    image[:, :45], image[:, 45:] = (40, 90, 255), (255, 60, 40)
    (tmp_path / "two.png").write_bytes(png(image))
    until(browser, "document.getElementById('about').textContent.includes('toy')")
    browser.find_element(By.ID, "file").send_keys(str(tmp_path / "two.png"))
    until(browser, "document.querySelectorAll('#found li').length > 0")
    browser.image = image
    return browser


def until(page, expression: str):
    """The value of an expression as soon as it is true. Of a page that changes by itself, read all that belongs together in one."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(page, 30).until(lambda _: page.execute_script(f"return {expression}"))


def choose(page, name: str, value: str) -> None:
    page.execute_script(
        "const field = document.getElementById(arguments[0]); field.value = arguments[1]; field.dispatchEvent(new Event('change'))",
        name,
        value,
    )


def shown(page) -> list[tuple[str, float]]:
    """What the page lists: label and score, to three digits."""
    rows = page.execute_script(
        "return [...document.querySelectorAll('#found li')].map(row => [row.children[1].textContent, row.children[2].textContent])"
    )
    return [(label, float(score)) for label, score in rows]


def found_by(folder, model, image, **options) -> list[tuple[str, float]]:
    with Detector(folder / f"{model}.onnx", threads=1, **{"threshold": 0.5, **options}) as detector:
        found = detector(image)
    return [(label, round(float(score), 3)) for label, score in zip(found.labels, found.scores, strict=True)]


def check(got: list[tuple[str, float]], wanted: list[tuple[str, float]]) -> None:
    assert [label for label, _ in got] == [label for label, _ in wanted]
    np.testing.assert_allclose([score for _, score in got], [score for _, score in wanted], atol=0.0011)


def test_a_slider_for_each_class(page, folder):
    """One that is moved keeps its value; the others follow the slider above."""
    labels = page.execute_script("return [...document.querySelectorAll('#sliders label')].map(row => row.dataset.label)")
    assert len(labels) > 1 and labels == sorted(labels)
    move = "const s = document.querySelectorAll('#sliders input')[0]; s.value = 0.95; s.dispatchEvent(new Event('input'))"
    page.execute_script(move)
    wanted = found_by(folder, "toy", page.image, class_thresholds={labels[0]: 0.95})
    check(shown(page), wanted)
    page.execute_script("const t = document.getElementById('threshold'); t.value = 0.1; t.dispatchEvent(new Event('input'))")
    wanted = found_by(folder, "toy", page.image, threshold=0.1, class_thresholds={labels[0]: 0.95})
    check(shown(page), wanted)
    assert len(wanted) > 1
    page.execute_script("document.getElementById('reset').click()")
    check(shown(page), found_by(folder, "toy", page.image, threshold=0.1))


def test_tiles(page, folder):
    from detrt.data.tiles import Tiling

    page.execute_script("document.getElementById('tile').append(Object.assign(document.createElement('option'), {value: '40'}))")
    choose(page, "tile", "40")
    until(page, "document.querySelectorAll('.view .tiles i').length > 0")
    wanted = found_by(folder, "toy", page.image, tile=40)
    check(shown(page), wanted)
    outlines = page.execute_script(
        "return [...document.querySelectorAll('.view .tiles i')].map(t => [t.style.top, t.style.left, t.style.height, t.style.width])"
    )
    got = np.array([[float(side.rstrip("%")) for side in outline] for outline in outlines]) * [0.6, 0.9, 0.6, 0.9]
    windows = Tiling((40, 40)).windows((60, 90))[:-1]
    np.testing.assert_allclose(got, [(y0, x0, y1 - y0, x1 - x0) for y0, x0, y1, x1 in windows], atol=0.51)
    choose(page, "tile", "")
    until(page, "document.querySelectorAll('.view .tiles i').length === 0")


def test_two_models_side_by_side(page, folder):
    choose(page, "beside", "masked")
    until(page, "document.querySelectorAll('.view')[1].querySelectorAll('.box').length > 0")
    captions = page.execute_script("return [...document.querySelectorAll('figcaption')].map(one => one.textContent)")
    for name, caption in zip(("toy", "masked"), captions, strict=True):
        assert caption.startswith(f"{name}: {len(found_by(folder, name, page.image))} object")
    places = page.execute_script("return [...document.querySelectorAll('.view')].map(v => v.getBoundingClientRect().toJSON())")
    assert places[0]["right"] <= places[1]["left"] and places[0]["top"] == places[1]["top"]
    told = page.execute_script("return JSON.parse(document.getElementById('json').textContent).map(one => one.model)")
    assert told == ["toy", "masked"]
    choose(page, "beside", "")
    until(page, "document.querySelectorAll('.view')[1].hidden && document.querySelectorAll('figcaption')[0].textContent === ''")


def test_a_late_answer_is_not_shown_with_another_model(page):
    """Also where the other one is not asked, since it needs a prompt."""
    page.execute_script(
        "const real = window.fetch; window.fetch = async (...all) => { const answer = await real(...all);"
        "await new Promise((go) => (window.go = go)); return { ok: answer.ok, json: async () => {"
        "try { return await answer.json(); } finally { window.over = true; } } }; };"
        "document.getElementById('again').click()"
    )
    until(page, "!!window.go")
    choose(page, "model", "asked")
    page.execute_script("window.go()")
    until(page, "window.over")
    assert "needs a prompt" in page.execute_script("return document.getElementById('error').textContent")
    assert shown(page) == [] and page.execute_script("return document.getElementById('json').textContent") == ""
    assert not page.execute_script("return document.body.classList.contains('busy')")


def test_a_webcam(page):
    before = page.execute_script("return document.querySelector('.image').src")
    page.execute_script("document.getElementById('webcam').click()")
    frames = set()
    known = before
    for _ in range(3):
        known = until(page, f"(src => src !== '{known}' && src)(document.querySelector('.image').src)")
        frames.add(known)
    assert len(frames) == 3 and before not in frames
    told = page.execute_script("return JSON.parse(document.getElementById('json').textContent).images[0]")
    # The next frame takes the place of this one at any time, and has no size until it is decoded.
    size = until(page, "(i => i.naturalWidth > 0 && [i.naturalWidth, i.naturalHeight])(document.querySelector('.image'))")
    assert [told["width"], told["height"]] == size
    page.execute_script("document.getElementById('webcam').click()")
    assert page.execute_script("return document.getElementById('webcam').textContent") == "Webcam"
    until(page, "!document.body.classList.contains('busy')")
    last = page.execute_script("return document.querySelector('.image').src")
    time.sleep(0.5)
    assert page.execute_script("return document.querySelector('.image').src") == last
    severe = [entry["message"] for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    assert severe == []


def test_a_second_click_opens_no_second_webcam(page):
    page.execute_script(
        "const own = navigator.mediaDevices, real = own.getUserMedia.bind(own); window.opened = [];"
        "own.getUserMedia = async (...all) => { const s = await real(...all); window.opened.push(s); return s; };"
        "const b = document.getElementById('webcam'); b.click(); b.click();"
    )
    until(page, "document.getElementById('webcam').textContent === 'Stop'")
    page.execute_script("document.getElementById('webcam').click()")
    assert page.execute_script("return window.opened.map(stream => stream.active)") == [False]


def test_what_a_browser_or_a_proxy_refuses_is_said(page):
    """No webcam and no clipboard without https, a page of a proxy, a server that is gone; without an error of the script."""
    said = "document.getElementById('error').textContent"
    page.execute_script("Object.defineProperty(navigator, 'mediaDevices', {value: undefined})")
    page.execute_script("document.getElementById('webcam').click()")
    until(page, f"{said}.includes('https')")
    page.execute_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.execute_script("document.getElementById('copy').parentElement.open = true; document.getElementById('copy').click()")
    until(page, "getSelection().toString().includes('box_xyxy')")
    page.execute_script("window.fetch = async () => new Response('<h1>Bad gateway</h1>', {status: 502})")
    page.execute_script("document.getElementById('again').click()")
    until(page, f"{said}.includes('status 502')")
    assert page.execute_script("return document.getElementById('count').textContent") == "No answer"
    page.execute_script("window.fetch = async () => { throw new TypeError('Failed to fetch'); }")
    page.execute_script("document.getElementById('again').click()")
    until(page, f"{said}.includes('does not answer')")
    assert [entry["message"] for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_letters_of_labels_are_readable(page):
    """The contrast of every colour and its letters, by the definition of WCAG: 4.5 for text, here at least 3, of bold letters."""
    channel = "const c = (v) => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;"
    light = (
        "const l = (text) => { d.style.color = text; const [r, g, b] = getComputedStyle(d).color.match(/[\\d.]+/g).map(Number);"
    )
    light += " return 0.2126 * c(r) + 0.7152 * c(g) + 0.0722 * c(b); };"
    worst = page.execute_script(
        channel
        + light.replace("const l", "const d = document.createElement('i'); document.body.append(d); const l")
        + "let worst = 99;"
        "for (let i = 0; i < 400; i++) { const [a, b] = [l(colour('class ' + i)), l(ink('class ' + i))];"
        "worst = Math.min(worst, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)); } return worst;"
    )
    assert worst >= 3
