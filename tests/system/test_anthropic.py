"""The Anthropic client, unmodified, against a whole stack: whole and streamed say the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import pydantic
import pytest
from anthropic import AsyncAnthropic
from tests.system.conftest import QUESTION, SCHEMA

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anthropic.types import Message
    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

ASKS_MAX = 5
TOOLS: list[Any] = [
    {
        "name": name,
        "description": "Adds.",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    }
    for name in ("add", "subtract")
]


class Judgement(pydantic.BaseModel):
    even: bool


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=stack.url, api_key="none", max_retries=0) as opened:
        yield opened


async def ask(client: AsyncAnthropic, **said: Any) -> Message:
    """Ask whole and streamed; return what both have said, cached tokens aside."""
    # The client has no arguments for how tokens are drawn; the API has.
    drawn = {"temperature": 0} | said.pop("extra_body", {})
    asked = {"model": "default", "max_tokens": 64, "messages": QUESTION} | said
    whole = await client.messages.create(**asked, extra_body=drawn)
    async with client.messages.stream(**asked, extra_body=drawn) as stream:
        streamed = await stream.get_final_message()
    assert reported(streamed) == reported(whole)
    return whole


def reported(message: Message) -> dict[str, Any]:
    """All but the ids, and with the tokens of the prompt together."""
    plain = message.model_dump(exclude_none=True, exclude={"id"})
    for block in plain["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    plain["usage"]["input_tokens"] += plain["usage"].pop("cache_read_input_tokens")
    return plain


def text_of(message: Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


async def test_a_text_is_the_same_whole_and_streamed(client: AsyncAnthropic, stack: Stack) -> None:
    message = await ask(client, metadata={"user_id": "me"}, service_tier="auto")
    assert text_of(message) == "12 + 30 = 42."
    assert (message.role, message.model, message.stop_reason) == (
        "assistant",
        stack.model,
        "end_turn",
    )
    assert message.id.startswith("msg_")
    assert message.usage.output_tokens > 8
    beta = await client.beta.messages.create(
        model="default", max_tokens=64, messages=QUESTION, betas=["files-api-2025-04-14"]
    )
    assert beta.stop_reason == "end_turn"


async def test_the_client_finds_the_model(client: AsyncAnthropic, stack: Stack) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [stack.model]
    assert await client.models.retrieve(stack.model) == models[0]
    assert models[0].max_input_tokens == 2048
    with pytest.raises(anthropic.NotFoundError, match="other"):
        await client.models.retrieve("other")


async def test_a_stream_has_its_events_in_order(client: AsyncAnthropic) -> None:
    deltas = 0
    for _ in range(ASKS_MAX):  # a short answer may all be there when it is first looked at
        stream = await client.messages.create(
            model="default",
            max_tokens=64,
            messages=QUESTION,
            stream=True,
            extra_body={"temperature": 0},
        )
        kinds = [event.type async for event in stream]
        assert_in_order(kinds)
        deltas = max(deltas, kinds.count("content_block_delta"))
        if deltas > 1:
            break
    assert deltas > 1


def assert_in_order(kinds: list[str]) -> None:
    assert list(dict.fromkeys(kinds)) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_a_conversation_is_held_with_what_was_answered(client: AsyncAnthropic) -> None:
    said: list[Any] = [{"role": "user", "content": "Hello, my name is Anna."}]
    greeting = await ask(client, messages=said, system="You are a small model.")
    said += [
        {"role": "assistant", "content": greeting.content},
        {"role": "user", "content": [{"type": "text", "text": "What is my name?"}]},
    ]
    assert text_of(await ask(client, messages=said)) == "Your name is Anna."
    begun = [*said, {"role": "assistant", "content": "Your name is"}]
    assert text_of(await ask(client, messages=begun)) == " Anna."


async def test_an_answer_ends_where_it_was_told_to(client: AsyncAnthropic) -> None:
    stopped = await ask(client, stop_sequences=["= 4", "nothing"])
    assert text_of(stopped) == "12 + 30 "
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "= 4")
    short = await ask(client, max_tokens=3)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    long = await ask(client, max_tokens=10_000)
    assert (text_of(long), long.stop_reason) == ("12 + 30 = 42.", "end_turn")


async def test_a_call_has_the_form_of_its_tool(client: AsyncAnthropic) -> None:
    for choice, names in (
        ({"type": "any", "disable_parallel_tool_use": True}, ("add", "subtract")),
        ({"type": "tool", "name": "subtract"}, ("subtract",)),
    ):
        message = await ask(client, tools=TOOLS, tool_choice=choice, max_tokens=400)
        assert message.stop_reason == "tool_use"
        (call,) = message.content
        assert call.type == "tool_use"
        assert call.name in names
        assert set(call.input) == {"a", "b"}
        assert isinstance(call.input["a"], bool)
        assert call.input["b"] in ("x", "y")
    none = await ask(client, tools=TOOLS, tool_choice={"type": "none"})
    assert text_of(none) == "12 + 30 = 42."


async def test_an_answer_keeps_to_a_schema(client: AsyncAnthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = json.loads(text_of(await ask(client, output_config=form, max_tokens=200)))
    assert set(answer) == {"sum"}
    assert 0 <= answer["sum"] <= 99
    parsed = await client.messages.parse(
        model="default", max_tokens=200, messages=QUESTION, output_format=Judgement
    )
    assert parsed.parsed_output is not None
    assert isinstance(parsed.parsed_output.even, bool)


async def test_thinking_is_a_block_before_the_text_and_ends_at_its_budget(thinker: Stack) -> None:
    async with AsyncAnthropic(base_url=thinker.url, api_key="none") as client:
        story = [{"role": "user", "content": "Tell me a story about a fox."}]
        asked: dict[str, Any] = {"messages": story, "max_tokens": 100}
        on = {"type": "enabled", "budget_tokens": 4}
        thought = await ask(client, **asked, thinking=on)
        thinking, text = thought.content
        assert thinking.type == "thinking"
        assert thinking.thinking == "I tell a story"
        assert thinking.signature
        assert text.type == "text"
        assert text.text.endswith("The end.")
        omitted = await ask(client, **asked, thinking=on | {"display": "omitted"})
        assert omitted.content[0].model_dump() == thinking.model_dump() | {"thinking": ""}
        for off in ("disabled", "adaptive"):
            told_of = text_of(await ask(client, **asked, thinking={"type": off}))
            assert told_of.startswith("Once upon a time there was a fox")
        further = [*story, {"role": "assistant", "content": thought.content}, *QUESTION]
        assert text_of(await ask(client, messages=further)) == "12 + 30 = 42."


async def test_the_count_is_what_an_answer_costs(client: AsyncAnthropic) -> None:
    asked: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "Repeat after me: " + "the calm river " * 20}],
        "system": "You are a small model.",
    }
    counted = await client.messages.count_tokens(**asked)
    first = (await client.messages.create(**asked, max_tokens=1)).usage
    again = (await client.messages.create(**asked, max_tokens=1)).usage
    for usage in (first, again):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert (again.cache_read_input_tokens or 0) > 0


async def test_what_is_wrong_is_told_as_the_client_knows_it(client: AsyncAnthropic) -> None:
    asked: dict[str, Any] = {"model": "default", "max_tokens": 8, "messages": QUESTION}
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
    long = [{"role": "user", "content": "one two three " * 2000}]
    search = {"type": "web_search_20250305", "name": "web_search"}
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"messages": [{"role": "user", "content": [image]}]}, "messages[0].content[0].source"),
        ({"messages": long}, "messages: The input"),
        ({"tools": [search]}, "tools[0].type: 'web_search_20250305'"),
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
    )
    for said, named in wrong:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**asked | said)
        assert refused.value.type == "invalid_request_error"
        assert str(refused.value.api_message).startswith(named)
    other: dict[str, Any] = asked | {"model": "other"}
    with pytest.raises(anthropic.NotFoundError, match="other"):
        await client.messages.create(**other)
    form: Any = {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format") as mistaken:
        async with client.messages.stream(**asked, output_config=form) as stream:
            await stream.until_done()
    assert mistaken.value.request_id
