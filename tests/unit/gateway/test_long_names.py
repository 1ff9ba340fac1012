"""Names and ids in conversations are bounded at every API, over HTTP and NATS."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest
from tests.unit.gateway.cluster import MODEL, house

from antiphon.wire.codec import decode, encode
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.generate import GenerateRequest
from antiphon.wire.ids import ClientKey
from antiphon.wire.tokenize import ChatMessage, MessageToolCall

Json = dict[str, Any]

NAME, ID = 256, 1024
USER: Json = {"role": "user", "content": "a"}
CHAT, ITEMS, MESSAGES, OLLAMA = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
)


def _chat(id_: str = "1", name: str = "f", **turn: str) -> Json:
    call = {"id": id_, "function": {"name": name}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [USER, said, {"role": "tool", "content": "b", **turn}]}


def _items(id_: str = "1", name: str = "f", namespace: str = "n", kind: str = "function") -> Json:
    text = "arguments" if kind == "function" else "input"
    call = {"call_id": id_, "name": name, "namespace": namespace, text: "{}"}
    item = {"type": f"{kind}_call" if kind == "function" else "custom_tool_call", **call}
    return {"input": [USER, item]}


def _output(id_: str, kind: str) -> Json:
    return {"input": [USER, {"type": kind, "call_id": id_, "output": "b"}]}


def _messages(id_: str = "1", name: str = "f", answered: str = "1") -> Json:
    use = {"type": "tool_use", "id": id_, "name": name, "input": {}}
    result = {"type": "tool_result", "tool_use_id": answered, "content": "b"}
    turns = [
        USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    return {"max_tokens": 1, "messages": turns}


def _ollama(id_: str = "1", name: str = "f", **turn: str) -> Json:
    said = {"role": "assistant", "tool_calls": [{"id": id_, "function": {"name": name}}]}
    return {"messages": [USER, said, {"role": "tool", "content": "b", **turn}]}


def _long(length: int) -> str:
    return "a" * (length + 1)


CASES = {
    "chat, id": (CHAT, _chat(id_=_long(ID)), "messages[1].tool_calls[0].id", ID),
    "chat, call": (CHAT, _chat(name=_long(NAME)), "messages[1].tool_calls[0].function.name", NAME),
    "chat, answered": (CHAT, _chat(tool_call_id=_long(ID)), "messages[2].tool_call_id", ID),
    "chat, name": (CHAT, _chat(name_=_long(NAME)), "messages[2].name", NAME),
    "responses, id": (ITEMS, _items(id_=_long(ID)), "input[1].call_id", ID),
    "responses, call": (ITEMS, _items(name=_long(NAME)), "input[1].name", NAME),
    "responses, namespace": (ITEMS, _items(namespace=_long(NAME)), "input[1].namespace", NAME),
    "responses, custom id": (ITEMS, _items(id_=_long(ID), kind="custom"), "input[1].call_id", ID),
    "responses, custom call": (
        ITEMS,
        _items(name=_long(NAME), kind="custom"),
        "input[1].name",
        NAME,
    ),
    "responses, answered": (
        ITEMS,
        _output(_long(ID), "function_call_output"),
        "input[1].call_id",
        ID,
    ),
    "responses, custom": (
        ITEMS,
        _output(_long(ID), "custom_tool_call_output"),
        "input[1].call_id",
        ID,
    ),
    "messages, id": (MESSAGES, _messages(id_=_long(ID)), "messages[1].content[0].id", ID),
    "messages, call": (MESSAGES, _messages(name=_long(NAME)), "messages[1].content[0].name", NAME),
    "messages, answered": (
        MESSAGES,
        _messages(answered=_long(ID)),
        "messages[2].content[0].tool_use_id",
        ID,
    ),
    "ollama, id": (OLLAMA, _ollama(id_=_long(ID)), "messages[1].tool_calls[0].id", ID),
    "ollama, call": (
        OLLAMA,
        _ollama(name=_long(NAME)),
        "messages[1].tool_calls[0].function.name",
        NAME,
    ),
    "ollama, answered": (OLLAMA, _ollama(tool_call_id=_long(ID)), "messages[2].tool_call_id", ID),
    "ollama, tool": (OLLAMA, _ollama(tool_name=_long(NAME)), "messages[2].tool_name", NAME),
}


@pytest.mark.parametrize("case", CASES)
async def test_long_name_is_refused_with_its_field_and_its_limit(case: str) -> None:
    path, body, field, most = CASES[case]
    text = msgspec.json.encode(body).replace(b'"name_"', b'"name"')
    shorter = text.replace(b"a" * (most + 1), b"a" * most)
    headers = {"Content-Type": "application/json"}
    async with house() as at, aiohttp.ClientSession(headers=headers) as session:
        async with session.post(at.url + path, data=text) as reply:
            refusal = await reply.text()
            assert reply.status == 400
        assert field in refusal
        beyond = f"{most + 1} characters; the limit is {most}"
        assert beyond in refusal
        async with session.post(at.url + path, data=shorter) as reply:
            assert beyond not in await reply.text()


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage(role="user", content="a", name=_long(ID)),
        ChatMessage(role="tool", content="a", tool_call_id=_long(ID)),
        ChatMessage(
            role="assistant", content="", tool_calls=(MessageToolCall(id=_long(ID), name="f"),)
        ),
        ChatMessage(
            role="assistant", content="", tool_calls=(MessageToolCall(id="1", name=_long(ID)),)
        ),
    ],
    ids=("name", "answered", "id", "call"),
)
def test_long_name_in_a_message_is_refused(message: ChatMessage) -> None:
    request = GenerateRequest(key=ClientKey("k"), model=MODEL, messages=(message,))
    with pytest.raises(InvalidRequest, match=rf"length <= {ID}.*messages"):
        decode(encode(request), (GenerateRequest,))
