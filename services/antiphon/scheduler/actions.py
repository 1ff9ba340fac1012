"""What the leader asks its surroundings to do. Losing any of them is repaired from state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.wire.base import Attempt, Process
    from antiphon.wire.command import CommandBatch
    from antiphon.wire.ids import RequestId
    from antiphon.wire.notice import NoticeBatch


@dataclass(frozen=True, slots=True)
class SendCommands:
    """Publish commands to the worker that the batch names."""

    batch: CommandBatch


@dataclass(frozen=True, slots=True)
class SendNotice:
    """Publish to the gateway that the batch names."""

    batch: NoticeBatch


@dataclass(frozen=True, slots=True)
class RequestBound:
    """A request has got its worker.

    Attributes:
        waited_s: Since its submit.
        blocks: Of 64 tokens, in its prompt.
        cached_blocks: Of these, those that the worker is known to have, or to have soon.
    """

    request_id: RequestId
    attempt: Attempt
    worker: Process
    waited_s: float
    blocks: int = 0
    cached_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RequestRequeued:
    """A request has been given back by its worker, and is placed anew."""

    request_id: RequestId
    worker: Process


@dataclass(frozen=True, slots=True)
class RequestRemoved:
    """A request has left the ledger: it ended, or it was given up."""

    request_id: RequestId


Action = SendCommands | SendNotice | RequestBound | RequestRequeued | RequestRemoved
