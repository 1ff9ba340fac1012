"""The rest of a cluster, played by the test: real messages, a memory bus, a script for a model."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.bus.worlds import bus_config
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import QUICK, Running, client_bus, running
from tests.support.wait import until

from antiphon.bus.nats import NatsTransport
from antiphon.config.cluster import ClusterConfig, digest
from antiphon.config.gateway import AccessConfig, RequestLogConfig, ResponsesConfig, SessionsConfig
from antiphon.config.parsing import ReasoningParser, ToolParser
from antiphon.gateway.service import GatewayService
from antiphon.service.clock import SystemClock
from antiphon.service.tasks import Tasks
from antiphon.wire.base import (
    Attempt,
    FinishReason,
    Message,
    Process,
    ProcessState,
    Role,
    Term,
    Usage,
)
from antiphon.wire.codec import id_count, pack_ids, unpack_ids
from antiphon.wire.command import (
    AddCorpus,
    ControlDone,
    FlushCache,
    KernelChoice,
    ListCorpora,
    ListKernels,
    RemoveCorpus,
)
from antiphon.wire.digests import block_digests
from antiphon.wire.errors import (
    EngineError,
    GatewayLost,
    InvalidRequest,
    UnknownStream,
    encode_error,
)
from antiphon.wire.heartbeat import Heartbeat, StreamSeq, WorkerLoad, WorkerStats
from antiphon.wire.ids import Incarnation, InstanceId, ModelName, RequestId
from antiphon.wire.media import MediumSpan
from antiphon.wire.routes import (
    ADOPT,
    CANCEL,
    CANCEL_ENCODE,
    DECODE,
    DECODE_AT,
    DETOKENIZER_CONTROL,
    HEARTBEAT,
    NAME,
    NOTICE,
    OPEN,
    SUBMIT,
    TEXT,
    TOKENIZE,
    TOKENIZE_AT,
    WORKER_CONTROL,
)
from antiphon.wire.submit import (
    CancelAccepted,
    LostRequest,
    NoticeBatch,
    OpenListState,
    RequestAdopted,
    SubmitAccepted,
    SubmitRequest,
)
from antiphon.wire.text import Origin, ResumeText, TextBatch, TextResumed, TextRow
from antiphon.wire.token_outputs import TokenOutputs, TokenOutputsChunk, pack_floats
from antiphon.wire.tokenize import (
    DecodeReply,
    EncodeReply,
    EncodeRequest,
    PoolingCard,
    SamplingDefaults,
    TranscriptionCard,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from tests.support.nats import NatsServer

    from antiphon.bus.bus import Bus, Delivery
    from antiphon.bus.transport import Subscription, Transport
    from antiphon.config.model import ModelConfig
    from antiphon.config.settings import Settings
    from antiphon.service.peers import Peer
    from antiphon.wire.sampling import Grammar, SamplingParams
    from antiphon.wire.tokenize import ChatMessage

MODEL = ModelName("toy")
CONTEXT_TOKENS = 64
HIDDEN_SIZE = 1000
TERM = Term(number=1, scheduler=Process(instance=InstanceId("s-0"), incarnation=Incarnation("1")))
DETOKENIZER = Process(instance=InstanceId("d-0"), incarnation=Incarnation("1"))
SCRIPT = ("Hel", "lo, ", "wörld", "!")


@dataclass(eq=False)
class Cluster:
    """Tokenizer, leader, worker and detokenizer. A prompt is encoded as its bytes."""

    bus: Bus
    group: asyncio.TaskGroup
    names: str = MODEL
    script: tuple[str, ...] = SCRIPT  # the output, one piece per step
    hold_at: int | None = None  # the step before which outputs wait for `go`
    go: asyncio.Event = field(default_factory=asyncio.Event)
    submit_error: EngineError | None = None  # the leader's reply
    encode_error: EngineError | None = None
    row_error: EngineError | None = None  # replaces the last step of each output
    reason: FinishReason = FinishReason.STOP
    matched: int | str | None = 2
    thought: int = 0  # reasoning steps of each output
    mute_tokenizers: int = 0  # calls that get no reply
    frozen_tokenizers: set[str] = field(default_factory=set[str])  # reply to nothing
    directed: tuple[Subscription, ...] = ()  # of calls that name a tokenizer
    unanswered: list[str] = field(default_factory=list[str])  # subjects of calls to these
    pooling: PoolingCard | None = None  # of a model that generates nothing
    transcription: TranscriptionCard | None = None  # of a model that transcribes audio
    appends_output: bool = True  # tokenizers know of outputs that end a prompt
    first_id: int = 10  # of the first token of the script
    logprob: float = -0.5  # likewise
    reranks: bool = False  # the chat template asks for yes or no
    sees: bool = False  # it takes images, and generates
    words: dict[str, int] = field(default_factory=dict)  # texts that are one token
    origins: tuple[Origin, ...] = ()
    weights: str = "7"  # weight version in heartbeats
    vector: Callable[[bytes], list[float]] = lambda prompt: [float(len(prompt)), 0.5]
    tokenizers: list[Process] = field(default_factory=lambda: [tokenizer(0)])
    encoding: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: tokenizers are slow
    shown: tuple[str | None, str | None] = (None, None)  # tool and reasoning parser
    encodes: list[EncodeRequest] = field(default_factory=list)
    encodes_cancelled: list[RequestId] = field(default_factory=list)
    token_characters: int = 0
    worker_context: int = CONTEXT_TOKENS
    submits: list[SubmitRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    orders: list[Message] = field(default_factory=list)
    waiting: int = 0
    corpora: dict[str, int] = field(default_factory=dict)  # tokens by id
    corpora_errors: dict[type[Message], EngineError] = field(default_factory=dict)  # by the call
    figures: WorkerStats = field(default_factory=WorkerStats)
    kernels: tuple[KernelChoice, ...] | None = None  # None: it does not reply
    draining: set[Role] = field(default_factory=set)
    reads: tuple[str, ...] = ()  # of all processes
    beats: int = 0
    open: set[RequestId] = field(default_factory=set)
    roles: set[Role] = field(
        default_factory=lambda: {Role.TOKENIZER, Role.SCHEDULER, Role.WORKER, Role.DETOKENIZER}
    )
    owners: dict[RequestId, Process] = field(default_factory=dict)  # of adopted requests
    _sent: list[tuple[SubmitRequest, TextRow]] = field(default_factory=list)
    _seqs: Counter[InstanceId] = field(
        default_factory=lambda: Counter({InstanceId("gateway-0"): 0})
    )

    @property
    def prompt(self) -> list[int]:
        """Ids of the last submitted prompt."""
        return list(unpack_ids(self.submits[-1].prompt_ids))

    @property
    def sampling(self) -> SamplingParams:
        """Of the last submitted request."""
        return self.submits[-1].sampling

    @property
    def grammar(self) -> Grammar:
        """Of the last submitted request, which must have one."""
        assert self.sampling.grammar is not None
        return self.sampling.grammar

    @property
    def turns(self) -> tuple[ChatMessage, ...]:
        """Messages of the last encoded conversation."""
        messages = self.encodes[-1].messages
        assert messages is not None
        return messages

    @property
    def template_options(self) -> Any:
        """Variables that the chat template last got, or None."""
        options = self.encodes[-1].template.options
        return None if options is None else json.loads(options)

    @property
    def template_tools(self) -> Any:
        """Functions that the chat template was last given."""
        tools = self.encodes[-1].template.tools
        return [tool["function"] for tool in json.loads(tools)] if tools else None

    async def start(self) -> None:
        """Listen, and send heartbeats."""
        self.encoding.set()
        await self.bus.listen(TOKENIZE, self._encode, model=MODEL)
        directed = await self.bus.listen(TOKENIZE_AT, self._encode, model=MODEL)
        await self.bus.listen(CANCEL_ENCODE, self._encode_cancelled, model=MODEL)
        await self.bus.listen(DECODE, self._decode, model=MODEL)
        self.directed = (directed, await self.bus.listen(DECODE_AT, self._decode, model=MODEL))
        await self.bus.listen(SUBMIT, self._submit, model=MODEL)
        await self.bus.listen(CANCEL, self._cancel, model=MODEL)
        await self.bus.listen(ADOPT, self._adopt, model=MODEL)
        await self.bus.listen(OPEN, self._opened, model=MODEL)
        await self.bus.listen(WORKER_CONTROL, self._control, worker="worker-0")
        await self.bus.listen(DETOKENIZER_CONTROL, self._resume, detokenizer=DETOKENIZER.instance)
        for process, _ in self._members():
            await self.hold_name(process)
        self.group.create_task(self._beat())

    async def hold_name(self, process: Process) -> None:
        """Subscribe to a name, so that one that misses heartbeats has not lost its connection."""
        await self.bus.listen(NAME, lambda _: None, instance=process.instance)

    async def _encode(self, delivery: Delivery) -> None:
        if self._is_frozen(delivery):
            return
        request = delivery.read(TOKENIZE)
        self.encodes.append(request)
        self.group.create_task(self._encoded(delivery, request))

    def _encode_cancelled(self, delivery: Delivery) -> None:
        self.encodes_cancelled.append(delivery.read(CANCEL_ENCODE).request_id)

    async def _encoded(self, delivery: Delivery, request: EncodeRequest) -> None:
        await self.encoding.wait()
        if self.mute_tokenizers:
            self.mute_tokenizers -= 1
            return
        if self.encode_error is not None:
            delivery.refuse(self.encode_error)
            return
        text = request.prompt
        if text is None:
            text = "\n".join(message.content for message in request.messages or ())
        first = len(text.encode())
        text += request.pair or request.suffix or ""
        ids = [self.words[text]] if text in self.words else list(text.encode())
        if request.transcription is not None:
            ids.insert(0, 1)  # where the transcript begins
            if self.appends_output:
                ids += unpack_ids(request.transcription.output)
        elif request.media:
            ids = [0]  # an image that is embedded
        truncates = request.truncate and len(ids) > CONTEXT_TOKENS
        if truncates and request.pair:
            truncates = first < CONTEXT_TOKENS
        kept = pack_ids(ids[:CONTEXT_TOKENS] if truncates else ids)
        delivery.respond(
            EncodeReply(
                request_id=request.request_id,
                token_ids=kept,
                block_digests=block_digests(b"", kept),
                untruncated_tokens=len(ids) if truncates else None,
                vocabulary_size=256,
                architecture="LlamaForCausalLM",
                model_type="llama",
                context_tokens=CONTEXT_TOKENS,
                token_characters=self.token_characters,
                hidden_size=HIDDEN_SIZE,
                defaults=SamplingDefaults(temperature=0.25, top_k=7, repetition_penalty=1.25),
                tool_parser=self.shown[0],
                reasoning_parser=self.shown[1],
                reranks=self.reranks,
                second_from=first if request.pair else None,
                pooling=self.pooling,
                transcription=self.transcription,
                sees=self.sees or (self.pooling is not None and self.pooling.images),
                media=tuple(
                    MediumSpan(start=0, tokens=0, key=bytes(32), placeholders=1)
                    for _ in request.media
                ),
            )
        )

    def _is_frozen(self, delivery: Delivery) -> bool:
        """Whether a call reaches a tokenizer that does not answer, as any one might be."""
        name = delivery.subject.rpartition(".")[2]
        if not self.frozen_tokenizers or name not in {*self.frozen_tokenizers, "encode", "decode"}:
            return False
        self.unanswered.append(delivery.subject)
        return True

    async def _decode(self, delivery: Delivery) -> None:
        if self._is_frozen(delivery):
            return
        request = delivery.read(DECODE)
        if any(token > 255 for row in request.token_ids for token in unpack_ids(row)):
            delivery.refuse(InvalidRequest("there is no such token", param="tokens"))
            return
        texts = (bytes(list(unpack_ids(row))).decode(errors="replace") for row in request.token_ids)
        delivery.respond(DecodeReply(request_id=request.request_id, texts=tuple(texts)))

    async def _submit(self, delivery: Delivery) -> None:
        request = delivery.read(SUBMIT)
        self.submits.append(request)
        if self.submit_error is not None:
            delivery.refuse(self.submit_error)
            return
        delivery.respond(SubmitAccepted(request_id=request.request_id, term=TERM, position=0))
        if request.request_id not in self.owners:  # else it runs already
            self.group.create_task(self._generate(request))

    async def _generate(self, request: SubmitRequest) -> None:
        for step in range(1 if self._is_vector(request) else len(self.script)):
            if step == self.hold_at:
                await self.go.wait()
            for choice in range(request.choices):
                await self.send(request, self.row(request, step, choice))

    def row(self, request: SubmitRequest, step: int, choice: int = 0) -> TextRow:
        """The row of a step: a piece of the script, as one token; or a vector."""
        if self._is_vector(request):
            return self._vector_row(request)
        last = step == len(self.script) - 1
        failed = last and self.row_error is not None
        reason = FinishReason.ERROR if failed else self.reason
        return TextRow(
            request_id=request.request_id,
            choice=choice,
            attempt=Attempt(term=TERM, n=1),
            text_offset=len("".join(self.script[:step]).encode()),
            text="" if failed else self.script[step],
            details=self._details(request, step),
            finish_reason=reason if last else None,
            matched_stop=self.matched if last else None,
            usage=Usage(
                prompt_tokens=id_count(request.prompt_ids),
                completion_tokens=(step + 1) * request.choices,
                cached_tokens=1,
                reasoning_tokens=min(step + 1, self.thought) * request.choices,
            ),
            origins=self.origins,
            error=encode_error(self.row_error) if failed and self.row_error else None,
        )

    @staticmethod
    def _is_vector(request: SubmitRequest) -> bool:
        """Whether it asks for numbers, and no text: a vector, or times of tokens."""
        return request.sampling.pool is not None or request.sampling.alignment is not None

    def _vector_row(self, request: SubmitRequest) -> TextRow:
        alignment = request.sampling.alignment
        prompt = bytes(list(unpack_ids(request.prompt_ids)))
        failed = self.row_error is not None
        details = TokenOutputs(
            count=1,
            token_ids=pack_ids([-1]),
            pooled=b"" if alignment is not None else pack_floats(self.vector(prompt)),
            times=pack_floats([] if alignment is None else range(0, 10 * alignment.tokens, 10)),
        )
        return TextRow(
            request_id=request.request_id,
            choice=0,
            attempt=Attempt(term=TERM, n=1),
            text_offset=0,
            details=None if failed else TokenOutputsChunk(offset=0, details=details),
            finish_reason=FinishReason.ERROR if failed else FinishReason.LENGTH,
            usage=Usage(prompt_tokens=len(prompt)),
            error=encode_error(self.row_error) if self.row_error else None,
        )

    def _details(self, request: SubmitRequest, step: int) -> TokenOutputsChunk | None:
        """Token n of the script has the id `first_id` + n; the prompt id 5."""
        params = request.sampling.details
        first = request.sampling.details_from(id_count(request.prompt_ids))
        if params is None or first is None:
            return None
        offsets = range(first if step == 0 else step, step + 1)
        first_id = self.first_id
        tops = [first_id + offset + other for offset in offsets for other in range(params.top)]
        ids = [first_id + offset if offset >= 0 else 5 for offset in offsets]
        texts = dict(enumerate(self.script, first_id)) | {5: "p"}
        details = TokenOutputs(
            count=len(offsets),
            token_ids=pack_ids(ids),
            logprobs=pack_floats(self.logprob * (offset + 1) for offset in offsets),
            top_ids=pack_ids(tops),
            top_logprobs=pack_floats(-float(token) for token in tops),
            named_logprobs=pack_floats(
                -0.25 * (each + 1) for _ in offsets for each in range(len(params.named_ids))
            ),
            hidden=pack_floats([0.5, 1.5] * len(offsets) if params.hidden else ()),
        )
        detailed = details.ids() if request.stop.token_texts else ()
        return TokenOutputsChunk(
            offset=offsets.start,
            details=details,
            texts={token: texts.get(token, "?") for token in detailed},
        )

    async def send(self, request: SubmitRequest, row: TextRow) -> None:
        """Send one row as the detokenizer does."""
        self._sent.append((request, row))
        self._publish(request, row)

    def _publish(self, request: SubmitRequest, row: TextRow) -> None:
        owner = self._owner_of(request)
        self._seqs[owner.instance] += 1
        seq = self._seqs[owner.instance]
        batch = TextBatch(detokenizer=DETOKENIZER, gateway=owner, seq=seq, rows=(row,))
        self.bus.publish(TEXT, batch, gateway=owner.instance)

    def _publish_again(self, owner: Process) -> int:
        rows = [each for each in self._sent if self._owner_of(each[0]) == owner]
        for each in rows:
            self._publish(*each)
        return len(rows)

    def _owner_of(self, request: SubmitRequest) -> Process:
        return self.owners.get(request.request_id, request.owner)

    async def _adopt(self, delivery: Delivery) -> None:
        """Give a request to another gateway, and send all of its text again."""
        message = delivery.read(ADOPT)
        submit = next((s for s in self.submits if s.request_id == message.request_id), None)
        if submit is None or submit.tenant != message.tenant or submit.resume is None:
            delivery.refuse(UnknownStream("there is no such stream"))
            return
        if submit.resume.fingerprint != message.fingerprint:
            delivery.refuse(InvalidRequest("another request"))
            return
        before = self._owner_of(submit)
        self.owners[submit.request_id] = message.owner
        changed = before != message.owner
        submit = msgspec.structs.replace(submit, owner=message.owner)
        delivery.respond(RequestAdopted(submit=submit, term=TERM, changed=changed))
        if changed:
            lost = LostRequest(
                request_id=submit.request_id,
                attempt=Attempt(term=TERM, n=1),
                error=encode_error(GatewayLost("resumed elsewhere")),
            )
            notice = NoticeBatch(
                leader=TERM,
                gateway=before,
                requests=(lost,),
                not_after_unix_ms=SystemClock().unix_ms() + 1000,
            )
            self.bus.publish(NOTICE, notice, gateway=before.instance)
            self._publish_again(message.owner)

    async def _cancel(self, delivery: Delivery) -> None:
        request = delivery.read(CANCEL)
        self.cancelled.append(request.request_id)
        delivery.respond(CancelAccepted(request_id=request.request_id))

    async def _control(self, delivery: Delivery) -> None:
        order = delivery.read(WORKER_CONTROL)
        self.orders.append(order)
        if isinstance(order, ListKernels):
            if self.kernels is not None:
                delivery.respond(ControlDone(kernels=self.kernels))
        elif isinstance(order, AddCorpus | RemoveCorpus | ListCorpora):
            self._corpora_control(delivery, order)
        elif isinstance(order, FlushCache) and self.waiting:
            delivery.respond(ControlDone(requests=self.waiting))
        else:
            flushed = isinstance(order, FlushCache)
            delivery.respond(ControlDone(pages_freed=3, requests=0 if flushed else 2))

    def _corpora_control(
        self, delivery: Delivery, order: AddCorpus | RemoveCorpus | ListCorpora
    ) -> None:
        if (error := self.corpora_errors.get(type(order))) is not None:
            delivery.refuse(error)
            return
        if isinstance(order, AddCorpus):
            tokens = self.corpora.get(order.corpus_id, 0)
            self.corpora[order.corpus_id] = tokens + sum(map(id_count, order.documents))
        elif isinstance(order, RemoveCorpus):
            del self.corpora[order.corpus_id]
        delivery.respond(ControlDone(corpora=self.corpora))

    async def _resume(self, delivery: Delivery) -> None:
        message = delivery.read(DETOKENIZER_CONTROL)
        assert isinstance(message, ResumeText)
        rows = self._publish_again(message.gateway)
        delivery.respond(TextResumed(rows=rows))

    async def _opened(self, delivery: Delivery) -> None:
        message = delivery.read(OPEN)
        if isinstance(message, OpenListState):
            return
        opened = {line.request_id for line in message.opened}
        self.open = opened if message.whole else (self.open | opened) - set(message.closed)

    def beat(self) -> None:
        """Send a heartbeat of every process."""
        for process, role in self._members():
            beat = self._heartbeat(role, process)
            self.bus.publish(HEARTBEAT, beat, role=role, instance=process.instance)
        self.beats += 1

    async def _beat(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(0.05)

    def _members(self) -> list[tuple[Process, Role]]:
        several = {Role.TOKENIZER: self.tokenizers}
        return [(each, role) for role in self.roles for each in several.get(role, [_name(role)])]

    def _heartbeat(self, role: Role, process: Process) -> Heartbeat:
        worker = WorkerLoad(
            pages_free=1,
            pages_total=1,
            page_tokens=16,
            running_max=8,
            waiting=self.waiting,
            weight_version=self.weights,
            step=0,
            step_age_s=0.0,
            context_tokens=self.worker_context,
            figures=self.figures,
        )
        return Heartbeat(
            role=role,
            process=process,
            state=ProcessState.DRAINING if role in self.draining else ProcessState.READY,
            model=MODEL,
            config_digest=digest(ClusterConfig(name="test", model=self.names)),
            health_port=0,
            load=0,
            worker=worker if role is Role.WORKER else None,
            leads=TERM if role is Role.SCHEDULER else None,
            streams=tuple(StreamSeq(receiver=name, seq=seq) for name, seq in self._seqs.items())
            if role is Role.DETOKENIZER
            else (),
            reads=self.reads,
            not_after_unix_ms=SystemClock().unix_ms() + 1000,
        )


@dataclass(eq=False)
class House:
    """A running gateway, its cluster, and its transport."""

    gateway: Running[GatewayService]
    cluster: Cluster
    transport: Callable[[], Transport]

    @property
    def service(self) -> GatewayService:
        return self.gateway.service

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.port}"

    @property
    def peers(self) -> list[Peer]:
        return self.service.submission.runtime.peers.all()

    @property
    def open_count(self) -> int:
        """Requests that the gateway has not ended."""
        return self.service.submission.driver.open_count

    @property
    def metrics_text(self) -> str:
        return self.gateway.metrics.text().decode()

    @property
    def workers(self) -> list[Peer]:
        return [peer for peer in self._of(Role.WORKER) if peer.accepts_work]

    @property
    def worker_loads(self) -> list[WorkerLoad]:
        """Of the workers' last heartbeats."""
        loads = (peer.heartbeat.worker for peer in self.workers)
        return [load for load in loads if load is not None]

    async def worker_leaves(self) -> None:
        """Drain the worker, and stop its heartbeats once the gateway knows that it drains.

        Silence alone would not do: heartbeats of before may still be under way to the gateway.
        """
        self.cluster.draining.add(Role.WORKER)
        await until(
            lambda: ProcessState.DRAINING in {p.heartbeat.state for p in self._of(Role.WORKER)}
        )
        self.cluster.roles = self.cluster.roles - {Role.WORKER}

    def _of(self, role: Role) -> list[Peer]:
        return [peer for peer in self.peers if peer.heartbeat.role is role]


