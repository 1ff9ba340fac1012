"""How often tokenizers are asked: once, once more beside a slow one, and again after losses."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.wait import until
from tests.unit.gateway.calls import COMPLETE, ok, post
from tests.unit.gateway.cluster import House, house, tokenizer

from antiphon.service.peers import Liveness
from antiphon.wire.base import Role


@pytest.mark.parametrize("tokenizers", [1, 2, 3])
async def test_a_call_that_is_merely_slow_is_hedged_once_by_another_tokenizer(
    tokenizers: int,
) -> None:
    async with house(encode_hedge_s=0.001) as at:
        await _living(at, tokenizers)
        cluster = at.cluster
        cluster.encoding.clear()
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(post(at, COMPLETE, {"prompt": "x"}))
            await until(lambda: cluster.encodes != [])
            after = cluster.beats + 5
            await until(lambda: cluster.beats > after)
            assert len(cluster.encodes) == min(2, tokenizers)
            cluster.encoding.set()
        assert asked.result()[0] == 200


async def test_a_call_is_made_again_when_the_tokenizer_that_took_it_came_back(at: House) -> None:
    at.cluster.mute_tokenizers = 1
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(post(at, COMPLETE, {"prompt": "x"}))
        await until(lambda: at.cluster.encodes != [])
        at.cluster.tokenizers[0] = tokenizer(0, "2")
    assert asked.result()[0] == 200
    assert len(at.cluster.encodes) == 2


async def test_calls_are_made_for_as_long_as_one_that_is_silent_may_take_them() -> None:
    async with house(encode_hedge_s=0.02) as at:
        await _living(at, 2)
        at.cluster.tokenizers.pop()
        at.cluster.mute_tokenizers = 3
        await ok(at, COMPLETE, {"prompt": "x"})
        assert len(at.cluster.encodes) == 4


async def test_a_busy_tokenizer_is_called_once_however_long_it_is_silent() -> None:
    async with house(encode_hedge_s=0.001) as at:
        cluster = at.cluster
        cluster.encoding.clear()
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(post(at, COMPLETE, {"prompt": "x"}))
            await until(lambda: cluster.encodes != [])
            (busy,) = cluster.tokenizers
            cluster.tokenizers.clear()  # it beats no more, as if it held its interpreter
            await until(lambda: _verdict(at) is not Liveness.ALIVE)
            after = cluster.beats + 10
            await until(lambda: cluster.beats > after)
            assert len(cluster.encodes) == 1
            cluster.encoding.set()
            cluster.tokenizers.append(busy)
        assert asked.result()[0] == 200


def _verdict(at: House) -> Liveness | None:
    return next((peer.liveness for peer in at.peers if peer.heartbeat.role is Role.TOKENIZER), None)


async def test_tokenizers_stop_work_for_a_caller_that_left(at: House) -> None:
    at.cluster.encoding.clear()
    asked = asyncio.get_running_loop().create_task(post(at, COMPLETE, {"prompt": "x"}))
    await until(lambda: at.cluster.encodes != [])
    asked.cancel()
    await until(lambda: at.cluster.encodes_cancelled != [])
    assert at.cluster.encodes_cancelled == [at.cluster.encodes[0].request_id]


async def test_no_encode_is_cancelled_whose_reply_has_come(at: House) -> None:
    await ok(at, COMPLETE, {"prompt": "x"})
    at.cluster.encoding.clear()
    asked = asyncio.get_running_loop().create_task(post(at, COMPLETE, {"prompt": "y"}))
    await until(lambda: len(at.cluster.encodes) > 1)
    asked.cancel()
    await until(lambda: at.cluster.encodes_cancelled != [])
    assert at.cluster.encodes_cancelled == [at.cluster.encodes[-1].request_id]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETE, {"prompt": "a b " * 1000}),
        ("/tokenize", {"prompt": "a b " * 1000}),
        ("/generate", {"text": "a b " * 1000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * 1000}]}),
    ],
)
async def test_text_of_too_many_characters_is_refused_by_the_gateway(
    at: House, path: str, body: dict[str, object]
) -> None:
    at.cluster.token_characters = 10
    await ok(at, COMPLETE, {"prompt": "x"})  # the card is known
    status, reply, _ = await post(at, path, body)
    assert status == 400
    assert "4000 characters" in str(reply)
    assert "640" in str(reply)
    assert len(at.cluster.encodes) == 1


async def test_more_ids_than_the_context_are_refused_before_they_are_read(at: House) -> None:
    status, reply, _ = await post(at, "/generate", {"input_ids": [2**31 - 1] * 1000})
    assert status == 400
    assert "1000 tokens" in str(reply)


async def _living(at: House, tokenizers: int) -> None:
    at.cluster.tokenizers[:] = [tokenizer(number) for number in range(tokenizers)]
    roles = len(at.cluster.roles) - 1
    await until(lambda: len(at.peers) == roles + tokenizers)
