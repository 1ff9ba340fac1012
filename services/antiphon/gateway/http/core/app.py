"""The HTTP server: its lifetime, its limits, and errors in one format."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError, LineTooLong

from antiphon.config.errors import ConfigError
from antiphon.gateway.http.core.errors import retry_after, shape_of
from antiphon.service.web import server_context, web_server
from antiphon.wire.errors import (
    EngineError,
    HeadersTooLarge,
    Internal,
    InvalidRequest,
    RequestTooLarge,
    Unauthorized,
)
from antiphon.wire.ids import new_request_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from aiohttp.http_parser import RawRequestMessage
    from aiohttp.typedefs import Handler, Middleware

    from antiphon.config.gateway import GatewayConfig
    from antiphon.gateway.request_metrics import GatewayMetrics

log = logging.getLogger(__name__)

_protocol_log = logging.getLogger(f"{__name__}.protocol")

RESPONSE_STARTED = web.RequestKey("begun", bool)
"""Set on a request whose response has started: from here on only its connection can fail."""

REQUEST_ID = web.RequestKey("request_id", str)
"""Set on an accepted or rejected request, so that its error includes the id."""

WARNINGS = web.RequestKey("warnings", list[str])
"""Set on a request of which something was ignored; each entry becomes a header."""

_LEAVE_S = 5.0
IDLE_S = 75.0
"""Maximum time a connection may be idle, and take to send its headers."""
_WARNINGS_MAX = 16
_WARNING_CHARACTERS_MAX = 256
_TOO_MANY_HEADERS = "Too many headers received"
"""The parser's message; it has no exception class for it."""

_CORS_METHODS = "GET, POST, PUT, DELETE"
_CORS_EXPOSED_HEADERS = "X-Request-Id, Retry-After"
_CORS_MAX_AGE_S = "600"
_UNKNOWN = "unknown"
"""Endpoint of an unknown path, and method label of an unknown method."""
_CLIENT_LEFT = "499"


@asynccontextmanager
async def http_server(
    config: GatewayConfig,
    routes: Iterable[web.AbstractRouteDef],
    guard: Middleware,
    origins: frozenset[str],
    counting: Middleware,
    prefix: str = "",
) -> AsyncGenerator[int]:
    """Serve while inside; yields the port. A client that disconnects cancels its handler.

    `guard` authorizes requests; pages of `origins` may call; `counting` sees what the client sees.
    A `prefix` is removed from paths that start with it, before anything else reads them.
    """
    tls = server_context(config)
    # Bytes are counted by `receive.read_json`.
    app = web.Application(middlewares=[counting, _errors], client_max_size=0)
    app.on_response_prepare.append(_set_request_id)
    if origins:
        # Before the guard: browsers send preflight requests without a key.
        allow_origins(app, origins)
    app.middlewares.append(guard)
    app.add_routes(routes)
    runner = _Runner(
        app,
        prefix,
        logger=_protocol_log,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=_LEAVE_S,
        keepalive_timeout=IDLE_S,
        max_line_size=config.header_bytes_max,
        max_field_size=config.header_bytes_max,
    )
    async with web_server(runner, config.host, config.port, tls) as bound:
        yield bound


def failure(error: EngineError, request: web.BaseRequest) -> web.Response:
    shape = shape_of(request.path)
    response = web.Response(
        status=shape.status(error),
        body=msgspec.json.encode(shape.write(error, request.get(REQUEST_ID))),
        content_type="application/json",
        headers=retry_after(error),
    )
    if isinstance(error, Unauthorized):
        response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    if isinstance(error, RequestTooLarge):
        response.force_close()  # the rest of the body may still be in flight
    return response


def warning(text: str) -> str:
    """Build a `Warning` header; code 299 is a miscellaneous persistent warning."""
    printable = text[:_WARNING_CHARACTERS_MAX].encode("ascii", "replace").decode()
    safe = "".join(letter if letter.isprintable() else "?" for letter in printable)
    quoted = safe.replace("\\", "\\\\").replace('"', '\\"')
    return f'299 antiphon "{quoted}"'


def warn(request: web.Request, texts: Iterable[str]) -> None:
    request.setdefault(WARNINGS, []).extend(texts)


async def _set_request_id(request: web.Request, response: web.StreamResponse) -> None:
    header = shape_of(request.path).id_header
    if header is not None and (request_id := request.get(REQUEST_ID)) is not None:
        response.headers[header] = request_id
    for text in request.get(WARNINGS, [])[:_WARNINGS_MAX]:
        response.headers.add(hdrs.WARNING, warning(text))


