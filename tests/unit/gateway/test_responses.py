"""/v1/responses: its fields, its items, and that its events carry the same as the whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from tests.unit.gateway.calls import RESPONSES, TEXT, Body, ok, openai_client, refusal, stream
from tests.unit.gateway.cluster import MODEL, SCRIPT, House, house

from antiphon.gateway.http.openai.responses.items import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    MessageItem,
    OutputItem,
    truncate_items,
)
from antiphon.gateway.http.openai.responses.write import ResponseEventBuilder
from antiphon.gateway.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from antiphon.wire.base import FinishReason
from antiphon.wire.errors import PromptTooLong, WorkerLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from hypothesis.strategies import SearchStrategy

THINKING = ("<think>", "so ", "it is", "</think>", "f", "ive")
INPUT: Body = {"input": "hi", "store": False}
NO_FUNCTION = {"type": "function", "name": "sub"}
NAMESPACE = {"type": "namespace", "name": "n"}
CALLING = (
    '<tool_call>\n{"name": "add", "arg',
    'uments": {"a": 2, "b": 3}}\n</tool_call>',
    "",
)
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
    "strict": False,
}
BAD_NAME = ADD | {"name": "a b"}
IMAGE = {"type": "input_image", "image_url": "data:"}
FILE = {"type": "input_image", "file_id": "file-1"}
SECRET = {"type": "reasoning", "summary": [], "encrypted_content": "x"}


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house(tool_call_parser="auto", reasoning_parser="auto") as world:
        yield world


async def create(at: House, **fields: object) -> Body:
    return await ok(at, RESPONSES, INPUT | fields)


async def refused(at: House, **fields: object) -> tuple[int, str | None]:
    return await refusal(at, RESPONSES, INPUT | fields)


async def events(at: House, **fields: object) -> list[Body]:
    """The events of a stream: each is named, and they are numbered without a gap."""
    read: list[Body] = []
    for event in await stream(at, RESPONSES, INPUT | fields):
        name, data = event.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    assert [event["sequence_number"] for event in read] == list(range(len(read)))
    return read


def nameless(response: Body) -> Body:
    """A response without random ids and times."""
    ids = {"id": None, "call_id": None}
    return response | {
        "id": None,
        "created_at": 0,
        "completed_at": 0,
        "output": [
            item | {name: ids[name] for name in ids if name in item} for item in response["output"]
        ],
    }


async def both(at: House, **fields: object) -> tuple[Body, list[Body]]:
    """A whole response, and its events, which end with the same."""
    whole = await create(at, **fields)
    read = await events(at, **fields)
    assert nameless(read[-1]["response"]) == nameless(whole)
    return whole, read


async def test_response_is_whole_or_a_stream_of_events(at: House) -> None:
    whole, read = await both(at)
    assert (whole["status"], whole["object"], whole["model"]) == ("completed", "response", MODEL)
    (item,) = whole["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    text = {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    assert item["content"] == [text]
    assert whole["usage"] == {
        "input_tokens": 2,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 6,
    }
    assert [event["type"].removeprefix("response.") for event in read] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 4,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event.get("delta", "") for event in read) == TEXT


async def test_openai_client_reads_both(at: House) -> None:
    async with openai_client(at) as client:
        whole = await client.responses.create(model=MODEL, input="hi", store=False)
        assert whole.output_text == TEXT
        async with client.responses.stream(model=MODEL, input="hi", store=False) as stream:
            deltas = [
                event.delta async for event in stream if event.type == "response.output_text.delta"
            ]
            final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == TEXT
    assert final.usage == whole.usage


async def test_reasoning_is_an_item_before_the_message(at: House) -> None:
    at.cluster.script = THINKING
    at.cluster.shown = (None, "qwen3")
    at.cluster.thought = 3
    whole, read = await both(at)
    reasoning, message = whole["output"]
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "so it is"}]
    assert message["type"] == "message"
    kinds = [event["type"] for event in read]
    assert "response.reasoning_text.delta" in kinds
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")


async def test_call_is_an_item_and_its_output_is_sent_back(at: House) -> None:
    at.cluster.script = CALLING
    at.cluster.shown = ("hermes", None)
    whole, read = await both(at, tools=[ADD])
    (call,) = whole["output"]
    assert (call["type"], call["name"]) == ("function_call", "add")
    assert json.loads(call["arguments"]) == {"a": 2, "b": 3}
    done = [event for event in read if event["type"] == "response.function_call_arguments.done"]
    assert [event["arguments"] for event in done] == [call["arguments"]]
    assert whole["tools"] == [ADD]
    at.cluster.script = SCRIPT
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    await create(at, input=[{"role": "user", "content": "2 + 3?"}, call, output], tools=[ADD])
    user, assistant, tool = at.cluster.turns
    assert [turn.role for turn in (user, assistant, tool)] == ["user", "assistant", "tool"]
    assert assistant.tool_calls[0].name == "add"
    assert (tool.content, tool.tool_call_id) == ("5", call["call_id"])


async def test_output_items_of_one_response_are_one_turn(at: House) -> None:
    thought = {"type": "reasoning", "summary": [], "content": [_part("reasoning_text", "hm")]}
    parts = [_part("output_text", "I"), _part("output_text", "ask")]
    message = {"role": "assistant", "content": parts}
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": [_part("input_text", "5")]}
    items = [thought, message, call, output, message, message]
    await create(at, instructions="Be short.", input=items)
    turns = at.cluster.turns
    assert [(turn.role, turn.content, len(turn.tool_calls)) for turn in turns] == [
        ("system", "Be short.", 0),
        ("assistant", "I ask", 1),
        ("tool", "5", 0),
        ("assistant", "I ask", 0),
        ("assistant", "I ask", 0),
    ]
    assert turns[1].reasoning_content == "hm"


def _part(kind: str, text: str) -> Body:
    return {"type": kind, "text": text}


async def test_sampling_fields_arrive_and_are_told(at: House) -> None:
    said: Body = {
        "temperature": 0.5,
        "top_p": 0.75,
        "max_output_tokens": 9,
        "top_k": 3,
        "min_p": 0.125,
        "seed": 7,
        "stop": ["x"],
        "metadata": {"a": "b"},
        "user": "me",
        "service_tier": "auto",
        "truncation": "disabled",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
    }
    whole, _ = await both(at, **said)
    submit = at.cluster.submits[-1]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.5, 0.75, 9)
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (3, 0.125, 7)
    assert submit.stop.strings == ("x",)
    names = ("temperature", "top_p", "max_output_tokens", "metadata", "user", "parallel_tool_calls")
    assert {name: whole[name] for name in names} == {name: said[name] for name in names}
    assert whole["reasoning"] == {"effort": "low", "summary": None}
    assert (await create(at))["temperature"] == 0.25, "what the model's card recommends"


async def test_text_has_the_form_of_the_request(at: House) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    whole = await create(at, text={"format": form})
    assert json.loads(at.cluster.grammar.text) == schema
    assert whole["text"]["format"] == form
    without = {"format": {"type": "json_schema", "name": "n"}}
    assert await refused(at, text=without) == (400, "text.format.schema")
    assert await refused(at, text={"format": form}, regex="a") == (400, "text.format")


async def test_logprobs_are_those_of_the_text(at: House) -> None:
    whole, read = await both(at, include=["message.output_text.logprobs"], top_logprobs=2)
    (item,) = whole["output"]
    (part,) = item["content"]
    logprobs = part["logprobs"]
    found = [(each["token"], len(each["top_logprobs"])) for each in logprobs]
    assert found == [(text, 2) for text in SCRIPT]
    pieces = [event for event in read if event["type"] == "response.output_text.delta"]
    assert [each for event in pieces for each in event["logprobs"]] == logprobs


async def test_output_that_is_too_long_is_incomplete(at: House) -> None:
    at.cluster.reason, at.cluster.matched = FinishReason.LENGTH, None
    whole, read = await both(at, max_output_tokens=4)
    (item,) = whole["output"]
    assert (whole["status"], item["status"]) == ("incomplete", "incomplete")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert read[-1]["type"] == "response.incomplete"


async def test_lost_worker_fails_the_stream_with_the_output_so_far(at: House) -> None:
    at.cluster.row_error = WorkerLost("the worker is gone")
    *_, done, failed = await events(at)
    assert (done["type"], failed["type"]) == ("response.output_item.done", "response.failed")
    response = failed["response"]
    assert response["error"] == {"code": "server_error", "message": "the worker is gone"}
    (item,) = response["output"]
    assert item["status"] == "incomplete"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "assistant", "content": [IMAGE]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [FILE]}]}, "input[0].content[0].file_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": ""}]}, "input"),
        ({"input": [SECRET]}, "input[0].encrypted_content"),
        ({"tools": [{"name": "add"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}, ADD, ADD]}, "tools[2].name"),
        ({"tools": [NAMESPACE | {"tools": [ADD, BAD_NAME]}]}, "tools[0].tools[1].name"),
        ({"tools": [BAD_NAME]}, "tools[0].name"),
        ({"tools": [ADD, ADD]}, "tools[1].name"),
        ({"tools": [ADD], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tools": [ADD], "tool_choice": NO_FUNCTION}, "tool_choice"),
        ({"include": ["everything"]}, "include[0]"),
        ({"truncation": "some"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100}, "max_output_tokens"),
        ({"input": "x" * 100}, "input"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"n": 2}, "n"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)  # fmt: skip
async def test_unsupported_field_is_refused_by_name(at: House, fields: Body, param: str) -> None:
    at.cluster.shown = ("hermes", None)
    assert await refused(at, **fields) == (400, param)


async def test_another_model_is_a_404(at: House) -> None:
    assert await refused(at, model="other") == (404, "model")


def answers() -> SearchStrategy[list[Event]]:
    """The events of a parser: calls come whole, one after another."""
    text = some.text(min_size=1, max_size=3)
    calls = some.tuples(some.lists(text, max_size=3), some.booleans())
    return some.lists(text.map(Content) | text.map(Reasoning) | calls, max_size=8).map(joined)


def joined(parts: list[Content | Reasoning | tuple[list[str], bool]]) -> list[Event]:
    events: list[Event] = []
    index = 0
    for part in parts:
        if not isinstance(part, tuple):
            events.append(part)
            continue
        pieces, complete = part
        events.append(CallBegin(index, f"call {index}", "f"))
        events += [CallArguments(index, piece) for piece in pieces]
        events.append(CallEnd(index, complete))
        index += 1
    return events


@given(answers())
def test_every_item_begins_grows_and_ends_as_its_deltas(parsed: list[Event]) -> None:
    builder = ResponseEventBuilder()
    built = [event for each in parsed for event in builder.add(each)]
    built += builder.end("completed")
    assert [event["sequence_number"] for event in built] == list(range(len(built)))
    follower = Follower()
    for event in built:
        follower.follow(event)
    assert follower.open is None
    assert [item.id for item in follower.done] == [item.id for item in builder.items]
    assert _texts(builder) == _expected(parsed)


class Follower:
    """A strict client: items come one at a time, and are what their deltas add up to."""

    def __init__(self) -> None:
        self.open: str | None = None
        self.part = False
        self.grown = ""
        self.closed: str | None = None
        self.done: list[OutputItem] = []

    def follow(self, event: dict[str, Any]) -> None:
        item: Any = event.get("item")
        match event["type"].removeprefix("response.").split("."):
            case ["output_item", "added"]:
                assert self.open is None
                assert event["output_index"] == len(self.done)
                self.open, self.grown, self.closed = item.id, "", None
                assert item.status == "in_progress"
            case ["content_part", "added"]:
                assert event["item_id"] == self.open
                assert not self.part
                self.part = True
            case ["output_text" | "reasoning_text" | "function_call_arguments" as kind, "delta"]:
                assert event["item_id"] == self.open
                assert self.closed is None
                assert self.part or kind == "function_call_arguments"
                self.grown += event["delta"]
            case ["output_text" | "reasoning_text", "done"]:
                assert event["text"] == self.grown
                self.closed = event["text"]
            case ["function_call_arguments", "done"]:
                assert event["arguments"] == self.grown
                self.closed = event["arguments"]
            case ["content_part", "done"]:
                assert event["part"].text == self.closed
                self.part = False
            case ["output_item", "done"]:
                assert item.id == self.open
                assert self.closed is not None
                assert not self.part
                self.open = None
                self.done.append(item)
            case _:
                raise AssertionError(event)


def _texts(builder: ResponseEventBuilder) -> list[tuple[str, str]]:
    texts: list[tuple[str, str]] = []
    for item in builder.items:
        if isinstance(item, CallItem | CustomCallItem):
            texts.append(("call", item.arguments if isinstance(item, CallItem) else item.input))
        else:
            assert item.content is not None
            assert not isinstance(item.content, str)
            text = "".join(getattr(part, "text", "") for part in item.content)
            texts.append((type(item).__name__, text))
    return texts


def _expected(parsed: list[Event]) -> list[tuple[str, str]]:
    """The items of parsed events: adjacent texts of one kind are one."""
    texts: list[tuple[str, str]] = []
    for event in parsed:
        match event:
            case Content() | Reasoning():
                kind = "MessageItem" if isinstance(event, Content) else "ReasoningItem"
                if texts and texts[-1][0] == kind:
                    texts[-1] = (kind, texts[-1][1] + event.text)
                else:
                    texts.append((kind, event.text))
            case CallBegin():
                texts.append(("call", ""))
            case CallArguments():
                texts[-1] = ("call", texts[-1][1] + event.text)
            case CallEnd():
                pass
    return texts


BY_TOKENS = PromptTooLong.of(prompt_tokens=2000, tokens_max=1000)
BY_CHARACTERS = PromptTooLong.of_characters(
    characters=8000, context_tokens=1000, token_characters=4
)
HI = MessageItem(role="user", content="hi")
CALL = CallItem(call_id="c", name="read", arguments="x" * 5000)
OUTPUT = CallOutputItem(call_id="c", output="y")


@pytest.mark.parametrize("error", [BY_TOKENS, BY_CHARACTERS], ids=["tokens", "characters"])
def test_truncation_leaves_out_the_oldest_items(error: PromptTooLong) -> None:
    items = [MessageItem(role="user", content=f"{n}" * 400) for n in range(8)]
    left = truncate_items(items, error)
    assert left is not None
    assert left == items[-len(left) :]
    assert 1 <= len(left) <= 4


def test_truncation_keeps_the_call_of_the_last_output() -> None:
    assert truncate_items([HI, CALL, OUTPUT], BY_TOKENS) == [CALL, OUTPUT]
    assert truncate_items([CALL, OUTPUT], BY_TOKENS) is None


def test_truncation_drops_an_output_with_its_call() -> None:
    assert truncate_items([CALL, OUTPUT, HI], BY_TOKENS) == [HI]
