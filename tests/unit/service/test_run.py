"""The run loop, in memory: every accepted call gets a reply, whatever happens."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import msgspec
import pytest
from tests.support.echo import BUG, MODEL, TOO_LONG, EchoService, echo_request
from tests.support.faulty_transport import FaultyTransport
from tests.support.memory_bus import MemoryBroker, MemorySubscription, MemoryTransport
from tests.support.services import QUICK, Running, client_bus, listening, process, running
from tests.support.wait import until

from antiphon.bus.transport import BusDown, NoResponders, PacketCallback
from antiphon.service.clock import SystemClock
from antiphon.service.endpoint import Endpoint, RequestEndpoint, StreamEndpoint
from antiphon.service.inbox import SharedStateBroken
from antiphon.service.peers import PeerChange
from antiphon.wire.base import Message, ProcessState, Role
from antiphon.wire.command import ControlDone, FlushCache
from antiphon.wire.errors import EngineError, Unavailable
from antiphon.wire.heartbeat import ClaimName, Discover
from antiphon.wire.routes import DISCOVER, HEARTBEAT, NAME, OPEN, TOKENIZE, WORKER_CONTROL
from antiphon.wire.submit import OpenList, OpenListState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.bus.bus import Bus, Delivery
    from antiphon.config.settings import Settings
    from antiphon.service.service import Runtime, Service
    from antiphon.wire.tokenize import EncodeReply, EncodeRequest

CLOCK = SystemClock()
LONG_S = 30.0
ECHO_0 = {"instance": "tokenizer-0"}


async def outcome(bus: Bus, request: EncodeRequest, timeout_s: float = 10) -> str:
    try:
        await bus.call(TOKENIZE, request, timeout_s=timeout_s, model=MODEL)
    except EngineError as error:
        return error.code
    return "ok"


def with_service(**changes: float) -> Settings:
    service = msgspec.structs.replace(QUICK.service, **changes)
    return msgspec.structs.replace(QUICK, service=service)


class Callers:
    def __init__(self, group: asyncio.TaskGroup, bus: Bus) -> None:
        self._group = group
        self._bus = bus
        self.tasks: list[asyncio.Task[str]] = []

    def call(self, count: int, *, after_s: float, prompt: str = "echo") -> None:
        for _ in range(count):
            request = echo_request(CLOCK, prompt, after_s)
            self.tasks.append(self._group.create_task(outcome(self._bus, request)))

    async def outcomes(self) -> list[str]:
        return [await task for task in self.tasks]


@asynccontextmanager
async def callers(broker: MemoryBroker) -> AsyncGenerator[Callers]:
    async with client_bus(MemoryTransport(broker)) as bus, asyncio.TaskGroup() as group:
        yield Callers(group, bus)


@asynccontextmanager
async def called(
    service: EchoService | None = None, **changes: float
) -> AsyncGenerator[tuple[Callers, Running[Service]]]:
    broker, settings = MemoryBroker(), with_service(**changes)
    async with (
        callers(broker) as calls,
        running(service or EchoService(), MemoryTransport(broker), settings=settings) as run,
    ):
        yield calls, run


@asynccontextmanager
async def reached(
    service: EchoService, *, ready: bool = True, **changes: float
) -> AsyncGenerator[tuple[Bus, Running[Service]]]:
    transport = MemoryTransport(broker := MemoryBroker())
    async with (
        client_bus(MemoryTransport(broker)) as bus,
        running(service, transport, settings=with_service(**changes), ready=ready) as run,
    ):
        yield bus, run


def counted(run: Running[Service], name: str, **labels: str) -> float:
    return run.metrics.registry.get_sample_value(f"antiphon_{name}", labels) or 0


def open_calls(run: Running[Service]) -> float:
    return counted(run, "calls_open", route=TOKENIZE.name)


async def test_start_is_done_before_any_call_is_taken() -> None:
    states: list[ProcessState] = []
    async with running(EchoService(), MemoryTransport(MemoryBroker()), ready=False) as run:
        run.around = replace(run.around, on_started=lambda: states.append(run.health.state))
        await until(lambda: run.health.state is ProcessState.READY)
        assert states == [ProcessState.STARTING]


async def test_at_the_drain_deadline_every_call_is_answered_unavailable() -> None:
    service = EchoService()
    async with called(service, drain_timeout_s=0.1, slots=4) as (calls, run):
        calls.call(20, after_s=LONG_S)  # 4 run, 16 wait for a slot
        await until(lambda: open_calls(run) == 20)
        await run.ended()
        assert await calls.outcomes() == ["unavailable"] * 20
        assert open_calls(run) == 0
        assert service.open == 0


async def test_calls_that_came_with_the_stop_are_answered_too() -> None:
    """Nothing awaits between the calls and the stop: some tasks are cancelled before they begin."""
    async with called(drain_timeout_s=0.001) as (calls, run):
        calls.call(50, after_s=LONG_S)
        await asyncio.sleep(0)
        run.stop.set()
        assert set(await calls.outcomes()) == {"unavailable"}
        await run.ended()


async def test_overfull_inbox_refuses_at_once_and_serves_on() -> None:
    async with called(slots=2, backlog=3) as (calls, run):
        calls.call(5, after_s=0.3)
        await until(lambda: open_calls(run) == 5)
        calls.call(4, after_s=0.0)
        refused = calls.tasks[5:]
        async with asyncio.timeout(0.2):
            assert [await task for task in refused] == ["overloaded"] * 4
        assert (await calls.outcomes())[:5] == ["ok"] * 5
        calls.call(1, after_s=0.0)
        assert (await calls.outcomes())[-1] == "ok"


async def test_errors_and_bugs_end_one_call_only(caplog: pytest.LogCaptureFixture) -> None:
    async with called() as (calls, run):
        calls.call(1, after_s=0.0, prompt=BUG)
        calls.call(1, after_s=0.0, prompt=TOO_LONG)
        calls.call(1, after_s=0.0)
        assert await calls.outcomes() == ["internal", "prompt_too_long", "ok"]
        assert run.health.state is ProcessState.READY
    assert "a bug, on purpose" in caplog.text


async def test_bug_in_a_call_without_a_reply_subject_does_not_end_the_service() -> None:
    broker = MemoryBroker()
    async with callers(broker) as calls, running(EchoService(), MemoryTransport(broker)) as run:
        async with client_bus(MemoryTransport(broker), "mute") as bus:
            bus.publish(TOKENIZE, echo_request(CLOCK, BUG), model=MODEL)
            bus.transport.publish("test.v1.tokenizer.echo.encode", b"\xc1 no message")
        for code in ("internal", "invalid_request"):
            answered = {"route": TOKENIZE.name, "outcome": code}
            await until(lambda answered=answered: counted(run, "calls_total", **answered) == 1)
        calls.call(1, after_s=0.0)
        assert await calls.outcomes() == ["ok"]


class BigReply(EchoService):
    async def encode(self, request: EncodeRequest, _: Delivery) -> EncodeReply:
        reply = await super().encode(request, _)
        return msgspec.structs.replace(reply, token_ids=bytes(2_000_000))


async def test_reply_over_the_size_limit_is_an_error_and_no_silence() -> None:
    async with called(BigReply()) as (calls, _):
        calls.call(1, after_s=0.0)
        assert await calls.outcomes() == ["request_too_large"]


async def crash() -> None:
    raise ValueError("crashed")


async def test_crash_in_the_background_ends_the_process_and_answers_what_was_taken() -> None:
    broker, service = MemoryBroker(), EchoService()
    async with callers(broker) as calls:
        async with running(service, MemoryTransport(broker)) as run:
            calls.call(12, after_s=LONG_S)
            await until(lambda: open_calls(run) == 12)
            service.runtime.group.create_task(crash())
            with pytest.raises(ExceptionGroup) as raised:
                await run.ended()
        assert raised.group_contains(ValueError, match="crashed")
        assert await calls.outcomes() == ["unavailable"] * 12
        assert service.left


class Wrong(EchoService):
    wrong: Exception = SharedStateBroken("wrong, on purpose")

    def endpoints(self) -> Sequence[Endpoint]:
        return (*super().endpoints(), StreamEndpoint(route=OPEN, apply=self._opened, address={}))

    def _opened(self, _: OpenList | OpenListState) -> None:
        raise self.wrong


async def test_feed_that_breaks_shared_state_ends_the_process_and_answers_what_was_taken() -> None:
    broker, service = MemoryBroker(), Wrong()
    async with callers(broker) as calls:
        async with running(service, MemoryTransport(broker)) as run:
            calls.call(3, after_s=LONG_S)
            await until(lambda: open_calls(run) == 3)
            async with client_bus(MemoryTransport(broker), "gateway", party=Role.GATEWAY) as bus:
                bus.publish(OPEN, an_open_list(bus), model=MODEL)
                await run.gone.wait()
            with pytest.raises(ExceptionGroup) as raised:
                await run.ended()
        assert raised.group_contains(SharedStateBroken, match="wrong, on purpose")
        assert await calls.outcomes() == ["unavailable"] * 3
        assert service.left


async def test_feed_survives_a_failed_assertion_and_counts_it() -> None:
    broker, service = MemoryBroker(), Wrong()
    service.wrong = AssertionError("wrong, on purpose")
    async with (
        client_bus(MemoryTransport(broker), "gateway", party=Role.GATEWAY) as bus,
        running(service, MemoryTransport(broker)) as run,
    ):
        for _ in range(3):
            bus.publish(OPEN, an_open_list(bus), model=MODEL)
        refused = {"route": OPEN.name, "reason": "internal"}
        await until(lambda: counted(run, "messages_refused_total", **refused) == 3)
        assert not run.gone.is_set()


def an_open_list(bus: Bus) -> OpenList:
    return OpenList(model=MODEL, owner=bus.process, version=1, whole=True, not_after_unix_ms=0)


class SlowStart(EchoService):
    @asynccontextmanager
    async def lifespan(self, runtime: Runtime) -> AsyncGenerator[Self]:
        self.runtime = runtime
        try:
            await asyncio.sleep(3600)
            yield self
        finally:
            self.left = True


async def test_stop_ends_a_start_however_long_it_would_take() -> None:
    broker, service = MemoryBroker(), SlowStart()
    async with (
        client_bus(MemoryTransport(broker)) as bus,
        listening(bus, HEARTBEAT) as received,
        running(service, MemoryTransport(broker), ready=False) as run,
    ):
        assert (await received.get()).state is ProcessState.STARTING
        await run.ended(timeout_s=2)
        assert service.left


async def test_heartbeats_report_each_change_of_state_at_once() -> None:
    broker, settings = MemoryBroker(), with_service(heartbeat_s=3600)
    async with (
        client_bus(MemoryTransport(broker)) as bus,
        listening(bus, HEARTBEAT) as received,
        running(EchoService(), MemoryTransport(broker), settings=settings) as run,
    ):
        while (beat := await received.get()).state is not ProcessState.READY:
            assert beat.model is None
        assert beat.model == MODEL
        assert beat.health_port > 0
        await run.ended()
        while beat.state is not ProcessState.DRAINING:
            beat = await received.get()


async def test_discover_is_answered_with_a_heartbeat() -> None:
    async with (
        reached(EchoService(), heartbeat_s=3600) as (bus, run),
        listening(bus, HEARTBEAT) as received,
    ):
        bus.publish(DISCOVER, Discover(asker=bus.process))
        async with asyncio.timeout(1):
            assert (await received.get()).process == run.process


async def test_reconnect_sends_discover_and_a_heartbeat() -> None:
    broker, settings = MemoryBroker(), with_service(heartbeat_s=3600)
    transport = MemoryTransport(broker)
    async with (
        client_bus(MemoryTransport(broker)) as bus,
        listening(bus, DISCOVER) as asked,
        running(EchoService(), transport, settings=settings) as run,
        listening(bus, HEARTBEAT) as beats,
    ):
        assert (await asked.get()).asker == run.process
        broker.cut(transport)
        broker.heal(transport)
        async with asyncio.timeout(1):
            assert (await asked.get()).asker == run.process
            assert (await beats.get()).process == run.process


class Store(EchoService):
    """Holds work that outlives its call, and needs a feed and a call to end it."""

    role = Role.WORKER

    def __init__(self) -> None:
        super().__init__()
        self.done = asyncio.Event()
        self.flushed = False

    def endpoints(self) -> Sequence[Endpoint]:
        control = RequestEndpoint(route=WORKER_CONTROL, handler=self.control, while_draining=True)
        return [*super().endpoints(), control, StreamEndpoint(route=OPEN, apply=self.follow)]

    async def control(self, message: Message, _: Delivery) -> ControlDone:
        self.flushed = isinstance(message, FlushCache)
        return ControlDone()

    def follow(self, message: OpenList | OpenListState) -> None:
        self.done.set()

    async def drain(self) -> None:
        await self.done.wait()


async def test_draining_service_keeps_the_feeds_of_its_running_requests() -> None:
    service = Store()
    async with reached(service) as (bus, run):
        run.stop.set()
        await until(lambda: run.health.state is ProcessState.DRAINING)
        with pytest.raises(Unavailable):
            await bus.call(TOKENIZE, echo_request(CLOCK), timeout_s=1, model=MODEL)
        await bus.call(WORKER_CONTROL, FlushCache(), timeout_s=1, worker="worker-0")
        assert service.flushed
        assert not run.gone.is_set()
        bus.publish(OPEN, an_open_list(bus), model=MODEL)
        await run.ended(timeout_s=2)


class Clinging(EchoService):
    @asynccontextmanager
    async def lifespan(self, runtime: Runtime) -> AsyncGenerator[Self]:
        self.runtime = runtime
        yield self
        await asyncio.sleep(3600)


@pytest.mark.parametrize("crashes", [False, True])
async def test_lifespan_that_does_not_end_does_not_keep_the_process(
    crashes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.service.run._LEAVE_S", 0.1)
    service = Clinging()
    async with running(service, MemoryTransport(MemoryBroker())) as run:
        if crashes:
            service.runtime.group.create_task(crash())
        with pytest.raises(ExceptionGroup) as raised:
            await run.ended(timeout_s=3)
    assert raised.group_contains(ValueError if crashes else TimeoutError)


async def test_endpoint_opened_at_run_time_is_drained_like_the_others() -> None:
    service = Store()
    late = RequestEndpoint(route=TOKENIZE, handler=service.encode, address={"model": "late"})
    async with reached(service) as (bus, run), asyncio.TaskGroup() as group:
        first = await service.runtime.listen(late)
        await first.drain()
        await service.runtime.listen(late)
        request = echo_request(CLOCK, after_s=0.2)
        call = group.create_task(bus.call(TOKENIZE, request, timeout_s=5, model="late"))
        await until(lambda: service.open == 1)
        service.done.set()
        await run.ended()
        assert (await call).token_ids == b"echo"
        with pytest.raises(Unavailable):
            await service.runtime.listen(late)


async def test_malformed_feed_message_is_counted_and_dropped() -> None:
    service = Store()
    async with reached(service) as (bus, run):
        bus.transport.publish("test.v1.scheduler.echo.open", b"\xc1")
        refused = {"route": OPEN.name, "reason": "malformed"}
        await until(lambda: counted(run, "messages_refused_total", **refused) == 1)
        service.done.set()


class Neighbour(EchoService):
    """A gateway, whose heartbeats a worker receives."""

    role = Role.GATEWAY


async def test_peers_appear_and_die_for_a_role_with_heartbeat_sources() -> None:
    broker, service = MemoryBroker(), Store()
    changes: list[tuple[PeerChange, str]] = []
    async with running(service, MemoryTransport(broker)) as run:
        service.runtime.peers.watch(
            lambda change, peer: changes.append((change, peer.process.incarnation))
        )
        for incarnation in ("1", "2"):
            async with running(Neighbour(), MemoryTransport(broker), incarnation=incarnation):
                await until(lambda: len(service.runtime.peers.accepting_work(Role.GATEWAY)) == 1)
        await until(lambda: not service.runtime.peers.all())
        service.done.set()
        assert b"peer_heartbeat_age_seconds{" not in run.metrics.text()
    assert [change for change in changes if change[0] is not PeerChange.CHANGED] == [
        (PeerChange.APPEARED, "1"),
        (PeerChange.DIED, "1"),
        (PeerChange.APPEARED, "2"),
        (PeerChange.DIED, "2"),
    ]


async def test_role_receives_only_heartbeats_of_its_sources() -> None:
    broker, service = MemoryBroker(), Store()
    async with (
        running(service, MemoryTransport(broker)),
        running(EchoService(), MemoryTransport(broker), incarnation="1"),
        running(Neighbour(), MemoryTransport(broker), incarnation="2"),
    ):
        await until(lambda: len(service.runtime.peers.accepting_work(Role.GATEWAY)) == 1)
        assert [peer.heartbeat.role for peer in service.runtime.peers.all()] == [Role.GATEWAY]
        service.done.set()


async def test_fault_at_any_bus_call_neither_hangs_nor_loses_a_call() -> None:
    outcomes: list[str] = []
    fault_happened = True
    while fault_happened:
        broker = MemoryBroker()
        faulty = FaultyTransport(MemoryTransport(broker), fail_at_call=len(outcomes))
        outcomes.append(await life_with_a_fault(broker, faulty))
        fault_happened = faulty.fault_happened
    assert set(outcomes) == {"ok", "unavailable", "not ready"}
    assert outcomes.count("unavailable") == 1  # the one call whose reply could not be sent
    assert outcomes[-1] == "ok"


async def life_with_a_fault(broker: MemoryBroker, faulty: FaultyTransport) -> str:
    """The outcome for a caller of a service that fails once."""
    async with (
        asyncio.timeout(5),
        client_bus(MemoryTransport(broker)) as bus,
        running(EchoService(), faulty) as run,
    ):
        if run.gone.is_set():
            with pytest.raises(ExceptionGroup) as raised:
                await run.ended()
            assert raised.group_contains(BusDown)
            return "not ready"
        result = await outcome(bus, echo_request(CLOCK), timeout_s=0.3)
        await run.ended()
        return result


class SlowToHold(MemoryTransport):
    """Listens to claims of its name when it is let: by then others may have found the name free."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.asked = asyncio.Event()
        self.let = asyncio.Event()

    async def subscribe(
        self, subject: str, receive: PacketCallback, queue: str | None = None
    ) -> MemorySubscription:
        if subject.endswith(".process.tokenizer-0.name"):
            self.asked.set()
            await self.let.wait()
        return await super().subscribe(subject, receive, queue)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("count", [2, 3])
