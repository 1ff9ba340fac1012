"""How often tokenizers are asked: once, once more beside a slow one, and again after losses."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.gateway.cluster import House, house, tokenizer
from tests.unit.gateway.test_http import COMPLETE, post

from antiphon.testing.wait import until


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


async def test_a_call_is_made_again_when_the_tokenizer_that_took_it_came_back() -> None:
    async with house() as at:
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
        status, _, _ = await post(at, COMPLETE, {"prompt": "x"})
        assert status == 200
        assert len(at.cluster.encodes) == 4


async def _living(at: House, tokenizers: int) -> None:
    at.cluster.tokenizers[:] = [tokenizer(number) for number in range(tokenizers)]
    roles = len(at.cluster.roles) - 1
    await until(lambda: len(at.peers) == roles + tokenizers)
