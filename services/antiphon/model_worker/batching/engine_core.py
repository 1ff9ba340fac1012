"""The engine core: the requests of one worker, and the rows of the next step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.admission import check, outputs_max
from antiphon.model_worker.batching.faults import raise_if_shared
from antiphon.model_worker.batching.media import MediaLoaded
from antiphon.model_worker.batching.outcome import OutcomeProcessor, ProgressLog
from antiphon.model_worker.batching.plan_builder import build_plan
from antiphon.model_worker.batching.planner import StepPlanner
from antiphon.model_worker.batching.request import Request
from antiphon.model_worker.batching.rows import NO_ROWS, StepRows
from antiphon.model_worker.batching.running_batch import RunningBatch
from antiphon.model_worker.batching.state import (
    WIRE_IDS,
    ChoiceKey,
    CoreTotals,
    EngineLimits,
    Finish,
    RequestState,
)
from antiphon.model_worker.batching.timeouts import Timeouts
from antiphon.model_worker.batching.waiting_queue import QueueRules, WaitingQueue
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.grammar.executor import PendingGrammarRows
from antiphon.model_worker.speculation.policy import DraftCounts
from antiphon.service.inbox import SharedStateBroken
from antiphon.wire.base import FinishReason
from antiphon.wire.command import PauseMode
from antiphon.wire.errors import EngineError, Internal, InvalidRequest, Overloaded
from antiphon.wire.namespaces import PageOrigin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from antiphon.model_worker.batching.page_budget import Capacity
    from antiphon.model_worker.batching.page_transfers import TransferDone
    from antiphon.model_worker.batching.plan import (
        Flags,
        Ints,
        SamplingPart,
        StepOutcome,
        StepPlan,
    )
    from antiphon.model_worker.batching.state import AnyProgress
    from antiphon.model_worker.cache.groups import CacheGroup
    from antiphon.model_worker.cache.pages import CachePools
    from antiphon.model_worker.grammar.matcher import GrammarMatcher
    from antiphon.model_worker.speculation.policy import Speculation
    from antiphon.wire.kv_events import KvEvent

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_NO_DRAFTS = DraftCounts()


class EngineCore:
    """Waiting and running requests, their slots and pages.

    Called from one thread only: `add` and `drop` between steps, then `next_rows`, then `commit` or
    `fail` with the outcome. The next rows may be planned before the last are committed; their
    tokens are `future` then. Has no clock: `now` is any monotonic one, in seconds.
    """

    def __init__(
        self,
        limits: EngineLimits,
        pools: CachePools,
        index: RadixIndex | None = None,
        rules: QueueRules | None = None,
        origin: PageOrigin | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        assert limits.context_tokens <= pools.tokens_max, "the longest request would never fit"
        assert limits.running_max <= limits.step_tokens_max, "some requests could not decode"
        self.limits = limits
        self.pools = pools
        self.rules = rules or QueueRules()
        self.index = index or RadixIndex(pools, enabled=False)
        self.waiting = WaitingQueue(self.rules)
        origin = origin or PageOrigin(model_digest=limits.weights_digest)
        self.batch = RunningBatch(limits, pools, self.index, origin)
        self.running = self.batch.running
        self._timeouts = Timeouts(limits)
        self._pending_grammar = PendingGrammarRows(limits.follow_timeout_s)
        self.speculation = speculation
        self.planner = StepPlanner(
            limits, self.rules, self.batch, self.waiting, self._timeouts, speculation
        )
        self._requests: dict[ChoiceKey, Request] = {}
        self._arrivals = 0
        self._rows_launched = 0
        self.starved = False
        """Whether nothing can run before a transfer of pages, or a load of media, ends."""
        self._log = ProgressLog(self.batch, limits.weight_version, limits.stream_interval)
        self._outcomes = OutcomeProcessor(
            batch=self.batch,
            pending=self._pending_grammar,
            log=self._log,
            end=self._end,
            fail=self._fail_alone,
            speculation=speculation,
        )

    def __contains__(self, key: ChoiceKey) -> bool:
        return key in self._requests

    @property
    def live_count(self) -> int:
        """Number of choices that wait or run."""
        return len(self._requests)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return self.pools.groups

    @property
    def pages_total(self) -> int:
        return self.pools.pages_total

    @property
    def caches_prefixes(self) -> bool:
        return self.index.enabled

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run."""
        return not self._requests

    @property
    def can_plan(self) -> bool:
        """Whether the next rows can be planned without a wait for a grammar matcher."""
        return bool(self.running) and not self._pending_grammar

    @property
    def next_due(self) -> float | None:
        """When `expire` next has a request to end; None if there is no timeout."""
        transfers = self.batch.transfers
        fetch_due = None if transfers is None else transfers.next_due
        dues = (self._timeouts.next_due, self._pending_grammar.next_due, fetch_due)
        return min((due for due in dues if due is not None), default=None)

    def add(
        self, key: ChoiceKey, state: RequestState, now: float, matcher: GrammarMatcher | None = None
    ) -> None:
        """Add a choice to the queue. One that can never run, or not wait, ends with an error.

        The `matcher` of its grammar has accepted its output tokens.
        """
        assert (matcher is None) == (state.sampling.grammar is None), "no matcher of this choice"
        try:
            check(state, self.limits)
            self._check_priority(state)
            request = self._request(key, state, now, matcher)
            self._check_queue(request)
        except EngineError as error:
            self._log.refuse(key, Finish.failed(error))
            return
        if request.finish is not None:
            self._log.report(request)
            return
        self._requests[key] = request
        self.waiting.put(request)
        self._timeouts.arrived(request)

    def drop(self, key: ChoiceKey, kept: int | None = None) -> None:
        """Release a choice's slot and pages and stop reporting it. Unknown keys are ignored.

        `kept` is the number of output ids in the response, where more were sampled: only their
        pages are inserted into the prefix cache.
        """
        if (request := self._requests.get(key)) is None:
            return
        if kept is not None and request.running:
            self.batch.cache_prefix(request, request.prompt_tokens + kept)
        self._free(request)

    def requeue(self, keys: Sequence[ChoiceKey]) -> bool:
        """Drop the choices of a request, if none of them was ever started; whether that is so."""
        requests = [self._requests.get(key) for key in keys]
        if any(request is None or request.started_s is not None for request in requests):
            return False
        for key in keys:
            self.drop(key)
        return True

    def next_rows(self, now: float) -> StepRows:
        """Plan and launch the rows of the next step.

        Empty only if nothing is left to do, or nothing before launched rows are committed.
        """
        rows = self.plan_rows(now)
        if self.stalled:
            self.wait_for_matcher()
        return rows

    def plan_rows(self, now: float) -> StepRows:
        """`next_rows` that never waits: see `stalled`."""
        self.expire(now)
        scheduled, rows = self.planner.schedule(now), NO_ROWS
        if len(scheduled.decodes) or scheduled.drafted or scheduled.chunks:
            rows = self.batch.launch(*scheduled)
        self._rows_launched += len(rows)
        self.starved = False
        if self.stalled and not self.idle and not self._pending_grammar:
            loads = (r for r in self._requests.values() if r.media is not None and r.media.loading)
            assert self.batch.transfers or any(loads), "requests wait and nothing runs"
            self.starved = True
        return rows

    @property
    def stalled(self) -> bool:
        """Whether no row is launched."""
        return not self._rows_launched

    def wait_for_matcher(self) -> None:
        """Wait a short time for a grammar matcher, if rows wait for one."""
        if self._pending_grammar:
            self._pending_grammar.executor.wait()

    def build_plan(self, step: int, rows: StepRows, part: SamplingPart | None) -> StepPlan:
        """The plan of these rows; `part` is None if it follows."""
        return build_plan(step, rows, self.batch, part)

    def part_follows(self, rows: StepRows) -> bool:
        return self.batch.part_follows(rows)

    def part(self, rows: StepRows) -> SamplingPart:
        return self.batch.part(rows)

    def is_current(self, rows: StepRows) -> Flags:
        return self.batch.is_current(rows)

    def repeat(self, rows: StepRows) -> StepRows:
        return self.batch.repeat(rows)

    def note_drafts(self, rows: StepRows, read: Callable[[], Ints]) -> None:
        """Read what a draft model makes after these rows, if masks depend on it."""
        batch = self.batch
        if rows.draft_counts is None or not batch.grammars:
            return
        if np.count_nonzero(rows.draft_counts[batch.has_grammar[rows.slots.at]]):
            batch.note_drafts(rows, read())

    def launched(self, step: int) -> None:
        """Note that the runner has the plan of a step, and with it all changes by slot."""
        self.batch.changes.clear()
        self.pools.launched(step)

    def finished(self, step: int) -> None:
        """Note that a step was computed, or has failed."""
        self.pools.finished(step)

    def expire(self, now: float) -> None:
        """End requests that timed out. Also called in a pause, in which no rows are planned."""
        if self._pending_grammar:
            self._outcomes.commit_pending()
        if self.batch.transfers is not None:
            self.batch.transfers.expire(now)
        if self._timeouts.any_due(now):
            self._end_overdue(self._timeouts.take_due(now))
        if self._pending_grammar:
            self._end_overdue(self._pending_grammar.overdue(now))

    def commit(self, rows: StepRows, outcome: StepOutcome) -> None:
        """Apply the outcome of a plan. Rows that are no longer current are skipped."""
        self._rows_launched -= len(rows)
        self._outcomes.commit(rows, outcome)

    def land(self, done: TransferDone | MediaLoaded) -> None:
        """End a transfer of pages; requests that waited for it find them in the prefix cache.

        Or end a load of media; the request that waited for it goes on, or ends with its error.
        """
        if isinstance(done, MediaLoaded):
            request = self._requests.get(done.key)
            if request is None or request.media is None:
                return  # it was dropped meanwhile
            if request.media.put(done.number, done.embeddings) and done.error is not None:
                self._end_each([request], Finish.failed(done.error))
        elif self.batch.transfers is not None:
            self.batch.transfers.land(done)

    def fail_choice(self, key: ChoiceKey, error: EngineError) -> None:
        if (request := self._requests.get(key)) is None:
            self._log.refuse(key, Finish.failed(error))
        else:
            self._end_failed(request, error)

    def fail_planned(self, request: Request | None, error: EngineError) -> None:
        """End the request at fault after planning failed.

        None: it is unknown. Then all running requests end, or the first waiting one if none runs,
        so that each turn comes nearer to the one at fault.
        """
        if request is not None:
            at_fault = [request]
        elif self.running:
            at_fault = list(self.running.values())
        else:
            at_fault = self.waiting.head()[:1]
        for each in at_fault:
            self._end_failed(each, error)

    def fail_committed(self, rows: StepRows, error: EngineError) -> None:
        for request in self._current(rows):
            self._end_failed(request, error)

    def _current(self, rows: StepRows) -> list[Request]:
        """The requests that wait for the outcome of these rows."""
        slots = rows.slots.slots[self.batch.is_current(rows)]
        return [self.running[slot] for slot in slots.tolist()]

    def _end_failed(self, request: Request, error: EngineError) -> None:
        """End a request whose own state may be broken; nothing more is reported of it."""
        if request.ended:
            return
        request.finish = Finish.failed(error)
        self._log.refuse(request.key, request.finish)
        try:
            self._free(request)
        except Exception as failure:
            raise SharedStateBroken("what a failed request holds cannot be freed") from failure

    def _fail_alone(self, request: Request, error: Exception) -> None:
        raise_if_shared(error)
        log.error("request failed", exc_info=error, extra={"request_id": request.state.request_id})
        self._end_failed(request, Internal("internal error"))

    def fail(self, rows: StepRows, error: EngineError) -> None:
        self._rows_launched -= len(rows)
        self._end_each(self._current(rows), Finish.failed(error))

    def discard_launched(self, rows: StepRows) -> None:
        self._rows_launched -= len(rows)
        self.batch.unlaunch(rows)

    def prepare_pause(self, mode: PauseMode) -> int:
        """Prepare for a pause: abort, retract or leave requests, by its mode; return how many.

        Only while no step is in flight.
        """
        running = list(self.running.values())
        match mode:
            case PauseMode.ABORT:
                requests = list(self._requests.values())
                self._end_each(requests, Finish(reason=FinishReason.ABORT))
                return len(requests)
            case PauseMode.RETRACT:
                self._do_each(running, self.planner.retract)
            case PauseMode.IN_PLACE:
                pass
        return len(running)

    def set_weight_version(self, weight_version: str) -> int:
        """Compute with other weights from here on; return the number of evicted pages.

        Only while no step is in flight. Decoding requests continue with their pages, which are not
        shared any more; prefilling requests start again, and prompt logprobs that were not sent are
        discarded, since the output will be that of other weights.
        """
        prefilling = [request for request in self.running.values() if request.prefilling]
        self._do_each(prefilling, self.planner.retract)
        self._do_each(list(self._requests.values()), self._reset_prefill)
        self.limits = msgspec.structs.replace(self.limits, weight_version=weight_version)
        self._log.weights = weight_version
        return self.batch.set_weight_version(weight_version)

    def use_tower(self, tower: str) -> None:
        """Compute with the embeddings of another tower from here on: encoders have another digest.

        Prefilling requests with media start again, so that no prompt is made of both. Those that
        decode, and text, go on: their pages keep the key of the tower before. Only while no step
        is in flight.
        """
        running = [r for r in self.running.values() if r.prefilling and r.media is not None]
        self._do_each(running, self.planner.retract)
        waiting = [request for request in self._requests.values() if not request.running]
        self._do_each(waiting, self._forget_tower)
        self.batch.use_tower(tower)

    def _forget_tower(self, request: Request) -> None:
        """Forget what was found and loaded for a waiting request under another tower's key."""
        self.batch.media.release(request)
        request.forget_prefix()
        if request.media is not None:
            request.discard_prompt_logprobs()

    def _reset_prefill(self, request: Request) -> None:
        """Discard what other weights have computed of a prompt."""
        request.following = None
        request.discard_prompt_logprobs()
        self._log.report_all(request)  # which names the weights that sampled the tokens

    def flush(self) -> int:
        """Evict every cached page that no request holds; return how many."""
        return self.index.clear()

    def take_progress(self) -> Sequence[AnyProgress]:
        """What happened to the choices since the last call, in its order."""
        return self._log.take()

    def take_events(self) -> tuple[KvEvent, ...]:
        return self.index.take_events()

    def take_started(self) -> Sequence[Request]:
        """The requests that were started for the first time since the last call."""
        return self.planner.take_started()

    def capacity(self) -> Capacity:
        tokens, retracted = self.waiting.backlog()
        free = self.batch.page_budget.capacity()
        return msgspec.structs.replace(free, waiting_tokens=tokens, waiting_retracted=retracted)

    def totals(self) -> CoreTotals:
        planner = self.planner
        drafts = _NO_DRAFTS if self.speculation is None else self.speculation.counts
        return CoreTotals(
            running=len(self.running),
            waiting=len(self.waiting),
            retractions=planner.retractions,
            retracted_tokens=planner.retracted_tokens,
            retracted_prompt_tokens=planner.retracted_prompt_tokens,
            new_token_ratio=self.batch.page_budget.ratio.value,
            preemptions=planner.preemptions,
            evicted_tokens=self.index.evicted_tokens,
            verify_rows=drafts.rows,
            drafts_proposed=drafts.proposed,
            drafts_accepted=drafts.accepted,
        )

    def _request(
        self, key: ChoiceKey, state: RequestState, now: float, matcher: GrammarMatcher | None
    ) -> Request:
        self._arrivals += 1
        return Request(
            key,
            state,
            self.batch.store.open(np.frombuffer(state.output_ids, WIRE_IDS)),
            arrival=self._arrivals,
            queued_s=now - state.waited_ms / 1000,
            outputs_max=outputs_max(state, self.limits),
            end_ids=self.limits.end_ids,
            place=self.waiting.key(state, self._arrivals),
            matcher=matcher,
        )

    def _check_priority(self, state: RequestState) -> None:
        if state.priority and self.rules.refuse_priority and not self.rules.priority:
            raise InvalidRequest(
                "priority scheduling is disabled; start the worker with"
                " --enable-priority-scheduling",
                param="priority",
            )

    def _check_queue(self, request: Request) -> None:
        """If the queue is full, reject this request, or a never started one of lower priority."""
        if len(self.waiting) < self.limits.queue_max + self.batch.free_count:
            return
        full = Overloaded("the worker's queue is full", retry_after_s=_RETRY_AFTER_S)
        last = self.waiting.last()
        if last is None or last.started_s is not None or last.rank <= request.rank:
            raise full
        self._end_each([last], Finish.failed(full))

    def _end_overdue(self, overdue: Iterable[tuple[Request, EngineError]]) -> None:
        for request, error in list(overdue):
            if not request.ended:
                self._end_each([request], Finish.failed(error))

    def _end_each(self, requests: Iterable[Request], finish: Finish) -> None:
        self._do_each(requests, lambda request: self._end(request, finish))

    def _do_each(self, requests: Iterable[Request], work: Callable[[Request], None]) -> None:
        """Do the work for each request: one that fails ends alone."""
        for request in requests:
            try:
                work(request)
            except Exception as error:  # noqa: BLE001  # logged there
                self._fail_alone(request, error)

    def _end(self, request: Request, finish: Finish | None = None) -> None:
        request.finish = request.finish or finish
        self._log.report(request)
        self._free(request)

    def _free(self, request: Request) -> None:
        if request.running:
            self.batch.release(request)
        else:
            self.waiting.discard(request)
            self.batch.media.release(request)
        self._timeouts.ended(request)
        if self.speculation is not None:
            self.speculation.ended(request)
        request.end()
        del self._requests[request.key]
