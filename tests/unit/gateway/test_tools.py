"""Calls and thinking in the answers of a chat: whole and streamed say the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest
from tests.unit.gateway.cluster import MODEL, House, house
from tests.unit.gateway.test_http import CHAT, HI, post, stream

from antiphon.config.parsing import ReasoningParser, ToolParser
from antiphon.wire.sampling import AllowRange, GrammarKind, ThinkingBudget, ThinkingMarks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Body = dict[str, Any]
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
ANTHROPIC = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "Rome"}}\n</tool_call>'


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house(tool_call_parser="hermes", reasoning_parser="qwen3") as world:
        world.cluster.script = (
            "<thi", "nk>Where?", "</think>", "Let me see. ", CALL[:8], CALL[8:40], CALL[40:], "",
        )  # fmt: skip
        yield world


def _called(calls: Any) -> list[tuple[str, object]]:
    told = calls
    return [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in told]


async def _streamed(at: House, body: Body) -> Body:
    """A message and the reason it ended, put together from the chunks of a stream."""
    message: Body = {"content": "", "reasoning_content": "", "tool_calls": []}
    calls = message["tool_calls"]
    for event in (await stream(at, CHAT, body))[:-1]:
        for choice in json.loads(event)["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] = str(message[name]) + (delta.get(name) or "")
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


async def test_thinking_and_calls_are_told_apart_from_the_content(at: House) -> None:
    body: Body = {"messages": HI, "tools": TOOLS}
    _, reply, _ = await post(at, CHAT, body)
    (choice,) = reply["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "Where?"
    assert message["content"] == "Let me see."
    assert _called(message["tool_calls"]) == [("look", {"at": "Rome"})]
    assert choice["finish_reason"] == "tool_calls"
    streamed = await _streamed(at, body)
    assert _called(streamed.pop("tool_calls")) == [("look", {"at": "Rome"})]
    assert streamed == {
        "content": "Let me see.",
        "reasoning_content": "Where?",
        "finish_reason": "tool_calls",
    }
    shown = json.loads(at.cluster.encodes[0].template.tools or "")
    assert shown[0]["function"]["name"] == "look"


async def test_the_client_reads_calls(at: House) -> None:
    async with openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            tools=TOOLS,  # pyright: ignore[reportArgumentType]
        )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].type == "function"
    assert calls[0].function.name == "look"


async def test_without_tools_or_by_choice_nothing_is_a_call(at: House) -> None:
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        _, reply, _ = await post(at, CHAT, {"messages": HI} | body)
        (choice,) = reply["choices"]
        assert choice["message"]["content"] == f"Let me see. {CALL}"
        assert choice["finish_reason"] == "stop"
        assert at.cluster.encodes[-1].template.tools is None


async def test_thinking_may_stay_in_the_content_or_come_at_once(at: House) -> None:
    body: Body = {"messages": HI, "separate_reasoning": False}
    _, reply, _ = await post(at, CHAT, body)
    (choice,) = reply["choices"]
    assert str(choice["message"]["content"]).startswith("<think>Where?</think>")
    events = await stream(at, CHAT, {"messages": HI, "stream_reasoning": False})
    told = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert [d["reasoning_content"] for d in told if d.get("reasoning_content")] == ["Where?"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_a_call_that_has_to_be_is_held_to_its_form_behind_the_thinking(
    at: House, choice: object
) -> None:
    await post(at, CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": choice})
    grammar = at.cluster.submits[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.STRUCTURAL_TAG
    assert "</think>" in grammar.text
    assert "look" in grammar.text


async def test_a_form_begins_behind_the_thinking(at: House) -> None:
    await post(at, CHAT, {"messages": HI, "regex": "[0-9]+"})
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    await post(at, CHAT, {"messages": HI, "regex": "[0-9]+"} | off)
    behind, plain = (submit.sampling.grammar for submit in at.cluster.submits)
    assert behind is not None
    assert "</think>" in behind.text
    assert plain is not None
    assert plain.text == "[0-9]+"


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice",
        ),
    ],
)
async def test_tools_that_cannot_be_called_are_refused(at: House, said: Body, param: str) -> None:
    status, reply, _ = await post(at, CHAT, {"messages": HI} | said)
    assert (status, reply["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("said", "param", "code"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}]},
            "tools[0].function.parameters",
            "invalid_function_parameters",
        ),
        ({"max_completion_tokens": 60}, "max_completion_tokens", "context_length_exceeded"),
        ({"max_tokens": 65}, "max_tokens", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": "x" * 99}]},
            "messages",
            "context_length_exceeded",
        ),
    ],
)
async def test_code_and_param_of_a_refusal_are_those_of_openai(
    at: House, said: Body, param: str, code: str
) -> None:
    status, reply, _ = await post(
        at, CHAT, {"messages": [{"role": "user", "content": "12345"}]} | said
    )
    error = reply["error"]
    assert (status, error["param"], error["code"]) == (400, param, code)


async def test_a_number_in_a_schema_that_nobody_can_read_is_refused(at: House) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}], "tools": [{"n": 1e999}]}'
    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(at.url + CHAT, data=body, headers=headers) as reply,
    ):
        assert (reply.status, (await reply.json())["error"]["param"]) == (400, "tools[0]")


async def test_a_model_of_which_nobody_knows_how_it_calls_is_not_asked_to() -> None:
    async with house() as at:
        status, reply, _ = await post(at, CHAT, {"messages": HI, "tools": TOOLS})
        error = reply["error"]
        assert (status, error["param"], error["code"]) == (400, "tools", "unsupported")
        body = {"messages": HI, "tools": TOOLS, "tool_choice": "required"}
        at.cluster.script = ('[{"name": "look", ', '"parameters": {}}]')
        _, reply, _ = await post(at, CHAT, body)
        (choice,) = reply["choices"]
        assert _called(choice["message"]["tool_calls"]) == [("look", {})]


async def test_answers_are_taken_apart_after_the_fact(at: House) -> None:
    body = {"text": f"Hm. {CALL}", "tools": TOOLS, "tool_call_parser": "qwen25"}
    _, reply, _ = await post(at, "/parse_function_call", body)
    (call,) = reply["calls"]
    assert (reply["normal_text"], call["name"], call["tool_index"]) == ("Hm.", "look", 0)
    assert json.loads(str(call["parameters"])) == {"at": "Rome"}
    thought = {"text": "<think>Hm.</think>Yes.", "reasoning_parser": "qwen3"}
    _, reply, _ = await post(at, "/separate_reasoning", thought)
    assert reply == {"reasoning_text": "Hm.", "text": "Yes."}
    for path, wrong in (
        ("/parse_function_call", body | {"tool_call_parser": "no"}),
        ("/separate_reasoning", thought | {"reasoning_parser": "no"}),
    ):
        assert (await post(at, path, wrong))[0] == 400


async def test_what_the_chat_template_shows_is_enough() -> None:
    left = {"tool_call_parser": ToolParser.AUTO, "reasoning_parser": ReasoningParser.AUTO}
    async with house(**left) as at:
        at.cluster.shown = ("hermes", "qwen3")
        at.cluster.script = ("<think>Where?</think>", CALL)
        _, reply, _ = await post(at, CHAT, {"messages": HI, "tools": TOOLS})
        (choice,) = reply["choices"]
        assert choice["message"]["reasoning_content"] == "Where?"
        assert _called(choice["message"]["tool_calls"]) == [("look", {"at": "Rome"})]


async def test_the_tokens_of_thinking_are_counted(at: House) -> None:
    at.cluster.thought = 3
    body: Body = {"messages": HI, "n": 2, "tools": TOOLS}
    _, reply, _ = await post(at, CHAT, body)
    usage = reply["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert usage["reasoning_tokens"] == 6
    counted = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = [json.loads(event) for event in (await stream(at, CHAT, body | counted))[:-1]]
    told = [event["usage"]["reasoning_tokens"] for event in events if event["usage"]]
    assert told == sorted(told)
    assert events[-1]["usage"] == usage
    marks = at.cluster.submits[-1].stop.thinking
    assert marks == ThinkingMarks(begin="<think>", end="</think>", cuts=("<tool_call>",))


async def test_marks_of_calls_end_thinking_only_where_there_are_calls(at: House) -> None:
    await post(at, CHAT, {"messages": HI})
    marks = at.cluster.submits[-1].stop.thinking
    assert marks == ThinkingMarks(begin="<think>", end="</think>")


async def test_a_strict_tool_that_nothing_can_hold_is_refused_where_it_was_asked_for() -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    async with house(tool_call_parser="llama3") as at:
        body = chat | {"tools": [{"type": "function", "function": tool | {"strict": True}}]}
        status, reply, _ = await post(at, "/v1/chat/completions", body)
        assert status == 400
        assert "'tools[0].function.strict'" in str(reply)
        said = {"type": "function"} | tool
        for strict, expected in ({}, 200), ({"strict": False}, 200), ({"strict": True}, 400):
            body = {"input": "x", "store": False, "tools": [said | strict]}
            status, reply, _ = await post(at, "/v1/responses", body)
            assert status == expected, reply
        assert "'tools[0].strict'" in str(reply)


@pytest.mark.parametrize("path", [CHAT, "/generate"])
async def test_thinking_is_ended_by_its_budget(path: str) -> None:
    prompt = {"text": "x"} if path == "/generate" else {"messages": HI}
    async with house(reasoning_parser="qwen3") as at:
        at.cluster.words = {"<think>": 7, "</think>": 8}
        status, reply, _ = await post(at, path, prompt | {"max_thinking_tokens": 5})
        assert status == 200, reply
        (budget,) = at.cluster.submits[0].sampling.processors
        assert budget == ThinkingBudget(tokens_max=5, begin_id=7, closing_ids=(8,))
        at.cluster.submits.clear()
        named = prompt | {"max_thinking_tokens": 5, "custom_logit_processor": "allow_range"}
        within = {"first": 1, "last": 9}
        inside = {"sampling_params": {"custom_params": within}}
        where = inside if path == "/generate" else {"custom_params": within}
        status, reply, _ = await post(at, path, named | where)
        assert status == 200, reply
        assert at.cluster.submits[0].sampling.processors == (AllowRange(first=1, last=9), budget)
        twice = {"tokens_max": 1, "begin_id": 7, "closing_ids": [8]}
        inside = {"sampling_params": {"custom_params": twice}}
        where = inside if path == "/generate" else {"custom_params": twice}
        named["custom_logit_processor"] = "thinking_budget"
        status, reply, _ = await post(at, path, named | where)
        assert status == 400
        assert "'param': 'max_thinking_tokens'" in str(reply)
        at.cluster.words = {}
    for reasoning in ("none", "kimi"):
        async with house(reasoning_parser=reasoning) as at:
            status, reply, _ = await post(at, path, prompt | {"max_thinking_tokens": 5})
            assert status == 400
            assert "'param': 'max_thinking_tokens'" in str(reply)


@pytest.mark.parametrize(
    ("door", "said", "named"),
    [
        (CHAT, {"tools": TOOLS}, "tools: the tool call format of this model is unknown"),
        ("/v1/messages", {"max_tokens": 8, "tools": [ANTHROPIC]}, "tools: the tool call format"),
        ("/api/chat", {"tools": TOOLS}, "tools: the tool call format of this model is unknown"),
        ("/api/chat", {"think": True}, "think: the reasoning format of this model is unknown"),
    ],
)
async def test_a_model_of_no_known_form_is_offered_no_tools(
    door: str, said: Body, named: str
) -> None:
    async with house() as world:
        status, reply, _ = await post(world, door, {"model": MODEL, "messages": HI} | said)
        assert status == 400
        assert named in json.dumps(reply)
        assert not world.cluster.encodes


FORM: Body = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "f", "schema": {"type": "object", "title": "F"}},
    }
}


async def test_tools_go_with_a_response_format(at: House) -> None:
    body: Body = {"messages": HI, "tools": TOOLS} | FORM
    status, reply, _ = await post(at, CHAT, body)
    assert status == 200, reply
    (choice,) = reply["choices"]
    assert _called(choice["message"]["tool_calls"]) == [("look", {"at": "Rome"})]
    grammar = at.cluster.submits[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.STRUCTURAL_TAG
    assert '"title":"F"' in grammar.text
    assert "look" in grammar.text
    at.cluster.script = ('{"a": ', "1}")
    _, reply, _ = await post(at, CHAT, body)
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == '{"a": 1}'
    assert choice["message"]["tool_calls"] is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_call_that_has_to_be_wins_over_a_response_format(at: House, choice: object) -> None:
    body: Body = {"messages": HI, "tools": TOOLS, "tool_choice": choice} | FORM
    status, reply, _ = await post(at, CHAT, body)
    assert status == 200, reply
    grammar = at.cluster.submits[0].sampling.grammar
    assert grammar is not None
    assert '"title":"F"' not in grammar.text
    assert "look" in grammar.text


async def test_response_format_is_all_where_no_tool_may_be_called(at: House) -> None:
    body: Body = {"messages": HI, "tools": TOOLS, "tool_choice": "none"} | FORM
    await post(at, CHAT, body)
    grammar = at.cluster.submits[0].sampling.grammar
    assert grammar is not None
    assert "look" not in grammar.text
    assert '"title":"F"' in grammar.text


async def test_call_of_a_tool_that_was_not_offered_is_text(at: House) -> None:
    called = CALL.replace("look", "smell")
    at.cluster.script = (called, "")
    body: Body = {"messages": HI, "tools": TOOLS}
    _, reply, _ = await post(at, CHAT, body)
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == called
    assert choice["finish_reason"] == "stop"
    streamed = await _streamed(at, body)
    assert streamed["content"] == choice["message"]["content"]
