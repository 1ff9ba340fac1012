"""Ollama's client, unmodified, against a whole stack: it receives what OpenAI's client receives."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ollama
import pytest
from ollama import AsyncClient
from openai import AsyncOpenAI
from tests.system.conftest import QUESTION, SCHEMA

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

GREEDY = {"temperature": 0}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = {"name": "look", "parameters": {"at": "Rome"}}


@pytest.fixture
async def asker(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.url) as opened:
        yield opened


async def chat(asker: AsyncClient, **said: Any) -> ollama.ChatResponse:
    """Ask whole and streamed; return the whole answer, with which the streamed one agrees."""
    asked: dict[str, Any] = {"model": "default", "messages": QUESTION, "options": GREEDY} | said
    whole = await asker.chat(**asked)
    pieces = [piece async for piece in await asker.chat(**asked, stream=True)]
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    thought = "".join(piece.message.thinking or "" for piece in pieces)
    assert thought == (whole.message.thinking or "")
    calls = [call for piece in pieces for call in piece.message.tool_calls or ()]
    assert calls == list(whole.message.tool_calls or ())
    assert [each for piece in pieces for each in piece.logprobs or ()] == list(whole.logprobs or ())
    _agree(whole, pieces)
    return whole


async def generate(asker: AsyncClient, **said: Any) -> ollama.GenerateResponse:
    """As `chat`, for a prompt."""
    asked: dict[str, Any] = {"model": "default", "options": GREEDY} | said
    whole = await asker.generate(**asked)
    pieces = [piece async for piece in await asker.generate(**asked, stream=True)]
    assert "".join(piece.response or "" for piece in pieces) == whole.response
    _agree(whole, pieces)
    return whole


def _agree(whole: Any, pieces: list[Any]) -> None:
    *before, last = pieces
    assert not any(piece.done for piece in before)
    for one in (whole, last):
        assert one.done
        assert one.load_duration == 0
        assert one.prompt_eval_duration + one.eval_duration <= one.total_duration
    assert last.done_reason == whole.done_reason
    assert (last.prompt_eval_count, last.eval_count) == (whole.prompt_eval_count, whole.eval_count)


async def test_both_clients_hear_the_same_chat(asker: AsyncClient, client: AsyncOpenAI) -> None:
    for turns in (QUESTION, [*QUESTION, {"role": "assistant", "content": "12 + 30 = 4"}]):
        received = await chat(asker, messages=turns, logprobs=True, top_logprobs=2)
        reported = await client.chat.completions.create(
            model="default",
            messages=turns,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
            extra_body={"continue_final_message": turns is not QUESTION},
        )
        (choice,) = reported.choices
        assert received.message.content == choice.message.content
        assert received.done_reason == choice.finish_reason == "stop"
        assert reported.usage is not None
        assert received.prompt_eval_count == reported.usage.prompt_tokens
        assert received.eval_count == reported.usage.completion_tokens
        assert choice.logprobs is not None
        assert [(each.token, each.logprob) for each in received.logprobs or ()] == [
            (each.token, each.logprob) for each in choice.logprobs.content or ()
        ]
    assert received.message.content == "2."


async def test_a_prompt_is_a_chat_or_the_whole_text(
    asker: AsyncClient, client: AsyncOpenAI
) -> None:
    asked = await generate(asker, prompt="What is 12 + 30?")
    assert asked.response == "12 + 30 = 42."
    raw = await generate(
        asker, prompt="Once upon a time", raw=True, options=GREEDY | {"num_predict": 6}
    )
    reported = await client.completions.create(
        model="default", prompt="Once upon a time", temperature=0, max_tokens=6
    )
    assert raw.response == reported.choices[0].text
    assert raw.done_reason == "length"
    assert raw.eval_count == 6


async def test_options_mean_what_they_say(asker: AsyncClient) -> None:
    stopped = await chat(asker, options=GREEDY | {"stop": ["= 4"]})
    assert (stopped.message.content, stopped.done_reason) == ("12 + 30 ", "stop")
    short = await chat(asker, options=GREEDY | {"num_predict": 3})
    assert (short.done_reason, short.eval_count) == ("length", 3)
    typed = ollama.Options(temperature=4, seed=7, num_predict=12, num_ctx=512, top_k=50)
    drawn = {(await chat(asker, options=typed)).message.content for _ in range(2)}
    assert len(drawn) == 1


async def test_an_answer_has_the_form_that_was_asked_for(
    asker: AsyncClient, client: AsyncOpenAI
) -> None:
    received = await chat(asker, format=SCHEMA, options=GREEDY | {"num_predict": 200})
    assert set(json.loads(received.message.content or "")) == {"sum"}
    reported = await client.chat.completions.create(
        model="default",
        messages=QUESTION,
        temperature=0,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}},
    )
    assert received.message.content == reported.choices[0].message.content
    thing = await generate(
        asker, prompt="What colour is snow?", format="json", options=GREEDY | {"num_predict": 50}
    )
    assert "white" in json.loads(thing.response or "").values()


async def test_calls_are_heard_whole_and_answered(json_stack: Stack) -> None:
    async with AsyncClient(json_stack.url) as asker:
        # The model cannot call by itself: the form of its answer is the form of a call.
        called = await chat(asker, tools=[LOOK], format={"const": CALL}, think=False)
        calls = called.message.tool_calls
        assert calls is not None
        (call,) = calls
        assert (call.function.name, call.function.arguments) == ("look", {"at": "Rome"})
        assert not called.message.content
        turns = [*QUESTION, called.message, {"role": "tool", "tool_name": "look", "content": "42"}]
        answer = await chat(asker, messages=turns, tools=[LOOK])
        assert (answer.prompt_eval_count or 0) > (called.prompt_eval_count or 0)
        assert (await asker.show("default")).capabilities == ["completion", "tools", "thinking"]


async def test_a_model_thinks_if_it_is_told_to(json_stack: Stack) -> None:
    options = GREEDY | {"num_predict": 20}
    async with (
        AsyncClient(json_stack.url) as asker,
        AsyncOpenAI(base_url=f"{json_stack.url}/v1", api_key="none") as client,
    ):
        silent = await chat(asker, think=False)
        assert (silent.message.content, silent.message.thinking) == ("12 + 30 = 42.", None)
        for level in (True, "high"):
            thought = await chat(asker, think=level, options=options)
            reported = await client.chat.completions.create(
                model="default",
                messages=QUESTION,
                temperature=0,
                max_tokens=20,
                extra_body={"chat_template_kwargs": {"enable_thinking": True}},
            )
            assert thought.message.thinking
            said = reported.choices[0].message.model_dump()["reasoning_content"]
            assert thought.message.thinking == said
            prompted = await generate(
                asker, prompt="What is 12 + 30?", think=level, options=options
            )
            assert prompted.thinking == said


async def test_what_is_there_is_listed_and_shown(asker: AsyncClient, stack: Stack) -> None:
    (listed,) = (await asker.list()).models
    (running,) = (await asker.ps()).models
    name = f"{stack.model}:latest"
    assert listed.model == running.model == name
    assert running.context_length == 2048
    shown = await asker.show(name)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    info = shown.modelinfo or {}
    assert info[f"{info['general.architecture']}.context_length"] == 2048
    assert info["general.parameter_count"] > 0
    assert "temperature" in (shown.parameters or "")
    received = await chat(asker, model=name)
    assert received.model == name
    ready = await asker.generate(name)
    assert ready.done_reason == "load"


@pytest.mark.parametrize(
    ("said", "status", "text"),
    [
        ({"model": "other"}, 404, "other"),
        ({"options": {"mirostat": 1}}, 400, "options.mirostat"),
        ({"options": {"top_p": 2}}, 400, "options.top_p"),
        ({"format": {"type": "nothing"}}, 400, "format"),
        ({"messages": [{"role": "user", "content": "One. " * 3000}]}, 400, "context length"),
    ],
)
async def test_what_cannot_be_is_refused_before_the_first_word(
    asker: AsyncClient, said: dict[str, Any], status: int, text: str
) -> None:
    asked: dict[str, Any] = {"model": "default", "messages": QUESTION} | said
    with pytest.raises(ollama.ResponseError, match=text) as whole:
        await asker.chat(**asked)
    assert whole.value.status_code == status
    pieces = await asker.chat(**asked, stream=True)
    with pytest.raises(ollama.ResponseError, match=text) as streamed:
        await anext(pieces)
    assert streamed.value.status_code == status


async def test_what_is_not_done_is_refused_with_a_reason(asker: AsyncClient) -> None:
    with pytest.raises(ollama.ResponseError, match="--model-path"):
        await asker.pull("llama3.2")
    (listed,) = (await asker.list()).models
    assert listed.model is not None
    assert (await asker.pull(listed.model)).status == "success"
    assert listed.size
    with pytest.raises(ollama.ResponseError, match="does not embed"):
        await asker.embed("default", "hello")
    with pytest.raises(ollama.ResponseError, match="keep_alive"):
        await asker.generate("default", keep_alive=0)
