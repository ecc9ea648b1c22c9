"""Request bodies, read within limits of size, time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from ..backends.worker_process import Bulk
from .config import MIB, ServeConfig
from .errors import Refused

_STEP = 256 * 1024  # bytes that are decompressed at a time


_ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class Bodies:
    """Reads request bodies within limits of size, time, and total memory (`max_held_mib`)."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.limit = config.max_held_mib * MIB
        self.held = 0
        self._unpacking = asyncio.Semaphore(1)  # several at a time could all be refused for the memory of the others

    @contextlib.asynccontextmanager
    async def reading(self, request: Request) -> AsyncIterator[HeldBody]:
        """The decompressed body of a request; counts towards the limit until the block ends.

        Raises:
            Refused: too large, too slow, not a body of that encoding, or no memory for it now.
            ClientDisconnect: the client disconnected.
        """
        held = HeldBody(self)
        try:
            try:
                await asyncio.wait_for(self._read(request, held), self.config.body_timeout_s)
            except asyncio.TimeoutError:
                limit = self.config.body_timeout_s
                raise Refused(
                    408, "slow_body", f"the body did not arrive within {limit:g} s; send it faster", close=True
                ) from None
            yield held
        finally:
            held.hold(0)

    async def _read(self, request: Request, held: HeldBody) -> None:
        limit = self.config.max_body
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise self._too_large(f"{declared[:20]} bytes")
        body = Bulk()
        async for chunk in request.stream():
            if len(body) + len(chunk) > limit:
                raise self._too_large(f"more than {limit} bytes")
            held.hold(len(body) + len(chunk))
            body += chunk
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("identity", ""):
            held.data = body
        elif encoding in _ENCODINGS:
            async with self._unpacking:
                held.data = await self._decompressed(body, encoding, held)
        else:
            raise Refused(415, "bad_encoding", f"Content-Encoding must be gzip, deflate or identity; got '{encoding[:40]}'")

    async def _decompressed(self, packed: Bulk, encoding: str, held: HeldBody) -> Bulk:
        """Decompress in steps, so that each is counted before it takes memory, and other requests are served between them."""
        limit = self.config.max_body
        inflate = zlib.decompressobj(_ENCODINGS[encoding])
        body = Bulk()
        for first in range(0, len(packed), _STEP):
            part = packed[first : first + _STEP]
            while part and not inflate.eof:
                held.hold(len(packed) + min(len(body) + MIB, limit))
                try:
                    body += await asyncio.to_thread(inflate.decompress, part, MIB)
                except zlib.error as error:
                    raise Refused(400, "bad_encoding", f"the body is not {encoding} data ({error})") from None
                if len(body) > limit:
                    raise self._too_large(f"more than {limit} bytes when unpacked")
                part = inflate.unconsumed_tail
            if inflate.eof:
                break
        if not inflate.eof:
            raise Refused(400, "bad_encoding", f"the {encoding} body is cut off; send all of it")
        if inflate.unused_data or first + _STEP < len(packed):
            raise Refused(400, "bad_encoding", f"more follows the end of the {encoding} body; compress all of it at once")
        held.hold(len(body))
        return body

    def _too_large(self, got: str) -> Refused:
        return Refused(
            413,
            "body_too_large",
            f"the body has {got}; at most {self.config.max_body} are taken: send fewer or smaller images, or start the server "
            "with a larger `max_body_mib`",
        )


class HeldBody:
    """The body of one request, or what was made of it, as long as it is in memory.

    data: its decompressed bytes; empty once `take` was called.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._count, self.data = bodies, 0, Bulk()

    def take(self) -> Bulk:
        """The bytes, which the caller holds from now on."""
        data, self.data = self.data, Bulk()
        return data

    def hold(self, count: int) -> None:
        """Count so many bytes for this request. Raises Refused: that is too much for all requests together."""
        more = count - self._count
        if more > 0 and self._bodies.held + more > self._bodies.limit:
            raise Refused(
                429,
                "memory_full",
                f"the server holds {self._bodies.held // MIB} MiB of requests already, of at most {self._bodies.limit // MIB}; try "
                "again later",
                retry_after=1,
            )
        self._bodies.held += more
        self._count = count
