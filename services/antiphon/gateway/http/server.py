"""The HTTP server: its life, its limits, and errors in one shape whatever went wrong."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from antiphon.gateway.http.errors import ErrorBody, ErrorEnvelope, envelope, retry_after
from antiphon.service.web import web_server
from antiphon.wire.errors import EngineError, Internal, InvalidRequest, RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from aiohttp.typedefs import Handler

log = logging.getLogger(__name__)

_protocol_log = logging.getLogger(f"{__name__}.protocol")

BEGUN = web.RequestKey("begun", bool)
"""Set on a request whose reply has begun: nothing but its connection can fail now."""

REQUEST_ID = web.RequestKey("request_id", str)
"""Set on a request that is owned, so that its error names it too."""

_BODY_S = 60.0
_LEAVE_S = 5.0
_HEADER_BYTES_MAX = 16 * 1024


@asynccontextmanager
async def http_server(
    host: str, port: int, routes: Iterable[web.AbstractRouteDef]
) -> AsyncGenerator[int]:
    """Answer while inside; gives the port. A client that leaves cancels its handler.

    Raises:
        CannotStart: The port is taken, or the address is not ours.
    """
    app = web.Application(middlewares=[_errors], client_max_size=0)  # we count for ourselves
    app.add_routes(routes)
    runner = web.AppRunner(
        app,
        logger=_protocol_log,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=_LEAVE_S,
        max_line_size=_HEADER_BYTES_MAX,
        max_field_size=_HEADER_BYTES_MAX,
    )
    async with web_server(runner, host, port) as bound:
        yield bound


async def read_json(request: web.Request, bytes_max: int) -> bytes:
    """Read the body of a JSON request, and no more of it than is allowed.

    Raises:
        InvalidRequest: Another content type, or a body that broke off.
        RequestTooLarge: Says how large it is, or how much of it had come.
    """
    if request.content_type != "application/json":
        raise InvalidRequest(
            f"Unsupported Media Type: send application/json, not {request.content_type}"
        )
    if (request.content_length or 0) > bytes_max:
        raise RequestTooLarge.of(size_bytes=request.content_length or 0, bytes_max=bytes_max)
    try:
        async with asyncio.timeout(_BODY_S):
            return await _read(request, bytes_max)
    except TimeoutError:
        raise InvalidRequest(f"the body did not come within {_BODY_S:g} s") from None
    except web.RequestPayloadError as error:
        raise InvalidRequest("the body broke off or cannot be decoded") from error


async def _read(request: web.Request, bytes_max: int) -> bytes:
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > bytes_max:
            raise RequestTooLarge.of(size_bytes=len(body), bytes_max=bytes_max)
    return bytes(body)


def failure(error: EngineError) -> web.Response:
    """Write an error as a reply."""
    response = _reply(error.status, envelope(error))
    response.headers.update(retry_after(error))
    if isinstance(error, RequestTooLarge):
        response.force_close()  # the rest of the body may still be under way
    return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except EngineError as error:
        response = failure(error)
        if (request_id := request.get(REQUEST_ID)) is not None:
            response.headers["X-Request-Id"] = request_id
        return response
    except web.HTTPException as error:
        return _unrouted(request, error)
    except Exception:
        log.exception("handler failed", extra={"path": request.path})
        if request.get(BEGUN, False) and request.transport is not None:
            request.transport.abort()
        return failure(Internal("internal error"))


def _unrouted(request: web.Request, error: web.HTTPException) -> web.Response:
    if error.status == web.HTTPMethodNotAllowed.status_code:
        text, code = f"{request.method} is not allowed on {request.path}", "method_not_allowed"
    else:
        text, code = f"{request.method} {request.path} does not exist", "not_found"
    body = ErrorEnvelope(ErrorBody(text, "invalid_request_error", None, code))
    response = _reply(error.status, body)
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


def _reply(status: int, body: ErrorEnvelope) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(body), content_type="application/json"
    )
