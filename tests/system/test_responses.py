"""/v1/responses with the OpenAI client, unmodified, against a whole stack with two gateways."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai import AsyncOpenAI
from tests.system.conftest import SCHEMA
from tests.system.stack import Stack, second_gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from openai.types.responses import Response

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

QUESTION = "What is 12 + 30?"
ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}
LONG: Any = {"max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def other_url(stack: Stack) -> Iterator[str]:
    """A second gateway of the same cluster."""
    with second_gateway(stack) as url:
        yield url


@pytest.fixture
async def other(other_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{other_url}/v1", api_key="none", max_retries=0) as second:
        yield second


async def respond(client: AsyncOpenAI, **said: Any) -> Response:
    """Ask whole, and streamed; return the whole, which the events have shown, too."""
    asked: Any = {"model": "default", "input": QUESTION, "temperature": 0} | said
    whole = await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        events = [event async for event in stream]
        reported = await stream.get_final_response() if whole.status == "completed" else None
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(numbers)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    last = reported or events[-1].response  # pyright: ignore[reportAttributeAccessIssue]
    assert [plain(item) for item in last.output] == [plain(item) for item in whole.output]
    assert last.usage.output_tokens == whole.usage.output_tokens  # pyright: ignore
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    return whole


def plain(item: Any) -> dict[str, Any]:
    """An item without its ids, and what the client's helpers add."""
    drawn = {"id", "call_id", "parsed", "parsed_arguments"}
    reported = {name: value for name, value in item.model_dump().items() if name not in drawn}
    if isinstance(reported.get("content"), list):
        reported["content"] = [
            {name: value for name, value in part.items() if name != "parsed"}
            for part in reported["content"]
        ]
    return reported


async def test_an_answer_is_told_whole_and_by_events(client: AsyncOpenAI) -> None:
    whole = await respond(client)
    assert whole.output_text == "12 + 30 = 42."
    assert (whole.status, whole.error, whole.incomplete_details) == ("completed", None, None)
    assert [item.type for item in whole.output] == ["message"]
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens


async def test_instructions_and_limits_are_those_of_the_chat(client: AsyncOpenAI) -> None:
    said = await client.chat.completions.create(
        model="default",
        temperature=0,
        max_tokens=8,
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": QUESTION},
        ],
    )
    whole = await respond(client, instructions="You are a helpful assistant.", max_output_tokens=8)
    assert whole.output_text == said.choices[0].message.content
    cut = await respond(client, max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].status == "incomplete"  # pyright: ignore[reportAttributeAccessIssue]


async def test_an_answer_has_the_form_that_was_asked_for(client: AsyncOpenAI) -> None:
    form = {"type": "json_schema", "name": "sum", "schema": SCHEMA, "strict": True}
    whole = await respond(client, text={"format": form}, max_output_tokens=200)
    assert set(json.loads(whole.output_text)) == {"sum"}
    digits = await respond(client, extra_body={"regex": "[0-9]{3}"})
    assert re.fullmatch("[0-9]{3}", digits.output_text)


async def test_log_probabilities_are_those_of_the_chat(client: AsyncOpenAI) -> None:
    said = await client.chat.completions.create(
        model="default",
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        messages=[{"role": "user", "content": QUESTION}],
    )
    whole = await respond(client, include=["message.output_text.logprobs"], top_logprobs=2)
    (item,) = whole.output
    reported = item.content[0].logprobs  # pyright: ignore
    assert reported
    assert said.choices[0].logprobs is not None
    chat = said.choices[0].logprobs.content
    assert [each.token for each in reported] == [each.token for each in chat or []]
    assert [len(each.top_logprobs) for each in reported] == [2] * len(reported)


