"""The Messages API: requests, blocks and events; a stream carries the same as a whole response."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import anthropic
import msgspec
import pytest
from tests.unit.gateway.calls import (
    CALL,
    CHAT,
    HI,
    MESSAGES,
    TEXT,
    Body,
    failure,
    get,
    ok,
    post,
    stream,
)
from tests.unit.gateway.cluster import CONTEXT_TOKENS, MODEL, SCRIPT, House, house

from antiphon.gateway.http.anthropic.parse import conversation
from antiphon.gateway.http.anthropic.schema import MessagesBody
from antiphon.wire.base import FinishReason
from antiphon.wire.errors import EngineError, Internal, InvalidRequest, Overloaded, WorkerLost
from antiphon.wire.sampling import GrammarKind, ThinkingBudget
from antiphon.wire.tokenize import ChatMessage, MessageToolCall

if TYPE_CHECKING:
    from anthropic.types import Message


COUNT = "/v1/messages/count_tokens"
HELLO: Body = {"max_tokens": 20, "messages": HI}
TOOL: Body = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
FORM: Body = {"type": "json_schema", "schema": {"type": "object"}}
USAGE: Body = {
    "input_tokens": 1,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 1,
    "service_tier": "standard",
}
SIGNATURE = b64encode(sha256(b"Where?").digest()).decode()
"""Of the thought."""
CONTENT = "messages[0].content[0]"


def client(at: House) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=at.url, api_key="none", max_retries=0)


async def rejection(at: House, body: Body) -> str:
    """The message of a 400."""
    status, error = await failure(at, MESSAGES, HELLO | body)
    assert status == 400
    return error["message"]


async def warnings(at: House, path: str, body: Body) -> list[str]:
    """The texts of the warnings of a response."""
    status, reply, headers = await post(at, path, body)
    assert status == 200, reply
    return [each.split('"')[1] for each in headers.getall("Warning")]


async def events(at: House, body: Body) -> list[Body]:
    """The data of a stream's events, each of which has its type as its name."""
    read: list[Body] = []
    for event in await stream(at, MESSAGES, body):
        name, data = event.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


async def message_of(at: House, **fields: object) -> Message:
    """The message that Anthropic's client reads, whole and streamed."""
    body: Any = HELLO | {"model": MODEL} | fields
    async with client(at) as opened:
        whole = await opened.messages.create(**body)
        async with opened.messages.stream(**body) as stream:
            streamed = await stream.get_final_message()
    assert _comparable(streamed) == _comparable(whole)
    return whole


def _comparable(message: Message) -> Body:
    """All but the ids, which no two responses share."""
    fields = message.model_dump(exclude_none=True, exclude={"id"})
    for block in fields["content"]:
        if block["type"] == "tool_use":
            block["id"] = ""
        block.pop("parsed_output", None)
    return fields


async def test_message_has_one_text_block(at: House) -> None:
    status, reply, headers = await post(at, MESSAGES, HELLO)
    assert status == 200
    assert reply == {
        "id": f"msg_{headers['request-id']}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": TEXT}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE | {"output_tokens": 4},
    }
    assert headers["X-Request-Id"] == headers["request-id"]


async def test_events_of_a_stream_come_in_their_order(at: House) -> None:
    start, *rest = await events(at, HELLO)
    begun = {"content": [], "stop_reason": None, "usage": USAGE | {"output_tokens": 1}}
    assert begun.items() <= start["message"].items()
    block: Body = {"index": 0}
    assert rest == [
        {"type": "ping"},
        block | {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        *(
            block | {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}
            for text in SCRIPT
        ),
        block | {"type": "content_block_stop"},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": USAGE | {"output_tokens": 4},
        },
        {"type": "message_stop"},
    ]


async def test_thinking_text_and_calls_are_blocks_one_after_another(thinking: House) -> None:
    message = await message_of(thinking, tools=[TOOL])
    blocks = [block.model_dump(exclude_none=True, exclude={"id"}) for block in message.content]
    thought, text, use = blocks
    assert thought == {"type": "thinking", "thinking": "Where?", "signature": SIGNATURE}
    assert (text["type"], text["text"]) == ("text", "Let me see.")
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "look", {"at": "Rome"})
    assert message.stop_reason == "tool_use"
    read = await events(thinking, HELLO | {"tools": [TOOL]})
    kinds = [(e["index"], e["delta"]["type"]) for e in read if e["type"] == "content_block_delta"]
    assert list(dict.fromkeys(kinds)) == [
        (0, "thinking_delta"),
        (0, "signature_delta"),
        (1, "text_delta"),
        (2, "input_json_delta"),
    ]
    ends = ("content_block_start", "content_block_stop")
    assert [event["type"] for event in read if event["type"] in ends] == [*ends] * 3


