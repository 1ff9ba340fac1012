"""What every transport promises, on each of them; and the faults of those for tests."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack

import pytest
from tests.bus.worlds import Mailbox, World, mailbox
from tests.support.faulty_transport import Faults, FaultyTransport
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.wait import until

from antiphon.bus.transport import BusDown, Packet
from antiphon.wire.errors import RequestTooLarge


async def test_message_reaches_every_listener_with_its_subject_and_reply(world: World) -> None:
    sender, first, second = [await world.join() for _ in range(3)]
    boxes = [await mailbox(listener, "news.today") for listener in (first, second)]
    sender.publish("news.today", b"hello", "answer.here")
    for box in boxes:
        assert await box.wait(1) == [b"hello"]
        assert (box.packets[0].subject, box.packets[0].reply) == ("news.today", "answer.here")
        assert not box.packets[0].no_responders


async def test_subscription_is_in_place_when_subscribe_returns(world: World) -> None:
    sender, listener = await world.join(), await world.join()
    answers = await mailbox(sender, "answers")
    for n in range(50):
        await listener.subscribe(f"s.{n}", Mailbox().receive)
        sender.publish(f"s.{n}", b"", "answers")
    sender.publish("unserved", b"", "answers")
    await answers.wait(1)
    assert len(answers.packets) == 1


async def test_flush_returns_after_everything_published_was_read(world: World) -> None:
    sender, listener = await world.join(), await world.join()
    for n in range(50):
        box = Mailbox()
        subscription = await listener.subscribe(f"s.{n}", box.receive)
        for _ in range(3):
            sender.publish(f"s.{n}", b"x" * 1000)
        await sender.flush(5)
        await subscription.drain()
        assert len(box.packets) == 3


@pytest.mark.parametrize(
    ("pattern", "received"),
    [
        ("a.*", ["a.b", "a.c"]),
        ("a.>", ["a.b", "a.c", "a.b.c"]),
        ("*.b", ["a.b"]),
        ("a.b", ["a.b"]),
        (">", ["a.b", "a.c", "a", "a.b.c"]),
    ],
)
async def test_wildcards_cover_tokens(world: World, pattern: str, received: list[str]) -> None:
    transport = await world.join()
    box = await mailbox(transport, pattern)
    for subject in ("a.b", "a.c", "a", "a.b.c"):
        transport.publish(subject, b"")
    last = await mailbox(transport, "last")
    transport.publish("last", b"")
    await last.wait(1)
    subjects = [packet.subject for packet in box.packets if packet.subject != "last"]
    assert subjects == received


async def test_one_member_of_a_queue_gets_a_message_and_each_gets_some(world: World) -> None:
    sender = await world.join()
    boxes = [Mailbox() for _ in range(3)]
    for box in boxes:
        await (await world.join()).subscribe("work", box.receive, "workers")
    unqueued = await mailbox(await world.join(), "work")
    for n in range(200):
        sender.publish("work", b"%d" % n)
    await unqueued.wait(200)
    await until(lambda: sum(len(box.packets) for box in boxes) == 200)
    assert {int(data) for box in boxes for data in box.data} == set(range(200))
    assert all(box.packets for box in boxes)


async def test_order_is_kept(world: World) -> None:
    sender, listener = await world.join(), await world.join()
    box = await mailbox(listener, "steps.*")
    for n in range(2000):
        sender.publish(f"steps.{n % 2}", b"%d" % n)
    assert await box.wait(2000) == [b"%d" % n for n in range(2000)]


async def test_one_message_at_a_time_is_received(world: World) -> None:
    transport = await world.join()
    running = most = done = 0

    async def receive(_packet: Packet) -> None:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        done += 1

    await transport.subscribe("one", receive)
    for _ in range(20):
        transport.publish("one", b"")
    await until(lambda: done == 20)
    assert most == 1


async def test_plain_receiver_gets_split_messages_in_order(world: World) -> None:
    sender, listener = await world.join(), await world.join()
    plain = await mailbox(listener, "sizes", plain=True)
    other = await mailbox(listener, "others")
    sizes = [(7919 * n * n) % 300_000 if n % 10 == 0 else n % 100 for n in range(300)]
    for n, size in enumerate(sizes):
        sender.publish("sizes", b"%d " % n + b"\r\n" * (size // 2), "answer.here")
        if n % 3 == 0:
            sender.publish("others", b"%d" % n)
        if n % 50 == 49:
            await sender.flush(5)
    await other.wait(100)
    received = await plain.wait(300)
    assert [int(data.split()[0]) for data in received] == list(range(300))
    assert [data.count(b"\r\n") for data in received] == [size // 2 for size in sizes]
    assert {packet.reply for packet in plain.packets} == {"answer.here"}
    assert [int(data) for data in other.data] == list(range(0, 300, 3))


@pytest.mark.parametrize("plain", [False, True])
async def test_no_responders_differ_from_an_empty_reply(world: World, plain: bool) -> None:
    transport, other = await world.join(), await world.join()
    box = await mailbox(transport, "inbox.*", plain=plain)
    foreign = await mailbox(other, "inbox.1")
    transport.publish("unserved.here", b"hello", "inbox.1")
    await box.wait(1)
    transport.publish("inbox.2", b"")
    await box.wait(2)
    seen = [(packet.subject, packet.data, packet.no_responders) for packet in box.packets]
    assert seen == [("inbox.1", b"", True), ("inbox.2", b"", False)]
    assert not foreign.packets


async def test_too_large_is_refused_before_it_is_sent(world: World) -> None:
    transport = await world.join()
    box = await mailbox(transport, "big")
    limit = transport.payload_bytes_max
    with pytest.raises(RequestTooLarge) as refusal:
        transport.publish("big", b"x" * (limit + 1))
    assert refusal.value.details == {"size_bytes": str(limit + 1), "bytes_max": str(limit)}
    transport.publish("big", b"x" * limit)
    assert [len(data) for data in await box.wait(1)] == [limit]
    assert transport.link.connect_count == 1


@pytest.mark.parametrize("plain", [False, True])
async def test_failing_receiver_gets_the_next_message(
    world: World, caplog: pytest.LogCaptureFixture, plain: bool
) -> None:
    transport = await world.join()
    box = Mailbox()

    def receive_sync(packet: Packet) -> None:
        box.receive_sync(packet)
        if packet.data == b"bad":
            raise ValueError("our bug")

    async def receive(packet: Packet) -> None:
        receive_sync(packet)

    await transport.subscribe("fragile", receive_sync if plain else receive)
    transport.publish("fragile", b"bad")
    transport.publish("fragile", b"good")
    assert await box.wait(2) == [b"bad", b"good"]
    assert "receiver failed" in caplog.messages


async def test_receiver_that_awaits_something_cancelled_gets_the_next_message(world: World) -> None:
    transport = await world.join()
    box = Mailbox()

    async def receive(packet: Packet) -> None:
        await box.receive(packet)
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        await cancelled

    await transport.subscribe("fragile", receive)
    for _ in range(2):
        transport.publish("fragile", b"")
    await box.wait(2)


@pytest.mark.parametrize("plain", [False, True])
async def test_drain_loses_nothing_and_ends_the_interest(world: World, plain: bool) -> None:
    sender, listener = await world.join(), await world.join()
    box = Mailbox()
    subscription = await listener.subscribe("stream", box.receive_sync if plain else box.receive)
    for n in range(500):
        sender.publish("stream", b"%d" % n)
    await sender.flush(5)
    await asyncio.gather(subscription.drain(), subscription.drain())
    assert len(box.packets) == 500
    await subscription.drain()
    answers = await mailbox(sender, "answers")
    sender.publish("stream", b"late", "answers")
    await answers.wait(1)
    assert answers.packets[0].no_responders
    assert len(box.packets) == 500


async def test_leaving_receives_what_had_arrived(world: World) -> None:
    sender = await world.join()
    box = Mailbox()
    begun = asyncio.Event()

    async def receive(packet: Packet) -> None:
        begun.set()
        await asyncio.sleep(0)
        await box.receive(packet)

    async with world.make() as listener:
        await listener.subscribe("stream", receive)
        for n in range(100):
            sender.publish("stream", b"%d" % n)
        await sender.flush(5)
        await begun.wait()
    assert len(box.packets) == 100
    assert not listener.link.up
    with pytest.raises(BusDown):
        listener.publish("stream", b"gone")


async def test_subscriptions_survive_an_outage_and_messages_do_not(world: World) -> None:
    transport = await world.join()
    kept, drained = await mailbox(transport, "kept"), Mailbox()
    ended = await transport.subscribe("drained", drained.receive)
    transport.publish("kept", b"before")
    await kept.wait(1)
    await world.cut()
    with pytest.raises(BusDown):
        transport.publish("kept", b"lost")
    with pytest.raises(BusDown):
        await transport.flush(0.1)
    made = await mailbox(transport, "made")
    await ended.drain()
    await world.heal()
    for subject in ("drained", "kept", "made"):
        transport.publish(subject, b"after")
    assert await kept.wait(2) == [b"before", b"after"]
    assert await made.wait(1) == [b"after"]
    assert not drained.packets


async def test_link_reports_joins_and_drops(world: World, caplog: pytest.LogCaptureFixture) -> None:
    transport = await world.join()
    link, box, events = transport.link, Mailbox(), list[str]()
    await transport.subscribe("discover", box.receive)

    async def greet() -> None:
        events.append(f"join {link.connect_count} {link.up}")
        transport.publish("discover", b"hello")

    async def fail() -> None:
        raise ValueError("our bug")

    link.on_connect(fail)
    link.on_connect(greet)
    link.on_disconnect(lambda: events.append(f"drop {link.connect_count} {link.up}"))
    assert (link.connect_count, link.up) == (1, True)
    await world.cut()
    await world.heal()
    assert await box.wait(1) == [b"hello"]
    assert events == ["drop 1 False", "join 2 True"]
    assert "join callback failed" in caplog.messages


async def test_one_link_is_cut_and_the_others_stay() -> None:
    broker = MemoryBroker()
    async with MemoryTransport(broker) as near, MemoryTransport(broker) as far:
        received_near, received_far = Mailbox(), Mailbox()
        await near.subscribe("news", received_near.receive)
        await far.subscribe("news", received_far.receive)
        broker.cut(far)
        near.publish("news", b"missed")
        with pytest.raises(BusDown):
            far.publish("news", b"lost")
        broker.heal(far)
        await until(lambda: far.link.up)
        near.publish("news", b"received")
        assert await received_far.wait(1) == [b"received"]
        assert await received_near.wait(2) == [b"missed", b"received"]
        assert (near.link.connect_count, far.link.connect_count) == (1, 2)


async def test_healing_a_whole_link_does_nothing() -> None:
    broker = MemoryBroker()
    async with MemoryTransport(broker) as transport:
        broker.heal(transport)
    assert transport.link.connect_count == 1


async def test_same_seed_draws_the_same_members() -> None:
    assert await drawn(7) == await drawn(7)
    assert await drawn(7) != await drawn(8)


async def drawn(seed: int) -> list[list[bytes]]:
    broker = MemoryBroker(seed=seed)
    boxes = [Mailbox() for _ in range(3)]
    async with AsyncExitStack() as stack:
        sender = await stack.enter_async_context(MemoryTransport(broker))
        for box in boxes:
            transport = await stack.enter_async_context(MemoryTransport(broker))
            await transport.subscribe("work", box.receive, "workers")
        for n in range(50):
            sender.publish("work", b"%d" % n)
    return [box.data for box in boxes]


async def test_slow_receiver_loses_the_newest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tests.support.memory_bus.PENDING_MESSAGES_MAX", 10)
    box = Mailbox()
    async with MemoryTransport(MemoryBroker()) as transport:
        await transport.subscribe("fast", box.receive)
        for n in range(15):
            transport.publish("fast", b"%d" % n)
    assert box.data == [b"%d" % n for n in range(10)]
    assert caplog.messages.count("slow receiver lost a message") == 5


async def received(faults: Faults, subjects: int = 1, count: int = 200) -> list[tuple[str, int]]:
    box = Mailbox()
    broker = MemoryBroker()
    async with MemoryTransport(broker) as listener:
        await listener.subscribe(">", box.receive)
        # Leaving it waits until all that is held back has gone.
        async with FaultyTransport(MemoryTransport(broker), faults=faults) as transport:
            for n in range(count):
                transport.publish(f"s.{n % subjects}", b"%d" % n)
    return [(packet.subject, int(packet.data)) for packet in box.packets]


async def test_each_call_fails_once_and_the_count_ends() -> None:
    failed: list[int] = []
    for n in itertools.count():
        transport = FaultyTransport(MemoryTransport(MemoryBroker()), fail_at_call=n)
        async with transport:
            try:
                await transport.subscribe("a", Mailbox().receive)
                transport.publish("a", b"")
                await transport.flush(1)
            except BusDown:
                failed.append(transport.calls - 1)
        assert transport.fault_happened == (n < 3)
        if not transport.fault_happened:
            break
    assert failed == [0, 1, 2]


async def test_shares_of_messages_are_dropped_or_duplicated_in_order() -> None:
    numbers = [n for _, n in await received(Faults(drop=0.3, seed=1))]
    assert numbers == sorted(set(numbers))
    assert 40 < 200 - len(numbers) < 80
    numbers = [n for _, n in await received(Faults(duplicate=0.3, seed=1))]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(200))
    assert 40 < len(numbers) - 200 < 80


async def test_delay_reorders_between_subjects_only() -> None:
    packets = await received(Faults(delay=0.1, delay_s=0.001, seed=1), subjects=4)
    numbers = [n for _, n in packets]
    assert sorted(numbers) == list(range(200))
    assert numbers != sorted(numbers)
    for subject in {subject for subject, _ in packets}:
        own = [n for s, n in packets if s == subject]
        assert own == sorted(own)


async def test_seed_decides() -> None:
    faults = [Faults(drop=0.2, duplicate=0.2, seed=seed) for seed in (1, 1, 2)]
    first, again, other = [await received(fault) for fault in faults]
    assert first == again
    assert first != other


async def test_what_would_be_dropped_is_still_refused_when_too_large_or_down() -> None:
    broker = MemoryBroker(payload_bytes_max=10)
    inner = MemoryTransport(broker)
    async with FaultyTransport(inner, faults=Faults(drop=1)) as transport:
        with pytest.raises(RequestTooLarge):
            transport.publish("a", b"x" * 11)
        broker.cut(inner)
        with pytest.raises(BusDown):
            transport.publish("a", b"")
