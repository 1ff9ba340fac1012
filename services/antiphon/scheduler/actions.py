"""Actions that the leader returns to the service. A lost action is repaired from state."""

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
    """A request was bound to a worker.

    Attributes:
        waited_s: Time since its submit.
        blocks: 64-token blocks in its prompt.
        cached_blocks: Those of them that the worker is known to hold, or to hold soon.
    """

    request_id: RequestId
    attempt: Attempt
    worker: Process
    waited_s: float
    blocks: int = 0
    cached_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RequestRequeued:
    """A worker has requeued a request; it is placed again."""

    request_id: RequestId
    worker: Process


@dataclass(frozen=True, slots=True)
class RequestRemoved:
    """A request has left the request table: it ended or failed."""

    request_id: RequestId


Action = SendCommands | SendNotice | RequestBound | RequestRequeued | RequestRemoved
