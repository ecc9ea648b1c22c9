"""Under which names this server answers, and to pages of which other servers: what a browser of its machine may be led to ask."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from ipaddress import ip_address

from ..errors import SessionError
from .errors import Refused

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::(\d{1,5}))?")
_PATTERN = re.compile(r"\*|(?:\*\.)?[a-z0-9_.-]+|\[[0-9a-f:.]+\]")
_PORTS = {"http": 80, "https": 443}
_LOOPBACK = ("localhost", "*.localhost", "127.0.0.1", "[::1]")


def parse_hosts(text: str) -> tuple[str, ...]:
    """Comma-separated names: `detector.example`, `*.example`, `192.0.2.7`, `[2001:db8::7]`, or `*` for all.

    Raises:
        SessionError: another form, such as an address with a scheme or a port.
    """
    names = tuple(part.strip().lower() for part in text.split(","))
    for name in names:
        if not _PATTERN.fullmatch(name):
            raise SessionError(f"an allowed host is a name or an address without scheme and port, *.NAME or *; got {name!r}")
    return names


def parse_origins(text: str) -> tuple[str, ...]:
    """Comma-separated origins as browsers write them: `https://app.example`, `http://10.0.0.3:3000`, or `*` for all.

    Raises:
        SessionError: another form, such as a name alone or an address with a path.
    """
    origins = tuple(part.strip().lower() for part in text.split(","))
    for origin in origins:
        if origin != "*" and _origin_of(origin) is None:
            raise SessionError(
                f"an allowed origin is a scheme and a host, such as https://app.example:3000, or *; got {origin!r}"
            )
    return origins


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a name or an address, with or without the brackets of IPv6."""
    name = host.strip("[]").lower().removesuffix(".")
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


class Hosts:
    """The check of a request. address: that the server listens on. hosts, origins: that it answers; empty: the names of the loopback
    where the address is one, else all.

    A page of another server may lead a browser to a server on its own machine, by a name that it lets point there or by a form that it
    sends; a key alone does not hold where none is set.
    """

    def __init__(self, address: str, hosts: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
        usual = is_loopback(address)
        self._own = address.lower()
        self._local_host, self._local_origin = usual and not hosts, usual and not origins
        self._hosts, self._origins = tuple(hosts) or (() if usual else ("*",)), tuple(origins) or (() if usual else ("*",))

    def check(self, headers: Sequence[tuple[bytes, bytes]], version: str, *, any_name: bool = False) -> None:
        """Raise Refused: 400 for no Host or one that is none, 421 for a name that is not allowed, 403 for such an origin.

        version: of HTTP. any_name: look at the form of Host alone.
        """
        found = [value for name, value in headers if name == b"host"]
        if len(found) > 1 or (not found and version != "1.0"):
            raise Refused(400, "bad_host", "a request has one Host header; add the name and the port of the server", close=True)
        host = None
        if found:
            host = _host_of(found[0].decode("latin-1"))
            if host is None:
                raise Refused(400, "bad_host", "the Host header is not a name or an address with a port", close=True)
            if not any_name and not self._takes_host(host[0]):
                named = ", ".join((*_LOOPBACK, *self._hosts) if self._local_host else self._hosts)
                raise Refused(
                    421,
                    "foreign_host",
                    f"this server does not answer under that name, but as {named}; see its `allowed_hosts`",
                    close=True,
                )
        for name, value in headers:
            if name == b"origin" and not any_name and not self._takes_origin(value.decode("latin-1").lower(), host):
                raise Refused(
                    403, "foreign_origin", "pages of that origin may not use this server; see its `allowed_origins`", close=True
                )

    def _takes_host(self, name: str) -> bool:
        if self._local_host and (is_loopback(name) or name == self._own):
            return True
        return any(fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in self._hosts)

    def _takes_origin(self, origin: str, host: tuple[str, int | None] | None) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        place = _origin_of(origin)
        if place is None:  # "null": a file, or a page that hides where it is from
            return False
        scheme, name, port = place
        same = host is not None and (name, port) == (host[0], host[1] or _PORTS[scheme])
        return same or (self._local_origin and is_loopback(name))


def _host_of(text: str) -> tuple[str, int | None] | None:
    """(name, port) of a Host header; None: it is none."""
    match = _HOST.fullmatch(text.strip().lower())
    return None if match is None else (match[1].removesuffix("."), int(match[2]) if match[2] else None)


def _origin_of(text: str) -> tuple[str, str, int] | None:
    """(scheme, name, port) of an Origin header; None: it is none."""
    scheme, separator, rest = text.partition("://")
    host = _host_of(rest)
    if not separator or host is None or scheme not in _PORTS:
        return None
    return scheme, host[0], host[1] or _PORTS[scheme]
