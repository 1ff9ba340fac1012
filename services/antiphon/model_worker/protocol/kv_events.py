"""Publishing of KV cache events: each one as it happens, and replays of missed ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.cache.events import EventLog
from antiphon.wire.codec import split_rows
from antiphon.wire.kv_events import BlocksCleared, KvEvent, KvEvents, KvReplayed, ReplayKv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.wire.base import Process

MESSAGE_BYTES_MAX = 128 * 1024
"""Approximate maximum size of a message of events: far below the broker's limit."""

_EVENT_BYTES = 64  # an event without its digests, about


class KvEventPublisher:
    """The events of this worker process, from the first one on. Pure: it does not use the bus.

    Nothing is buffered while the bus is disconnected: unsent events leave a gap in the numbers, and
    the listener requests a replay.
    """

    def __init__(self, worker: Process, events_max: int) -> None:
        self._worker = worker
        self._log = EventLog(events_max)
        self._unsent: list[KvEvent] = []
        self._snapshot: tuple[int, list[list[KvEvent]]] = (0, [])

    @property
    def seq(self) -> int:
        return self._log.seq

    def add(self, events: Sequence[KvEvent]) -> None:
        self._log.add(events)
        self._unsent += events

    def take(self) -> list[KvEvents]:
        """All events not taken yet, as messages, to be published in this order or not at all."""
        if not self._unsent:
            return []
        events, self._unsent = self._unsent, []
        seq = self._log.seq - len(events)
        messages: list[KvEvents] = []
        for part in split_rows(events, _event_bytes, MESSAGE_BYTES_MAX):
            seq += len(part)
            messages.append(KvEvents(worker=self._worker, seq=seq, events=tuple(part)))
        return messages

    def replay(self, message: ReplayKv) -> KvReplayed:
        """Reply to a listener that missed events, with as many as fit into a message."""
        seq, pieces = self._snapshot
        if message.part and message.snapshot == seq and message.part < len(pieces):
            return self._part(message.part)
        if message.part or not self._log.reaches(message.after):
            # A listener at its limit requests everything: the events since the last snapshot would
            # make it evict blocks that are present now.
            return self._everything(exact=message.after < 0 and not message.part)
        events = self._log.replay(message.after)
        nothing: list[KvEvent] = []
        first = next(split_rows(events, _event_bytes, MESSAGE_BYTES_MAX), nothing)
        seq = message.after + len(first)
        return KvReplayed(worker=self._worker, seq=seq, events=tuple(first))

    def _everything(self, *, exact: bool) -> KvReplayed:
        """The first part of a snapshot: of the last one, while all later events are in the log.

        With `exact` the last one is reused only if there were no events since.
        """
        seq, pieces = self._snapshot
        if not pieces or not self._log.reaches(seq) or (exact and seq < self._log.seq):
            pieces = list(split_rows(self._log.replay(-1), _event_bytes, MESSAGE_BYTES_MAX))
            self._snapshot = (self._log.seq, pieces)
        return self._part(0)

    def _part(self, index: int) -> KvReplayed:
        seq, pieces = self._snapshot
        following = index + 1 if index + 1 < len(pieces) else 0
        events = tuple(pieces[index])
        return KvReplayed(
            worker=self._worker, seq=seq, events=events, snapshot=True, part=following
        )


def _event_bytes(event: KvEvent) -> int:
    return _EVENT_BYTES + (0 if isinstance(event, BlocksCleared) else len(event.digests))
