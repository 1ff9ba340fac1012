"""Detects missing text of detokenizers by sequence numbers; recovery is the owner's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.service.sequence import Arrival, SeqReceiver

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.wire.base import Process
    from antiphon.wire.heartbeat import StreamSeq
    from antiphon.wire.ids import InstanceId


class StreamGaps:
    """Records losses until they have been fetched. Pure."""

    def __init__(self, receiver: InstanceId) -> None:
        self._receiver = receiver
        self._seqs = SeqReceiver()
        self._incomplete: set[Process] = set()
        self._resuming: set[Process] = set()

    def has_gap(self, sender: Process) -> bool:
        return sender in self._incomplete

    def resuming(self, sender: Process) -> bool:
        return sender in self._resuming

    def on_batch(self, sender: Process, seq: int) -> None:
        """Record a batch. A late or repeated one is no loss: text is placed by offset."""
        if self._seqs.accept(sender, seq) is Arrival.GAP:
            self._incomplete.add(sender)

    def on_heartbeat(self, sender: Process, streams: Iterable[StreamSeq]) -> None:
        """Record the sent count of a heartbeat: the loss of the last batch shows only there."""
        if self._seqs.tail_lost(sender, self._receiver, streams):
            self._incomplete.add(sender)

    def begin_resume(self, sender: Process) -> None:
        self._incomplete.discard(sender)
        self._resuming.add(sender)

    def end_resume(self, sender: Process, *, answered: bool) -> None:
        """Record the outcome of a fetch; after a failure the loss remains."""
        self._resuming.discard(sender)
        if not answered:
            self._incomplete.add(sender)

    def forget(self, sender: Process) -> None:
        self._seqs.forget(sender)
        self._incomplete.discard(sender)
        self._resuming.discard(sender)
