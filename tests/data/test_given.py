"""Addresses that a person types: what is sent, what is shown, and how long it may take."""

from __future__ import annotations

import threading
import time

import pytest
from PIL import Image
from web_support import web

from detrt.data.given import as_image, fetch, typed_inputs
from detrt.errors import ArgumentError, ImageError

SECRET = "s3cret"


def test_a_server_that_never_ends_its_header_does_not_hold_a_run(tmp_path):
    with web(tmp_path) as at:
        for path in ("/drip", "/slow"):
            start = time.monotonic()
            with pytest.raises(ImageError, match=r"did not arrive within 0\.3 s; download it first"):
                fetch(at + path, timeout_s=0.3)
            assert time.monotonic() - start < 20  # both would last 50 s and more
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "detrt-fetch")


@pytest.mark.parametrize("name", ["a b.png", "ü ☃.png", "50%25.png", "a+b&c.png"])
def test_names_as_browsers_take_them(tmp_path, name):
    Image.new("RGB", (2, 2)).save(tmp_path / name.replace("%25", "%"))
    with web(tmp_path) as at:
        assert fetch(f"{at}/{name}?x=a b#part").startswith(b"\x89PNG")
        assert len(typed_inputs([f"{at}/{name}"])) == 1


@pytest.mark.parametrize(
    "address",
    [
        f"http://127.0.0.1:1/a b?token={SECRET}",
        f"http://127.0.0.1:1/\n?token={SECRET}",
        f"http://127.0.0.1:abc/x?sig={SECRET}",
        f"http://127.0.0.1:1/☃?X-Amz-Signature={SECRET}&X-Amz-Credential={SECRET}",
        f"http://127.0.0.1:1/x.jpg?Signature={SECRET}",
        f"http://me:{SECRET}@127.0.0.1:1/a.jpg",
        f"http://[::1?key={SECRET}",
    ],
)
def test_no_message_shows_a_secret(address):
    with pytest.raises(ImageError) as caught:
        fetch(address, timeout_s=5)
    assert SECRET not in str(caught.value) and "download it first" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/elsewhere", "302, and it leads to no http or https address"),
        ("/circle", "302, and it leads to no http or https address, or in a circle"),
        ("/short", "broke off after 60 of 100 bytes"),
        ("/none.jpg", "404 File not found"),
        ("/odd", "cannot be fetched"),
    ],
)
def test_what_a_server_answers_is_one_line(tmp_path, path, words):
    with web(tmp_path) as at, pytest.raises(ImageError, match=words) as caught:
        fetch(at + path)
    assert "\n" not in str(caught.value) and SECRET not in str(caught.value)


class Broken:
    name = "pipe"

    def read(self):
        raise OSError("the other end is gone")


def test_files_that_cannot_be_read(tmp_path):
    Image.new("RGB", (2, 2)).save(tmp_path / "a.jpg")
    with open(tmp_path / "a.jpg") as text, pytest.raises(ArgumentError, match="opened in binary mode"):
        as_image(text)
    with pytest.raises(ImageError, match="cannot be read: I/O operation on closed file"):
        as_image(text)
    with pytest.raises(ImageError, match="'pipe' cannot be read: the other end is gone"):
        as_image(Broken())


def test_tensors_without_a_value_for_each_pixel():
    torch = pytest.importorskip("torch", reason="needs the 'export' extra")
    image = torch.zeros(3, 8, 8)
    for wrong, words in ((image.to("meta"), "without values"), (image.to_sparse(), "sparse_coo")):
        with pytest.raises(ImageError, match=f"got one that is .*{words}"):
            as_image(wrong)


@pytest.mark.parametrize("address", ["http://", "http:///", "https://./..", "http://[::1"])
def test_addresses_of_nothing(address):
    with pytest.raises(ImageError, match="is no address"):
        typed_inputs([address])
