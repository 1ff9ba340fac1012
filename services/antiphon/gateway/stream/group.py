"""Several requests of one client, read as one stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.owner.actions import Ended, Finished, TextDelta
from antiphon.wire.token_outputs import join_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.gateway.owner.actions import StreamEvent
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.wire.base import Usage
    from antiphon.wire.errors import EngineError
    from antiphon.wire.text import Origin
    from antiphon.wire.token_outputs import TokenOutputsChunk


ChoiceEvent = TextDelta | Finished  # an event for the client


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
        """Weight version that sampled the last tokens, if known."""
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
        # Names the field as the API does.
        self.on_error: Callable[[EngineError], None] = lambda _: None
        self._unended = len(streams)
        self._wakeup = asyncio.Event()
        self._woken = False
        for stream in streams:
            stream.wakeup = self._wakeup

    @property
    def ended(self) -> bool:
        """Whether every request has ended and all its events were read."""
        return not self._unended

    async def get(self) -> list[tuple[int, list[ChoiceEvent]]]:
        """Wait for events and return all available ones, with their prompt index.

        Returns nothing only if all requests had ended, one of them failed, or `wake` was called.
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
            self._wakeup.clear()
            await self._wakeup.wait()

    def wake(self) -> None:
        self._woken = True
        self._wakeup.set()

    def _drain(self, stream: RequestStream) -> list[ChoiceEvent]:
        events = stream.get_nowait()
        if isinstance(last := events[-1], Ended):
            self._unended -= 1
            if self.error is None and last.error is not None:
                self.error = last.error
                self.on_error(last.error)
        return [event for event in events if isinstance(event, TextDelta | Finished)]
