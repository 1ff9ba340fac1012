"""The requests of one worker, and the choice of what runs in the next step."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.batching.admission import (
    check,
    find_pages,
    headroom,
    outputs_max,
)
from antiphon.model_worker.batching.builder import Row
from antiphon.model_worker.batching.decode import grow
from antiphon.model_worker.batching.plan import RowStatus
from antiphon.model_worker.batching.queue import WaitingQueue
from antiphon.model_worker.batching.request import (
    WIRE_IDS,
    ChoiceKey,
    Finish,
    Phase,
    Progress,
    Request,
    RequestState,
)
from antiphon.model_worker.cache.index import CacheKey, NoIndex, PrefixIndex
from antiphon.model_worker.cache.table import PageTable
from antiphon.wire.errors import EngineError, Internal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.admission import Limits
    from antiphon.model_worker.batching.plan import Ints, Outcome
    from antiphon.model_worker.cache.table import CachePools


class Batching:
    """Waiting and running requests, their slots and pages.

    Called from one thread only: `add` and `drop` between steps, then `next_rows`, then `commit` or
    `fail` with what became of them. Knows no clock: deadlines are kept by whoever calls `drop`.
    """

    def __init__(self, limits: Limits, pools: CachePools, index: PrefixIndex | None = None) -> None:
        assert limits.context_tokens <= pools.tokens_max, "the longest request would never fit"
        self.limits = limits
        self.pools = pools
        self.index: PrefixIndex = index or NoIndex()
        self.running: dict[int, Request] = {}  # by slot
        self.waiting = WaitingQueue()
        self.retractions = 0
        self._requests: dict[ChoiceKey, Request] = {}
        self._slots = list(range(limits.running_max))  # a heap, so that low slots are used first
        self._arrivals = 0
        self._progress: list[Progress] = []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run."""
        return not self._requests

    def add(self, key: ChoiceKey, state: RequestState) -> None:
        """Take a choice in. One that can never run ends at once, with the reason."""
        try:
            check(state, self.limits)
        except EngineError as error:
            self._progress.append(Progress(key=key, finish=Finish.failed(error)))
            return
        request = Request(
            key,
            msgspec.structs.replace(state, weights_digest=self.limits.weights_digest),
            arrival=self._arrivals,
            outputs_max=outputs_max(state, self.limits),
        )
        self._arrivals += 1
        if (progress := request.progress()) is not None:
            self._progress.append(progress)
        if request.finish is None:
            self._requests[key] = request
            self.waiting.put(request)

    def drop(self, key: ChoiceKey) -> None:
        """Free what a choice holds and say no more of it. An unknown key is no error."""
        request = self._requests.get(key)
        if request is not None:
            self._free(request)

    def next_rows(self) -> list[Row]:
        """Choose the work of the next step; nothing only if nothing is left to do.

        Who decodes goes first, then prompts that are begun, then those who wait: a long prompt
        slows the others down by one chunk a step, and never stops them.
        """
        grow(self.running, self.pools, self.index, self._retract)
        begun = sorted(self.running.values(), key=lambda r: (r.pending > 1, r.arrival))
        budget = self.limits.step_tokens_max
        rows: list[Row] = []
        for request in begun:
            budget -= self._plan_row(rows, request, budget)
        if len(self.waiting) and self._slots:
            self._admit(rows, begun, budget)
        assert rows or self.idle, "requests wait and nothing runs"
        return rows

    def commit(self, rows: Sequence[Row], outcome: Outcome) -> None:
        """Apply what a plan produced. Rows that were dropped meanwhile are passed over."""
        starts, status = outcome.starts.tolist(), outcome.status.tolist()
        for index, row in enumerate(rows):
            request = row.request
            if request.phase is not Phase.RUNNING:
                continue
            if status[index] == RowStatus.NON_FINITE:
                self._end(request, Finish.failed(Internal("the model produced no finite number")))
                continue
            self._commit_row(row, outcome.token_ids[starts[index] : starts[index + 1]])

    def fail(self, rows: Sequence[Row], error: EngineError) -> None:
        """End every request of a plan that could not be run."""
        for row in rows:
            if row.request.phase is Phase.RUNNING:
                self._end(row.request, Finish.failed(error))

    def take_progress(self) -> tuple[Progress, ...]:
        """What happened to each choice since the last call."""
        progress, self._progress = tuple(self._progress), []
        return progress

    def flush(self) -> int:
        """Forget every page that no request holds; return how many."""
        return self.index.clear()

    def _admit(self, rows: list[Row], begun: Sequence[Request], budget: int) -> None:
        kept = self._kept(begun)
        while budget and self._slots and (request := self.waiting.first()) is not None:
            table = self._admissible(request, kept)
            if table is None:
                return
            self._start(request, table)
            kept = _sum(kept, self._headroom(request, table))
            budget -= self._plan_row(rows, request, budget)

    def _kept(self, running: Sequence[Request]) -> list[int]:
        """Pages a group that are kept free for those who run already."""
        kept = [0] * len(self.pools.groups)
        for request in running:
            assert request.table is not None, "a running request has no pages"
            kept = _sum(kept, self._headroom(request, request.table))
        return kept

    def _headroom(self, request: Request, table: PageTable) -> list[int]:
        return headroom(request, table, self.limits.headroom_tokens)

    def _plan_row(self, rows: list[Row], request: Request, budget: int) -> int:
        length = min(request.pending, self.limits.chunk_tokens, budget)
        if length:
            rows.append(Row(request, request.computed, length))
        return length

    def _admissible(self, request: Request, kept: Sequence[int]) -> PageTable | None:
        """A table for a waiting request, if its pages and everybody's headroom are there."""
        match = self.index.match(self._cache_key(request, request.length))
        # The match holds its pages before we count what is free: counted first, they would pass
        # for evictable and admit a request that cannot run.
        table = match.table or PageTable(self.pools)
        needs = _sum(kept, self._headroom(request, table))
        if find_pages(needs, self.pools, self.index):
            return table
        table.release()
        return None

    def _start(self, request: Request, table: PageTable) -> None:
        table.allocate(request.length)
        self.waiting.remove(request)
        request.start(heapq.heappop(self._slots), table)
        self.running[request.slot] = request

    def _commit_row(self, row: Row, accepted: Ints) -> None:
        request, table = row.request, row.request.table
        assert table is not None, "a running request has no pages"
        assert row.draws or not len(accepted), "a token was drawn in the middle of a prompt"
        request.accept(accepted, self.limits.end_ids)
        # A row that should have drawn and did not computes its last token again, and draws then.
        retried = row.draws and not len(accepted)
        table.commit(row.end - 1 if retried else row.end)
        if request.finish is not None:
            self.index.insert(self._cache_key(request, table.committed), table)
            self._end(request)
        elif (progress := request.progress()) is not None:
            self._progress.append(progress)

    def _retract(self, request: Request) -> None:
        self._give_back(request)
        request.retract()
        self.waiting.put(request)
        self.retractions += 1

    def _end(self, request: Request, finish: Finish | None = None) -> None:
        request.finish = request.finish or finish
        progress = request.progress()
        assert progress is not None, "a request ended without an end"
        self._progress.append(progress)
        self._free(request)

    def _free(self, request: Request) -> None:
        if request.phase is Phase.RUNNING:
            self._give_back(request)
        else:
            self.waiting.remove(request)
        request.phase = Phase.ENDED
        del self._requests[request.key]

    def _give_back(self, request: Request) -> None:
        assert request.table is not None, "a running request has no pages"
        request.table.release()
        del self.running[request.slot]
        heapq.heappush(self._slots, request.slot)

    def _cache_key(self, request: Request, tokens: int) -> CacheKey:
        return CacheKey(
            namespace=self.limits.weights_digest,
            token_ids=request.ids[:tokens].astype(WIRE_IDS).tobytes(),
        )


def _sum(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]
