"""A real browser for tests of pages: Chromium, driven by selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """A window of 1280x860 pixels."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs the 'dev' extra")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update"
    flags += " use-fake-device-for-media-stream use-fake-ui-for-media-stream"  # a webcam of a moving picture
    for flag in [*flags.split(), "disable-sync", "window-size=1280,860", f"user-data-dir={tmp_path / 'profile'}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield window
    window.quit()
