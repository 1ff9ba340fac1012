"""Connects the scheduler's state machine to the bus."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

import msgspec

from antiphon.bus.transport import BusDown, Subscription
from antiphon.model_card.served_model import served_name
from antiphon.scheduler.core import SchedulerCore
from antiphon.scheduler.leader_config import LeaderConfig
from antiphon.scheduler.outbox import (
    Action,
    RequestBound,
    RequestRemoved,
    RequestRequeued,
    SealCall,
)
from antiphon.scheduler.worker_caches import REPLAY_RETRY_S
from antiphon.service.endpoint import Endpoint, RequestEndpoint, StreamEndpoint
from antiphon.service.followed_lists import OPEN_LIST_READS, RUNNING_LIST_READS
from antiphon.service.service import Report, Runtime
from antiphon.service.tasks import isolated, perform
from antiphon.telemetry import catalog
from antiphon.telemetry.metrics import Metrics, RunningTotal
from antiphon.telemetry.tracing import Span, span
from antiphon.wire.base import Process, Role, Term
from antiphon.wire.claim import PromptClaim
from antiphon.wire.command import CommandBatch
from antiphon.wire.errors import EngineError, Unavailable
from antiphon.wire.heartbeat import FetchRunningList, RunningList
from antiphon.wire.routes import (
    ADOPT,
    CANCEL,
    COMMAND,
    DETOKENIZER_CONTROL,
    KV_EVENTS,
    KV_REPLAY,
    NOTICE,
    OPEN,
    OPEN_FETCH,
    RUNNING,
    RUNNING_FETCH,
    SUBMIT,
)
from antiphon.wire.seal import AttemptsSealed
from antiphon.wire.submit import (
    AdoptRequest,
    CancelAccepted,
    CancelRequest,
    FetchOpenList,
    NoticeBatch,
    OpenList,
    OpenListState,
    RequestAdopted,
    SubmitAccepted,
    SubmitRequest,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.service.peers import Peer, PeerChange
    from antiphon.wire.ids import ModelName, RequestId
    from antiphon.wire.kv_events import KvEvents, ReplayKv


log = logging.getLogger(__name__)

READS = (*OPEN_LIST_READS, *RUNNING_LIST_READS, PromptClaim.__name__)
TICKS_A_BEAT = 5
SEAL_TIMEOUT_S = 1.0


class SchedulerService:
    """Follows open lists and peers always; accepts submits and cancels while it leads."""

    role: ClassVar = Role.SCHEDULER

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._model = served_name(runtime.settings)
        self._metrics = SchedulerMetrics(runtime.metrics)
        rules = LeaderConfig.of(runtime.settings)
        self._core = SchedulerCore(
            runtime.process, self._model, rules, runtime.clock, runtime.peers
        )
        self._news = asyncio.Event()
        self._emptied = asyncio.Event()
        self._spans: dict[RequestId, Span] = {}
        self._subscriptions: list[Subscription] = []
        self._announced_term: Term | None = None

    @staticmethod
    @asynccontextmanager
    async def lifespan(runtime: Runtime) -> AsyncGenerator[SchedulerService]:
        service = SchedulerService(runtime)
        runtime.metrics.before_collect(service._measure)
        runtime.peers.watch(service._note_peer)
        runtime.group.create_task(service._tick(), name="tick")
        runtime.group.create_task(service._publish_actions(), name="publish actions")
        yield service

    def endpoints(self) -> Sequence[Endpoint]:
        """Submits and cancels are subscribed to only by the leader."""
        here = {"model": self._model}
        return (
            StreamEndpoint(route=OPEN, apply=self._on_open, address=here),
            StreamEndpoint(route=RUNNING, apply=self._on_running, address=here),
            StreamEndpoint(route=KV_EVENTS, apply=self._on_kv_events, address=here),
        )

    def model(self) -> ModelName | None:
        return self._model

    def report(self) -> Report:
        leads = self._core.term if self._core.term == self._announced_term else None
        return Report(load=self._core.open_requests, leads=leads, reads=READS)

    async def drain(self) -> None:
        """Bind the waiting requests, unless a standby can do it; then stop leading."""
        if not self._runtime.peers.accepting_work(Role.SCHEDULER):
            while self._core.waiting:
                self._emptied.clear()
                await self._emptied.wait()
        self._core.resign()
        self._runtime.health.changed()

    async def _submit(self, request: SubmitRequest, _: object) -> SubmitAccepted:
        if not self._core.has_request(request.request_id):
            waits = span("scheduler.schedule", request.traceparent).start()
            self._spans[request.request_id] = waits
            request = msgspec.structs.replace(request, traceparent=waits.traceparent)
        try:
            return self._core.submit(request)
        except EngineError as error:
            self._metrics.refused.labels(error.code).inc()
            if not self._core.has_request(request.request_id):
                self._end_span(request.request_id, error)
            raise
        finally:
            self._news.set()

    async def _adopt(self, message: AdoptRequest, _: object) -> RequestAdopted:
        adopted = self._core.adopt(message)
        self._news.set()
        return adopted

    async def _cancel(self, request: CancelRequest, _: object) -> CancelAccepted:
        accepted = self._core.cancel(request)
        self._news.set()
        return accepted

    def _on_open(self, message: OpenList | OpenListState) -> None:
        if not self._core.on_open_list(message):
            self._runtime.metrics.late.labels(OPEN.name).inc()
        self._news.set()

    def _on_running(self, message: RunningList) -> None:
        self._core.on_running_list(message)
        self._news.set()

    def _on_kv_events(self, message: KvEvents) -> None:
        self._core.caches.apply_events(message)
        self._request_replays()

    def _request_replays(self) -> None:
        if self._runtime.bus.link.up:
            for worker, request in self._core.caches.due_replays(self._runtime.clock.now()):
                replay = isolated(self._replay, worker, request)
                self._runtime.group.create_task(replay, name="replay")

    async def _replay(self, worker: Process, request: ReplayKv) -> None:
        """Request missing events from a worker, until none is missing."""
        call = self._runtime.bus.call(
            KV_REPLAY, request, timeout_s=REPLAY_RETRY_S, worker=worker.instance
        )
        try:
            reply = await call
        except EngineError as error:
            # Requested again a second later, while the worker is alive.
            log.debug("no KV events", extra={"worker": worker.instance, "code": error.code})
            return
        self._core.caches.apply_replay(worker, reply)
        self._request_replays()

    def _note_peer(self, _: PeerChange, __: Peer) -> None:
        # The core watches peers, too, and has handled the change before.
        self._news.set()

    async def _tick(self) -> None:
        link = self._runtime.bus.link
        pause_s = self._runtime.settings.service.heartbeat_s / TICKS_A_BEAT
        while True:
            try:
                self._core.tick(link_up=link.up, joins=link.connect_count)
                self._request_replays()
            except Exception as error:  # noqa: BLE001  # logged there
                self._start_over(error)
            self._news.set()
            await asyncio.sleep(pause_s)

    async def _publish_actions(self) -> None:
        """Publish the leader's messages, from one task so that commands stay in order."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._update_subscriptions()
                perform(self._core.take_actions(), self._act)
            except Exception as error:  # noqa: BLE001  # logged there
                self._start_over(error)
            if not self._core.waiting:
                self._emptied.set()

    def _start_over(self, error: Exception) -> None:
        """Give up the term after a failure. Repeated failures without a term are logged once."""
        if (pause_s := self._core.start_over()) is not None:
            self._metrics.failed.inc()
            log.error("leading failed", exc_info=error, extra={"pause_s": round(pause_s, 3)})
            self._news.set()  # peers learn at once that there is no leader

    def _act(self, action: Action) -> None:
        match action:
            case CommandBatch():
                self._runtime.bus.publish(COMMAND, action, worker=action.worker.instance)
            case SealCall():
                self._runtime.group.create_task(isolated(self._seal, action), name="seal")
            case NoticeBatch():
                self._metrics.lost.inc(len(action.requests))
                self._runtime.bus.publish(NOTICE, action, gateway=action.gateway.instance)
            case FetchOpenList(gateway=gateway):
                self._runtime.bus.publish(OPEN_FETCH, action, gateway=gateway.instance)
            case FetchRunningList(worker=worker):
                self._runtime.bus.publish(RUNNING_FETCH, action, worker=worker.instance)
            case RequestBound():
                self._note_bound(action)
            case RequestRequeued(request_id, worker):
                self._metrics.returned.labels(worker.instance).inc()
                fields = {"request_id": request_id, "worker": worker.instance}
                log.info("request requeued", extra=fields)
            case RequestRemoved(request_id):
                self._end_span(request_id)

    async def _seal(self, call: SealCall) -> None:
        try:
            answer = await self._runtime.bus.call(
                DETOKENIZER_CONTROL,
                call.message,
                timeout_s=SEAL_TIMEOUT_S,
                detokenizer=call.detokenizer,
            )
        except EngineError as error:
            fields = {"detokenizer": call.detokenizer, "code": error.code}
            log.warning("attempts not sealed", extra=fields)
            return
        if isinstance(answer, AttemptsSealed):
            self._core.on_sealed(call, answer)
            self._news.set()

    def _note_bound(self, bound: RequestBound) -> None:
        self._metrics.bound.labels(bound.worker.instance).inc()
        self._metrics.wait_seconds.observe(bound.waited_s)
        self._metrics.blocks.inc(bound.blocks)
        self._metrics.cached_blocks.inc(bound.cached_blocks)
        self._end_span(bound.request_id)
        log.info(
            "request bound",
            extra={
                "request_id": bound.request_id,
                "worker": bound.worker.instance,
                "attempt": bound.attempt.n,
                "waited_s": round(bound.waited_s, 4),
                "blocks": bound.blocks,
                "cached_blocks": bound.cached_blocks,
            },
        )

    def _end_span(self, request_id: RequestId, error: EngineError | None = None) -> None:
        if (waits := self._spans.pop(request_id, None)) is not None:
            waits.end(error)

    async def _update_subscriptions(self) -> None:
        """Subscribe to calls while leading, and announce the term only after that."""
        term = self._core.term
        if term is None:
            await self._unsubscribe()
        elif not await self._subscribe():
            return
        if term != self._announced_term:
            self._announced_term = term
            self._runtime.health.changed()

    async def _subscribe(self) -> bool:
        try:
            for endpoint in self._leader_endpoints()[len(self._subscriptions) :]:
                self._subscriptions.append(await self._runtime.listen(endpoint))
        except BusDown:
            return False  # tried again at the next tick
        except Unavailable:
            self._core.resign()  # this process is draining: another one must lead
            return False
        return True

    def _leader_endpoints(self) -> Sequence[Endpoint]:
        address = {"model": self._model}
        return (
            RequestEndpoint(route=SUBMIT, handler=self._submit, address=address),
            RequestEndpoint(route=ADOPT, handler=self._adopt, address=address),
            RequestEndpoint(
                route=CANCEL, handler=self._cancel, address=address, while_draining=True
            ),
        )

    async def _unsubscribe(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.drain()
        for request_id in list(self._spans):
            self._end_span(request_id)

    def _measure(self) -> None:
        self._metrics.leads.set(self._core.term is not None)
        self._metrics.waiting.set(self._core.waiting)
        self._metrics.open_requests.set(self._core.open_requests)
        self._metrics.known_blocks.set(self._core.caches.blocks)
        self._metrics.replays.follow(self._core.caches.replays)
        self._metrics.capacity.clear()
        for worker, capacity in self._core.capacities().items():
            self._metrics.capacity.labels(worker).set(capacity)


class SchedulerMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self.leads = metrics.gauge(catalog.SCHEDULER_LEADERS)
        self.waiting = metrics.gauge(catalog.NUM_QUEUE_REQS)
        self.open_requests = metrics.gauge(catalog.SCHEDULER_REQS)
        self.wait_seconds = metrics.histogram(catalog.QUEUE_TIME)
        self.bound = metrics.counter(catalog.SCHEDULED_REQS)
        self.returned = metrics.counter(catalog.REQUEUED_REQS)
        self.blocks = metrics.counter(catalog.PROMPT_BLOCKS)
        self.cached_blocks = metrics.counter(catalog.CACHED_PROMPT_BLOCKS)
        self.known_blocks = metrics.gauge(catalog.KNOWN_BLOCKS)
        self.replays = RunningTotal(metrics.counter(catalog.KV_REPLAYS))
        self.failed = metrics.counter(catalog.FAILED_TERMS)
        self.refused = metrics.counter(catalog.SCHEDULER_REJECTED_REQS)
        self.lost = metrics.counter(catalog.LOST_REQS)
        self.capacity = metrics.gauge(catalog.WORKER_CAPACITY)
