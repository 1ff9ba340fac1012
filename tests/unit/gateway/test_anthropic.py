"""The Messages API: bodies to asks, answers to blocks and events, whole and streamed the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

import aiohttp
import anthropic
import msgspec
import pytest
from tests.unit.gateway.cluster import CONTEXT_TOKENS, MODEL, SCRIPT, House, house
from tests.unit.gateway.test_http import HI, Body, post

from antiphon.gateway.http.anthropic.parse import conversation
from antiphon.gateway.http.anthropic.schema import MessagesBody
from antiphon.wire.base import FinishReason
from antiphon.wire.errors import EngineError, Internal, InvalidRequest, Overloaded, WorkerLost
from antiphon.wire.sampling import GrammarKind, ThinkingBudget
from antiphon.wire.tokenize import ChatMessage, MessageToolCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anthropic.types import Message


MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TEXT = "".join(SCRIPT)
HELLO: Body = {"max_tokens": 20, "messages": HI}
TOOL: Body = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
FORM: Body = {"type": "json_schema", "schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "Rome"}}\n</tool_call>'
THOUGHT = ("<thi", "nk>Where ", "is it?", "</think>")
SIGNATURE = "JtxeUmXt27zkHiDT/AxZSo8gU/Ti7xEJojJzOaUfRY0="
"""SHA-256 of the thought."""


@pytest.fixture
async def thinker() -> AsyncIterator[House]:
    async with house(tool_call_parser="hermes", reasoning_parser="qwen3") as world:
        world.cluster.script = (*THOUGHT, "Let me see. ", CALL[:8], CALL[8:40], CALL[40:], "")
        yield world


def client(at: House) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=at.url, api_key="none", max_retries=0)


async def refusal(at: House, body: Body) -> str:
    """The message of a 400."""
    status, reply, _ = await post(at, MESSAGES, HELLO | body)
    assert status == 400, reply
    return cast("dict[str, str]", reply["error"])["message"]


def warned(headers: object) -> list[str]:
    """The texts of the warnings of a response."""
    return [each.split('"')[1] for each in headers.getall("Warning")]  # type: ignore[attr-defined]


async def events(at: House, body: Body) -> list[tuple[str, Body]]:
    """The names and the data of a stream's events."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(at.url + MESSAGES, json=body | {"stream": True}) as reply,
    ):
        assert reply.status == 200, await reply.text()
        assert reply.content_type == "text/event-stream"
        told: list[tuple[str, Body]] = []
        for one in (await reply.text()).split("\n\n")[:-1]:
            name, data = one.split("\n")
            told.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
            assert told[-1][0] == told[-1][1]["type"]
        return told


async def answered(at: House, **said: object) -> Message:
    """Ask by the client, whole and streamed; return what both have said."""
    asked = HELLO | {"model": MODEL} | said
    async with client(at) as opened:
        whole = await opened.messages.create(**asked)  # pyright: ignore
        async with opened.messages.stream(**asked) as stream:  # pyright: ignore
            streamed = await stream.get_final_message()
    assert _comparable(streamed) == _comparable(whole)
    return whole


def _comparable(message: Message) -> Body:
    """All but the ids, which no two answers share."""
    told = message.model_dump(exclude_none=True, exclude={"id"})
    for block in told["content"]:
        if block["type"] == "tool_use":
            block["id"] = ""
        block.pop("parsed_output", None)
    return told


async def test_a_message_is_told_whole(at: House) -> None:
    status, reply, headers = await post(at, MESSAGES, HELLO)
    names = cast("dict[str, str]", headers)
    assert status == 200
    assert reply == {
        "id": f"msg_{names['request-id']}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": TEXT}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 4,
            "service_tier": "standard",
        },
    }
    assert names["X-Request-Id"] == names["request-id"]


async def test_the_events_of_a_stream_come_in_their_order(at: House) -> None:
    told = await events(at, HELLO)
    usage = {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "service_tier": "standard",
    }
    start = cast("dict[str, Body]", told[0][1])["message"]
    assert start["content"] == []
    assert start["stop_reason"] is None
    assert start["usage"] == usage | {"output_tokens": 1}
    assert told[1:3] == [
        ("ping", {"type": "ping"}),
        (
            "content_block_start",
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            },
        ),
    ]
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        for text in SCRIPT
    ]
    assert [data for _, data in told[3:-3]] == deltas
    assert [data for _, data in told[-3:]] == [
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": usage | {"output_tokens": 4},
        },
        {"type": "message_stop"},
    ]


