"""A worker of several ranks beside a faulty page store: what one rank misses, all do.

Each rank has pages, records and faults of its own, and answers rank 0 by the real protocol.
"""

from __future__ import annotations

import random
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

from tests.simulation.rank_world import RankWorld
from tests.simulation.stored_world import FaultyStore, StoredWorld
from tests.support.page_link import Pipe

from antiphon.model_worker.ranks.page_shards import (
    PagesRequest,
    ShardReport,
    WorkerShards,
    send_report,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from tests.simulation.rank_world import FollowerRunner

    from antiphon.model_worker.batching.plan import Ints, StepPlan

T = TypeVar("T")

FAILURES = 0.01


class StoredRankWorld(StoredWorld, RankWorld):
    """Rows of one plan must see the same tokens on all ranks, wherever these came from."""

    def __init__(self, seed: int, **said: Any) -> None:
        # By rank, what rows that are sampled from have seen, by step and row.
        self.contexts = defaultdict[int, dict[tuple[int, int], bytes]](dict)
        # Enough for all that are begun: a turn waits until its transfer has sent its request.
        self._threads_of_transfers = ThreadPoolExecutor(256)
        self._sent = Event()
        super().__init__(seed, **said)

    def begin(self, work: Callable[[], T]) -> tuple[Future[T], Callable[[], bool]]:
        """In a thread. Ranks begin after the steps in flight, which a turn must not wait for."""
        self._sent = Event()
        result = self._threads_of_transfers.submit(work)
        result.add_done_callback(lambda _, sent=self._sent: sent.set())
        self._sent.wait()
        launched = list(self.loop._flights)
        return result, lambda: not any(flight in launched for flight in self.loop._flights)

    def _send(self, request: PagesRequest) -> None:
        self.lead.request_pages(request)
        self._sent.set()

    def _store(self) -> FaultyStore:
        layout = self.network.layout
        others = [layout.shard(rank) for rank in range(1, layout.ranks)]
        self.pipes = [Pipe() for _ in others]
        shard = self.page_shard(self.runner, layout, 0)
        shards = WorkerShards(shard, others, self.pipes, self._send)
        return FaultyStore(shards, self.node, self)

    def begin_pages(self, rank: int, runner: FollowerRunner) -> Callable[[PagesRequest], None]:
        failing = random.Random(f"pages {self.seed} {rank}")
        answering = None

        def begin(request: PagesRequest) -> None:
            nonlocal answering
            if answering is None:  # the node is there once rank 0 sends requests
                answering = self.page_shard(runner, self.network.layout, rank)
            if failing.random() < FAILURES:
                report = ShardReport(number=request.transfer.number, records=None)
            else:
                report = answering.answer(rank, request)
            send_report(self.pipes[rank - 1], report)

        return begin

    @contextmanager
    def ranks_end(self) -> Iterator[None]:
        try:
            with super().ranks_end():
                yield
        finally:
            for pipe in self.pipes:
                pipe.end()
            self._threads_of_transfers.shutdown()

    def _run(self, rank: int, work: Callable[[Any], None], runner: FollowerRunner) -> None:
        super()._run(rank, work, runner)
        self.pipes[rank - 1].end()

    def check_ranks(self) -> None:
        assert not self.errors
        for contexts in self.contexts.values():
            for row, seen in self.contexts[0].items():  # without those that are not finite
                assert contexts[row] == seen, "rows of one plan see different tokens"

    def read(self, rank: int, plan: StepPlan, row: int, contexts: Sequence[Ints]) -> None:
        digest = blake2b(digest_size=8)
        for context in contexts:
            digest.update(context.astype("<i4").tobytes())
        self.contexts[rank][plan.step, row] = digest.digest()
