"""The HTTP server: its lifetime, its limits, and errors in one format."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError, LineTooLong

from antiphon.gateway.http.core.cors import allow_origins
from antiphon.gateway.http.core.errors import retry_after, shape_of
from antiphon.gateway.http.core.root_path import without_prefix
from antiphon.service.tls import server_context
from antiphon.service.web import web_server
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
    from collections.abc import AsyncGenerator, Callable, Iterable

    from aiohttp.http_parser import RawRequestMessage
    from aiohttp.typedefs import Handler, Middleware

    from antiphon.config.gateway import GatewayConfig

log = logging.getLogger(__name__)

_protocol_log = logging.getLogger(f"{__name__}.protocol")

RESPONSE_STARTED = web.RequestKey("begun", bool)
"""Set on a request whose response has started: from here on only its connection can fail."""

REQUEST_ID = web.RequestKey("request_id", str)
"""Set on an accepted or rejected request, so that its error includes the id."""

WARNINGS = web.RequestKey("warnings", list[str])
"""Set on a request of which something was ignored; each entry becomes a header."""

_BODY_S = 60.0
_LEAVE_S = 5.0
IDLE_S = 75.0
"""Maximum time a connection may be idle, and take to send its headers."""
_WARNINGS_MAX = 16
_WARNING_CHARACTERS_MAX = 256
_TOO_MANY_HEADERS = "Too many headers received"
"""The parser's message; it has no exception class for it."""


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

    Raises:
        CannotStart: The port is in use, or the address is not local.
        ConfigError: The TLS files are not usable.
    """
    tls = server_context(config)
    # Bytes are counted by `read_json`.
    app = web.Application(middlewares=[counting, _errors], client_max_size=0)
    app.on_response_prepare.append(_set_request_id)
    if origins:
        allow_origins(
            app, origins
        )  # before the guard: browsers send preflight requests without a key
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


async def read_json(request: web.Request, bytes_max: int, count: Callable[[int], None]) -> bytes:
    """Read the body of a JSON request, up to the allowed size.

    Args:
        request: The client's request.
        bytes_max: Maximum size of the body.
        count: Called with the size of each piece before it is kept; it may reject the body.

    Raises:
        InvalidRequest: The content type is wrong, or the body is incomplete.
        RequestTooLarge: With the size of the body, or the size received so far.
    """
    if request.content_type != "application/json" and not _accepts_untyped(request):
        raise InvalidRequest(
            f"Unsupported Media Type: send application/json, not {request.content_type}"
        )
    if (request.content_length or 0) > bytes_max:
        raise RequestTooLarge.of(size_bytes=request.content_length or 0, bytes_max=bytes_max)
    try:
        async with asyncio.timeout(_BODY_S):
            return await _read(request, bytes_max, count)
    except TimeoutError:
        raise InvalidRequest(f"the body was not received within {_BODY_S:g} s") from None
    except web.RequestPayloadError as error:
        raise InvalidRequest("the body is incomplete or cannot be decoded") from error


def _accepts_untyped(request: web.Request) -> bool:
    """Whether the content type is optional: Ollama's users send `curl -d`, which declares a form.

    A request from a web page, which has an origin, must not bypass the preflight that way.
    """
    return request.path.startswith("/api/") and "Origin" not in request.headers


async def _read(request: web.Request, bytes_max: int, count: Callable[[int], None]) -> bytes:
    body = bytearray()
    async for chunk in request.content.iter_any():
        count(len(chunk))
        body += chunk
        if len(body) > bytes_max:
            raise RequestTooLarge.of(size_bytes=len(body), bytes_max=bytes_max)
    return bytes(body)


def failure(error: EngineError, request: web.BaseRequest) -> web.Response:
    """Write an error as a response, in the format of the request's path."""
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
    """Add a `Warning` header to the response for each of these."""
    request.setdefault(WARNINGS, []).extend(texts)


async def _set_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Set the family's request id header."""
    header = shape_of(request.path).id_header
    if header is not None and (request_id := request.get(REQUEST_ID)) is not None:
        response.headers[header] = request_id
    for text in request.get(WARNINGS, [])[:_WARNINGS_MAX]:
        response.headers.add(hdrs.WARNING, warning(text))


class _Runner(web.AppRunner):
    """Serves an application over `_Connection`s."""

    def __init__(self, app: web.Application, prefix: str, **options: Any) -> None:  # noqa: ANN401
        super().__init__(app, **options)
        self._prefix = prefix

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        factory = made.request_factory
        if self._prefix:
            factory = _unprefixed(factory, self._prefix)
        return _Server(made.request_handler, request_factory=factory, **self._kwargs)


def _unprefixed(factory: Callable[..., web.BaseRequest], prefix: str) -> Callable[..., Any]:
    def make(message: RawRequestMessage, *rest: object) -> web.BaseRequest:
        return factory(without_prefix(message, prefix), *rest)

    return make


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
    """The path does not exist."""

    code = "not_found"
    status = web.HTTPNotFound.status_code


class _NotAllowed(InvalidRequest):
    """The path exists for other methods."""

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