async def test_thinking_text_and_calls_are_blocks_one_after_another(thinker: House) -> None:
    message = await answered(thinker, tools=[TOOL])
    thinking, text, call = message.content
    assert thinking.type == "thinking"
    assert (thinking.thinking, thinking.signature) == ("Where is it?", SIGNATURE)
    assert text.type == "text"
    assert text.text == "Let me see."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("look", {"at": "Rome"})
    assert message.stop_reason == "tool_use"
    told = await events(thinker, HELLO | {"tools": [TOOL]})
    kinds = [
        (data["index"], cast("Body", data["delta"])["type"])
        for name, data in told
        if name == "content_block_delta"
    ]
    assert list(dict.fromkeys(kinds)) == [
        (0, "thinking_delta"),
        (0, "signature_delta"),
        (1, "text_delta"),
        (2, "input_json_delta"),
    ]
    names = [name for name, _ in told if name in ("content_block_start", "content_block_stop")]
    assert names == ["content_block_start", "content_block_stop"] * 3


async def test_a_call_that_is_cut_off_has_no_input_and_is_no_reason(thinker: House) -> None:
    thinker.cluster.script = (CALL[:-18],)
    thinker.cluster.reason = FinishReason.LENGTH
    _, reply, _ = await post(thinker, MESSAGES, HELLO | {"tools": [TOOL]})
    (call,) = cast("list[Body]", reply["content"])
    assert (call["type"], call["input"]) == ("tool_use", {})
    assert reply["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("reason", "matched", "told"),
    [
        (FinishReason.STOP, 2, ("end_turn", None)),
        (FinishReason.STOP, "!", ("stop_sequence", "!")),
        (FinishReason.LENGTH, None, ("max_tokens", None)),
        (FinishReason.ABORT, None, ("pause_turn", None)),
    ],
)
async def test_an_answer_says_why_it_ended(
    at: House, reason: FinishReason, matched: str | int | None, told: tuple[str, str | None]
) -> None:
    at.cluster.reason, at.cluster.matched = reason, matched
    message = await answered(at, stop_sequences=["!"])
    assert (message.stop_reason, message.stop_sequence) == told


async def test_where_the_context_leaves_less_it_is_what_ends_the_answer(at: House) -> None:
    at.cluster.reason = FinishReason.LENGTH
    message = await answered(at, max_tokens=10_000)
    assert message.stop_reason == "model_context_window_exceeded"
    assert at.cluster.submits[0].sampling.max_new_tokens == CONTEXT_TOKENS - 2


async def test_nothing_may_be_said(at: House) -> None:
    at.cluster.script, at.cluster.reason = ("",), FinishReason.LENGTH
    message = await answered(at, max_tokens=0)
    assert (message.content, message.stop_reason) == ([], "max_tokens")
    assert at.cluster.submits[0].sampling.max_new_tokens == 0


async def test_everything_a_request_may_say_reaches_the_leader(at: House) -> None:
    body = HELLO | {
        "model": MODEL,
        "system": [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}],
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "stop_sequences": ["x", "y"],
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "speed": "standard",
        "mcp_servers": [],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "nobody_documents_this": 1,
        "output_config": {"effort": "low"},
    }
    status, reply, _ = await post(
        at, MESSAGES, body, **{"anthropic-version": "2026-10-21", "anthropic-beta": "a-1,b-2"}
    )
    assert status == 200, reply
    encode, submit = at.cluster.encodes[0], at.cluster.submits[0]
    assert encode.messages == (
        ChatMessage(role="system", content="Be"),
        ChatMessage(role="user", content="hi"),
    )
    assert json.loads(encode.template.options or "") == {"reasoning_effort": "low"}
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert sampling.max_new_tokens == 20
    assert submit.stop.strings == ("x", "y")
    counted = at.gateway.metrics.text().decode()
    assert "antiphon_unknown_fields_total 1.0" in counted


async def test_what_is_not_said_is_the_model_s(at: House) -> None:
    await post(at, MESSAGES, HELLO | {"temperature": None, "system": None, "top_k": 0})
    sampling = at.cluster.submits[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.25, 0, 1.25)


def read(*messages: Body, **said: object) -> tuple[ChatMessage, ...]:
    body = msgspec.json.encode({"max_tokens": 1, "messages": [*messages]} | said)
    return conversation(msgspec.json.decode(body, type=MessagesBody))


def user(*blocks: Body) -> Body:
    return {"role": "user", "content": [*blocks]}


