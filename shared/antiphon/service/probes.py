"""`/healthz`, `/readyz` and `/metrics`: on a port of their own, or mounted on another server."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from antiphon.service.web import web_server
from antiphon.wire.base import ProcessState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from antiphon.service.health import ProcessHealth
    from antiphon.telemetry.metrics import Metrics

_LEAVE_S = 0.5
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def probe_routes(
    health: ProcessHealth,
    metrics: Metrics,
    private: Callable[[web.Request], bool] = lambda _: False,
) -> list[web.RouteDef]:
    """Return the three routes, for `app.add_routes`.

    `private` returns whether a request may see metrics with tenant names.
    """

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        status = 200 if health.state is ProcessState.READY else 503
        return web.Response(text=f"{health.state}\n", status=status)

    async def page(request: web.Request) -> web.Response:
        body = metrics.text(private=private(request))
        return web.Response(body=body, headers={"Content-Type": _METRICS_TYPE})

    return [web.get("/healthz", alive), web.get("/readyz", ready), web.get("/metrics", page)]


@asynccontextmanager
async def probe_server(
    health: ProcessHealth, metrics: Metrics, *, host: str, port: int
) -> AsyncGenerator[int]:
    """Serve the probes inside the block; yields the port, which was chosen if `port` is 0.

    Raises:
        CannotStart: The port is taken, or the address is not local.
    """
    app = web.Application()
    app.add_routes(probe_routes(health, metrics))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_LEAVE_S)
    async with web_server(runner, host, port) as bound:
        yield bound
