"""Gateways and scheduler: submit, cancel, abort, the list of open requests, and lost requests."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon.wire.base import Attempt, Message, Process, Term, Value
from antiphon.wire.bounds import (
    CHOICES_MAX,
    Choices,
    Count,
    ListDigest,
    LongText,
    Milliseconds,
    Number,
    Positive,
    UnixMs,
    check_ids,
)
from antiphon.wire.claim import PromptClaim
from antiphon.wire.codec import id_count
from antiphon.wire.command import ChoiceOutput
from antiphon.wire.errors import ErrorReply
from antiphon.wire.ids import ModelName, RequestId, TenantId
from antiphon.wire.media import Media
from antiphon.wire.namespaces import CacheSalt
from antiphon.wire.sampling import Priority, SamplingParams, StopStrings
from antiphon.wire.seal import SealRequest


class OwnerSeal(Value):
    """The output of a request that its owner has delivered, to be continued from there.

    Attributes:
        sealed_to: The owner accepts no more text of this attempt, or of an earlier one.
        attempts: Those of which the output is, the last one last; none if there is no output.
    """

    sealed_to: Attempt
    attempts: tuple[Attempt, ...] = ()
    choices: Annotated[tuple[ChoiceOutput, ...], Meta(max_length=CHOICES_MAX)] = ()


FINGERPRINT_BYTES = 32
"""Size of the digest of a client's request."""


class ResumeWindow(Value):
    """A client may resume the output of this request, at any gateway.

    Attributes:
        window_ms: How long the request goes on without its owner, and the owner without its client.
        fingerprint: SHA-256 of the client's request: it is sent again to resume the output.
        created_unix_s: When the request was received; part of some responses.
    """

    window_ms: Milliseconds
    fingerprint: Annotated[bytes, Meta(max_length=FINGERPRINT_BYTES)] = b""
    created_unix_s: Number = 0