def assistant(*blocks: Body) -> Body:
    return {"role": "assistant", "content": [*blocks]}


def text(said: str) -> Body:
    return {"type": "text", "text": said, "cache_control": None, "citations": None}


USE: Body = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "Rome", "n": [1]}}


def test_a_conversation_with_tools_becomes_turns() -> None:
    turns = read(
        {"role": "user", "content": "Where?"},
        assistant(
            {"type": "thinking", "thinking": "Hm.", "signature": "?"},
            {"type": "redacted_thinking", "data": "?"},
            text("Let me see."),
            USE,
            USE | {"id": "c2"},
        ),
        user(
            {"type": "tool_result", "tool_use_id": "c1", "content": [text("a"), text("b")]},
            {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
            text("And now?"),
        ),
        system=[text("Be"), text("brief.")],
    )
    call = MessageToolCall(id="c1", name="look", arguments='{"at":"Rome","n":[1]}')
    assert turns == (
        ChatMessage(role="system", content="Be\nbrief."),
        ChatMessage(role="user", content="Where?"),
        ChatMessage(
            role="assistant",
            content="Let me see.",
            reasoning_content="Hm.",
            tool_calls=(call, msgspec.structs.replace(call, id="c2")),
        ),
        ChatMessage(role="tool", content="a\nb", name="look", tool_call_id="c1"),
        ChatMessage(role="tool", content="Error: no", name="look", tool_call_id="c2"),
        ChatMessage(role="user", content="And now?"),
    )


def test_neighbours_of_one_role_are_one_turn() -> None:
    turns = read(
        user(text("a"), text("b")),
        {"role": "user", "content": "c"},
        assistant({"type": "thinking", "thinking": "Hm."}),
        assistant(text("d"), USE),
        user({"type": "tool_result", "tool_use_id": "c1"}),
        {"role": "system", "content": [text("e")]},
    )
    said = [(turn.role, turn.content) for turn in turns]
    assert said == [("user", "a\nb\nc"), ("assistant", "d"), ("tool", ""), ("system", "e")]
    assert turns[1].reasoning_content == "Hm."
    assert turns[1].tool_calls[0].id == "c1"


async def test_a_last_message_of_the_assistant_begins_the_answer(at: House) -> None:
    begun = [*HI, {"role": "assistant", "content": "I"}]
    await post(at, MESSAGES, HELLO | {"messages": begun})
    await post(at, MESSAGES, HELLO | {"messages": [*HI, assistant()]})
    continued, empty = at.cluster.encodes
    assert continued.continue_final_message
    assert not empty.continue_final_message
    assert empty.messages == (ChatMessage(role="user", content="hi"),)


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [user()]}, "messages[0].content"),
        ({"messages": [user({"type": "document"})]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        (
            {"messages": [user({"type": "image", "source": {"type": "url", "url": "x"}})]},
            "messages[0].content[0].type",
        ),
        ({"messages": [user(USE)]}, "messages[0].content[0].type"),
        (
            {"messages": [user({"type": "tool_result", "tool_use_id": "c9"})]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"messages": [*HI, assistant(USE)]}, "messages[1].content"),
        ({"messages": [*HI, assistant(text("I am "))]}, "messages[1].content"),
        (
            {"messages": [*HI, assistant({"type": "thinking", "thinking": "Hm"})]},
            "messages[1].content",
        ),
        ({"messages": [assistant()]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": [USE]}]}, "messages[0].content[0].type"),
        ({"system": [USE]}, "system[0].type"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"service_tier": "best"}, "service_tier"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL | {"name": "not a name"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
        ({"tools": [TOOL, TOOL], "tool_choice": {"type": "any"}}, "tools[1].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [TOOL | {"allowed_callers": ["x"]}]}, "tools[0].allowed_callers"),
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_config": {"task_budget": {"total": 1}}}, "output_config.task_budget"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"name": "m"}]}, "mcp_servers"),
        ({"compaction": {"type": "x"}}, "compaction"),
        (
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            "context_management.edits[0].type",
        ),
        ({"output_config": {"format": FORM}, "output_format": FORM}, "output_format"),
    ],
)
async def test_a_bad_request_is_told_in_one_shape_and_names_the_field(
    at: House, said: Body, field: str
) -> None:
    for streamed in (False, True):
        status, reply, _ = await post(at, MESSAGES, HELLO | said | {"stream": streamed})
        assert (status, reply["type"]) == (400, "error")
        assert len(cast("str", reply["request_id"])) == 32
        error = cast("dict[str, str]", reply["error"])
        assert set(error) == {"type", "message"}
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(f"{field}:"), error
    assert at.cluster.submits == []


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (b'"tools": [{"name": "f", "input_schema": {"n": 1e999}}]', "tools[0].input_schema:"),
        (
            b'"messages": [{"role": "assistant", "content": '
            b'[{"type": "tool_use", "id": "c", "name": "f", "input": {"n": 1e999}}]}]',
            "messages[0].content[0].input:",
        ),
    ],
)
async def test_a_number_that_nobody_can_read_is_refused(at: House, said: bytes, field: str) -> None:
    body = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], %b}' % said
    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(at.url + MESSAGES, data=body, headers=headers) as reply,
    ):
        assert reply.status == 400
        assert (await reply.json())["error"]["message"].startswith(field)


