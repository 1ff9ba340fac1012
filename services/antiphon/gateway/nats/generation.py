"""One request of a NATS client: what has been said, so that it can be said again, and to whom."""

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
    """Keeps what was said of a request until some time after its end. No bus and no clock.

    Attributes:
        delivery: How the client is answered: its last try, whose inbox and form hold from then on.
        digest: Of what it asked; tells a retry from another request under the same key.
        entered: Set when the request is open, or `refusal` says why not.
        told: Whether the terminal has been sent.
        unheard: Whether the last message found no listener.
        looked_for: Whether it is being found out if the client is gone.
    """

    def __init__(
        self, request: GenerateRequest, tenant: TenantId, digest: bytes, delivery: Delivery
    ) -> None:
        self.request = request
        self.tenant = tenant
        self.digest = digest
        self.delivery = delivery
        self.opened = asyncio.Event()
        self.refusal: EngineError | None = None
        self.end_sent = False
        self.undelivered = False
        self.probing = False
        self._stream: RequestStream | None = None
        self._collected: list[_CollectedText] = []
        self._finished: dict[int, Finished] = {}
        self._ended: Ended | None = None

    @property
    def stream(self) -> RequestStream:
        """Where its events come from, once it has entered."""
        assert self._stream is not None
        return self._stream

    @property
    def id(self) -> RequestId:
        """The request's name in the cluster."""
        return self.stream.submit.request_id

    def open(self, stream: RequestStream) -> None:
        """The request is open."""
        self._stream = stream
        self._collected = [_CollectedText() for _ in range(stream.submit.choices)]

    def accepted(self, gateway: InstanceId) -> GenerateAccepted:
        """The answer to each try."""
        submit = self.stream.submit
        return GenerateAccepted(
            key=self.request.key,
            request_id=self.id,
            gateway=gateway,
            details_from=submit.sampling.details_from(id_count(submit.prompt_ids)),
        )

    def record(self, event: StreamEvent) -> GenerateText | GenerateEnd | None:
        """Keep what an event says, and write it for the client if it is news for it."""
        match event:
            case TextDelta():
                self._collected[event.choice].add(event)
                if self.request.stream:
                    piece = (event.text_offset, event.text, event.details)
                    return self._piece(event.choice, *piece)
            case Finished():
                self._finished[event.choice] = event
            case Ended():
                self._ended = event
                return self._end(event)
            case _:
                pass
        return None

    def record_all(self, events: Iterable[StreamEvent]) -> None:
        """Keep what events say, for `again`."""
        for event in events:
            self.record(event)

    def replay(self, places: Iterable[TextCursor]) -> Iterator[GenerateText | GenerateEnd]:
        """Write what lies beyond some places, and the terminal once it was heard.

        Raises:
            InvalidRequest: A place is not between two characters of the text.
        """
        starts = {place.choice: place for place in places}
        if self.request.stream:
            for choice, collected in enumerate(self._collected):
                for piece in collected.after(starts.get(choice)):
                    yield self._piece(choice, *piece)
        # A terminal that waits in the stream still has text before it, which it would leave out.
        if self._ended is not None:
            yield self._end(self._ended)

    def ping(self) -> GenerateText:
        """Something to say that changes nothing, to see whether anybody listens."""
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
    """All that was said of one choice."""

    def __init__(self) -> None:
        self.text = bytearray()
        self.details = TokenOutputsBuffer()
        self._texts: dict[int, str] = {}
        self._written: dict[int, bytes] = {}

    def add(self, said: TextDelta) -> None:
        self.text += said.text.encode()
        if said.details is not None:
            if not self.details:
                self.details = TokenOutputsBuffer(said.details.offset)
            self.details.append(said.details.details)
            self._texts |= said.details.texts
            self._written |= said.details.written

    def after(
        self, place: TextCursor | None
    ) -> Iterator[tuple[int, str, TokenOutputsChunk | None]]:
        """What lies beyond a place, as (offset, text, details), text first."""
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
        told = place.token_offset if place else None
        told = self.details.first if told is None else max(told, self.details.first)
        tokens = max(1, _PIECE_BYTES_MAX // 2 // max(1, self.details.token_bytes))
        for first in range(told, self.details.end, tokens):
            yield len(self.text), "", self.piece(first, first + tokens)

    def piece(self, start: int, stop: int) -> TokenOutputsChunk:
        details = self.details.read(start, stop)
        piece = TokenOutputsChunk(offset=max(start, self.details.first), details=details)
        return piece.with_texts(self._texts, self._written)