async def test_one_process_of_those_that_find_a_name_free_stays(
    count: int, *, together: bool
) -> None:
    """Whether they hold it at once, or one after the other."""
    broker = MemoryBroker()
    transports = [SlowToHold(broker) for _ in range(count)]
    async with AsyncExitStack() as stack:
        runs = [
            await stack.enter_async_context(
                running(EchoService(), transport, incarnation=str(number), ready=False)
            )
            for number, transport in enumerate(transports)
        ]
        for transport in transports:
            await transport.asked.wait()
        for run, transport in zip(runs, transports, strict=True):
            transport.let.set()
            if not together:
                await until(lambda run=run: run.health.state is ProcessState.READY)
        await until(lambda: sum(run.gone.is_set() for run in runs) == count - 1)
        for run in [run for run in runs if run.gone.is_set()]:
            with pytest.raises(ExceptionGroup) as failed:
                await run.ended()
            assert "tokenizer-0 was taken by another process" in cause(failed.value)
        (left,) = [run for run in runs if not run.gone.is_set()]
        await until(lambda: left.health.state is ProcessState.READY)
        async with client_bus(MemoryTransport(broker)) as bus:
            assert await outcome(bus, echo_request(CLOCK)) == "ok"


async def test_forged_claim_does_not_end_the_holder_of_a_name() -> None:
    async with reached(EchoService()) as (bus, run):
        for incarnation in ("0", "1", "2"):
            claim = ClaimName(process=process(run.process.instance, incarnation), held=True)
            with suppress(NoResponders):  # while it asks anew it does not answer
                await bus.call(NAME, claim, timeout_s=5, **ECHO_0)
        listening = asyncio.Event()

        async def claimed(delivery: Delivery) -> None:
            if delivery.read(NAME).process == run.process:
                listening.set()

        await bus.listen(NAME, claimed, **ECHO_0)
        async with asyncio.timeout(5):
            await listening.wait()  # it has asked anew, and found no other process
        assert await outcome(bus, echo_request(CLOCK)) == "ok"
        assert not run.gone.is_set()


def cause(error: BaseException) -> str:
    """What the one error of nested groups says."""
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    return str(error)
