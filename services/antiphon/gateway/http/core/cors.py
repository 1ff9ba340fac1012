"""Cross-origin requests: denied unless the operator names the origin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import hdrs, web

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler, Middleware

_METHODS = "GET, POST, PUT, DELETE"
_EXPOSED_HEADERS = "X-Request-Id, Retry-After"
_MAX_AGE_S = "600"


def allow_origins(app: web.Application, origins: frozenset[str]) -> None:
    """Let pages of these origins read responses; `*` allows any. No cookies are used.

    Must be called before the middlewares that check keys: preflight requests have none.
    """

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        origin = _allowed(request, origins)
        if origin is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED_HEADERS
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)

    app.on_response_prepare.append(mark)
    app.middlewares.append(_preflight(origins))


def _preflight(origins: frozenset[str]) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        gen_requests = request.method == hdrs.METH_OPTIONS and (
            hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        )
        if not gen_requests or _allowed(request, origins) is None:
            return await handler(request)
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
            hdrs.ACCESS_CONTROL_MAX_AGE: _MAX_AGE_S,
        }
        wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)
        if wanted is not None:
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
        return web.Response(status=204, headers=headers)

    return middleware


def _allowed(request: web.Request, origins: frozenset[str]) -> str | None:
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None:
        return None
    if "*" in origins:
        return "*"
    return origin if origin in origins else None
