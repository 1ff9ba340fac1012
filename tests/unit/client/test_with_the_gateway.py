"""The client and the real gateway, over links and brokers that come and go."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.support.faulty_transport import Faults, FaultyTransport
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.nats import NatsServer
from tests.support.services import CLUSTER
from tests.support.wait import until
from tests.unit.client.gateway import MODEL as FAKE_MODEL
from tests.unit.client.gateway import gateway
from tests.unit.gateway.cluster import MODEL, SCRIPT, house

from antiphon.bus.nats import NatsTransport
from antiphon.client import Client, stream
from antiphon.config.settings import BusConfig
from antiphon.service.tasks import Tasks
from antiphon.wire.sampling import TokenOutputParams

WHOLE = "".join(SCRIPT)
AT_A_TIME = 8


async def flicker(broker: MemoryBroker, link: MemoryTransport, chance: random.Random) -> None:
    """Take the client's link down and up, until cancelled."""
    while True:
        await asyncio.sleep(chance.random() * 0.02)
        broker.cut(link)
        await asyncio.sleep(chance.random() * 0.02)
        broker.heal(link)


@pytest.mark.parametrize("seed", range(6))
async def test_answers_are_whole_over_a_bad_link(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said to the client is lost with its link; what it says, by chance too.

    So are the details of an answer's tokens.
    """
    monkeypatch.setattr(stream, "SILENCE_S", 0.03)
    monkeypatch.setattr(stream, "CALL_TIMEOUT_S", 0.1)
    broker = MemoryBroker(seed=seed)
    inner = MemoryTransport(broker)
    link = FaultyTransport(inner, faults=Faults(drop=0.2, duplicate=0.2, seed=seed))

    async def ask(client: Client, n: int) -> str:
        if n % 3 == 0:
            return await with_token_outputs(client)
        if n % 2:
            return (await client.complete(MODEL, "hi", timeout_s=10)).text
        return "".join([p.text async for p in client.generate(MODEL, "hi", timeout_s=10)])

    async def with_token_outputs(client: Client) -> str:
        """A response with outputs of every token, and of two prompt tokens."""
        wanted = TokenOutputParams(logprobs=True, top=1, prompt_start=0)
        answer = await client.complete(
            MODEL, "abc", timeout_s=10, details=wanted, token_texts=True, logit_bias={7: -1.5}
        )
        assert answer.details is not None
        assert answer.details.offset == -2
        tokens = [detail.token_id for detail in answer.details.details.iter_tokens()]
        assert tokens == [5, 5, *range(10, 10 + len(SCRIPT))]
        return "".join(answer.details.texts[token] for token in tokens[2:])

    async with (
        house(lambda: MemoryTransport(broker)),
        Client(link, cluster=CLUSTER) as client,
        Tasks() as disturbance,
    ):
        disturbance.create_task(flicker(broker, inner, random.Random(seed)))
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(ask(client, n)) for n in range(AT_A_TIME)]
        await disturbance.cancel(1.0)
        broker.heal(inner)
    assert [answer.result() for answer in answers] == [WHOLE] * AT_A_TIME, f"seed {seed}"


async def test_broker_that_dies_and_comes_back_loses_no_byte() -> None:
    async with (
        NatsServer() as server,
        gateway(NatsTransport(BusConfig(url=server.url), name="gateway")) as fake,
        Client(server.url, cluster=CLUSTER) as client,
        asyncio.TaskGroup() as group,
    ):
        pieces = client.generate(FAKE_MODEL, "hi", timeout_s=20)
        first = group.create_task(anext(pieces))
        await until(lambda: bool(fake.requests))
        (request,) = fake.requests
        await fake.say(request, "before, ")
        assert (await first).text == "before, "
        await server.kill()
        await until(lambda: not fake.bus.link.up)
        request.said.append("meanwhile, ")  # generated while no subscriber was connected
        await server.start()
        await until(lambda: fake.bus.link.up)
        await fake.say(request, "after")
        await fake.finish(request)
        assert "".join([piece.text async for piece in pieces]) == "meanwhile, after"
        assert not request.cancelled.is_set()