def tokenizer(number: int, life: str = "1") -> Process:
    """A life of one of the tokenizers."""
    return Process(instance=InstanceId(f"tokenizer-{number}"), incarnation=Incarnation(life))


def settings(
    *,
    drain_timeout_s: float = 5.0,
    access: AccessConfig | None = None,
    responses: ResponsesConfig | None = None,
    sessions: SessionsConfig | None = None,
    model: ModelConfig | None = None,
    names: str = MODEL,
    base: Settings = QUICK,
    request_log: RequestLogConfig | None = None,
    **gateway: object,
) -> Settings:
    """`QUICK`, or `base` with its heartbeats, for the toy model, on any port."""
    return msgspec.structs.replace(
        base,
        service=msgspec.structs.replace(QUICK.service, drain_timeout_s=drain_timeout_s),
        cluster=ClusterConfig(name="test", model=names),
        access=access or AccessConfig(),
        responses=responses or base.responses,
        model=model or base.model,
        request_log=request_log or base.request_log,
        # A memory bus keeps nothing.
        sessions=sessions or SessionsConfig(store=False),
        gateway=msgspec.structs.replace(
            base.gateway,
            **{
                "port": 0,
                "open_list_s": 0.05,
                "tool_call_parser": ToolParser.NONE,
                "reasoning_parser": ReasoningParser.NONE,
            }
            | gateway,
        ),
    )


