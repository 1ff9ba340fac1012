"""Gateway and scheduler: submit, cancel, and the open list that closes the loop."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Attempt, Message, Process, Term, Value
from antiphon.wire.bounds import Choices, Count, Milliseconds, Number, UnixMs, check_ids
from antiphon.wire.digests import CacheSalt
from antiphon.wire.ids import ModelName, RequestId, TenantId
from antiphon.wire.sampling import Priority, SamplingParams, StopStrings


class SubmitRequest(Message):
    """A request for the queue. Sent again under the same id and digest, it is a retry.

    Attributes:
        owner: The gateway's life that owns the request and writes its terminal.
        digest: SHA-256 of what determines the answer; tells a retry from a clash of ids.
        prompt_ids: int32, little-endian.
        block_digests: SHA-256 chain of the prompt's full blocks, 32 bytes each.
        cache_salt: Its prompt is found in the cache only by those who brought the same.
        attempt_floor: The attempt that the owner has shown text of, if it resubmits: only an
            attempt that continues it may follow.
        waited_ms: How long ago it was sent first: its time and its place in the queue count from
            there, whoever leads.
    """

    request_id: RequestId
    owner: Process
    tenant: TenantId
    model: ModelName
    digest: Annotated[bytes, Meta(max_length=64)]
    prompt_ids: bytes
    block_digests: bytes = b""
    choices: Choices = 1
    sampling: SamplingParams
    stop: StopStrings = StopStrings()
    priority: Priority = 0
    cache_salt: CacheSalt = b""
    waited_ms: Milliseconds = 0
    deadline_unix_ms: UnixMs
    attempt_floor: Attempt | None = None
    traceparent: str | None = None

    def __post_init__(self) -> None:
        check_ids(self.prompt_ids)


class SubmitAccepted(Message):
    """The leader has queued the request, or had it already. `position` 0 is next."""

    request_id: RequestId
    term: Term
    position: Count


class CancelRequest(Message):
    """The owner no longer wants the request. An unknown id is not an error."""

    request_id: RequestId
    owner: Process
    deadline_unix_ms: UnixMs


class CancelAccepted(Message):
    """The request is a tombstone now: no later submit or admit of its id will run."""

    request_id: RequestId


class OpenRequest(Value):
    """One line of an open list. `attempt` is the one whose text the owner follows, if any came."""

    request_id: RequestId
    deadline_unix_ms: UnixMs
    attempt: Attempt | None = None


class OpenList(Message):
    """What a gateway owns and has not ended.

    The whole list goes each 0.5 s; changes go at once (`whole` false: `opened` are new, `closed`
    have ended). `version` grows by one a message, so that a late one is told apart.
    """

    model: ModelName
    owner: Process
    version: Number
    whole: bool
    opened: tuple[OpenRequest, ...] = ()
    closed: tuple[RequestId, ...] = ()
    not_after_unix_ms: UnixMs
