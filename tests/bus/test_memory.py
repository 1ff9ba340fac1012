"""What the memory broker can do that a server cannot: cut one link, and draw lots from a seed."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from tests.bus.worlds import Mailbox
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.wait import until

from antiphon.bus.transport import BusDown


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
