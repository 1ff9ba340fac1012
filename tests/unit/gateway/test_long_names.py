"""Names and ids in conversations are bounded at every API, over HTTP and NATS."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.gateway.calls import CHAT, MESSAGES, RESPONSES, post
from tests.unit.gateway.cluster import MODEL, House

from antiphon.wire.codec import decode, encode
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.generate import GenerateRequest
from antiphon.wire.ids import ClientKey
from antiphon.wire.tokenize import ChatMessage, MessageToolCall

Json = dict[str, Any]

NAME, ID = 256, 1024
USER: Json = {"role": "user", "content": "a"}
OLLAMA = "/api/chat"
BLOCK = "messages[%d].content[0]"


def _chat(id_: str = "1", name: str = "f", **turn: str) -> Json:
    call = {"id": id_, "function": {"name": name}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [USER, said, {"role": "tool", "content": "b", **turn}]}


def _items(id_: str = "1", name: str = "f", namespace: str = "n", kind: str = "function") -> Json:
    text = "arguments" if kind == "function" else "input"
    call = {"call_id": id_, "name": name, "namespace": namespace, text: "{}"}
    item = {"type": f"{kind}_call" if kind == "function" else "custom_tool_call", **call}
    return {"input": [USER, item]}


def _output(kind: str) -> Json:
    return {"input": [USER, {"type": kind, "call_id": LONG_ID, "output": "b"}]}


def _messages(id_: str = "1", name: str = "f", result: str = "1") -> Json:
    use = {"type": "tool_use", "id": id_, "name": name, "input": {}}
    block = {"type": "tool_result", "tool_use_id": result, "content": "b"}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [block]}]
    return {"max_tokens": 1, "messages": [USER, *turns]}


def _ollama(id_: str = "1", name: str = "f", **turn: str) -> Json:
    said = {"role": "assistant", "tool_calls": [{"id": id_, "function": {"name": name}}]}
    return {"messages": [USER, said, {"role": "tool", "content": "b", **turn}]}


LONG_ID, LONG_NAME = "a" * (ID + 1), "a" * (NAME + 1)
CALL = "messages[1].tool_calls[0]"
CASES = {
    "chat, id": (CHAT, _chat(id_=LONG_ID), f"{CALL}.id", ID),
    "chat, call": (CHAT, _chat(name=LONG_NAME), f"{CALL}.function.name", NAME),
    "chat, result": (CHAT, _chat(tool_call_id=LONG_ID), "messages[2].tool_call_id", ID),
    "chat, name": (CHAT, _chat(name_=LONG_NAME), "messages[2].name", NAME),
    "responses, id": (RESPONSES, _items(id_=LONG_ID), "input[1].call_id", ID),
    "responses, call": (RESPONSES, _items(name=LONG_NAME), "input[1].name", NAME),
    "responses, namespace": (RESPONSES, _items(namespace=LONG_NAME), "input[1].namespace", NAME),
    "custom, id": (RESPONSES, _items(id_=LONG_ID, kind="custom"), "input[1].call_id", ID),
    "custom, call": (RESPONSES, _items(name=LONG_NAME, kind="custom"), "input[1].name", NAME),
    "responses, result": (RESPONSES, _output("function_call_output"), "input[1].call_id", ID),
    "custom, result": (RESPONSES, _output("custom_tool_call_output"), "input[1].call_id", ID),
    "messages, id": (MESSAGES, _messages(id_=LONG_ID), f"{BLOCK % 1}.id", ID),
    "messages, call": (MESSAGES, _messages(name=LONG_NAME), f"{BLOCK % 1}.name", NAME),
    "messages, result": (MESSAGES, _messages(result=LONG_ID), f"{BLOCK % 2}.tool_use_id", ID),
    "ollama, id": (OLLAMA, _ollama(id_=LONG_ID), f"{CALL}.id", ID),
    "ollama, call": (OLLAMA, _ollama(name=LONG_NAME), f"{CALL}.function.name", NAME),
    "ollama, result": (OLLAMA, _ollama(tool_call_id=LONG_ID), "messages[2].tool_call_id", ID),
    "ollama, tool": (OLLAMA, _ollama(tool_name=LONG_NAME), "messages[2].tool_name", NAME),
}


@pytest.mark.parametrize("case", CASES)
async def test_long_name_is_refused_with_its_field_and_its_limit(at: House, case: str) -> None:
    path, body, field, most = CASES[case]
    text = msgspec.json.encode(body).replace(b'"name_"', b'"name"')
    shorter = text.replace(b"a" * (most + 1), b"a" * most)
    beyond = f"{most + 1} characters; the limit is {most}"
    status, reply, _ = await post(at, path, text)
    assert (status, field in str(reply), beyond in str(reply)) == (400, True, True), reply
    assert beyond not in str((await post(at, path, shorter)).body)


def calling(call: MessageToolCall) -> ChatMessage:
    return ChatMessage(role="assistant", content="", tool_calls=(call,))


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage(role="user", content="a", name=LONG_ID),
        ChatMessage(role="tool", content="a", tool_call_id=LONG_ID),
        calling(MessageToolCall(id=LONG_ID, name="f")),
        calling(MessageToolCall(id="1", name=LONG_ID)),
    ],
    ids=("name", "result", "id", "call"),
)
def test_long_name_in_a_message_is_refused(message: ChatMessage) -> None:
    request = GenerateRequest(key=ClientKey("k"), model=MODEL, messages=(message,))
    with pytest.raises(InvalidRequest, match=rf"length <= {ID}.*messages"):
        decode(encode(request), (GenerateRequest,))
