"""The items of a conversation: what is sent, what is answered, and what is stored are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast
from uuid import uuid4

import msgspec

from antiphon.gateway.http.core.fields import decode
from antiphon.gateway.http.core.limits import CallId, Name, Parts
from antiphon.gateway.http.core.logprobs import TokenLogprob
from antiphon.wire.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

Status = Literal["in_progress", "completed", "incomplete"]
Object = dict[str, msgspec.Raw]


class InputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    """Text that somebody else than the model has written."""

    text: str


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of the model's. There are no annotations, whatever is sent in place of them."""

    text: str
    annotations: list[Object] = msgspec.field(default_factory=list[Object])
    logprobs: list[TokenLogprob] | None = msgspec.field(default_factory=list[TokenLogprob])


class RefusalText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """Text of a model of another server's that says no."""

    refusal: str


class SummaryText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    """A summary of thinking, as other servers make."""

    text: str


class ReasoningText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    """Thinking, word for word."""

    text: str


Part = InputText | OutputText | RefusalText


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What somebody said."""

    id: str | None = None
    status: Status | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts[Part]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before it went on."""

    id: str | None = None
    status: Status | None = None
    summary: Parts[SummaryText] = msgspec.field(default_factory=list[SummaryText])
    content: Parts[ReasoningText] | None = None
    encrypted_content: str | None = None


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function; `arguments` is, or becomes, the JSON text of an object."""

    id: str | None = None
    status: Status | None = None
    call_id: CallId
    name: Name
    namespace: Name | None = None
    arguments: str


class CustomCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"
):
    """A call of a custom tool; `input` is text of any form."""

    id: str | None = None
    status: Status | None = None
    call_id: CallId
    name: Name
    namespace: Name | None = None
    input: str


class CallOutputItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    """What a call has come to."""

    id: str | None = None
    status: Status | None = None
    call_id: CallId
    output: str | Parts[InputText]


class CustomCallOutputItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call_output"
):
    """What a call of a custom tool has come to."""

    id: str | None = None
    status: Status | None = None
    call_id: CallId
    output: str | Parts[InputText]


Item = (
    MessageItem | ReasoningItem | CallItem | CallOutputItem | CustomCallItem | CustomCallOutputItem
)
OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem

_KINDS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CustomCallOutputItem,
}
_PREFIXES: Mapping[type[Item], str] = {
    MessageItem: "msg",
    ReasoningItem: "rs",
    CallItem: "fc",
    CallOutputItem: "fco",
    CustomCallItem: "ctc",
    CustomCallOutputItem: "ctco",
}
_BUILT_IN = frozenset(
    {
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
        *("tool_search_call", "tool_search_output"),
    }
)
"""What other servers' own tools leave in a conversation; the model is shown nothing of it."""
_PARTS = {
    "content": ("input_text", "output_text", "refusal"),
    "output": ("input_text",),
}


def new_id(kind: type[Item]) -> str:
    """An id that nobody has, with the prefix of its kind."""
    return f"{_PREFIXES[kind]}_{uuid4().hex}"


def read_item(raw: Object, at: str) -> Item:
    """Read one item of a request's input, and give it an id if it has none.

    Args:
        raw: As it was sent.
        at: Where it stands, for errors.

    Raises:
        InvalidRequest: It is no item.
        Unsupported: It is an item, or has a part, that is not served here.
    """
    kind = _kind(raw, at)
    if kind is not ReasoningItem:
        for field, known in _PARTS.items():
            _check_parts(raw.get(field), known, f"{at}.{field}")
    item = decode(msgspec.json.encode(raw), kind, at)
    return item if item.id else msgspec.structs.replace(item, id=new_id(kind))


def left_out(raw: Object) -> str | None:
    """The type of an item of another server's built-in tool; None for any other item."""
    name = raw.get("type")
    kind: object = None if name is None else decode(name, object)
    return kind if isinstance(kind, str) and kind in _BUILT_IN else None


def text_of(content: str | list[Part] | list[InputText]) -> str:
    """What a content says, in one piece."""
    if isinstance(content, str):
        return content
    # Joined by a blank, as a chat's parts are.
    return " ".join(map(_text, content))


def _text(part: Part) -> str:
    return part.refusal if isinstance(part, RefusalText) else part.text


def _kind(raw: Object, at: str) -> type[Item]:
    """Which kind of item it is; a message need not say so."""
    if "type" not in raw and "role" in raw:
        return MessageItem
    if "type" not in raw:
        raise InvalidRequest(f"{at}.type: an item names its type", param=f"{at}.type")
    name = decode(raw["type"], str, f"{at}.type")
    if name not in _KINDS:
        text = f"{at}.type: items of type '{name}' are not supported"
        raise Unsupported(text, param=f"{at}.type")
    return _KINDS[name]


def _check_parts(raw: msgspec.Raw | None, known: tuple[str, ...], at: str) -> None:
    """Refuse parts by the name of their type; whatever else is wrong is found when decoding."""
    parts: object = None if raw is None else decode(raw, object, at)
    if not isinstance(parts, list):
        return
    for index, part in enumerate(cast("list[object]", parts)):
        name = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
        if isinstance(name, str) and name not in known:
            text = f"{at}[{index}].type: content of type '{name}' is not supported here"
            raise Unsupported(text, param=f"{at}[{index}].type")
