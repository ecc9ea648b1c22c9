"""HTTP connections with limits that uvicorn leaves to a proxy: size and time of the head of a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_LIMIT = 64 * 1024  # bytes of the address and the headers
HEAD_TIMEOUT_S = 20.0

# So many bytes of a refused body are discarded, so that the client reads the response.
DISCARD_LIMIT = 256 * 1024 * 1024


class LimitedProtocol(HttpToolsProtocol):
    """A connection that is closed if a head is too long or too slow, or if a refused body does not end."""

    _head_size = 0
    _discarded = 0
    _in_head = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        began = self._in_head
        super().data_received(data)
        if self.transport is None or self.transport.is_closing():
            return
        if self._in_head and began:
            # The parser reports complete headers only, so that an endless one is counted here.
            self._head_size += len(data)
            if self._head_size > HEAD_LIMIT:
                self._end(431, "the address and the headers are too long")
        elif not self._in_head and self.cycle is not None and self.cycle.response_complete:  # the rest of a refused body
            self._discarded += len(data)
            if self._discarded > DISCARD_LIMIT:
                self.transport.close()
        if self._head_timer is None and self._between():
            self._wait_for_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_size, self._discarded = True, 0, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

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
