"""Keys and limits over NATS: the same as over HTTP, on a real nats-server, by the real client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.nats import NatsServer
from tests.support.wait import until
from tests.unit.gateway.calls import COMPLETE, TEXT, ok, post
from tests.unit.gateway.cluster import MODEL, House, house, joining
from tests.unit.gateway.keyed import bearer, key_of, keyed
from tests.unit.gateway.test_generate import request, visiting

from antiphon.client import Client
from antiphon.config.gateway import AccessConfig
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
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

API = "sk-api"


@pytest.fixture
async def nats() -> AsyncIterator[NatsServer]:
    async with NatsServer() as server:
        yield server


def at_nats(nats: NatsServer, access: AccessConfig) -> AbstractAsyncContextManager[House]:
    return house(joining(nats), access=access)


def client(nats: NatsServer, tenant: str = "default", key: str | None = None) -> Client:
    """A client with the key of its tenant, or another one."""
    key = key_of(tenant) if key is None else key
    return Client(nats.url, cluster="test", tenant=tenant, api_key=key)


async def complete(client: Client, **options: Any) -> str:
    return (await client.complete(MODEL, "hi", timeout_s=10, **options)).text


async def refusal(client: Client, **options: object) -> EngineError:
    """The error of a completion."""
    with pytest.raises(EngineError) as caught:
        await complete(client, **options)
    return caught.value


@pytest.mark.parametrize(
    ("tenant", "key", "error"),
    [
        ("acme", key_of("acme"), None),
        ("default", API, None),
        ("acme", "", Unauthorized),
        ("acme", "sk-wrong", Unauthorized),
        ("acme", key_of("other"), Forbidden),
        ("default", key_of("acme"), Forbidden),
        ("stranger", key_of("acme"), Forbidden),
        ("acme", API, Forbidden),
    ],
)
async def test_client_needs_the_key_of_its_tenant(
    nats: NatsServer, tmp_path: Path, tenant: str, key: str, error: type[EngineError] | None
) -> None:
    access = keyed(tmp_path, {"acme": {}, "other": {}}, api_key=API)
    async with at_nats(nats, access) as at, client(nats, tenant, key) as asker:
        if error is None:
            assert await complete(asker) == TEXT
            assert [submit.tenant for submit in at.cluster.submits] == [tenant]
        else:
            assert isinstance(await refusal(asker), error)
            assert at.cluster.submits == []


async def test_server_key_is_needed_over_nats_too(nats: NatsServer) -> None:
    async with at_nats(nats, AccessConfig(api_key=API)):
        async with client(nats, key="") as without:
            assert isinstance(await refusal(without), Unauthorized)
        async with client(nats, key=API) as shown:
            assert await complete(shown) == TEXT


async def test_http_and_nats_share_one_budget(nats: NatsServer, tmp_path: Path) -> None:
    access = keyed(tmp_path, {"acme": {"requests_per_minute": 6, "requests_burst": 2}})
    async with at_nats(nats, access) as at, client(nats, "acme") as asker:
        body, key = {"prompt": "hi", "max_tokens": 4}, bearer(key_of("acme"))
        await ok(at, COMPLETE, body, **key)
        assert await complete(asker) == TEXT
        error = await refusal(asker)
        assert isinstance(error, RateLimited)
        assert 0 < (error.retry_after_s or 0) <= 10
        assert (await post(at, COMPLETE, body, **key)).status == 429
        assert len(at.cluster.submits) == 2


async def test_limits_of_tokens_models_and_priorities_hold_over_nats(
    nats: NatsServer, tmp_path: Path
) -> None:
    tenants = {
        "tokens": {"tokens_per_minute": 1, "tokens_burst": 40},
        "models": {"models": ["another"]},
        "ranks": {"priority": 2, "priority_max": 3},
    }
    async with at_nats(nats, keyed(tmp_path, tenants)) as at:
        async with client(nats, "tokens") as asker:
            await complete(asker, max_tokens=38)
            error = await refusal(asker, max_tokens=38)
            assert (type(error), error.details) == (RateLimited, {"limit": "tokens_per_minute"})
            error = await refusal(asker, max_tokens=39)
            assert (type(error), error.param) == (InvalidRequest, "max_tokens")
        async with client(nats, "models") as asker:
            assert isinstance(await refusal(asker), Forbidden)
        async with client(nats, "ranks") as asker:
            await complete(asker)
            await complete(asker, priority=0)
            error = await refusal(asker, priority=4)
            assert (type(error), error.param) == (InvalidRequest, "priority")
            assert [submit.priority for submit in at.cluster.submits[-2:]] == [2, 0]


async def test_concurrency_limit_holds_over_nats(nats: NatsServer, tmp_path: Path) -> None:
    access = keyed(tmp_path, {"acme": {"concurrency": 1}})
    async with at_nats(nats, access) as at, client(nats, "acme") as asker:
        at.cluster.hold_at = 1
        async with asyncio.TaskGroup() as group:
            running = group.create_task(complete(asker))
            await until(lambda: at.open_count == 1)
            assert isinstance(await refusal(asker), RateLimited)
            at.cluster.go.set()
        assert running.result() == TEXT


async def test_bare_client_has_its_key_in_json_and_a_retry_costs_nothing(
    nats: NatsServer, tmp_path: Path
) -> None:
    access = keyed(tmp_path, {"acme": {"requests_per_minute": 1}})
    key = key_of("acme")
    async with at_nats(nats, access) as at, visiting(at, "acme") as bare:
        for count in (1, 2):
            await bare.ask(request(api_key=key), json=True)
            await bare.first(GenerateEnd, count)
        assert (len(bare.all(GenerateAccepted)), len(at.cluster.submits)) == (2, 1)
        assert bare.all(GenerateText)
        await bare.ask(request(), json=True)
        await bare.first(ErrorReply)
        await bare.ask(request("other", api_key=key), json=True)
        await bare.first(ErrorReply, 2)
    codes = [error.code for error in bare.all(ErrorReply)]
    assert codes == ["invalid_api_key", "rate_limit_exceeded"]
