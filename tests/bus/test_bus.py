"""Typed calls and feeds, on every transport."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from tests.bus.worlds import World, mailbox
from tests.support.services import client_bus, process
from tests.support.wait import until

from antiphon.bus.bus import Bus, Delivery
from antiphon.bus.transport import BusDown, NoResponders, ReplyLost
from antiphon.wire.base import Role
from antiphon.wire.codec import encode_json
from antiphon.wire.errors import DeadlineExceeded, Overloaded
from antiphon.wire.generate import GenerateAccepted, GenerateRequest
from antiphon.wire.heartbeat import Discover
from antiphon.wire.ids import ClientKey, ClusterName, InstanceId, ModelName, RequestId
from antiphon.wire.routes import CANCEL, CLIENT_TEXT, COMMAND, DISCOVER, GENERATE
from antiphon.wire.submit import CancelAccepted, CancelRequest

MODEL = ModelName("org/model-1.5 b")
OWNER = process("gateway-0")
CANCEL_IT = CancelRequest(request_id=RequestId("r"), owner=OWNER, deadline_unix_ms=1)
CANCELLED = CancelAccepted(request_id=RequestId("r"))
HELLO = GenerateRequest(key=ClientKey("k"), model=MODEL, prompt="hello")


def accepted_by(gateway: InstanceId) -> GenerateAccepted:
    return GenerateAccepted(key=HELLO.key, request_id=RequestId("r"), gateway=gateway)


async def join(world: World, instance: str = "gateway-0") -> Bus:
    """A bus on a transport of its own, which the world leaves."""
    bus = await world.stack.enter_async_context(client_bus(world.make(), instance, Role.GATEWAY))
    world.transports.append(bus.transport)
    return bus


async def answer_cancel(delivery: Delivery) -> None:
    delivery.respond(CANCELLED)


async def test_call_returns_the_answer(world: World) -> None:
    caller, callee = await join(world), await join(world, "scheduler-0")
    received: list[CancelRequest] = []

    async def deliver(delivery: Delivery) -> None:
        received.append(delivery.read(CANCEL))
        await answer_cancel(delivery)

    await callee.listen(CANCEL, deliver, model=MODEL)
    assert await caller.call(CANCEL, CANCEL_IT, timeout_s=5, model=MODEL) == CANCELLED
    assert received == [CANCEL_IT]


async def test_calls_beside_each_other_get_their_own_answers(world: World) -> None:
    caller, callee = await join(world), await join(world, "scheduler-0")
    waiting: list[Delivery] = []

    async def deliver(delivery: Delivery) -> None:
        waiting.append(delivery)
        if len(waiting) == 20:
            for one in reversed(waiting):
                one.respond(CancelAccepted(request_id=one.read(CANCEL).request_id))

    await callee.listen(CANCEL, deliver, model=MODEL)
    requests = [replace(CANCEL_IT, request_id=RequestId(str(n))) for n in range(20)]
    replies = await asyncio.gather(
        *(caller.call(CANCEL, request, timeout_s=5, model=MODEL) for request in requests)
    )
    assert [reply.request_id for reply in replies] == [str(n) for n in range(20)]


async def test_error_of_the_callee_is_raised(world: World) -> None:
    caller, callee = await join(world), await join(world, "scheduler-0")

    async def deliver(delivery: Delivery) -> None:
        delivery.refuse(Overloaded("full", retry_after_s=2.5, details={"waiting": "9"}))

    await callee.listen(CANCEL, deliver, model=MODEL)
    with pytest.raises(Overloaded, match="full") as error:
        await caller.call(CANCEL, CANCEL_IT, timeout_s=5, model=MODEL)
    assert (error.value.retry_after_s, error.value.details) == (2.5, {"waiting": "9"})


async def test_call_without_responders_fails_at_once(world: World) -> None:
    caller = await join(world)
    with pytest.raises(NoResponders):
        await caller.call(CANCEL, CANCEL_IT, timeout_s=60, model=MODEL)


async def test_call_ends_at_its_deadline_and_a_late_answer_is_ignored(world: World) -> None:
    caller, callee = await join(world), await join(world, "scheduler-0")
    kept: list[Delivery] = []

    async def deliver(delivery: Delivery) -> None:
        kept.append(delivery)

    subscription = await callee.listen(CANCEL, deliver, model=MODEL)
    with pytest.raises(DeadlineExceeded, match=r"scheduler\.cancel in 0\.05 s"):
        await caller.call(CANCEL, CANCEL_IT, timeout_s=0.05, model=MODEL)
    await until(lambda: len(kept) == 1)
    kept[0].respond(CANCELLED)
    await subscription.drain()
    await callee.listen(CANCEL, answer_cancel, model=MODEL)
    assert await caller.call(CANCEL, CANCEL_IT, timeout_s=5, model=MODEL) == CANCELLED
    assert not caller._pending


async def test_call_fails_at_once_when_the_link_drops(world: World) -> None:
    caller, received = await join(world), await listening(await join(world, "scheduler-0"))
    async with asyncio.TaskGroup() as group:
        call = group.create_task(lost(caller))
        await received.wait()
        await world.cut()
        assert await call
    with pytest.raises(BusDown):
        await caller.call(CANCEL, CANCEL_IT, timeout_s=60, model=MODEL)
    assert not caller._pending
    await world.heal()


async def test_call_fails_when_its_bus_is_left(world: World) -> None:
    received = await listening(await join(world, "scheduler-0"))
    async with asyncio.TaskGroup() as group:
        async with client_bus(world.make(), "gateway-0", Role.GATEWAY) as caller:
            call = group.create_task(lost(caller))
            await received.wait()
        assert await call


async def listening(callee: Bus) -> asyncio.Event:
    received = asyncio.Event()

    async def deliver(_delivery: Delivery) -> None:
        received.set()

    await callee.listen(CANCEL, deliver, model=MODEL)
    return received


async def lost(caller: Bus) -> bool:
    with pytest.raises(ReplyLost):
        await caller.call(CANCEL, CANCEL_IT, timeout_s=60, model=MODEL)
    return True


async def test_cancelled_call_leaves_nothing(world: World) -> None:
    caller, received = await join(world), await listening(await join(world, "scheduler-0"))
    async with asyncio.TaskGroup() as group:
        call = group.create_task(caller.call(CANCEL, CANCEL_IT, timeout_s=60, model=MODEL))
        await received.wait()
        call.cancel()
    assert call.cancelled()
    assert not caller._pending


async def test_json_is_answered_in_json(world: World) -> None:
    gateway, client = await join(world), await world.join()
    accepted = accepted_by(gateway.process.instance)

    async def deliver(delivery: Delivery) -> None:
        assert delivery.read(GENERATE) == HELLO
        delivery.respond(accepted)

    await gateway.listen(GENERATE, deliver, model=MODEL)
    box = await mailbox(client, "client.default.1")
    subject = gateway.subject(GENERATE, model=MODEL)
    client.publish(subject, encode_json(HELLO), "client.default.1")
    assert await box.wait(1) == [encode_json(accepted)]


async def test_queue_route_is_answered_by_one_of_many(world: World) -> None:
    caller = await join(world)
    received: list[InstanceId] = []

    async def deliver(delivery: Delivery) -> None:
        received.append(delivery.bus.process.instance)
        delivery.respond(accepted_by(delivery.bus.process.instance))

    for n in range(3):
        gateway = await join(world, f"gateway-{n + 1}")
        await gateway.listen(GENERATE, deliver, model=MODEL)
    for _ in range(30):
        await caller.call(GENERATE, HELLO, timeout_s=5, model=MODEL)
    assert len(received) == 30
    assert len(set(received)) > 1


async def test_feed_reaches_all_listeners_and_missing_parts_are_wildcards(world: World) -> None:
    sender, listeners = await join(world), [await join(world, f"worker-{n}") for n in range(2)]
    received: list[tuple[str, Discover]] = []

    async def deliver(delivery: Delivery) -> None:
        received.append((delivery.bus.process.instance, delivery.read(DISCOVER)))
        delivery.respond(CANCELLED)  # No reply subject: a no-op.

    for listener in listeners:
        await listener.listen(DISCOVER, deliver)
    cancels: list[str] = []

    async def any_model(delivery: Delivery) -> None:
        cancels.append(delivery.subject)
        await answer_cancel(delivery)

    await listeners[0].listen(CANCEL, any_model)
    sender.publish(DISCOVER, Discover(asker=OWNER))
    await until(lambda: len(received) == 2)
    assert {name for name, _ in received} == {"worker-0", "worker-1"}
    await sender.call(CANCEL, CANCEL_IT, timeout_s=5, model=ModelName("other"))
    assert cancels == ["test.v1.scheduler.other.cancel"]


async def test_clusters_on_one_broker_do_not_meet(world: World) -> None:
    here = await join(world)
    elsewhere = await world.stack.enter_async_context(
        Bus(world.make(), ClusterName("other"), here.process)
    )
    await elsewhere.listen(CANCEL, answer_cancel, model=MODEL)
    with pytest.raises(NoResponders):
        await here.call(CANCEL, CANCEL_IT, timeout_s=5, model=MODEL)


async def test_reply_is_never_sent_to_a_route(world: World) -> None:
    """Otherwise callers could make us publish to subjects that they may not use."""
    caller, callee = await join(world), await join(world, "scheduler-0")
    received: list[str | None] = []

    async def deliver(delivery: Delivery) -> None:
        received.append(delivery.reply)

    await callee.listen(CANCEL, deliver, model=MODEL)
    subject = caller.subject(CANCEL, model=MODEL)
    forbidden = caller.subject(COMMAND, worker="worker-0")
    allowed = caller.subject(CLIENT_TEXT, tenant="default", inbox="1")
    for reply in (forbidden, allowed, "_INBOX.x"):
        caller.transport.publish(subject, b"", reply)
    await until(lambda: len(received) == 3)
    assert received == [None, allowed, "_INBOX.x"]
