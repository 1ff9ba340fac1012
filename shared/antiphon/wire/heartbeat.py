"""Reports of every process: liveness, state and load; metrics; discovery; and claims of names."""

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
from antiphon.wire.bounds import (
    Count,
    Finite,
    ListDigest,
    Number,
    Port,
    Positive,
    ShortText,
    Signed,
    UnixMs,
)
from antiphon.wire.ids import Incarnation, InstanceId, ModelName, RequestId


class StreamSeq(Value):
    """The last `seq` sent to one receiver; reveals lost messages at the end of a stream."""

    receiver: InstanceId
    seq: Number


class RunningRequest(Value):
    """A request that a worker holds; the leader compares them with the open requests.

    Attributes:
        tokens: Output tokens so far, of all choices. In a `RunningList` those of this attempt are
            rounded down to a power of two, so that a token is no change of the list.
        detokenizer: Where they are sent; unset by workers up to version 0.4.
        detokenizer_incarnation: Of the process there that fixes the tokens of this attempt.
        ended: It holds neither a slot nor pages, only its ids, until its owner stops listing it.
        waiting: No step has computed any part of it yet; its pages are not in `pages_promised`.
        returned: The worker requeues it: it has not started and never will under this attempt.
            Reported until the leader aborts the attempt. `ended` is set, too.
    """

    request_id: RequestId
    attempt: Attempt
    tokens: Count
    detokenizer: InstanceId | None = None
    detokenizer_incarnation: Incarnation | None = None
    ended: bool = False
    waiting: bool = False
    returned: bool = False


class RunningList(Message):
    """Changes of the requests that a worker holds, sent before the heartbeat that counts them.

    The whole list is sent on request. A process that announces that it reads this also reads
    `WorkerLoad.listed`.

    Attributes:
        version: Increases by one per message.
        opened: Requests that are new, or that have changed.
        closed: Requests that it does not hold any more.
        parts: A whole list that is too long for a message is sent in so many; all but the first one
            add requests to it. The next heartbeat completes it.
    """

    worker: Process
    version: Number
    whole: bool
    opened: tuple[RunningRequest, ...] = ()
    closed: tuple[RequestId, ...] = ()
    parts: Positive = 1


class FetchRunningList(Message):
    """A worker sends its whole list again, and a heartbeat."""

    worker: Process


class RunningListState(Value):
    """A worker's list as of a version.

    Attributes:
        digest: XOR of BLAKE2b of each line; see `service.followed_lists`.
        live: How many of its requests have not ended.
    """

    version: Number
    count: Count
    digest: ListDigest
    live: Count


class WorkerStats(Value):
    """Throughput and memory of a worker, for display. Routing does not use it.

    Attributes:
        output_tokens_s: Output tokens per second, over the last ten seconds.
        prompt_tokens: Prompt tokens of the choices started in the last minute.
        cached_tokens: How many of those were found in the prefix cache.
        waiting_tokens: Tokens waiting for prefill, retracted choices included; some may be cached.
        pages_cached: Pages held only by the prefix cache.
        grammars: Choices that wait for their grammar to compile.
        retracted: Choices that were retracted and wait to resume.
        verify_rows: Rows that have verified draft tokens in the last minute.
        drafts_proposed: Draft tokens of these.
        drafts_accepted: How many of those were right.
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
    verify_rows: Count = 0
    drafts_proposed: Count = 0
    drafts_accepted: Count = 0


class RefusalReason(StrEnum):
    """Why a worker refused a leader's commands."""

    LATE = "late"
    """The command arrived after its expiry time."""
    CLOCK = "clock"
    """The offset between the leader's clock and the worker's is unknown."""


class RefusedCommands(Value):
    """A command batch that a worker refused recently; it gets no new requests for a while."""

    leader: Term
    seq: Number
    reason: RefusalReason


