"""Event queues of requests, written by the owner; several are read as one stream."""

from __future__ import annotations

import asyncio
import time
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.owner.actions import Accepted, Ended, Finished, StreamEvent, TextDelta
from antiphon.wire.base import Usage
from antiphon.wire.errors import GatewayLost, Unavailable
from antiphon.wire.token_outputs import TokenOutputsChunk, join_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.gateway.access.limits import QuotaReservation
    from antiphon.gateway.media.stored import HeldMedia, HeldPrompt
    from antiphon.telemetry.tracing import Span
    from antiphon.wire.base import FinishReason
    from antiphon.wire.errors import EngineError
    from antiphon.wire.ids import ClientKey, TenantId
    from antiphon.wire.submit import SubmitRequest
    from antiphon.wire.text import Origin


ChoiceEvent = TextDelta | Finished  # an event for the client


@dataclass(eq=False)
class RequestStream:
    """Event queue of a request. The owner bounds it: it ends a request whose text is not read."""

    submit: SubmitRequest
    trace: Span  # of the whole request, ended with it
    reservation: QuotaReservation  # held until the end
    _: KW_ONLY
    api: str
    received_at: float  # on the monotonic clock, as are the times below
    submitted_at: float
    accepted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    ended: Ended | None = None
    finish_reason: FinishReason | None = None
    on_end: Callable[[], None] | None = None  # called with or without a reader
    name: tuple[TenantId, ClientKey] | None = None  # the client's id of it
    starts_in_reasoning: bool = False
    truncated: bool = False
    media: HeldMedia | None = None  # held until the end
    media_error: EngineError | None = None  # why those of an adopted request are not here
    prompt: HeldPrompt | None = None  # held until the end, if it is too long for a message
    labels: tuple[str, ...] = ()  # values of its custom metric labels
    detached: bool = False  # its output has no reader, and is not kept here
    resumed: bool = False  # its output has been delivered before, perhaps by another gateway
    counted: bool = False  # its end is in the metrics already
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)  # shared by a reader of several
    _events: list[StreamEvent] = field(default_factory=list["StreamEvent"])

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    @property
    def created_unix_s(self) -> int:
        """When the client's request was received, by the clock of the gateway that received it."""
        resume = self.submit.resume
        return int(time.time()) if resume is None else resume.created_unix_s

    def replaced(self, reason: EngineError) -> RequestStream:
        """Return a stream of the same request in place of this one, whose reader gets an error."""
        new = replace(self, detached=False, resumed=True, wakeup=asyncio.Event(), _events=[])
        new.finish_reason = None
        self.name = self.on_end = None
        self.ended = Ended(Usage(), reason)
        self._events = [self.ended]
        self.wakeup.set()
        return new

    def put(self, event: StreamEvent, now: float) -> None:
        match event:
            case Accepted():
                self.accepted_at = now
            case TextDelta():
                self.first_token_at = self.first_token_at or now
                self.last_token_at = now
            case Finished():
                self.finish_reason = event.reason
            case Ended():
                event = self.ended = self._explained(event)
                self.ended_at = now
                self.trace.end(event.error)
                self.reservation.end(event.usage.prompt_tokens + event.usage.completion_tokens)
                if self.prompt is not None:
                    self.prompt.discard()
                if self.media is not None and isinstance(event.error, GatewayLost):
                    self.media.hand_over()  # it goes on elsewhere
                elif self.media is not None:
                    self.media.discard()
                if self.on_end is not None:
                    self.on_end()
        if not self.detached:
            self._events.append(event)
            self.wakeup.set()

    def _explained(self, ended: Ended) -> Ended:
        """Give the reason of an end for want of a medium, which only this gateway knows."""
        error, reason = ended.error, self.media_error
        if reason is None or not isinstance(error, Unavailable):
            return ended
        named = (error.param or "").startswith("media.")
        return Ended(ended.usage, reason) if named else ended

    async def get(self) -> list[StreamEvent]:
        """Wait for events and return all available ones in order. The last event is `Ended`."""
        while not self._events:
            self.wakeup.clear()
            await self.wakeup.wait()  # at most to the request's deadline, when its owner ends it
        return self.get_nowait()

    def get_nowait(self) -> list[StreamEvent]:
        events, self._events = self._events, []
        return events


def raise_if_failed(events: list[StreamEvent]) -> None:
    """Raise the error of a request that failed before any output."""
    first = events[0]
    if isinstance(first, Ended) and first.error is not None:
        raise first.error


class CollectedChoice(msgspec.Struct):
    deltas: list[TextDelta] = msgspec.field(default_factory=list[TextDelta])
    finished: Finished | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def details(self) -> TokenOutputsChunk | None:
        return join_chunks(delta.details for delta in self.deltas)

    @property
    def origins(self) -> tuple[Origin, ...]:
        if self.finished is not None:
            return self.finished.origins
        return self.deltas[-1].origins if self.deltas else ()

    @property
    def end(self) -> Finished:
        assert self.finished is not None, "every choice of a successful request has finished"
        return self.finished


class CollectedResponse:
    def __init__(self, stream: RequestStream) -> None:
        self.stream = stream
        self.choices = [CollectedChoice() for _ in range(stream.submit.choices)]

    @property
    def name(self) -> str:
        """The client's request id, or else the cluster's."""
        name = self.stream.name
        return str(self.stream.submit.request_id if name is None else name[1])

    @property
    def usage(self) -> Usage:
        assert self.stream.ended is not None
        return self.stream.ended.usage

    @property
    def weight_version(self) -> str | None:
        names = [choice.origins[-1].weights for choice in self.choices if choice.origins]
        return names[-1] if names else None

    def add(self, event: StreamEvent) -> None:
        if isinstance(event, TextDelta):
            self.choices[event.choice].deltas.append(event)
        elif isinstance(event, Finished):
            self.choices[event.choice].finished = event


class StreamGroup:
    """Reads the streams of a client's prompts, indexed in their order."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.streams = streams
        self.error: EngineError | None = None  # of the first request that failed; ends the group
        # Names the field as the API does, of the prompt with this index.
        self.on_error: Callable[[EngineError, int], None] = lambda _, __: None
        self._unended = len(streams)
        self._wakeup = asyncio.Event()
        self._woken = False
        for stream in streams:
            stream.wakeup = self._wakeup

    @property
    def ended(self) -> bool:
        """Whether every request has ended and all its events were read."""
        return not self._unended

    @property
    def done(self) -> bool:
        """Whether no more events will be read: all requests have ended, or one failed."""
        return self.ended or self.error is not None

    async def get(self) -> list[tuple[int, list[ChoiceEvent]]]:
        """Wait for events and return all available ones, with their prompt index.

        Returns nothing only if all requests had ended, one of them failed, or `wake` was called.
        """
        while True:
            taken = [
                (prompt, events)
                for prompt, stream in enumerate(self.streams)
                if stream.has_events and (events := self._drain(stream, prompt))
            ]
            nudged, self._woken = self._woken, False
            if taken or nudged or self.done:
                return taken
            self._wakeup.clear()
            await self._wakeup.wait()

    def wake(self) -> None:
        self._woken = True
        self._wakeup.set()

    def _drain(self, stream: RequestStream, prompt: int) -> list[ChoiceEvent]:
        events = stream.get_nowait()
        if isinstance(last := events[-1], Ended):
            self._unended -= 1
            if self.error is None and last.error is not None:
                self.error = last.error
                self.on_error(last.error, prompt)
        return [event for event in events if isinstance(event, TextDelta | Finished)]