@asynccontextmanager
async def house(
    transport: Callable[[], Transport] | None = None, *, names: str = MODEL, **options: Any
) -> AsyncGenerator[House]:
    """A gateway among living peers, on a memory bus by default; options as of `settings`."""
    broker = MemoryBroker()
    transport = transport or (lambda: MemoryTransport(broker))
    chosen = settings(names=names, **options)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(client_bus(transport(), "rest", party=Role.SCHEDULER))
        group = await stack.enter_async_context(Tasks())
        cluster = Cluster(bus, group, names)
        await cluster.start()
        gate = await stack.enter_async_context(
            running(GatewayService, transport(), settings=chosen)
        )
        if gate.gone.is_set():  # refused at its start: no peers will come
            await gate.ended()
        world = House(gate, cluster, transport)
        cluster.beat()  # the gateway has missed those of before
        await until(lambda: len(world.peers) == len(cluster.roles))
        try:
            yield world
        finally:
            await gate.ended()
            await group.cancel(1.0)


@dataclass(frozen=True)
class Address:
    """Of a gateway that is only called."""

    url: str


def joining(server: NatsServer) -> Callable[[], NatsTransport]:
    """Makes links to a real broker."""
    return lambda: NatsTransport(bus_config(server.url), name="test")


@asynccontextmanager
async def second_gateway(first: House) -> AsyncGenerator[Address]:
    """Another gateway of the cluster, once the first one knows it."""
    chosen = first.gateway.around.settings
    async with running(
        GatewayService, first.transport(), settings=chosen, instance="gateway-1"
    ) as other:
        await until(lambda: len(first.peers) == len(first.cluster.roles) + 1)
        yield Address(f"http://127.0.0.1:{other.service.port}")


async def fails_to_start(error: type[Exception], match: str, **options: Any) -> None:
    """Assert that a gateway with these settings does not start, for this reason."""
    with pytest.raises(ExceptionGroup) as caught:
        async with house(**options):
            pass
    assert caught.group_contains(error, match=match, depth=None)


def _name(role: Role) -> Process:
    names = {Role.SCHEDULER: TERM.scheduler, Role.DETOKENIZER: DETOKENIZER}
    return names.get(role) or Process(
        instance=InstanceId(f"{role}-0"), incarnation=Incarnation("1")
    )