async def test_a_call_is_an_item_of_the_conversation(client: AsyncOpenAI) -> None:
    choice = {"type": "function", "name": "add"}
    asked = await respond(client, tools=[ADD], tool_choice=choice, max_output_tokens=300)
    (call,) = asked.output
    assert call.type == "function_call"
    assert call.name == "add"
    assert set(json.loads(call.arguments)) == {"a", "b"}
    answer = await client.responses.create(
        model="default", input=QUESTION, previous_response_id=asked.id, max_output_tokens=10
    )
    assert answer.previous_response_id == asked.id
    listed = await client.responses.input_items.list(answer.id, order="asc")
    assert [item.type for item in listed.data] == ["message", "function_call", "message"]


async def test_a_conversation_is_found_and_continued_at_another_gateway(
    client: AsyncOpenAI, other: AsyncOpenAI
) -> None:
    first = await client.responses.create(model="default", input=QUESTION, temperature=0)
    assert await other.responses.retrieve(first.id) == first
    second = await other.responses.create(
        model="default", input="What is 1 + 2?", previous_response_id=first.id, temperature=0
    )
    by_hand = await client.responses.create(
        model="default",
        temperature=0,
        store=False,
        input=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "What is 1 + 2?"},
        ],
    )
    assert second.output_text == by_hand.output_text
    assert second.usage is not None
    assert by_hand.usage is not None
    assert second.usage.input_tokens == by_hand.usage.input_tokens
    await client.responses.delete(second.id)
    for url in (client, other):
        with pytest.raises(openai.NotFoundError):
            await url.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(
            model="default", input="and then?", previous_response_id=by_hand.id
        )
    assert refused.value.param == "previous_response_id"


async def finished(client: AsyncOpenAI, response_id: str) -> Response:
    """Look until it has ended, as the API's guide does."""
    async with asyncio.timeout(60):
        while True:
            response = await client.responses.retrieve(response_id)
            if response.status not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.05)


async def test_what_is_made_in_the_background_is_found_at_another_gateway(
    client: AsyncOpenAI, other: AsyncOpenAI
) -> None:
    made = await client.responses.create(
        model="default", input=QUESTION, temperature=0, background=True
    )
    assert made.status in ("queued", "in_progress")
    response = await finished(other, made.id)
    assert (response.status, response.output_text) == ("completed", "12 + 30 = 42.")


async def test_what_is_made_in_the_background_is_cancelled_at_another_gateway(
    client: AsyncOpenAI, other: AsyncOpenAI
) -> None:
    made = await client.responses.create(model="default", input=QUESTION, background=True, **LONG)
    cancelled = await other.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert (await client.responses.retrieve(made.id)).status == "cancelled"
    reported = await client.responses.create(model="default", input=QUESTION)
    with pytest.raises(openai.BadRequestError):
        await other.responses.cancel(reported.id)


async def test_a_background_stream_is_left_and_taken_up_at_another_gateway(
    client: AsyncOpenAI, other: AsyncOpenAI
) -> None:
    stream = await client.responses.create(
        model="default", input=QUESTION, temperature=0, background=True, stream=True
    )
    received = []
    async for event in stream:
        received.append(event)
        if event.type == "response.in_progress":
            break
    await stream.close()
    first: Any = received[0]
    rest = await other.responses.retrieve(
        first.response.id, stream=True, starting_after=received[-1].sequence_number
    )
    received += [event async for event in rest]
    assert [event.sequence_number for event in received] == list(range(len(received)))
    deltas = "".join(
        event.delta for event in received if event.type == "response.output_text.delta"
    )
    assert deltas == "12 + 30 = 42."
    assert received[-1].type == "response.completed"


async def test_what_is_wrong_is_a_clear_error(client: AsyncOpenAI) -> None:
    async def refused(**said: Any) -> openai.APIStatusError:
        asked: Any = {"model": "default", "input": QUESTION} | said
        with pytest.raises(openai.APIStatusError) as caught:
            await client.responses.create(**asked)
        return caught.value

    nameless = await refused(tools=[{"type": "function"}])
    assert isinstance(nameless, openai.BadRequestError)
    assert nameless.param == "tools[0].name"
    too_long = await refused(input="word " * 20_000, stream=True)
    assert (too_long.status_code, too_long.param) == (400, "input")
    assert (await refused(model="other")).status_code == 404
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_none")
