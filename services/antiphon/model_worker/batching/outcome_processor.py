"""What a step does to the requests of its rows, once it is known what they drew."""

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
    """Writes outcomes to requests: tokens, pages, what others find of them, and their end."""

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
            batch: Of the running requests.
            late: Rows whose guides have not arrived yet.
            report: Reports what is new of a request, if that is worth a word yet.
            end: Frees a request, which ends by itself or with this.
            fail: Ends a request whose commit failed, and may be half done.
        """
        self._batch = batch
        self._late = late
        self._report = report
        self._end = end
        self._fail = fail

    def commit(self, rows: Sequence[BatchRow], outcome: StepOutcome) -> None:
        """Apply what a plan produced. Rows whose requests went other ways are passed over."""
        starts, status = outcome.starts.tolist(), outcome.status.tolist()
        token_ids = outcome.token_ids.tolist()
        drawn = [token_ids[start:end] for start, end in pairwise(starts)]
        tasks = (
            self._advance_matchers(rows, drawn)
            if self._batch.slots.logits_processors.has_grammar
            else _NO_WALKS
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
                    self._commit_row(row, drawn[index], outputs)
                elif task.done:
                    self._commit_row(row, drawn[index], outputs, task.result())
                else:
                    self._defer_row(PendingGrammarRow(row, drawn[index], outputs, task))
            except Exception as error:  # noqa: BLE001  # logged there
                self._fail(row.request, error)

    def commit_pending(self) -> None:
        """Commit the rows whose guides have arrived, as if their step had just ended."""
        for late in self._late.take_done():
            try:
                if late.row.current:
                    self._commit_row(late.row, late.accepted, late.outputs, late.task.result())
                elif late.row.request.guide is not None:  # it was retracted, and draws them again
                    late.row.request.guide.rollback()
            except Exception as error:  # noqa: BLE001  # logged there
                self._fail(late.row.request, error)

    def _advance_matchers(
        self, rows: Sequence[BatchRow], drawn: Sequence[list[int]]
    ) -> dict[int, MatcherTask]:
        """Send guides over what their rows have drawn; which walk is a row's, by its index."""
        tasks = {
            index: MatcherTask(row.request.guide, drawn[index])
            for index, row in enumerate(rows)
            if row.request.guide is not None and drawn[index] and row.current
        }
        self._late.submit(list(tasks.values()))
        return tasks

    def _defer_row(self, late: PendingGrammarRow) -> None:
        self._late.put(late)
        request, table = late.row.request, late.row.request.table
        assert table is not None, "a running request has no pages"
        table.commit(late.row.end)
        request.computed = late.row.end
        if request.prefilling:  # whoever waits for its prompt need not wait for its grammar
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
        assert row.draws or not accepted, "a token was drawn in the middle of a prompt"
        length = request.length
        computed = row.end if accepted or not row.draws else self._again(row)
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
        self._finish_row(request, drew=bool(accepted))

    def _again(self, row: BatchRow) -> int:
        """Where a row that should have drawn and did not goes on: it draws when it is run again.

        From its last token on; with states from its first one, for none is kept between.
        """
        return row.start if self._batch.pools.states else row.end - 1

    def _finish_row(self, request: Request, *, drew: bool) -> None:
        """What a row changes beside the tokens: what others find, and what is told."""
        batch = self._batch
        if request.scores and request.computed == request.length:
            request.finish = Finish.at_length()
        if request.finish is not None:
            batch.cache_prefix(request)
            self._end(request, None)
            return
        if request.prefilling:
            batch.cache_prefix(request)
            if drew:
                request.prefilling = False
                batch.prefix_sharing.unregister(request)
        elif batch.pools.states and batch.checkpoint_due(request):
            batch.cache_prefix(request)
        elif batch.pools.windows:
            batch.slots.update(request)
        self._report(request)


_NO_WALKS: Mapping[int, MatcherTask] = {}
"""No guide is on its way."""


def _failure(status: int) -> EngineError:
    """What a row ends with that has drawn nothing, by its status."""
    if status == RowStatus.NO_TOKEN:
        return InvalidRequest("what the request allows leaves no token to go on with")
    return Internal("the model produced no finite number")


def _row_outputs(outcome: StepOutcome, row: int) -> LogprobsReader | PooledVector | None:
    """What an outcome tells of a row beside the tokens that it drew."""
    if outcome.vectors is not None:
        return PooledVector.of(outcome.vectors, row)
    return None if outcome.details is None else LogprobsReader.of(outcome.details, row)