class WorkerLoad(Value):
    """A worker's load report; the leader computes the worker's capacity from it.

    Attributes:
        pages_free: Pages that are unused or held only by the prefix cache.
        pages_promised: How many of these are reserved for the growth of running requests.
        running: All requests that it holds, unless they are `listed`.
        pages_returning: Pages soon to be freed by requests that are about to reach `max_tokens`.
        step: Forward passes since start.
        step_age_s: Time since the last step ended; with work in flight it shows a stall.
        context_tokens: Maximum tokens of prompt and output together.
        commands_seq: The last command batch applied, of the leader `term`.
        paused: It runs no steps until it is continued; it gets no new work and is not stalled.
        bits: Numerics digest of a deterministic worker: everything that the bits of its output
            depend on. Workers of one model must agree in it; a differing one exits.
        hands_back: Its running requests are to be continued on other workers.
        kv_seq: Number of the newest prefix cache event; None if it publishes none.
        listed: What its running list is by now. Unset while a process that reads its heartbeats
            does not read this (those up to version 0.4), and by workers of these versions.
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
    hands_back: bool = False
    listed: RunningListState | None = None

    @property
    def live(self) -> int:
        """How many requests have not ended."""
        if self.listed is not None:
            return self.listed.live
        return sum(not held.ended for held in self.running)


class Heartbeat(Message):
    """Sent by every process each 0.5 s, at every change of state, and on `Discover`.

    A role receives the heartbeats of the roles that it depends on (`routes.HEARTBEAT_SOURCES`).

    Attributes:
        load: Requests in flight.
        state: A `draining` process takes no new work.
        config_digest: Digest of the cluster config; a peer with another one is rejected, naming a
            field.
        leads: The term that this scheduler leads with, if it leads.
        sent_unix_ms: Send time by the sender's clock; receivers measure the clock offset with it.
        reads: Names of the messages added to v1 later that this process can read; they are sent to
            no other.
        unechoed_ms: How long the sender's own heartbeats have not come back to it; 0 if they do. It
            seems to receive nothing: this heartbeat is no sign of life.
        tower: Of an encoder: the digest of the model with which it embeds. Empty: it has none, or
            is of a version up to 0.4.
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
    unechoed_ms: Count = 0
    tower: ShortText = ""


class Discover(Message):
    """A process (re)connected: all others reply with a heartbeat, after a random delay."""

    asker: Process


class ClaimName(Message):
    """Sent before a process's first heartbeat, to find out whether its name is taken.

    With no responders, which the broker reports at once, the name is free. A frozen holder does not
    reply, and loses the name when it counts as dead. Peers send it, too, to a process whose
    heartbeat is late: without responders its connection has ended.

    Attributes:
        held: The sender already holds the name. A holder that receives this claims again: if two
            processes found the name free at the same time, one of them must exit.
    """

    process: Process
    held: bool = False


class NameTaken(Message):
    """A live process has the name."""

    process: Process


class ProcessExited(Message):
    """This incarnation has ended, as its supervisor has seen: it is dead without any silence.

    Sent once. A lost one costs the usual silence; a wrong one is corrected by the next heartbeat of
    the process.
    """

    process: Process


FAMILIES_MAX = 256
SERIES_MAX = 1024
"""Maximum series of one metric in one process."""
BUCKETS_MAX = 256
PARTS_MAX = 64
"""Maximum parts of one report."""

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Label = Annotated[str, Meta(max_length=512)]
Labels = Annotated[tuple[Label, ...], Meta(max_length=32)]
Bounds = Annotated[tuple[Finite, ...], Meta(max_length=BUCKETS_MAX)]


class MetricSeries(Value):
    """One series of a metric, since the process started.

    Attributes:
        labels: Label values, in the order of the metric's label names.
        value: Value of a counter or gauge; sum of a histogram's observations.
        counts: Cumulative counts of a histogram's buckets, the last one of all observations.
    """

    labels: Labels = ()
    value: Finite = 0.0
    counts: Bounds = ()


class MetricFamily(Value):
    """One metric of a process; the metrics catalog has its type, label names and help text.

    Attributes:
        bounds: Upper bounds of a histogram's buckets, without the infinite one.
    """

    name: Name
    series: Annotated[tuple[MetricSeries, ...], Meta(max_length=SERIES_MAX)] = ()
    bounds: Bounds = ()


class MetricsReport(Message):
    """All metrics of a process, sent each second.

    Each report is complete, so a lost one does no harm and a new gateway is up to date at once. A
    report too large for one message is split; a metric may be in several parts.

    Attributes:
        metrics_port: Port of its own `/metrics` endpoint.
        number: Number of the report, the same in all of its parts.
        part: Index of this part, from 0.
    """

    role: Role
    process: Process
    model: ModelName | None = None
    metrics_port: Port = 0
    families: Annotated[tuple[MetricFamily, ...], Meta(max_length=FAMILIES_MAX)] = ()
    number: Count = 0
    part: Annotated[int, Meta(ge=0, lt=PARTS_MAX)] = 0
    parts: Annotated[int, Meta(ge=1, le=PARTS_MAX)] = 1
