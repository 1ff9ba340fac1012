"""The route table: every subject of the bus, its messages, senders and listeners; and its buckets.

A `RequestRoute` has replies; a plain `Route` has none. Subjects here lack the `<cluster>.v<major>`
prefix, which the bus adds. The tables in the docs, the permissions of the NATS users and the golden
files are all generated from `ROUTES` and `BUCKETS`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from antiphon.wire import (
    claim,
    command,
    generate,
    heartbeat,
    kv_events,
    seal,
    submit,
    text,
    tokenize,
    tokens,
)
from antiphon.wire.base import Message, Role
from antiphon.wire.errors import ErrorReply
from antiphon.wire.ids import DEFAULT_TENANT, ClusterName, TenantId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


class DeliveryMode(StrEnum):
    """Which of several listeners receive a message."""

    DIRECT = "direct"
    """The process that the subject names, or the leader: for services with state."""
    QUEUE = "queue"
    """One member of a queue group: only for stateless services."""
    ALL = "all"


CLIENT = "client"
"""A sender or listener outside the cluster: a NATS client of one tenant."""
OPERATOR = "operator"
"""The party of tools outside the request path: the supervisor and the command line."""
ALL_ROLES = tuple(Role)

Party = Role | str


def inbox(party: Party, tenant: TenantId = DEFAULT_TENANT) -> str:
    """Return the prefix of a party's reply subjects, which no other party may subscribe to."""
    return f"client.{escape(tenant)}" if party == CLIENT else f"inbox.{escape(party)}"


@dataclass(frozen=True)
class Route(Generic[Q]):
    """A subject whose messages have no replies.

    Without a `name` of its own it has the subject's, without the parts in braces. If it is
    `ordered`, the consumer applies the messages in order and requests a replay on a gap.
    """

    subject: str
    carries: tuple[type[Q], ...]
    senders: tuple[Party, ...]
    listeners: tuple[Party, ...]
    delivery: DeliveryMode = DeliveryMode.DIRECT
    ordered: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        name = self.name or re.sub(r"\.\{\w+\}", "", self.subject)
        object.__setattr__(self, "name", name)  # frozen from here on

    def subject_for(self, **parts: str) -> str:
        """Fill in the subject, escaping each part. A missing part is a bug: `KeyError`."""
        return _fill(self.subject, tuple(parts.items()))

    def subject_filter(self, **parts: str) -> str:
        """Fill in the subject, with a wildcard for each missing part."""
        wildcards = re.sub(r"\{(\w+)\}", lambda p: p[0] if p[1] in parts else "*", self.subject)
        return _fill(wildcards, tuple(parts.items()))


@dataclass(frozen=True)
class RequestRoute(Route[Q], Generic[Q, R]):
    """A subject whose messages each get one of `replies`, or an `ErrorReply`."""

    replies: tuple[type[R], ...] = field(default=())


@lru_cache(1024)
def escape(part: str) -> str:
    """Escape a name as one token of a subject; distinct names stay distinct.

    Every character but letters, digits, `-` and `_` becomes `=XX` for each of its UTF-8 bytes.
    """
    if not part:
        raise ValueError("an empty name cannot be part of a subject")
    return re.sub(
        r"[^A-Za-z0-9_-]", lambda match: "".join(f"={b:02X}" for b in match[0].encode()), part
    )


@lru_cache(1024)
def _fill(subject: str, parts: tuple[tuple[str, str], ...]) -> str:
    """Insert escaped names. Cached: a process publishes to the same few subjects."""
    return subject.format(**{name: escape(value) for name, value in parts})


