"""The events of a response's stream. `sequence_number` counts them from 0, with none left out."""

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
    """What all have."""

    sequence_number: int


class ResponseStateEvent(ResponseEvent, frozen=True, kw_only=True):
    """The response as it stands."""

    response: ResponseReply


class Queued(ResponseStateEvent, frozen=True, tag="response.queued"):
    """It will be made in the background."""


class Created(ResponseStateEvent, frozen=True, tag="response.created"):
    """It exists."""


class InProgress(ResponseStateEvent, frozen=True, tag="response.in_progress"):
    """It is being made."""


class Completed(ResponseStateEvent, frozen=True, tag="response.completed"):
    """It is whole."""


class Incomplete(ResponseStateEvent, frozen=True, tag="response.incomplete"):
    """It ends before its end: it is too long, or somebody has cancelled it."""


class Failed(ResponseStateEvent, frozen=True, tag="response.failed"):
    """It ends with an error."""


class ItemAdded(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputItem


class ItemDone(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item is over."""

    output_index: int
    item: OutputItem


class ItemEvent(ResponseEvent, frozen=True, kw_only=True):
    """About an item by its place."""

    item_id: str
    output_index: int


class PartEvent(ItemEvent, frozen=True, kw_only=True):
    """About a part of an item; each has one."""

    content_index: int = 0


class PartAdded(PartEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A part begins."""

    part: OutputText | ReasoningText


class PartDone(PartEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A part is over."""

    part: OutputText | ReasoningText


class OutputTextDelta(PartEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(PartEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    """All of a text."""

    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(PartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More thinking."""

    delta: str


class ReasoningDone(PartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """All of the thinking of an item."""

    text: str


class ArgumentsDelta(
    ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(
    ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    """All of a call's arguments."""

    name: str
    arguments: str


class CustomInputDelta(
    ItemEvent, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"
):
    """More of a custom tool's input."""

    delta: str


class CustomInputDone(
    ItemEvent, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"
):
    """All of a custom tool's input."""

    input: str


class StreamErrorEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The stream breaks off; the response goes on, and its events can be asked for again."""

    code: str
    message: str
    param: str | None


def stream_error(error: EngineError) -> bytes:
    """An error after the headers of a stream that is passed on."""
    said = envelope(error).error
    event = StreamErrorEvent(code=said.code, message=said.message, param=said.param)
    return named_event("error", msgspec.json.encode(event))


def encode_event(event: ResponseEvent) -> bytes:
    """An event as it goes to the client."""
    name = event.__struct_config__.tag
    assert isinstance(name, str), "every event has a name"
    return named_event(name, msgspec.json.encode(event))
