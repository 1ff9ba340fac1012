"""Scheduler to gateway: accepted requests that were lost, and requests the leader lacks."""

from __future__ import annotations

from antiphon.wire.base import Attempt, Message, Process, Term, Value
from antiphon.wire.bounds import UnixMs
from antiphon.wire.errors import ErrorReply
from antiphon.wire.ids import RequestId


class LostRequest(Value):
    """A request that ends with an error because no worker can finish it.

    `attempt` is the lost one: an owner that follows a higher attempt ignores the entry. Unset, the
    request was never bound.
    """

    request_id: RequestId
    attempt: Attempt | None = None
    error: ErrorReply


class NoticeBatch(Message):
    """Requests that one gateway must end, and requests that it must submit again.

    Lost requests are repeated at each heartbeat until the gateway's open list no longer has them,
    lacking ones at each whole open list that has them. There is no `seq`: repeats are harmless, and
    the next message repairs a loss.

    Attributes:
        requests: Lost requests.
        lacking: In the gateway's open list but unknown to the leader. Those whose submission is
            still in flight need no action; those that the leader had accepted are submitted again.
    """

    leader: Term
    gateway: Process
    requests: tuple[LostRequest, ...]
    lacking: tuple[RequestId, ...] = ()
    not_after_unix_ms: UnixMs