GENERATE = RequestRoute(
    name="gateway.generate",
    subject="generate.{model}",
    carries=(generate.GenerateRequest,),
    replies=(generate.GenerateAccepted,),
    senders=(CLIENT,),
    listeners=(Role.GATEWAY,),
    delivery=DeliveryMode.QUEUE,
)
EMBED = RequestRoute(
    name="gateway.embed",
    subject="embed.{model}",
    carries=(generate.EmbedRequest,),
    replies=(generate.EmbedReply,),
    senders=(CLIENT,),
    listeners=(Role.GATEWAY,),
    delivery=DeliveryMode.QUEUE,
)
CLIENT_TEXT = Route(
    name="client.text",
    subject="client.{tenant}.{inbox}",
    carries=(generate.GenerateAccepted, generate.GenerateText, generate.GenerateEnd, ErrorReply),
    senders=(Role.GATEWAY,),
    listeners=(CLIENT,),
    ordered=True,
)
GATEWAY_CONTROL = RequestRoute(
    subject="gateway.{gateway}.control",
    carries=(generate.GenerateResume, generate.GenerateCancel),
    replies=(generate.GenerateDone,),
    senders=(CLIENT,),
    listeners=(Role.GATEWAY,),
)
TOKENIZE = RequestRoute(
    subject="tokenizer.{model}.encode",
    carries=(tokenize.EncodeRequest,),
    replies=(tokenize.EncodeReply,),
    senders=(Role.GATEWAY,),
    listeners=(Role.TOKENIZER,),
    delivery=DeliveryMode.QUEUE,
)
TOKENIZE_AT = RequestRoute(
    name="tokenizer.encode_at",
    subject="tokenizer.{model}.encode.{tokenizer}",
    carries=(tokenize.EncodeRequest,),
    replies=(tokenize.EncodeReply,),
    senders=(Role.GATEWAY,),
    listeners=(Role.TOKENIZER,),
)
CANCEL_ENCODE = Route(
    subject="tokenizer.{model}.cancel",
    carries=(tokenize.CancelEncode,),
    senders=(Role.GATEWAY,),
    listeners=(Role.TOKENIZER,),
    delivery=DeliveryMode.ALL,
)
DECODE = RequestRoute(
    subject="tokenizer.{model}.decode",
    carries=(tokenize.DecodeRequest,),
    replies=(tokenize.DecodeReply,),
    senders=(Role.GATEWAY,),
    listeners=(Role.TOKENIZER,),
    delivery=DeliveryMode.QUEUE,
)
DECODE_AT = RequestRoute(
    name="tokenizer.decode_at",
    subject="tokenizer.{model}.decode.{tokenizer}",
    carries=(tokenize.DecodeRequest,),
    replies=(tokenize.DecodeReply,),
    senders=(Role.GATEWAY,),
    listeners=(Role.TOKENIZER,),
)
ENCODE_IMAGE = RequestRoute(
    subject="encoder.{encoder}.encode",
    carries=(claim.EncodeImage,),
    replies=(claim.ImageEmbedding,),
    senders=(Role.WORKER,),
    listeners=(Role.ENCODER,),
)
SUBMIT = RequestRoute(
    subject="scheduler.{model}.submit",
    carries=(submit.SubmitRequest,),
    replies=(submit.SubmitAccepted,),
    senders=(Role.GATEWAY,),
    listeners=(Role.SCHEDULER,),
)
CANCEL = RequestRoute(
    subject="scheduler.{model}.cancel",
    carries=(submit.CancelRequest,),
    replies=(submit.CancelAccepted,),
    senders=(Role.GATEWAY,),
    listeners=(Role.SCHEDULER,),
)
ADOPT = RequestRoute(
    subject="scheduler.{model}.adopt",
    carries=(submit.AdoptRequest,),
    replies=(submit.RequestAdopted,),
    senders=(Role.GATEWAY,),
    listeners=(Role.SCHEDULER,),
)
OPEN = Route(
    subject="scheduler.{model}.open",
    carries=(submit.OpenList, submit.OpenListState),
    senders=(Role.GATEWAY,),
    listeners=(Role.SCHEDULER, Role.WORKER, Role.DETOKENIZER),
    delivery=DeliveryMode.ALL,
    ordered=True,
)
COMMAND = Route(
    subject="worker.{worker}.command",
    carries=(command.CommandBatch,),
    senders=(Role.SCHEDULER,),
    listeners=(Role.WORKER,),
    ordered=True,
)
STOP = Route(
    subject="worker.{worker}.stop",
    carries=(command.StopChoice, command.ResendTokens),
    senders=(Role.DETOKENIZER,),
    listeners=(Role.WORKER,),
    ordered=True,
)
WORKER_CONTROL = RequestRoute(
    subject="worker.{worker}.control",
    carries=(
        command.DrainWorker,
        command.FlushCache,
        command.PauseWorker,
        command.ContinueWorker,
        command.SetWeightVersion,
        command.DumpPlans,
        command.AddCorpus,
        command.RemoveCorpus,
        command.ListCorpora,
        command.ListKernels,
    ),
    replies=(command.ControlDone,),
    senders=(Role.SCHEDULER, Role.GATEWAY, OPERATOR),
    listeners=(Role.WORKER,),
)
RUNNING = Route(
    subject="events.running.{model}.{worker}",
    carries=(heartbeat.RunningList,),
    senders=(Role.WORKER,),
    listeners=(Role.SCHEDULER,),
    delivery=DeliveryMode.ALL,
    ordered=True,
)
RUNNING_FETCH = Route(
    subject="worker.{worker}.running",
    carries=(heartbeat.FetchRunningList,),
    senders=(Role.SCHEDULER,),
    listeners=(Role.WORKER,),
)
KV_EVENTS = Route(
    subject="events.kv.{model}.{worker}",
    carries=(kv_events.KvEvents,),
    senders=(Role.WORKER,),
    listeners=(Role.SCHEDULER,),
    delivery=DeliveryMode.ALL,
    ordered=True,
)
KV_REPLAY = RequestRoute(
    subject="worker.{worker}.events",
    carries=(kv_events.ReplayKv,),
    replies=(kv_events.KvReplayed,),
    senders=(Role.SCHEDULER,),
    listeners=(Role.WORKER,),
)
TOKENS = Route(
    subject="detokenizer.{detokenizer}.tokens",
    carries=(tokens.TokenBatch, tokens.TokenStep),
    senders=(Role.WORKER,),
    listeners=(Role.DETOKENIZER,),
    ordered=True,
)
DETOKENIZER_CONTROL = RequestRoute(
    subject="detokenizer.{detokenizer}.control",
    carries=(text.ResumeText, seal.SealAttempts),
    replies=(text.TextResumed, seal.AttemptsSealed),
    senders=(Role.GATEWAY, Role.SCHEDULER),
    listeners=(Role.DETOKENIZER,),
)
TEXT = Route(
    subject="gateway.{gateway}.text",
    carries=(text.TextBatch,),
    senders=(Role.DETOKENIZER,),
    listeners=(Role.GATEWAY,),
    ordered=True,
)
OPEN_FETCH = Route(
    subject="gateway.{gateway}.open",
    carries=(submit.FetchOpenList,),
    senders=(Role.SCHEDULER, Role.WORKER, Role.DETOKENIZER),
    listeners=(Role.GATEWAY,),
)
NOTICE = Route(
    subject="gateway.{gateway}.notice",
    carries=(submit.NoticeBatch,),
    senders=(Role.SCHEDULER,),
    listeners=(Role.GATEWAY,),
)
ABORT = Route(
    subject="gateways.{model}.abort",
    carries=(submit.AbortRequests,),
    senders=(Role.GATEWAY,),
    listeners=(Role.GATEWAY,),
    delivery=DeliveryMode.ALL,
)
KV_CONTROL = RequestRoute(
    subject="kv_storage.{node}.control",
    carries=(claim.PutPages, claim.LookupPages, claim.GetPages, claim.ReleaseLease),
    replies=(claim.PagesStored, claim.PagesFound, claim.PagesLeased, claim.LeaseReleased),
    senders=(Role.WORKER,),
    listeners=(Role.KV_STORAGE,),
)
HEARTBEAT_SOURCES = {
    Role.SCHEDULER: (Role.SCHEDULER, Role.GATEWAY, Role.WORKER, Role.DETOKENIZER),
    Role.GATEWAY: (Role.SCHEDULER, Role.GATEWAY, Role.TOKENIZER, Role.WORKER, Role.DETOKENIZER),
    Role.WORKER: (Role.GATEWAY, Role.WORKER, Role.SCHEDULER, Role.KV_STORAGE, Role.ENCODER),
    Role.DETOKENIZER: (Role.GATEWAY, Role.WORKER),
}
"""Roles whose heartbeats a role receives: those whose state it acts on. Waking up for the others
would double the idle load of each process."""
HEARTBEAT = Route(
    subject="heartbeat.{role}.{instance}",
    carries=(heartbeat.Heartbeat,),
    senders=ALL_ROLES,
    listeners=ALL_ROLES,  # each receives at least those of its own name
    delivery=DeliveryMode.ALL,
)
NAME = RequestRoute(
    subject="process.{instance}.name",
    carries=(heartbeat.ClaimName,),
    replies=(heartbeat.NameTaken,),
    senders=ALL_ROLES,
    listeners=ALL_ROLES,
)
EXIT = Route(
    subject="process.{instance}.exit",
    carries=(heartbeat.ProcessExited,),
    senders=(OPERATOR,),
    listeners=ALL_ROLES,
    delivery=DeliveryMode.ALL,
)
DISCOVER = Route(
    subject="discover",
    carries=(heartbeat.Discover,),
    senders=ALL_ROLES,
    listeners=ALL_ROLES,
    delivery=DeliveryMode.ALL,
)
METRICS = Route(
    subject="metrics.{role}.{instance}",
    carries=(heartbeat.MetricsReport,),
    senders=ALL_ROLES,
    listeners=(Role.GATEWAY,),
    delivery=DeliveryMode.ALL,
)

