"""Reading request bodies within limits: of size, of time, and of memory for all of them together."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from .config import MIB, ServeConfig
from .errors import Refused

_ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class Bodies:
    """Bytes of request bodies that the server holds, at most `max_held_mib`."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.limit = config.max_held_mib * MIB
        self.held = 0

    @contextlib.asynccontextmanager
    async def reading(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, unpacked where it is compressed; it counts until the block ends.

        Raises:
            Refused: too large, too slow, not a body of that encoding, or no memory for it now.
            ClientDisconnect: the client left.
        """
        share = _Share(self)
        try:
            try:
                body = await asyncio.wait_for(self._read(request, share), self.config.body_timeout_s)
            except asyncio.TimeoutError:
                limit = self.config.body_timeout_s
                raise Refused(
                    408, "slow_body", f"the body did not arrive within {limit:g} s; send it faster", close=True
                ) from None
            yield body
        finally:
            share.release()

    async def _read(self, request: Request, share: _Share) -> bytes:
        limit = self.config.max_body
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise self._too_large(f"{declared} bytes")
        body = bytearray()
        async for chunk in request.stream():
            if len(body) + len(chunk) > limit:
                raise self._too_large(f"more than {limit} bytes")
            share.take(len(chunk))
            body += chunk
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("identity", ""):
            return bytes(body)
        if encoding not in _ENCODINGS:
            raise Refused(415, "bad_encoding", f"Content-Encoding must be gzip, deflate or identity; got '{encoding[:40]}'")
        unpacked = await asyncio.to_thread(self._unpacked, bytes(body), encoding)
        share.take(len(unpacked))
        return unpacked

    def _unpacked(self, packed: bytes, encoding: str) -> bytes:
        limit = self.config.max_body
        inflate = zlib.decompressobj(_ENCODINGS[encoding])
        try:
            body = inflate.decompress(packed, limit + 1)
        except zlib.error as error:
            raise Refused(400, "bad_encoding", f"the body is not {encoding} data ({error})") from None
        if len(body) > limit:
            raise self._too_large(f"more than {limit} bytes when unpacked")
        if not inflate.eof:
            raise Refused(400, "bad_encoding", f"the {encoding} body is cut off; send all of it")
        return body

    def _too_large(self, got: str) -> Refused:
        return Refused(
            413,
            "body_too_large",
            f"the body has {got}; at most {self.config.max_body} are taken: send fewer or smaller images, or start the server "
            "with a larger --max-body-mib",
        )


class _Share:
    """What one request holds."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._count = bodies, 0

    def take(self, count: int) -> None:
        if self._bodies.held + count > self._bodies.limit:
            raise Refused(
                429,
                "memory_full",
                f"the server holds {self._bodies.held // MIB} MiB of requests already, of at most {self._bodies.limit // MIB}; try "
                "again later",
                retry_after=1,
            )
        self._bodies.held += count
        self._count += count

    def release(self) -> None:
        self._bodies.held -= self._count
        self._count = 0


__all__ = ["Bodies", "ClientDisconnect"]