async def test_call_that_is_cut_off_has_no_input_and_is_no_stop_reason(thinking: House) -> None:
    thinking.cluster.script = (CALL[:-18],)
    thinking.cluster.reason = FinishReason.LENGTH
    reply = await ok(thinking, MESSAGES, HELLO | {"tools": [TOOL]})
    (use,) = reply["content"]
    assert (use["type"], use["input"], reply["stop_reason"]) == ("tool_use", {}, "max_tokens")


@pytest.mark.parametrize(
    ("reason", "matched", "expected"),
    [
        (FinishReason.STOP, 2, ("end_turn", None)),
        (FinishReason.STOP, "!", ("stop_sequence", "!")),
        (FinishReason.LENGTH, None, ("max_tokens", None)),
        (FinishReason.ABORT, None, ("pause_turn", None)),
    ],
)
async def test_message_has_its_stop_reason(
    at: House, reason: FinishReason, matched: str | int | None, expected: tuple[str, str | None]
) -> None:
    at.cluster.reason, at.cluster.matched = reason, matched
    message = await message_of(at, stop_sequences=["!"])
    assert (message.stop_reason, message.stop_sequence) == expected


async def test_max_tokens_beyond_the_context_ends_by_the_context(at: House) -> None:
    at.cluster.reason = FinishReason.LENGTH
    message = await message_of(at, max_tokens=10_000)
    assert message.stop_reason == "model_context_window_exceeded"
    assert at.cluster.sampling.max_new_tokens == CONTEXT_TOKENS - 2


async def test_max_tokens_may_be_zero(at: House) -> None:
    at.cluster.script, at.cluster.reason = ("",), FinishReason.LENGTH
    message = await message_of(at, max_tokens=0)
    assert (message.content, message.stop_reason) == ([], "max_tokens")
    assert at.cluster.sampling.max_new_tokens == 0


async def test_every_field_of_a_request_reaches_the_leader(at: House) -> None:
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
        "undocumented": 1,
        "output_config": {"effort": "low"},
    }
    headers = {"anthropic-version": "2026-10-21", "anthropic-beta": "a-1,b-2"}
    await ok(at, MESSAGES, body, **headers)
    turns = [(turn.role, turn.content) for turn in at.cluster.turns]
    assert turns == [("system", "Be"), ("user", "hi")]
    assert at.cluster.template_options == {"reasoning_effort": "low"}
    sampling = at.cluster.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert sampling.max_new_tokens == 20
    assert at.cluster.submits[0].stop.strings == ("x", "y")
    assert "antiphon_unknown_fields_total 1.0" in at.metrics_text


async def test_defaults_are_the_models(at: House) -> None:
    await post(at, MESSAGES, HELLO | {"temperature": None, "system": None, "top_k": 0})
    sampling = at.cluster.sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.25, 0, 1.25)


def read(*messages: Body, **fields: object) -> tuple[ChatMessage, ...]:
    body = msgspec.json.encode({"max_tokens": 1, "messages": [*messages]} | fields)
    return conversation(msgspec.json.decode(body, type=MessagesBody), [])


def user(*blocks: Body) -> Body:
    return {"role": "user", "content": [*blocks]}


def assistant(*blocks: Body) -> Body:
    return {"role": "assistant", "content": [*blocks]}


def text(content: str) -> Body:
    return {"type": "text", "text": content, "cache_control": None, "citations": None}


USE: Body = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "Rome", "n": [1]}}
RESULT: Body = {"type": "tool_result", "tool_use_id": "c1"}
THOUGHT: Body = {"type": "thinking", "thinking": "Hm."}
IMAGE: Body = {"type": "image", "source": {"type": "url", "url": "x"}}
MANAGEMENT = "context_management"


def test_conversation_with_tools_becomes_turns() -> None:
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
            RESULT | {"content": [text("a"), text("b")]},
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


