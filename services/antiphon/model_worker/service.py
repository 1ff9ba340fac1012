"""The worker service: connects the batching loop and the held requests to the bus."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar, ParamSpec

import msgspec

from antiphon.model_card.served_model import served_name
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mailbox
from antiphon.model_worker.batching.page_transfers import TransferLimits
from antiphon.model_worker.control import ControlEndpoint, ControlMessage
from antiphon.model_worker.grammar.backend import GrammarBackend, GrammarMetrics, GrammarQueue
from antiphon.model_worker.observability.metrics import CpuTime, WorkerSize
from antiphon.model_worker.observability.recording import PlanDumps
from antiphon.model_worker.observability.step_accounting import StepAccounting
from antiphon.model_worker.observability.watchdog import LoopHung, LoopWatchdog
from antiphon.model_worker.protocol.kv_events import KvEventPublisher
from antiphon.model_worker.protocol.media import NUMBER_BYTES, EmbeddingClient, PromptFetcher
from antiphon.model_worker.protocol.page_store import KvStorageClient
from antiphon.model_worker.protocol.peers import (
    LIST_READERS,
    NumericsCheck,
    free_slots,
    longest_elsewhere,
    other_workers,
)
from antiphon.model_worker.protocol.token_sender import ReportQueue, TokenSender
from antiphon.model_worker.protocol.worker_output import (
    Action,
    DropChoice,
    DropPrompt,
    FetchPrompt,
    RunChoice,
    WorkerOutput,
)
from antiphon.model_worker.ranks.processes import open_ranks
from antiphon.model_worker.speculation.corpora import ExternalCorpora
from antiphon.model_worker.startup.engine import Engine, open_engine
from antiphon.model_worker.startup.warm_up import choose_overlap, warm_up
from antiphon.service.endpoint import Endpoint, RequestEndpoint, StreamEndpoint
from antiphon.service.followed_lists import OPEN_LIST_READS, RUNNING_LIST_READS
from antiphon.service.peers import Peer, PeerChange
from antiphon.service.sequence import SeqSender
from antiphon.service.service import Report, Runtime
from antiphon.service.startup import HELD_ENTRY_BYTES, check_message_fits, fitting_entries
from antiphon.wire.base import Role
from antiphon.wire.claim import PromptClaim
from antiphon.wire.codec import ID_BYTES
from antiphon.wire.command import (
    CommandBatch,
    ControlDone,
    ListKernels,
    ResendTokens,
    StopChoice,
)
from antiphon.wire.errors import EngineError, Internal, Overloaded
from antiphon.wire.heartbeat import FetchRunningList, RunningList, WorkerLoad
from antiphon.wire.routes import (
    COMMAND,
    KV_EVENTS,
    KV_REPLAY,
    OPEN,
    OPEN_FETCH,
    RUNNING,
    RUNNING_FETCH,
    STOP,
    WORKER_CONTROL,
)
from antiphon.wire.submit import FetchOpenList

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence

    from antiphon.config.settings import Settings
    from antiphon.model_worker.batching.state import ChoiceKey
    from antiphon.model_worker.grammar.matcher import GrammarMatcher
    from antiphon.wire.ids import ModelName
    from antiphon.wire.kv_events import KvReplayed, ReplayKv
    from antiphon.wire.submit import OpenList, OpenListState

log = logging.getLogger(__name__)

P = ParamSpec("P")

READS = (*OPEN_LIST_READS, *RUNNING_LIST_READS, PromptClaim.__name__, ListKernels.__name__)
TICK_S = 0.25
LINGER_S = 3.0
"""How long a drained worker keeps ids for a replay: five heartbeats."""
LEAVE_S = 2.0
"""How long a stopping worker waits for the running step."""


class ModelWorker:
    """Runs admitted requests and sends their tokens to the detokenizers."""

    role: ClassVar = Role.WORKER

    def __init__(self, runtime: Runtime, engine: Engine) -> None:
        settings, limits = runtime.settings, engine.step_core.limits
        live_max = limits.running_max + limits.queue_max
        check_message_fits(
            "batching.running_max + queue.waiting_max",
            live_max,
            each_bytes=HELD_ENTRY_BYTES,
            message_bytes_max=runtime.bus.transport.payload_bytes_max,
        )
        self._runtime = runtime
        self._engine = engine
        self._model = served_name(settings)
        self._seqs = SeqSender()
        self._moved = asyncio.Event()
        self._last: StepReport | None = None
        self._paused = False  # by the last report that was queued
        self._stepped_at = 0.0
        self._numerics = NumericsCheck(runtime.process, self._model, engine.numerics_digest)
        self._output = WorkerOutput(
            runtime.process,
            self._seqs,
            live_max=live_max,
            list_part_max=fitting_entries(
                HELD_ENTRY_BYTES, runtime.bus.transport.payload_bytes_max
            ),
            our_time_ms=runtime.peers.to_local_ms,
            leading=lambda: runtime.peers.leading(self._model),
        )
        wait_s = settings.batching.stall_limit_s
        self._sender = TokenSender(runtime.bus, self._output, wait_s=wait_s)
        self._kv_events = KvEventPublisher(runtime.process, settings.cache.events_max)
        self._mailbox = Mailbox(live_max)
        self._reports = ReportQueue(take=self._on_queued_report, wait_s=wait_s)
        self._loop = BatchingLoop(
            engine.step_core,
            engine.in_turn(),
            self._mailbox,
            self._on_report,
            ahead=engine.ahead,
            prepare=engine.prepare,
        )
        batching = settings.batching
        self._dumps = PlanDumps(
            batching.dump_folder,
            runtime.process.instance,
            engine,
            self._loop.recorder,
            runtime.clock,
        )
        self._grammars = GrammarBackend(
            settings.grammar,
            limits.vocab_size,
            engine.open_compiler,
            runtime.group,
            GrammarMetrics(runtime.metrics),
        )
        self._grammar_queue = GrammarQueue(
            self._grammars, runtime.group, hand_over=self._submit, refuse=self._refuse
        )
        self._prompts = PromptFetcher(
            runtime,
            bytes_max=ID_BYTES * limits.context_tokens,
            fetched=lambda fetch, ids: self._apply(self._output.prompt_fetched, fetch, ids),
            failed=lambda fetch, error: self._apply(self._output.prompt_failed, fetch, error),
        )
        self._hands_back = False
        self._control = ControlEndpoint(
            self._mailbox,
            self._dumps,
            ExternalCorpora(engine.ngrams),
            self._begin_drain,
            lambda: self._output.live_count,
            runtime.health.send_heartbeat,
            engine.kernels,
        )
        self._size = size = WorkerSize(
            pages_total=engine.step_core.pages_total,
            page_tokens=engine.step_core.cache_groups[0].page_tokens,
            running_max=limits.running_max,
            context_tokens=limits.context_tokens,
            captured=engine.captured(padded=batching.graph_padding),
            captured_tokens=engine.captured_tokens,
        )
        self._accounting = StepAccounting(
            runtime.metrics, size, engine.resolved, batching.decode_log_interval
        )
        runtime.metrics.registry.register(
            CpuTime(lambda: self._loop.native_threads, lambda: self._sender.sending_s)
        )

    @staticmethod
    @asynccontextmanager
    async def lifespan(
        runtime: Runtime, opener: Callable[[Settings], Engine] | None = None
    ) -> AsyncGenerator[ModelWorker]:
        event_loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batching")
        began = runtime.clock.now()
        try:
            async with open_ranks(runtime) as ranks:
                opener = opener or partial(open_engine, ranks=ranks)
                engine = await event_loop.run_in_executor(thread, opener, runtime.settings)
                loaded = runtime.clock.now()
                service = ModelWorker(runtime, engine)
                service._on_report(await event_loop.run_in_executor(thread, service._warm_up))
                warmed = runtime.clock.now()
                service._accounting.metrics.started(
                    load_s=loaded - began, warm_up_s=warmed - loaded
                )
                service._use_encoders()
                async with service._page_store():
                    ended = event_loop.run_in_executor(thread, service._loop.run)
                    service._start(ended)
                    try:
                        yield service
                    finally:
                        service._mailbox.close()
                        service._grammars.close()
                        _, running = await asyncio.wait([ended], timeout=LEAVE_S)
                        if running:
                            log.error("a step does not end")
        finally:
            thread.shutdown(wait=False)

    def _use_encoders(self) -> None:
        """Have media embedded, if the model takes any."""
        engine = self._engine
        if (width := engine.step_core.limits.media_width) is None:
            return
        assert engine.resolved is not None, "a model was opened that takes media"
        batching = self._runtime.settings.batching
        client = EmbeddingClient(
            self._runtime,
            self._model,
            width=width,
            bytes_max=engine.resolved.media_bytes.value,
            held=self._output.find,
            land=self._mailbox.land,
            use_tower=self._mailbox.use_tower,
        )
        limits = engine.step_core.limits
        # A prompt that is prefilled in one pass needs all rows at once, and so does an image whose
        # tokens attend to each other.
        window = batching.media_window_bytes // (width * NUMBER_BYTES)
        rows_max = None if limits.chunk_tokens is None else max(1, window)
        for core in (engine.core,) if engine.groups is None else engine.groups.cores:
            core.batch.media.use(client, rows_max=rows_max, whole=limits.span_tokens is not None)

    @asynccontextmanager
    async def _page_store(self) -> AsyncGenerator[None]:
        """Store blocks of pages outside the worker, if it is configured."""
        engine, config = self._engine, self._runtime.settings.cache
        if (shards := engine.shards) is None:
            yield
            return
        async with KvStorageClient.lifespan(self._runtime, shards, self._mailbox.land) as client:
            limits = TransferLimits(
                # Of this rank's pages; those of the others are as large.
                save_bytes_max=config.save_bytes_max // shards.ranks,
                fetch_timeout_s=config.fetch_timeout_s,
            )
            engine.core.batch.use_store(client, limits)
            yield

    def _warm_up(self) -> StepReport:
        """Run the first steps, and decide what their durations decide."""
        engine, resolved = self._engine, self._engine.resolved
        report = warm_up(self._loop, engine)
        if (engine.ahead or engine.on_gpu) and resolved is not None and resolved.overlap.value:
            self._loop.use(engine.overlapped(), ahead=engine.ahead or 1)
        elif resolved is not None and resolved.overlap.value:
            overlap = choose_overlap(self._loop, engine)
            engine.resolved = msgspec.structs.replace(resolved, overlap=overlap)
            log.info("overlap", extra={"value": overlap.value, "reason": overlap.reason})
        return report

    def _start(self, ended: asyncio.Future[None]) -> None:
        for work, name in (
            # Shielded: the loop ends when its mailbox is closed, and `lifespan` waits for that.
            (asyncio.shield(ended), "batching"),
            (asyncio.shield(self._reports.failed), "steps"),
            (self._tick(), "tick"),
            (self._numerics.wait_for_conflict(), "numerics"),
        ):
            self._runtime.group.create_task(self._guard(work), name=name)
        self._runtime.peers.watch(self._on_peer)
        for peer in self._runtime.peers.all():
            self._on_peer(PeerChange.APPEARED, peer)

    def endpoints(self) -> Sequence[Endpoint]:
        here = {"worker": self._runtime.process.instance}
        return (
            StreamEndpoint(route=COMMAND, apply=self._on_command, address=here),
            StreamEndpoint(route=STOP, apply=self._on_stop, address=here),
            StreamEndpoint(route=OPEN, apply=self._on_open, address={"model": self._model}),
            StreamEndpoint(route=RUNNING_FETCH, apply=self._on_list_request, address=here),
            RequestEndpoint(route=WORKER_CONTROL, handler=self._on_control, address=here),
            RequestEndpoint(route=KV_REPLAY, handler=self._on_replay, address=here),
        )

    def model(self) -> ModelName | None:
        return self._model

    def report(self) -> Report:
        if self._last is None:
            return Report(load=0, reads=READS)
        output, last, limits = self._output, self._last, self._engine.step_core.limits
        as_changes = self._runtime.peers.read_by_all(RunningList, *LIST_READERS)
        with self._sender.lock:
            streams = self._seqs.streams()
            # `antiphon drain` up to version 0.4 waits until a heartbeat lists no request.
            held = () if as_changes and not self._hands_back else output.held()
            listed, changes = output.list_changes() if as_changes else (None, ())
        busy, size = self._busy and not last.paused, self._size
        core, events = self._engine.step_core, self._runtime.settings.cache.events
        publishes_events = core.caches_prefixes and events
        return Report(
            load=output.live_count,
            streams=streams,
            reads=READS,
            changes=changes,
            worker=WorkerLoad(
                pages_free=last.capacity.pages_free + last.capacity.pages_evictable,
                pages_total=size.pages_total,
                page_tokens=size.page_tokens,
                running=held,
                waiting=last.totals.waiting,
                running_max=limits.running_max,
                step=last.step,
                step_age_s=self._runtime.clock.now() - self._stepped_at if busy else 0.0,
                paused=last.paused,
                weight_version=limits.weight_version,
                bits=self._numerics.digest,
                pages_promised=last.capacity.pages_reserved,
                pages_returning=last.capacity.pages_returning,
                kv_seq=self._kv_events.seq if publishes_events else None,
                context_tokens=limits.context_tokens,
                term=output.commands.term,
                commands_seq=output.commands.seq,
                refused=output.commands.refused,
                hands_back=self._hands_back,
                listed=listed,
                figures=self._accounting.load_stats(
                    last, grammars=len(self._grammar_queue), now=self._runtime.clock.now()
                ),
            ),
        )

    async def drain(self) -> None:
        """Finish running requests, send the rest, and wait a little for their owners to have it."""
        self._output.draining = True
        self._requeue_waiting(self._runtime.clock.unix_ms())
        while self._output.live_count or self._output.has_unsent:
            await self._change()
        try:
            async with asyncio.timeout(LINGER_S):
                while self._output.held_count:
                    await self._change()
        except TimeoutError:
            log.info("ids left behind", extra={"requests": self._output.held_count})

    def _on_command(self, batch: CommandBatch) -> None:
        commands, requeued = self._output.commands, self._output.requeued_count
        refused, unelected = commands.refused, commands.unelected_count
        now_ms = self._runtime.clock.unix_ms()
        offset_ms = self._runtime.peers.offset_ms(batch.leader.scheduler)
        self._apply(self._output.command, batch, now_ms, offset_ms)
        if commands.unelected_count > unelected:
            self._accounting.metrics.refused.labels("term").inc()
        if commands.refused is not None and commands.refused is not refused:
            self._accounting.metrics.refused.labels(commands.refused.reason).inc()
            self._runtime.health.changed()  # so that the leader is informed now
        if self._output.requeued_count > requeued:
            self._runtime.health.changed()

    def _on_stop(self, message: StopChoice | ResendTokens) -> None:
        if isinstance(message, StopChoice):
            self._apply(self._output.stop, message)
        else:
            self._apply(self._output.resend, message)

    def _on_open(self, message: OpenList | OpenListState) -> None:
        now_ms = self._runtime.clock.unix_ms()
        if self._runtime.peers.to_local_ms(message.not_after_unix_ms, message.owner) < now_ms:
            self._runtime.metrics.late.labels(OPEN.name).inc()
            return
        self._apply(self._output.open_list, message, now_ms)

    def _on_list_request(self, message: FetchRunningList) -> None:
        with self._sender.lock:
            parts = self._output.list_requested(message, self._runtime.clock.unix_ms())
        try:
            for part in parts:
                self._runtime.bus.publish(
                    RUNNING, part, model=self._model, worker=self._runtime.process.instance
                )
        except EngineError as error:
            # The heartbeat shows that it is missing, and it is requested again.
            log.warning("running list not sent", extra={"code": error.code})
        if parts:
            self._runtime.health.changed()

    async def _on_control(self, message: ControlMessage, _: object) -> ControlDone:
        return await self._control.answer(message)

    async def _on_replay(self, message: ReplayKv, _: object) -> KvReplayed:
        return self._kv_events.replay(message)

    def _begin_drain(self, migrate: bool) -> None:
        self._output.draining = True
        self._hands_back = self._hands_back or migrate
        self._runtime.health.draining()
        self._requeue_waiting(self._runtime.clock.unix_ms())

    def _on_peer(self, change: PeerChange, peer: Peer) -> None:
        if change is PeerChange.DIED and peer.heartbeat.role is Role.GATEWAY:
            self._apply(self._output.owner_died, peer.process, self._runtime.clock.unix_ms())
        if change is not PeerChange.DIED:
            self._numerics.compare(peer.heartbeat, self._runtime.health.state)

    def _apply(
        self, event: Callable[P, Iterable[Action]], *args: P.args, **named: P.kwargs
    ) -> None:
        """Give an event to the output machine, do what follows, and send what is new."""
        self._note_idle()
        with self._sender.lock:
            for action in event(*args, **named):
                try:
                    self._act(action)
                except Exception:
                    # The actions after it are of other requests.
                    log.exception("action failed", extra={"action": type(action).__name__})
                    if isinstance(action, RunChoice):
                        self._refuse(action.key, Internal("internal error"))
            self._sender.publish()
        self._moved.set()

    def _act(self, action: Action) -> None:
        now = self._runtime.clock.now()
        match action:
            case RunChoice():
                self._attempt(self._accounting.begin, action, now)
                if action.state.sampling.grammar is None:
                    self._submit(action)
                else:
                    self._grammar_queue.put(action)
            case DropChoice(key, kept):
                self._attempt(self._accounting.drop, key, now)
                if not self._grammar_queue.drop(key):
                    self._mailbox.drop(key, kept)
            case FetchPrompt():
                self._prompts.begin(action)
            case DropPrompt():
                self._prompts.drop(action)
            case FetchOpenList(gateway=gateway):
                self._runtime.bus.publish(OPEN_FETCH, action, gateway=gateway.instance)

    def _attempt(self, work: Callable[P, object], *args: P.args, **named: P.kwargs) -> None:
        """Do one of several things. Those after it are for other requests, or other receivers."""
        try:
            work(*args, **named)
        except Exception:
            log.exception("work failed", extra={"work": getattr(work, "__qualname__", None)})

    @property
    def _busy(self) -> bool:
        """Whether a step is due: choices that wait for a prompt or a grammar wait for none."""
        elsewhere = len(self._grammar_queue) + self._output.fetching_count
        return self._output.live_count > elsewhere

    def _note_idle(self) -> None:
        """The age of a step shows a stall: idle time before it must not count."""
        if not self._busy:
            self._stepped_at = self._runtime.clock.now()

    def _submit(self, run: RunChoice, matcher: GrammarMatcher | None = None) -> None:
        self._note_idle()
        try:
            self._mailbox.run(run.key, run.state, matcher)
        except Overloaded as error:
            self._refuse(run.key, error)

    def _refuse(self, key: ChoiceKey, error: EngineError) -> None:
        self._attempt(self._accounting.drop, key, self._runtime.clock.now())
        with self._sender.lock:
            self._output.refuse(key, error)
        self._sender.publish()
        self._moved.set()

    def _on_report(self, report: StepReport) -> None:
        """Process a report of the batching loop in its thread; most are only tokens to send.

        What concerns the event loop is queued for it.
        """
        now = self._runtime.clock.now()
        paused = self._last is not None and self._last.paused
        self._last, self._stepped_at = report, now
        queued = self._sender.take_in(report)
        self._attempt(self._accounting.record, report, now)
        queued |= self._accounting.full or report.paused != paused
        if queued or report.returned or report.done or report.events:
            self._reports.put(report)

    def _on_queued_report(self, report: StepReport) -> None:
        """Do the rest in the event loop's thread: end, requeue, reply, publish."""
        self._attempt(self._accounting.process_pending)
        self._attempt(self._apply, self._output.take_actions)
        if report.returned:
            self._attempt(self._apply, self._output.requeued, report.returned)
            self._runtime.health.changed()  # so that the leader is informed now
        if report.done:
            self._attempt(self._control.complete, report.done)
        if report.events:
            self._attempt(self._kv_events.add, report.events)
            self._publish_kv_events()
        if report.paused != self._paused:
            self._paused = report.paused
            self._runtime.health.changed()

    def _publish_kv_events(self) -> None:
        """Publish KV cache events. Unsent ones are a gap in the numbers, which listeners notice."""
        bus, worker = self._runtime.bus, self._runtime.process.instance
        for batch in self._kv_events.take():
            if not bus.link.up:
                return
            try:
                bus.publish(KV_EVENTS, batch, model=self._model, worker=worker)
            except EngineError as error:
                log.warning("KV events not sent", extra={"seq": batch.seq, "error": error})

    async def _tick(self) -> None:
        stalls = self._accounting.metrics.stalls
        watchdog = LoopWatchdog(self._loop, self._runtime.settings.batching, stalls.inc)
        while True:
            await asyncio.sleep(TICK_S)
            self._attempt(self._on_tick, self._runtime.clock.unix_ms())
            try:
                watchdog.check(self._runtime.clock.now())
            except LoopHung:
                raise
            except Exception:
                log.exception("watchdog failed")

    def _on_tick(self, now_ms: int) -> None:
        self._apply(self._output.tick, now_ms)
        self._apply(self._output.take_actions)
        self._publish_kv_events()
        self._requeue_waiting(now_ms)
        held, overrun_tokens = self._output.held_count, self._output.overrun_tokens
        self._accounting.metrics.show_held(held=held, overrun_tokens=overrun_tokens)

    def _requeue_waiting(self, now_ms: int) -> None:
        """Requeue requests that are not started, if other workers would start them sooner."""
        loads = other_workers(self._runtime.peers.accepting_work(Role.WORKER), self._model)
        after_s = self._runtime.settings.queue.hand_back_s
        longest = longest_elsewhere(loads, self._engine.step_core.limits.context_tokens)
        if self._output.draining and loads:
            waiting = self._output.unstarted(now_ms, longest)
        elif after_s is not None and (slots := free_slots(loads)):
            waiting = self._output.unstarted(now_ms - round(after_s * 1000), longest)[:slots]
        else:
            return
        for keys in waiting:
            self._mailbox.requeue(keys)

    async def _guard(self, work: Awaitable[None]) -> None:
        """Write the last plans to a file when an error ends the process."""
        try:
            await work
        except Exception as error:
            self._dumps.write_on_exit(f"{type(error).__name__}: {error}")
            raise

    async def _change(self) -> None:
        """Wait for the next change. For `drain` only; each tick counts as one."""
        self._moved.clear()
        await self._moved.wait()
