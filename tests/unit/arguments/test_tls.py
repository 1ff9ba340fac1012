"""TLS of the gateway, with real certificates and a real client."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.arguments import compare_async, settings_of
from tests.unit.arguments.certificates import Certificate, make
from tests.unit.gateway.cluster import house

from antiphon.config.errors import ConfigError
from antiphon.service.web import server_context

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.config.settings import Settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def served(folder: Path) -> Certificate:
    return make(folder, "served", password="swordfish")


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Certificate:
    return make(folder, "stranger")


async def health(settings: Settings, trusted: ssl.SSLContext | None) -> int | str:
    """The status of /health over https and, without `trusted`, over plain HTTP."""
    config = settings.gateway
    tls = {name: getattr(config, name) for name in config.__struct_fields__ if "ssl" in name}
    async with house(**tls) as at, aiohttp.ClientSession() as session:
        url = at.url if trusted is None else at.url.replace("http:", "https:")
        try:
            async with session.get(f"{url}/health", ssl=trusted or False) as reply:
                return reply.status
        except aiohttp.ClientError as error:
            return type(error).__name__


def arguments(served: Certificate) -> tuple[str, ...]:
    files = ("--ssl-certfile", str(served.certificate), "--ssl-keyfile", str(served.key))
    return (*files, "--ssl-keyfile-password", "swordfish")


@pytest.mark.argument("--ssl-certfile")
@pytest.mark.argument("--ssl-keyfile")
async def test_certificate_makes_the_api_https(served: Certificate) -> None:
    trusted = ssl.create_default_context(cafile=str(served.certificate))
    over_tls = await compare_async(
        *arguments(served), observe=lambda settings: health(settings, trusted)
    )
    assert over_tls == (200, "ClientConnectorSSLError")
    plain = await compare_async(*arguments(served), observe=lambda settings: health(settings, None))
    assert plain == ("ServerDisconnectedError", 200)


@pytest.mark.argument("--ssl-keyfile-password")
async def test_password_opens_the_key(served: Certificate) -> None:
    async def opened(settings: Settings) -> bool:
        try:
            return server_context(settings.gateway) is not None
        except ConfigError:
            return False

    given, without = await compare_async(
        *("--ssl-keyfile-password", "swordfish"), observe=opened, base=arguments(served)[:4]
    )
    assert (given, without) == (True, False)


@pytest.mark.argument("--ssl-ca-certs")
async def test_ca_certs_verify_the_certificate_of_a_client(
    served: Certificate, stranger: Certificate
) -> None:
    trusted = ssl.create_default_context(cafile=str(served.certificate))
    trusted.load_cert_chain(stranger.certificate, stranger.key)
    given, without = await compare_async(
        *("--ssl-ca-certs", str(served.certificate)),
        observe=lambda settings: health(settings, trusted),
        base=arguments(served),
    )
    assert without == 200
    assert given != 200, "a certificate of another authority was let in"
    nothing = ssl.create_default_context(cafile=str(served.certificate))
    optional = (*arguments(served), "--ssl-ca-certs", str(stranger.certificate))
    assert await health(settings_of(*optional), nothing) == 200
    assert await health(settings_of(*optional), trusted) == 200
    required = settings_of(*optional, "--gateway-ssl-client-required")
    assert await health(required, trusted) == 200
    assert await health(required, nothing) != 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ssl-keyfile", "/k"), r"ssl_keyfile requires gateway\.ssl_certfile"),
        (("--ssl-keyfile-password", "k"), r"ssl_keyfile_password requires gateway\.ssl_certfile"),
        (("--ssl-ca-certs", "/k"), r"ssl_ca_certs requires gateway\.ssl_certfile"),
        (("--gateway-ssl-client-required",), r"ssl_client_required requires gateway\.ssl_certfile"),
    ],
)
def test_halves_of_tls_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        server_context(settings_of(*arguments).gateway)


def test_clients_are_asked_for_certificates_only_with_an_authority(stranger: Certificate) -> None:
    files = ("--ssl-certfile", str(stranger.certificate), "--ssl-keyfile", str(stranger.key))
    with pytest.raises(ConfigError, match="ssl_client_required requires"):
        server_context(settings_of(*files, "--gateway-ssl-client-required").gateway)
