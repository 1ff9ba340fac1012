"""Applies the outcome of a step to the requests of its rows, later where a matcher is slow."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from antiphon.model_worker.batching.logprobs import write_outputs
from antiphon.model_worker.batching.plan import RowStatus
from antiphon.model_worker.batching.state import Finish, Phase
from antiphon.model_worker.grammar.executor import MatcherTask
from antiphon.wire.errors import Internal, InvalidRequest, Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from antiphon.model_worker.batching.plan import StepOutcome
    from antiphon.model_worker.batching.request import BatchRow, Request
    from antiphon.model_worker.batching.running_batch import RunningBatch
    from antiphon.model_worker.grammar.executor import MatcherExecutor
    from antiphon.wire.errors import EngineError

_RETRY_AFTER_S = 5.0


@dataclass(slots=True)
class PendingGrammarRow:
    """A row that waits until the matcher task has accepted its tokens, and its outcome."""

    row: BatchRow
    outcome: StepOutcome
    index: int
    task: MatcherTask
    since: float | None = None  # when the wait was first noticed


class PendingGrammarRows:
    """The rows that wait for their grammar matchers; other requests do not wait for them.

    A row that waits too long ends as overloaded, not as invalid: the time depends on the load of
    the machine.
    """

    def __init__(self, executor: MatcherExecutor, timeout_s: float) -> None:
        self.executor = executor
        self._timeout_s = timeout_s
        self._rows: list[PendingGrammarRow] = []

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, late: PendingGrammarRow) -> None:
        late.row.request.late = True
        self._rows.append(late)

    def take_done(self) -> Iterator[PendingGrammarRow]:
        """The rows whose matcher tasks are done, each once. Ended requests are forgotten."""
        rows, self._rows = self._rows, []
        for late in rows:
            request = late.row.request
            if request.phase is Phase.ENDED:
                self.executor.cancel(late.task)
            elif late.task.done:
                request.late = False
                yield late
            else:
                self._rows.append(late)

    @property
    def next_due(self) -> float | None:
        """When the next row has waited too long; None if `overdue` has seen none yet."""
        since = (late.since for late in self._rows if late.since is not None)
        first = min(since, default=None)
        return None if first is None else first + self._timeout_s

    def overdue(self, now: float) -> Iterator[tuple[Request, Overloaded]]:
        for late in self._rows:
            late.since = now if late.since is None else late.since
            if now - late.since > self._timeout_s:
                message = f"grammar: matching a token takes longer than {self._timeout_s:g} s"
                yield late.row.request, Overloaded(message, retry_after_s=_RETRY_AFTER_S)


class OutcomeProcessor:
    """Writes outcomes to requests: tokens, pages, cached prefixes, and the finish.

    `report` reports the new tokens of a request, once they fill a stream interval. `end` ends one
    with its own finish or the given one, and frees what it holds. `fail` ends one whose commit
    failed, and may be half done.
    """

    def __init__(
        self,
        batch: RunningBatch,
        pending: PendingGrammarRows,
        *,
        report: Callable[[Request], None],
        end: Callable[[Request, Finish | None], None],
        fail: Callable[[Request, Exception], None],
    ) -> None:
        self._batch = batch
        self._pending = pending
        self._report = report
        self._end = end
        self._fail = fail

    def commit(self, rows: Sequence[BatchRow], outcome: StepOutcome) -> None:
        starts, status = outcome.starts.tolist(), outcome.status.tolist()
        token_ids = outcome.token_ids.tolist()
        sampled = [token_ids[start:end] for start, end in pairwise(starts)]
        tasks = (
            self._advance_matchers(rows, sampled)
            if self._batch.slots.logits_processors.has_grammar
            else _NO_TASKS
        )
        for index, row in enumerate(rows):
            if not row.current:
                continue
            try:
                if status[index]:
                    self._end(row.request, Finish.failed(_failure(status[index])))
                    continue
                task = tasks.get(index)
                if task is None:
                    self._commit_row(row, outcome, index, sampled[index])
                elif task.done:
                    self._commit_row(row, outcome, index, sampled[index], task.result())
                else:
                    self._defer_row(PendingGrammarRow(row, outcome, index, task))
            except Exception as error:  # noqa: BLE001  # logged there
                self._fail(row.request, error)

    def commit_pending(self) -> None:
        """Commit the rows whose grammar matchers have finished, as if their step had just ended."""
        for late in self._pending.take_done():
            request = late.row.request
            try:
                if late.row.current:
                    task = late.task
                    self._commit_row(late.row, late.outcome, late.index, task.tokens, task.result())
                elif request.guide is not None:  # retracted: it samples them again
                    request.guide.rollback()
            except Exception as error:  # noqa: BLE001  # logged there
                self._fail(request, error)

    def _advance_matchers(
        self, rows: Sequence[BatchRow], sampled: Sequence[list[int]]
    ) -> dict[int, MatcherTask]:
        tasks = {
            index: MatcherTask(row.request.guide, sampled[index])
            for index, row in enumerate(rows)
            if row.request.guide is not None and sampled[index] and row.current
        }
        self._pending.executor.submit(list(tasks.values()))
        return tasks

    def _defer_row(self, late: PendingGrammarRow) -> None:
        self._pending.put(late)
        request, table = late.row.request, late.row.request.table
        assert table is not None, "a running request has no pages"
        table.commit(late.row.end)
        request.computed = late.row.end
        if request.prefilling:  # its prefix is computed, whatever its grammar does
            self._batch.cache_prefix(request)
            self._batch.prefix_sharing.unregister(request)

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
            self._batch.slots.length[request.slot] = request.length
        if outcome.details is not None or outcome.vectors is not None:
            kept = request.length - length
            write_outputs(request, outcome, index, accepted=len(accepted), kept=kept)
        self._finish_row(request, sampled=bool(accepted))

    def _resume_at(self, row: BatchRow) -> int:
        """The computed length of a row that should have sampled and did not: it is run again.

        From its last token on; with recurrent states from its first, as none is stored between.
        """
        return row.start if self._batch.pools.states else row.end - 1

    def _finish_row(self, request: Request, *, sampled: bool) -> None:
        """Finish, cache or report the request after its tokens were committed."""
        batch = self._batch
        if request.scores and request.computed == request.length:
            request.finish = Finish.at_length()
        if request.finish is not None:
            batch.cache_prefix(request)
            self._end(request, None)
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
        self._report(request)


_NO_TASKS: Mapping[int, MatcherTask] = {}


def _failure(status: int) -> EngineError:
    if status == RowStatus.NO_TOKEN:
        return InvalidRequest("the request's constraints allow no next token")
    return Internal("the model produced no finite number")
