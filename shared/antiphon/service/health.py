"""State of a process, for its heartbeat and for `/healthz`, `/readyz` and `/metrics`."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from antiphon.service.web import web_server
from antiphon.wire.base import ProcessState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from antiphon.telemetry.metrics import Metrics

_LEAVE_S = 0.5
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ProcessHealth:
    """State of this process: starting, then ready, then draining; never back."""

    def __init__(self) -> None:
        self._state = ProcessState.STARTING
        self._changed = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def state(self) -> ProcessState:
        return self._state

    def ready(self) -> None:
        assert self._state is ProcessState.STARTING
        self._move(ProcessState.READY)

    def draining(self) -> None:
        self._move(ProcessState.DRAINING)

    def changed(self) -> None:
        """Send a heartbeat at once, because its content changed, such as the leader."""
        self._changed.set()

    async def send_heartbeat(self) -> None:
        """Send a heartbeat at once, and return when it was sent, or sending failed."""
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(sent)
        self.changed()
        await sent

    def take_waiters(self) -> list[asyncio.Future[None]]:
        """Return the futures that wait for the next heartbeat. For the heartbeat task only."""
        waiters, self._waiters = self._waiters, []
        return waiters

    async def wait_changed(self) -> None:
        """Wait for the next change. For the heartbeat task only."""
        await self._changed.wait()
        self._changed.clear()

    def _move(self, state: ProcessState) -> None:
        self._state = state
        self.changed()


def probe_routes(
    health: ProcessHealth,
    metrics: Metrics,
    private: Callable[[web.Request], bool] = lambda _: False,
) -> list[web.RouteDef]:
    """The three routes, for `app.add_routes`.

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
    """Serve the probes inside the block; yields the port, which was chosen if `port` is 0."""
    app = web.Application()
    app.add_routes(probe_routes(health, metrics))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_LEAVE_S)
    async with web_server(runner, host, port) as bound:
        yield bound
