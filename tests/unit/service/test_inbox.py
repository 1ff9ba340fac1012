"""What stands between the bus and a handler, and the tasks of handlers."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import client_bus, process
from tests.support.wait import until

from antiphon.bus.discovery import EndpointCounters
from antiphon.service.inbox import (
    DroppedMessages,
    InboxLimits,
    RequestInbox,
    RouteMetrics,
    SharedStateBroken,
    StreamInbox,
)
from antiphon.service.tasks import Tasks, isolated
from antiphon.telemetry.metrics import Metrics
from antiphon.wire.codec import MalformedMessage
from antiphon.wire.command import ControlDone, FlushCache
from antiphon.wire.errors import EngineError, InvalidRequest, Overloaded
from antiphon.wire.heartbeat import Discover
from antiphon.wire.routes import DISCOVER, WORKER_CONTROL

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon.bus.bus import Bus, Delivery


class World:
    """An inbox whose handlers wait for the test, and its caller."""

    def __init__(self, bus: Bus, calls: Tasks, callers: asyncio.TaskGroup) -> None:
        self.bus = bus
        self.calls = calls
        self.go = asyncio.Event()
        self.running = self.began = self.cancelled = 0
        self.cancels = False
        self.tally = EndpointCounters(name="route", subject="subject")
        self.inbox = RequestInbox(
            "route",
            self.flush,
            calls=calls,
            limits=InboxLimits(slots=2, backlog=3),
            counts=RouteMetrics(Metrics(), self.tally),
        )
        self._callers = callers

    async def take(self, delivery: Delivery) -> None:
        self.inbox.deliver(delivery)
        if self.cancels:  # nothing has awaited since: the call's task has not run yet
            await self.calls.cancel(timeout_s=1)
            self.cancelled += 1

    async def flush(self, _: Delivery) -> ControlDone:
        self.began += 1
        self.running += 1
        try:
            await self.go.wait()
        finally:
            self.running -= 1
        return ControlDone(pages_freed=7)

    def call(self, count: int) -> list[asyncio.Task[EngineError | None]]:
        return [self._callers.create_task(self._call()) for _ in range(count)]

    async def _call(self) -> EngineError | None:
        try:
            await self.bus.call(WORKER_CONTROL, FlushCache(), timeout_s=5, worker="worker-0")
        except EngineError as error:
            return error
        return None


@asynccontextmanager
async def world() -> AsyncGenerator[World]:
    broker = MemoryBroker()
    async with (
        client_bus(MemoryTransport(broker), "caller") as caller,
        client_bus(MemoryTransport(broker), "called") as called,
        Tasks() as calls,
        asyncio.TaskGroup() as callers,
    ):
        world = World(caller, calls, callers)
        await called.listen(WORKER_CONTROL, world.take)
        yield world


async def test_slots_bound_handlers_and_calls_beyond_the_backlog_are_overloaded() -> None:
    async with world() as at:
        made = at.call(5)
        await until(lambda: len(at.calls) == 5)
        assert at.running == 2
        refused = await at.call(1)[0]
        assert isinstance(refused, Overloaded)
        assert (refused.retry_after_s, at.tally.last_error) == (1.0, "overloaded")
        at.go.set()
        assert [await call for call in made] == [None] * 5
        assert at.inbox.empty
        assert (at.tally.requests, at.tally.errors) == (6, 1)


async def test_shut_inbox_refuses_and_finishes_what_it_took() -> None:
    async with world() as at:
        taken = at.call(1)[0]
        await until(lambda: at.running == 1)
        at.inbox.shut()
        refused = await at.call(1)[0]
        assert refused is not None
        assert refused.code == "unavailable"
        at.go.set()
        assert await taken is None


async def test_call_that_is_cancelled_before_it_began_is_answered_by_close() -> None:
    async with world() as at:
        at.cancels = True
        made = at.call(3)
        await until(lambda: at.cancelled == 3)
        assert at.began == 0
        assert not at.inbox.empty
        await at.inbox.close()
        codes = [error.code for error in [await call for call in made] if error]
        assert codes == ["unavailable"] * 3
        assert at.inbox.empty


async def test_stream_is_applied_in_order_despite_failures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker, applied = MemoryBroker(), list[str]()
    tally = EndpointCounters(name="route", subject="subject")

    def apply(delivery: Delivery) -> None:
        message: Discover = delivery.read(DISCOVER)
        name = message.asker.instance
        if name == "3":
            raise ValueError("a bug, on purpose")
        if name == "4":
            raise InvalidRequest("an odd number of bytes")
        applied.append(name)

    async with client_bus(MemoryTransport(broker)) as bus, Tasks() as calls:
        counts = RouteMetrics(Metrics(), tally)
        inbox = StreamInbox("route", apply, calls=calls, counts=counts)
        subscription = await bus.listen(DISCOVER, inbox.deliver)
        for n in range(50):
            bus.publish(DISCOVER, Discover(asker=process(str(n))))
        await subscription.drain()
    assert applied == [str(n) for n in range(50) if n not in (3, 4)]
    assert (tally.requests, tally.errors) == (50, 2)
    assert "a bug, on purpose" in caplog.text


def test_refusals_count_each_message_and_log_one_a_second(caplog: pytest.LogCaptureFixture) -> None:
    metrics, now = Metrics(), [0.0]
    counts = RouteMetrics(metrics, EndpointCounters(name="worker.stop", subject="s"))
    refusals = DroppedMessages("worker.stop", counts, lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for step in range(300):
            now[0] = step / 100
            refusals.record(MalformedMessage(f"number {step}"))
        refusals.record(ValueError("a bug"))
    sample = metrics.registry.get_sample_value
    name = "antiphon_messages_refused_total"
    assert sample(name, {"route": "worker.stop", "reason": "malformed"}) == 300
    assert sample(name, {"route": "worker.stop", "reason": "internal"}) == 1
    lines = [(record.__dict__["reason"], record.__dict__["unlogged"]) for record in caplog.records]
    assert lines == [("number 0", 0), ("number 100", 99), ("number 200", 99), ("ValueError", 0)]


async def test_work_cancelled_before_it_begins_is_never_called() -> None:
    begun: list[str] = []

    async def work(name: str) -> None:
        begun.append(name)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        async with asyncio.TaskGroup() as group:
            group.create_task(isolated(work, "a")).cancel()
        gc.collect()
    assert begun == []
    assert [str(warning.message) for warning in seen] == []


async def test_failing_work_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(what: str) -> None:
        raise ValueError(what)

    with caplog.at_level(logging.ERROR):
        async with Tasks() as group:
            group.create_task(isolated(fail, "no such page"))
    (line,) = (record for record in caplog.records if record.message == "task failed")
    assert line.exc_info is not None
    assert str(line.exc_info[1]) == "no such page"


async def test_broken_shared_state_ends_the_group() -> None:
    async def broken() -> None:
        raise SharedStateBroken("pages")

    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(isolated(broken))
    assert caught.value.subgroup(SharedStateBroken) is not None
