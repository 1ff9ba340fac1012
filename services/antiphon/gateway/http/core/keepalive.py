"""When a streamed answer sends its headers, and a ping while it has nothing else to send."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

    from antiphon.gateway.stream.group import StreamGroup
    from antiphon.service.clock import Clock

HEADERS_S = 0.5
"""An error within this time after a request came still has its own status."""
REFUSAL_S = 0.1
"""So has one within this time after the leader accepted it, which waits for the encoding."""
ACCEPT_S = 10.0
"""Longest wait for the leader. After it the headers go out all the same, and errors follow them."""
PING_S = 10.0
"""Longest silence of a stream."""
_LOOK_S = 0.1


class IdleTimer:
    """How long a stream has sent nothing."""

    def __init__(self, stream_group: StreamGroup, clock: Clock) -> None:
        self._chorus = stream_group
        self._clock = clock
        self._began_at = clock.now()
        self._sent_at: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether something is due: the headers, or a ping once they are sent."""
        return self._clock.now() >= self._due_at()

    def reset(self) -> None:
        """Note that something went out."""
        self._sent_at = self._clock.now()

    def _due_at(self) -> float:
        if self._sent_at is not None:
            return self._sent_at + PING_S
        due_at = 0.0
        for stream in self._chorus.streams:
            if stream.accepted_at is None:
                return self._began_at + ACCEPT_S
            due_at = max(due_at, stream.received_at + HEADERS_S, stream.accepted_at + REFUSAL_S)
        return min(due_at, self._began_at + ACCEPT_S)


class Keepalive:
    """Wakes the writers of silent streams. One task for all: most streams are never silent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[IdleTimer, StreamGroup] = {}

    async def run(self) -> None:
        """Look at every stream again and again, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.check()

    def check(self) -> None:
        """Wake the writers for which something is due."""
        for silence, stream_group in self._open.items():
            if silence.is_due:
                stream_group.wake()

    @contextmanager
    def watch(self, stream_group: StreamGroup) -> Generator[IdleTimer]:
        """Watch a stream while inside."""
        silence = IdleTimer(stream_group, self._clock)
        self._open[silence] = stream_group
        try:
            yield silence
        finally:
            del self._open[silence]
