"""An answer as items, and the events that tell them: one item at a time, each begun and ended."""

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
    """The item that is being told."""

    item: OutputItem
    index: int
    pieces: list[str] = msgspec.field(default_factory=list[str])
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list[TokenLogprob])

    @property
    def id(self) -> str:
        """Its id."""
        assert self.item.id is not None, "each has one"
        return self.item.id

    @property
    def text(self) -> str:
        """All that was told of it."""
        return "".join(self.pieces)


class ResponseEventBuilder:
    """Takes the events of one answer in order, and yields those of its stream.

    Attributes:
        items: Those that are over.
    """

    def __init__(
        self,
        number: Callable[[], int],
        targets: Mapping[str, ToolTarget] = _NO_TARGETS,
        seal: Callable[[str], str] | None = None,
    ) -> None:
        """Nothing was said yet.

        Args:
            number: Gives the next sequence number.
            targets: What the tools are to the client, by the names that the model sees.
            seal: Seals reasoning that the client carries; None: it is not asked for.
        """
        self.items: list[OutputItem] = []
        self._number = number
        self._targets = targets
        self._seal = seal
        self._open: _OpenItem | None = None

    def add(
        self, event: Event, logprobs: Sequence[TokenLogprob] = _NO_LOGPROBS
    ) -> Iterator[ResponseEvent]:
        """Tell what is new; `logprobs` are of the tokens of a content."""
        match event:
            case Content(text):
                yield from self._content(text, logprobs)
            case Reasoning(text):
                yield from self._reasoning(text)
            case CallBegin():
                yield from self._begin(self._call(event))
            case CallArguments():
                told = self._current()
                told.pieces.append(event.text)
                if isinstance(told.item, CustomCallItem):
                    return  # the input is a string inside: it is sent once it is complete
                yield ArgumentsDelta(
                    sequence_number=self._number(),
                    item_id=told.id,
                    output_index=told.index,
                    delta=event.text,
                )
            case CallEnd():
                yield from self.end("completed" if event.complete else "incomplete")

    def end(self, status: Status) -> Iterator[ResponseEvent]:
        """End the item that is being told, if one is."""
        told, self._open = self._open, None
        if told is None:
            return
        done: OutputItem
        match told.item:
            case MessageItem():
                part = OutputText(text=told.text, logprobs=told.logprobs)
                yield OutputTextDone(
                    sequence_number=self._number(),
                    item_id=told.id,
                    output_index=told.index,
                    text=told.text,
                    logprobs=told.logprobs,
                )
                yield self._part_done(told, part)
                done = msgspec.structs.replace(told.item, status=status, content=[part])
            case ReasoningItem():
                thought = ReasoningText(text=told.text)
                yield ReasoningDone(
                    sequence_number=self._number(),
                    item_id=told.id,
                    output_index=told.index,
                    text=told.text,
                )
                yield self._part_done(told, thought)
                sealed = None if self._seal is None else self._seal(told.text)
                done = msgspec.structs.replace(
                    told.item, status=status, content=[thought], encrypted_content=sealed
                )
            case CallItem():
                yield ArgumentsDone(
                    sequence_number=self._number(),
                    item_id=told.id,
                    output_index=told.index,
                    name=told.item.name,
                    arguments=told.text,
                )
                done = msgspec.structs.replace(told.item, status=status, arguments=told.text)
            case CustomCallItem():
                text = custom_input(told.text)
                yield from self._input(told, text)
                done = msgspec.structs.replace(told.item, status=status, input=text)
        self.items.append(done)
        yield ItemDone(sequence_number=self._number(), output_index=told.index, item=done)

    def _call(self, event: CallBegin) -> CallItem | CustomCallItem:
        """A call as the client knows the tool."""
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

    def _input(self, told: _OpenItem, text: str) -> Iterator[ResponseEvent]:
        """The input of a custom tool."""
        yield CustomInputDelta(
            sequence_number=self._number(), item_id=told.id, output_index=told.index, delta=text
        )
        yield CustomInputDone(
            sequence_number=self._number(), item_id=told.id, output_index=told.index, input=text
        )

    def _content(self, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[ResponseEvent]:
        if self._open is None or not isinstance(self._open.item, MessageItem):
            item = MessageItem(
                id=new_id(MessageItem), status="in_progress", role="assistant", content=[]
            )
            yield from self._begin(item, OutputText(text=""))
        told = self._current()
        told.pieces.append(text)
        told.logprobs.extend(logprobs)
        yield OutputTextDelta(
            sequence_number=self._number(),
            item_id=told.id,
            output_index=told.index,
            delta=text,
            logprobs=list(logprobs),
        )

    def _reasoning(self, text: str) -> Iterator[ResponseEvent]:
        if self._open is None or not isinstance(self._open.item, ReasoningItem):
            item = ReasoningItem(id=new_id(ReasoningItem), status="in_progress", content=[])
            yield from self._begin(item, ReasoningText(text=""))
        told = self._current()
        told.pieces.append(text)
        yield ReasoningDelta(
            sequence_number=self._number(),
            item_id=told.id,
            output_index=told.index,
            delta=text,
        )

    def _begin(
        self, item: OutputItem, part: OutputText | ReasoningText | None = None
    ) -> Iterator[ResponseEvent]:
        """Begin an item: the one before is over."""
        yield from self.end("completed")
        self._open = told = _OpenItem(item, len(self.items))
        yield ItemAdded(sequence_number=self._number(), output_index=told.index, item=item)
        if part is not None:
            yield PartAdded(
                sequence_number=self._number(),
                item_id=told.id,
                output_index=told.index,
                part=part,
            )

    def _part_done(self, told: _OpenItem, part: OutputText | ReasoningText) -> PartDone:
        return PartDone(
            sequence_number=self._number(), item_id=told.id, output_index=told.index, part=part
        )

    def _current(self) -> _OpenItem:
        assert self._open is not None, "an item is begun before more of it is told"
        return self._open
