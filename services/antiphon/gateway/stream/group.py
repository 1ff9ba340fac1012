"""Several requests of one client that are answered together, heard as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.owner.actions import Ended, Finished, TextDelta
from antiphon.gateway.stream.stream import Wakeup
from antiphon.wire.token_outputs import join_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.gateway.owner.actions import StreamEvent
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.wire.base import Usage
    from antiphon.wire.errors import EngineError
    from antiphon.wire.text import Origin
    from antiphon.wire.token_outputs import TokenOutputsChunk


ChoiceEvent = TextDelta | Finished
"""What a client hears of a stream."""


class CollectedChoice(msgspec.Struct):
    """A choice of an answer that is told in one piece, as it grows."""

    said: list[TextDelta] = msgspec.field(default_factory=list[TextDelta])
    finished: Finished | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(said.text for said in self.said)

    @property
    def details(self) -> TokenOutputsChunk | None:
        """All that is told of its tokens."""
        return join_chunks(said.details for said in self.said)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where its tokens come from."""
        if self.finished is not None:
            return self.finished.origins
        return self.said[-1].origins if self.said else ()

    @property
    def end(self) -> Finished:
        """How it ended, once it has."""
        assert self.finished is not None, "a request ends well when all its choices have ended"
        return self.finished


class CollectedResponse:
    """All that was said to one prompt."""

    def __init__(self, stream: RequestStream) -> None:
        self.stream = stream
        self.choices = [CollectedChoice() for _ in range(stream.submit.choices)]

    @property
    def name(self) -> str:
        """What the client calls it, or else its id."""
        name = self.stream.name
        return str(self.stream.submit.request_id if name is None else name[1])

    @property
    def usage(self) -> Usage:
        """Its tokens, once it has ended."""
        assert self.stream.ended is not None
        return self.stream.ended.usage

    @property
    def weight_version(self) -> str | None:
        """What the weights are called that drew its last tokens, if a worker has said so."""
        names = [choice.origins[-1].weights for choice in self.choices if choice.origins]
        return names[-1] if names else None

    def add(self, event: StreamEvent) -> None:
        """Keep what an event says."""
        if isinstance(event, TextDelta):
            self.choices[event.choice].said.append(event)
        elif isinstance(event, Finished):
            self.choices[event.choice].finished = event


class StreamGroup:
    """Reads the streams of a client's prompts, which are numbered in their order.

    Attributes:
        error: What one of them has ended with, once that was taken: it ends them all.
        on_error: Called with it first, so that it names the field at fault as the client does.
    """

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.streams = streams
        self.error: EngineError | None = None
        self.on_error: Callable[[EngineError], None] = lambda _: None
        self._unended = len(streams)
        self._wakeup = Wakeup()
        self._woken = False
        for stream in streams:
            stream.wakeup = self._wakeup

    @property
    def ended(self) -> bool:
        """Whether every request has its terminal, and all before it was taken."""
        return not self._unended

    async def get(self) -> list[tuple[int, list[ChoiceEvent]]]:
        """Wait for what a client hears; return all there is, by prompt.

        Nothing only if there was none before all have ended, or one of them with an error; or
        after a `nudge`.
        """
        while True:
            taken = [
                (prompt, events)
                for prompt, stream in enumerate(self.streams)
                if stream.has_events and (events := self._drain(stream))
            ]
            nudged, self._woken = self._woken, False
            if taken or nudged or self.ended or self.error is not None:
                return taken
            await self._wakeup.wait()

    def wake(self) -> None:
        """Let `take` return though there is nothing."""
        self._woken = True
        self._wakeup.notify()

    def _drain(self, stream: RequestStream) -> list[ChoiceEvent]:
        events = stream.get_nowait()
        if isinstance(last := events[-1], Ended):
            self._unended -= 1
            if self.error is None and last.error is not None:
                self.error = last.error
                self.on_error(last.error)
        return [event for event in events if isinstance(event, TextDelta | Finished)]
