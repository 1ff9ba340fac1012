"""/v1/responses: what is read, what is told, and that the events tell the same as the whole."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some
from tests.unit.gateway.calls import RESPONSES, TEXT, Body, ok, openai_client, post
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
IMAGE = {"type": "input_image", "image_url": "data:"}
SECRET = {"type": "reasoning", "summary": [], "encrypted_content": "x"}


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house(tool_call_parser="auto", reasoning_parser="auto") as world:
        yield world


async def create(at: House, **said: object) -> Body:
    return await ok(at, RESPONSES, {"input": "hi", "store": False} | said)


async def refusal(at: House, **said: object) -> tuple[int, object, str]:
    status, reply, _ = await post(at, RESPONSES, {"input": "hi", "store": False} | said)
    error = reply["error"]
    return status, error["param"], error["message"]


async def events(at: House, **said: object) -> list[Body]:
    """The events of a stream: each is named, and they are numbered without a gap."""
    body = {"input": "hi", "store": False, "stream": True} | said
    async with (
        aiohttp.ClientSession() as session,
        session.post(at.url + RESPONSES, json=body) as reply,
    ):
        assert reply.status == 200, await reply.text()
        blocks = (await reply.text()).split("\n\n")
    told: list[Body] = []
    for block in filter(None, blocks):
        name, data = block.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


def nameless(response: Body) -> Body:
    """A response without what is drawn or read from the clock."""
    ids = iter(f"id {n}" for n in itertools.count())
    items = response["output"]
    return response | {
        "id": None,
        "created_at": 0,
        "completed_at": 0,
        "output": [item | {"id": next(ids)} | _call_id(item) for item in items],
    }


def _call_id(item: Body) -> Body:
    return {"call_id": None} if item["type"] == "function_call" else {}


async def both(at: House, **said: object) -> tuple[Body, list[Body]]:
    """A response whole, and its events, which end with the same."""
    whole = await create(at, **said)
    told = await events(at, **said)
    assert nameless(told[-1]["response"]) == nameless(whole)
    return whole, told


async def test_a_response_is_told_whole_and_by_events(at: House) -> None:
    whole, told = await both(at)
    assert (whole["status"], whole["object"], whole["model"]) == ("completed", "response", MODEL)
    (item,) = whole["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    ]
    assert whole["usage"] == {
        "input_tokens": 2,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 6,
    }
    assert [event["type"] for event in told] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.get("delta", "") for event in told) == TEXT


async def test_openai_s_client_reads_both() -> None:
    async with house() as at, openai_client(at) as client:
        whole = await client.responses.create(model=MODEL, input="hi", store=False)
        assert whole.output_text == TEXT
        async with client.responses.stream(model=MODEL, input="hi", store=False) as stream:
            deltas = [
                event.delta async for event in stream if event.type == "response.output_text.delta"
            ]
            final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == TEXT
    assert final.usage == whole.usage


async def test_thinking_is_an_item_before_the_answer(at: House) -> None:
    at.cluster.script = THINKING
    at.cluster.shown = (None, "qwen3")
    at.cluster.thought = 3
    whole, told = await both(at)
    thought, message = whole["output"]
    assert thought["type"] == "reasoning"
    usage = whole["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 3}
    assert thought["content"] == [{"type": "reasoning_text", "text": "so it is"}]
    assert thought["summary"] == []
    assert message["type"] == "message"
    kinds = [event["type"] for event in told]
    assert "response.reasoning_text.delta" in kinds
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")


async def test_a_call_is_an_item_and_its_output_goes_back(at: House) -> None:
    at.cluster.script = CALLING
    at.cluster.shown = ("hermes", None)
    whole, told = await both(at, tools=[ADD])
    (call,) = whole["output"]
    assert (call["type"], call["name"]) == ("function_call", "add")
    assert json.loads(call["arguments"]) == {"a": 2, "b": 3}
    done = [event for event in told if event["type"] == "response.function_call_arguments.done"]
    assert [event["arguments"] for event in done] == [call["arguments"]]
    assert whole["tools"] == [ADD]
    at.cluster.script = SCRIPT
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    question = {"role": "user", "content": "2 + 3?"}
    await create(at, input=[question, call, output], tools=[ADD])
    messages = at.cluster.turns
    assert [message.role for message in messages] == ["user", "assistant", "tool"]
    assert messages[1].tool_calls[0].name == "add"
    assert (messages[2].content, messages[2].tool_call_id) == ("5", call["call_id"])


async def test_what_the_model_says_in_one_go_is_one_turn(at: House) -> None:
    thought = {"type": "reasoning", "summary": [], "content": [_part("reasoning_text", "hm")]}
    parts = [_part("output_text", "I"), _part("output_text", "ask")]
    said = {"role": "assistant", "content": parts}
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": [_part("input_text", "5")]}
    await create(at, instructions="Be short.", input=[thought, said, call, output, said, said])
    messages = at.cluster.turns
    assert [(m.role, m.content, len(m.tool_calls)) for m in messages] == [
        ("system", "Be short.", 0),
        ("assistant", "I ask", 1),
        ("tool", "5", 0),
        ("assistant", "I ask", 0),
        ("assistant", "I ask", 0),
    ]
    assert messages[1].reasoning_content == "hm"


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
    told = ("temperature", "top_p", "max_output_tokens", "metadata", "user", "parallel_tool_calls")
    assert {name: whole[name] for name in told} == {name: said[name] for name in told}
    assert whole["reasoning"] == {"effort": "low", "summary": None}
    assert (await create(at))["temperature"] == 0.25, "what the model's card recommends"


async def test_the_text_has_the_form_that_was_asked_for(at: House) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    whole = await create(at, text={"format": form})
    grammar = at.cluster.grammar
    assert json.loads(grammar.text) == schema
    assert whole["text"]["format"] == form
    status, param, _ = await refusal(at, text={"format": {"type": "json_schema", "name": "n"}})
    assert (status, param) == (400, "text.format.schema")
    status, param, _ = await refusal(at, text={"format": form}, regex="a")
    assert (status, param) == (400, "text.format")


async def test_logprobs_are_those_of_the_text(at: House) -> None:
    whole, told = await both(at, include=["message.output_text.logprobs"], top_logprobs=2)
    (item,) = whole["output"]
    (part,) = item["content"]
    logprobs = part["logprobs"]
    assert [each["token"] for each in logprobs] == list(SCRIPT)
    assert [len(each["top_logprobs"]) for each in logprobs] == [2] * 4
    pieces = [event for event in told if event["type"] == "response.output_text.delta"]
    assert [each for event in pieces for each in event["logprobs"]] == logprobs


async def test_an_answer_that_is_too_long_is_incomplete(at: House) -> None:
    says = at.cluster.row

    def cut(request: object, step: int, choice: int = 0) -> object:
        row = says(request, step, choice)  # pyright: ignore[reportArgumentType]
        if row.finish_reason is None:
            return row
        return msgspec.structs.replace(row, finish_reason=FinishReason.LENGTH, matched_stop=None)

    at.cluster.row = cut  # pyright: ignore[reportAttributeAccessIssue]
    whole, told = await both(at, max_output_tokens=4)
    assert (whole["status"], whole["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    (item,) = whole["output"]
    assert item["status"] == "incomplete"
    assert told[-1]["type"] == "response.incomplete"


async def test_a_worker_that_is_lost_fails_the_stream_with_what_was_said(at: House) -> None:
    at.cluster.row_error = WorkerLost("the worker is gone")
    told = await events(at)
    assert told[-1]["type"] == "response.failed"
    response = told[-1]["response"]
    assert response["error"] == {"code": "server_error", "message": "the worker is gone"}
    (item,) = response["output"]
    assert item["status"] == "incomplete"
    assert told[-2]["type"] == "response.output_item.done"


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": ""}]}, "input"),
        ({"input": [SECRET]}, "input[0].encrypted_content"),
        ({"tools": [{"name": "add"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}, ADD, ADD]}, "tools[2].name"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [ADD, ADD | {"name": "a b"}]}]},
            "tools[0].tools[1].name",
        ),
        ({"tools": [ADD | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [ADD, ADD]}, "tools[1].name"),
        ({"tools": [ADD], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
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
async def test_what_is_not_served_is_refused_by_name(at: House, said: Body, param: str) -> None:
    at.cluster.shown = ("hermes", None)
    status, named, message = await refusal(at, **said)
    assert (status, named) == (400, param), message


async def test_another_model_is_a_404(at: House) -> None:
    assert (await refusal(at, model="other"))[:2] == (404, "model")


def answers() -> SearchStrategy[list[Event]]:
    """What a parser may tell: calls come whole, one after another."""
    text = some.text(min_size=1, max_size=3)
    calls = some.tuples(some.lists(text, max_size=3), some.booleans())
    return some.lists(text.map(Content) | text.map(Reasoning) | calls, max_size=8).map(joined)


def joined(parts: list[Content | Reasoning | tuple[list[str], bool]]) -> list[Event]:
    told: list[Event] = []
    index = 0
    for part in parts:
        if not isinstance(part, tuple):
            told.append(part)
            continue
        pieces, complete = part
        told.append(CallBegin(index, f"call {index}", "f"))
        told += [CallArguments(index, piece) for piece in pieces]
        told.append(CallEnd(index, complete))
        index += 1
    return told


@given(answers())
def test_whatever_is_said_each_item_begins_grows_and_ends_as_its_deltas(said: list[Event]) -> None:
    teller = ResponseEventBuilder()
    told = [event for each in said for event in teller.add(each)]
    told += teller.end("completed")
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    follower = Follower()
    for event in told:
        follower.follow(event)
    assert follower.open is None
    assert [item.id for item in follower.done] == [item.id for item in teller.items]
    assert _texts(teller) == _said(said)


class Follower:
    """A client that believes nothing: items come one at a time, and are what their deltas say."""

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


def _texts(teller: ResponseEventBuilder) -> list[tuple[str, str]]:
    told: list[tuple[str, str]] = []
    for item in teller.items:
        if isinstance(item, CallItem):
            told.append(("call", item.arguments))
        elif isinstance(item, CustomCallItem):
            told.append(("call", item.input))
        else:
            assert item.content is not None
            assert not isinstance(item.content, str)
            text = "".join(getattr(part, "text", "") for part in item.content)
            told.append((type(item).__name__, text))
    return told


def _said(said: list[Event]) -> list[tuple[str, str]]:
    """What items there have to be: texts of one kind that follow each other are one."""
    told: list[tuple[str, str]] = []
    for event in said:
        match event:
            case Content() | Reasoning():
                kind = "MessageItem" if isinstance(event, Content) else "ReasoningItem"
                if told and told[-1][0] == kind:
                    told[-1] = (kind, told[-1][1] + event.text)
                else:
                    told.append((kind, event.text))
            case CallBegin():
                told.append(("call", ""))
            case CallArguments():
                told[-1] = ("call", told[-1][1] + event.text)
            case CallEnd():
                pass
    return told


BY_TOKENS = PromptTooLong.of(prompt_tokens=2000, tokens_max=1000)
BY_CHARACTERS = PromptTooLong.of_characters(
    characters=8000, context_tokens=1000, token_characters=4
)
HI = MessageItem(role="user", content="hi")
CALL = CallItem(call_id="c", name="read", arguments="x" * 5000)
OUTPUT = CallOutputItem(call_id="c", output="y")


@pytest.mark.parametrize("error", [BY_TOKENS, BY_CHARACTERS], ids=["tokens", "characters"])
def test_shortening_leaves_out_the_oldest_items(error: PromptTooLong) -> None:
    items = [MessageItem(role="user", content=f"{n}" * 400) for n in range(8)]
    left = truncate_items(items, error)
    assert left is not None
    assert left == items[-len(left) :]
    assert 1 <= len(left) <= 4


def test_shortening_keeps_the_call_of_the_last_output() -> None:
    assert truncate_items([HI, CALL, OUTPUT], BY_TOKENS) == [CALL, OUTPUT]
    assert truncate_items([CALL, OUTPUT], BY_TOKENS) is None


def test_shortening_takes_an_output_with_its_call() -> None:
    assert truncate_items([CALL, OUTPUT, HI], BY_TOKENS) == [HI]
