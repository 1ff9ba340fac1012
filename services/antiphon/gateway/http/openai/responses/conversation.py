"""Converts items to chat turns: consecutive items of the model form one turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.openai.responses.items import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    CustomCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ToolCallItem,
    ToolOutputItem,
    text_of,
)
from antiphon.gateway.http.openai.responses.tools import custom_arguments, model_name
from antiphon.gateway.http.openai.schema import ChatMessageParam, FunctionCall, ToolCall
from antiphon.wire.errors import InvalidRequest, PromptTooLong

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet


TRIES_MAX = 6
"""Maximum number of truncations, each of which is tokenized again."""
_KEEP_SHARE = 0.9
"""Safety margin: items are measured in bytes, which only approximate tokens."""


def turns(items: Sequence[Item], instructions: str | None) -> list[ChatMessageParam]:
    made = [] if instructions is None else [ChatMessageParam(role="system", content=instructions)]
    called: set[str] = set()
    for item in items:
        if isinstance(item, ToolCallItem):
            called.add(item.call_id)
        if not _is_assistant(item):
            made.append(_turn(item, called))
        elif made and made[-1].role == "assistant" and _fits(made[-1], item):
            made[-1] = _extended(made[-1], item)
        else:
            made.append(_extended(ChatMessageParam(role="assistant"), item))
    return made


def _is_assistant(item: Item) -> bool:
    return isinstance(item, ReasoningItem | ToolCallItem) or (
        isinstance(item, MessageItem) and item.role == "assistant"
    )


def _fits(turn: ChatMessageParam, item: Item) -> bool:
    """Whether it follows in the order of templates: reasoning, content, tool calls."""
    if isinstance(item, ToolCallItem):
        return True
    if turn.tool_calls or turn.content is not None:
        return False
    return isinstance(item, MessageItem) or turn.reasoning_content is None


def _extended(turn: ChatMessageParam, item: Item) -> ChatMessageParam:
    """Add an item of the model to its turn."""
    match item:
        case ReasoningItem():
            thoughts = "\n".join(part.text for part in item.content or item.summary)
            return msgspec.structs.replace(turn, reasoning_content=thoughts or None)
        case MessageItem():
            return msgspec.structs.replace(turn, content=text_of(item.content))
        case CallItem():
            arguments = item.arguments or "{}"
        case CustomCallItem():
            arguments = custom_arguments(item.input)
        case CallOutputItem() | CustomCallOutputItem():
            raise AssertionError("a tool output is not an item of the model")
    function = FunctionCall(name=model_name(item.name, item.namespace), arguments=arguments)
    calls = turn.tool_calls or []
    calls.append(ToolCall(id=item.call_id, function=function))
    return msgspec.structs.replace(turn, tool_calls=calls)


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