def test_adjacent_messages_of_one_role_are_one_turn() -> None:
    turns = read(
        user(text("a"), text("b")),
        {"role": "user", "content": "c"},
        assistant(THOUGHT),
        assistant(text("d"), USE),
        user(RESULT),
        {"role": "system", "content": [text("e")]},
    )
    contents = [(turn.role, turn.content) for turn in turns]
    assert contents == [("user", "a\nb\nc"), ("assistant", "d"), ("tool", ""), ("system", "e")]
    assert (turns[1].reasoning_content, turns[1].tool_calls[0].id) == ("Hm.", "c1")


async def test_last_message_of_the_assistant_is_continued(at: House) -> None:
    begun = [*HI, {"role": "assistant", "content": "I"}]
    await post(at, MESSAGES, HELLO | {"messages": begun})
    await post(at, MESSAGES, HELLO | {"messages": [*HI, assistant()]})
    continued, empty = at.cluster.encodes
    assert continued.continue_final_message
    assert not empty.continue_final_message
    assert empty.messages == (ChatMessage(role="user", content="hi"),)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [user()]}, "messages[0].content"),
        ({"messages": [user({"type": "document"})]}, f"{CONTENT}.type"),
        ({"messages": [user({"type": "text"})]}, f"{CONTENT}.text"),
        ({"messages": [user(IMAGE)]}, f"{CONTENT}.source"),
        ({"messages": [user(USE)]}, f"{CONTENT}.type"),
        ({"messages": [user(RESULT | {"tool_use_id": "c9"})]}, f"{CONTENT}.tool_use_id"),
        ({"messages": [*HI, assistant(USE)]}, "messages[1].content"),
        ({"messages": [*HI, assistant(text("I am "))]}, "messages[1].content"),
        ({"messages": [*HI, assistant(THOUGHT)]}, "messages[1].content"),
        ({"messages": [assistant()]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": [USE]}]}, f"{CONTENT}.type"),
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
        ({MANAGEMENT: {"edits": [{"type": "compact_20260112"}]}}, f"{MANAGEMENT}.edits[0].type"),
        ({"output_config": {"format": FORM}, "output_format": FORM}, "output_format"),
    ],
)
async def test_error_of_a_bad_request_has_one_shape_and_names_the_field(
    at: House, fields: Body, field: str
) -> None:
    for streamed in (False, True):
        status, reply, _ = await post(at, MESSAGES, HELLO | fields | {"stream": streamed})
        assert (status, reply["type"], len(reply["request_id"])) == (400, "error", 32)
        error = reply["error"]
        assert set(error) == {"type", "message"}
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(f"{field}:"), error
    assert at.cluster.submits == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (b'"tools": [{"name": "f", "input_schema": {"n": 1e999}}]', "tools[0].input_schema:"),
        (
            b'"messages": [{"role": "assistant", "content": '
            b'[{"type": "tool_use", "id": "c", "name": "f", "input": {"n": 1e999}}]}]',
            f"{CONTENT}.input:",
        ),
    ],
)
async def test_number_that_cannot_be_read_is_refused(at: House, fields: bytes, field: str) -> None:
    body = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], %b}' % fields
    status, error = await failure(at, MESSAGES, body)
    assert status == 400
    assert error["message"].startswith(field)


@pytest.mark.parametrize("kind", ["any", "auto"])
async def test_output_format_goes_with_tools(thinking: House, kind: str) -> None:
    form = {"output_config": {"format": {"type": "json_schema", "schema": {"title": "F"}}}}
    tools = {"tools": [TOOL], "tool_choice": {"type": kind}}
    await ok(thinking, MESSAGES, HELLO | form | tools)
    grammar = thinking.cluster.grammar
    assert "look" in grammar.text
    assert ('"title":"F"' in grammar.text) is (kind == "auto")


@pytest.mark.parametrize("fields", [{"output_format": FORM}, {"output_config": {"format": FORM}}])
async def test_output_is_constrained_by_a_schema(at: House, fields: Body) -> None:
    await post(at, MESSAGES, HELLO | fields)
    grammar = at.cluster.grammar
    assert (grammar.kind, grammar.text) == (GrammarKind.JSON_SCHEMA, '{"type":"object"}')


async def test_error_in_a_schema_names_the_field_of_the_client(at: House) -> None:
    at.cluster.submit_error = InvalidRequest("no schema", param="grammar")
    form = {"type": "json_schema", "schema": {"type": "no"}}
    message = await rejection(at, {"output_config": {"format": form}})
    assert message == "output_config.format: no schema"


