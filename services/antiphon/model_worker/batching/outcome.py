"""Commits the outcomes of steps: tokens, pages, cached prefixes, finishes, and what is reported."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.logprobs import write_outputs
from antiphon.model_worker.batching.plan import RowStatus
from antiphon.model_worker.batching.state import Finish, Progress, SampledTokens
from antiphon.model_worker.grammar.executor import MatcherTask, PendingGrammarRow
from antiphon.wire.base import FinishReason
from antiphon.wire.errors import EngineError, Internal, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from antiphon.model_worker.batching.plan import Flags, Floats, Indices, Ints, Longs, StepOutcome
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.rows import SlotSet, StepRows
    from antiphon.model_worker.batching.running_batch import RunningBatch
    from antiphon.model_worker.batching.state import AnyProgress, ChoiceKey
    from antiphon.model_worker.grammar.executor import PendingGrammarRows
    from antiphon.model_worker.speculation.policy import Speculation


class ProgressLog:
    """What happened to each choice since the last report.

    `interval` is the minimum number of output tokens to report; the first ones and the last ones
    are reported at once.
    """

    def __init__(self, batch: RunningBatch, weights: str, interval: int) -> None:
        self.weights = weights  # name of those that sample the tokens
        self.interval = interval
        self._batch = batch
        self._progress: list[AnyProgress] = []

    def refuse(self, key: ChoiceKey, finish: Finish) -> None:
        """Report a choice that ended before it had any outputs here, or whose state is broken."""
        self._progress.append(Progress(key=key, finish=finish))

    def report(self, request: Request) -> None:
        """Report what is new of one request, if that is enough or the last."""
        new = request.outputs_count - request.reported
        if request.finish is not None or new >= self.interval or (new and not request.reported):
            self.report_all(request)

    def report_all(self, request: Request) -> None:
        """Report what is new of one request, however little."""
        if request.finish is None and request.outputs_count == request.reported:
            return
        self._progress.append(request.progress(self.weights))
        if request.batch is not None:
            self._batch.rowwise[request.slot] = self._batch.logprobs.rowwise[request.slot]

    def add_sampled(
        self, slots: SlotSet, outputs: Longs, ids: Ints, logprobs: Floats | None
    ) -> None:
        """Report the token that each of these has sampled after so many outputs, all (R,)."""
        batch = self._batch
        batch.reported[slots.at] = outputs + 1
        sampled = SampledTokens(
            slots=slots.slots,
            keys=batch.keys[slots.at].copy(),
            offsets=outputs.astype(np.int32),
            ids=ids,
            logprobs=logprobs,
        )
        self._progress.append(sampled)

    def take(self) -> Sequence[AnyProgress]:
        """All since the last call, in its order."""
        progress, self._progress = self._progress, []
        return progress


@dataclass(kw_only=True)
class OutcomeProcessor:
    """Writes outcomes to the running batch.

    `end` ends a request with its own finish or the given one, reports that, and frees what it
    holds. `fail` ends one whose commit failed, and may be half done.
    """

    batch: RunningBatch
    pending: PendingGrammarRows
    log: ProgressLog
    end: Callable[[Request, Finish | None], None]
    fail: Callable[[Request, Exception], None]
    speculation: Speculation | None = None

    def commit(self, rows: StepRows, outcome: StepOutcome) -> None:
        """Commit the rows that are still current."""
        rows = self.batch.resolved(rows)
        current, sound = self.batch.is_current(rows), outcome.computed > 0
        index = (current & sound).nonzero()[0]
        if len(index) < len(rows):
            self._end_failed(rows, outcome, (current & ~sound).nonzero()[0])
            rows = rows.take(index)
        plain = rows.decodes == len(index)  # of one token each
        ends = rows.ends if plain else rows.starts + outcome.computed[index]
        self.batch.commit_computed(rows, ends)
        if not plain and np.count_nonzero(rows.draws) < len(rows):
            for row in (~rows.draws).nonzero()[0].tolist():
                with self._alone(rows.slots, row) as request:
                    self._commit_chunk(request, outcome, index.item(row))
            which = rows.draws.nonzero()[0]
            rows, index = rows.take(which), index[which]
        if self.speculation is not None:  # before any of them waits for its grammar
            for row in range(rows.decodes, rows.verified):
                slot, drafts = rows.slots.slots.item(row), rows.drafts[row - rows.decodes]
                right = outcome.computed.item(index.item(row)) - 1
                self.speculation.verified(slot, len(drafts), right)
        finishes: dict[int, Sequence[Finish | None]] = {}
        if self.batch.grammars and np.count_nonzero(self.batch.has_grammar[rows.slots.at]):
            rows, index, finishes = self._advance_matchers(rows, index, outcome)
        if rows.drafts:
            for row in range(rows.decodes, rows.verified):
                with self._alone(rows.slots, row) as request:
                    drafts, place = len(rows.drafts[row - rows.decodes]), index.item(row)
                    self.batch.commit_accepted(request, 1 + drafts, outcome.computed.item(place))
                    self._accept_several(request, outcome, place, finishes.get(row, ()))
            others = np.delete(np.arange(len(rows)), slice(rows.decodes, rows.verified))
            finishes = _of(finishes, others)
            rows, index = rows.take(others), index[others]
        if len(index):
            self._accept(rows.slots, outcome, index, finishes)

    def commit_pending(self) -> None:
        """Commit the rows whose grammar matchers have finished, as if their step had just ended."""
        for late in self.pending.take_done():
            request = late.request
            try:
                if request.running and late.generation == self._generation(request):
                    finishes = late.task.result()
                    self.batch.commit_accepted(request, 1, 1)
                    self._accept_several(request, late.outcome, late.index, finishes)
                elif request.matcher is not None:  # retracted: it samples them again
                    request.matcher.rollback()
            except Exception as error:  # noqa: BLE001  # logged there
                self.fail(request, error)

    def _generation(self, request: Request) -> int:
        return self.batch.generation.item(request.slot)

    @contextmanager
    def _alone(self, slots: SlotSet, row: int) -> Generator[Request]:
        """The request of a row. If what is done for it fails, it ends alone."""
        request = self.batch.running[slots.slots.item(row)]
        try:
            yield request
        except Exception as error:  # noqa: BLE001  # logged there
            self.fail(request, error)

    def _end_failed(self, rows: StepRows, outcome: StepOutcome, failed: Indices) -> None:
        for row in failed.tolist():
            with self._alone(rows.slots, row) as request:
                self.end(request, Finish.failed(_failure(outcome.status.item(row))))

    def _commit_chunk(self, request: Request, outcome: StepOutcome, index: int) -> None:
        """Commit a row that samples nothing: of a prompt that goes on, is scored, or is pooled."""
        write_outputs(request, outcome, index, accepted=0, kept=0)
        if request.scores and request.computed == request.length:
            request.finish = Finish.at_length()
        self._finish_or_report(request)

    def _advance_matchers(
        self, rows: StepRows, index: Indices, outcome: StepOutcome
    ) -> tuple[StepRows, Indices, dict[int, Sequence[Finish | None]]]:
        """Let grammar matchers accept the tokens; the rows that need not wait for them.

        Also returns the finish that each token of these rows brings by the grammar.
        """
        tasks: dict[int, MatcherTask] = {}
        for row in self.batch.has_grammar[rows.slots.at].nonzero()[0].tolist():
            matcher = self.batch.running[rows.slots.slots.item(row)].matcher
            assert matcher is not None, "a grammar without a matcher"
            tasks[row] = MatcherTask(matcher, _tokens(outcome, index.item(row)).tolist())
        self.pending.executor.submit(list(tasks.values()))
        ready = np.ones(len(rows), np.bool_)
        finishes: dict[int, Sequence[Finish | None]] = {}
        for row, task in tasks.items():
            ready[row] = task.done
            with self._alone(rows.slots, row) as request:
                if task.done:
                    ready[row] = False  # unless it has a result
                    finishes[row] = task.result()
                    ready[row] = True
                else:
                    self._defer(request, outcome, index.item(row), task)
        if ready.all():
            return rows, index, finishes
        kept = np.flatnonzero(ready)
        return rows.take(kept), index[kept], _of(finishes, kept)

    def _defer(self, request: Request, outcome: StepOutcome, index: int, task: MatcherTask) -> None:
        self.batch.defer(request)
        generation = self._generation(request)
        self.pending.put(PendingGrammarRow(request, generation, outcome, index, task))
        if request.prefilling:  # its prefix is computed, whatever its grammar does
            self.batch.cache_prefix(request)
            self.batch.prefixes.unregister(request)

    def _accept(
        self,
        slots: SlotSet,
        outcome: StepOutcome,
        index: Indices,
        finishes: Mapping[int, Sequence[Finish | None]],
    ) -> None:
        """Append the token that each row sampled, unless it ends the output; finish, report.

        index (R,) rows of the outcome; finishes by grammar, of those that have one
        """
        batch = self.batch
        tokens = _one_token_each(outcome, index)
        outputs = batch.length[slots.at] - batch.prompt[slots.at]
        ends = batch.are_ends(slots, tokens)
        if finishes:
            ends[[row for row, brought in finishes.items() if brought[0] is not None]] = True
        logprobs = None
        if outcome.details is not None:
            logprobs = batch.logprobs.sampled(slots, outcome.details, index)
        if len(ends.nonzero()[0]):
            kept = ~ends
            some = None if logprobs is None else logprobs[kept]
            batch.append(slots.take(kept), outputs[kept], tokens[kept], some)
        else:
            batch.append(slots, outputs, tokens, logprobs)
        batch.in_flight_tokens[slots.at] -= 1
        full = batch.length[slots.at] >= batch.tokens_max[slots.at]
        singly = ends | full | batch.rowwise[slots.at]
        if self.log.interval > 1:
            singly[:] = True
        alone = singly.nonzero()[0]
        if batch.prefixes.checkpoints is None and not len(alone):
            self.log.add_sampled(slots, outputs, tokens, logprobs)
            return
        together = ~singly
        if batch.prefixes.checkpoints is not None:
            together = self._cache_checkpoints(slots, together, batch.prefixes.checkpoints.every)
        for row in alone.tolist():
            finish = finishes.get(row, _NO_FINISH)[0]
            if ends[row]:
                token = tokens.item(row)
                finish = finish or Finish(reason=FinishReason.STOP, matched_stop=token)
            elif full[row]:
                finish = Finish.at_length()
            with self._alone(slots, row) as request:
                place, kept = index.item(row), int(not ends[row])
                self._finish_row(request, outcome, place, finish, accepted=1, kept=kept)
        count = np.count_nonzero(together)
        if count == len(slots):
            self.log.add_sampled(slots, outputs, tokens, logprobs)
        elif count:
            some = None if logprobs is None else logprobs[together]
            at = slots.take(together)
            self.log.add_sampled(at, outputs[together], tokens[together], some)

    def _cache_checkpoints(self, slots: SlotSet, rows: Flags, every: int) -> Flags:
        """Cache the states that are due of these rows (R,); those that are left if some fail."""
        due = rows & (self.batch.computed[slots.at] % every == 0)
        if not np.count_nonzero(due):
            return rows
        for row in due.nonzero()[0].tolist():
            with self._alone(slots, row) as request:
                self.batch.cache_prefix(request)
        return rows & (self.batch.length[slots.at] > 0)

    def _accept_several(
        self,
        request: Request,
        outcome: StepOutcome,
        index: int,
        finishes: Sequence[Finish | None],
    ) -> None:
        """Append the tokens that a row accepted, up to one that ends the output."""
        batch, tokens = self.batch, _tokens(outcome, index)
        length, finish, kept = request.length, None, 0
        for token, brought in zip_longest(tokens.tolist(), finishes):
            finish = brought
            if finish is None and token in request.end_ids:
                finish = Finish(reason=FinishReason.STOP, matched_stop=token)
            if finish is not None:
                break
            kept += 1
            if length + kept == request.tokens_max:
                finish = Finish.at_length()
                break
        logprobs = batch.logprobs.accepted(request, outcome, index, len(tokens))
        batch.extend(request, tokens[:kept], None if logprobs is None else logprobs[:kept])
        self._finish_row(request, outcome, index, finish, accepted=len(tokens), kept=kept)

    def _finish_row(
        self,
        request: Request,
        outcome: StepOutcome,
        index: int,
        finish: Finish | None,
        *,
        accepted: int,
        kept: int,
    ) -> None:
        """Finish, cache or report one request, after `kept` of `accepted` tokens were appended."""
        kept = kept if self.batch.logprobs.rowwise[request.slot] else 0
        write_outputs(request, outcome, index, accepted=accepted, kept=kept)
        request.finish = finish
        self._finish_or_report(request, sampled=True)

    def _finish_or_report(self, request: Request, *, sampled: bool = False) -> None:
        batch = self.batch
        if request.finish is not None:
            batch.cache_prefix(request)
            self.end(request, None)
            return
        if request.prefilling:
            batch.cache_prefix(request)
            if sampled:
                batch.prefilling[request.slot] = False
                batch.media.release(request)
                batch.prefixes.unregister(request)
        elif (points := batch.prefixes.checkpoints) is not None and points.due(request.computed):
            batch.cache_prefix(request)
        self.log.report(request)


_NO_FINISH: Sequence[Finish | None] = (None,)


def _of(
    finishes: Mapping[int, Sequence[Finish | None]], rows: Indices
) -> dict[int, Sequence[Finish | None]]:
    """The finishes of some of the rows, by their new index."""
    return {new: finishes[old] for new, old in enumerate(rows.tolist()) if old in finishes}


def _one_token_each(outcome: StepOutcome, rows: Indices) -> Ints:
    """(R,) the token that each of these rows has sampled."""
    if len(rows) == len(outcome.status) == len(outcome.token_ids):
        return outcome.token_ids
    starts = outcome.starts
    assert (starts[1:] > starts[:-1])[rows].all(), "tokens are missing, or of no row's"
    return outcome.token_ids[starts[rows]]


def _tokens(outcome: StepOutcome, row: int) -> Ints:
    """The tokens that a row accepted."""
    return outcome.token_ids[outcome.starts[row] : outcome.starts[row + 1]]


def _failure(status: int) -> EngineError:
    if status == RowStatus.NO_TOKEN:
        return InvalidRequest("the request's constraints allow no next token")
    return Internal("the model produced no finite number")
