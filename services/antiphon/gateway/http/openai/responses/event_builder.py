"""Builds output items and stream events from parsed output, one item at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.logprobs import TokenLogprob
from antiphon.gateway.http.openai.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomInputDelta,
    CustomInputDone,
    ItemAdded,
    ItemDone,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
)
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

    from antiphon.gateway.http.openai.responses.events import ResponseEvent
    from antiphon.gateway.http.openai.responses.items import Status

_NO_TARGETS: Mapping[str, ToolTarget] = {}
_NO_LOGPROBS: tuple[TokenLogprob, ...] = ()


class _OpenItem(msgspec.Struct):
    """The item that is being generated."""

    item: OutputItem
    index: int
    pieces: list[str] = msgspec.field(default_factory=list[str])
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list[TokenLogprob])

    @property
    def id(self) -> str:
        """The item's id."""
        assert self.item.id is not None, "every item has an id"
        return self.item.id

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)


class ResponseEventBuilder:
    """Turns the output events of one response into events of its stream.

    Attributes:
        items: Completed items.
    """

    def __init__(
        self,
        number: Callable[[], int],
        targets: Mapping[str, ToolTarget] = _NO_TARGETS,
        encrypt: Callable[[str], str] | None = None,
    ) -> None:
        """Create a builder without items.

        Args:
            number: Returns the next sequence number.
            targets: The client's tools, by the names that the model sees.
            encrypt: Encrypts reasoning for the client; None if it was not requested.
        """
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
                yield ArgumentsDelta(
                    sequence_number=self._number(),
                    item_id=open_item.id,
                    output_index=open_item.index,
                    delta=event.text,
                )
            case CallEnd():
                yield from self.end("completed" if event.complete else "incomplete")

    def end(self, status: Status) -> Iterator[ResponseEvent]:
        """End the current item, if there is one."""
        open_item, self._open = self._open, None
        if open_item is None:
            return
        done: OutputItem
        match open_item.item:
            case MessageItem():
                part = OutputText(text=open_item.text, logprobs=open_item.logprobs)
                yield OutputTextDone(
                    sequence_number=self._number(),
                    item_id=open_item.id,
                    output_index=open_item.index,
                    text=open_item.text,
                    logprobs=open_item.logprobs,
                )
                yield self._part_done(open_item, part)
                done = msgspec.structs.replace(open_item.item, status=status, content=[part])
            case ReasoningItem():
                reasoning = ReasoningText(text=open_item.text)
                yield ReasoningDone(
                    sequence_number=self._number(),
                    item_id=open_item.id,
                    output_index=open_item.index,
                    text=open_item.text,
                )
                yield self._part_done(open_item, reasoning)
                encrypted = None if self._encrypt is None else self._encrypt(open_item.text)
                done = msgspec.structs.replace(
                    open_item.item, status=status, content=[reasoning], encrypted_content=encrypted
                )
            case CallItem():
                yield ArgumentsDone(
                    sequence_number=self._number(),
                    item_id=open_item.id,
                    output_index=open_item.index,
                    name=open_item.item.name,
                    arguments=open_item.text,
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
        """Return a call in terms of the client's tool."""
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
        """Return the input of a custom tool."""
        yield CustomInputDelta(
            sequence_number=self._number(),
            item_id=open_item.id,
            output_index=open_item.index,
            delta=text,
        )
        yield CustomInputDone(
            sequence_number=self._number(),
            item_id=open_item.id,
            output_index=open_item.index,
            input=text,
        )

    def _content(self, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[ResponseEvent]:
        if self._open is None or not isinstance(self._open.item, MessageItem):
            item = MessageItem(
                id=new_id(MessageItem), status="in_progress", role="assistant", content=[]
            )
            yield from self._begin(item, OutputText(text=""))
        open_item = self._current()
        open_item.pieces.append(text)
        open_item.logprobs.extend(logprobs)
        yield OutputTextDelta(
            sequence_number=self._number(),
            item_id=open_item.id,
            output_index=open_item.index,
            delta=text,
            logprobs=list(logprobs),
        )

    def _reasoning(self, text: str) -> Iterator[ResponseEvent]:
        if self._open is None or not isinstance(self._open.item, ReasoningItem):
            item = ReasoningItem(id=new_id(ReasoningItem), status="in_progress", content=[])
            yield from self._begin(item, ReasoningText(text=""))
        open_item = self._current()
        open_item.pieces.append(text)
        yield ReasoningDelta(
            sequence_number=self._number(),
            item_id=open_item.id,
            output_index=open_item.index,
            delta=text,
        )

    def _begin(
        self, item: OutputItem, part: OutputText | ReasoningText | None = None
    ) -> Iterator[ResponseEvent]:
        """Begin an item; the previous one has ended."""
        yield from self.end("completed")
        self._open = open_item = _OpenItem(item, len(self.items))
        yield ItemAdded(sequence_number=self._number(), output_index=open_item.index, item=item)
        if part is not None:
            yield PartAdded(
                sequence_number=self._number(),
                item_id=open_item.id,
                output_index=open_item.index,
                part=part,
            )

    def _part_done(self, open_item: _OpenItem, part: OutputText | ReasoningText) -> PartDone:
        return PartDone(
            sequence_number=self._number(),
            item_id=open_item.id,
            output_index=open_item.index,
            part=part,
        )

    def _current(self) -> _OpenItem:
        assert self._open is not None, "an item has begun"
        return self._open
