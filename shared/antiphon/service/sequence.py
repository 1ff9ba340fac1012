"""Sequence numbers of a stream. They only detect losses; recovery uses offsets.

`seq` is per (sender's incarnation, receiver's name) and increases by one per message, from 1.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING

from antiphon.wire.heartbeat import StreamSeq

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.wire.base import Process
    from antiphon.wire.ids import InstanceId

_STREAMS_LISTED = 64
_SENDERS_MAX = 4096
_RECEIVERS_MAX = 65_536
"""Maximum number of receivers; beyond it the one that was sent nothing for the longest is dropped.
Names are used again when a process is started again, except where its host names it anew."""


class SeqSender:
    def __init__(self) -> None:
        # Not cleared when one dies: if numbers restarted at 1, a receiver that only seemed dead
        # would take the messages for duplicates.
        self._last: OrderedDict[InstanceId, int] = OrderedDict()

    def next(self, receiver: InstanceId) -> int:
        """Return the number of the next message. It is consumed even if sending fails."""
        seq = self._last.pop(receiver, 0) + 1
        self._last[receiver] = seq
        if len(self._last) > _RECEIVERS_MAX:
            self._last.popitem(last=False)
        return seq

    def streams(self) -> tuple[StreamSeq, ...]:
        """Return the last number of each receiver, for the heartbeat: it reveals a lost tail."""
        # Only of the most recent receivers: earlier heartbeats have covered the others.
        recent = list(self._last.items())[-_STREAMS_LISTED:]
        return tuple(StreamSeq(receiver=receiver, seq=seq) for receiver, seq in recent)


class Arrival(StrEnum):
    NEXT = "next"
    DUPLICATE = "duplicate"
    """It was received before, or is older than the last one."""
    GAP = "gap"
    """One or more messages before it are lost. It is accepted: request the missing ones."""


class SeqReceiver:
    def __init__(self) -> None:
        self._last: OrderedDict[Process, int] = OrderedDict()
        self._named: dict[Process, int] = {}

    def senders(self) -> list[Process]:
        return list(self._last)

    def accept(self, sender: Process, seq: int) -> Arrival:
        """Record a message. The first one of a sender is a gap unless it is number 1."""
        last = self._last.get(sender, 0)
        if seq <= last:
            return Arrival.DUPLICATE
        self._advance(sender, seq)
        return Arrival.NEXT if seq == last + 1 else Arrival.GAP

    def tail_lost(
        self, sender: Process, receiver: InstanceId, streams: Iterable[StreamSeq]
    ) -> bool:
        """Whether messages are missing at the end, according to the sender's heartbeats."""
        # A heartbeat may overtake the messages that it counts, so the received ones are compared
        # with the heartbeat before it. A loss is reported once.
        seq = next((stream.seq for stream in streams if stream.receiver == receiver), 0)
        named = self._named.get(sender, 0)
        if seq:
            self._named[sender] = seq
        if named <= self._last.get(sender, 0):
            return False
        self._advance(sender, named)
        return True

    def forget(self, sender: Process) -> None:
        self._last.pop(sender, None)
        self._named.pop(sender, None)

    def _advance(self, sender: Process, seq: int) -> None:
        self._last[sender] = seq
        self._last.move_to_end(sender)
        if len(self._last) > _SENDERS_MAX:
            self.forget(next(iter(self._last)))
