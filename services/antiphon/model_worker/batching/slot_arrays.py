"""The numbers of running requests, as arrays by slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from antiphon.model_worker.batching.plan import Flags, Longs


class SlotArrays:
    """Arrays with an entry for each slot, and the free slots. Axis S: slots.

    Attributes:
        keys: (S,) key of the choice.
        length: (S,) known tokens, prompt and outputs; 0 in a free slot.
        computed: (S,) tokens whose keys and values are in the KV cache.
        scheduled_len: (S,) where the launched rows end, at most.
        in_flight_tokens: (S,) tokens that launched rows sample, at most.
        slack: (S,) drafts in flight: by so many both may be too large.
        drafted: (S,) drafts that the last launched row asks the runner for.
        base_len: (S,) where the first row begins since the start, or since rows became stale.
        generation: (S,) grows when launched rows become stale.
        prompt: (S,) prompt tokens.
        tokens_max: (S,) maximum length.
        exact: (S,) whether that will surely be reached.
        prefilling: (S,) whether no token was sampled since the start.
        stepwise: (S,) whether the allowed tokens depend on the token before.
        blocked: (S,) whether nothing can be launched before the tokens in flight are known: drafts
            are among them, or a grammar matcher has not accepted the last one yet.
        has_grammar: (S,)
        last_token: (S,) the last known token.
        position_offset: (S,) of tokens behind the images of the prompt: see `positions`.
        reported: (S,) output tokens that were reported.
        rowwise: (S,) whether the next tokens are reported as `Progress`.
        covered: (S,) tokens that have pages.
        entries: (S,) entries of the page table, by group.
        pages_held: (S,) pages, by group: as many, except for the holes of a window.
        free: Free slots, a heap, so that low ones are used first.
    """

    def __init__(self, slots: int, groups: int) -> None:
        self.keys, self.length, self.computed, self.scheduled_len = _longs(4, slots)
        self.in_flight_tokens, self.base_len, self.generation, self.reported = _longs(4, slots)
        self.prompt, self.tokens_max, self.covered = _longs(3, slots)
        self.slack, self.drafted = _longs(2, slots)
        self.last_token, self.position_offset = (np.zeros(slots, np.int32) for _ in range(2))
        self.exact, self.prefilling, self.stepwise = _flags(3, slots)
        self.has_grammar, self.rowwise, self.blocked = _flags(3, slots)
        self.entries, self.pages_held = _longs(groups, slots), _longs(groups, slots)
        self.free = list(range(slots))

    @property
    def free_count(self) -> int:
        """Number of free slots."""
        return len(self.free)


def _longs(count: int, slots: int) -> list[Longs]:
    return [np.zeros(slots, np.int64) for _ in range(count)]


def _flags(count: int, slots: int) -> list[Flags]:
    return [np.zeros(slots, np.bool_) for _ in range(count)]
