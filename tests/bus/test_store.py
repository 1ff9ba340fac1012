"""Buckets on a real nats-server: values large and small, who may, and what a broker may lose."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.bus.worlds import bus_config
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.nats import NatsServer
from tests.support.services import CLUSTER, client_bus
from tests.support.wait import until

from antiphon.bus.nats import NatsTransport
from antiphon.bus.permissions import users, users_text
from antiphon.bus.server import ServerSettings
from antiphon.bus.store import PART_BYTES, KeyValueStore, StoreLimits
from antiphon.wire.base import Role
from antiphon.wire.errors import Unavailable
from antiphon.wire.routes import RESPONSES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from antiphon.bus.bus import Bus

LIMITS = StoreLimits(keep_s=3600, bytes_max=64 * 1024 * 1024)
LARGE = bytes(range(256)) * (PART_BYTES // 256) * 2 + b"end"


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with NatsServer(durable=True) as running:
        yield running


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[Bus]:
    async with client_bus(NatsTransport(bus_config(server.url), name="test")) as opened:
        yield opened


def store(bus: Bus, limits: StoreLimits = LIMITS) -> KeyValueStore:
    return KeyValueStore(bus, RESPONSES, limits)


async def test_swap_of_a_stale_revision_fails(bus: Bus) -> None:
    mine, other = store(bus), store(bus)
    assert await mine.read("me", "a") is None
    assert await mine.swap("me", "a", value=b"1", revision=0)
    assert not await other.swap("me", "a", value=b"2", revision=0)
    value, revision = await other.read("me", "a") or (b"", 0)
    assert value == b"1"
    assert await other.swap("me", "a", value=b"2", revision=revision)
    assert not await mine.swap("me", "a", value=b"3", revision=revision)
    assert await mine.get("me", "a") == b"2"
    await mine.put("me", "a", "below", value=LARGE)
    assert await other.forget("me", "a")
    assert await mine.get("me", "a", "below") is None
    assert await mine.swap("me", "a", value=b"4", revision=0), "what was forgotten is not there"


@pytest.mark.parametrize("value", [b"", b"small", LARGE], ids=["empty", "small", "large"])
async def test_what_is_put_is_there_until_it_is_forgotten(bus: Bus, value: bytes) -> None:
    kept = store(bus)
    assert await kept.get("me", "a") is None
    await kept.put("me", "a", value=value)
    assert await kept.get("me", "a") == value
    assert await store(bus).get("me", "a") == value, "another process reads it, too"
    assert await kept.get("you", "a") is None
    assert await kept.forget("me", "a")
    assert await kept.get("me", "a") is None
    assert not await kept.forget("me", "a")


async def test_last_value_counts_whatever_their_sizes(bus: Bus) -> None:
    kept = store(bus)
    for value in (b"1", LARGE, LARGE[::-1], b"2"):
        await kept.put("me", "a", value=value)
        assert await kept.get("me", "a") == value


async def test_names_that_are_no_subjects_are_keys_all_the_same(bus: Bus) -> None:
    kept = store(bus)
    await kept.put("a.b", "* >", value=b"odd")
    assert await kept.get("a.b", "* >") == b"odd"
    assert await kept.get("a", "b") is None


async def test_values_and_limits_outlive_the_broker(server: NatsServer, bus: Bus) -> None:
    await store(bus).put("me", "a", value=LARGE)
    await server.kill()
    await until(lambda: not bus.link.up)
    with pytest.raises(Unavailable):
        await store(bus).get("me", "a")
    await server.start()
    await until(lambda: bus.link.up)
    changed = store(bus, replace(LIMITS, keep_s=60))
    assert await changed.get("me", "a") == LARGE


async def test_bucket_that_the_broker_has_lost_is_made_again(server: NatsServer, bus: Bus) -> None:
    kept = store(bus)
    await kept.put("me", "a", value=b"1")
    stream = RESPONSES.stream(CLUSTER)
    await bus.request_raw(f"$JS.API.STREAM.DELETE.{stream}", b"", timeout_s=5)
    await kept.put("me", "a", value=b"2")
    assert await kept.get("me", "a") == b"2"


async def test_oldest_go_when_there_is_no_room(bus: Bus) -> None:
    kept = store(bus, replace(LIMITS, bytes_max=8 * PART_BYTES))
    for number in range(12):
        await kept.put("me", str(number), value=bytes(PART_BYTES))
    assert await kept.get("me", "0") is None
    assert await kept.get("me", "11") == bytes(PART_BYTES)


async def test_store_without_jetstream_is_unavailable() -> None:
    async with (
        NatsServer() as plain,
        client_bus(NatsTransport(bus_config(plain.url), name="test")) as over_nats,
        client_bus(MemoryTransport(MemoryBroker())) as in_memory,
    ):
        for opened in (over_nats, in_memory):
            with pytest.raises(Unavailable):
                await store(opened).open()


async def test_only_its_owner_gets_at_a_bucket() -> None:
    all_users = [replace(one, password='"secret"') for one in users(CLUSTER)]
    settings = ServerSettings(name="guarded", users=users_text(all_users))
    async with NatsServer(settings, durable=True) as guarded:
        for role in (Role.GATEWAY, Role.WORKER):
            config = bus_config(guarded.url, user=role, password="secret")
            transport = NatsTransport(config, name=role)
            async with client_bus(transport, f"{role}-0", role) as opened:
                transport.publish(RESPONSES.subject(CLUSTER, "me", "a"), b"")
                if role is RESPONSES.owner:
                    kept = store(opened)
                    await kept.put("me", "a", value=LARGE)
                    assert await kept.get("me", "a") == LARGE
                    assert await kept.forget("me", "a")
                await transport.flush(5)
                assert bool(transport.errors.forbidden) is (role is not RESPONSES.owner)
