"""Scheduler to gateway: what the leader gave up after it had accepted it, and what it lacks."""

from __future__ import annotations

from antiphon.wire.base import Attempt, Message, Process, Term, Value
from antiphon.wire.bounds import UnixMs
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
    """What one gateway must end, and what it must submit again.

    Said again, of what is lost each heartbeat until the gateway's open list lacks the request, of
    what is lacking at each whole list that names it. It carries no `seq`: a repeat is harmless and
    a loss is repaired by the next one.

    Attributes:
        requests: Given up.
        lacking: Open by the gateway's list and unknown to the leader. What was not submitted to it
            yet is under way and no news to the gateway; what it had accepted it has forgotten.
    """

    leader: Term
    gateway: Process
    requests: tuple[LostRequest, ...]
    lacking: tuple[RequestId, ...] = ()
    not_after_unix_ms: UnixMs
