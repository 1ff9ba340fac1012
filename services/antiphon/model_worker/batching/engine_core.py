"""The requests of one worker, and the choice of what runs in the next step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.batching.admission import check, outputs_max
from antiphon.model_worker.batching.builder import BatchRow
from antiphon.model_worker.batching.capacity import Capacity, measure_capacity
from antiphon.model_worker.batching.faults import RequestFault, raise_if_shared
from antiphon.model_worker.batching.outcome_processor import OutcomeProcessor
from antiphon.model_worker.batching.pending_grammar import PendingGrammarRows
from antiphon.model_worker.batching.planner import StepPlanner
from antiphon.model_worker.batching.policy import QueueOrder, QueueRules
from antiphon.model_worker.batching.queue import WaitingQueue
from antiphon.model_worker.batching.request import (
    ChoiceKey,
    Finish,
    Phase,
    Progress,
    Request,
    RequestState,
)
from antiphon.model_worker.batching.running_batch import RunningBatch
from antiphon.model_worker.batching.steady import SteadyRows
from antiphon.model_worker.batching.stretch import Stretch
from antiphon.model_worker.batching.timeouts import Timeouts
from antiphon.model_worker.cache.hashing import Namespace
from antiphon.model_worker.cache.index import NoIndex, PrefixIndex
from antiphon.model_worker.grammar.executor import InlineMatcherExecutor
from antiphon.service.dropped_messages import SharedStateBroken
from antiphon.wire.base import FinishReason
from antiphon.wire.command import PauseMode
from antiphon.wire.errors import EngineError, Internal, InvalidRequest, Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from antiphon.model_worker.batching.admission import EngineLimits
    from antiphon.model_worker.batching.plan import StepOutcome
    from antiphon.model_worker.cache.table import CachePools
    from antiphon.model_worker.grammar.executor import MatcherExecutor
    from antiphon.model_worker.grammar.matcher import GrammarMatcher

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0


class EngineCore:
    """Waiting and running requests, their slots and pages.

    Called from one thread only: `add` and `drop` between steps, then `next_rows`, then `commit` or
    `fail` with what became of them. The next rows may be chosen before the last are committed;
    their tokens are `future` then. Knows no clock: `now` is any that never goes back, in seconds.

    Attributes:
        running: Requests with pages by slot, in the order in which they were started. Of steady
            rows they do not know yet what was drawn; whoever asks here for anything does.
        slots: What plans are gathered from.
    """

    def __init__(
        self,
        limits: EngineLimits,
        pools: CachePools,
        index: PrefixIndex | None = None,
        rules: QueueRules | None = None,
        namespace: Namespace | None = None,
        matcher_executor: MatcherExecutor | None = None,
    ) -> None:
        assert limits.context_tokens <= pools.tokens_max, "the longest request would never fit"
        assert limits.running_max <= limits.step_tokens_max, "not everybody could decode"
        self.limits = limits
        self.pools = pools
        self.rules = rules or QueueRules()
        self.index: PrefixIndex = index or NoIndex(len(pools.groups))
        self.waiting = WaitingQueue(self.rules)
        namespace = namespace or Namespace(model_digest=limits.weights_digest)
        self._batch = RunningBatch(limits, pools, self.index, namespace)
        self.running = self._batch.running
        self.slots = self._batch.slots
        self._timeouts = Timeouts(limits)
        self._pending_grammar = PendingGrammarRows(
            matcher_executor or InlineMatcherExecutor(), limits.follow_timeout_s
        )
        self._planner = StepPlanner(limits, self.rules, self._batch, self.waiting, self._timeouts)
        self._queue_order = QueueOrder(self.rules)
        self._requests: dict[ChoiceKey, Request] = {}
        self._arrivals = 0
        self._rows_launched = 0
        self._progress: list[Progress] = []
        self._stretch = Stretch(self._batch, self._planner, self._fail_alone)
        self._commits = OutcomeProcessor(
            self._batch,
            self._pending_grammar,
            report=self._report_running,
            end=self._end,
            fail=self._fail_alone,
        )

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run."""
        return not self._requests

    @property
    def can_plan(self) -> bool:
        """Whether somebody runs, and the next rows can be chosen without a wait for a guide."""
        return bool(self.running) and not self._pending_grammar

    @property
    def retractions(self) -> int:
        """Requests that lost their pages because none were left, since start."""
        return self._planner.retractions

    @property
    def retracted_tokens(self) -> int:
        """Tokens that these had in the cache, since start."""
        return self._planner.retracted_tokens

    @property
    def retracted_prompt_tokens(self) -> int:
        """Of those, the prompts', since start."""
        return self._planner.retracted_prompt_tokens

    @property
    def new_token_ratio(self) -> float:
        """Share of the longest answers for which pages are kept free."""
        return self._planner.new_token_ratio

    @property
    def preemptions(self) -> int:
        """Requests that lost their pages to one that outranks them, since start."""
        return self._planner.preemptions

    @property
    def next_due(self) -> float | None:
        """When `expire` next has somebody to end, if anybody's time is limited."""
        dues = [
            due
            for due in (self._timeouts.next_due, self._pending_grammar.next_due)
            if due is not None
        ]
        return min(dues, default=None)

    def add(
        self, key: ChoiceKey, state: RequestState, now: float, matcher: GrammarMatcher | None = None
    ) -> None:
        """Take a choice in. One that can never run, or not wait, ends at once with the reason.

        `guide` belongs to its grammar, and stands where its answer stands.
        """
        assert (matcher is None) == (state.sampling.grammar is None), "not the guide of this choice"
        try:
            check(state, self.limits)
            self._check_priority(state)
            request = self._request(key, state, now, matcher)
            self._check_queue(request)
        except EngineError as error:
            self._progress.append(Progress(key=key, finish=Finish.failed(error)))
            return
        self._report(request)
        if request.finish is None:
            self._requests[key] = request
            self.waiting.put(request)
            self._timeouts.arrived(request)

    def drop(self, key: ChoiceKey, kept: int | None = None) -> None:
        """Free what a choice holds and say no more of it. An unknown key is no error.

        Args:
            key: Names the choice.
            kept: Output ids of its answer, where it ended before what was made of it: others may
                find the pages of these, and never those after them.
        """
        request = self._requests.get(key)
        if request is None:
            return
        self._stretch.end()
        if kept is not None and request.phase is Phase.RUNNING:
            self._batch.cache_prefix(request, request.prompt_tokens + kept)
        self._free(request)

    def requeue(self, keys: Sequence[ChoiceKey]) -> bool:
        """Free the choices of a request, if none of them was ever started; say whether it is so."""
        requests = [self._requests.get(key) for key in keys]
        if any(request is None or request.started_s is not None for request in requests):
            return False
        for key in keys:
            self.drop(key)
        return True

    def next_rows(self, now: float) -> Sequence[BatchRow]:
        """Choose the work of the next step.

        Nothing only if nothing is left to do, or nothing before launched rows are committed.
        """
        self.expire(now)
        steady = self._stretch.next_rows() if self._full else ()
        rows = steady or self._plan_rows(now)
        self._rows_launched += len(rows)
        stands = not rows and not self._rows_launched
        if stands and self._pending_grammar:
            self._pending_grammar.wait()
        assert not stands or self._pending_grammar or self.idle, "requests wait and nothing runs"
        return rows

    def _plan_rows(self, now: float) -> Sequence[BatchRow]:
        self._stretch.end()
        rows: list[BatchRow] = []
        for request, end in self._planner.schedule(now):
            if request.table is None:
                continue
            try:
                rows.append(BatchRow.launched(request, end))
            except Exception as error:
                self._unlaunch(rows)
                raise RequestFault(request) from error
        return rows

    def _unlaunch(self, rows: Sequence[BatchRow]) -> None:
        """Rows that were made are not launched after all."""
        for row in rows:
            if row.current:
                row.request.resume(row.request.computed)

    @property
    def _full(self) -> bool:
        """Whether nobody starts before somebody ends: whoever waits has no slot to wait for."""
        return not len(self.waiting) or not (self.slots.free_count or self.rules.priority)

    def expire(self, now: float) -> None:
        """End those whose time is over: it runs in a pause, too, in which no rows are chosen."""
        if self._pending_grammar:
            self._commits.commit_pending()
        if self._timeouts.any_due(now):
            self._end_overdue(self._timeouts.take_due(now))
        if self._pending_grammar:
            self._end_overdue(self._pending_grammar.overdue(now))

    def commit(self, rows: Sequence[BatchRow], outcome: StepOutcome) -> None:
        """Apply what a plan produced. Rows whose requests went other ways are passed over."""
        self._rows_launched -= len(rows)
        if isinstance(rows, SteadyRows):
            if self._stretch.take(rows, outcome):
                return
            rows = rows[:]
        self._commits.commit(rows, outcome)
        if not self._rows_launched:
            self._stretch.begin(rows, outcome, self.limits)

    def fail_choice(self, key: ChoiceKey, error: EngineError) -> None:
        """End a choice that could not be taken in, or not be dropped."""
        request = self._requests.get(key)
        if request is None:
            self._progress.append(Progress(key=key, finish=Finish.failed(error)))
        else:
            self._end_failed(request, error)

    def fail_planned(self, request: Request | None, error: EngineError) -> None:
        """End the request at fault after no rows could be chosen.

        None: it is not known. Then all that run end, or the first that waits if none does, so that
        each turn comes nearer to the one at fault.
        """
        if request is not None:
            at_fault = [request]
        elif self.running:
            self._stretch.forget()  # of whom nobody is left
            at_fault = list(self.running.values())
        else:
            at_fault = self.waiting.head()[:1]
        for each in at_fault:
            self._end_failed(each, error)

    def fail_committed(self, rows: Sequence[BatchRow], error: EngineError) -> None:
        """End the requests of a plan whose commit failed as a whole."""
        if isinstance(rows, SteadyRows):
            self._stretch.forget()
        for request in rows.requests if isinstance(rows, SteadyRows) else _requests(rows):
            self._end_failed(request, error)

    def _end_failed(self, request: Request, error: EngineError) -> None:
        """End a request whose own state may be broken; nothing more is reported of it.

        Raises:
            SharedStateBroken: What it holds cannot be freed.
        """
        if request.phase is Phase.ENDED:
            return
        request.finish = Finish.failed(error)
        self._progress.append(Progress(key=request.key, finish=request.finish))
        try:
            self._stretch.end()
            self._free(request)
        except Exception as failure:
            raise SharedStateBroken("what a failed request holds cannot be freed") from failure

    def _fail_alone(self, request: Request, error: Exception) -> None:
        """End the request that a fault belongs to: the requests beside it go on.

        Raises:
            SharedStateBroken: The fault is in what all requests share.
        """
        raise_if_shared(error)
        log.error("request failed", exc_info=error, extra={"request_id": request.state.request_id})
        self._end_failed(request, Internal("internal error"))

    def fail(self, rows: Sequence[BatchRow], error: EngineError) -> None:
        """End every request of a plan that could not be run."""
        self._rows_launched -= len(rows)
        self._stretch.end()
        self._end_each([row.request for row in rows if row.current], Finish.failed(error))

    def discard_launched(self, rows: Sequence[BatchRow]) -> None:
        """Forget launched rows: nobody will say what became of them."""
        self._rows_launched -= len(rows)
        for row in rows:
            if row.current:
                row.request.resume(row.request.computed)

    def prepare_pause(self, mode: PauseMode) -> int:
        """Prepare for a pause; return how many choices it meets. What they are told is in the mode.

        Only between steps of which nothing is in flight.
        """
        self._stretch.end()
        running = list(self.running.values())
        match mode:
            case PauseMode.ABORT:
                everybody = list(self._requests.values())
                self._end_each(everybody, Finish(reason=FinishReason.ABORT))
                return len(everybody)
            case PauseMode.RETRACT:
                self._do_each(running, self._planner.retract)
            case PauseMode.IN_PLACE:
                pass
        return len(running)

    def set_weight_version(self, weight_version: str) -> int:
        """Compute with other weights from here on; return the pages that nobody could use.

        Only between steps of which nothing is in flight. Whoever answers goes on with the pages
        that it has, and shares them with nobody; who does not begins its prompt again, and what
        was to be told of it is forgotten: the answer will be of other weights.
        """
        self._stretch.end()
        prefilling = [request for request in self.running.values() if request.prefilling]
        self._do_each(prefilling, self._planner.retract)
        self._do_each(list(self._requests.values()), self._begin_anew)
        self.limits = msgspec.structs.replace(self.limits, weight_version=weight_version)
        return self._batch.set_weight_version(weight_version)

    def _begin_anew(self, request: Request) -> None:
        """Forget what other weights say of a prompt."""
        request.following = None
        request.untell()
        self._report(request)

    def flush(self) -> int:
        """Forget every page that no request holds; return how many."""
        self._stretch.end()
        return self.index.clear()

    def take_progress(self) -> Sequence[Progress]:
        """What happened to each choice since the last call."""
        drawn = self._stretch.take_drawn()
        if not self._progress:
            return () if drawn is None else drawn
        progress, self._progress = (*(drawn or ()), *self._progress), []
        return progress

    def take_started(self) -> Sequence[Request]:
        """Those that were started for the first time since the last call."""
        return self._planner.take_started()

    def capacity(self) -> Capacity:
        """What could be taken on now."""
        self._stretch.settle()
        return measure_capacity(self.pools, self.index, self._batch.page_budget, self.slots)

    def _request(
        self, key: ChoiceKey, state: RequestState, now: float, guide: GrammarMatcher | None
    ) -> Request:
        self._arrivals += 1
        return Request(
            key,
            msgspec.structs.replace(state, weights_digest=self.limits.weights_digest),
            arrival=self._arrivals,
            queued_s=now - state.waited_ms / 1000,
            outputs_max=outputs_max(state, self.limits),
            end_ids=self.limits.end_ids,
            place=self._queue_order.key(state, self._arrivals),
            guide=guide,
        )

    def _check_priority(self, state: RequestState) -> None:
        if state.priority and self.rules.refuse_priority and not self.rules.priority:
            raise InvalidRequest("this worker goes by no priorities", param="priority")

    def _check_queue(self, request: Request) -> None:
        """Refuse one more than may wait: the last by rank, of those that were never started."""
        if len(self.waiting) < self.limits.queue_max + self.slots.free_count:
            return
        full = Overloaded("the worker's queue is full", retry_after_s=_RETRY_AFTER_S)
        last = self.waiting.last()
        if last is None or last.started_s is not None or last.rank <= request.rank:
            raise full
        self._end_each([last], Finish.failed(full))

    def _end_overdue(self, overdue: Iterable[tuple[Request, EngineError]]) -> None:
        for request, error in list(overdue):
            if request.phase is not Phase.ENDED:
                self._end_each([request], Finish.failed(error))

    def _end_each(self, requests: Iterable[Request], finish: Finish) -> None:
        self._do_each(requests, lambda request: self._end(request, finish))

    def _do_each(self, requests: Iterable[Request], work: Callable[[Request], None]) -> None:
        """Do something to requests that have nothing in common: one that fails ends alone."""
        for request in requests:
            try:
                work(request)
            except Exception as error:  # noqa: BLE001  # logged there
                self._fail_alone(request, error)

    def _end(self, request: Request, finish: Finish | None = None) -> None:
        self._stretch.end()
        request.finish = request.finish or finish
        self._report(request)
        self._free(request)

    def _report_running(self, request: Request) -> None:
        """Report what is new of a choice that goes on, if that is worth a word yet."""
        self._report(request, self.limits.stream_interval)

    def _report(self, request: Request, interval: int = 1) -> None:
        """Report what nobody was told yet of a choice, if that is worth a word."""
        progress = request.progress(self.limits.weight_version, interval)
        assert progress is not None or request.finish is None, "a request ended without an end"
        if progress is not None:
            self._progress.append(progress)

    def _free(self, request: Request) -> None:
        if request.phase is Phase.RUNNING:
            self._batch.release(request)
        else:
            self.waiting.discard(request)
        self._timeouts.ended(request)
        request.end()
        del self._requests[request.key]


def _requests(rows: Sequence[BatchRow]) -> list[Request]:
    return [row.request for row in rows]
