"""The engine core: the requests of one worker, and the rows of the next step."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.batching.admission import check, outputs_max
from antiphon.model_worker.batching.faults import RequestFault, raise_if_shared
from antiphon.model_worker.batching.logprobs import write_outputs
from antiphon.model_worker.batching.plan import RowStatus, StepOutcome
from antiphon.model_worker.batching.planner import QueueRules, StepPlanner, WaitingQueue
from antiphon.model_worker.batching.request import BatchRow, Request
from antiphon.model_worker.batching.running_batch import Capacity, RunningBatch
from antiphon.model_worker.batching.state import (
    ChoiceKey,
    EngineLimits,
    Finish,
    Phase,
    Progress,
    RequestState,
)
from antiphon.model_worker.batching.steady import SteadyRows
from antiphon.model_worker.batching.stretch import Stretch
from antiphon.model_worker.batching.timeouts import Timeouts
from antiphon.model_worker.cache.hashing import Namespace
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.grammar.executor import (
    MatcherExecutor,
    MatcherTask,
    PendingGrammarRow,
    PendingGrammarRows,
)
from antiphon.service.inbox import SharedStateBroken
from antiphon.wire.base import FinishReason
from antiphon.wire.command import PauseMode
from antiphon.wire.errors import EngineError, Internal, InvalidRequest, Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from antiphon.model_worker.cache.pages import CachePools
    from antiphon.model_worker.grammar.matcher import GrammarMatcher

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0


class EngineCore:
    """Waiting and running requests, their slots and pages.

    Called from one thread only: `add` and `drop` between steps, then `next_rows`, then `commit` or
    `fail` with the outcome. The next rows may be planned before the last are committed; their
    tokens are `future` then. Has no clock: `now` is any monotonic one, in seconds. On the decode
    fast path the tokens of `running` lag behind; the methods here bring them up to date.
    """

    def __init__(
        self,
        limits: EngineLimits,
        pools: CachePools,
        index: RadixIndex | None = None,
        rules: QueueRules | None = None,
        namespace: Namespace | None = None,
        matcher_executor: MatcherExecutor | None = None,
    ) -> None:
        assert limits.context_tokens <= pools.tokens_max, "the longest request would never fit"
        assert limits.running_max <= limits.step_tokens_max, "some requests could not decode"
        self.limits = limits
        self.pools = pools
        self.rules = rules or QueueRules()
        self.index = index or RadixIndex(pools, enabled=False)
        self.waiting = WaitingQueue(self.rules)
        namespace = namespace or Namespace(model_digest=limits.weights_digest)
        self._batch = RunningBatch(limits, pools, self.index, namespace)
        self.running = self._batch.running
        self.slots = self._batch.slots
        self._timeouts = Timeouts(limits)
        self._pending_grammar = PendingGrammarRows(
            matcher_executor or MatcherExecutor(), limits.follow_timeout_s
        )
        self.planner = StepPlanner(limits, self.rules, self._batch, self.waiting, self._timeouts)
        self._requests: dict[ChoiceKey, Request] = {}
        self._arrivals = 0
        self._rows_launched = 0
        self._progress: list[Progress] = []
        self._stretch = Stretch(self._batch, self._batch, self._fail_alone)
        self._outcomes = OutcomeProcessor(
            batch=self._batch,
            pending=self._pending_grammar,
            report=lambda request: self._report(request, self.limits.stream_interval),
            end=self._end,
            fail=self._fail_alone,
        )

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
        dues = (self._timeouts.next_due, self._pending_grammar.next_due)
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
            self._progress.append(Progress(key=key, finish=Finish.failed(error)))
            return
        self._report(request)
        if request.finish is None:
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
        self._stretch.end()
        if kept is not None and request.phase is Phase.RUNNING:
            self._batch.cache_prefix(request, request.prompt_tokens + kept)
        self._free(request)

    def requeue(self, keys: Sequence[ChoiceKey]) -> bool:
        """Drop the choices of a request, if none of them was ever started; whether that is so."""
        requests = [self._requests.get(key) for key in keys]
        if any(request is None or request.started_s is not None for request in requests):
            return False
        for key in keys:
            self.drop(key)
        return True

    def next_rows(self, now: float) -> Sequence[BatchRow]:
        """Plan the rows of the next step.

        Empty only if nothing is left to do, or nothing before launched rows are committed.
        """
        self.expire(now)
        steady = self._stretch.next_rows() if self._full else ()
        rows = steady or self._plan_rows(now)
        self._rows_launched += len(rows)
        stalled = not rows and not self._rows_launched
        if stalled and self._pending_grammar:
            self._pending_grammar.executor.wait()
        assert not stalled or self._pending_grammar or self.idle, "requests wait and nothing runs"
        return rows

    def _plan_rows(self, now: float) -> Sequence[BatchRow]:
        self._stretch.end()
        rows: list[BatchRow] = []
        for request, end in self.planner.schedule(now):
            if request.table is None:
                continue
            try:
                rows.append(BatchRow.launched(request, end))
            except Exception as error:
                _unlaunch(rows)
                raise RequestFault(request) from error
        return rows

    @property
    def _full(self) -> bool:
        """Whether no request starts until a running one finishes: all slots are taken."""
        return not len(self.waiting) or not (self.slots.free_count or self.rules.priority)

    def expire(self, now: float) -> None:
        """End requests that timed out. Also called in a pause, in which no rows are planned."""
        if self._pending_grammar:
            self._outcomes.commit_pending()
        if self._timeouts.any_due(now):
            self._end_overdue(self._timeouts.take_due(now))
        if self._pending_grammar:
            self._end_overdue(self._pending_grammar.overdue(now))

    def commit(self, rows: Sequence[BatchRow], outcome: StepOutcome) -> None:
        """Apply the outcome of a plan. Rows that are no longer current are skipped."""
        self._rows_launched -= len(rows)
        if isinstance(rows, SteadyRows):
            if self._stretch.take(rows, outcome):
                return
            rows = rows[:]
        self._outcomes.commit(rows, outcome)
        if not self._rows_launched:
            self._stretch.begin(rows, outcome, self.limits)

    def fail_choice(self, key: ChoiceKey, error: EngineError) -> None:
        if (request := self._requests.get(key)) is None:
            self._progress.append(Progress(key=key, finish=Finish.failed(error)))
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
            self._stretch.forget()  # none of its requests is left
            at_fault = list(self.running.values())
        else:
            at_fault = self.waiting.head()[:1]
        for each in at_fault:
            self._end_failed(each, error)

    def fail_committed(self, rows: Sequence[BatchRow], error: EngineError) -> None:
        if isinstance(rows, SteadyRows):
            self._stretch.forget()
            requests = rows.requests
        else:
            requests = [row.request for row in rows]
        for request in requests:
            self._end_failed(request, error)

    def _end_failed(self, request: Request, error: EngineError) -> None:
        """End a request whose own state may be broken; nothing more is reported of it."""
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
        raise_if_shared(error)
        log.error("request failed", exc_info=error, extra={"request_id": request.state.request_id})
        self._end_failed(request, Internal("internal error"))

    def fail(self, rows: Sequence[BatchRow], error: EngineError) -> None:
        self._rows_launched -= len(rows)
        self._stretch.end()
        self._end_each([row.request for row in rows if row.current], Finish.failed(error))

    def discard_launched(self, rows: Sequence[BatchRow]) -> None:
        self._rows_launched -= len(rows)
        _unlaunch(rows)

    def prepare_pause(self, mode: PauseMode) -> int:
        """Prepare for a pause: abort, retract or leave requests, by its mode; return how many.

        Only while no step is in flight.
        """
        self._stretch.end()
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
        self._stretch.end()
        prefilling = [request for request in self.running.values() if request.prefilling]
        self._do_each(prefilling, self.planner.retract)
        self._do_each(list(self._requests.values()), self._reset_prefill)
        self.limits = msgspec.structs.replace(self.limits, weight_version=weight_version)
        return self._batch.set_weight_version(weight_version)

    def _reset_prefill(self, request: Request) -> None:
        """Discard what other weights have computed of a prompt."""
        request.following = None
        request.untell()
        self._report(request)

    def flush(self) -> int:
        """Evict every cached page that no request holds; return how many."""
        self._stretch.end()
        return self.index.clear()

    def take_progress(self) -> Sequence[Progress]:
        """What happened to each choice since the last call."""
        sampled = self._stretch.take_drawn()
        if not self._progress:
            return () if sampled is None else sampled
        progress, self._progress = (*(sampled or ()), *self._progress), []
        return progress

    def capacity(self) -> Capacity:
        self._stretch.settle()
        return self._batch.page_budget.capacity()

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
            place=self.waiting.key(state, self._arrivals),
            guide=guide,
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
        """Do the work for each request: one that fails ends alone."""
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

    def _report(self, request: Request, interval: int = 1) -> None:
        """Report the new tokens of a choice, if there are at least `interval`, or it finishes."""
        progress = request.progress(self.limits.weight_version, interval)
        assert progress is not None or request.finish is None, "a finish was not reported"
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


@dataclass(kw_only=True)
class OutcomeProcessor:
    """Writes outcomes to requests: tokens, pages, cached prefixes, and the finish.

    `report` reports the new tokens of a request, once they fill a stream interval. `end` ends one
    with its own finish or the given one, and frees what it holds. `fail` ends one whose commit
    failed, and may be half done.
    """

    batch: RunningBatch
    pending: PendingGrammarRows
    report: Callable[[Request], None]
    end: Callable[[Request, Finish | None], None]
    fail: Callable[[Request, Exception], None]

    def commit(self, rows: Sequence[BatchRow], outcome: StepOutcome) -> None:
        starts, status = outcome.starts.tolist(), outcome.status.tolist()
        token_ids = outcome.token_ids.tolist()
        sampled = [token_ids[start:end] for start, end in pairwise(starts)]
        tasks = (
            self._advance_matchers(rows, sampled)
            if self.batch.slots.logits_processors.has_grammar
            else _NO_TASKS
        )
        for index, row in enumerate(rows):
            if not row.current:
                continue
            try:
                if status[index]:
                    self.end(row.request, Finish.failed(_failure(status[index])))
                    continue
                if (task := tasks.get(index)) is None:
                    self._commit_row(row, outcome, index, sampled[index])
                elif task.done:
                    self._commit_row(row, outcome, index, sampled[index], task.result())
                else:
                    self._defer_row(PendingGrammarRow(row, outcome, index, task))
            except Exception as error:  # noqa: BLE001  # logged there
                self.fail(row.request, error)

    def commit_pending(self) -> None:
        """Commit the rows whose grammar matchers have finished, as if their step had just ended."""
        for late in self.pending.take_done():
            request = late.row.request
            try:
                if late.row.current:
                    task = late.task
                    self._commit_row(late.row, late.outcome, late.index, task.tokens, task.result())
                elif request.guide is not None:  # retracted: it samples them again
                    request.guide.rollback()
            except Exception as error:  # noqa: BLE001  # logged there
                self.fail(request, error)

    def _advance_matchers(
        self, rows: Sequence[BatchRow], sampled: Sequence[list[int]]
    ) -> dict[int, MatcherTask]:
        tasks = {
            index: MatcherTask(row.request.guide, sampled[index])
            for index, row in enumerate(rows)
            if row.request.guide is not None and sampled[index] and row.current
        }
        self.pending.executor.submit(list(tasks.values()))
        return tasks

    def _defer_row(self, late: PendingGrammarRow) -> None:
        self.pending.put(late)
        request, table = late.row.request, late.row.request.table
        assert table is not None, "a running request has no pages"
        table.commit(late.row.end)
        request.computed = late.row.end
        if request.prefilling:  # its prefix is computed, whatever its grammar does
            self.batch.cache_prefix(request)
            self.batch.prefix_sharing.unregister(request)

    def _commit_row(
        self,
        row: BatchRow,
        outcome: StepOutcome,
        index: int,
        accepted: Sequence[int],
        ends: Sequence[Finish | None] = (),
    ) -> None:
        request, table = row.request, row.request.table
        assert table is not None, "a running request has no pages"
        assert row.draws or not accepted, "a token was sampled in the middle of a prompt"
        length = request.length
        computed = row.end if accepted or not row.draws else self._resume_at(row)
        table.commit(computed)
        if len(accepted) == row.draws:
            request.computed = computed
            request.ahead -= row.draws
        else:
            request.resume(computed)
        if accepted:
            request.accept(accepted, ends)
            self.batch.slots.length[request.slot] = request.length
        if outcome.details is not None or outcome.vectors is not None:
            kept = request.length - length
            write_outputs(request, outcome, index, accepted=len(accepted), kept=kept)
        self._finish_row(request, sampled=bool(accepted))

    def _resume_at(self, row: BatchRow) -> int:
        """The computed length of a row that should have sampled and did not: it is run again.

        From its last token on; with recurrent states from its first, as none is stored between.
        """
        return row.start if self.batch.pools.states else row.end - 1

    def _finish_row(self, request: Request, *, sampled: bool) -> None:
        """Finish, cache or report the request after its tokens were committed."""
        batch = self.batch
        if request.scores and request.computed == request.length:
            request.finish = Finish.at_length()
        if request.finish is not None:
            batch.cache_prefix(request)
            self.end(request, None)
            return
        if request.prefilling:
            batch.cache_prefix(request)
            if sampled:
                request.prefilling = False
                batch.prefix_sharing.unregister(request)
        elif batch.checkpoints is not None and batch.checkpoints.due(request.computed):
            batch.cache_prefix(request)
        elif batch.pools.windows:
            batch.slots.update(request)
        self.report(request)


_NO_TASKS: Mapping[int, MatcherTask] = {}


def _failure(status: int) -> EngineError:
    if status == RowStatus.NO_TOKEN:
        return InvalidRequest("the request's constraints allow no next token")
    return Internal("the model produced no finite number")


def _unlaunch(rows: Sequence[BatchRow]) -> None:
    """Undo `BatchRow.launched` for rows that are not launched after all, or not committed."""
    for row in rows:
        if row.current:
            row.request.resume(row.request.computed)
