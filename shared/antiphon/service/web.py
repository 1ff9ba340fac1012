"""An HTTP server on a port that is bound before any other setup, and its TLS."""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from antiphon.config.errors import ConfigError
from antiphon.service.sockets import bind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon.config.gateway import GatewayConfig


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
