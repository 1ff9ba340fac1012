"""The HTTP server: its life, its limits, and errors in one shape whatever went wrong."""

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
"""Set on a request whose reply has begun: nothing but its connection can fail now."""

REQUEST_ID = web.RequestKey("request_id", str)
"""Set on a request that is owned, or refused, so that its error names it too."""

WARNINGS = web.RequestKey("warnings", list[str])
"""Set on a request of which something was left out: each is named in a header."""

_BODY_S = 60.0
_LEAVE_S = 5.0
IDLE_S = 75.0
"""How long a connection may wait for its next request, and take for its headers."""
_WARNINGS_MAX = 16
_WARNING_CHARACTERS_MAX = 256
_TOO_MANY_HEADERS = "Too many headers received"
"""How the parser says that; it has no class of its own for it."""


@asynccontextmanager
async def http_server(
    config: GatewayConfig,
    routes: Iterable[web.AbstractRouteDef],
    guard: Middleware,
    origins: frozenset[str],
    counting: Middleware,
    prefix: str = "",
) -> AsyncGenerator[int]:
    """Answer while inside; gives the port. A client that leaves cancels its handler.

    `guard` lets requests in; pages of `origins` may call; `counting` sees what the client sees.
    A `prefix` is removed from paths that begin with it, before anything else looks at them.

    Raises:
        CannotStart: The port is taken, or the address is not ours.
        ConfigError: The files of TLS cannot be used.
    """
    tls = server_context(config)
    # We count bytes for ourselves.
    app = web.Application(middlewares=[counting, _errors], client_max_size=0)
    app.on_response_prepare.append(_set_request_id)
    if origins:
        allow_origins(app, origins)  # before the guard: browsers ask for leave without a key
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
    """Read the body of a JSON request, and no more of it than is allowed.

    Args:
        request: The client's.
        bytes_max: Largest body.
        count: Called with the bytes of each piece before it is kept; it may refuse the body.

    Raises:
        InvalidRequest: Another content type, or a body that broke off.
        RequestTooLarge: Says how large it is, or how much of it had come.
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
        raise InvalidRequest(f"the body did not come within {_BODY_S:g} s") from None
    except web.RequestPayloadError as error:
        raise InvalidRequest("the body broke off or cannot be decoded") from error


def _accepts_untyped(request: web.Request) -> bool:
    """Whether the type may be left open: Ollama's users write `curl -d`, which says it is a form.

    A page that a browser shows must not get through so without being asked for: it has an origin.
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
    """Write an error as a reply, in the shape of the request's path."""
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
        response.force_close()  # the rest of the body may still be under way
    return response


def warning(text: str) -> str:
    """Write a header `Warning`: 299 is of any kind, and lasts."""
    printable = text[:_WARNING_CHARACTERS_MAX].encode("ascii", "replace").decode()
    safe = "".join(letter if letter.isprintable() else "?" for letter in printable)
    quoted = safe.replace("\\", "\\\\").replace('"', '\\"')
    return f'299 antiphon "{quoted}"'


def warn(request: web.Request, texts: Iterable[str]) -> None:
    """Add a `Warning` header for each of these to the reply."""
    request.setdefault(WARNINGS, []).extend(texts)


async def _set_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Name the request by the header that its family has for that."""
    header = shape_of(request.path).id_header
    if header is not None and (request_id := request.get(REQUEST_ID)) is not None:
        response.headers[header] = request_id
    for text in request.get(WARNINGS, [])[:_WARNINGS_MAX]:
        response.headers.add(hdrs.WARNING, warning(text))


class _Runner(web.AppRunner):
    """Serves an application over connections of ours."""

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
    """Tells what is too long from what is not HTTP: errors of the parser reach no middleware."""

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
        text = f"The headers are too large; the limits are {limits}."
        return failure(HeadersTooLarge(text), request)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except EngineError as error:
        return _refused(request, error)
    except web.HTTPException as error:
        return _unrouted(request, error)
    except Exception:
        log.exception("handler failed", extra={"path": request.path})
        if request.get(RESPONSE_STARTED, False) and request.transport is not None:
            request.transport.abort()
        return _refused(request, Internal("internal error"))


def _refused(request: web.Request, error: EngineError) -> web.Response:
    """Write an error; a request that was not taken in gets an id here, so that it can be named."""
    request_id = request.setdefault(REQUEST_ID, new_request_id())
    response = failure(error, request)
    response.headers["X-Request-Id"] = request_id
    return response


class _NotFound(InvalidRequest):
    """There is no such path."""

    code = "not_found"
    status = web.HTTPNotFound.status_code


class _NotAllowed(InvalidRequest):
    """There is, for other methods."""

    code = "method_not_allowed"
    status = web.HTTPMethodNotAllowed.status_code


def _unrouted(request: web.Request, error: web.HTTPException) -> web.Response:
    if error.status == _NotAllowed.status:
        refusal = _NotAllowed(f"{request.method} is not allowed on {request.path}")
    else:
        refusal = _NotFound(f"{request.method} {request.path} does not exist")
    response = _refused(request, refusal)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _without_traceback(record: logging.LogRecord) -> bool:
    """Write what is not HTTP as one line: aiohttp shows a client's nonsense like a bug of ours."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        record.msg, record.args = "not http", None
        record.reason = " ".join(error.message.split())
        record.exc_info = None
    return True


_protocol_log.addFilter(_without_traceback)
