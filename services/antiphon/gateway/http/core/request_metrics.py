"""Counts HTTP requests and responses by endpoint."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import hdrs, web

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler, Middleware

    from antiphon.gateway.metrics import GatewayMetrics

_UNKNOWN = "unknown"
"""Endpoint of an unknown path, and method label of an unknown method."""
_CLIENT_LEFT = "499"


def metrics_middleware(metrics: GatewayMetrics) -> Middleware:
    """Return the middleware.

    It is the outermost, so that it sees the responses that clients see.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        endpoint, method = _endpoint(request), _method(request)
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


def _endpoint(request: web.Request) -> str:
    """The path template, so that ids in paths do not create series."""
    resource = request.match_info.route.resource
    return _UNKNOWN if resource is None else resource.canonical


def _method(request: web.Request) -> str:
    return request.method if request.method in hdrs.METH_ALL else _UNKNOWN
