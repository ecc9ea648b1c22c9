"""The HTTP interface: `/v1`, health, metrics and the page; `kserve` has `/v2`."""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..data.tiles import make_tiling
from ..system import package_version
from .bodies import Bodies
from .config import ServeConfig
from .errors import Refused, bad, internal
from .hosts import Hosts
from .kserve_routes import add_kserve
from .messages import ImageTask, ModelFacts
from .metrics import Metrics
from .openapi import detect_operation, refusals
from .reader import ReadDetect, Readers
from .request import is_one_file, query_options
from .scheduler import Calls, ClientDisconnected, Pool, milliseconds

PAGE = Path(__file__).with_name("page")
_PAGE_FILES = {"": ("index.html", "text/html"), "page.js": ("page.js", "text/javascript"), "page.css": ("page.css", "text/css")}
_DOCS = ("/docs", "/docs.js", "/docs/swagger-ui.js", "/docs/swagger-ui.css")
_PROBES = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")  # of orchestrators, which ask by address
_OPEN = frozenset(("/", "/page.js", "/page.css", *_DOCS, *_PROBES))
_SECURE = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; base-uri 'none'"),
)


def create_app(config: ServeConfig, pool: Pool, metrics: Metrics) -> FastAPI:
    """The application. It starts the pool with the server, and closes it after the last response."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        pool.start()
        yield
        await pool.close()
        await readers.close()

    app = FastAPI(
        title="detrt",
        version=package_version(),
        description="Object detection with models of the DETR family.",
        lifespan=lifespan,
        docs_url=None,  # these pages load code from other hosts; `_add_page` has one that does not
        redoc_url=None,
        redirect_slashes=False,  # an address with the Host that was sent
    )
    bodies, readers = Bodies(config), Readers(config)
    calls = Calls(config, pool, metrics)
    app.state.calls = calls
    metrics.watch("detrt_held_body_bytes", "Bytes of request bodies in memory", lambda: bodies.held)
    _add_errors(app, metrics, config)
    _add_health(app, calls, metrics)
    _add_v1(app, calls, bodies, readers, config)
    _add_page(app)
    add_kserve(app, calls, bodies, readers)
    app.add_middleware(_Gate, config=config, metrics=metrics, calls=calls)
    return app


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(data, ensure_ascii=False).encode("utf-8", "backslashreplace"), status, headers, "application/json")


def _error_response(refusal: Refused, path: str, config: ServeConfig) -> Response:
    """A refusal in the form of the protocol that a path belongs to; options of the server as its operator types them."""
    message = config.spelled(refusal.message)
    error = message if path.startswith("/v2") else {"code": refusal.code, "message": message}
    return json_response({"error": error}, refusal.status, refusal.headers)


def _add_errors(app: FastAPI, metrics: Metrics, config: ServeConfig) -> None:
    def answer(request: Request, refusal: Refused) -> Response:
        metrics.refused.labels(refusal.code).inc()
        return _error_response(refusal, request.url.path, config)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return answer(request, error)

    async def left(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # not received by anyone; for the metrics

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "no_route", 405: "bad_method"}.get(error.status_code, "bad_request")
        headers = error.headers or {}
        text = {
            404: "there is nothing at this address; see /openapi.json",
            405: f"this address takes {headers.get('Allow', 'other methods')}; got {request.method}",
        }
        found = answer(request, Refused(error.status_code, code, text.get(error.status_code, str(error.detail))))
        found.headers.update(headers)
        return found

    async def bug(request: Request, error: Exception) -> Response:
        return answer(request, internal())

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(ClientDisconnected, left)
    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, bug)


def _add_health(app: FastAPI, calls: Calls, metrics: Metrics) -> None:
    @app.get("/healthz", summary="Whether the server runs")
    async def healthz() -> Response:
        return json_response({"status": "ok"})

    @app.get("/readyz", summary="Whether requests are answered", responses={503: refusals()[503]})
    async def readyz() -> Response:
        ready = calls.pool.ready_workers
        state = "stopping" if calls.stopping else "ready" if ready else "starting"
        return json_response({"status": state, "workers": ready}, 200 if state == "ready" else 503)

    @app.get("/metrics", summary="Counters for Prometheus", response_class=Response)
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)


def model_card(facts: ModelFacts) -> dict[str, Any]:
    given = facts.spec.input
    return {
        "name": facts.name,
        "backend": facts.backend,
        "classes": list(facts.spec.labels.values()),
        "takes_prompt": facts.takes_prompt,
        "takes_task": facts.takes_task,
        "takes_query_images": facts.takes_query_images,
        "input": {"height": facts.size_hw[0], "width": facts.size_hw[1], "resize": given.resize},
        "max_batch": facts.max_batch,
        "content": facts.content,
        "note": facts.note,
    }


def _add_v1(app: FastAPI, calls: Calls, bodies: Bodies, readers: Readers, config: ServeConfig) -> None:
    @app.get("/v1/models", summary="The models that are served", responses={s: refusals()[s] for s in (401, 503)})
    async def models() -> Response:
        calls.model(next(iter(calls.pool.models), None))
        limits = {
            "max_images": config.max_images,
            "max_body_bytes": config.max_body,
            "max_pixels": config.max_pixels,
            "timeout_s": config.timeout_s,
        }
        return json_response({"models": [model_card(f) for f in calls.pool.models.values()], "limits": limits})

    @app.post(
        "/v1/detect",
        summary="Find objects in images",
        description="Images as files of a form, as base64 in JSON, or one as the body itself.",
        responses=refusals(),
        openapi_extra=detect_operation(),
    )
    async def detect(request: Request) -> Response:
        start = time.perf_counter()
        query = query_options(request.scope["query_string"])
        kind = request.headers.get("content-type", "")
        async with bodies.reading(request) as held:
            calls.metrics.body_bytes.inc(len(held.data))
            given = ReadDetect(kind, query, held.take(), config.max_images)
            asked = given.read() if is_one_file(kind) else await readers.read(given)
            del given
            options = asked.options
            facts = calls.model(options.model)
            if options.overlap is not None and options.tile is None:
                raise bad("'overlap' is of tiles, and there are none; give 'tile', or leave it out")
            prompt = tuple(options.prompt) if isinstance(options.prompt, list) else options.prompt
            tasks = [
                ImageTask(
                    data,
                    config.threshold if options.threshold is None else options.threshold,
                    None if options.classes is None else tuple(options.classes),
                    options.max_detections,
                    prompt,
                    options.task or "",
                    asked.query_images,
                    tiling=make_tiling(options.tile, options.overlap),
                )
                for _, data in asked.images
            ]
            answers, items = await calls.run(request, facts, tasks, options.timeout_ms)
        parts = []
        for (name, _), answer in zip(asked.images, answers, strict=True):
            named = b"" if name is None else b'"image":' + json.dumps(name).encode() + b","
            parts.append(b"{" + named + answer.value[1:])
        times = {
            "total": milliseconds(start),
            "queue": round(max(item.started - item.since for item in items) * 1e3, 3),
            "decode": round(max(answer.decode_ms for answer in answers), 3),
            "model": round(max(answer.model_ms for answer in answers), 3),
        }
        head = b'{"model":' + json.dumps(facts.name).encode() + b',"time_ms":' + json.dumps(times).encode() + b',"images":['
        return Response(head + b",".join(parts) + b"]}", media_type="application/json")


def _add_page(app: FastAPI) -> None:
    def serve(path: str, file: Path, kind: str) -> None:
        content = file.read_bytes()

        async def page() -> Response:
            return Response(content, media_type=kind)

        app.add_api_route(f"/{path}", page, include_in_schema=False)

    for path, (file, kind) in _PAGE_FILES.items():
        serve(path, PAGE / file, kind)
    assets = find_spec("fastapi_offline")  # Swagger UI as files: the usual page of FastAPI loads it from another host
    if assets is not None and assets.submodule_search_locations:
        folder = Path(assets.submodule_search_locations[0]) / "static"
        serve("docs", PAGE / "docs.html", "text/html")
        serve("docs.js", PAGE / "docs.js", "text/javascript")
        serve("docs/swagger-ui.js", folder / "swagger-ui-bundle.js", "text/javascript")
        serve("docs/swagger-ui.css", folder / "swagger-ui.css", "text/css")


class _Gate:
    """Middleware: the host, the API key, security headers, and the metrics of each request."""

    def __init__(self, app: ASGIApp, config: ServeConfig, metrics: Metrics, calls: Calls) -> None:
        self.app, self.config, self.metrics, self.calls = app, config, metrics, calls
        self.key = None if config.api_key is None else config.api_key.encode()
        self.hosts = Hosts(config.host, config.allowed_hosts, config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # as probes ask; uvicorn leaves the body of the answer out
            scope = {**scope, "method": "GET"}
        start = time.perf_counter()
        status = 499

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_SECURE]
                if self.calls.stopping:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            self.hosts.check(scope["headers"], scope["http_version"], any_name=scope["path"] in _PROBES)
            if self.key is not None and scope["path"] not in _OPEN and not self._allowed(scope):
                raise Refused(401, "no_key", "give the API key: Authorization: Bearer KEY, or X-API-Key: KEY", close=True)
        except Refused as refusal:
            self.metrics.refused.labels(refusal.code).inc()
            answer: ASGIApp = _error_response(refusal, scope["path"], self.config)
        else:
            answer = self.app
        try:
            await answer(scope, receive, sending)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, _method(scope["method"]), str(status)).inc()
            self.metrics.request_seconds.labels(route).observe(time.perf_counter() - start)

    def _allowed(self, scope: Scope) -> bool:
        assert self.key is not None
        for name, value in scope["headers"]:
            if name == b"x-api-key" and hmac.compare_digest(value, self.key):
                return True
            if name == b"authorization" and (match := re.fullmatch(rb"(?i:bearer) +(\S+)", value)):
                return hmac.compare_digest(match[1], self.key)
        return False


def _method(name: str) -> str:
    """The method as a label; unknown ones share a label, because a client may invent any number."""
    return name if name in ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH") else "other"