@pytest.mark.parametrize("kind", ["any", "auto"])
async def test_form_of_an_answer_goes_with_tools(thinker: House, kind: str) -> None:
    form = {"output_config": {"format": {"type": "json_schema", "schema": {"title": "F"}}}}
    said = form | {"tools": [TOOL], "tool_choice": {"type": kind}}
    status, reply, _ = await post(thinker, MESSAGES, HELLO | said)
    assert status == 200, reply
    grammar = thinker.cluster.submits[0].sampling.grammar
    assert grammar is not None
    assert str(TOOL["name"]) in grammar.text
    assert ('"title":"F"' in grammar.text) is (kind == "auto")


@pytest.mark.parametrize("field", ["output_format", "output_config"])
async def test_an_answer_is_held_to_a_schema(at: House, field: str) -> None:
    said = {"output_format": FORM, "output_config": {"format": FORM}}
    await post(at, MESSAGES, HELLO | {field: said[field]})
    grammar = at.cluster.submits[0].sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == (GrammarKind.JSON_SCHEMA, '{"type":"object"}')


async def test_a_schema_with_a_mistake_is_named_as_the_client_said_it(at: House) -> None:
    at.cluster.submit_error = InvalidRequest("no schema", param="grammar")
    form = {"type": "json_schema", "schema": {"type": "no"}}
    message = await refusal(at, {"output_config": {"format": form}})
    assert message == "output_config.format: no schema"


async def test_tools_are_shown_and_chosen_from(thinker: House) -> None:
    other = TOOL | {"name": "go", "input_examples": [{"at": "Rome"}]}
    both = {"tools": [TOOL, other]}
    for choice in ({"type": "auto"}, {"type": "none"}, {"type": "any"}):
        await post(thinker, MESSAGES, HELLO | both | {"tool_choice": choice})
    prompts = [encode for encode in thinker.cluster.encodes if encode.messages is not None]
    auto, none, required = prompts
    shown = json.loads(auto.template.tools or "")
    assert [tool["function"]["name"] for tool in shown] == ["look", "go"]
    assert shown[0]["function"] == {
        "name": "look",
        "description": "Looks.",
        "parameters": TOOL["input_schema"],
    }
    assert shown[1]["function"]["input_examples"] == [{"at": "Rome"}]
    assert none.template.tools is None
    assert required.template.tools == auto.template.tools
    grammars = [submit.sampling.grammar for submit in thinker.cluster.submits]
    assert grammars[:2] == [None, None]
    assert grammars[2] is not None
    assert "look" in grammars[2].text
    assert "</think>" in grammars[2].text


