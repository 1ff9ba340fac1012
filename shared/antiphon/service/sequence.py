"""Numbers on a stream that show loss and nothing more; recovery goes by offsets.

`seq` is per (sender's life, receiver's name) and grows by one a message, from 1.
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


class SeqSender:
    """Numbers the messages to each receiver."""

    def __init__(self) -> None:
        # Never emptied: a receiver that was thought dead would take a restart at 1 for old news.
        self._last: OrderedDict[InstanceId, int] = OrderedDict()

    def next(self, receiver: InstanceId) -> int:
        """The number of the next message. It is used up even if the message cannot be sent."""
        seq = self._last.pop(receiver, 0) + 1
        self._last[receiver] = seq
        return seq

    def streams(self) -> tuple[StreamSeq, ...]:
        """The last number to each receiver, for the heartbeat: it shows the loss of a tail.

        Only the receivers most recently sent to: whoever was sent to long ago has heard of it.
        """
        recent = list(self._last.items())[-_STREAMS_LISTED:]
        return tuple(StreamSeq(receiver=receiver, seq=seq) for receiver, seq in recent)


class Arrival(StrEnum):
    """What a number says of its message."""

    NEXT = "next"
    DUPLICATE = "duplicate"
    """It came before, or is older than what came."""
    GAP = "gap"
    """One or more before it are lost. This one counts as come: ask for what is missing."""


class SeqReceiver:
    """Checks the numbers of each sender's life."""

    def __init__(self) -> None:
        self._last: OrderedDict[Process, int] = OrderedDict()
        self._named: dict[Process, int] = {}

    def accept(self, sender: Process, seq: int) -> Arrival:
        """Take note of a message. The first one ever heard is a gap unless it is number 1."""
        last = self._last.get(sender, 0)
        if seq <= last:
            return Arrival.DUPLICATE
        self._advance(sender, seq)
        return Arrival.NEXT if seq == last + 1 else Arrival.GAP

    def tail_lost(
        self, sender: Process, receiver: InstanceId, streams: Iterable[StreamSeq]
    ) -> bool:
        """Whether messages are missing at the end, by the sender's heartbeat; then ask for them.

        A heartbeat may overtake the messages that it counts, so the one before it is held against
        what has come by now. A loss is reported once.
        """
        seq = next((stream.seq for stream in streams if stream.receiver == receiver), 0)
        named = self._named.get(sender, 0)
        if seq:
            self._named[sender] = seq
        if named <= self._last.get(sender, 0):
            return False
        self._advance(sender, named)
        return True

    def forget(self, sender: Process) -> None:
        """Drop a life that has ended."""
        self._last.pop(sender, None)
        self._named.pop(sender, None)

    def _advance(self, sender: Process, seq: int) -> None:
        self._last[sender] = seq
        self._last.move_to_end(sender)
        if len(self._last) > _SENDERS_MAX:
            self.forget(next(iter(self._last)))
