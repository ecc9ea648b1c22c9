"""HTTP connections with limits that uvicorn leaves to a proxy: size and time of the head of a request, and what frames its body."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_LIMIT = 64 * 1024  # bytes of the address and the headers, and of what frames a body without being part of it
HEAD_TIMEOUT_S = 20.0

# So many bytes of a refused body are discarded, so that the client reads the response.
DISCARD_LIMIT = 256 * 1024 * 1024


class PlainParser:
    """The parser of httptools for a protocol, which takes a request that offers another protocol as a plain one, as RFC 9110, 7.8, lets it.

    By itself it ends such a request behind its head: its body is lost, or read as the next request. curl --http2 and the client of
    Java offer one with each first request.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._parser = self._new()
        self._going_on = False  # a second parser reads the head that the first one has read

    def _new(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # httptools before 0.6.3
            parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return parser

    def feed_data(self, data: bytes) -> None:
        """Raises httptools.HttpParserError."""
        left = memoryview(data)
        while left:
            try:
                self._parser.feed_data(left)
                return
            except httptools.HttpParserUpgrade as offer:
                left = left[offer.args[0] :]
            framing = [pair for pair in self._protocol.headers if pair[0] in (b"content-length", b"transfer-encoding")]
            if not self._parser.should_keep_alive():
                framing.append((b"connection", b"close"))
            self._parser, self._going_on = self._new(), True
            self._parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % pair for pair in framing) + b"\r\n")
            self._going_on = False

    def should_upgrade(self) -> bool:
        return False

    def should_keep_alive(self) -> bool:
        return bool(self._parser.should_keep_alive())

    def get_http_version(self) -> str:
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        return bytes(self._parser.get_method())

    def on_message_begin(self) -> None:
        if not self._going_on:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._going_on:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._going_on:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._going_on:
            self._protocol.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():
            self._protocol.on_message_complete()


class LimitedProtocol(HttpToolsProtocol):
    """A connection that is closed if a head is too long or too slow, or if a refused body or what frames a body does not end."""

    _idle_size = 0  # bytes since the last that ended a head or a request, or were part of a body
    _discarded = 0
    _in_head = False
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = PlainParser(self)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._idle_size += len(data)
        super().data_received(data)
        if self.transport is None or self.transport.is_closing():
            return
        if self._idle_size > HEAD_LIMIT:
            # The parser reports what is complete only, so that an endless header, trailer or size of a chunk is counted here.
            if not self._in_head and self.cycle is not None and self.cycle.response_started:
                self.transport.close()
            else:
                self._end(431, "the address, the headers or what frames the body is too long")
        elif not self._in_head and self.cycle is not None and self.cycle.response_complete:  # the rest of a refused body
            self._discarded += len(data)
            if self._discarded > DISCARD_LIMIT:
                self.transport.close()
        if self._head_timer is None and self._between():
            self._wait_for_head()

    def send_400_response(self, msg: str) -> None:
        """Called while the error of the parser is handled, which says more than `msg`."""
        error = sys.exc_info()[1]
        advice = ""
        if isinstance(error, httptools.HttpParserInvalidURLError):
            advice = "; write what is not ASCII in the address as %XX, or send the options in a form or in JSON"
        self._end(400, f"the request is not HTTP/1.1: {error or msg}{advice}")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._discarded = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer has no meaning here, and comes after the headers were checked
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._idle_size = False, 0
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._idle_size = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._idle_size = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline:  # requests that were read already; each answer would have more read
            self.flow.pause_reading()

    def _between(self) -> bool:
        """Whether no request is being processed: bytes belong to the next head, or to the rest of a refused body."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _too_slow(self) -> None:
        self._head_timer = None
        if self._between():
            self._end(408, "the head of the request did not arrive in time")

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end(self, status: int, text: str) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        body = text.encode("ascii")
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            + b"content-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()
