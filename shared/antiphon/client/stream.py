"""One request of a client, from submission to its end: retried, ordered, resumed.

docs/nats-client.md specifies this protocol for clients in any language.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from antiphon.bus.transport import BusDown, NoResponders, Packet
from antiphon.wire.codec import MalformedMessage, decode, encode
from antiphon.wire.errors import (
    DeadlineExceeded,
    EngineError,
    ErrorReply,
    InvalidRequest,
    Overloaded,
    RateLimited,
    Unavailable,
    UnknownStream,
    WrongTerm,
    decode_error,
)
from antiphon.wire.generate import (
    GenerateAccepted,
    GenerateCancel,
    GenerateEnd,
    GenerateRequest,
    GenerateResume,
    GenerateText,
    ResumePosition,
    TextCursor,
)
from antiphon.wire.ids import RequestId, TenantId, new_request_id
from antiphon.wire.routes import CLIENT_TEXT, GATEWAY_CONTROL, GENERATE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon.bus.bus import Bus
    from antiphon.wire.base import FinishReason, Usage
    from antiphon.wire.token_outputs import TokenOutputsChunk

log = logging.getLogger(__name__)

SILENCE_S = 2.0
"""Time without progress after which the client retries or resumes, which is always harmless."""
CALL_TIMEOUT_S = 2.0
NO_RESPONDERS_TIMEOUT_S = 6.0
"""How long to retry without responders: gateways need a while to reconnect to a broker."""
EVENTS_MAX = 1024
"""Maximum messages queued for a slow caller. More are dropped, and resumed like lost ones."""

_TRANSIENT = (Unavailable, Overloaded, RateLimited, DeadlineExceeded, WrongTerm)
"""Errors after which a response may still be resumed."""

Event = GenerateAccepted | GenerateText | GenerateEnd | ErrorReply | NoResponders


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """More text of one choice, with token outputs if requested."""

    choice: int
    text: str
    details: TokenOutputsChunk | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole response."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    request_id: RequestId
    details: TokenOutputsChunk | None = None


class GenerationStream:
    """One request on its own inbox; `end` is its end, once received.

    The first `GenerateAccepted` determines the request id. A retry may reach another gateway, which
    does not know the first try and starts a second request: that one is cancelled, and its text is
    ignored.

    If the gateway is lost, a request with `resume_s` is continued at any gateway.
    """

    def __init__(self, bus: Bus, tenant: TenantId, request: GenerateRequest) -> None:
        self.end: GenerateEnd | None = None
        self._bus = bus
        self._request = request
        self._inbox = bus.subject(CLIENT_TEXT, tenant=tenant, inbox=new_request_id())
        self._events: asyncio.Queue[Event] = asyncio.Queue(EVENTS_MAX)
        self._assembler = TextAssembler()
        self._accepted: GenerateAccepted | None = None
        self._tries = 0
        self._text_before_accept = False
        self._resumed_from: tuple[TextCursor, ...] | None = None
        self._retry_at = 0.0
        self._no_responders_since: float | None = None
        self._lost_since: float | None = None  # when its gateway was found to be lost

    async def chunks(self, timeout_s: float) -> AsyncGenerator[CompletionChunk]:
        """Yield text until the request has ended or failed. Leaving early cancels it."""
        deadline = now() + timeout_s
        subscription = await self._bus.transport.subscribe(self._inbox, self._receive)
        try:
            await self._retry()
            while self.end is None:
                event = await self._next(deadline)
                if event is not None and (chunk := await self._apply(event)) is not None:
                    yield chunk
                    self._mark_progress()  # the caller's own time does not count as silence
        finally:
            await subscription.drain()
            await self.cancel()

    async def cancel(self) -> None:
        """Cancel the request at the gateway, unless it has ended."""
        if self.end is None and self._accepted is not None:
            await self._cancel(self._accepted)

    async def _next(self, deadline: float) -> Event | None:
        """Return the next event, or None after a timeout, on which it retries."""
        try:
            async with asyncio.timeout_at(min(deadline, self._retry_at)):
                return await self._events.get()
        except TimeoutError:
            if now() >= deadline:
                raise DeadlineExceeded("the request did not end before the timeout") from None
        await self._retry()
        return None

    async def _apply(self, event: Event) -> CompletionChunk | None:
        match event:
            case NoResponders():
                self._on_no_responders(event)
            case GenerateAccepted():
                await self._accept(event)
            case ErrorReply():
                self._on_rejection(decode_error(event))
            case _ if self._accepted is None:
                self._text_before_accept = True
            case _ if event.request_id != self._accepted.request_id:
                pass  # of a second request, until it is cancelled
            case GenerateText():
                return await self._assemble(event)
            case GenerateEnd():
                return await self._finish(event)
        return None

    async def _accept(self, accepted: GenerateAccepted) -> None:
        if self._accepted is None:
            self._accepted = accepted
            self._assembler = TextAssembler(accepted.details_from or 0)
            self._mark_progress()
            if self._text_before_accept:
                await self._retry()
        elif accepted.request_id != self._accepted.request_id:
            await self._cancel(accepted)
        elif accepted.gateway != self._accepted.gateway or self._lost_since is not None:
            self._accepted, self._lost_since = accepted, None
            self._mark_progress()

    def _on_rejection(self, error: EngineError) -> None:
        """Raise the error of the first submission, or of a resumption that cannot succeed later."""
        if self._accepted is None:
            raise error
        if isinstance(error, UnknownStream) and self._lost_since is not None:
            raise Unavailable("the response cannot be resumed any more") from error
        if self._lost_since is not None and not self._may_retry_after(error):
            raise error
        # Else it is that of a retry, which does not matter once the request is accepted.

    def _may_retry_after(self, error: EngineError) -> bool:
        """Whether to resume again after an error; the window begins when the gateway was lost."""
        assert self._lost_since is not None
        left = now() - self._lost_since < max(self._request.resume_s or 0, NO_RESPONDERS_TIMEOUT_S)
        return left and isinstance(error, _TRANSIENT)

    async def _assemble(self, text: GenerateText) -> CompletionChunk | None:
        if (new := self._assembler.add(text)) is None:
            await self._resume_once()
        elif new.text or new.details:
            self._mark_progress()
            return CompletionChunk(new.choice, new.text, new.details)
        return None

    async def _finish(self, end: GenerateEnd) -> CompletionChunk | None:
        """Finish, unless the total length shows that text is missing."""
        if end.error is not None:
            self.end = end
            raise decode_error(end.error)
        whole: list[CompletionChunk] = []
        for choice in end.choices:
            if choice.text is not None:
                whole.append(CompletionChunk(choice.choice, choice.text, choice.details))
            elif (
                self._assembler.text_offset(choice.choice) < choice.text_bytes
                or self._assembler.token_offset(choice.choice) < choice.details_end
            ):
                await self._resume_once()
                return None
        self.end = end
        return whole[0] if whole else None

    def _mark_progress(self) -> None:
        self._retry_at = now() + SILENCE_S
        self._no_responders_since = None

    async def _resume_once(self) -> None:
        """Resume once per position: messages until the reply show the same gap."""
        if self._resumed_from != self._assembler.cursors:
            await self._retry()

    async def _retry(self) -> None:
        """Submit with the same key, or resume if the request was accepted."""
        self._retry_at = now() + SILENCE_S
        if self._accepted is None:
            self._tries += 1
            self._submit(self._request)
        elif self._lost_since is None:
            await self._resume(self._accepted)
        else:
            self._resume_anywhere(self._accepted)

    def _submit(self, request: GenerateRequest) -> None:
        subject = self._bus.subject(GENERATE, model=request.model)
        try:
            self._bus.transport.publish(subject, encode(request), self._inbox)
        except BusDown:
            return  # retried after SILENCE_S

    async def _resume(self, accepted: GenerateAccepted) -> None:
        self._resumed_from = self._assembler.cursors
        resume = GenerateResume(request_id=accepted.request_id, places=self._assembler.cursors)
        try:
            await self._call(accepted, resume)
        except (NoResponders, InvalidRequest, DeadlineExceeded) as error:
            if self._request.resume_s is not None:
                self._lost_since = now()
                self._resume_anywhere(accepted)
            elif isinstance(error, NoResponders):
                self._on_no_responders(error)
            elif isinstance(error, InvalidRequest):
                raise Unavailable("the gateway of this request has forgotten it") from error
            # Else it is retried after SILENCE_S.
        except EngineError:
            return  # retried after SILENCE_S
        else:
            self._no_responders_since = None

    def _resume_anywhere(self, accepted: GenerateAccepted) -> None:
        """Send the request again with what was received of its response, to any gateway."""
        position = ResumePosition(request_id=accepted.request_id, places=self._assembler.cursors)
        self._submit(msgspec.structs.replace(self._request, resume_from=position))

    def _on_no_responders(self, error: NoResponders) -> None:
        """Raise the error: at once on the first try, else after a timeout."""
        if self._lost_since is not None:
            self._on_rejection(error)
            return
        if self._no_responders_since is None:
            self._no_responders_since = now()
        first = self._accepted is None and self._tries == 1
        if first or now() - self._no_responders_since >= NO_RESPONDERS_TIMEOUT_S:
            raise error

    async def _cancel(self, accepted: GenerateAccepted) -> None:
        try:
            await self._call(accepted, GenerateCancel(request_id=accepted.request_id))
        except EngineError:
            return  # the gateway detects by itself that the inbox has no subscriber

    async def _call(
        self, accepted: GenerateAccepted, message: GenerateResume | GenerateCancel
    ) -> None:
        gateway = accepted.gateway
        await self._bus.call(GATEWAY_CONTROL, message, timeout_s=CALL_TIMEOUT_S, gateway=gateway)

    def _receive(self, packet: Packet) -> None:
        event: Event
        if packet.no_responders:
            event = NoResponders("no gateway serves this model", retry_after_s=1.0)
        else:
            try:
                event = decode(packet.data, CLIENT_TEXT.carries)
            except MalformedMessage as error:
                # Its content is resumed like that of a lost message.
                log.warning("message dropped", extra={"reason": error.message})
                return
        if not self._events.full():
            self._events.put_nowait(event)


class TextAssembler:
    """Accepts text in any order, with repeats, and returns each byte once and in order. Pure.

    The same holds for token outputs, from the offset `details_from` on.
    """

    def __init__(self, details_from: int = 0) -> None:
        self._details_from = details_from
        self._bytes: dict[int, int] = {}
        self._tokens: dict[int, int] = {}

    @property
    def cursors(self) -> tuple[TextCursor, ...]:
        """How much of each choice was returned."""
        return tuple(
            TextCursor(choice=choice, text_offset=length, token_offset=self.token_offset(choice))
            for choice, length in self._bytes.items()
        )

    def text_offset(self, choice: int) -> int:
        """The number of bytes of a choice that were returned."""
        return self._bytes.get(choice, 0)

    def token_offset(self, choice: int) -> int:
        """The offset up to which token outputs of a choice were returned."""
        return self._tokens.get(choice, self._details_from)

    def add(self, piece: GenerateText) -> GenerateText | None:
        """Return the new part of a piece, possibly empty; None if there is a gap before it."""
        text_offset, token_offset = self.text_offset(piece.choice), self.token_offset(piece.choice)
        details = piece.details
        if piece.text_offset > text_offset:
            return None
        if details is not None and details.offset > token_offset:
            return None
        new = piece.text.encode()[text_offset - piece.text_offset :]
        try:
            text = new.decode()
        except UnicodeDecodeError:
            return None  # the offset splits a character: not a continuation of the text so far
        self._bytes[piece.choice] = text_offset + len(new)
        if details is not None:
            details = details.beyond(token_offset) if details.end > token_offset else None
        if details is not None:
            self._tokens[piece.choice] = details.end
        return msgspec.structs.replace(piece, text_offset=text_offset, text=text, details=details)


def now() -> float:
    """The time of the running loop, in seconds."""
    return asyncio.get_running_loop().time()
