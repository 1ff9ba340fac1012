"""A small batching, and a way to run its steps without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tests.support.reports import ProgressReader
from tests.support.worker import limits, page_group, state

from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.plan import StepOutcome
from antiphon.model_worker.batching.state import ChoiceKey
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.cache.tree import CacheKey
from antiphon.wire.codec import pack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.namespaces import cache_namespace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.rows import StepRows
    from antiphon.model_worker.batching.state import Progress
    from antiphon.model_worker.batching.waiting_queue import QueueRules
    from antiphon.model_worker.speculation.policy import Speculation

LIMITS = limits()
PAGE_TOKENS = 4


def pools(pages: int = 10, window: int | None = None, states: int = 0) -> CachePools:
    groups = [page_group(pages)]
    if window:
        groups.append(page_group(pages, GroupKind.WINDOW, window))
    if states:
        groups.append(page_group(states, GroupKind.STATE))
    return CachePools(groups)


class Steps:
    """A batching whose clock advances by a second a step."""

    def __init__(
        self,
        pages: int = 10,
        *,
        cached: bool = False,
        window: int | None = None,
        states: int = 0,
        rules: QueueRules | None = None,
        speculation: Speculation | None = None,
        **changes: Any,
    ) -> None:
        self.now = 0.0
        self.pools = pools(pages, window, states)
        self.batching = EngineCore(
            limits(**changes),
            self.pools,
            RadixIndex(self.pools) if cached else None,
            rules,
            speculation=speculation,
        )
        self._step = 0
        self._reader = ProgressReader()

    def add(self, key: int, prompt: int | Sequence[int] = 3, **said: Any) -> None:
        named = {"request_id": RequestId(f"r{key}")} | said
        self.batching.add(ChoiceKey(key), state(prompt, **named), self.now)

    def drop(self, key: int, kept: int | None = None) -> None:
        self.batching.drop(ChoiceKey(key), kept)

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """How much of a prompt the next one would find."""
        namespace = cache_namespace(self.batching.batch.prefixes.origin)
        key = CacheKey(namespace=namespace, token_ids=pack_ids(prompt))
        return self.batching.index.peek(key).length

    def hits(self, prompt: Sequence[int]) -> int:
        """How often requests have used what begins with these tokens."""
        index, beginning = self.batching.index, pack_ids(prompt)
        assert isinstance(index, RadixIndex)
        return sum(n.hits for n in index._tree.nodes() if n.tokens.startswith(beginning))

    def next(self) -> StepRows:
        self.now += 1.0
        return self.batching.next_rows(self.now)

    def commit(self, rows: StepRows, *tokens: list[int]) -> tuple[Progress, ...]:
        """Row i accepts `tokens[i]`."""
        assert len(rows) == len(tokens)
        self._step += 1
        self.batching.commit(rows, outcome(self._step, tokens, rows))
        return self.progress()

    def run(self, *tokens: list[int]) -> tuple[Progress, ...]:
        return self.commit(self.next(), *tokens)

    def go(self, token: int = 1) -> list[tuple[int, int]]:
        """One step in which all that draw draw this; the key and length of each row."""
        rows = self.next()
        planned = self.lengths(rows)
        self._step += 1
        self.batching.launched(self._step)
        self.pools.finished(self._step)
        drawn = [[token] if draws else [] for draws in rows.draws.tolist()]
        self.batching.commit(rows, outcome(self._step, drawn, rows))
        return planned

    def progress(self) -> tuple[Progress, ...]:
        """What happened since the last call, choice by choice."""
        return self._reader.read(self.batching.take_progress())

    def lengths(self, rows: StepRows) -> list[tuple[int, int]]:
        """The key and length of each row."""
        lengths = (rows.ends - rows.starts).tolist()
        requests = [self.batching.running[slot] for slot in rows.slots.slots.tolist()]
        return [(request.key, n) for request, n in zip(requests, lengths, strict=True)]

    def drain(self) -> None:
        while not self.batching.idle:
            self.go()

    def until_retraction(self) -> None:
        while not self.batching.planner.retractions:
            self.go()

    def running(self) -> list[int]:
        return [request.key for request in self.batching.running.values()]


def spans(rows: StepRows) -> list[tuple[int, int, bool]]:
    """The first token of each row, the one after its last, and whether one is sampled then."""
    return list(zip(rows.starts.tolist(), rows.ends.tolist(), rows.draws.tolist(), strict=True))


def outcome(step: int, tokens: Sequence[list[int]], rows: StepRows | None = None) -> StepOutcome:
    """Row i accepts `tokens[i]`, and is computed as far as these say, or to its end."""
    counts = [*map(len, tokens)]
    computed = np.ones(len(tokens), np.int32)
    if rows is not None:
        assert (np.minimum(counts, 1) == rows.draws).all(), "a row samples what it should"
        lengths = np.where(rows.logit_counts > 1, counts, rows.ends - rows.starts)
        computed = lengths.astype(np.int32)
    return StepOutcome(
        step=step,
        starts=np.cumsum([0, *counts], dtype=np.int32),
        token_ids=np.array([t for ids in tokens for t in ids], np.int32),
        status=np.zeros(len(tokens), np.int32),
        computed=computed,
    )
