"""`embed.<model>`: vectors over NATS, by the real client and by whoever speaks JSON."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import TYPE_CHECKING

import pytest
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import client_bus
from tests.support.wait import until
from tests.unit.gateway.cluster import CONTEXT_TOKENS, MODEL, House, house
from tests.unit.gateway.keyed import key_of, keyed
from tests.unit.gateway.test_pooling import CLASSIFIER, CROSS_ENCODER, EMBEDDER

from antiphon.client import Client
from antiphon.client import client as vectors
from antiphon.client.client import BATCH, CALLS_MAX
from antiphon.gateway.nats.embeddings import VECTORS_BYTES_MAX
from antiphon.wire.base import Usage
from antiphon.wire.codec import decode, encode, encode_json, unpack_ids
from antiphon.wire.digests import cache_salt
from antiphon.wire.errors import (
    DeadlineExceeded,
    EngineError,
    ErrorReply,
    Forbidden,
    InvalidRequest,
    PromptTooLong,
    RateLimited,
    Unauthorized,
    Unavailable,
    UnknownModel,
    Unsupported,
    WorkerLost,
)
from antiphon.wire.generate import TEXTS_MAX, EmbedReply, EmbedRequest
from antiphon.wire.routes import EMBED
from antiphon.wire.token_outputs import pack_floats, unpack_floats
from antiphon.wire.tokenize import PoolingCard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from antiphon.bus.transport import Packet

PREFIX = "test.v1."


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house() as world:
        world.cluster.pooling = EMBEDDER
        yield world


@pytest.fixture
async def client(at: House) -> AsyncIterator[Client]:
    async with Client(at.transport(), cluster="test") as opened:
        yield opened


def lists(told: vectors.EmbedResult) -> list[list[float]]:
    return [list(vector) for vector in told.vectors]


async def test_each_text_gets_its_vector_in_order(at: House, client: Client) -> None:
    told = await client.embed(MODEL, ["one", "three"], dimensions=1, priority=0, cache_salt="mine")
    assert lists(told) == [[3.0, 0.5], [5.0, 0.5]]
    assert (told.labels, told.usage) == ((), Usage(prompt_tokens=8))
    pools = [submit.sampling.pool for submit in at.cluster.submits]
    assert [pool is not None and pool.dimensions for pool in pools] == [1, 1]
    assert {submit.cache_salt for submit in at.cluster.submits} == {cache_salt("mine")}
    assert lists(await client.embed(MODEL, [])) == []


async def test_texts_go_in_batches_a_few_at_a_time(at: House, client: Client) -> None:
    texts = ["x" * (1 + n % 50) for n in range(BATCH * (CALLS_MAX + 2) + 1)]
    told = await client.embed(MODEL, texts)
    assert [vector[0] for vector in told.vectors] == [float(len(text)) for text in texts]
    assert told.usage.prompt_tokens == sum(map(len, texts))


async def test_a_pair_is_read_together_and_judged(at: House, client: Client) -> None:
    at.cluster.pooling = CROSS_ENCODER
    at.cluster.vector = lambda prompt: [float(prompt.count(b"b"))]
    told = await client.embed(MODEL, ["a", "aa"], pairs=["b", "bbb"])
    assert lists(told) == [[1.0], [3.0]]
    assert told.labels == ("LABEL_0",)
    pools = [submit.sampling.pool for submit in at.cluster.submits]
    assert sorted(pool.second_from or 0 for pool in pools if pool is not None) == [1, 2]


async def answered(at: House, request: bytes, reply_to: str = "client.default.mine") -> bytes:
    heard: list[bytes] = []

    async def hear(packet: Packet) -> None:
        heard.append(packet.data)

    async with client_bus(at.transport(), "c") as bus:
        await bus.transport.subscribe(PREFIX + reply_to, hear)
        bus.transport.publish(PREFIX + EMBED.subject_for(model=MODEL), request, PREFIX + reply_to)
        await until(lambda: bool(heard))
    return heard[0]


@pytest.mark.parametrize("json_", [False, True])
async def test_it_is_answered_in_kind(at: House, json_: bool) -> None:
    at.cluster.pooling = CLASSIFIER
    request = EmbedRequest(model=MODEL, prompt_ids=((97, 98), (99,)))
    data = await answered(at, encode_json(request) if json_ else encode(request))
    reply = decode(data, EMBED.replies)
    assert [list(unpack_floats(vector)) for vector in reply.vectors] == [[2.0, 0.5], [1.0, 0.5]]
    assert reply.labels == ("bad", "good")
    asked = [list(unpack_ids(each.prompt_ids)) for each in at.cluster.submits]
    assert sorted(asked) == [[97, 98], [99]]
    if json_:
        told = json.loads(data)
        assert base64.b64decode(told["vectors"][0]) == pack_floats((2.0, 0.5))


async def refused(
    at: House, reply_to: str = "client.default.mine", /, **said: object
) -> ErrorReply:
    """Send what is wrong, as JSON; return what comes back."""
    body = json.dumps({"type": "EmbedRequest", "model": MODEL} | said).encode()
    return decode(await answered(at, body, reply_to), (ErrorReply,))


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({}, "texts"),
        ({"texts": ["a"], "prompt_ids": [[1]]}, "texts"),
        ({"texts": ["a", " \n"]}, "texts"),
        ({"texts": ["a"], "pairs": ["b", "c"]}, "pairs"),
        ({"prompt_ids": [[1]], "pairs": ["b"]}, "pairs"),
        ({"texts": ["a"], "dimensions": 3}, "dimensions"),
        ({"texts": ["a"], "timeout_s": 1e9}, "timeout_s"),
        ({"prompt_ids": [[300]]}, "prompt"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(
    at: House, said: dict[str, object], param: str
) -> None:
    error = await refused(at, **said)  # pyright: ignore[reportArgumentType]
    assert (error.code, error.param) == ("invalid_request", param)
    assert at.cluster.submits == []


async def test_nobody_is_spoken_to_but_a_client(at: House) -> None:
    error = await refused(at, "inbox.gateway.other.1", texts=["a"])
    assert error.code == "invalid_request"
    assert "inbox" in error.message


async def test_more_vectors_than_a_message_takes_are_refused(at: House, client: Client) -> None:
    at.cluster.pooling = PoolingCard(width=VECTORS_BYTES_MAX // 4 // 3)
    assert (await refused(at, texts=["a"] * 4)).message == (
        "texts: there are 4; at most 3 vectors of this model fit into one reply"
    )
    with pytest.raises(InvalidRequest):
        await client.embed(MODEL, ["a"] * 4)
    too_many = await refused(at, texts=["a"] * (TEXTS_MAX + 1))
    assert too_many.code == "invalid_request"


@pytest.mark.parametrize(
    ("texts", "error"),
    [(["x" * (CONTEXT_TOKENS + 1)], PromptTooLong), (["lost"], WorkerLost)],
)
async def test_one_text_that_fails_ends_them_all(
    at: House, client: Client, texts: list[str], error: type[EngineError]
) -> None:
    if error is WorkerLost:
        at.cluster.row_error = WorkerLost("lost")
    with pytest.raises(error):
        await client.embed(MODEL, ["fine", *texts])
    assert at.service.submission.idle


async def test_a_model_that_generates_says_so(at: House, client: Client) -> None:
    at.cluster.pooling = None
    with pytest.raises(Unsupported, match="it is a text generation model"):
        await client.embed(MODEL, ["a"])
    with pytest.raises(Unavailable):
        await client.embed("nobody", ["a"])
    error = await refused(at, model="other", texts=["a"])
    assert error.code == UnknownModel.code


async def test_a_tenant_shows_its_key_and_keeps_to_its_limits(tmp_path: Path) -> None:
    tenants = {"acme": {"requests_per_minute": 2, "concurrency": 1}, "other": {"models": ["none"]}}
    async with house(access=keyed(tmp_path, tenants)) as at:
        at.cluster.pooling = EMBEDDER

        async def embed(tenant: str, key: str, count: int = 3) -> int:
            asker = Client(at.transport(), cluster="test", tenant=tenant, api_key=key)
            async with asker as opened:
                return len((await opened.embed(MODEL, ["a"] * count)).vectors)

        with pytest.raises(Unauthorized):
            await embed("acme", "")
        with pytest.raises(Forbidden):
            await embed("acme", key_of("other"))
        with pytest.raises(Forbidden):
            await embed("other", key_of("other"))
        assert await embed("acme", key_of("acme")) == 3, "one after the other"
        assert await embed("acme", key_of("acme")) == 3
        with pytest.raises(RateLimited):
            await embed("acme", key_of("acme"))


async def test_a_lost_answer_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "EMBED_SILENCE_S", 0.1)
    monkeypatch.setattr(vectors, "PAUSE_S", 0.01)
    broker = MemoryBroker()
    link = MemoryTransport(broker)
    async with house(lambda: MemoryTransport(broker)) as at, Client(link, cluster="test") as asker:
        at.cluster.pooling = EMBEDDER
        at.cluster.encoding.clear()
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(asker.embed(MODEL, ["abc"], timeout_s=20))
            await until(lambda: len(at.cluster.encodes) > 0)
            broker.cut(link)
            at.cluster.encoding.set()
            await until(lambda: not at.open_count)  # pyright: ignore[reportPrivateUsage]
            broker.heal(link)
        assert lists(asked.result()) == [[3.0, 0.5]]


async def test_time_that_is_over_is_told(at: House, client: Client) -> None:
    at.cluster.encoding.clear()
    with pytest.raises(DeadlineExceeded):
        await client.embed(MODEL, ["a"], timeout_s=0.3)
    at.cluster.encoding.set()


def test_the_client_sends_no_more_than_the_gateway_takes() -> None:
    assert BATCH <= TEXTS_MAX
    assert BATCH * 8192 * 4 <= VECTORS_BYTES_MAX
    assert EMBED.replies == (EmbedReply,)
