"""Scheduler and detokenizer to worker: admit, abort, stop, resend; and the worker's control."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Attempt, Message, Process, Term, Value
from antiphon.wire.bounds import (
    CHOICES_MAX,
    ChoiceIndex,
    Count,
    Milliseconds,
    Number,
    TokenOffset,
    UnixMs,
    check_ids,
)
from antiphon.wire.digests import CacheSalt
from antiphon.wire.errors import ErrorReply
from antiphon.wire.ids import DEFAULT_TENANT, InstanceId, RequestId, TenantId
from antiphon.wire.sampling import Priority, SamplingParams, StopStrings
from antiphon.wire.token_outputs import TokenOutputs


class ChoiceOutput(Value):
    """What a choice has said before this attempt; empty the first time. int32, little-endian.

    `details` are those that were sealed with the ids: of the prompt's tokens, then of the outputs.
    """

    choice: ChoiceIndex
    output_ids: bytes = b""
    details: TokenOutputs | None = None

    def __post_init__(self) -> None:
        check_ids(self.output_ids)


class Admit(Value, tag=True):
    """Run a request, or go on with it from what was sealed.

    Limits, seed, positions and usage count from the prompt's beginning, whatever the attempt.

    Attributes:
        cache_salt: Its pages are found only by those who brought the same.
        waited_ms: How long it has waited to be started: its time in the queue goes on from there.
        steps: Its detokenizer reads `TokenStep`.
        tenant: Whose request it is: tenants take turns where a worker compiles grammars.
    """

    request_id: RequestId
    owner: Process
    attempt: Attempt
    continues: Attempt | None = None
    detokenizer: InstanceId
    prompt_ids: bytes
    choices: Annotated[tuple[ChoiceOutput, ...], Meta(min_length=1, max_length=CHOICES_MAX)]
    sampling: SamplingParams
    stop: StopStrings = StopStrings()
    priority: Priority = 0
    cache_salt: CacheSalt = b""
    waited_ms: Milliseconds = 0
    steps: bool = False
    tenant: TenantId = DEFAULT_TENANT
    deadline_unix_ms: UnixMs
    traceparent: str | None = None

    def __post_init__(self) -> None:
        check_ids(self.prompt_ids)
        if len({output.choice for output in self.choices}) < len(self.choices):
            raise ValueError("a choice is named twice")


class Abort(Value, tag=True):
    """Stop a request and free what it holds. An unknown id is not an error.

    `error` tells the owner why; without one the owner asked for it and hears nothing.
    """

    request_id: RequestId
    attempt: Attempt
    error: ErrorReply | None = None


Command = Admit | Abort


class CommandBatch(Message):
    """Ordered commands of a leader to one worker.

    `seq` grows by one a batch. On a gap the worker goes on: its heartbeat names what it runs, and
    the leader admits again what is not among it.
    """

    leader: Term
    worker: Process
    seq: Number
    commands: tuple[Command, ...]
    not_after_unix_ms: UnixMs


class StopChoice(Message):
    """The detokenizer ended a choice before `offset`: tokens from there on are never counted.

    With `choice` unset every choice of the request is over, or was superseded.
    """

    request_id: RequestId
    attempt: Attempt
    detokenizer: Process
    choice: ChoiceIndex | None = None
    offset: TokenOffset = 0


class TokenCursor(Value):
    """The next offset that a detokenizer waits for, of one choice."""

    request_id: RequestId
    choice: ChoiceIndex
    offset: TokenOffset


class ResendTokens(Message):
    """A detokenizer missed a batch: send all of its live requests from these offsets on.

    Live requests that the table does not list are sent from offset 0.
    """

    worker: Process
    detokenizer: Process
    places: tuple[TokenCursor, ...] = ()


class DrainWorker(Message):
    """Take no new request; finish what runs."""


class FlushCache(Message):
    """Drop every cached page that no running request holds.

    With `unless_busy` a worker that has requests to run says so, and drops nothing.
    """

    unless_busy: bool = False


class PauseMode(StrEnum):
    """What becomes of the requests of a worker that pauses."""

    ABORT = "abort"
    """They end, as aborted."""
    RETRACT = "retract"
    """They give their pages back and are computed again when the worker goes on."""
    IN_PLACE = "in_place"
    """They keep their pages, and go on from there."""


class PauseWorker(Message):
    """Run no more steps. What comes meanwhile waits; what has ended is still sent."""

    mode: PauseMode = PauseMode.ABORT


class ContinueWorker(Message):
    """Run steps again. A worker that is not paused does so anyway."""


class SetWeightVersion(Message):
    """The weights have another name from here on, and so has all that they compute.

    Nothing that was computed before is found again in the prefix cache. Requests that run end as
    aborted; with `abort_all` unset they go on, on the keys and values that they have.
    """

    version: Annotated[str, Meta(min_length=1, max_length=256)]
    abort_all: bool = True


class DumpPlans(Message):
    """Write the last plans to a file, so that they can be run again elsewhere."""


class ControlDone(Message):
    """A control call has taken effect.

    Attributes:
        pages_freed: What a flush, or a new weight version, gave back.
        requests: Choices that a pause or a new weight version met, or for which a flush was not
            done.
        file: What a dump has written, on the worker's machine.
    """

    pages_freed: Count = 0
    requests: Count = 0
    file: str = ""
