"""Texts of addresses."""

from __future__ import annotations

import re

# Also in the path, as recorders with firmware of Xiongmai have it: /user=admin_password=x_channel=1_stream=0.sdp
_SECRET = re.compile(
    r"(?i)([?&/_][^=&/]*(?:pass|pwd|user|token|secret|auth|key|sig|credential)[^=&/]*?=).*?(?=_(?:password|channel|stream)=|[&#]|$)"
)
# USER:12/34@HOST reads like a host with the port 12, whose path has an "@": what may be a password is not shown.
_LIKE_A_PORT = re.compile(r"[^/?#@\[\]]*:\d+$")


def is_web_address(value: object) -> bool:
    """Whether a value is the text of an http or https address."""
    return isinstance(value, str) and value[:8].lower().startswith(("http://", "https://"))


def without_secrets(address: str) -> str:
    """An address without user name, password and such parameters."""
    scheme, colon, rest = address.partition("://")
    if not colon:
        return address
    host, slash, path = rest.partition("/")
    if _LIKE_A_PORT.match(host) and "@" in path:
        return _SECRET.sub(r"\1...", f"{scheme}://...@{path.rpartition('@')[2]}")
    return _SECRET.sub(r"\1...", f"{scheme}://{host.rpartition('@')[2]}{slash}{path}")
