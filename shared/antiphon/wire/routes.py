"""The route table: every subject of the bus, its messages, senders and listeners.

A `RequestRoute` has replies; a plain `Route` has none. Subjects here lack the `<cluster>.v<major>`
prefix, which the bus adds. The table in the docs, the permissions of the NATS users and the golden
files are all generated from `ROUTES`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from antiphon.wire.base import Message, Role
from antiphon.wire.command import (
    CommandBatch,
    ContinueWorker,
    ControlDone,
    DrainWorker,
    DumpPlans,
    FlushCache,
    PauseWorker,
    ResendTokens,
    SetWeightVersion,
    StopChoice,
)
from antiphon.wire.embed import EmbedReply, EmbedRequest
from antiphon.wire.encode import EncodeImage, ImageEmbedding
from antiphon.wire.errors import ErrorReply
from antiphon.wire.generate import (
    GenerateAccepted,
    GenerateCancel,
    GenerateDone,
    GenerateEnd,
    GenerateRequest,
    GenerateResume,
    GenerateText,
)
from antiphon.wire.heartbeat import ClaimName, Discover, Heartbeat, NameTaken
from antiphon.wire.ids import DEFAULT_TENANT, TenantId
from antiphon.wire.kv_events import KvEvents, KvReplayed, ReplayKv
from antiphon.wire.metrics import MetricsReport
from antiphon.wire.storage import (
    GetPages,
    LeaseReleased,
    LookupPages,
    PagesFound,
    PagesLeased,
    PagesStored,
    PutPages,
    ReleaseLease,
)
from antiphon.wire.submit import (
    AbortRequests,
    CancelAccepted,
    CancelRequest,
    NoticeBatch,
    OpenList,
    SubmitAccepted,
    SubmitRequest,
)
from antiphon.wire.text import ResumeText, TextBatch, TextResumed
from antiphon.wire.tokenize import (
    CancelEncode,
    DecodeReply,
    DecodeRequest,
    EncodeReply,
    EncodeRequest,
)
from antiphon.wire.tokens import TokenBatch, TokenStep

if TYPE_CHECKING:
    from collections.abc import Sequence

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
ALL_ROLES = tuple(Role)

Party = Role | str


def inbox(party: Party, tenant: TenantId = DEFAULT_TENANT) -> str:
    """Return the prefix of a party's reply subjects, which no other party may subscribe to."""
    return f"client.{escape(tenant)}" if party == CLIENT else f"inbox.{escape(party)}"


@dataclass(frozen=True)
class Route(Generic[Q]):
    """A subject whose messages have no replies.

    Attributes:
        carries: The messages that it carries.
        ordered: The consumer applies them in order and requests a replay on a gap.
    """

    name: str
    subject: str
    carries: tuple[type[Q], ...]
    senders: tuple[Party, ...]
    listeners: tuple[Party, ...]
    delivery: DeliveryMode = DeliveryMode.DIRECT
    ordered: bool = False

    def subject_for(self, **parts: str) -> str:
        """Fill in the subject, escaping each part."""
        return _filled(self.subject, tuple(parts.items()))

    def subject_filter(self, **parts: str) -> str:
        """Fill in the subject, with a wildcard for each missing part."""
        wildcards = re.sub(r"\{(\w+)\}", lambda p: p[0] if p[1] in parts else "*", self.subject)
        return fill(wildcards, parts)


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
def _filled(subject: str, parts: tuple[tuple[str, str], ...]) -> str:
    """`fill`, cached: a process publishes to the same few subjects."""
    return fill(subject, dict(parts))


def fill(subject: str, parts: dict[str, str]) -> str:
    """Insert escaped names into a subject. A missing part is a bug and raises `KeyError`."""
    return subject.format(**{name: escape(value) for name, value in parts.items()})


