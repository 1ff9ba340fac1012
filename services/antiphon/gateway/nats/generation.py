"""A request of a NATS client and its output so far, from which lost messages are sent again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.gateway.owner.actions import Ended, Finished, StreamEvent, TextDelta
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import id_count
from antiphon.wire.errors import EngineError, GatewayLost, InvalidRequest, encode_error
from antiphon.wire.generate import (
    ChoiceEnd,
    GenerateAccepted,
    GenerateEnd,
    GenerateRequest,
    GenerateText,
    TextCursor,
)
from antiphon.wire.token_outputs import TokenOutputsBuffer, TokenOutputsChunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from antiphon.bus.bus import Delivery
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.wire.ids import InstanceId, RequestId, TenantId

_PIECE_BYTES_MAX = 128 * 1024


@dataclass(eq=False)
class NatsGeneration:
    """Keeps the output of a request until some time after its end. No bus and no clock."""

    request: GenerateRequest
    tenant: TenantId
    digest: bytes  # differs between a retry and another request with the same key
    delivery: Delivery  # of the last try, whose inbox and format apply from then on
    pump: asyncio.Task[None] | None = None  # sends its output
    opened: asyncio.Event = field(default_factory=asyncio.Event)  # or `refusal` has the reason
    refusal: EngineError | None = None
    end_sent: bool = False
    undelivered: bool = False  # the last message found no subscriber
    probing: bool = False  # a probe checks that the client exists
    _known: dict[int, TextCursor] = field(default_factory=dict[int, TextCursor])
    """Of each choice, how much a client has that resumes the response; it is not sent again."""
    _stream: RequestStream | None = None
    _collected: list[_CollectedText] = field(default_factory=list["_CollectedText"])
    _finished: dict[int, Finished] = field(default_factory=dict[int, Finished])
    _ended: Ended | None = None

    @property
    def stream(self) -> RequestStream:
        assert self._stream is not None
        return self._stream

    @property
    def id(self) -> RequestId:
        return self.stream.submit.request_id

    @property
    def resumable(self) -> bool:
        return self.request.resume_s is not None

    @property
    def lost(self) -> bool:
        """Whether another connection has resumed it: its client gets the end there."""
        return self.resumable and self._ended is not None and _is_lost(self._ended)

    def open(self, stream: RequestStream) -> None:
        self._stream = stream
        self._collected = [_CollectedText() for _ in range(stream.submit.choices)]
        if self.request.resume_from is not None:
            self._skip(self.request.resume_from.places)

    def accepted(self, gateway: InstanceId) -> GenerateAccepted:
        submit = self.stream.submit
        return GenerateAccepted(
            key=self.request.key,
            request_id=self.id,
            gateway=gateway,
            details_from=submit.sampling.details_from(id_count(submit.prompt_ids)),
        )

    def record(self, event: StreamEvent) -> GenerateText | GenerateEnd | None:
        """Record an event, and format it for the client if it is new for it."""
        match event:
            case TextDelta():
                self._collected[event.choice].add(event)
                if self.request.stream:
                    return self._new_piece(event)
            case Finished():
                self._finished[event.choice] = event
            case Ended():
                self._ended = event
                return None if self.lost else self._end(event)
            case _:
                pass
        return None

    def record_all(self, events: Iterable[StreamEvent]) -> None:
        for event in events:
            self.record(event)

    def replay(self, places: Iterable[TextCursor]) -> Iterator[GenerateText | GenerateEnd]:
        """Format the output beyond some offsets, and the terminal event if it was recorded."""
        self._skip(places)
        if self.request.stream:
            for choice, collected in enumerate(self._collected):
                for piece in collected.after(self._known.get(choice)):
                    yield self._piece(choice, *piece)
        # If the terminal event is still in the stream, so is text before it, which must come first.
        if self._ended is not None:
            yield self._end(self._ended)

    def ping(self) -> GenerateText:
        """A message without content, to check that the client has a subscription."""
        return self._piece(0, len(self._collected[0].text), "", None)

    def _skip(self, places: Iterable[TextCursor]) -> None:
        self._known = {place.choice: place for place in places}

    def _new_piece(self, delta: TextDelta) -> GenerateText | None:
        """Format the part of an event that the client lacks; all of it, once it is past that."""
        place = self._known.get(delta.choice)
        if place is None:
            return self._piece(delta.choice, delta.text_offset, delta.text, delta.details)
        text_offset, text = _text_beyond(delta, place.text_offset)
        details = delta.details
        if details is not None and place.token_offset is not None:
            beyond = details.beyond(min(place.token_offset, details.end))
            details = beyond if beyond.details.count else None
        if not text and details is None:
            return None
        return self._piece(delta.choice, text_offset, text, details)

    def _piece(
        self, choice: int, text_offset: int, text: str, details: TokenOutputsChunk | None
    ) -> GenerateText:
        return GenerateText(
            request_id=self.id,
            choice=choice,
            text_offset=text_offset,
            text=text,
            details=details,
        )

    def _end(self, ended: Ended) -> GenerateEnd:
        return GenerateEnd(
            request_id=self.id,
            choices=tuple(self._choice_end(choice) for choice in range(len(self._collected))),
            usage=ended.usage,
            error=None if ended.error is None else encode_error(ended.error),
        )

    def _choice_end(self, choice: int) -> ChoiceEnd:
        finished = self._finished.get(choice)
        collected, streamed = self._collected[choice], self.request.stream
        details = collected.details
        return ChoiceEnd(
            choice=choice,
            finish_reason=finished.reason if finished else FinishReason.ERROR,
            text_bytes=len(collected.text),
            text=None if streamed else collected.text.decode(),
            details=None
            if streamed or not details
            else collected.piece(details.first, details.end),
            details_end=details.end,
            matched_stop=finished.matched_stop if finished else None,
        )


class _CollectedText:
    def __init__(self) -> None:
        self.text = bytearray()
        self.details = TokenOutputsBuffer()
        self._texts: dict[int, str] = {}
        self._written: dict[int, bytes] = {}

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text.encode()
        if delta.details is not None:
            if not self.details:
                self.details = TokenOutputsBuffer(delta.details.offset)
            self.details.append(delta.details.details)
            self._texts |= delta.details.texts
            self._written |= delta.details.written

    def after(
        self, place: TextCursor | None
    ) -> Iterator[tuple[int, str, TokenOutputsChunk | None]]:
        """Return the output beyond an offset, as (offset, text, token outputs), text first."""
        start = place.text_offset if place else 0
        try:
            rest = self.text[start:].decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"offset {start} is inside a character", param="places") from None
        step = _PIECE_BYTES_MAX // 4  # a character has at most four bytes
        for first in range(0, len(rest), step):
            piece = rest[first : first + step]
            yield start, piece, None
            start += len(piece.encode())
        start_token = place.token_offset if place else None
        start_token = (
            self.details.first if start_token is None else max(start_token, self.details.first)
        )
        tokens = max(1, _PIECE_BYTES_MAX // 2 // max(1, self.details.token_bytes))
        for first in range(start_token, self.details.end, tokens):
            yield len(self.text), "", self.piece(first, first + tokens)

    def piece(self, start: int, stop: int) -> TokenOutputsChunk:
        details = self.details.read(start, stop)
        piece = TokenOutputsChunk(offset=max(start, self.details.first), details=details)
        return piece.with_texts(self._texts, self._written)


def _text_beyond(delta: TextDelta, offset: int) -> tuple[int, str]:
    """Return the text from an offset on, and where it begins: earlier, if a character would be cut.

    Receivers remove what they have.
    """
    text = delta.text.encode()
    try:
        rest = text[max(0, offset - delta.text_offset) :].decode()
    except UnicodeDecodeError:
        return delta.text_offset, delta.text
    return delta.text_offset + len(text) - len(rest.encode()), rest


def _is_lost(ended: Ended) -> bool:
    return isinstance(ended.error, GatewayLost)
