"""Sessions by themselves: a tree of requests, bounded, and forgotten in time."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.clock import ManualClock

from antiphon.bus.store import PART_BYTES
from antiphon.gateway.sessions import MemorySessionStore, SessionParams, Sessions
from antiphon.wire.base import Process
from antiphon.wire.errors import InvalidRequest, Unavailable
from antiphon.wire.ids import Incarnation, InstanceId, TenantId

ME, OTHER = (
    Process(instance=InstanceId(name), incarnation=Incarnation("1")) for name in ("g-0", "g-1")
)
TENANT = TenantId("default")
KEEP_S = 100.0
TIMEOUT_S = 20.0


class Slow(MemorySessionStore):
    """A shelf that lets others in between a look and a swap."""

    async def read(self, *key: str) -> tuple[bytes, int] | None:
        found = await super().read(*key)
        await asyncio.sleep(0)
        return found


class World:
    """Two gateways, what lies between them, and who of them is gone."""

    def __init__(self, bytes_max: int = 1 << 20) -> None:
        self.shelf = Slow(bytes_max)
        self.clock = ManualClock()
        self.aborted: list[tuple[str, Process]] = []
        self.gone: set[Process] = set()
        self.mine, self.other = self.sessions(ME), self.sessions(OTHER)

    def sessions(self, process: Process) -> Sessions:
        return Sessions(
            self.shelf,
            process,
            self.clock.unix_ms,
            lambda owner, until: owner in self.gone or self.clock.unix_ms() > until,
            self.abort,
            keep_s=KEEP_S,
            timeout_s=TIMEOUT_S,
        )

    async def abort(self, tenant: TenantId, name: str, owner: Process) -> None:
        assert tenant == TENANT
        self.aborted.append((name, owner))


async def run(kept: Sessions, place: SessionParams, rid: str, characters: int = 1) -> None:
    """A request that was accepted and has not ended."""
    await kept.begin(TENANT, place, rid, characters)
    await kept.accept(TENANT, place, rid)


async def answer(
    kept: Sessions, place: SessionParams, rid: str, *ids: int, text: str = "x"
) -> None:
    """Its end: what lies before the last id was its prompt."""
    await kept.end(TENANT, place, rid, (ids[:-1], ids[-1:], text))


async def complete(kept: Sessions, place: SessionParams, rid: str, *ids: int) -> None:
    await run(kept, place, rid)
    await answer(kept, place, rid, *ids)


async def test_a_session_is_the_same_at_every_gateway() -> None:
    world = World()
    name = await world.mine.open(TENANT, None, 0, None)
    with pytest.raises(InvalidRequest, match="already open"):
        await world.other.open(TENANT, name, 0, None)
    await complete(world.other, SessionParams(name), "a", 1, 2)
    for offset, ids in ((None, (1, 2)), (1, (1,)), (0, (1, 2)), (-1, (1,)), (-9, ())):
        place = SessionParams(name, "a", offset=offset)
        assert await world.mine.previous_ids(TENANT, place) == ids
    without = SessionParams(name, "a", drop_previous_output=True)
    assert await world.mine.previous_ids(TENANT, without) == (1,)
    with pytest.raises(InvalidRequest, match="unknown session"):
        await world.mine.previous_ids(TenantId("another"), SessionParams(name, "a"))
    await world.other.close(TENANT, name)
    with pytest.raises(InvalidRequest, match="unknown session"):
        await world.mine.previous_ids(TENANT, SessionParams(name))


async def test_what_runs_below_a_replaced_request_is_aborted() -> None:
    world = World()
    kept = world.mine
    name = await kept.open(TENANT, None, 0, None)
    await complete(kept, SessionParams(name), "a", 1, 2)
    below = SessionParams(name, "a")
    await run(world.other, below, "b")
    with pytest.raises(InvalidRequest, match="has not ended"):
        await kept.previous_ids(TENANT, SessionParams(name, "b"))
    instead = SessionParams(name, "a", replace=True)
    assert await kept.previous_ids(TENANT, instead) == (1, 2)
    await kept.begin(TENANT, instead, "c", 1)
    assert world.aborted == []
    await kept.accept(TENANT, instead, "c")
    assert world.aborted == [("b", OTHER)]
    await answer(world.other, below, "b", 1, 2, 3, 4)
    with pytest.raises(InvalidRequest, match="is unknown"):
        await kept.previous_ids(TENANT, SessionParams(name, "b"))
    assert await world.shelf.get(TENANT, name, "b") is None


async def test_a_request_that_failed_is_no_place_to_go_on_from() -> None:
    kept = World().mine
    name = await kept.open(TENANT, "s", 0, None)
    await run(kept, SessionParams(name), "a")
    await kept.end(TENANT, SessionParams(name), "a", None)
    with pytest.raises(InvalidRequest, match="is unknown"):
        await kept.previous_ids(TENANT, SessionParams(name, "a"))
    await kept.begin(TENANT, SessionParams(name), "a", 1)


async def test_a_session_that_rests_is_forgotten() -> None:
    world = World()
    name = await world.mine.open(TENANT, None, 0, 30.0)
    await complete(world.mine, SessionParams(name), "a", 1, 2)
    for rid in ("b", "c"):
        world.clock.advance(29)
        await complete(world.mine, SessionParams(name), rid, 1)
    world.clock.advance(31)
    with pytest.raises(InvalidRequest, match="unknown session"):
        await world.other.previous_ids(TENANT, SessionParams(name, "a"))
    assert await world.other.open(TENANT, name, 0, None) == name
    with pytest.raises(InvalidRequest, match="is unknown"):
        await world.mine.previous_ids(TENANT, SessionParams(name, "a"))
    with pytest.raises(InvalidRequest, match=r"at most 100 s \(sessions.keep_s\)"):
        await world.mine.open(TENANT, None, 0, KEEP_S + 1)


async def test_what_is_over_goes_the_oldest_first() -> None:
    world = World(bytes_max=700)
    first = await world.mine.open(TENANT, None, 0, None)
    last = first
    for _ in range(20):
        last = await world.mine.open(TENANT, None, 0, None)
    with pytest.raises(InvalidRequest, match="unknown session"):
        await world.mine.previous_ids(TENANT, SessionParams(first))
    assert await world.mine.previous_ids(TENANT, SessionParams(last)) == ()


async def test_closing_aborts_what_runs_wherever_it_does() -> None:
    world = World()
    kept = world.mine
    name = await kept.open(TENANT, None, 0, None)
    await run(kept, SessionParams(name), "a")
    await run(world.other, SessionParams(name), "b")
    await kept.begin(TENANT, SessionParams(name), "c", 1)
    await kept.close(TENANT, name)
    assert world.aborted == [("a", ME), ("b", OTHER)]
    await kept.accept(TENANT, SessionParams(name), "c")
    assert world.aborted[2:] == [("c", ME)]
    await answer(kept, SessionParams(name), "a", 1)
    assert await world.shelf.get(TENANT, name, "a") is None
    with pytest.raises(InvalidRequest):
        await kept.close(TENANT, name)


async def test_a_request_that_is_accepted_while_its_session_closes_is_aborted() -> None:
    """Wherever the two meet, either sees the other."""
    for turns in range(8):
        world = World()
        name = await world.mine.open(TENANT, None, 0, None)
        await world.other.begin(TENANT, SessionParams(name), "a", 1)

        async def close(world: World = world, name: str = name, turns: int = turns) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            await world.mine.close(TENANT, name)

        await asyncio.gather(close(), world.other.accept(TENANT, SessionParams(name), "a"))
        assert world.aborted == [("a", OTHER)]
        assert await world.mine.open(TENANT, name, 0, None) == name


async def test_of_two_who_open_the_same_one_does() -> None:
    world = World()
    for _ in range(2):
        opened = await asyncio.gather(
            *(each.open(TENANT, "s", 0, None) for each in (world.mine, world.other)),
            return_exceptions=True,
        )
        assert sorted(map(str, opened)) == ["s", "session 's' is already open"]
        await world.mine.close(TENANT, "s")


async def test_a_request_that_is_refused_replaces_nothing() -> None:
    world = World()
    kept = world.mine
    name = await kept.open(TENANT, None, 0, None)
    await complete(kept, SessionParams(name), "a", 1, 2)
    anew = SessionParams(name, replace=True)
    await kept.begin(TENANT, anew, "a", 1)
    with pytest.raises(InvalidRequest, match="has a request 'a'"):
        await kept.begin(TENANT, anew, "a", 1)
    await kept.end(TENANT, anew, "a", None)
    assert await kept.previous_ids(TENANT, SessionParams(name, "a")) == (1, 2)
    await run(kept, anew, "b")
    assert world.aborted == []
    with pytest.raises(InvalidRequest, match="is unknown"):
        await kept.previous_ids(TENANT, SessionParams(name, "a"))


async def test_what_is_forgotten_or_replaced_leaves_its_room() -> None:
    kept = World().mine
    name = await kept.open(TENANT, None, 10, None)
    for _ in range(3):
        await run(kept, SessionParams(name), "a", 9)
        await kept.end(TENANT, SessionParams(name), "a", None)
    await run(kept, SessionParams(name), "a", 6)
    await answer(kept, SessionParams(name), "a", 1, 2, text="four")
    with pytest.raises(InvalidRequest, match="its capacity is 10 characters"):
        await kept.begin(TENANT, SessionParams(name), "b", 1)
    await run(kept, SessionParams(name, replace=True), "b", 10)
    with pytest.raises(InvalidRequest, match="its capacity is 10 characters"):
        await kept.begin(TENANT, SessionParams(name), "c", 1)


async def test_two_gateways_change_a_session_at_the_same_time() -> None:
    world = World()
    name = await world.mine.open(TENANT, None, 10, None)
    tries = [
        kept.begin(TENANT, SessionParams(name), f"{number}", 1)
        for number in range(10)
        for kept in (world.mine, world.other)
    ]
    ends = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(end is None for end in ends) == 10
    assert all(isinstance(end, InvalidRequest | None) for end in ends)


async def test_what_a_lost_gateway_ran_is_no_part_of_a_session() -> None:
    world = World()
    name = await world.mine.open(TENANT, None, 5, None)
    await complete(world.mine, SessionParams(name), "a", 1, 2)
    await run(world.other, SessionParams(name, "a"), "b", 3)
    with pytest.raises(InvalidRequest, match="its capacity is 5"):
        await world.mine.begin(TENANT, SessionParams(name, "a"), "c", 1)
    world.gone.add(OTHER)
    with pytest.raises(InvalidRequest, match="is unknown"):
        await world.mine.previous_ids(TENANT, SessionParams(name, "b"))
    assert await world.mine.previous_ids(TENANT, SessionParams(name, "a")) == (1, 2)
    await run(world.mine, SessionParams(name, "a"), "b", 3)


async def test_lost_end_of_a_request_is_assumed_after_the_timeout() -> None:
    world = World()
    name = await world.mine.open(TENANT, None, 0, None)
    await run(world.mine, SessionParams(name), "a")
    world.clock.advance(TIMEOUT_S + 1)
    await run(world.other, SessionParams(name), "a")


async def test_a_session_that_is_full_of_requests_takes_no_more() -> None:
    world = World()
    name = await world.mine.open(TENANT, None, 0, None)

    async def fill() -> None:
        for number in range(2000):
            await run(world.mine, SessionParams(name), f"{number:0250}")

    with pytest.raises(InvalidRequest, match="the session is full"):
        await fill()
    value = await world.shelf.get(TENANT, name)
    assert value is not None
    assert PART_BYTES - 1000 < len(value) <= PART_BYTES
    await world.mine.end(TENANT, SessionParams(name), f"{3:0250}", None)
    await run(world.mine, SessionParams(name), "another")


async def test_unavailable_store_is_an_error() -> None:
    world = World()
    name = await world.mine.open(TENANT, None, 0, None)

    async def away(*_: str) -> None:
        raise Unavailable("away", retry_after_s=1.0)

    world.shelf.read = away  # type: ignore[method-assign,assignment]
    with pytest.raises(Unavailable):
        await world.mine.previous_ids(TENANT, SessionParams(name))
