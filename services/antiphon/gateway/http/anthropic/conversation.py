"""Converts messages to the format of chat templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import msgspec

from antiphon.gateway.http.anthropic.schema import (
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Unread,
)
from antiphon.gateway.http.core.fields import decode
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.tokenize import ChatMessage, MessageToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from antiphon.gateway.http.anthropic.schema import Block, MessageParam, PromptBody

_BETWEEN = "\n"
"""Separates the texts of blocks that are joined."""


def conversation(body: PromptBody) -> tuple[ChatMessage, ...]:
    """Convert the system prompt and the messages. Consecutive messages of one role are merged.

    Raises:
        InvalidRequest: `param` names the block that is invalid or misplaced.
    """
    turns: list[ChatMessage] = []
    if body.system:
        system = body.system if isinstance(body.system, str) else _text(body.system, "system")
        turns.append(ChatMessage(role="system", content=system))
    calls: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        for turn in _turns(message, f"messages[{index}].content", calls):
            _add(turns, turn)
    return tuple(turns)


def continues_last_turn(
    turns: Sequence[ChatMessage], at: str
) -> tuple[tuple[ChatMessage, ...], bool]:
    """Return whether the last turn is to be continued; an empty one is dropped.

    `at` is the path of the last message, for errors.
    """
    last = turns[-1]
    if last.role != "assistant":
        return tuple(turns), False
    if last.tool_calls:
        raise InvalidRequest("a tool_use requires its tool_result in a later message", param=at)
    if last.content != last.content.rstrip():
        text = "the final assistant message must not end in white space"
        raise InvalidRequest(text, param=at)
    if last.content:
        return tuple(turns), True
    if last.reasoning_content:
        raise InvalidRequest("a message with only thinking cannot be continued", param=at)
    if len(turns) == 1:
        raise InvalidRequest("the conversation is empty", param=at)
    return tuple(turns[:-1]), False


def _add(turns: list[ChatMessage], turn: ChatMessage) -> None:
    if turns and turn.role == turns[-1].role and turn.role in ("user", "assistant"):
        turns[-1] = _merge(turns[-1], turn)
    else:
        turns.append(turn)


def _turns(message: MessageParam, at: str, calls: dict[str, str]) -> list[ChatMessage]:
    """Convert a message; `calls` has the names of earlier tool calls by id."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    if message.role == "assistant":
        turn = _assistant_turn(message.content, at)
        calls.update((call.id, call.name) for call in turn.tool_calls)
        return [turn]
    if not message.content:
        raise InvalidRequest("a message requires content", param=at)
    if message.role == "system":
        return [ChatMessage(role="system", content=_text(message.content, at))]
    return _user_turns(message.content, at, calls)


def _assistant_turn(blocks: Sequence[Block], at: str) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[MessageToolCall] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock(text):
                texts.append(text)
            case ThinkingBlock(thinking):
                thoughts.append(thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                calls.append(_call(block, f"{at}[{index}]"))
            case _:
                _misplaced(block, "assistant", f"{at}[{index}]")
    return ChatMessage(
        role="assistant",
        content=_BETWEEN.join(texts),
        reasoning_content=_BETWEEN.join(thoughts) or None,
        tool_calls=tuple(calls),
        without_content=not texts,
    )


def _user_turns(blocks: Sequence[Block], at: str, calls: dict[str, str]) -> list[ChatMessage]:
    """Convert a user message: its text and tool results become one turn each, in order."""
    turns: list[ChatMessage] = []
    for index, block in enumerate(blocks):
        where = f"{at}[{index}]"
        match block:
            case TextBlock(text):
                turns.append(ChatMessage(role="user", content=text))
            case ToolResultBlock():
                turns.append(_result(block, where, calls))
            case _:
                _misplaced(block, "user", where)
    return turns


def _call(block: ToolUseBlock, at: str) -> MessageToolCall:
    arguments = msgspec.json.encode(block.input)
    decode(arguments, object, f"{at}.input")
    return MessageToolCall(id=block.id, name=block.name, arguments=arguments.decode())


def _result(block: ToolResultBlock, at: str, calls: dict[str, str]) -> ChatMessage:
    if block.tool_use_id not in calls:
        text = f"no earlier tool_use has the id '{block.tool_use_id}'"
        raise InvalidRequest(text, param=f"{at}.tool_use_id")
    content = block.content or ""
    text = content if isinstance(content, str) else _text(content, f"{at}.content")
    return ChatMessage(
        role="tool",
        content=f"Error: {text}" if block.is_error else text,
        name=calls[block.tool_use_id],
        tool_call_id=block.tool_use_id,
    )


def _text(blocks: Iterable[Block], at: str) -> str:
    """Return the text of blocks of which only text is allowed."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            _misplaced(block, "", f"{at}[{index}]")
        texts.append(block.text)
    return _BETWEEN.join(texts)


def _misplaced(block: Block, role: str, at: str) -> NoReturn:
    kind = str(type(block).__struct_config__.tag)
    if isinstance(block, Unread):
        raise Unsupported(f"content of type '{kind}' is not supported", param=f"{at}.type")
    where = f"in a message of role {role}" if role else "here"
    raise InvalidRequest(f"{kind} is not allowed {where}", param=f"{at}.type")


def _merge(first: ChatMessage, second: ChatMessage) -> ChatMessage:

    def both(one: str | None, other: str | None) -> str:
        return _BETWEEN.join(text for text in (one, other) if text)

    return ChatMessage(
        role=first.role,
        content=both(first.content, second.content),
        reasoning_content=both(first.reasoning_content, second.reasoning_content) or None,
        tool_calls=first.tool_calls + second.tool_calls,
        without_content=first.without_content and second.without_content,
    )
