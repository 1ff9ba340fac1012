"""Which detokenizers' text is incomplete, by sequence numbers; recovery is the owner's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.service.sequence import Arrival, SeqReceiver

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.wire.base import Process
    from antiphon.wire.heartbeat import StreamSeq
    from antiphon.wire.ids import InstanceId


class StreamGaps:
    """Notes losses until they have been asked for. Pure."""

    def __init__(self, receiver: InstanceId) -> None:
        self._receiver = receiver
        self._seqs = SeqReceiver()
        self._incomplete: set[Process] = set()
        self._resuming: set[Process] = set()

    def has_gap(self, sender: Process) -> bool:
        """Whether a batch is missing that was not asked for yet."""
        return sender in self._incomplete

    def resuming(self, sender: Process) -> bool:
        """Whether the sender is being asked."""
        return sender in self._resuming

    def on_batch(self, sender: Process, seq: int) -> None:
        """Note a batch. One that comes late or twice is no loss: text is placed by its offset."""
        if self._seqs.accept(sender, seq) is Arrival.GAP:
            self._incomplete.add(sender)

    def on_heartbeat(self, sender: Process, streams: Iterable[StreamSeq]) -> None:
        """Note how much was sent, from a heartbeat: the loss of a tail shows only there."""
        if self._seqs.tail_lost(sender, self._receiver, streams):
            self._incomplete.add(sender)

    def begin_resume(self, sender: Process) -> None:
        """Everything missing so far is being asked for."""
        self._incomplete.discard(sender)
        self._resuming.add(sender)

    def end_resume(self, sender: Process, *, answered: bool) -> None:
        """Note how the asking went; one that failed leaves the loss."""
        self._resuming.discard(sender)
        if not answered:
            self._incomplete.add(sender)

    def forget(self, sender: Process) -> None:
        """Drop a life that has ended."""
        self._seqs.forget(sender)
        self._incomplete.discard(sender)
        self._resuming.discard(sender)
