"""The messages of a conversation, as chat templates read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.tokenize import ChatMessage, MessageToolCall

if TYPE_CHECKING:
    from antiphon.gateway.http.openai.bodies import TextPart, Turn


def message(turn: Turn, index: int) -> ChatMessage:
    """Read one turn; `index` is its place.

    Raises:
        InvalidRequest: It says what is not served.
    """
    at = f"messages[{index}]"
    if turn.role == "function":
        raise Unsupported("say role tool", param=f"{at}.role")
    if turn.function_call:
        raise Unsupported("say tool_calls", param=f"{at}.function_call")
    if turn.prefix:
        raise Unsupported("say continue_final_message", param=f"{at}.prefix")
    return ChatMessage(
        role=turn.role,
        content=_content(turn, at),
        name=turn.name,
        reasoning_content=turn.reasoning_content,
        tool_calls=tuple(
            MessageToolCall(
                id=call.id, name=call.function.name, arguments=call.function.arguments or "{}"
            )
            for call in turn.tool_calls or ()
        ),
        tool_call_id=turn.tool_call_id,
    )


def _content(turn: Turn, at: str) -> str:
    if isinstance(turn.content, str):
        return turn.content
    if turn.content is None:
        if turn.role == "assistant":
            return ""
        raise InvalidRequest("a message needs content", param=f"{at}.content")
    # Joined by a blank, as SGLang does for templates that take plain text.
    return " ".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(turn.content))


def _part(part: TextPart, at: str) -> str:
    if part.type != "text":
        raise Unsupported(f"content of type '{part.type}' is not supported", param=f"{at}.type")
    if part.text is None:
        raise InvalidRequest("a text part needs text", param=f"{at}.text")
    return part.text
