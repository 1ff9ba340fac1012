"""The proxy that faults are made with: what it does to messages and to connections."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from tests.bus.worlds import bus_config, mailbox
from tests.support.nats_link import Action, Apart, LinkMessage, NatsLink, Share, linked
from tests.support.wait import until

from antiphon.bus.nats import NatsTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.nats import NatsServer

COUNT = 400


@asynccontextmanager
async def joined(link: NatsLink, *names: str) -> AsyncIterator[list[NatsTransport]]:
    async with AsyncExitStack() as stack:
        config = bus_config(link.url, ping_interval_s=0.1)
        yield [await stack.enter_async_context(NatsTransport(config, name=name)) for name in names]


@pytest.fixture
async def link(server: NatsServer) -> AsyncIterator[NatsLink]:
    async with linked(server.url) as link:
        yield link


async def received(link: NatsLink, rule: Share) -> list[int]:
    """What of numbered messages comes, in order; the last one is not hit."""
    link.rule = lambda message: rule(message) if message.subject == "news" else Action.PASS
    async with joined(link, "a", "b") as (a, b):
        news, end = await mailbox(b, "news"), await mailbox(b, "end")
        for n in range(COUNT):
            a.publish("news", b"%d" % n)
        await a.flush(5)
        a.publish("end", b"")
        await end.wait(1)
        late = rule.action in (Action.DELAY, Action.REORDER)
        await until(lambda: not late or len(news.packets) == COUNT)
        return [int(data) for data in news.data]


async def test_a_share_of_messages_is_dropped(link: NatsLink) -> None:
    numbers = await received(link, Share(Action.DROP, 0.1))
    assert numbers == sorted(numbers)
    assert 0.8 * COUNT < len(numbers) < 0.97 * COUNT


async def test_a_share_of_messages_is_duplicated(link: NatsLink) -> None:
    numbers = await received(link, Share(Action.DUPLICATE, 0.1))
    assert sorted(set(numbers)) == list(range(COUNT))
    assert set(Counter(numbers).values()) == {1, 2}


async def test_delayed_messages_keep_their_order_within_a_subject(link: NatsLink) -> None:
    assert await received(link, Share(Action.DELAY, 0.05)) == list(range(COUNT))


async def test_reordered_messages_are_overtaken(link: NatsLink) -> None:
    numbers = await received(link, Share(Action.REORDER, 0.05))
    assert numbers != sorted(numbers) == list(range(COUNT))


async def test_rules_see_clients_subjects_replies_and_payloads(link: NatsLink) -> None:
    seen: list[LinkMessage] = []

    def rule(message: LinkMessage) -> Action:
        seen.append(message)
        return Action.PASS

    link.rule = rule
    async with joined(link, "a", "b") as (a, b):
        box = await mailbox(b, "news.*")
        a.publish("news.one", b"1\r\n2", "inbox.a")
        a.publish("news.two", b"", None, {"Name": "value"})
        await box.wait(2)
    heads = [b"", b"NATS/1.0\r\nName: value\r\n\r\n"]
    for client, sent in (("a", True), ("b", False)):
        assert [message for message in seen if message.client == client] == [
            LinkMessage(client, sent, "news.one", "inbox.a", b"1\r\n2"),
            LinkMessage(client, sent, "news.two", "", heads[1]),
        ]


async def test_two_that_are_apart_reach_all_others(link: NatsLink) -> None:
    link.rule = Apart("a-0", "b-0")
    async with joined(link, "a-0", "b-0", "c-0") as transports:
        boxes = [await mailbox(each, "to.>") for each in transports]
        direct = [await mailbox(each, f"to.{n}") for each, n in zip(transports, "abc", strict=True)]
        a, b, c = transports
        a.publish("inbox.b-0.1", b"lost")  # never reaches the broker
        b.publish("to.beat.b-0", b"not for a")
        a.publish("to.beat.a-0", b"not for b")
        c.publish("to.c-0", b"for all")
        for box, count in zip(boxes, (2, 2, 3), strict=True):
            await box.wait(count)
        await asyncio.gather(*(each.flush(5) for each in transports))
    found = [{packet.data for packet in box.packets} for box in boxes]
    assert found == [
        {b"not for b", b"for all"},
        {b"not for a", b"for all"},
        {b"not for a", b"not for b", b"for all"},
    ]
    assert not any(box.packets for box in direct)


async def test_what_is_held_comes_when_it_is_let_go(link: NatsLink) -> None:
    async with joined(link, "a", "b") as (a, b):
        box, back = await mailbox(b, "news"), await mailbox(a, "back")
        link.hold("a", sent=True)
        a.publish("news", b"held")
        b.publish("back", b"this way is open")
        await back.wait(1)
        assert not box.packets
        await until(lambda: not a.link.up)  # no answer to its pings
        link.let_go()
        await box.wait(1)
        await until(lambda: a.link.up)
        a.publish("news", b"after")
        assert await box.wait(2) == [b"held", b"after"]


async def test_one_client_is_cut_and_may_connect_again(link: NatsLink) -> None:
    async with joined(link, "a", "b") as (a, b):
        box = await mailbox(a, "news")
        link.cut("a")
        await until(lambda: a.link.connect_count == 2 and a.link.up)
        b.publish("news", b"after")
        assert await box.wait(1) == [b"after"]
        assert b.link.connect_count == 1
