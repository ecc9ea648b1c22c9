"""Running of the server with uvicorn. SIGTERM and Ctrl-C drain it: accepted requests finish. SIGHUP loads the models again."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator

from ..errors import DetrtError, SessionError
from .config import ServeConfig
from .errors import Refused

log = logging.getLogger("detrt.serve")

# Seconds in which responses close their connections, before idle connections are closed.
_GOODBYE_S = 1.0
_M_MMAP_THRESHOLD, _OWN_BLOCK = -3, 256 * 1024


def serve(
    config: ServeConfig,
    *,
    on_ready: Callable[[str, dict], None] | None = None,
    on_worker: Callable[[int, int], None] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; accepted requests are finished before this returns.

    on_ready: called with the address and `Pool.models` when every worker is ready. on_worker: called before that with the number
        of workers that are ready, and of all.

    Raises:
        SessionError: the address is in use, or a worker cannot start. DetrtError: a model that cannot be opened.
    """
    import uvicorn

    from .app import create_app
    from .metrics import Metrics
    from .protocol import LimitedProtocol
    from .scheduler import Pool

    _prepare_process()
    listener = _listening(config.host, config.port)
    address = _address(listener)

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # `run` below has the handlers

    async def run() -> DetrtError | None:
        metrics = Metrics()
        pool = Pool(config, metrics, on_worker)
        app = create_app(config, pool, metrics)
        settings = uvicorn.Config(
            app,
            http=LimitedProtocol,
            ws="none",
            lifespan="on",
            access_log=config.access_log,
            log_level="info" if config.access_log else "warning",
            log_config=_logging(config.access_log),
            timeout_keep_alive=75,
            server_header=False,
            backlog=2048,
        )
        server = Server(settings)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stopping() -> None:
            if stop.is_set():  # a second signal stops immediately
                pool.refuse_all(_stopping())
                server.force_exit = True
            stop.set()

        asking = set[asyncio.Task[None]]()

        async def load() -> None:
            try:
                await pool.load()
            except Refused as refusal:
                log.error("SIGHUP: %s", config.spelled(str(refusal)))
            else:
                log.info("SIGHUP: %s loaded", ", ".join(pool.models))

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup leaves it
            loop.add_signal_handler(signal.SIGHUP, lambda: asking.add(asyncio.ensure_future(load())))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        watching = asyncio.create_task(_announce(pool, address, on_ready))
        failed = asyncio.create_task(pool.failed.wait())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((serving, failed, stopped), return_when=asyncio.FIRST_COMPLETED)
            pool.stop_loading()
            app.state.calls.stopping = True  # /readyz reports it, and responses close their connections
            late = loop.call_later(config.drain_s, lambda: pool.refuse_all(_stopping()))
            hard = loop.call_later(config.drain_s + 5, lambda: setattr(server, "force_exit", True))
            if stop.is_set():
                # Closing a connection between two requests could lose the next one in flight.
                await asyncio.sleep(min(_GOODBYE_S, config.drain_s / 2))
            server.should_exit = True
            await serving
            late.cancel()
            hard.cancel()
        finally:
            for task in (watching, failed, stopped, *asking):
                task.cancel()
        return pool.failure if pool.failed.is_set() else None

    try:
        failure = _run(run())
    finally:
        listener.close()
    if failure is not None:
        raise failure


def _stopping() -> Refused:
    return Refused(503, "stopping", "the server stops and had no time left for this request; try again", retry_after=5)


def _run(main):
    try:
        import uvloop
    except ImportError:  # no uvloop on this platform: the default loop is a little slower
        return asyncio.run(main)
    return uvloop.run(main)


async def _announce(pool, address, on_ready) -> None:
    await pool.all_ready.wait()
    if on_ready is not None:
        on_ready(address, dict(pool.models))


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SessionError(
            f"`host='{host}'` is not an address of this machine ({error.strerror or error}); e.g. 127.0.0.1"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.set_inheritable(False)
    except OSError as error:
        listener.close()
        raise SessionError(
            f"cannot listen on {host}:{port} ({error.strerror}); give another `port` (0 takes a free one), or another `host`"
        ) from None
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _prepare_process() -> None:
    _raise_file_limit()
    _give_bodies_own_blocks()
    # What was imported lives as long as the server: each full collection would look through it, for 50 ms and more.
    gc.collect()
    gc.freeze()


def _raise_file_limit() -> None:
    """Raise the limit of open files: the default soft limit of 1024 limits connections."""
    try:
        import resource
    except ImportError:  # Windows has no such module, and no such limit
        return
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _give_bodies_own_blocks() -> None:
    """Let glibc map large blocks by themselves: they grow without a copy, and are given back when they are freed.

    By itself it raises the size from which it does so to that of the largest block that was freed.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # other C libraries have no such call
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _OWN_BLOCK)


def _logging(access: bool) -> dict:
    """Logging to stderr; nothing goes to stdout."""
    plain = {"format": "%(asctime)s %(levelname)s %(message)s"}
    handler = {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stderr"}
    level = {"handlers": ["stderr"], "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": plain},
        "handlers": {"stderr": handler},
        "loggers": {
            "uvicorn": {**level, "level": "WARNING"},
            "uvicorn.error": {**level, "level": "WARNING"},
            "uvicorn.access": {**level, "level": "INFO"} if access else {"level": "CRITICAL", "propagate": False},
            "detrt.serve": {**level, "level": "INFO"},
            "python_multipart": {"level": "CRITICAL", "propagate": False},  # what is wrong with a form is in the answer
        },
    }


log.addHandler(logging.NullHandler())
