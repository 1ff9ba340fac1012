"""Events of a response's stream. `sequence_number` counts from 0 without gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import msgspec

from antiphon.gateway.http.core.errors import envelope
from antiphon.gateway.http.core.logprobs import TokenLogprob
from antiphon.gateway.http.core.writer import named_event
from antiphon.gateway.http.openai.responses.items import (
    CallItem,
    CustomCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    new_id,
)
from antiphon.gateway.http.openai.responses.replies import ResponseReply
from antiphon.gateway.http.openai.responses.tools import ToolTarget, custom_input
from antiphon.gateway.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from antiphon.gateway.http.openai.responses.items import Status
    from antiphon.wire.errors import EngineError

_NO_TARGETS: Mapping[str, ToolTarget] = {}
_NO_LOGPROBS: tuple[TokenLogprob, ...] = ()


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int


class ResponseStateEvent(ResponseEvent, frozen=True, kw_only=True):
    response: ResponseReply


class Queued(ResponseStateEvent, frozen=True, tag="response.queued"): ...


class Created(ResponseStateEvent, frozen=True, tag="response.created"): ...


class InProgress(ResponseStateEvent, frozen=True, tag="response.in_progress"): ...


class Completed(ResponseStateEvent, frozen=True, tag="response.completed"): ...


class Incomplete(ResponseStateEvent, frozen=True, tag="response.incomplete"):
    """The response ended early: it reached a token limit or was cancelled."""


class Failed(ResponseStateEvent, frozen=True, tag="response.failed"): ...


class ItemAdded(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ItemEvent(ResponseEvent, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class PartEvent(ItemEvent, frozen=True, kw_only=True):
    """An event about a content part; each item has one part."""

    content_index: int = 0


class PartAdded(PartEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(PartEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(PartEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(PartEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(PartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(PartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(
    ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str


class ArgumentsDone(
    ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    name: str
    arguments: str


class CustomInputDelta(
    ItemEvent, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"
):
    delta: str


class CustomInputDone(
    ItemEvent, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"
):
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
    name = event.__struct_config__.tag
    assert isinstance(name, str), "every event has a name"
    return named_event(name, msgspec.json.encode(event))


class _Position(TypedDict):
    """Fields of an event about the open item."""

    sequence_number: int
    item_id: str
    output_index: int


class _OpenItem(msgspec.Struct):
    item: OutputItem
    index: int
    pieces: list[str] = msgspec.field(default_factory=list[str])
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list[TokenLogprob])

    @property
    def id(self) -> str:
        assert self.item.id is not None, "every item has an id"
        return self.item.id

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ResponseEventBuilder:
    """Turns the output events of one response into events of its stream."""

    def __init__(
        self,
        number: Callable[[], int],
        targets: Mapping[str, ToolTarget] = _NO_TARGETS,
        encrypt: Callable[[str], str] | None = None,
    ) -> None:
        self.items: list[OutputItem] = []
        self._number = number
        self._targets = targets
        self._encrypt = encrypt
        self._open: _OpenItem | None = None

    def add(
        self, event: Event, logprobs: Sequence[TokenLogprob] = _NO_LOGPROBS
    ) -> Iterator[ResponseEvent]:
        """Add an output event; `logprobs` are those of a content event."""
        match event:
            case Content(text):
                yield from self._content(text, logprobs)
            case Reasoning(text):
                yield from self._reasoning(text)
            case CallBegin():
                yield from self._begin(self._call(event))
            case CallArguments():
                open_item = self._current()
                open_item.pieces.append(event.text)
                if isinstance(open_item.item, CustomCallItem):
                    return  # sent once the JSON string of the input is complete
                yield ArgumentsDelta(**self._position(open_item), delta=event.text)
            case CallEnd():
                yield from self.end("completed" if event.complete else "incomplete")

    def end(self, status: Status) -> Iterator[ResponseEvent]:
        open_item, self._open = self._open, None
        if open_item is None:
            return
        done: OutputItem
        match open_item.item:
            case MessageItem():
                part = OutputText(text=open_item.text, logprobs=open_item.logprobs)
                yield OutputTextDone(
                    **self._position(open_item), text=open_item.text, logprobs=open_item.logprobs
                )
                yield self._part_done(open_item, part)
                done = msgspec.structs.replace(open_item.item, status=status, content=[part])
            case ReasoningItem():
                reasoning = ReasoningText(text=open_item.text)
                yield ReasoningDone(**self._position(open_item), text=open_item.text)
                yield self._part_done(open_item, reasoning)
                encrypted = None if self._encrypt is None else self._encrypt(open_item.text)
                done = msgspec.structs.replace(
                    open_item.item, status=status, content=[reasoning], encrypted_content=encrypted
                )
            case CallItem():
                yield ArgumentsDone(
                    **self._position(open_item), name=open_item.item.name, arguments=open_item.text
                )
                done = msgspec.structs.replace(
                    open_item.item, status=status, arguments=open_item.text
                )
            case CustomCallItem():
                text = custom_input(open_item.text)
                yield from self._input(open_item, text)
                done = msgspec.structs.replace(open_item.item, status=status, input=text)
        self.items.append(done)
        yield ItemDone(sequence_number=self._number(), output_index=open_item.index, item=done)

    def _call(self, event: CallBegin) -> CallItem | CustomCallItem:
        target = self._targets.get(event.name) or ToolTarget(event.name)
        if target.custom:
            return CustomCallItem(
                id=new_id(CustomCallItem),
                status="in_progress",
                call_id=event.id,
                name=target.name,
                namespace=target.namespace,
                input="",
            )
        return CallItem(
            id=new_id(CallItem),
            status="in_progress",
            call_id=event.id,
            name=target.name,
            namespace=target.namespace,
            arguments="",
        )

    def _input(self, open_item: _OpenItem, text: str) -> Iterator[ResponseEvent]:
        yield CustomInputDelta(**self._position(open_item), delta=text)
        yield CustomInputDone(**self._position(open_item), input=text)

    def _content(self, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[ResponseEvent]:
        if self._open is None or not isinstance(self._open.item, MessageItem):
            item = MessageItem(
                id=new_id(MessageItem), status="in_progress", role="assistant", content=[]
            )
            yield from self._begin(item, OutputText(text=""))
        open_item = self._current()
        open_item.pieces.append(text)
        open_item.logprobs.extend(logprobs)
        yield OutputTextDelta(**self._position(open_item), delta=text, logprobs=list(logprobs))

    def _reasoning(self, text: str) -> Iterator[ResponseEvent]:
        if self._open is None or not isinstance(self._open.item, ReasoningItem):
            item = ReasoningItem(id=new_id(ReasoningItem), status="in_progress", content=[])
            yield from self._begin(item, ReasoningText(text=""))
        open_item = self._current()
        open_item.pieces.append(text)
        yield ReasoningDelta(**self._position(open_item), delta=text)

    def _begin(
        self, item: OutputItem, part: OutputText | ReasoningText | None = None
    ) -> Iterator[ResponseEvent]:
        """Begin an item; the previous one has ended."""
        yield from self.end("completed")
        self._open = open_item = _OpenItem(item, len(self.items))
        yield ItemAdded(sequence_number=self._number(), output_index=open_item.index, item=item)
        if part is not None:
            yield PartAdded(**self._position(open_item), part=part)

    def _part_done(self, open_item: _OpenItem, part: OutputText | ReasoningText) -> PartDone:
        return PartDone(**self._position(open_item), part=part)

    def _position(self, open_item: _OpenItem) -> _Position:
        return {
            "sequence_number": self._number(),
            "item_id": open_item.id,
            "output_index": open_item.index,
        }

    def _current(self) -> _OpenItem:
        assert self._open is not None, "an item has begun"
        return self._open
