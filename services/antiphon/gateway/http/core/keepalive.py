"""When to send the headers of a stream, and keepalive pings while it has no data."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

    from antiphon.gateway.stream.stream import StreamGroup
    from antiphon.service.clock import Clock

HEADERS_S = 0.5
"""An error within this time after receipt still has its own status."""
REFUSAL_S = 0.1
"""So has an error this soon after the leader accepted the request, which follows encoding."""
ACCEPT_S = 10.0
"""Maximum wait for the leader. Then the headers are sent, and errors follow them."""
PING_S = 10.0
"""Maximum time between two writes of a stream."""
_LOOK_S = 0.1


class IdleTimer:
    """Measures how long a stream has sent nothing."""

    def __init__(self, stream_group: StreamGroup, clock: Clock) -> None:
        self._stream_group = stream_group
        self._clock = clock
        self._began_at = clock.now()
        self._sent_at: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether something is due: the headers, or a ping after them."""
        return self._clock.now() >= self._due_at()

    def reset(self) -> None:
        self._sent_at = self._clock.now()

    def _due_at(self) -> float:
        if self._sent_at is not None:
            return self._sent_at + PING_S
        due_at = 0.0
        for stream in self._stream_group.streams:
            if stream.accepted_at is None:
                return self._began_at + ACCEPT_S
            due_at = max(due_at, stream.received_at + HEADERS_S, stream.accepted_at + REFUSAL_S)
        return min(due_at, self._began_at + ACCEPT_S)


class Keepalive:
    """Wakes the writers of idle streams. One task for all: most streams are never idle."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[IdleTimer, StreamGroup] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.check()

    def check(self) -> None:
        for silence, stream_group in self._open.items():
            if silence.is_due:
                stream_group.wake()

    @contextmanager
    def watch(self, stream_group: StreamGroup) -> Generator[IdleTimer]:
        silence = IdleTimer(stream_group, self._clock)
        self._open[silence] = stream_group
        try:
            yield silence
        finally:
            del self._open[silence]