class SubmitRequest(Message):
    """A request for the scheduler's queue. With the same id and digest it is a retry.

    Attributes:
        owner: The gateway process that owns the request and writes its end.
        digest: SHA-256 of everything that determines the output; distinguishes a retry from a
            conflict of ids.
        prompt_ids: int32, little-endian; not read if there is a `prompt`.
        prompt: Set for a prompt that is too long for a message: its ids are at its owner.
        block_digests: SHA-256 chain of the prompt's full blocks, 32 bytes each; of a prompt that is
            at its owner, those of the first blocks.
        cache_salt: Only requests with the same salt share its cached prefixes.
        attempt_floor: The attempt whose text the owner has delivered, if it resubmits: only an
            attempt that continues it may follow.
        waited_ms: Time since it was first sent: its queue time and position count from there,
            whichever scheduler leads.
        sealed: What the owner has delivered, after a leader asked it to seal the request, until it
            follows a later attempt.
        resume: Set if another gateway may adopt the request.
        output_bytes: Maximum size of its output while it is open: ids, text and token outputs, in a
            detokenizer and in its owner. 0 from gateways up to version 0.4.
        media: Its images; their bytes are at its owner until its end.
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
    sealed: OwnerSeal | None = None
    resume: ResumeWindow | None = None
    output_bytes: Count = 0
    media: Media = ()
    prompt: PromptClaim | None = None

    @property
    def prompt_tokens(self) -> int:
        return id_count(self.prompt_ids) if self.prompt is None else self.prompt.tokens

    @property
    def resume_ms(self) -> int:
        return 0 if self.resume is None else self.resume.window_ms

    def __post_init__(self) -> None:
        check_ids(self.prompt_ids)


CLAIMED_DIGESTS_BYTES = 64 * 1024
"""Size of the block digests beside the claim of a prompt, at most: of its first 131,072 tokens."""


def claimed_submit(submit: SubmitRequest, prompt: PromptClaim) -> SubmitRequest:
    """The same request with a claim of its prompt."""
    digests = submit.block_digests[:CLAIMED_DIGESTS_BYTES]
    return msgspec.structs.replace(submit, prompt_ids=b"", prompt=prompt, block_digests=digests)


class SubmitAccepted(Message):
    """The leader has queued the request, now or before. `position` 0 is next."""

    request_id: RequestId
    term: Term
    position: Count


class CancelRequest(Message):
    """The owner cancels the request. Unknown ids are ignored."""

    request_id: RequestId
    owner: Process
    deadline_unix_ms: UnixMs


class CancelAccepted(Message):
    """The request is a tombstone now: a later submit or admit of its id does not run."""

    request_id: RequestId


class AdoptRequest(Message):
    """A gateway takes over a request whose client resumes it there.

    `fingerprint` is that of the client's request, which must be the one that was submitted.
    """

    request_id: RequestId
    tenant: TenantId
    owner: Process
    fingerprint: Annotated[bytes, Meta(max_length=FINGERPRINT_BYTES)]


class RequestAdopted(Message):
    """The gateway owns the request.

    Attributes:
        changed: It did not before: all text is sent to it, from the beginning.
        submit: The request as its new owner would have submitted it.
        attempt: The attempt that the owner before has followed, if any.
    """

    submit: SubmitRequest
    term: Term
    attempt: Attempt | None = None
    changed: bool = False


class OpenRequest(Value):
    """One entry of an open list. `attempt` is the one whose text the owner follows, if any."""

    request_id: RequestId
    deadline_unix_ms: UnixMs
    attempt: Attempt | None = None


class OpenList(Message):
    """The requests that a gateway owns and has not ended.

    Changes are sent at once (`whole` false: `opened` are new, `closed` have ended). `version`
    increases by one per message, so that late ones are detected. The whole list is sent on request;
    each 0.5 s if some process of an earlier version does not read `OpenListState`.

    Attributes:
        parts: A whole list that is too long for a message is sent in so many; all but the first one
            add requests to it. It is complete with the `OpenListState` after them.
    """

    model: ModelName
    owner: Process
    version: Number
    whole: bool
    opened: tuple[OpenRequest, ...] = ()
    closed: tuple[RequestId, ...] = ()
    not_after_unix_ms: UnixMs
    parts: Positive = 1


class OpenListState(Message):
    """How many requests a gateway's open list has as of a version, and their digest.

    Sent each 0.5 s. A process whose copy of the list differs has missed a change, and requests the
    whole.

    Attributes:
        digest: XOR of BLAKE2b of each request's id, and of the term and number of the attempt that
            is followed; see `service.followed_lists`.
    """

    model: ModelName
    owner: Process
    version: Number
    count: Count
    digest: ListDigest
    not_after_unix_ms: UnixMs


class FetchOpenList(Message):
    """A gateway sends its whole open list again, to all."""

    gateway: Process


class LostRequest(Value):
    """A request that ends with an error because no worker can finish it.

    `attempt` is the lost one: an owner that follows a higher attempt ignores the entry. Unset, the
    request was never bound.
    """

    request_id: RequestId
    attempt: Attempt | None = None
    error: ErrorReply


class NoticeBatch(Message):
    """Requests that one gateway must end, submit again, or seal and submit again.

    Lost requests are repeated at each heartbeat until the gateway's open list no longer has them,
    lacking ones at each whole open list that has them. There is no `seq`: repeats are harmless, and
    the next message repairs a loss.

    Attributes:
        lacking: In the gateway's open list but unknown to the leader. Those whose submission is
            still in flight need no action; those that the leader had accepted are submitted again.
        seals: To be sealed by the owner, since no detokenizer has their output. Repeated at each
            heartbeat until it has submitted them.
    """

    leader: Term
    gateway: Process
    requests: tuple[LostRequest, ...]
    lacking: tuple[RequestId, ...] = ()
    seals: tuple[SealRequest, ...] = ()
    not_after_unix_ms: UnixMs


class AbortRequests(Message):
    """Each gateway aborts its requests whose names begin with `prefix`.

    A request without a client-supplied name goes by its id. Sending the message again is harmless.

    Attributes:
        tenant: Only requests of this tenant; None: of all tenants.
        exact: Only the request whose name equals `prefix`.
        sender: The process by whose clock `not_after_unix_ms` is given; None in messages of an
            earlier version.
    """

    prefix: LongText
    tenant: TenantId | None = None
    exact: bool = False
    sender: Process | None = None
    not_after_unix_ms: UnixMs