async def test_tools_are_shown_and_chosen_from(thinking: House) -> None:
    other = TOOL | {"name": "go", "input_examples": [{"at": "Rome"}]}
    shown: list[Any] = []
    grammars: list[Any] = []
    for choice in ("auto", "none", "any"):
        tools = {"tools": [TOOL, other], "tool_choice": {"type": choice}}
        await post(thinking, MESSAGES, HELLO | tools)
        shown.append(thinking.cluster.template_tools)
        grammars.append(thinking.cluster.sampling.grammar)
    look = {"name": "look", "description": "Looks.", "parameters": TOOL["input_schema"]}
    go = look | {"name": "go", "input_examples": [{"at": "Rome"}]}
    assert shown == [[look, go], None, [look, go]]
    assert grammars[:2] == [None, None]
    assert "look" in grammars[2].text
    assert "</think>" in grammars[2].text


async def test_one_tool_may_be_chosen_and_one_call_allowed(thinking: House) -> None:
    thinking.cluster.script = (CALL, CALL, "")
    auto = {"type": "auto"}
    single = auto | {"disable_parallel_tool_use": True}
    one = await message_of(thinking, tools=[TOOL], tool_choice=single)
    several = await message_of(thinking, tools=[TOOL], tool_choice=auto)
    assert (len(one.content), len(several.content)) == (1, 2)
    go = {"tools": [TOOL, TOOL | {"name": "go"}], "tool_choice": {"type": "tool", "name": "go"}}
    await post(thinking, MESSAGES, HELLO | go)
    assert "look" not in thinking.cluster.grammar.text


async def test_without_tools_nothing_is_a_call(thinking: House) -> None:
    message = await message_of(thinking)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.stop_reason == "end_turn"


async def test_thinking_is_turned_on_and_ended_by_its_budget(thinking: House) -> None:
    thinking.cluster.words = {"<think>": 7, "</think>": 8}
    await ok(thinking, MESSAGES, HELLO | {"thinking": {"type": "enabled", "budget_tokens": 5}})
    assert thinking.cluster.template_options == {"enable_thinking": True, "thinking": True}
    budget = ThinkingBudget(tokens_max=5, begin_id=7, closing_ids=(8,))
    assert thinking.cluster.sampling.processors == (budget,)


@pytest.mark.parametrize("budget", [None, 20, 5])
async def test_budget_that_cannot_be_kept_is_refused(thinking: House, budget: int | None) -> None:
    message = await rejection(thinking, {"thinking": {"type": "enabled", "budget_tokens": budget}})
    assert message.startswith("thinking.budget_tokens:")


async def test_thinking_is_shown_omitted_or_disabled(thinking: House) -> None:
    adaptive = await message_of(thinking, thinking={"type": "adaptive", "display": "summarized"})
    omitted = await message_of(thinking, thinking={"type": "adaptive", "display": "omitted"})
    disabled = await message_of(thinking, thinking={"type": "disabled"})
    shown = {"type": "thinking", "thinking": "Where?", "signature": SIGNATURE}
    assert adaptive.content[0].model_dump() == shown
    assert omitted.content[0].model_dump() == shown | {"thinking": ""}
    assert [block.type for block in disabled.content] == ["text"]
    assert thinking.cluster.encodes[0].template.options is None
    assert thinking.cluster.template_options == {"enable_thinking": False, "thinking": False}


async def test_count_tokens_counts_what_a_message_would_read(at: House) -> None:
    asked: Body = {"messages": HI, "system": "Be brief."}
    status, reply, headers = await post(at, COUNT, asked)
    assert (status, reply) == (200, {"input_tokens": len("Be brief.\nhi")})
    assert headers["request-id"]
    usage = (await ok(at, MESSAGES, asked | {"max_tokens": 1}))["usage"]
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
async def test_refusal_of_the_leader_has_its_status_and_type(
    at: House, error: EngineError, status: int, kind: str, words: str
) -> None:
    at.cluster.submit_error = error
    async with client(at) as opened:
        with pytest.raises(anthropic.APIStatusError) as refused:
            await opened.messages.create(model=MODEL, max_tokens=5, messages=[*HI])  # pyright: ignore
    assert (refused.value.status_code, refused.value.type) == (status, kind)
    assert words in str(refused.value.api_message)
    body: Any = refused.value.body
    assert body["request_id"] == refused.value.request_id
    assert len(body["request_id"]) == 32
    retry = refused.value.response.headers.get("Retry-After")
    assert retry == (None if error.retry_after_s is None else "3")


