"""How often tokenizers are asked: once, once more beside a slow one, and again after losses."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from tests.support.wait import until
from tests.unit.gateway.calls import CHAT, COMPLETE, GENERATE, Body, Response, failure, ok, post
from tests.unit.gateway.cluster import House, house, tokenizer

from antiphon.gateway.requests import tokenizer_calls
from antiphon.service.peers import Liveness
from antiphon.wire.base import Role

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

LONG = "a b " * 1000


@pytest.mark.parametrize("tokenizers", [1, 2, 3])
async def test_slow_call_is_hedged_once_by_another_tokenizer(tokenizers: int) -> None:
    async with house(encode_hedge_s=0.001) as at:
        await _living(at, tokenizers)
        async with slow_encode(at) as task:
            after = at.cluster.beats + 5
            await until(lambda: at.cluster.beats > after)
            assert len(at.cluster.encodes) == min(2, tokenizers)
            at.cluster.encoding.set()
        assert task.result().status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETE, {"prompt": "x"}), ("/detokenize", {"tokens": [120]})],
    ids=["encode", "decode"],
)
async def test_second_call_reaches_another_tokenizer_than_one_that_is_frozen(
    path: str, body: Body
) -> None:
    """It counts as alive for some heartbeats, and the broker delivers calls to it."""
    async with house(encode_hedge_s=0.001) as at:
        await _living(at, 2)
        await ok(at, COMPLETE, {"prompt": "x"})  # the card is known
        at.cluster.frozen_tokenizers = {"tokenizer-0"}
        await asyncio.gather(*(ok(at, path, body) for _ in range(20)))
        assert {one.rpartition(".")[2] for one in at.cluster.unanswered} == {"tokenizer-0"}
        assert len(at.cluster.unanswered) <= 20


async def test_call_goes_to_any_tokenizer_if_the_one_that_it_names_does_not_listen(
    at: House,
) -> None:
    """It has just ended, or is of a version that only reads calls to any."""
    for subscription in at.cluster.directed:
        await subscription.drain()
    await ok(at, COMPLETE, {"prompt": "x"})
    await ok(at, "/detokenize", {"tokens": [120]})
    assert len(at.cluster.encodes) == 1


@asynccontextmanager
async def slow_encode(at: House) -> AsyncGenerator[asyncio.Task[Response]]:
    """A request whose encode call was sent and gets no reply yet."""
    at.cluster.encoding.clear()
    before = len(at.cluster.encodes)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(post(at, COMPLETE, {"prompt": "x"}))
        await until(lambda: len(at.cluster.encodes) > before)
        yield task


async def test_call_is_repeated_when_its_tokenizer_was_restarted(at: House) -> None:
    at.cluster.mute_tokenizers = 1
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(post(at, COMPLETE, {"prompt": "x"}))
        await until(lambda: at.cluster.encodes != [])
        at.cluster.tokenizers[0] = tokenizer(0, "2")
    assert asked.result()[0] == 200
    assert len(at.cluster.encodes) == 2


async def test_calls_are_repeated_while_a_silent_tokenizer_may_take_them() -> None:
    async with house(encode_hedge_s=0.02) as at:
        await _living(at, 2)
        at.cluster.tokenizers.pop()
        at.cluster.mute_tokenizers = 3
        await ok(at, COMPLETE, {"prompt": "x"})
        assert len(at.cluster.encodes) == 4


@pytest.mark.parametrize("tokenizers", [1, 2])
async def test_lost_calls_are_repeated_though_their_tokenizers_live(
    tokenizers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_calls, "LOST_S", 0.02)
    async with house(encode_hedge_s=0.001) as at:
        await _living(at, tokenizers)
        at.cluster.mute_tokenizers = 2
        await ok(at, COMPLETE, {"prompt": "x"})
        assert len(at.cluster.encodes) >= 3


async def test_busy_tokenizer_is_called_once_however_long_it_is_silent() -> None:
    async with house(encode_hedge_s=0.001) as at:
        cluster = at.cluster
        async with slow_encode(at) as task:
            (busy,) = cluster.tokenizers
            cluster.tokenizers.clear()  # it sends no heartbeats, as if it held its interpreter
            await until(lambda: _liveness(at) is not Liveness.ALIVE)
            after = cluster.beats + 10
            await until(lambda: cluster.beats > after)
            assert len(cluster.encodes) == 1
            cluster.encoding.set()
            cluster.tokenizers.append(busy)
        assert task.result().status == 200


def _liveness(at: House) -> Liveness | None:
    return next((peer.liveness for peer in at.peers if peer.heartbeat.role is Role.TOKENIZER), None)


async def test_only_the_open_encode_of_a_caller_that_left_is_cancelled(at: House) -> None:
    await ok(at, COMPLETE, {"prompt": "x"})
    async with slow_encode(at) as task:
        task.cancel()
    await until(lambda: at.cluster.encodes_cancelled != [])
    assert at.cluster.encodes_cancelled == [at.cluster.encodes[-1].request_id]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETE, {"prompt": LONG}),
        ("/tokenize", {"prompt": LONG}),
        (GENERATE, {"text": LONG}),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
    ],
)
async def test_text_of_too_many_characters_is_refused_by_the_gateway(
    at: House, path: str, body: Body
) -> None:
    at.cluster.token_characters = 10
    await ok(at, COMPLETE, {"prompt": "x"})  # the card is known
    status, error = await failure(at, path, body)
    assert (status, "4000 characters" in str(error), "640" in str(error)) == (400, True, True)
    assert len(at.cluster.encodes) == 1


async def test_more_ids_than_the_context_are_refused_before_they_are_read(at: House) -> None:
    status, error = await failure(at, GENERATE, {"input_ids": [2**31 - 1] * 1000})
    assert (status, "1000 tokens" in error["message"]) == (400, True)


async def _living(at: House, tokenizers: int) -> None:
    at.cluster.tokenizers[:] = [tokenizer(number) for number in range(tokenizers)]
    for added in at.cluster.tokenizers[1:]:
        await at.cluster.hold_name(added)
    roles = len(at.cluster.roles) - 1
    await until(lambda: len(at.peers) == roles + tokenizers)
