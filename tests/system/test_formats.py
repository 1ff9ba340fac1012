"""The embedded model's calls, thoughts and objects, as the clients of each API get them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from anthropic import AsyncAnthropic
from ollama import AsyncClient as AsyncOllama

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

CLOCK: dict[str, Any] = {
    "name": "now",
    "description": "Tell the time.",
    "parameters": {"type": "object", "properties": {}},
}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Tell the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
TOOLS: Any = [{"type": "function", "function": each} for each in (CLOCK, WEATHER)]
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


async def test_a_tool_is_called_and_what_it_answers_is_read(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "default", "temperature": 0, "tools": TOOLS}
    first: Any = await client.chat.completions.create(messages=ASKED, **asked)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    said: Any = message.model_dump(exclude_none=True)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    second: Any = await client.chat.completions.create(messages=[*ASKED, said, result], **asked)
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content
    assert not second.choices[0].message.tool_calls


async def test_a_call_that_is_streamed_is_the_same(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="default", temperature=0, tools=TOOLS, messages=ASKED, stream=True
    )
    names, arguments, text = "", "", ""
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                names += call.function.name or ""
                arguments += call.function.arguments or ""
    assert (names, json.loads(arguments), text) == ("get_weather", {"city": "Paris"}, "")


async def test_thoughts_come_apart_from_the_answer(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="default",
        temperature=0,
        messages=[{"role": "user", "content": "What is 12 + 26 + 31?"}],
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    message: Any = answer.choices[0].message
    assert message.reasoning_content == "12 + 26 = 38. 38 + 31 = 69."
    assert message.content == "12 + 26 + 31 = 69."


async def test_anthropic_gets_the_call_as_a_block(stack: Stack) -> None:
    async with AsyncAnthropic(base_url=stack.url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "default", "messages": ASKED, "max_tokens": 100}
        tools: Any = [{"name": WEATHER["name"], "input_schema": WEATHER["parameters"]}]
        answer = await client.messages.create(**asked, tools=tools, extra_body={"temperature": 0})
    (block,) = answer.content
    assert block.type == "tool_use"
    assert (block.name, block.input) == ("get_weather", {"city": "Paris"})
    assert answer.stop_reason == "tool_use"


async def test_ollama_gets_the_call_and_the_thoughts(stack: Stack) -> None:
    options = {"temperature": 0}
    question = [{"role": "user", "content": "What is 12 + 26 + 31?"}]
    async with AsyncOllama(stack.url) as client:
        called = await client.chat("default", ASKED, tools=TOOLS, options=options)
        thought = await client.chat("default", question, think=True, options=options)
    assert called.message.tool_calls is not None
    (call,) = called.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    assert thought.message.thinking == "12 + 26 = 38. 38 + 31 = 69."
    assert thought.message.content == "12 + 26 + 31 = 69."


async def test_regex_holds_the_whole_answer_when_thinking_is_not_switched(
    client: AsyncOpenAI,
) -> None:
    asked: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "Is 5 more than 3?"}],
        "temperature": 1.0,
    }
    pattern: Any = {"extra_body": {"regex": "(yes|no)"}}
    for seed in range(4):
        whole = await client.chat.completions.create(**asked, **pattern, seed=seed)
        assert whole.choices[0].message.content in ("yes", "no")
        chunks = await client.chat.completions.create(**asked, **pattern, seed=seed, stream=True)
        pieces = [each.choices[0].delta.content or "" async for each in chunks]
        assert "".join(pieces) == whole.choices[0].message.content
    response = await client.responses.create(
        model="default",
        input="Is 5 more than 3?",
        extra_body={"regex": "(yes|no)", "store": False},
    )
    assert response.output_text in ("yes", "no")


async def test_role_developer_is_a_system_message(client: AsyncOpenAI) -> None:
    question: Any = {"role": "user", "content": "What is 12 + 30?"}
    answers: list[str | None] = []
    for role in ("developer", "system"):
        messages: list[Any] = [{"role": role, "content": "Be brief."}, question]
        chat = await client.chat.completions.create(
            model="default", messages=messages, temperature=0
        )
        items: Any = [{"type": "message", **each} for each in messages]
        response = await client.responses.create(
            model="default", input=items, temperature=0, store=False
        )
        answers += [chat.choices[0].message.content, response.output_text]
    assert len(set(answers)) == 1
