"""HTTP servers of a process, their TLS, and the state that its probes show."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from antiphon.config.errors import ConfigError
from antiphon.service.startup import bind
from antiphon.wire.base import ProcessState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from antiphon.config.gateway import GatewayConfig
    from antiphon.telemetry.metrics import Metrics


@asynccontextmanager
async def web_server(
    runner: web.AppRunner, host: str, port: int, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[int]:
    """Serve inside the block; yields the port, which was chosen if `port` is 0."""
    listening = bind(host, port)
    bound: int = listening.getsockname()[1]
    await runner.setup()
    try:
        await web.SockSite(runner, listening, ssl_context=tls).start()
        yield bound
    finally:
        await runner.cleanup()
        listening.close()


def server_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """The TLS context of the gateway; None for plain HTTP."""
    if not config.ssl_certfile:
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_client_required"):
            if getattr(config, name):
                raise ConfigError(f"gateway.{name} requires gateway.ssl_certfile, the certificate")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate = _file("ssl_certfile", config.ssl_certfile)
    key = _file("ssl_keyfile", config.ssl_keyfile) if config.ssl_keyfile else None
    try:
        # Without a callback OpenSSL would prompt on the terminal; an empty password just fails.
        context.load_cert_chain(certificate, key, lambda: config.ssl_keyfile_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(
            f"gateway.ssl_certfile, ssl_keyfile: {certificate}, {key or certificate}: not a "
            f"certificate with its key, or wrong ssl_keyfile_password: {error}"
        ) from error
    if config.ssl_ca_certs:
        authorities = _file("ssl_ca_certs", config.ssl_ca_certs)
        try:
            context.load_verify_locations(authorities)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"gateway.ssl_ca_certs: {authorities}: {error}") from error
        required = config.ssl_client_required
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    elif config.ssl_client_required:
        raise ConfigError("gateway.ssl_client_required requires gateway.ssl_ca_certs")
    return context


def _file(name: str, path: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"gateway.{name}: {file}: no such file")
    return file


_LEAVE_S = 0.5
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ProcessHealth:
    """State of this process: starting, then ready, then draining; never back."""

    def __init__(self) -> None:
        self.state = ProcessState.STARTING
        self._changed = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []

    def ready(self) -> None:
        assert self.state is ProcessState.STARTING
        self.state = ProcessState.READY
        self.changed()

    def draining(self) -> None:
        self.state = ProcessState.DRAINING
        self.changed()

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
