"""Under which names the server answers, and to pages of which servers; the rule as a table, and over real connections."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("fastapi", reason="needs the 'serve' extra")
pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import write_onnx
from serve_support import Server

from detrt.errors import SessionError
from detrt.serve.errors import Refused
from detrt.serve.hosts import Hosts, is_loopback, parse_hosts, parse_origins

LOCAL = "127.0.0.1"
NAMED = {"hosts": ("detector.example", "*.inside.example"), "origins": ("https://app.example",)}


def status(address, choices, host=None, origin=None, version="1.1"):
    headers = [(b"host", value.encode()) for value in ([] if host is None else host if isinstance(host, list) else [host])]
    headers += [] if origin is None else [(b"origin", origin.encode())]
    try:
        Hosts(address, **choices).check(headers, version)
    except Refused as refusal:
        return refusal.status
    return 200


RULES = [
    # Address, choices, Host, Origin, answer.
    (LOCAL, {}, "127.0.0.1:8000", None, 200),
    (LOCAL, {}, "LOCALHOST:8000", None, 200),
    (LOCAL, {}, "localhost.", None, 200),
    (LOCAL, {}, "model.localhost:8000", None, 200),
    (LOCAL, {}, "[::1]:8000", None, 200),
    (LOCAL, {}, "127.9.9.9", None, 200),
    (LOCAL, {}, "attacker.example", None, 421),
    (LOCAL, {}, "localhost.attacker.example", None, 421),
    (LOCAL, {}, "127.0.0.1.attacker.example:8000", None, 421),
    (LOCAL, {}, "192.0.2.7", None, 421),
    (LOCAL, {}, "localhost:8000", "http://attacker.example", 403),
    (LOCAL, {}, "localhost:8000", "null", 403),
    (LOCAL, {}, "localhost:8000", "http://localhost.attacker.example", 403),
    (LOCAL, {}, "localhost:8000", "http://localhost:3000", 200),
    (LOCAL, {}, "localhost:8000", "http://localhost:8000", 200),
    (LOCAL, {}, "attacker.example", "http://attacker.example", 421),
    ("::1", {}, "attacker.example", None, 421),
    ("localhost", {}, "attacker.example", None, 421),
    ("0.0.0.0", {}, "anything.example", "http://other.example", 200),
    ("0.0.0.0", NAMED, "detector.example:8000", None, 200),
    ("0.0.0.0", NAMED, "a.inside.example", None, 200),
    ("0.0.0.0", NAMED, "inside.example", None, 421),
    ("0.0.0.0", NAMED, "127.0.0.1", None, 421),
    ("0.0.0.0", NAMED, "detector.example", "https://app.example", 200),
    ("0.0.0.0", NAMED, "detector.example", "http://app.example", 403),
    ("0.0.0.0", NAMED, "detector.example", "http://detector.example", 200),
    (LOCAL, {"hosts": ("detector.example",)}, "detector.example", None, 200),
    (LOCAL, {"hosts": ("detector.example",)}, "localhost", None, 421),
    (LOCAL, {"hosts": ("*",), "origins": ("*",)}, "attacker.example", "http://attacker.example", 200),
    ("::", {"hosts": ("[2001:db8::7]",)}, "[2001:db8::7]:8000", None, 200),
    ("::", {"hosts": ("[2001:db8::7]",)}, "[2001:db8::8]:8000", None, 421),
    ("0.0.0.0", {}, None, None, 400),
    ("0.0.0.0", {}, ["a.example", "b.example"], None, 400),
    ("0.0.0.0", {}, "", None, 400),
    ("0.0.0.0", {}, "a.example/path", None, 400),
    ("0.0.0.0", {}, "user@a.example", None, 400),
    ("0.0.0.0", {}, "a.example:port", None, 400),
]


@pytest.mark.parametrize(("address", "choices", "host", "origin", "expected"), RULES)
def test_rule(address, choices, host, origin, expected):
    assert status(address, choices, host, origin) == expected


def test_older_clients_have_no_host():
    assert status("127.0.0.1", {}, version="1.0") == 200


@pytest.mark.parametrize("text", ["http://a.example", "a.example:80", "a.example/x", "", "a.*.example", "a b"])
def test_hosts_that_are_none(text):
    with pytest.raises(SessionError, match="an allowed host is"):
        parse_hosts(text)


@pytest.mark.parametrize("text", ["a.example", "https://a.example/", "ftp://a.example", "", "https://", "null"])
def test_origins_that_are_none(text):
    with pytest.raises(SessionError, match="an allowed origin is"):
        parse_origins(text)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.7", "detector.example", "localhost.example"])
def test_no_loopback(address):
    assert not is_loopback(address)


ASKED = [
    # What is sent, and the answer's first line and headers.
    ("GET /v1/models HTTP/1.1\r\nHost: {own}", "200"),
    ("GET /v1/models HTTP/1.1\r\nHost: attacker.example", "421"),
    ("GET /v2 HTTP/1.1\r\nHost: attacker.example", "421"),
    ("GET / HTTP/1.1\r\nHost: attacker.example", "421"),
    ("GET /metrics HTTP/1.1\r\nHost: attacker.example", "421"),
    ("POST /v1/detect HTTP/1.1\r\nHost: {own}\r\nOrigin: http://attacker.example\r\nContent-Length: 0", "403"),
    ("GET /v1/models HTTP/1.1", "400"),
    ("GET /healthz HTTP/1.1", "400"),
    ("GET /healthz HTTP/1.1\r\nHost: 10.0.0.7:8000", "200"),
    ("GET /healthz/ HTTP/1.1\r\nHost: attacker.example", "421"),
    ("GET /healthz/ HTTP/1.1\r\nHost: {own}", "404"),
    ("GET /v1/models HTTP/1.0", "200"),
]


def test_connections(tmp_path):
    with Server(write_onnx(tmp_path / "m.onnx"), "--workers", 1) as server:
        answers = []
        for text, _ in ASKED:
            with socket.create_connection((server.host, server.port), timeout=30) as connection:
                head = text.format(own=f"{server.host}:{server.port}")
                connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode())
                answer = b"".join(iter(lambda connection=connection: connection.recv(65536), b"")).decode()
            assert "attacker" not in answer and "\nlocation:" not in answer.lower()
            answers.append((text, answer.split()[1]))
        assert answers == ASKED
