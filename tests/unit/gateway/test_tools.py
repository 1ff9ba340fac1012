"""Calls and reasoning in the output of a chat: a stream carries the same as a whole response."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.gateway.calls import (
    BODIES,
    CALL,
    CHAT,
    GENERATE,
    HI,
    MESSAGES,
    RESPONSES,
    Body,
    chunks,
    failure,
    ok,
    openai_client,
    post,
    refusal,
)
from tests.unit.gateway.cluster import MODEL, House, house

from antiphon.config.parsing import ReasoningParser, ToolParser
from antiphon.wire.sampling import AllowRange, GrammarKind, ThinkingBudget, ThinkingMarks

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
CALLED = [("look", {"at": "Rome"})]
NO = {"type": "function", "function": {"name": "no"}}
LOOK = {"type": "function", "function": {"name": "look"}}
BAD_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}
ANTHROPIC = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
TOO_LONG = "context_length_exceeded"
FORM: Body = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "f", "schema": {"type": "object", "title": "F"}},
    }
}


@pytest.fixture
def at(thinking: House) -> House:
    return thinking


def _called(message: Body) -> list[tuple[str, object]]:
    """Names and arguments of the calls of a message."""
    functions = [call["function"] for call in message["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


async def _choice(at: House, body: Body) -> Body:
    """The only choice of a chat, with the fields of its message."""
    (choice,) = (await ok(at, CHAT, {"messages": HI} | body))["choices"]
    return choice | choice["message"]


async def _streamed(at: House, body: Body) -> Body:
    """A message and the reason it ended, joined from the chunks of a stream."""
    message: Body = {"content": "", "reasoning_content": "", "tool_calls": []}
    calls = message["tool_calls"]
    for event in await chunks(at, CHAT, {"messages": HI} | body):
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(calls):
                    assert call["id"]
                    assert call["function"]["arguments"] == ""
                    calls.append(call)
                else:
                    assert call["id"] is None
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


async def test_reasoning_and_calls_are_apart_from_the_content(at: House) -> None:
    choice = await _choice(at, {"tools": TOOLS})
    for message in (choice, await _streamed(at, {"tools": TOOLS})):
        assert _called(message) == CALLED
        assert (message["content"], message["reasoning_content"]) == ("Let me see.", "Where?")
        assert message["finish_reason"] == "tool_calls"
    assert at.cluster.template_tools[0]["name"] == "look"


async def test_openai_client_reads_calls(at: House) -> None:
    async with openai_client(at) as client:
        tools: Any = TOOLS
        reply = await client.chat.completions.create(model=MODEL, messages=HI, tools=tools)
    calls = reply.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].type == "function"
    assert calls[0].function.name == "look"


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_or_by_choice_nothing_is_a_call(at: House, fields: Body) -> None:
    choice = await _choice(at, fields)
    assert (choice["content"], choice["finish_reason"]) == (f"Let me see. {CALL}", "stop")
    assert at.cluster.template_tools is None


async def test_reasoning_may_stay_in_the_content_or_come_at_once(at: House) -> None:
    choice = await _choice(at, {"separate_reasoning": False})
    assert choice["content"].startswith("<think>Where?</think>")
    events = await chunks(at, CHAT, {"messages": HI, "stream_reasoning": False})
    deltas = [event["choices"][0]["delta"] for event in events]
    assert [d["reasoning_content"] for d in deltas if d.get("reasoning_content")] == ["Where?"]


@pytest.mark.parametrize("choice", ["required", LOOK], ids=["any", "named"])
@pytest.mark.parametrize("fields", [{}, FORM], ids=["alone", "with a response format"])
async def test_required_call_is_constrained_to_its_form_after_reasoning(
    at: House, choice: object, fields: Body
) -> None:
    await ok(at, CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": choice} | fields)
    grammar = at.cluster.grammar
    assert grammar.kind is GrammarKind.STRUCTURAL_TAG
    assert "</think>" in grammar.text
    assert "look" in grammar.text
    assert '"title":"F"' not in grammar.text


async def test_form_of_the_output_begins_after_reasoning(at: House) -> None:
    await post(at, CHAT, {"messages": HI, "regex": "[0-9]+"})
    assert "</think>" in at.cluster.grammar.text
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    await post(at, CHAT, {"messages": HI, "regex": "[0-9]+"} | off)
    assert at.cluster.grammar.text == "[0-9]+"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": NO}, "tool_choice"),
    ],
)
async def test_tools_that_cannot_be_called_are_refused(at: House, fields: Body, param: str) -> None:
    assert await refusal(at, CHAT, {"messages": HI} | fields) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [BAD_SCHEMA]}, "tools[0].function.parameters", "invalid_function_parameters"),
        ({"max_completion_tokens": 60}, "max_completion_tokens", TOO_LONG),
        ({"max_tokens": 65}, "max_tokens", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 99}]}, "messages", TOO_LONG),
    ],
)
async def test_code_and_param_of_an_error_are_those_of_openai(
    at: House, fields: Body, param: str, code: str
) -> None:
    body = {"messages": [{"role": "user", "content": "12345"}]} | fields
    status, error = await failure(at, CHAT, body)
    assert (status, error["param"], error["code"]) == (400, param, code)


async def test_number_in_a_schema_that_cannot_be_read_is_refused(at: House) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}], "tools": [{"n": 1e999}]}'
    assert await refusal(at, CHAT, body) == (400, "tools[0]")


async def test_model_of_unknown_tool_format_is_not_asked_to_call() -> None:
    async with house() as at:
        status, error = await failure(at, CHAT, {"messages": HI, "tools": TOOLS})
        assert (status, error["param"], error["code"]) == (400, "tools", "unsupported")
        at.cluster.script = ('[{"name": "look", ', '"parameters": {}}]')
        choice = await _choice(at, {"tools": TOOLS, "tool_choice": "required"})
        assert _called(choice) == [("look", {})]


async def test_finished_output_is_parsed(at: House) -> None:
    body = {"text": f"Hm. {CALL}", "tools": TOOLS, "tool_call_parser": "qwen25"}
    reply = await ok(at, "/parse_function_call", body)
    (call,) = reply["calls"]
    assert (reply["normal_text"], call["name"], call["tool_index"]) == ("Hm.", "look", 0)
    assert json.loads(call["parameters"]) == {"at": "Rome"}
    thought = {"text": "<think>Hm.</think>Yes.", "reasoning_parser": "qwen3"}
    separated = await ok(at, "/separate_reasoning", thought)
    assert separated == {"reasoning_text": "Hm.", "text": "Yes."}
    for path, wrong in (
        ("/parse_function_call", body | {"tool_call_parser": "no"}),
        ("/separate_reasoning", thought | {"reasoning_parser": "no"}),
    ):
        assert (await post(at, path, wrong)).status == 400


async def test_formats_are_detected_from_the_chat_template() -> None:
    auto = {"tool_call_parser": ToolParser.AUTO, "reasoning_parser": ReasoningParser.AUTO}
    async with house(**auto) as at:
        at.cluster.shown = ("hermes", "qwen3")
        at.cluster.script = ("<think>Where?</think>", CALL)
        choice = await _choice(at, {"tools": TOOLS})
        assert (choice["reasoning_content"], _called(choice)) == ("Where?", CALLED)


async def test_reasoning_tokens_are_counted(at: House) -> None:
    at.cluster.thought = 3
    body: Body = {"messages": HI, "n": 2, "tools": TOOLS}
    usage = (await ok(at, CHAT, body))["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert usage["reasoning_tokens"] == 6
    counted = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = await chunks(at, CHAT, body | counted)
    counts = [event["usage"]["reasoning_tokens"] for event in events if event["usage"]]
    assert counts == sorted(counts)
    assert events[-1]["usage"] == usage
    marks = at.cluster.submits[-1].stop.thinking
    assert marks == ThinkingMarks(begin="<think>", end="</think>", cuts=("<tool_call>",))


async def test_marks_of_calls_end_reasoning_only_with_tools(at: House) -> None:
    await post(at, CHAT, {"messages": HI})
    marks = at.cluster.submits[-1].stop.thinking
    assert marks == ThinkingMarks(begin="<think>", end="</think>")


async def test_strict_tool_that_no_grammar_can_hold_is_refused_by_its_field() -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    strict = {"strict": True}
    async with house(tool_call_parser="llama3") as at:
        chat = {"messages": HI, "tools": [{"type": "function", "function": tool | strict}]}
        status, error = await failure(at, CHAT, chat)
        assert (status, "'tools[0].function.strict'" in str(error)) == (400, True)
        body: Body = {"input": "x", "store": False}
        for loose in ({}, {"strict": False}):
            await ok(at, RESPONSES, body | {"tools": [{"type": "function"} | tool | loose]})
        body["tools"] = [{"type": "function"} | tool | strict]
        status, error = await failure(at, RESPONSES, body)
        assert (status, "'tools[0].strict'" in str(error)) == (400, True)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_reasoning_is_ended_by_its_budget(path: str) -> None:
    body = BODIES[path] | {"max_thinking_tokens": 5}

    def with_processor(name: str, params: Body) -> Body:
        custom: Body = {"custom_params": params}
        inside = {"sampling_params": custom} if path == GENERATE else custom
        return body | {"custom_logit_processor": name} | inside

    async with house(reasoning_parser="qwen3") as at:
        at.cluster.words = {"<think>": 7, "</think>": 8}
        await ok(at, path, body)
        budget = ThinkingBudget(tokens_max=5, begin_id=7, closing_ids=(8,))
        assert at.cluster.sampling.processors == (budget,)
        await ok(at, path, with_processor("allow_range", {"first": 1, "last": 9}))
        assert at.cluster.sampling.processors == (AllowRange(first=1, last=9), budget)
        twice = {"tokens_max": 1, "begin_id": 7, "closing_ids": [8]}
        refused = await refusal(at, path, with_processor("thinking_budget", twice))
        assert refused == (400, "max_thinking_tokens")
    for reasoning in ("none", "kimi"):
        async with house(reasoning_parser=reasoning) as at:
            assert await refusal(at, path, body) == (400, "max_thinking_tokens")


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"tools": TOOLS}, "tools: the tool call format of this model is unknown"),
        (MESSAGES, {"max_tokens": 8, "tools": [ANTHROPIC]}, "tools: the tool call format"),
        ("/api/chat", {"tools": TOOLS}, "tools: the tool call format of this model is unknown"),
        ("/api/chat", {"think": True}, "think: the reasoning format of this model is unknown"),
    ],
)
async def test_model_of_unknown_formats_is_offered_no_tools(
    path: str, fields: Body, message: str
) -> None:
    async with house() as world:
        status, error = await failure(world, path, {"model": MODEL, "messages": HI} | fields)
        assert (status, message in json.dumps(error)) == (400, True)
        assert not world.cluster.encodes


async def test_tools_go_with_a_response_format(at: House) -> None:
    body: Body = {"tools": TOOLS} | FORM
    assert _called(await _choice(at, body)) == CALLED
    grammar = at.cluster.grammar
    assert grammar.kind is GrammarKind.STRUCTURAL_TAG
    assert '"title":"F"' in grammar.text
    assert "look" in grammar.text
    at.cluster.script = ('{"a": ', "1}")
    choice = await _choice(at, body)
    assert (choice["content"], choice["tool_calls"]) == ('{"a": 1}', None)


async def test_response_format_alone_constrains_if_no_tool_may_be_called(at: House) -> None:
    await post(at, CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": "none"} | FORM)
    assert "look" not in at.cluster.grammar.text
    assert '"title":"F"' in at.cluster.grammar.text


async def test_call_of_a_tool_that_was_not_offered_is_text(at: House) -> None:
    called = CALL.replace("look", "smell")
    at.cluster.script = (called, "")
    choice = await _choice(at, {"tools": TOOLS})
    assert (choice["content"], choice["finish_reason"]) == (called, "stop")
    assert (await _streamed(at, {"tools": TOOLS}))["content"] == called