ROUTES: Sequence[Route[Message]] = [
    cast("Route[Message]", one) for one in tuple(globals().values()) if isinstance(one, Route)
]
"""All routes, in the order of the definitions."""


API = "$JS.API.STREAM"
"""Subject prefix of JetStream's stream API; a bucket is a stream."""


@dataclass(frozen=True)
class KeyValueBucket:
    """A bucket and the only role that reads and writes it; `keys` and `holds` are for the docs."""

    name: str
    owner: Role
    keys: str
    holds: str

    def stream(self, cluster: ClusterName) -> str:
        return f"KV_{escape(cluster)}_{self.name}"

    def subject(self, cluster: ClusterName, *key: str) -> str:
        """The subject of a key, with each part escaped; without a key, the prefix of all keys."""
        return ".".join((f"$KV.{escape(cluster)}_{self.name}", *map(escape, key)))

    def publish_subjects(self, cluster: ClusterName) -> Iterator[str]:
        stream = self.stream(cluster)
        yield f"{self.subject(cluster)}.>"
        for verb in ("CREATE", "UPDATE", "PURGE", "MSG.GET"):
            yield f"{API}.{verb}.{stream}"


RESPONSES = KeyValueBucket(
    name="responses",
    owner=Role.GATEWAY,
    keys="tenant, id of the response",
    holds="a response of `/v1/responses`, and the conversation it was generated from",
)

SESSIONS = KeyValueBucket(
    name="sessions",
    owner=Role.GATEWAY,
    keys="tenant, session; below it, request name",
    holds="the requests of a `/generate` session, and the tokens of each",
)

BUCKETS: Sequence[KeyValueBucket] = (RESPONSES, SESSIONS)
