"""Keys and limits over NATS: the same as over HTTP, on a real nats-server, by the real client."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.support.nats import NatsServer
from tests.support.wait import until
from tests.unit.gateway.calls import TEXT
from tests.unit.gateway.cluster import MODEL, House, house
from tests.unit.gateway.keyed import key_of, keyed
from tests.unit.gateway.test_generate import request, visiting

from antiphon.bus.nats import NatsTransport
from antiphon.client import Client
from antiphon.config.gateway import AccessConfig
from antiphon.config.settings import BusConfig
from antiphon.wire.errors import (
    EngineError,
    ErrorReply,
    Forbidden,
    InvalidRequest,
    RateLimited,
    Unauthorized,
)
from antiphon.wire.generate import GenerateAccepted, GenerateEnd, GenerateText

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

API = "sk-api"


@pytest.fixture
async def nats() -> AsyncIterator[NatsServer]:
    async with NatsServer() as server:
        yield server


@asynccontextmanager
async def at_nats(nats: NatsServer, access: AccessConfig) -> AsyncGenerator[House]:
    link = BusConfig(url=nats.url)
    async with house(lambda: NatsTransport(link, name="test"), access=access) as at:
        yield at


def client(nats: NatsServer, tenant: str = "default", key: str = "") -> Client:
    return Client(nats.url, cluster="test", tenant=tenant, api_key=key)


async def refusal(asker: Client, **options: object) -> EngineError:
    """Ask and be refused."""
    with pytest.raises(EngineError) as caught:
        await asker.complete(MODEL, "hi", timeout_s=10, **options)  # pyright: ignore[reportArgumentType]
    return caught.value


async def test_a_client_shows_the_key_of_its_tenant(
    nats: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    access = keyed(tmp_path_factory.mktemp("keys"), {"acme": {}, "other": {}}, api_key=API)
    cases: list[tuple[str, str, type[EngineError] | None]] = [
        ("acme", key_of("acme"), None),
        ("default", API, None),
        ("acme", "", Unauthorized),
        ("acme", "sk-wrong", Unauthorized),
        ("acme", key_of("other"), Forbidden),
        ("default", key_of("acme"), Forbidden),
        ("stranger", key_of("acme"), Forbidden),
        ("acme", API, Forbidden),
    ]
    async with at_nats(nats, access) as at:
        for tenant, key, error in cases:
            async with client(nats, tenant, key) as asker:
                if error is None:
                    assert (await asker.complete(MODEL, "hi", timeout_s=10)).text == TEXT
                else:
                    assert isinstance(await refusal(asker), error), (tenant, key)
        assert [submit.tenant for submit in at.cluster.submits] == ["acme", "default"]


async def test_the_server_key_is_asked_for_over_nats_too(nats: NatsServer) -> None:
    async with at_nats(nats, AccessConfig(api_key=API)):
        async with client(nats) as without:
            assert isinstance(await refusal(without), Unauthorized)
        async with client(nats, key=API) as shown:
            assert (await shown.complete(MODEL, "hi", timeout_s=10)).text == TEXT


async def test_both_doors_count_as_one(
    nats: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    limits = {"requests_per_minute": 6, "requests_burst": 2}
    access = keyed(tmp_path_factory.mktemp("keys"), {"acme": limits})
    async with at_nats(nats, access) as at, client(nats, "acme", key_of("acme")) as asker:
        headers = {"Authorization": f"Bearer {key_of('acme')}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            body = {"prompt": "hi", "max_tokens": 4}
            async with session.post(f"{at.url}/v1/completions", json=body) as reply:
                assert reply.status == 200
            assert (await asker.complete(MODEL, "hi", timeout_s=10)).text == TEXT
            error = await refusal(asker)
            assert isinstance(error, RateLimited)
            assert 0 < (error.retry_after_s or 0) <= 10
            async with session.post(f"{at.url}/v1/completions", json=body) as reply:
                assert reply.status == 429
        assert len(at.cluster.submits) == 2


async def test_tokens_places_models_and_priorities_are_the_same(
    nats: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tenants = {
        "tokens": {"tokens_per_minute": 1, "tokens_burst": 40},
        "places": {"concurrency": 1},
        "models": {"models": ["another"]},
        "ranks": {"priority": 2, "priority_max": 3},
    }
    access = keyed(tmp_path_factory.mktemp("keys"), tenants)
    async with at_nats(nats, access) as at:
        async with client(nats, "tokens", key_of("tokens")) as asker:
            await asker.complete(MODEL, "hi", timeout_s=10, max_tokens=38)
            error = await refusal(asker, max_tokens=38)
            assert (type(error), error.details) == (RateLimited, {"limit": "tokens_per_minute"})
            error = await refusal(asker, max_tokens=39)
            assert (type(error), error.param) == (InvalidRequest, "max_tokens")
        async with client(nats, "models", key_of("models")) as asker:
            assert isinstance(await refusal(asker), Forbidden)
        async with client(nats, "ranks", key_of("ranks")) as asker:
            await asker.complete(MODEL, "hi", timeout_s=10)
            await asker.complete(MODEL, "hi", timeout_s=10, priority=0)
            error = await refusal(asker, priority=4)
            assert (type(error), error.param) == (InvalidRequest, "priority")
            assert [submit.priority for submit in at.cluster.submits[-2:]] == [2, 0]
        at.cluster.hold_at = 1
        async with client(nats, "places", key_of("places")) as asker:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(asker.complete(MODEL, "hi", timeout_s=10))
                await until(lambda: at.open_count == 1)
                assert isinstance(await refusal(asker), RateLimited)
                at.cluster.go.set()
            assert running.result().text == TEXT


async def test_a_bare_client_says_its_key_in_json_and_a_retry_costs_nothing(
    nats: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    limits = {"requests_per_minute": 1}
    access = keyed(tmp_path_factory.mktemp("keys"), {"acme": limits})
    key = key_of("acme")
    async with at_nats(nats, access) as at, visiting(at, "acme") as bare:
        await bare.ask(request(api_key=key), json=True)
        await bare.first(GenerateEnd)
        await bare.ask(request(api_key=key), json=True)
        await bare.first(GenerateEnd, 2)
        assert (len(bare.all(GenerateAccepted)), len(at.cluster.submits)) == (2, 1)
        assert bare.all(GenerateText)
        await bare.ask(request(), json=True)
        await bare.first(ErrorReply)
        await bare.ask(request("other", api_key=key), json=True)
        await bare.first(ErrorReply, 2)
    codes = [error.code for error in bare.all(ErrorReply)]
    assert codes == ["invalid_api_key", "rate_limit_exceeded"]
