"""Custom tools, namespaces, built-in tools and reasoning that the client carries."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.gateway.calls import (
    BODIES,
    CHAT,
    RESPONSES,
    Body,
    ok,
    openai_client,
    post,
    refusal,
)
from tests.unit.gateway.cluster import House, house
from tests.unit.gateway.keyed import bearer, key_of, keyed
from tests.unit.gateway.test_responses import ADD, INPUT, THINKING, create, events, refused

from antiphon.config.gateway import AccessConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

COUNT = f"{RESPONSES}/input_tokens"
PATCH: Body = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: WORD"},
}
CRM: Body = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [ADD, PATCH]}
SEALED = ["reasoning.encrypted_content"]
BUILT_IN: Body = {"type": "web_search"}


def reasoning(sealed: str) -> Body:
    return {"type": "reasoning", "summary": [], "encrypted_content": sealed}


def user(text: str) -> Body:
    return {"role": "user", "content": text}


def calling(name: str, **arguments: object) -> tuple[str, ...]:
    call = json.dumps({"name": name, "arguments": arguments})
    return ("<tool_call>\n", call[:-5], call[-5:] + "\n</tool_call>", "")


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house(tool_call_parser="hermes", reasoning_parser="qwen3") as world:
        yield world


async def sealed_reasoning(at: House, **headers: str) -> str:
    """Encrypted reasoning of a response."""
    at.cluster.script = THINKING
    reply = await ok(at, RESPONSES, INPUT | {"include": SEALED}, **headers)
    return reply["output"][0]["encrypted_content"]


async def warnings(at: House, path: str, body: Body) -> list[str]:
    status, reply, headers = await post(at, path, body)
    assert status == 200, reply
    return headers.getall("Warning")


async def test_built_in_tools_are_left_out_with_a_warning(at: House) -> None:
    tools = [BUILT_IN, ADD, {"type": "mcp", "server_label": "x"}]
    status, reply, headers = await post(at, RESPONSES, INPUT | {"tools": tools})
    assert status == 200, reply
    assert [tool["name"] for tool in at.cluster.template_tools] == ["add"]
    assert [tool["type"] for tool in reply["tools"]] == ["function"]
    warnings = [each.split(" was")[0] for each in headers.getall("Warning")]
    assert warnings == ['299 antiphon "tools[0]', '299 antiphon "tools[2]']


async def test_options_that_change_nothing_are_left_out_with_a_warning(at: House) -> None:
    body = {
        "input": [user("hi"), {"type": "web_search_call", "id": "w", "status": "completed"}],
        "store": False,
        "service_tier": "flex",
        "reasoning": {"summary": "concise"},
        "stream_options": {"include_obfuscation": True},
        "include": ["web_search_call.results"],
    }
    assert len(await warnings(at, RESPONSES, body)) == 5


async def test_custom_tool_is_called_with_text(at: House) -> None:
    text = "*** Begin\n+ä"
    at.cluster.script = calling("apply_patch", input=text)
    (item,) = (await create(at, tools=[PATCH]))["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "apply_patch")
    assert item["input"] == text
    (tool,) = at.cluster.template_tools
    assert "start: WORD" in tool["description"]
    read = await events(at, tools=[PATCH])
    assert [event["type"].removeprefix("response.") for event in read[2:-1]] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert read[4]["input"] == text
    at.cluster.script = ("ok",)
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    await create(at, input=[user("patch"), item, output], tools=[PATCH])
    _, assistant, result = at.cluster.turns
    (call,) = assistant.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("apply_patch", {"input": text})
    assert (result.role, result.content) == ("tool", "done")


async def test_namespace_is_a_part_of_the_name_that_the_model_sees(at: House) -> None:
    at.cluster.script = calling("crm__add", a=2, b=3)
    reply = await create(at, tools=[CRM])
    names = [tool["name"] for tool in at.cluster.template_tools]
    assert names == ["crm__add", "crm__apply_patch"]
    (item,), (tool,) = reply["output"], reply["tools"]
    assert (item["name"], item["namespace"], tool["name"]) == ("add", "crm", "crm")
    at.cluster.script = ("5",)
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "5"}
    await create(at, input=[user("add"), item, output], tools=[CRM])
    assert at.cluster.turns[1].tool_calls[0].name == "crm__add"


async def test_custom_tool_may_be_the_choice(at: House) -> None:
    at.cluster.script = ('<tool_call>\n{"name": "apply_patch", "arguments": {"input": "x"}}\n', "")
    await create(at, tools=[ADD, PATCH], tool_choice={"type": "custom", "name": "apply_patch"})
    assert "apply_patch" in at.cluster.grammar.text
    assert '"add"' not in at.cluster.grammar.text


async def test_reasoning_is_returned_sealed_and_read_again(at: House) -> None:
    at.cluster.script = THINKING
    asked = {"include": SEALED, "reasoning": {"effort": "low"}}
    thought, message = (await create(at, **asked))["output"]
    assert "so it is" not in thought["encrypted_content"]
    ends = [e for e in await events(at, **asked) if e["type"] == "response.output_item.done"]
    assert ends[0]["item"]["encrypted_content"]
    sealed = reasoning(thought["encrypted_content"])
    await create(at, input=[user("hi"), sealed, message, user("on")])
    assert at.cluster.turns[1].reasoning_content == "so it is"


async def test_reasoning_is_not_sealed_unless_included(at: House) -> None:
    at.cluster.script = THINKING
    thought, _ = (await create(at))["output"]
    assert thought["encrypted_content"] is None


async def test_sealed_reasoning_that_was_changed_is_refused(at: House) -> None:
    sealed = await sealed_reasoning(at)
    changed = [
        sealed[:place] + ("A" if sealed[place] != "A" else "B") + sealed[place + 1 :]
        for place in (len(sealed) // 2, 3, len(sealed) - 5)
    ]
    for wrong in (*changed, "", "x", "ö", "A" * 200):
        refusal = await refused(at, input=[reasoning(wrong), user("on")])
        assert refusal == (400, "input[0].encrypted_content")


async def test_sealed_reasoning_is_read_by_every_gateway_with_the_key_and_by_no_other() -> None:
    def gateway(**access: Any) -> AbstractAsyncContextManager[House]:
        return house(reasoning_parser="qwen3", access=AccessConfig(**access))

    async with gateway(reasoning_key="one") as one:
        sealed = await sealed_reasoning(one)
    body = INPUT | {"input": [reasoning(sealed), user("on")]}
    for access, status in (
        ({"reasoning_key": "one"}, 200),
        ({"reasoning_key": "two"}, 400),
        ({}, 400),
    ):
        async with gateway(**access) as other:
            assert (await post(other, RESPONSES, body)).status == status, access


async def test_sealed_reasoning_of_another_tenant_is_refused(tmp_path: Path) -> None:
    access = keyed(tmp_path, {"a": {}, "b": {}})
    async with house(reasoning_parser="qwen3", access=access) as world:
        a, b = bearer(key_of("a")), bearer(key_of("b"))
        body = INPUT | {"input": [reasoning(await sealed_reasoning(world, **a)), user("on")]}
        await ok(world, RESPONSES, body, **a)
        assert (await post(world, RESPONSES, body, **b)).status == 400


async def test_openai_sdk_reads_custom_calls_and_sealed_reasoning(at: House) -> None:
    at.cluster.script = (*THINKING[:4], *calling("apply_patch", input="x"))
    async with openai_client(at) as opened:
        response = await opened.responses.create(
            model="toy",
            input="hi",
            store=False,
            include=["reasoning.encrypted_content"],
            tools=[{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}],
        )
    thought, call = response.output
    assert thought.type == "reasoning"
    assert thought.encrypted_content
    assert call.type == "custom_tool_call"
    assert call.input == "x"


@pytest.mark.parametrize(
    ("path", "fields"),
    [(RESPONSES, {"text": {"verbosity": "low"}}), (CHAT, {"verbosity": "low"})],
)
async def test_verbosity_is_given_to_the_chat_template(at: House, path: str, fields: Body) -> None:
    reply = await ok(at, path, BODIES[path] | fields)
    assert at.cluster.template_options["verbosity"] == "low"
    if path == RESPONSES:
        assert reply["text"]["verbosity"] == "low"


async def test_truncation_leaves_out_the_oldest_items(at: House) -> None:
    old = [user(f"{n} " + "x" * 20) for n in range(5)]
    items = [{"role": "system", "content": "S"}, *old, user("last")]
    assert await refused(at, input=items) == (400, "input")
    reply = await create(at, input=items, truncation="auto")
    assert reply["truncation"] == "auto"
    turns = at.cluster.turns
    assert (turns[0].content, turns[-1].content) == ("S", "last")
    assert len(turns) < len(items)
    assert await refused(at, input=[user("x" * 100)], truncation="auto") == (400, "input")


async def test_input_tokens_are_counted_as_they_would_be_read(at: House) -> None:
    body: Body = {"input": "hi", "instructions": "Be brief.", "tools": [ADD, {"type": "mcp"}]}
    status, reply, headers = await post(at, COUNT, body)
    assert (status, reply["object"]) == (200, "response.input_tokens")
    assert at.cluster.submits == []
    whole = await create(at, **body)
    assert whole["usage"]["input_tokens"] == reply["input_tokens"]
    assert "Warning" in headers
    async with openai_client(at) as client:
        counted = await client.responses.input_tokens.count(
            model="toy", input="hi", instructions="Be brief."
        )
    assert counted.input_tokens == reply["input_tokens"]
    assert (await post(at, COUNT, body | {"model": "other"})).status == 404


async def test_input_too_long_to_be_counted_is_refused_by_its_name(at: House) -> None:
    at.cluster.token_characters = 4  # then a text this long is refused unread
    await ok(at, COUNT, {"input": "x"})
    assert await refusal(at, COUNT, {"input": "x" * 100_000}) == (400, "input")