async def test_one_tool_may_be_chosen_and_one_call_allowed(thinker: House) -> None:
    thinker.cluster.script = (CALL, CALL, "")
    one = await answered(
        thinker, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    several = await answered(thinker, tools=[TOOL], tool_choice={"type": "auto"})
    assert (len(one.content), len(several.content)) == (1, 2)
    other = TOOL | {"name": "go"}
    await post(
        thinker,
        MESSAGES,
        HELLO | {"tools": [TOOL, other], "tool_choice": {"type": "tool", "name": "go"}},
    )
    grammar = thinker.cluster.submits[-1].sampling.grammar
    assert grammar is not None
    assert "look" not in grammar.text


async def test_without_tools_nothing_is_a_call(thinker: House) -> None:
    message = await answered(thinker)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.stop_reason == "end_turn"


async def test_thinking_is_turned_on_and_ended_by_its_budget(thinker: House) -> None:
    thinker.cluster.words = {"<think>": 7, "</think>": 8}
    body = HELLO | {"thinking": {"type": "enabled", "budget_tokens": 5}}
    status, reply, _ = await post(thinker, MESSAGES, body)
    assert status == 200, reply
    options = json.loads(thinker.cluster.encodes[-1].template.options or "")
    assert options == {"enable_thinking": True, "thinking": True}
    assert thinker.cluster.submits[0].sampling.processors == (
        ThinkingBudget(tokens_max=5, begin_id=7, closing_ids=(8,)),
    )


@pytest.mark.parametrize("budget", [None, 20, 5])
async def test_a_budget_that_cannot_be_kept_is_refused(thinker: House, budget: int | None) -> None:
    thinking = {"type": "enabled", "budget_tokens": budget}
    assert (await refusal(thinker, {"thinking": thinking})).startswith("thinking.budget_tokens:")


async def test_thinking_is_told_as_much_as_is_wanted(thinker: House) -> None:
    adaptive = await answered(thinker, thinking={"type": "adaptive", "display": "summarized"})
    omitted = await answered(thinker, thinking={"type": "adaptive", "display": "omitted"})
    disabled = await answered(thinker, thinking={"type": "disabled"})
    assert adaptive.content[0].model_dump()["thinking"] == "Where is it?"
    assert omitted.content[0].model_dump() == {
        "type": "thinking",
        "thinking": "",
        "signature": SIGNATURE,
    }
    assert [block.type for block in disabled.content] == ["text"]
    first, *_, last = thinker.cluster.encodes
    assert first.template.options is None
    assert json.loads(last.template.options or "") == {"enable_thinking": False, "thinking": False}


async def test_what_is_counted_is_what_would_be_read(at: House) -> None:
    asked: Body = {"messages": HI, "system": "Be brief."}
    status, reply, headers = await post(at, COUNT, asked)
    assert (status, reply) == (200, {"input_tokens": len("Be brief.\nhi")})
    assert cast("dict[str, str]", headers)["request-id"]
    _, reply, _ = await post(at, MESSAGES, asked | {"max_tokens": 1})
    usage = cast("dict[str, int]", reply["usage"])
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len("Be brief.\nhi")
    assert at.cluster.encodes[0].messages == at.cluster.encodes[1].messages
    async with client(at) as opened:
        with pytest.raises(anthropic.NotFoundError):
            await opened.messages.count_tokens(model="other", messages=[*HI])  # pyright: ignore


@pytest.mark.parametrize(
    ("error", "status", "kind", "words"),
    [
        (Overloaded("The queue is full.", retry_after_s=2.5), 529, "overloaded_error", "full"),
        (WorkerLost("the worker died"), 503, "overloaded_error", "died"),
        (Internal("secret"), 500, "api_error", "Internal server error."),
    ],
)
async def test_a_refusal_of_the_leader_has_its_status_and_type(
    at: House, error: EngineError, status: int, kind: str, words: str
) -> None:
    at.cluster.submit_error = error
    async with client(at) as opened:
        with pytest.raises(anthropic.APIStatusError) as refused:
            await opened.messages.create(model=MODEL, max_tokens=5, messages=[*HI])  # pyright: ignore
    assert (refused.value.status_code, refused.value.type) == (status, kind)
    assert words in str(refused.value.api_message)
    body = cast("Body", refused.value.body)
    assert body["request_id"] == refused.value.request_id
    assert len(str(refused.value.request_id)) == 32
    retry = refused.value.response.headers.get("Retry-After")
    assert retry == (None if error.retry_after_s is None else "3")


async def test_an_error_after_the_first_text_is_the_last_event(at: House) -> None:
    at.cluster.row_error = WorkerLost("the worker of this request died")
    told = await events(at, HELLO)
    name, data = told[-1]
    assert name == "error"
    assert cast("Body", data["error"])["type"] == "overloaded_error"
    start = cast("dict[str, Body]", told[0][1])["message"]
    assert start["id"] == f"msg_{data['request_id']}"
    assert [name for name, _ in told].count("content_block_delta") == len(SCRIPT) - 1
    async with client(at) as opened:
        with pytest.raises(anthropic.APIError, match="died"):
            async with opened.messages.stream(
                model=MODEL,
                max_tokens=5,
                messages=[*HI],  # pyright: ignore[reportArgumentType]
            ) as stream:
                await stream.until_done()


async def test_paths_versions_models_and_sizes_are_refused_in_the_same_shape() -> None:
    async with house(body_bytes_max=1000) as at:
        for path, body, headers, status, kind in (
            (f"{MESSAGES}/batches", HELLO, {}, 404, "not_found_error"),
            (MESSAGES, HELLO | {"model": "other"}, {}, 404, "not_found_error"),
            (MESSAGES, HELLO, {"anthropic-version": "2023-01-01"}, 400, "invalid_request_error"),
            (COUNT, HELLO, {"anthropic-version": "2023-01-01"}, 400, "invalid_request_error"),
            (MESSAGES, HELLO | {"system": "x" * 1000}, {}, 413, "request_too_large"),
            (MESSAGES, HELLO | {"system": "x" * 100}, {}, 400, "invalid_request_error"),
        ):
            found, reply, _ = await post(at, path, body, **headers)
            assert (found, reply["type"]) == (status, "error"), reply
            assert cast("Body", reply["error"])["type"] == kind
        async with aiohttp.ClientSession() as session, session.get(at.url + MESSAGES) as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "POST")
            assert (await answer.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["document", "image", "search_result", "tool_reference"])
