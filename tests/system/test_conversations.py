"""Real clients hold conversations with the whole stack."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import nats
import pytest
from openai import AsyncOpenAI, BadRequestError
from tests.training.evaluate import held_out_cases, score
from tests.training.generation import ServedModel
from tests.training.grammar import SKILLS

from antiphon.client import Client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

AT_ONCE = 16
REQUESTS = 200
TURNS = (
    "Hello, my name is Anna.",
    "What is 12 + 30?",
    "What is my name?",
)


async def sixteen_at_a_time(hold: Callable[[int], Awaitable[list[str]]]) -> list[list[str]]:
    """Hold conversations, at most sixteen at once, until `REQUESTS` requests were made."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(n: int) -> list[str]:
        async with slots:
            return await hold(n)

    return await asyncio.gather(*(one(n) for n in range(-(-REQUESTS // len(TURNS)))))


def assert_answered(answers: list[list[str]]) -> None:
    assert all(said == answers[0] for said in answers)
    assert "42" in answers[0][1]
    assert "Anna" in answers[0][2]


async def test_the_openai_client_holds_streamed_conversations(client: AsyncOpenAI):
    async def hold(_: int) -> list[str]:
        messages, said = [], []
        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            text, usage = "", None
            async for chunk in await client.chat.completions.create(
                model="default",
                messages=messages,
                stream=True,
                temperature=0,
                stream_options={"include_usage": True},
            ):
                usage = chunk.usage or usage
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            assert text
            assert usage is not None
            assert usage.completion_tokens > 0
            messages.append({"role": "assistant", "content": text})
            said.append(text)
        return said

    assert_answered(await sixteen_at_a_time(hold))


async def test_a_nats_client_holds_streamed_conversations(stack: Stack):
    async with Client(stack.nats_url) as client:

        async def hold(_: int) -> list[str]:
            turns: list[tuple[str, str]] = []
            said: list[str] = []
            for turn in TURNS:
                turns.append(("user", turn))
                pieces = client.generate(stack.model, turns, temperature=0.0, timeout_s=60)
                said.append("".join([piece.text async for piece in pieces]))
                turns.append(("assistant", said[-1]))
            return said

        assert_answered(await sixteen_at_a_time(hold))


async def test_a_plain_nats_client_speaks_json_and_needs_nothing_of_ours(stack: Stack):
    """Subscribe to an inbox, publish JSON with it as the reply, read until the terminal."""
    connection = await nats.connect(stack.nats_url)

    async def ask(turns: list[dict[str, str]]) -> str:
        key = uuid4().hex
        inbox = f"antiphon.v1.client.default.{key}"
        subscription = await connection.subscribe(inbox)
        body = {"type": "GenerateRequest", "key": key, "model": stack.model, "temperature": 0}
        subject = f"antiphon.v1.generate.{stack.model}"
        await connection.publish(subject, json.dumps(body | {"messages": turns}).encode(), inbox)
        text, end = b"", None
        while end is None:
            received = json.loads((await subscription.next_msg(timeout=60)).data)
            assert received["type"] != "ErrorReply", received
            if received["type"] == "GenerateText":
                assert received["text_offset"] == len(text)
                text += received["text"].encode()
            elif received["type"] == "GenerateEnd":
                end = received
        await subscription.unsubscribe()
        assert "error" not in end, end
        assert end["choices"][0]["text_bytes"] == len(text)
        return text.decode()

    async def hold(_: int) -> list[str]:
        turns: list[dict[str, str]] = []
        for turn in TURNS:
            turns.append({"role": "user", "content": turn})
            turns.append({"role": "assistant", "content": await ask(turns)})
        return [turn["content"] for turn in turns if turn["role"] == "assistant"]

    assert_answered(await sixteen_at_a_time(hold))
    await connection.close()


async def test_greedy_text_is_the_same_by_every_door_streamed_or_not(
    stack: Stack, client: AsyncOpenAI
):
    question = "Count from 3 to 9."
    over_http: Any = {
        "model": stack.model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
    }
    whole = await client.chat.completions.create(**over_http)
    stream = await client.chat.completions.create(**over_http, stream=True)
    streamed = "".join([c.choices[0].delta.content or "" async for c in stream])
    async with Client(stack.nats_url) as nats_client:
        asked = await nats_client.complete(stack.model, question, temperature=0.0)
        pieces = nats_client.generate(stack.model, question, temperature=0.0)
        received = "".join([piece.text async for piece in pieces])
    assert whole.choices[0].message.content == streamed == asked.text == received
    assert whole.usage is not None
    assert whole.usage.completion_tokens == asked.usage.completion_tokens


async def test_a_seed_draws_the_same_text_again(stack: Stack):
    async with Client(stack.nats_url) as client:
        hot: Any = {"temperature": 20.0, "max_tokens": 20, "ignore_eos": True}
        drawn = [
            await client.complete(stack.model, "Hello", seed=seed, **hot)
            for seed in (1, 1, 2, 3, 4)
        ]
    texts = [answer.text for answer in drawn]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_the_served_model_adds_what_it_never_saw_added(stack: Stack):
    sums = next(skill for skill in SKILLS if skill.name == "sums")
    cases = held_out_cases(sums, seed=1, count=60)
    result = score(sums, cases, ServedModel(stack.nats_url, stack.model))
    assert result.share >= 0.9, result.misses


async def test_a_prompt_over_the_context_says_both_numbers(client: AsyncOpenAI):
    with pytest.raises(BadRequestError, match=r"\d+ tokens.*2048"):
        await client.completions.create(model="default", prompt="1 " * 4000)
