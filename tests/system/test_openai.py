"""The OpenAI client, unmodified, against a whole stack: whole and streamed say the same."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import openai
import pytest
from openai import AsyncOpenAI
from tests.system.conftest import QUESTION, SCHEMA

if TYPE_CHECKING:
    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


async def chat(client: AsyncOpenAI, **said):
    """Ask whole and streamed; return the text, the reason and the usage, which agree."""
    asked = {"model": "default", "messages": QUESTION, "temperature": 0} | said
    whole = await client.chat.completions.create(**asked)
    text, reason, usage = "", None, None
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    only = whole.choices[0]
    assert (text, reason, usage) == (only.message.content, only.finish_reason, whole.usage)
    return only


async def complete(client: AsyncOpenAI, **said):
    """As `chat`, for text completions; returns the choices."""
    asked = {"model": "default", "temperature": 0, "max_tokens": 6} | said
    whole = await client.completions.create(**asked)
    texts = [""] * len(whole.choices)
    async for chunk in await client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    return whole.choices


async def test_stops_end_an_answer_as_they_say(client: AsyncOpenAI) -> None:
    plain = await chat(client)
    assert plain.message.content == "12 + 30 = 42."
    at_string = await chat(client, stop=["= 4"])
    assert (at_string.message.content, at_string.finish_reason) == ("12 + 30 ", "stop")
    at_pattern = await chat(client, extra_body={"stop_regex": r"=\s*\d"})
    assert at_pattern.message.content == "12 + 30 "
    assert at_pattern.model_extra["matched_stop"] == r"=\s*\d"
    kept = await chat(client, stop="= 4", extra_body={"no_stop_trim": True})
    assert kept.message.content == "12 + 30 = 4"


async def test_an_answer_has_the_form_that_was_asked_for(client: AsyncOpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    answer = await chat(client, response_format=schema, max_tokens=200)
    assert set(json.loads(answer.message.content)) == {"sum"}
    digits = await chat(client, extra_body={"regex": "[0-9]{3}"})
    assert re.fullmatch("[0-9]{3}", digits.message.content)
    rules = await chat(client, extra_body={"ebnf": 'root ::= "yes" | "no"'})
    assert rules.message.content in ("yes", "no")
    snow = [{"role": "user", "content": "What colour is snow?"}]
    thing = await chat(client, messages=snow, response_format={"type": "json_object"})
    assert "white" in json.loads(thing.message.content).values()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_form_with_a_mistake_is_a_bad_request(client: AsyncOpenAI, streamed: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            model="default", messages=QUESTION, extra_body={"regex": "("}, stream=streamed
        )
    assert refused.value.param == "regex"


async def test_a_final_message_is_continued(client: AsyncOpenAI) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "12 + 30 = 4"}]
    answer = await chat(client, messages=begun, extra_body={"continue_final_message": True})
    assert answer.message.content == "2."


async def test_an_answer_is_as_long_as_was_said(client: AsyncOpenAI) -> None:
    short = await chat(client, max_completion_tokens=3)
    assert short.finish_reason == "length"
    long = await chat(client, max_tokens=40, extra_body={"min_tokens": 40})
    assert long.finish_reason == "length"
    on = await chat(client, max_tokens=30, extra_body={"ignore_eos": True})
    assert on.finish_reason == "length"
    assert "<|" not in on.message.content
    special = await chat(
        client, max_tokens=30, extra_body={"ignore_eos": True, "skip_special_tokens": False}
    )
    assert "<|end|>" in special.message.content


async def test_the_same_seed_draws_the_same(client: AsyncOpenAI) -> None:
    asked = {"temperature": 4, "max_tokens": 12, "seed": 7}
    texts = {(await chat(client, **asked)).message.content for _ in range(2)}
    assert len(texts) == 1


async def test_prompts_of_every_kind_are_completed(client: AsyncOpenAI, stack: Stack) -> None:
    (alone,) = await complete(client, prompt="Once upon a time")
    choices = await complete(client, prompt=["Once upon a time", "The sky is"], n=2)
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    assert choices[0].text == choices[1].text == alone.text
    (echoed,) = await complete(client, prompt="Once upon a time", echo=True, logprobs=2)
    assert echoed.text == "Once upon a time" + alone.text
    logprobs = echoed.logprobs
    assert "".join(logprobs.tokens) == echoed.text
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    reported = await client.completions.create(
        model="default",
        prompt="Once upon a time",
        max_tokens=6,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    ids = (reported.choices[0].model_extra or {})["prompt_token_ids"]
    (by_ids,) = await complete(client, prompt=ids, echo=True)
    assert by_ids.text == echoed.text


async def test_the_best_of_several_is_at_least_as_likely_as_one(client: AsyncOpenAI) -> None:
    asked = {"model": "default", "prompt": "The", "temperature": 3, "max_tokens": 4, "seed": 3}

    def mean(choice) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    every = await client.completions.create(**asked, n=5, logprobs=0)
    best = await client.completions.create(**asked, n=2, best_of=5, logprobs=0)
    means = sorted(map(mean, every.choices), reverse=True)
    assert [mean(choice) for choice in best.choices] == pytest.approx(means[:2], abs=1e-3)


async def test_what_is_not_served_is_refused_with_a_reason(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="gap to fill") as refused:
        await client.completions.create(model="default", prompt="a", suffix="b")
    assert refused.value.param == "suffix"
    with pytest.raises(openai.BadRequestError, match="lora_path"):
        await client.chat.completions.create(
            model="default", messages=QUESTION, extra_body={"lora_path": "x"}
        )
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=QUESTION)
