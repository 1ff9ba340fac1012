"""One request of a NATS client: its output, kept so that it can be resent, and its inbox."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from antiphon.gateway.owner.actions import Ended, Finished, TextDelta
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import id_count
from antiphon.wire.errors import EngineError, InvalidRequest, encode_error
from antiphon.wire.generate import ChoiceEnd, GenerateAccepted, GenerateEnd, GenerateText
from antiphon.wire.token_outputs import TokenOutputsBuffer, TokenOutputsChunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from antiphon.bus.bus import Delivery
    from antiphon.gateway.owner.actions import StreamEvent
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.wire.generate import GenerateRequest, TextCursor
    from antiphon.wire.ids import InstanceId, RequestId, TenantId

_PIECE_BYTES_MAX = 128 * 1024


class NatsGeneration:
    def __init__(
        self, request: GenerateRequest, tenant: TenantId, digest: bytes, delivery: Delivery
    ) -> None:
        self.request = request
        self.tenant = tenant
        self.digest = digest  # differs between a retry and another request with the same key
        self.delivery = delivery  # of the last try, whose inbox and format apply from then on
        self.opened = asyncio.Event()  # set when it is open, or `refusal` has the reason
        self.refusal: EngineError | None = None
        self.end_sent = False
        self.undelivered = False  # the last message found no subscriber
        self.probing = False  # a probe checks that the client exists
        self._stream: RequestStream | None = None
        self._collected: list[_CollectedText] = []
        self._finished: dict[int, Finished] = {}
        self._ended: Ended | None = None

    @property
    def stream(self) -> RequestStream:
        assert self._stream is not None
        return self._stream

    @property
    def id(self) -> RequestId:
        return self.stream.submit.request_id

    def open(self, stream: RequestStream) -> None:
        self._stream = stream
        self._collected = [_CollectedText() for _ in range(stream.submit.choices)]

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
                    text_offset, text, details = event.text_offset, event.text, event.details
                    return self._piece(event.choice, text_offset, text, details)
            case Finished():
                self._finished[event.choice] = event
            case Ended():
                self._ended = event
                return self._end(event)
            case _:
                pass
        return None

    def record_all(self, events: Iterable[StreamEvent]) -> None:
        for event in events:
            self.record(event)

    def replay(self, places: Iterable[TextCursor]) -> Iterator[GenerateText | GenerateEnd]:
        """Format the output beyond some offsets, and the terminal event if it was recorded."""
        starts = {place.choice: place for place in places}
        if self.request.stream:
            for choice, collected in enumerate(self._collected):
                for piece in collected.after(starts.get(choice)):
                    yield self._piece(choice, *piece)
        # If the terminal event is still in the stream, so is text before it, which must come first.
        if self._ended is not None:
            yield self._end(self._ended)

    def ping(self) -> GenerateText:
        """A message without content, to check that the client has a subscription."""
        return self._piece(0, len(self._collected[0].text), "", None)

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
