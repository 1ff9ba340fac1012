"""Scheduler and detokenizer to worker: admit, abort, stop, resend; and worker control calls."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon.wire.base import Attempt, FinishReason, Message, Process, Term, Value
from antiphon.wire.bounds import (
    CHOICES_MAX,
    ChoiceIndex,
    Count,
    LongText,
    Milliseconds,
    Number,
    ShortText,
    Signed,
    TokenOffset,
    UnixMs,
    check_ids,
)
from antiphon.wire.claim import PromptClaim
from antiphon.wire.codec import id_count
from antiphon.wire.errors import ErrorReply
from antiphon.wire.ids import DEFAULT_TENANT, Incarnation, InstanceId, RequestId, TenantId
from antiphon.wire.media import Media
from antiphon.wire.namespaces import CacheSalt
from antiphon.wire.sampling import Priority, SamplingParams, StopStrings
from antiphon.wire.token_outputs import TokenOutputs


class ChoiceOutput(Value):
    """Output of a choice before this attempt; empty the first time. Ids are int32, little-endian.

    Attributes:
        details: The token outputs sealed with the ids: of the prompt tokens, then of the output.
            Unset if none were requested, or if the detokenizer of this attempt has kept them.
        finish_reason: Why the choice has ended; unset if it is to be continued.
        matched_stop: The token id that ended it, if one did.
    """

    choice: ChoiceIndex
    output_ids: bytes = b""
    details: TokenOutputs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: Signed | None = None

    def __post_init__(self) -> None:
        check_ids(self.output_ids)


class Admit(Value, tag=True):
    """Run a request, or continue it from its sealed output.

    Limits, seed, positions and usage count from the start of the prompt, whatever the attempt.

    Attributes:
        lineage: The sealed attempts that `continues` continues, the first one first.
        owner_sealed: The output was sealed by the owner and not by a detokenizer.
        detokenizer_incarnation: Of the process of that name that fixes the tokens of this attempt;
            unset by leaders up to version 0.4.
        prompt: Set if the prompt is to be fetched from its owner, and is not in `prompt_ids`.
        cache_salt: Only requests with the same salt share its cached pages.
        waited_ms: How long it has waited in queues so far; the queue time continues from there.
        steps: Whether its detokenizer reads `TokenStep`. Only workers up to version 0.4 ask.
        columns: Whether its detokenizer reads `TokenColumns`.
        tenant: Tenants are served round-robin when the worker compiles grammars.
        resume_ms: How long it goes on after its owner has died: another gateway may adopt it.
        media: Its images; their bytes are at its owner until its end, or until it has another one.
    """

    request_id: RequestId
    owner: Process
    attempt: Attempt
    continues: Attempt | None = None
    lineage: tuple[Attempt, ...] = ()
    owner_sealed: bool = False
    detokenizer: InstanceId
    detokenizer_incarnation: Incarnation | None = None
    prompt_ids: bytes
    choices: Annotated[tuple[ChoiceOutput, ...], Meta(min_length=1, max_length=CHOICES_MAX)]
    sampling: SamplingParams
    stop: StopStrings = StopStrings()
    priority: Priority = 0
    cache_salt: CacheSalt = b""
    waited_ms: Milliseconds = 0
    steps: bool = False
    columns: bool = False
    tenant: TenantId = DEFAULT_TENANT
    deadline_unix_ms: UnixMs
    traceparent: str | None = None
    resume_ms: Milliseconds = 0
    media: Media = ()
    prompt: PromptClaim | None = None

    @property
    def prompt_tokens(self) -> int:
        return id_count(self.prompt_ids) if self.prompt is None else self.prompt.tokens

    def __post_init__(self) -> None:
        check_ids(self.prompt_ids)
        if len({output.choice for output in self.choices}) < len(self.choices):
            raise ValueError("a choice is named twice")


class Rebind(Value, tag=True):
    """Send all of a request again, as another attempt that continues `continues`.

    It goes to another detokenizer, or for another owner. The outputs go on as they are: nothing is
    computed again. Unknown ids are ignored.

    Attributes:
        owner: The gateway that owns it from now on; unset: the one before.
        deadline_unix_ms: Its deadline, by the clock of this owner.
        media: Its images, whose bytes are at this owner; empty: they are where they were.
    """

    request_id: RequestId
    attempt: Attempt
    continues: Attempt
    detokenizer: InstanceId
    detokenizer_incarnation: Incarnation
    columns: bool = False
    owner: Process | None = None
    deadline_unix_ms: UnixMs | None = None
    media: Media = ()

    def __post_init__(self) -> None:
        if self.attempt <= self.continues:
            raise ValueError("an attempt can only continue an earlier one")


class Abort(Value, tag=True):
    """Stop a request and release its slot and pages. Unknown ids are ignored.

    `error` is sent to the owner as the reason; unset, the owner itself aborted the request and gets
    no message.
    """

    request_id: RequestId
    attempt: Attempt
    error: ErrorReply | None = None


Command = Admit | Rebind | Abort


class CommandBatch(Message):
    """Ordered commands from a leader to one worker.

    `seq` increases by one per batch. On a gap the worker continues: its heartbeat lists the
    requests it holds, and the leader admits the missing ones again.
    """

    leader: Term
    worker: Process
    seq: Number
    commands: tuple[Command, ...]
    not_after_unix_ms: UnixMs


class StopChoice(Message):
    """The detokenizer ended a choice before `offset`: tokens from there on do not count.

    With `choice` unset, every choice of the request has ended or was superseded.
    """

    request_id: RequestId
    attempt: Attempt
    detokenizer: Process
    choice: ChoiceIndex | None = None
    offset: TokenOffset = 0


class TokenCursor(Value):
    """The next token offset that a detokenizer expects of one choice."""

    request_id: RequestId
    choice: ChoiceIndex
    offset: TokenOffset


class ResendTokens(Message):
    """A detokenizer missed a batch: resend its live requests from these offsets on.

    Live requests that are not listed are sent from offset 0.
    """

    worker: Process
    detokenizer: Process
    places: tuple[TokenCursor, ...] = ()


class DrainWorker(Message):
    """Accept no new requests; finish the running ones.

    With `migrate` they are handed back instead: they continue on other workers, if there are any.
    """

    migrate: bool = False


class FlushCache(Message):
    """Evict every cached page that no running request holds.

    With `unless_busy` a worker that has requests reports their number and evicts nothing.
    """

    unless_busy: bool = False


class PauseMode(StrEnum):
    """What happens to the requests of a worker that pauses."""

    ABORT = "abort"
    """They are aborted."""
    RETRACT = "retract"
    """They release their pages and are prefilled again when the worker continues."""
    IN_PLACE = "in_place"
    """They keep their pages and continue from there."""


class PauseWorker(Message):
    """Run no more steps. New requests wait; ended ones are still reported."""

    mode: PauseMode = PauseMode.ABORT


class ContinueWorker(Message):
    """Run steps again. No effect on a worker that is not paused."""


class SetWeightVersion(Message):
    """Change the weight version; everything computed from now on belongs to it.

    Prefixes computed before are no longer found in the prefix cache. Running requests are aborted;
    with `abort_all` false they continue on the keys and values they have.
    """

    version: Annotated[str, Meta(min_length=1, max_length=256)]
    abort_all: bool = True


class DumpPlans(Message):
    """Write the last step plans to a file, so that they can be replayed elsewhere."""


CORPORA_MAX = 64
"""Maximum number of external corpora of a worker: every draft is searched in each."""
CORPUS_PART_BYTES_MAX = 128 * 1024
"""Maximum size of the documents in one `AddCorpus`, unless it is a single one."""

CorpusId = Annotated[str, Meta(min_length=1, max_length=256)]


class AddCorpus(Message):
    """Add an external corpus, from which draft tokens are taken, in one or several parts.

    Each part is sent after the reply to the one before. The last one adds the corpus. A worker
    receives one corpus at a time: the first part of another upload discards what it has.

    Attributes:
        upload: Identifies the parts of one upload.
        part: Index of this part.
        documents: Token ids of each document, int32, little-endian.
    """

    corpus_id: CorpusId
    upload: RequestId
    part: Number = 0
    last: bool = True
    documents: tuple[bytes, ...]

    def __post_init__(self) -> None:
        for document in self.documents:
            check_ids(document)


class RemoveCorpus(Message):
    """Remove an external corpus. Without effect on a worker that does not have it."""

    corpus_id: CorpusId


class ListCorpora(Message):
    """Report the external corpora."""


class ListKernels(Message):
    """Report the backend of each operation. Sent to workers that read it."""


KERNELS_MAX = 256


class KernelChoice(Value):
    """The backend that computes an operation of a model.

    Attributes:
        refused: Why the backends that would be preferred do not compute it, by their names.
        draft: It is an operation of the draft model.
    """

    op: ShortText
    backend: ShortText
    refused: Annotated[dict[ShortText, LongText], Meta(max_length=16)] = msgspec.field(
        default_factory=dict[str, str]
    )
    draft: bool = False


class ControlDone(Message):
    """A control call has taken effect.

    Attributes:
        pages_freed: Pages freed by a flush or a new weight version.
        requests: Choices affected by a pause or a new weight version, or because of which a flush
            was not done.
        file: Path of a dump, on the worker's machine.
        corpora: Tokens of each external corpus that the worker has after the call, by id. Only of
            the calls for corpora.
        kernels: Of `ListKernels`.
    """

    pages_freed: Count = 0
    requests: Count = 0
    file: str = ""
    corpora: Annotated[dict[CorpusId, Count], Meta(max_length=CORPORA_MAX)] = msgspec.field(
        default_factory=dict[str, int]
    )
    kernels: Annotated[tuple[KernelChoice, ...], Meta(max_length=KERNELS_MAX)] = ()
