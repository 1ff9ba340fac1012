"""Everybody to those whom it concerns: who lives, in which state, how loaded; and discovery."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import (
    WIRE_VERSION,
    Attempt,
    Message,
    Process,
    ProcessState,
    Role,
    Term,
    Value,
)
from antiphon.wire.bounds import Count, Finite, Number, Port, Positive, ShortText, Signed, UnixMs
from antiphon.wire.ids import InstanceId, ModelName, RequestId


class StreamSeq(Value):
    """The last `seq` sent to one receiver: shows the loss of a tail, as no later message would."""

    receiver: InstanceId
    seq: Number


class RunningRequest(Value):
    """One request that a worker holds, so that a leader can tell what is running but not open.

    Attributes:
        tokens: Of its answers, so far.
        ended: It holds neither slot nor pages, only its ids, until its owner lists it no more.
        waiting: No step has computed anything of it yet: what it needs is not among the pages
            that are promised.
        returned: The worker gives it back: it has not begun, and never will under this attempt.
            Said until the leader aborts the attempt. It has `ended` here.
    """

    request_id: RequestId
    attempt: Attempt
    tokens: Count
    ended: bool = False
    waiting: bool = False
    returned: bool = False


class WorkerStats(Value):
    """What a worker has done lately and is made of. Nobody places by it.

    Attributes:
        device: What it computes on.
        weight_bytes: Of its weights in memory.
        cache_bytes: Of its pages.
        output_tokens_s: Tokens of answers a second, over the last ten.
        prompt_tokens: Of the answers that were begun in the last minute.
        cached_tokens: Of those, how many the prefix cache had.
        waiting_tokens: Of what waits for its first step, or to go on; the cache may have some.
        pages_cached: That only the prefix cache holds.
        grammars: Answers that wait for theirs to be compiled.
        retracted: Answers that lost their pages and wait to go on.
    """

    device: ShortText = ""
    weight_bytes: Count = 0
    cache_bytes: Count = 0
    output_tokens_s: Finite = 0.0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    waiting_tokens: Count = 0
    pages_cached: Count = 0
    grammars: Count = 0
    retracted: Count = 0


class RefusalReason(StrEnum):
    """Why a worker has not obeyed a leader."""

    LATE = "late"
    """The command came after the time until which it counts."""
    CLOCK = "clock"
    """It is not known how far the leader's clock is from the worker's."""


class RefusedCommands(Value):
    """A batch of commands that a worker has lately refused: it gets nothing new for a while.

    Attributes:
        leader: Who sent it.
        seq: Its number.
        reason: Why.
    """

    leader: Term
    seq: Number
    reason: RefusalReason


class WorkerLoad(Value):
    """A worker's load report; what the leader's credit is counted from.

    Attributes:
        pages_free: That nobody holds, or only the prefix cache.
        pages_promised: Of these, those that running requests are expected to take yet.
        pages_returning: That surely come back soon, for their requests reach the end asked for.
        step: Forward passes since start.
        step_age_s: Time since the last step ended; with work in flight it shows a stall.
        context_tokens: Most tokens of prompt and answer together.
        commands_seq: The last command batch applied, of the leader `term`.
        paused: It runs no steps until it is told to go on; no new work, and no stall.
        weight_version: What its weights are called.
        bits: What the bits of its answers depend on, where it has promised that nothing else does;
            workers of one model agree in it, or one of them leaves.
        kv_seq: Number of the newest event of its prefix cache; None if it tells of none.
        figures: For whoever watches.
        refused: The last batch of commands that it did not obey, for a few seconds.
    """

    pages_free: Count
    pages_total: Count
    page_tokens: Positive
    running: tuple[RunningRequest, ...] = ()
    waiting: Count = 0
    running_max: Positive
    step: Number
    step_age_s: Finite
    context_tokens: Count
    term: Term | None = None
    commands_seq: Number = 0
    paused: bool = False
    weight_version: ShortText = ""
    bits: ShortText = ""
    pages_promised: Signed = 0
    pages_returning: Signed = 0
    kv_seq: Number | None = None
    figures: WorkerStats = WorkerStats()
    refused: RefusedCommands | None = None


class Heartbeat(Message):
    """One process says that it lives; each 0.5 s, at every change of state, and when asked.

    A role hears those of the roles that concern it: a worker, for one, gateways and workers.

    Attributes:
        load: Requests in flight.
        state: `draining` takes no new work.
        config_digest: Of the cluster config; a peer with another one is refused, naming a field.
        leads: The term that this scheduler leads with, if it leads.
        sent_unix_ms: When it was sent, by the sender's clock; receivers measure by it how far that
            is from theirs.
        reads: Messages that came to v1 after others and that it reads, by their names: nobody else
            is sent any.
    """

    role: Role
    process: Process
    state: ProcessState
    model: ModelName | None = None
    wire_version: Number = WIRE_VERSION
    config_digest: ShortText
    health_port: Port
    load: Count
    worker: WorkerLoad | None = None
    leads: Term | None = None
    streams: Annotated[tuple[StreamSeq, ...], Meta(max_length=1024)] = ()
    reads: Annotated[tuple[ShortText, ...], Meta(max_length=64)] = ()
    sent_unix_ms: UnixMs | None = None
    not_after_unix_ms: UnixMs


class Discover(Message):
    """Somebody (re)connected: everybody answers with a heartbeat, after a random pause."""

    asker: Process