async def test_error_after_the_first_text_is_the_last_event(at: House) -> None:
    at.cluster.row_error = WorkerLost("the worker of this request died")
    first, *rest, last = await events(at, HELLO)
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
    assert first["message"]["id"] == f"msg_{last['request_id']}"
    assert [event["type"] for event in rest].count("content_block_delta") == len(SCRIPT) - 1
    async with client(at) as opened:
        with pytest.raises(anthropic.APIError, match="died"):
            async with opened.messages.stream(model=MODEL, max_tokens=5, messages=HI) as stream:
                await stream.until_done()


async def test_paths_versions_models_and_sizes_are_refused_in_the_same_shape() -> None:
    invalid = "invalid_request_error"
    async with house(body_bytes_max=1000) as at:
        for path, fields, headers, status, kind in (
            (f"{MESSAGES}/batches", {}, {}, 404, "not_found_error"),
            (MESSAGES, {"model": "other"}, {}, 404, "not_found_error"),
            (MESSAGES, {}, {"anthropic-version": "2023-01-01"}, 400, invalid),
            (COUNT, {}, {"anthropic-version": "2023-01-01"}, 400, invalid),
            (MESSAGES, {"system": "x" * 1000}, {}, 413, "request_too_large"),
            (MESSAGES, {"system": "x" * 100}, {}, 400, invalid),
        ):
            found, reply, _ = await post(at, path, HELLO | fields, **headers)
            assert (found, reply["type"], reply["error"]["type"]) == (status, "error", kind)
        status, reply, headers = await get(at, MESSAGES)
        assert (status, headers["Allow"]) == (405, "POST")
        assert reply["error"]["type"] == invalid


@pytest.mark.parametrize("kind", ["document", "search_result", "tool_reference"])
async def test_blocks_that_are_not_read_are_unsupported_at_any_place(at: House, kind: str) -> None:
    block = {"type": kind, "source": {"type": "text", "data": "x"}, "title": "t", "content": []}
    for messages, field in (
        ([user(block)], f"{CONTENT}.type"),
        (
            [assistant(USE), user(RESULT | {"content": [block]})],
            "messages[1].content[0].content[0].type",
        ),
    ):
        message = await rejection(at, {"messages": messages})
        assert message == f"{field}: content of type '{kind}' is not supported"


async def test_strict_tool_that_no_grammar_can_hold_is_refused() -> None:
    async with house(tool_call_parser="llama3") as at:
        await ok(at, MESSAGES, HELLO | {"tools": [TOOL]})
        assert (await rejection(at, {"tools": [TOOL | {"strict": True}]})).startswith(
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
    for path in (MESSAGES, COUNT):
        named = {text.split(" ")[0] for text in await warnings(at, path, body)}
        assert named == set(body) - set(HELLO)


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_unknown_fields_are_ignored_with_a_warning(at: House, path: str) -> None:
    large = [{"role": "user", "content": "hi " * 5}] * 2000  # read in a child process
    for messages in (HI, large):
        body = HELLO | {"messages": messages, "later_beta": {"a": 1}, "b" * 400: 2, "user": "x"}
        _, _, headers = await post(at, path, body)
        long, later = (each.split('"')[1] for each in headers.getall("Warning"))
        assert later == "later_beta is ignored: it is not a field of this API"
        assert long.startswith("bbb")
        assert len(long) < 256


async def test_unknown_fields_of_other_families_give_no_warning(at: House) -> None:
    status, _, headers = await post(at, CHAT, {"messages": HI, "later": 1})
    assert (status, "Warning" in headers) == (200, False)


async def test_tool_runner_of_the_beta_runs_its_tool(thinking: House) -> None:
    ran: list[str] = []

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """Look up the weather.

        Args:
            city: Where.
        """
        ran.append(city)
        thinking.cluster.script = ("Sunny", ".")
        return "sunny"

    thinking.cluster.script = (
        '<tool_call>\n{"name": "get_weather", "arg',
        'uments": {"city": "Paris"}}\n</tool_call>',
        "",
    )
    async with client(thinking) as opened:
        message = await opened.beta.messages.tool_runner(
            model=MODEL, max_tokens=16, tools=[get_weather], messages=HI
        ).until_done()
    assert ran == ["Paris"]
    assert message.content[0].type == "text"
    assert message.content[0].text == "Sunny."
    assert [turn.role for turn in thinking.cluster.turns] == ["user", "assistant", "tool"]