async def test_blocks_that_are_not_read_are_unsupported_wherever_they_stand(
    at: House, kind: str
) -> None:
    block = {"type": kind, "source": {"type": "text", "data": "x"}, "title": "t", "content": []}
    asked = assistant(USE)
    result = {"type": "tool_result", "tool_use_id": USE["id"], "content": [block]}
    for messages, at_ in (
        ([{"role": "user", "content": [block]}], "messages[0].content[0].type"),
        ([asked, {"role": "user", "content": [result]}], "messages[1].content[0].content[0].type"),
    ):
        message = await refusal(at, {"messages": messages})
        assert message == f"{at_}: content of type '{kind}' is not supported"


async def test_a_strict_tool_that_nothing_can_hold_is_refused() -> None:
    async with house(tool_call_parser="llama3") as at:
        assert (await post(at, MESSAGES, HELLO | {"tools": [TOOL]}))[0] == 200
        assert (await refusal(at, {"tools": [TOOL | {"strict": True}]})).startswith(
            "tools[0].strict: no grammar can produce tool calls in the format llama3"
        )


async def test_beta_fields_that_change_nothing_are_ignored_with_a_warning(at: House) -> None:
    body = HELLO | {
        "thread": {"type": "create"},
        "speed": "fast",
        "billing_policy": {"type": "billing_policy"},
        "diagnostics": {"previous_message_id": "m"},
        "fallbacks": [{"model": "other"}],
        "fallback_credit_token": "t",
        "user_profile_id": "u",
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    }
    for path, said in ((MESSAGES, body), (f"{MESSAGES}/count_tokens", body)):
        status, reply, headers = await post(at, path, said)
        assert status == 200, reply
        named = {text.split(" ")[0] for text in warned(headers)}
        assert named == set(body) - set(HELLO)


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
async def test_unknown_fields_are_ignored_with_a_warning(at: House, path: str) -> None:
    large = [{"role": "user", "content": "hi " * 5}] * 2000  # read in a child process
    for messages in (HELLO["messages"], large):
        body = HELLO | {"messages": messages, "later_beta": {"a": 1}, "b" * 400: 2, "user": "x"}
        status, reply, headers = await post(at, path, body)
        named = warned(headers)
        assert named[1] == "later_beta is ignored: it is not a field of this API"
        assert named[0].startswith("bbb")
        assert len(named[0]) < 256
        assert len(named) == 2, (status, reply)


async def test_unknown_fields_of_other_families_give_no_warning(at: House) -> None:
    body = {"messages": HELLO["messages"], "later": 1}
    status, _, headers = await post(at, "/v1/chat/completions", body)
    assert (status, "Warning" in cast("dict[str, str]", headers)) == (200, False)


async def test_tool_runner_of_the_beta_runs_its_tool(thinker: House) -> None:
    ran: list[str] = []

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: Where.
        """
        ran.append(city)
        thinker.cluster.script = ("Sunny", ".")
        return "sunny"

    thinker.cluster.script = (
        '<tool_call>\n{"name": "get_weather", "arg',
        'uments": {"city": "Paris"}}\n</tool_call>',
        "",
    )
    async with client(thinker) as opened:
        runner = opened.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=16,
            tools=[get_weather],
            messages=[{"role": "user", "content": "Weather?"}],
        )
        message = await runner.until_done()
    assert ran == ["Paris"]
    assert message.content[0].type == "text"
    assert message.content[0].text == "Sunny."
    last = thinker.cluster.encodes[-1].messages
    assert last is not None
    assert [turn.role for turn in last] == ["user", "assistant", "tool"]
