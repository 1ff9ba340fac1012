"""Converts items to chat turns: consecutive items of the model form one turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.openai.responses.items import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    CustomCallOutputItem,
    MessageItem,
    ReasoningItem,
    text_of,
)
from antiphon.gateway.http.openai.responses.tools import custom_arguments, model_name
from antiphon.gateway.http.openai.schema import ChatMessageParam, FunctionCall, ToolCall
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.http.openai.responses.items import Item


class _OpenTurn(msgspec.Struct):
    """An assistant turn that may get more items."""

    reasoning: str | None = None
    content: str | None = None
    calls: list[ToolCall] = msgspec.field(default_factory=list[ToolCall])

    def turn(self) -> ChatMessageParam:
        """The turn so far."""
        return ChatMessageParam(
            role="assistant",
            content=self.content,
            reasoning_content=self.reasoning,
            tool_calls=self.calls or None,
        )


def turns(items: Sequence[Item], instructions: str | None) -> list[ChatMessageParam]:
    """Convert a conversation to chat turns, with the instructions first.

    Raises:
        InvalidRequest: An output has no call before it.
    """
    made = [] if instructions is None else [ChatMessageParam(role="system", content=instructions)]
    growing: _OpenTurn | None = None
    called: set[str] = set()
    for item in items:
        if isinstance(item, CallItem | CustomCallItem):
            called.add(item.call_id)
        if _is_assistant(item):
            if growing is None or not _fits(growing, item):
                made += _closed(growing)
                growing = _OpenTurn()
            _add(growing, item)
            continue
        made += _closed(growing)
        growing = None
        made.append(_turn(item, called))
    return made + _closed(growing)


def _closed(growing: _OpenTurn | None) -> list[ChatMessageParam]:
    return [] if growing is None else [growing.turn()]


def _is_assistant(item: Item) -> bool:
    return isinstance(item, ReasoningItem | CallItem | CustomCallItem) or (
        isinstance(item, MessageItem) and item.role == "assistant"
    )


def _fits(growing: _OpenTurn, item: Item) -> bool:
    """Whether it follows in the order of templates: reasoning, content, tool calls."""
    if isinstance(item, CallItem | CustomCallItem):
        return True
    if growing.calls or growing.content is not None:
        return False
    return isinstance(item, MessageItem) or growing.reasoning is None


def _add(growing: _OpenTurn, item: Item) -> None:
    match item:
        case ReasoningItem():
            thoughts = item.content or item.summary
            growing.reasoning = "\n".join(part.text for part in thoughts) or None
        case MessageItem():
            growing.content = text_of(item.content)
        case CallItem():
            name = model_name(item.name, item.namespace)
            function = FunctionCall(name=name, arguments=item.arguments or "{}")
            growing.calls.append(ToolCall(id=item.call_id, function=function))
        case CustomCallItem():
            name = model_name(item.name, item.namespace)
            function = FunctionCall(name=name, arguments=custom_arguments(item.input))
            growing.calls.append(ToolCall(id=item.call_id, function=function))
        case CallOutputItem() | CustomCallOutputItem():
            raise AssertionError("a tool output is not an item of the model")


def _turn(item: Item, called: set[str]) -> ChatMessageParam:
    if isinstance(item, CallOutputItem | CustomCallOutputItem):
        if item.call_id not in called:
            text = f"no call with the call_id '{item.call_id}' precedes this output"
            raise InvalidRequest(text, param="input")
        return ChatMessageParam(
            role="tool", content=text_of(item.output), tool_call_id=item.call_id
        )
    assert isinstance(item, MessageItem), "all other items are of the model"
    return ChatMessageParam(role=item.role, content=text_of(item.content))
