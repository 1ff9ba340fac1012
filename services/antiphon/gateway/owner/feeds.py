"""Which detokenizers' text is incomplete, by sequence numbers; recovery is the owner's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.service.sequence import Arrival, SeqReceiver

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.wire.base import Process
    from antiphon.wire.heartbeat import StreamSeq
    from antiphon.wire.ids import InstanceId


class Feeds:
    """Notes losses until they have been asked for. Pure."""

    def __init__(self, receiver: InstanceId) -> None:
        self._receiver = receiver
        self._seqs = SeqReceiver()
        self._torn: set[Process] = set()
        self._asking: set[Process] = set()

    def torn(self, sender: Process) -> bool:
        """Whether a batch is missing that was not asked for yet."""
        return sender in self._torn

    def asking(self, sender: Process) -> bool:
        """Whether the sender is being asked."""
        return sender in self._asking

    def arrive(self, sender: Process, seq: int) -> None:
        """Note a batch. One that comes late or twice is no loss: text is placed by its offset."""
        if self._seqs.accept(sender, seq) is Arrival.GAP:
            self._torn.add(sender)

    def hear(self, sender: Process, streams: Iterable[StreamSeq]) -> None:
        """Note how much was sent, from a heartbeat: the loss of a tail shows only there."""
        if self._seqs.tail_lost(sender, self._receiver, streams):
            self._torn.add(sender)

    def ask(self, sender: Process) -> None:
        """Everything missing so far is being asked for."""
        self._torn.discard(sender)
        self._asking.add(sender)

    def settle(self, sender: Process, *, answered: bool) -> None:
        """Note how the asking went; one that failed leaves the loss."""
        self._asking.discard(sender)
        if not answered:
            self._torn.add(sender)

    def forget(self, sender: Process) -> None:
        """Drop a life that has ended."""
        self._seqs.forget(sender)
        self._torn.discard(sender)
        self._asking.discard(sender)
