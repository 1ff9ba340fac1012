"""Events of a response's stream. `sequence_number` counts from 0 without gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.errors import envelope
from antiphon.gateway.http.core.logprobs import TokenLogprob
from antiphon.gateway.http.core.sse import named_event
from antiphon.gateway.http.openai.responses.items import OutputItem, OutputText, ReasoningText
from antiphon.gateway.http.openai.responses.replies import ResponseReply

if TYPE_CHECKING:
    from antiphon.wire.errors import EngineError


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Fields of every event."""

    sequence_number: int


class ResponseStateEvent(ResponseEvent, frozen=True, kw_only=True):
    """An event that carries the current state of the response."""

    response: ResponseReply


class Queued(ResponseStateEvent, frozen=True, tag="response.queued"):
    """The response is queued for background processing."""


class Created(ResponseStateEvent, frozen=True, tag="response.created"):
    """The response was created."""


class InProgress(ResponseStateEvent, frozen=True, tag="response.in_progress"):
    """The response is being generated."""


class Completed(ResponseStateEvent, frozen=True, tag="response.completed"):
    """The response is complete."""


class Incomplete(ResponseStateEvent, frozen=True, tag="response.incomplete"):
    """The response ended early: it reached a token limit or was cancelled."""


class Failed(ResponseStateEvent, frozen=True, tag="response.failed"):
    """The response failed."""


class ItemAdded(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An output item was added."""

    output_index: int
    item: OutputItem


class ItemDone(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An output item is complete."""

    output_index: int
    item: OutputItem


class ItemEvent(ResponseEvent, frozen=True, kw_only=True):
    """An event about an item, identified by its index."""

    item_id: str
    output_index: int


class PartEvent(ItemEvent, frozen=True, kw_only=True):
    """An event about a content part; each item has one part."""

    content_index: int = 0


class PartAdded(PartEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A content part was added."""

    part: OutputText | ReasoningText


class PartDone(PartEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A content part is complete."""

    part: OutputText | ReasoningText


class OutputTextDelta(PartEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """Text appended to a content part."""

    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(PartEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The complete text of a content part."""

    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(PartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """Reasoning text appended to an item."""

    delta: str


class ReasoningDone(PartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The complete reasoning text of an item."""

    text: str


class ArgumentsDelta(
    ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """Arguments appended to a function call."""

    delta: str


class ArgumentsDone(
    ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    """The complete arguments of a function call."""

    name: str
    arguments: str


class CustomInputDelta(
    ItemEvent, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"
):
    """Input appended to a custom tool call."""

    delta: str


class CustomInputDone(
    ItemEvent, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"
):
    """The complete input of a custom tool call."""

    input: str


class StreamErrorEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The stream was interrupted. The response continues, and its stream can be resumed."""

    code: str
    message: str
    param: str | None


def stream_error(error: EngineError) -> bytes:
    """Build the event for an error after the headers of a stream were sent."""
    body = envelope(error).error
    event = StreamErrorEvent(code=body.code, message=body.message, param=body.param)
    return named_event("error", msgspec.json.encode(event))


def encode_event(event: ResponseEvent) -> bytes:
    """Encode an event as server-sent event."""
    name = event.__struct_config__.tag
    assert isinstance(name, str), "every event has a name"
    return named_event(name, msgspec.json.encode(event))
