"""Custom tools, namespaces, built-in tools and reasoning that the client carries."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.unit.gateway.calls import Body, failure, ok, openai_client, post
from tests.unit.gateway.cluster import House, house
from tests.unit.gateway.keyed import key_of, keyed
from tests.unit.gateway.test_responses import ADD, RESPONSES, THINKING, create, events, refusal

from antiphon.config.gateway import AccessConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PATCH: Body = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: WORD"},
}
CRM: Body = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [ADD, PATCH]}
SEALED = ["reasoning.encrypted_content"]


def calling(name: str, **arguments: object) -> tuple[str, ...]:
    call = json.dumps({"name": name, "arguments": arguments})
    return ("<tool_call>\n", call[:-5], call[-5:] + "\n</tool_call>", "")


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house(tool_call_parser="hermes", reasoning_parser="qwen3") as world:
        yield world


def shown_tools(at: House) -> list[Body]:
    tools = at.cluster.encodes[-1].template.tools
    return [each["function"] for each in json.loads(tools)] if tools else []


def outputs(reply: Body) -> list[Body]:
    return reply["output"]


async def test_built_in_tools_are_left_out_with_a_warning(at: House) -> None:
    tools = [{"type": "web_search"}, ADD, {"type": "mcp", "server_label": "x"}]
    body = {"input": "hi", "store": False, "tools": tools}
    status, reply, headers = await post(at, RESPONSES, body)
    assert status == 200, reply
    assert [each["name"] for each in shown_tools(at)] == ["add"]
    assert [each["type"] for each in reply["tools"]] == ["function"]
    warnings = headers.getall("Warning")  # pyright: ignore[reportAttributeAccessIssue]
    assert [each.split(" was")[0] for each in warnings] == [
        '299 antiphon "tools[0]',
        '299 antiphon "tools[2]',
    ]


async def test_options_that_change_nothing_are_left_out_with_a_warning(at: House) -> None:
    body = {
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "web_search_call", "id": "w", "status": "completed"},
        ],
        "store": False,
        "service_tier": "flex",
        "reasoning": {"summary": "concise"},
        "stream_options": {"include_obfuscation": True},
        "include": ["web_search_call.results"],
    }
    status, reply, headers = await post(at, RESPONSES, body)
    assert status == 200, reply
    warnings = headers.getall("Warning")  # pyright: ignore[reportAttributeAccessIssue]
    assert len(warnings) == 5


async def test_custom_tool_is_called_with_text(at: House) -> None:
    at.cluster.script = calling("apply_patch", input="*** Begin\n+ä")
    reply = await create(at, tools=[PATCH])
    (item,) = outputs(reply)
    assert (item["type"], item["name"], item["input"]) == (
        "custom_tool_call",
        "apply_patch",
        "*** Begin\n+ä",
    )
    (tool,) = shown_tools(at)
    assert "start: WORD" in tool["description"]
    told = await events(at, tools=[PATCH])
    kinds = [event["type"] for event in told]
    assert kinds[2:-1] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert told[4]["input"] == "*** Begin\n+ä"
    said = [
        {"role": "user", "content": "patch"},
        item,
        {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"},
    ]
    at.cluster.script = ("ok",)
    await create(at, input=said, tools=[PATCH])
    messages = at.cluster.turns
    assert messages[1].tool_calls[0].name == "apply_patch"
    assert json.loads(messages[1].tool_calls[0].arguments) == {"input": "*** Begin\n+ä"}
    assert (messages[2].role, messages[2].content) == ("tool", "done")


async def test_namespace_is_a_part_of_the_name_that_the_model_sees(at: House) -> None:
    at.cluster.script = calling("crm__add", a=2, b=3)
    reply = await create(at, tools=[CRM])
    assert [each["name"] for each in shown_tools(at)] == ["crm__add", "crm__apply_patch"]
    (item,) = outputs(reply)
    assert (item["name"], item["namespace"]) == ("add", "crm")
    (told,) = reply["tools"]
    assert told["name"] == "crm"
    said = [
        {"role": "user", "content": "add"},
        item,
        {"type": "function_call_output", "call_id": item["call_id"], "output": "5"},
    ]
    at.cluster.script = ("5",)
    await create(at, input=said, tools=[CRM])
    messages = at.cluster.turns
    assert messages[1].tool_calls[0].name == "crm__add"


async def test_custom_tool_may_be_the_choice(at: House) -> None:
    at.cluster.script = ('<tool_call>\n{"name": "apply_patch", "arguments": {"input": "x"}}\n', "")
    await create(at, tools=[ADD, PATCH], tool_choice={"type": "custom", "name": "apply_patch"})
    grammar = at.cluster.grammar
    assert "apply_patch" in grammar.text
    assert '"add"' not in grammar.text


async def test_reasoning_comes_back_sealed_and_is_read(at: House) -> None:
    at.cluster.script = THINKING
    asked = {"include": SEALED, "reasoning": {"effort": "low"}}
    thought, answer = outputs(await create(at, **asked))
    sealed = thought["encrypted_content"]
    assert "so it is" not in sealed
    done = [
        event["item"]
        for event in await events(at, **asked)
        if event["type"] == "response.output_item.done"
    ]
    assert done[0]["encrypted_content"]
    carried = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    said = [{"role": "user", "content": "hi"}, carried, answer, {"role": "user", "content": "on"}]
    await create(at, input=said)
    messages = at.cluster.turns
    assert messages[1].reasoning_content == "so it is"


async def test_reasoning_is_not_sealed_unless_asked_for(at: House) -> None:
    at.cluster.script = THINKING
    thought, _ = outputs(await create(at))
    assert thought["encrypted_content"] is None


async def test_sealed_reasoning_that_was_changed_is_refused(at: House) -> None:
    at.cluster.script = THINKING
    thought, _ = outputs(await create(at, include=SEALED))
    sealed = thought["encrypted_content"]
    for middle in (len(sealed) // 2, 3, len(sealed) - 5):
        other = "A" if sealed[middle] != "A" else "B"
        changed = sealed[:middle] + other + sealed[middle + 1 :]
        item = {"type": "reasoning", "summary": [], "encrypted_content": changed}
        said = [item, {"role": "user", "content": "on"}]
        assert (await refusal(at, input=said))[:2] == (400, "input[0].encrypted_content")
    for nonsense in ("", "x", "ö", "A" * 200):
        item = {"type": "reasoning", "summary": [], "encrypted_content": nonsense}
        said = [item, {"role": "user", "content": "on"}]
        assert (await refusal(at, input=said))[:2] == (400, "input[0].encrypted_content")


async def test_sealed_reasoning_is_read_by_every_gateway_with_the_key_and_by_no_other(
    at: House,
) -> None:
    at.cluster.script = THINKING

    async def sealed_by(access: AccessConfig) -> str:
        async with house(reasoning_parser="qwen3", access=access) as one:
            one.cluster.script = THINKING
            thought, _ = outputs(await create(one, include=SEALED))
            return thought["encrypted_content"]

    async def read_by(access: AccessConfig, sealed: str) -> int:
        item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
        said = [item, {"role": "user", "content": "on"}]
        async with house(reasoning_parser="qwen3", access=access) as one:
            return (await post(one, RESPONSES, {"input": said, "store": False}))[0]

    shared = AccessConfig(reasoning_key="one")
    sealed = await sealed_by(shared)
    assert await read_by(shared, sealed) == 200
    assert await read_by(AccessConfig(reasoning_key="two"), sealed) == 400
    assert await read_by(AccessConfig(), sealed) == 400


async def test_sealed_reasoning_of_another_tenant_is_refused(tmp_path: Path) -> None:
    access = keyed(tmp_path, {"a": {}, "b": {}})
    async with house(reasoning_parser="qwen3", access=access) as world:
        world.cluster.script = THINKING

        def by(tenant: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {key_of(tenant)}"}

        body: Body = {"input": "hi", "store": False, "include": SEALED}
        reply = await ok(world, RESPONSES, body, **by("a"))
        thought, _ = outputs(reply)
        sealed = thought["encrypted_content"]
        item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
        body["input"] = [item, {"role": "user", "content": "on"}]
        await ok(world, RESPONSES, body, **by("a"))
        assert (await post(world, RESPONSES, body, **by("b")))[0] == 400


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


@pytest.mark.parametrize("path", [RESPONSES, "/v1/chat/completions"])
async def test_verbosity_is_given_to_the_chat_template(at: House, path: str) -> None:
    said: Body = (
        {"input": "hi", "store": False, "text": {"verbosity": "low"}}
        if path == RESPONSES
        else {"messages": [{"role": "user", "content": "hi"}], "verbosity": "low"}
    )
    reply = await ok(at, path, said)
    options = at.cluster.encodes[-1].template.options
    assert options is not None
    assert json.loads(options)["verbosity"] == "low"
    if path == RESPONSES:
        assert reply["text"]["verbosity"] == "low"


async def test_truncation_leaves_out_the_oldest_items(at: House) -> None:
    old = [{"role": "user", "content": f"{n} " + "x" * 20} for n in range(5)]
    said = [{"role": "system", "content": "S"}, *old, {"role": "user", "content": "last"}]
    assert (await refusal(at, input=said))[:2] == (400, "input")
    reply = await create(at, input=said, truncation="auto")
    assert reply["truncation"] == "auto"
    messages = at.cluster.turns
    assert messages[0].content == "S"
    assert messages[-1].content == "last"
    assert len(messages) < len(said)
    alone = [{"role": "user", "content": "x" * 100}]
    assert (await refusal(at, input=alone, truncation="auto"))[:2] == (400, "input")


async def test_input_tokens_are_counted_as_they_would_be_read(at: House) -> None:
    said: Body = {"input": "hi", "instructions": "Be brief.", "tools": [ADD, {"type": "mcp"}]}
    status, reply, headers = await post(at, f"{RESPONSES}/input_tokens", said)
    assert status == 200, reply
    assert reply["object"] == "response.input_tokens"
    assert at.cluster.submits == []
    whole = await create(at, **said)
    assert whole["usage"]["input_tokens"] == reply["input_tokens"]
    assert "Warning" in headers
    async with openai_client(at) as opened:
        counted = await opened.responses.input_tokens.count(
            model="toy", input="hi", instructions="Be brief."
        )
    assert counted.input_tokens == reply["input_tokens"]
    status, _, _ = await post(at, f"{RESPONSES}/input_tokens", said | {"model": "other"})
    assert status == 404


async def test_input_too_long_to_be_counted_is_refused_by_its_name(at: House) -> None:
    at.cluster.token_characters = 4  # then a text this long is refused unread
    await ok(at, f"{RESPONSES}/input_tokens", {"input": "x"})
    long = {"input": "x" * 100_000}
    status, error = await failure(at, f"{RESPONSES}/input_tokens", long)
    assert (status, error["param"]) == (400, "input")
