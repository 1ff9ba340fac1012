"""Converts messages to the format of chat templates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.tokenize import ChatMessage, MessageToolCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.http.openai.schema import ChatMessageParam, ContentPart


def conversation(turns: Sequence[ChatMessageParam]) -> tuple[ChatMessage, ...]:
    """Convert all messages.

    Raises:
        InvalidRequest: A message has unsupported content.
    """
    last = len(turns) - 1
    for index, turn in enumerate(turns):
        if turn.prefix and (index != last or turn.role != "assistant"):
            raise InvalidRequest(
                "only a final assistant message can be continued",
                param=f"messages[{index}].prefix",
            )
    return tuple(_message(turn, f"messages[{index}]") for index, turn in enumerate(turns))


def begins_answer(turns: Sequence[ChatMessageParam]) -> bool:
    """Whether the last message is to be continued."""
    return bool(turns and turns[-1].prefix)


def _message(turn: ChatMessageParam, at: str) -> ChatMessage:
    if turn.role == "function":
        raise Unsupported("use role tool", param=f"{at}.role")
    if turn.function_call:
        raise Unsupported("use tool_calls", param=f"{at}.function_call")
    return ChatMessage(
        role=turn.role,
        content=_content(turn, at),
        name=turn.name,
        reasoning_content=turn.reasoning_content or _reasoning_of(turn),
        tool_calls=tuple(
            MessageToolCall(
                id=call.id, name=call.function.name, arguments=_json(call.function.arguments)
            )
            for call in turn.tool_calls or ()
        ),
        tool_call_id=turn.tool_call_id,
        without_content=turn.content is None,
    )


def _content(turn: ChatMessageParam, at: str) -> str:
    if isinstance(turn.content, str):
        return turn.content
    if turn.content is None:
        if turn.role == "assistant":
            return ""
        raise InvalidRequest("a message requires content", param=f"{at}.content")
    parts = enumerate(turn.content)
    texts = [
        _part(part, turn, f"{at}.content[{i}]") for i, part in parts if not _thinks(part, turn)
    ]
    # Joined by a space, as in SGLang for templates that take plain text.
    return " ".join(texts)


def _part(part: ContentPart, turn: ChatMessageParam, at: str) -> str:
    refuses = part.type == "refusal" and turn.role == "assistant"
    if part.type != "text" and not refuses:
        raise Unsupported(f"content of type '{part.type}' is not supported", param=f"{at}.type")
    text = part.refusal if refuses else part.text
    if text is None:
        raise InvalidRequest(
            f"a content part of type {part.type} requires {part.type}", param=f"{at}.{part.type}"
        )
    return text


def _reasoning_of(turn: ChatMessageParam) -> str | None:
    """Return the reasoning of an assistant message, if it is among its content parts."""
    parts = turn.content if isinstance(turn.content, list) else []
    return "\n".join(part.thinking or "" for part in parts if _thinks(part, turn)) or None


def _thinks(part: ContentPart, turn: ChatMessageParam) -> bool:
    return part.type == "thinking" and turn.role == "assistant"


def _json(arguments: str | dict[str, msgspec.Raw]) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return msgspec.json.encode(arguments).decode()
