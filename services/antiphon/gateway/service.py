"""Wires the gateway: the owner to the bus, the doors to the owner."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from antiphon.gateway.driver import Driver
from antiphon.gateway.encode import TokenizerCalls
from antiphon.gateway.entrance import Entrance
from antiphon.gateway.http.doors import operations
from antiphon.gateway.http.operation import routes
from antiphon.gateway.http.server import http_server
from antiphon.gateway.metrics import GatewayMetrics
from antiphon.gateway.nats.generate import Generations
from antiphon.gateway.owner.machine import Limits, Owner
from antiphon.service.endpoint import Follow
from antiphon.service.model import served_name
from antiphon.service.probes import probe_routes
from antiphon.service.service import Report
from antiphon.wire.base import Role
from antiphon.wire.errors import Unavailable
from antiphon.wire.routes import ABORT, NOTICE, TEXT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.config.settings import Settings
    from antiphon.service.endpoint import Endpoint
    from antiphon.service.service import Runtime
    from antiphon.wire.abort import AbortRequests
    from antiphon.wire.ids import ModelName


class GatewayService:
    """The door of one model, over HTTP and NATS."""

    role = Role.GATEWAY

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._model = served_name(settings)
        self.port = 0
        """Where HTTP is answered, once the lifespan has begun."""

    @asynccontextmanager
    async def lifespan(self, runtime: Runtime) -> AsyncGenerator[None]:
        """Take the HTTP port first: without it nothing else is worth starting."""
        gateway = self._settings.gateway
        self._runtime = runtime
        metrics = GatewayMetrics(runtime.metrics.registry)
        limits = Limits(unread_bytes_max=gateway.unread_bytes_max, open_list_s=gateway.open_list_s)
        owner = Owner(runtime.process, self._model, runtime.clock, limits)
        self._driver = driver = Driver(owner, runtime, self._model, metrics)
        tokenizers = TokenizerCalls(runtime, self._model)
        self._entrance = entrance = Entrance(runtime, self._model, driver, tokenizers, metrics)
        self._generations = Generations(runtime, self._model, entrance, driver, metrics)
        served = operations(runtime, self._model, entrance, driver, tokenizers, metrics)
        metrics.watch_open(lambda: driver.open_count)
        paths = (*routes(served), *probe_routes(runtime.health, runtime.metrics))
        async with http_server(gateway.host, gateway.port, paths) as self.port:
            driver.start()
            try:
                yield
            finally:
                await driver.close(Unavailable("this gateway has left", retry_after_s=1.0))
                await self._generations.close()

    def endpoints(self) -> Sequence[Endpoint]:
        """Requests of NATS clients, text of detokenizers, notices of the leader, and aborts."""
        address = {"gateway": self._runtime.process.instance}
        return (
            Follow(route=TEXT, apply=self._driver.take_text, address=address),
            Follow(route=NOTICE, apply=self._driver.take_notice, address=address),
            Follow(route=ABORT, apply=self._on_abort, address={"model": self._model}),
            *self._generations.endpoints(),
        )

    async def _on_abort(self, message: AbortRequests) -> None:
        if message.not_after_unix_ms >= self._runtime.clock.unix_ms():
            self._entrance.abort(message.prefix)

    def model(self) -> ModelName | None:
        """The model that it is the door of."""
        return self._model

    def report(self) -> Report:
        """Open requests."""
        return Report(load=self._driver.open_count)

    async def drain(self) -> None:
        """Return when every open request has ended and every client over NATS was told.

        HTTP clients are waited for when the server closes.
        """
        await self._driver.idle()
        await self._generations.idle()
