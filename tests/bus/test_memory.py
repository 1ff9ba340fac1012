"""The memory broker cuts links and draws lots from a seed; the injector adds faults to any link."""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack

import pytest
from tests.bus.worlds import Mailbox
from tests.support.faulty_transport import Faults, FaultyTransport
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.wait import until

from antiphon.bus.transport import BusDown
from antiphon.wire.errors import RequestTooLarge


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


async def test_dropped_share_is_dropped() -> None:
    numbers = [n for _, n in await received(Faults(drop=0.3, seed=1))]
    assert numbers == sorted(set(numbers))
    assert 40 < 200 - len(numbers) < 80


async def test_duplicated_share_comes_twice_in_order() -> None:
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
