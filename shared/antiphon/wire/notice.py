"""Scheduler to gateway: the requests that the leader gave up after it had accepted them."""

from __future__ import annotations

from antiphon.wire.base import Attempt, Message, Process, Term, Value
from antiphon.wire.errors import ErrorReply
from antiphon.wire.ids import RequestId


class LostRequest(Value):
    """One request that ends with an error, since nobody is left who could end it otherwise.

    `attempt` is the one that was lost: an owner that follows a higher one ignores the line. Unset,
    the request was never bound.
    """

    request_id: RequestId
    attempt: Attempt | None = None
    error: ErrorReply


class NoticeBatch(Message):
    """What one gateway must end. Said again each heartbeat until its open list lacks the request.

    It carries no `seq`: a repeat is harmless and a loss is repaired by the next one.
    """

    leader: Term
    gateway: Process
    requests: tuple[LostRequest, ...]
    not_after_unix_ms: int