GENERATE = RequestRoute(
    name="gateway.generate",
    subject="generate.{model}",
    carries=(GenerateRequest,),
    replies=(GenerateAccepted,),
    senders=(CLIENT,),
    listeners=(Role.GATEWAY,),
    delivery=DeliveryMode.QUEUE,
)
EMBED = RequestRoute(
    name="gateway.embed",
    subject="embed.{model}",
    carries=(EmbedRequest,),
    replies=(EmbedReply,),
    senders=(CLIENT,),
    listeners=(Role.GATEWAY,),
    delivery=DeliveryMode.QUEUE,
)
CLIENT_TEXT = Route(
    name="client.text",
    subject="client.{tenant}.{inbox}",
    carries=(GenerateAccepted, GenerateText, GenerateEnd, ErrorReply),
    senders=(Role.GATEWAY,),
    listeners=(CLIENT,),
    ordered=True,
)
GATEWAY_CONTROL = RequestRoute(
    name="gateway.control",
    subject="gateway.{gateway}.control",
    carries=(GenerateResume, GenerateCancel),
    replies=(GenerateDone,),
    senders=(CLIENT,),
    listeners=(Role.GATEWAY,),
)
TOKENIZE = RequestRoute(
    name="tokenizer.encode",
    subject="tokenizer.{model}.encode",
    carries=(EncodeRequest,),
    replies=(EncodeReply,),
    senders=(Role.GATEWAY,),
    listeners=(Role.TOKENIZER,),
    delivery=DeliveryMode.QUEUE,
)
CANCEL_ENCODE = Route(
    name="tokenizer.cancel",
    subject="tokenizer.{model}.cancel",
    carries=(CancelEncode,),
    senders=(Role.GATEWAY,),
    listeners=(Role.TOKENIZER,),
    delivery=DeliveryMode.ALL,
)
DECODE = RequestRoute(
    name="tokenizer.decode",
    subject="tokenizer.{model}.decode",
    carries=(DecodeRequest,),
    replies=(DecodeReply,),
    senders=(Role.GATEWAY,),
    listeners=(Role.TOKENIZER,),
    delivery=DeliveryMode.QUEUE,
)
ENCODE_IMAGE = RequestRoute(
    name="encoder.encode",
    subject="encoder.{model}.encode",
    carries=(EncodeImage,),
    replies=(ImageEmbedding,),
    senders=(Role.GATEWAY,),
    listeners=(Role.ENCODER,),
    delivery=DeliveryMode.QUEUE,
)
SUBMIT = RequestRoute(
    name="scheduler.submit",
    subject="scheduler.{model}.submit",
    carries=(SubmitRequest,),
    replies=(SubmitAccepted,),
    senders=(Role.GATEWAY,),
    listeners=(Role.SCHEDULER,),
)
CANCEL = RequestRoute(
    name="scheduler.cancel",
    subject="scheduler.{model}.cancel",
    carries=(CancelRequest,),
    replies=(CancelAccepted,),
    senders=(Role.GATEWAY,),
    listeners=(Role.SCHEDULER,),
)
OPEN = Route(
    name="scheduler.open",
    subject="scheduler.{model}.open",
    carries=(OpenList,),
    senders=(Role.GATEWAY,),
    listeners=(Role.SCHEDULER, Role.WORKER, Role.DETOKENIZER),
    delivery=DeliveryMode.ALL,
    ordered=True,
)
COMMAND = Route(
    name="worker.command",
    subject="worker.{worker}.command",
    carries=(CommandBatch,),
    senders=(Role.SCHEDULER,),
    listeners=(Role.WORKER,),
    ordered=True,
)
STOP = Route(
    name="worker.stop",
    subject="worker.{worker}.stop",
    carries=(StopChoice, ResendTokens),
    senders=(Role.DETOKENIZER,),
    listeners=(Role.WORKER,),
    ordered=True,
)
WORKER_CONTROL = RequestRoute(
    name="worker.control",
    subject="worker.{worker}.control",
    carries=(DrainWorker, FlushCache, PauseWorker, ContinueWorker, SetWeightVersion, DumpPlans),
    replies=(ControlDone,),
    senders=(Role.SCHEDULER, Role.GATEWAY),
    listeners=(Role.WORKER,),
)
KV_EVENTS = Route(
    name="events.kv",
    subject="events.kv.{model}.{worker}",
    carries=(KvEvents,),
    senders=(Role.WORKER,),
    listeners=(Role.SCHEDULER,),
    delivery=DeliveryMode.ALL,
    ordered=True,
)
KV_REPLAY = RequestRoute(
    name="worker.events",
    subject="worker.{worker}.events",
    carries=(ReplayKv,),
    replies=(KvReplayed,),
    senders=(Role.SCHEDULER,),
    listeners=(Role.WORKER,),
)
TOKENS = Route(
    name="detokenizer.tokens",
    subject="detokenizer.{detokenizer}.tokens",
    carries=(TokenBatch, TokenStep),
    senders=(Role.WORKER,),
    listeners=(Role.DETOKENIZER,),
    ordered=True,
)
DETOKENIZER_CONTROL = RequestRoute(
    name="detokenizer.control",
    subject="detokenizer.{detokenizer}.control",
    carries=(ResumeText,),
    replies=(TextResumed,),
    senders=(Role.GATEWAY,),
    listeners=(Role.DETOKENIZER,),
)
TEXT = Route(
    name="gateway.text",
    subject="gateway.{gateway}.text",
    carries=(TextBatch,),
    senders=(Role.DETOKENIZER,),
    listeners=(Role.GATEWAY,),
    ordered=True,
)
NOTICE = Route(
    name="gateway.notice",
    subject="gateway.{gateway}.notice",
    carries=(NoticeBatch,),
    senders=(Role.SCHEDULER,),
    listeners=(Role.GATEWAY,),
)
ABORT = Route(
    name="gateways.abort",
    subject="gateways.{model}.abort",
    carries=(AbortRequests,),
    senders=(Role.GATEWAY,),
    listeners=(Role.GATEWAY,),
    delivery=DeliveryMode.ALL,
)
KV_CONTROL = RequestRoute(
    name="kv_storage.control",
    subject="kv_storage.{node}.control",
    carries=(PutPages, LookupPages, GetPages, ReleaseLease),
    replies=(PagesStored, PagesFound, PagesLeased, LeaseReleased),
    senders=(Role.WORKER,),
    listeners=(Role.KV_STORAGE,),
)
HEARTBEAT_SOURCES = {
    Role.SCHEDULER: (Role.SCHEDULER, Role.GATEWAY, Role.WORKER, Role.DETOKENIZER),
    Role.GATEWAY: (Role.SCHEDULER, Role.GATEWAY, Role.TOKENIZER, Role.WORKER, Role.DETOKENIZER),
    Role.WORKER: (Role.GATEWAY, Role.WORKER, Role.SCHEDULER),
    Role.DETOKENIZER: (Role.GATEWAY, Role.WORKER),
}
"""Roles whose heartbeats a role receives: those whose state it acts on. Waking up for the others
would double the idle load of each process."""
HEARTBEAT = Route(
    name="heartbeat",
    subject="heartbeat.{role}.{instance}",
    carries=(Heartbeat,),
    senders=ALL_ROLES,
    listeners=ALL_ROLES,  # each receives at least those of its own name
    delivery=DeliveryMode.ALL,
)
NAME = RequestRoute(
    name="process.name",
    subject="process.{instance}.name",
    carries=(ClaimName,),
    replies=(NameTaken,),
    senders=ALL_ROLES,
    listeners=ALL_ROLES,
)
DISCOVER = Route(
    name="discover",
    subject="discover",
    carries=(Discover,),
    senders=ALL_ROLES,
    listeners=ALL_ROLES,
    delivery=DeliveryMode.ALL,
)
METRICS = Route(
    name="metrics",
    subject="metrics.{role}.{instance}",
    carries=(MetricsReport,),
    senders=ALL_ROLES,
    listeners=(Role.GATEWAY,),
    delivery=DeliveryMode.ALL,
)

ROUTES: Sequence[Route[Message]] = [
    cast("Route[Message]", one) for one in tuple(globals().values()) if isinstance(one, Route)
]
"""All routes, in the order of the definitions."""
