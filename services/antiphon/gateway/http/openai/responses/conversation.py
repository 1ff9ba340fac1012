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
    ToolCallItem,
    ToolOutputItem,
    text_of,
)
from antiphon.gateway.http.openai.responses.tools import custom_arguments, model_name
from antiphon.gateway.http.openai.schema import ChatMessageParam, FunctionCall, ToolCall
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from antiphon.gateway.http.openai.responses.items import Item
    from antiphon.wire.errors import PromptTooLong

TRIES_MAX = 6
"""Maximum number of truncations, each of which is tokenized again."""
_KEEP_SHARE = 0.9
"""Safety margin: items are measured in bytes, which only approximate tokens."""


class _OpenTurn(msgspec.Struct):
    """An assistant turn that may get more items."""

    reasoning: str | None = None
    content: str | None = None
    calls: list[ToolCall] = msgspec.field(default_factory=list[ToolCall])

    def turn(self) -> ChatMessageParam:
        return ChatMessageParam(
            role="assistant",
            content=self.content,
            reasoning_content=self.reasoning,
            tool_calls=self.calls or None,
        )


def turns(items: Sequence[Item], instructions: str | None) -> list[ChatMessageParam]:
    made = [] if instructions is None else [ChatMessageParam(role="system", content=instructions)]
    growing: _OpenTurn | None = None
    called: set[str] = set()
    for item in items:
        if isinstance(item, ToolCallItem):
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
    return isinstance(item, ReasoningItem | ToolCallItem) or (
        isinstance(item, MessageItem) and item.role == "assistant"
    )


def _fits(growing: _OpenTurn, item: Item) -> bool:
    """Whether it follows in the order of templates: reasoning, content, tool calls."""
    if isinstance(item, ToolCallItem):
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
    if isinstance(item, ToolOutputItem):
        if item.call_id not in called:
            text = f"no call with the call_id '{item.call_id}' precedes this output"
            raise InvalidRequest(text, param="input")
        return ChatMessageParam(
            role="tool", content=text_of(item.output), tool_call_id=item.call_id
        )
    assert isinstance(item, MessageItem), "all other items are of the model"
    return ChatMessageParam(role=item.role, content=text_of(item.content))


def truncate_items(items: Sequence[Item], error: PromptTooLong) -> list[Item] | None:
    """Drop the oldest items, by as much as the error says the conversation is too long.

    System messages and the last item are kept, with its call if it is an output. Any other output
    is dropped with its call. Returns None if nothing can be dropped.
    """
    sizes = [len(msgspec.json.encode(item)) for item in items]
    excess = sum(sizes) * (1.0 - _share(error) * _KEEP_SHARE)
    answered = {item.call_id for item in _last_outputs(items)}
    gone: set[int] = set()
    for index in range(len(items) - 1):
        if excess <= 0:
            break
        if not _must_keep(items[index], answered):
            gone.add(index)
            excess -= sizes[index]
    if not gone:
        return None
    left = [item for index, item in enumerate(items) if index not in gone]
    called = {item.call_id for item in left if isinstance(item, ToolCallItem)}
    return [item for item in left if not isinstance(item, ToolOutputItem) or item.call_id in called]


def _share(error: PromptTooLong) -> float:
    """Return the share of the conversation that fits, by tokens or by characters."""
    numbers = {name: int(value) for name, value in error.details.items()}
    if "prompt_tokens" in numbers:
        return numbers["tokens_max"] / numbers["prompt_tokens"]
    return numbers["characters_max"] / numbers["characters"]


def _last_outputs(items: Sequence[Item]) -> list[ToolOutputItem]:
    found: list[ToolOutputItem] = []
    for item in reversed(items):
        if not isinstance(item, ToolOutputItem):
            break
        found.append(item)
    return found


def _must_keep(item: Item, answered: AbstractSet[str]) -> bool:
    if isinstance(item, ToolCallItem | ToolOutputItem):
        return item.call_id in answered
    return isinstance(item, MessageItem) and item.role in ("system", "developer")
