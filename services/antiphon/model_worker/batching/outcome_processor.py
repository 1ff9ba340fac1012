"""Applies the outcome of a step to the requests of its rows."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from antiphon.model_worker.batching.logprobs import LogprobsReader
from antiphon.model_worker.batching.pending_grammar import PendingGrammarRow
from antiphon.model_worker.batching.plan import RowStatus
from antiphon.model_worker.batching.pooling import PooledVector
from antiphon.model_worker.batching.request import Finish
from antiphon.model_worker.grammar.executor import MatcherTask
from antiphon.wire.errors import Internal, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from antiphon.model_worker.batching.builder import BatchRow
    from antiphon.model_worker.batching.pending_grammar import PendingGrammarRows
    from antiphon.model_worker.batching.plan import StepOutcome
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.running_batch import RunningBatch
    from antiphon.wire.errors import EngineError


class OutcomeProcessor:
    """Writes outcomes to requests: tokens, pages, cached prefixes, and the finish."""

    def __init__(
        self,
        batch: RunningBatch,
        late: PendingGrammarRows,
        *,
        report: Callable[[Request], None],
        end: Callable[[Request, Finish | None], None],
        fail: Callable[[Request, Exception], None],
    ) -> None:
        """Make it.

        Args:
            batch: The running requests.
            late: Rows whose grammar matchers have not finished.
            report: Reports the new tokens of a request, once they fill a stream interval.
            end: Ends a request with its own finish or the given one, and frees what it holds.
            fail: Ends a request whose commit failed, and may be half done.
        """
        self._batch = batch
        self._late = late
        self._report = report
        self._end = end
        self._fail = fail

    def commit(self, rows: Sequence[BatchRow], outcome: StepOutcome) -> None:
        """Apply the outcome of a plan. Rows that are no longer current are skipped."""
        starts, status = outcome.starts.tolist(), outcome.status.tolist()
        token_ids = outcome.token_ids.tolist()
        sampled = [token_ids[start:end] for start, end in pairwise(starts)]
        tasks = (
            self._advance_matchers(rows, sampled)
            if self._batch.slots.logits_processors.has_grammar
            else _NO_TASKS
        )
        has_outputs = outcome.details is not None or outcome.vectors is not None
        for index, row in enumerate(rows):
            if not row.current:
                continue
            try:
                if status[index]:
                    self._end(row.request, Finish.failed(_failure(status[index])))
                    continue
                outputs = _row_outputs(outcome, index) if has_outputs else None
                task = tasks.get(index)
                if task is None:
                    self._commit_row(row, sampled[index], outputs)
                elif task.done:
                    self._commit_row(row, sampled[index], outputs, task.result())
                else:
                    self._defer_row(PendingGrammarRow(row, sampled[index], outputs, task))
            except Exception as error:  # noqa: BLE001  # logged there
                self._fail(row.request, error)

    def commit_pending(self) -> None:
        """Commit the rows whose grammar matchers have finished, as if their step had just ended."""
        for late in self._late.take_done():
            try:
                if late.row.current:
                    self._commit_row(late.row, late.accepted, late.outputs, late.task.result())
                elif late.row.request.guide is not None:  # retracted: it samples them again
                    late.row.request.guide.rollback()
            except Exception as error:  # noqa: BLE001  # logged there
                self._fail(late.row.request, error)

    def _advance_matchers(
        self, rows: Sequence[BatchRow], sampled: Sequence[list[int]]
    ) -> dict[int, MatcherTask]:
        """Submit the matcher tasks of the sampled tokens; the tasks by the index of the row."""
        tasks = {
            index: MatcherTask(row.request.guide, sampled[index])
            for index, row in enumerate(rows)
            if row.request.guide is not None and sampled[index] and row.current
        }
        self._late.submit(list(tasks.values()))
        return tasks

    def _defer_row(self, late: PendingGrammarRow) -> None:
        self._late.put(late)
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
        accepted: list[int],
        outputs: LogprobsReader | PooledVector | None,
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
        if outputs is not None:
            outputs.write_to(request, accepted=len(accepted), kept=request.length - length)
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
        elif batch.pools.states and batch.checkpoint_due(request):
            batch.cache_prefix(request)
        elif batch.pools.windows:
            batch.slots.update(request)
        self._report(request)


_NO_TASKS: Mapping[int, MatcherTask] = {}


def _failure(status: int) -> EngineError:
    """The error of a row that sampled no token, by its status."""
    if status == RowStatus.NO_TOKEN:
        return InvalidRequest("the request's constraints allow no next token")
    return Internal("the model produced no finite number")


def _row_outputs(outcome: StepOutcome, row: int) -> LogprobsReader | PooledVector | None:
    """Logprobs, hidden states or the pooled vector of a row."""
    if outcome.vectors is not None:
        return PooledVector.of(outcome.vectors, row)
    return None if outcome.details is None else LogprobsReader.of(outcome.details, row)
