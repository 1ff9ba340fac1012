"""Authentication and authorization, before the body is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import hdrs, web

from antiphon.gateway.access.access import ANONYMOUS, PROBE_CALLER, Access, Caller
from antiphon.wire.errors import EngineError, HeadersTooLarge

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiohttp.typedefs import Handler, Middleware

    from antiphon.gateway.http.core.operation import Operation
    from antiphon.gateway.request_metrics import GatewayMetrics
    from antiphon.wire.ids import TenantId

_CALLER = web.RequestKey("caller", Caller)
_OPEN = ("/health", "/ready", "/metrics")
"""Prefixes of paths that need no key, since monitoring has none."""
_KEY_HEADER = "X-Api-Key"
_UNCOUNTED = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})


def tenant_of(request: web.Request) -> TenantId:
    """Return the tenant of a request; one tenant cannot see another's data."""
    return request.get(_CALLER, ANONYMOUS).tenant


def auth_middleware(
    access: Access,
    operations: Iterable[Operation],
    metrics: GatewayMetrics,
    *,
    header_bytes_max: int,
) -> Middleware:
    """Raises HeadersTooLarge; Unauthorized; Forbidden for an operator's path; RateLimited."""
    admin = frozenset(one.path for one in operations if one.admin)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        with metrics.count_rejections():
            _check_headers(request, header_bytes_max)
        path = _path(request)
        if path.startswith(_OPEN) or request.method == hdrs.METH_OPTIONS:
            request[_CALLER] = PROBE_CALLER
            return await handler(request)
        with metrics.count_rejections():
            caller = access.authenticate(_key(request), admin=path in admin)
        request[_CALLER] = caller
        if request.method not in _UNCOUNTED and path not in admin:
            with metrics.count_rejections(caller.tenant):
                access.count_request(caller.tenant)
        return await handler(request)

    return middleware


def is_admin(access: Access, request: web.Request) -> bool:
    """Whether a request has an operator's key, or none is required."""
    try:
        access.authenticate(_key(request), admin=True)
    except EngineError:
        return False
    return True


def _path(request: web.Request) -> str:
    """The path template of the operation: what is matched counts, not its spelling."""
    resource = request.match_info.route.resource
    return request.path if resource is None else resource.canonical


def _key(request: web.Request) -> str | None:
    """The key: OpenAI's clients send a bearer token, Anthropic's a header of their own."""
    scheme, _, key = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return request.headers.get(_KEY_HEADER)


def _check_headers(request: web.Request, bytes_max: int) -> None:
    """Check the total size; the parser limits the size of each header and their number."""
    size = sum(len(name) + len(value) + len(": \r\n") for name, value in request.raw_headers)
    if size > bytes_max:
        raise HeadersTooLarge(
            f"Request headers are too large: {size} bytes; the limit is {bytes_max} bytes.",
            details={"size_bytes": str(size), "bytes_max": str(bytes_max)},
        )