class _Runner(web.AppRunner):
    def __init__(self, app: web.Application, prefix: str, **options: Any) -> None:  # noqa: ANN401
        super().__init__(app, **options)
        self._prefix = prefix

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()

        def make(message: RawRequestMessage, *rest: Any) -> web.BaseRequest:  # noqa: ANN401
            return made.request_factory(without_prefix(message, self._prefix), *rest)

        factory = make if self._prefix else made.request_factory
        return _Server(made.request_handler, request_factory=factory, **self._kwargs)


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """Separates oversized headers from invalid HTTP: no middleware sees parser errors."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        too_many = isinstance(exc, BadHttpMessage) and exc.message == _TOO_MANY_HEADERS
        if not (too_many or isinstance(exc, LineTooLong)):
            return super().handle_error(request, status, exc, message)
        log.info("headers too large")
        limits = f"{self.max_headers} headers, {self.max_field_size} bytes each and for the path"
        text = f"Request headers are too large; the limits are {limits}."
        return failure(HeadersTooLarge(text), request)


def prefix_of(root_path: str, paths: Iterable[str]) -> str:
    """Return the prefix without a trailing slash; reject one that paths of the API start with."""
    prefix = root_path.rstrip("/")
    for path in paths:
        if prefix and (path == prefix or path.startswith(f"{prefix}/")):
            raise ConfigError(
                f"gateway.root_path (--fastapi-root-path): the API's own path {path} "
                f"starts with {prefix}; choose another prefix, or let the proxy strip it "
                "and leave root_path unset"
            )
    return prefix


def without_prefix(message: RawRequestMessage, prefix: str) -> RawRequestMessage:
    """Remove the prefix from a request's path, if the proxy has not."""
    path = message.url.raw_path
    if path != prefix and not path.startswith(f"{prefix}/"):
        return message
    rest = path.removeprefix(prefix) or "/"
    url = message.url.with_path(rest, encoded=True, keep_query=True, keep_fragment=True)
    return message._replace(path=str(url), url=url)


def allow_origins(app: web.Application, origins: frozenset[str]) -> None:
    """Let pages of these origins read responses; `*` allows any. No cookies are used.

    Must be called before the middlewares that check keys: preflight requests have none.
    """

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        if (origin := _allowed_origin(request, origins)) is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _CORS_EXPOSED_HEADERS
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)

    app.on_response_prepare.append(mark)
    app.middlewares.append(_cors_preflight(origins))


def _cors_preflight(origins: frozenset[str]) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_preflight = request.method == hdrs.METH_OPTIONS and (
            hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        )
        if not is_preflight or _allowed_origin(request, origins) is None:
            return await handler(request)
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _CORS_METHODS,
            hdrs.ACCESS_CONTROL_MAX_AGE: _CORS_MAX_AGE_S,
        }
        if (wanted := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)) is not None:
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
        return web.Response(status=204, headers=headers)

    return middleware


def _allowed_origin(request: web.Request, origins: frozenset[str]) -> str | None:
    if (origin := request.headers.get(hdrs.ORIGIN)) is None:
        return None
    if "*" in origins:
        return "*"
    return origin if origin in origins else None


def metrics_middleware(metrics: GatewayMetrics) -> Middleware:
    """The outermost middleware, so that it sees the responses that clients see."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        # The path template, so that ids in paths do not create series.
        resource = request.match_info.route.resource
        endpoint = _UNKNOWN if resource is None else resource.canonical
        method = request.method if request.method in hdrs.METH_ALL else _UNKNOWN
        metrics.custom.read(request.headers)
        metrics.http_requests.labels(endpoint, method).inc()
        active = metrics.http_active.labels(endpoint, method)
        active.inc()
        status = "500"
        try:
            response = await handler(request)
            status = str(response.status)
        except asyncio.CancelledError:
            status = _CLIENT_LEFT
            raise
        else:
            return response
        finally:
            active.dec()
            metrics.http_responses.labels(endpoint, status, method).inc()

    return middleware


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except EngineError as error:
        return _error_response(request, error)
    except web.HTTPException as error:
        return _unrouted(request, error)
    except Exception:
        log.exception("handler failed", extra={"path": request.path})
        if request.get(RESPONSE_STARTED, False) and request.transport is not None:
            request.transport.abort()
        return _error_response(request, Internal("internal error"))


def _error_response(request: web.Request, error: EngineError) -> web.Response:
    """Write an error; a request that was not accepted gets an id here."""
    request_id = request.setdefault(REQUEST_ID, new_request_id())
    response = failure(error, request)
    response.headers["X-Request-Id"] = request_id
    return response


class _NotFound(InvalidRequest):
    code = "not_found"
    status = web.HTTPNotFound.status_code


class _NotAllowed(InvalidRequest):
    code = "method_not_allowed"
    status = web.HTTPMethodNotAllowed.status_code


def _unrouted(request: web.Request, error: web.HTTPException) -> web.Response:
    if error.status == _NotAllowed.status:
        refusal = _NotAllowed(f"{request.method} is not allowed on {request.path}")
    else:
        refusal = _NotFound(f"{request.method} {request.path} does not exist")
    response = _error_response(request, refusal)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _without_traceback(record: logging.LogRecord) -> bool:
    """Log invalid HTTP as one line: aiohttp logs it with a traceback, like a bug."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        record.msg, record.args = "invalid HTTP request", None
        record.reason = " ".join(error.message.split())
        record.exc_info = None
    return True


_protocol_log.addFilter(_without_traceback)
