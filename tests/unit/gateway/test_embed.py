"""`embed.<model>`: vectors over NATS, for the real client and for requests in JSON."""

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
from antiphon.wire.namespaces import cache_salt
from antiphon.wire.routes import EMBED
from antiphon.wire.sampling import PoolParams
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


INBOX = "client.default.mine"


def lists(result: vectors.EmbedResult) -> list[list[float]]:
    return [list(vector) for vector in result.vectors]


async def test_each_text_gets_its_vector_in_order(at: House, client: Client) -> None:
    texts = ["one", "three"]
    result = await client.embed(MODEL, texts, dimensions=1, priority=0, cache_salt="mine")
    assert lists(result) == [[3.0, 0.5], [5.0, 0.5]]
    assert (result.labels, result.usage) == ((), Usage(prompt_tokens=8))
    pools = [submit.sampling.pool for submit in at.cluster.submits]
    assert pools == [PoolParams(dimensions=1)] * 2
    assert {submit.cache_salt for submit in at.cluster.submits} == {cache_salt("mine")}
    assert lists(await client.embed(MODEL, [])) == []


async def test_texts_are_sent_in_batches_a_few_at_a_time(at: House, client: Client) -> None:
    texts = ["x" * (1 + n % 50) for n in range(BATCH * (CALLS_MAX + 2) + 1)]
    result = await client.embed(MODEL, texts)
    assert [vector[0] for vector in result.vectors] == [float(len(text)) for text in texts]
    assert result.usage.prompt_tokens == sum(map(len, texts))


async def test_pair_is_encoded_together_and_scored(at: House, client: Client) -> None:
    at.cluster.pooling = CROSS_ENCODER
    at.cluster.vector = lambda prompt: [float(prompt.count(b"b"))]
    result = await client.embed(MODEL, ["a", "aa"], pairs=["b", "bbb"])
    assert (lists(result), result.labels) == ([[1.0], [3.0]], ("LABEL_0",))
    pools = {submit.sampling.pool for submit in at.cluster.submits}
    assert pools == {PoolParams(second_from=1), PoolParams(second_from=2)}


async def reply_to(at: House, request: bytes, inbox: str = INBOX) -> bytes:
    replies: list[bytes] = []

    async def receive(packet: Packet) -> None:
        replies.append(packet.data)

    async with client_bus(at.transport(), "c") as bus:
        await bus.transport.subscribe(PREFIX + inbox, receive)
        bus.transport.publish(PREFIX + EMBED.subject_for(model=MODEL), request, PREFIX + inbox)
        await until(lambda: bool(replies))
    return replies[0]


@pytest.mark.parametrize("json_", [False, True])
async def test_reply_has_the_encoding_of_the_request(at: House, json_: bool) -> None:
    at.cluster.pooling = CLASSIFIER
    request = EmbedRequest(model=MODEL, prompt_ids=((97, 98), (99,)))
    data = await reply_to(at, encode_json(request) if json_ else encode(request))
    reply = decode(data, EMBED.replies)
    assert [list(unpack_floats(vector)) for vector in reply.vectors] == [[2.0, 0.5], [1.0, 0.5]]
    assert reply.labels == ("bad", "good")
    prompts = [list(unpack_ids(each.prompt_ids)) for each in at.cluster.submits]
    assert sorted(prompts) == [[97, 98], [99]]
    if json_:
        assert base64.b64decode(json.loads(data)["vectors"][0]) == pack_floats((2.0, 0.5))


async def refused(at: House, inbox: str = INBOX, /, **fields: object) -> ErrorReply:
    """The error of a bad request in JSON."""
    body = json.dumps({"type": "EmbedRequest", "model": MODEL} | fields).encode()
    return decode(await reply_to(at, body, inbox), (ErrorReply,))


@pytest.mark.parametrize(
    ("fields", "param"),
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
async def test_bad_request_is_refused_by_its_field(
    at: House, fields: dict[str, object], param: str
) -> None:
    error = await refused(at, **fields)
    assert (error.code, error.param) == ("invalid_request", param)
    assert at.cluster.submits == []


async def test_only_the_inbox_of_a_client_gets_a_reply(at: House) -> None:
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


async def test_generative_model_refuses_to_embed(at: House, client: Client) -> None:
    at.cluster.pooling = None
    with pytest.raises(Unsupported, match="it is a text generation model"):
        await client.embed(MODEL, ["a"])
    with pytest.raises(Unavailable):
        await client.embed("unknown", ["a"])
    error = await refused(at, model="other", texts=["a"])
    assert error.code == UnknownModel.code


async def test_tenant_needs_its_key_and_has_its_limits(tmp_path: Path) -> None:
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


async def test_lost_reply_is_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_deadline_is_an_error(at: House, client: Client) -> None:
    at.cluster.encoding.clear()
    with pytest.raises(DeadlineExceeded):
        await client.embed(MODEL, ["a"], timeout_s=0.3)
    at.cluster.encoding.set()


def test_client_sends_no_more_than_the_gateway_takes() -> None:
    assert BATCH <= TEXTS_MAX
    assert BATCH * 8192 * 4 <= VECTORS_BYTES_MAX
    assert EMBED.replies == (EmbedReply,)
