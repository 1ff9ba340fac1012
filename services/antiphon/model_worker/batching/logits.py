"""Logits processors of running requests: masks, biases and penalties, by slot.

They cost nothing in a step in which no request has any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.plan import Biases, Floats, Ints, Penalties
from antiphon.model_worker.batching.state import WIRE_IDS
from antiphon.model_worker.batching.token_masks import TokenFilter, words_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from antiphon.model_worker.batching.request import BatchRow, Request
    from antiphon.model_worker.grammar.matcher import GrammarMatcher
    from antiphon.wire.sampling import LogitBias

_VALUES = np.dtype("<f4")


class LogitsProcessors:
    """Penalties, grammars, token filters and biases of the requests that have slots."""

    def __init__(self, slots_max: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._penalised = np.zeros(slots_max, np.bool_)
        self._frequency = np.zeros(slots_max, np.float32)
        self._presence = np.zeros(slots_max, np.float32)
        self._repetition = np.ones(slots_max, np.float32)
        self._penalised_count = 0
        self._filters: dict[int, TokenFilter] = {}
        self._matchers: dict[int, GrammarMatcher] = {}
        self._biases: dict[int, tuple[Ints, Floats]] = {}

    def fill(self, request: Request) -> None:
        slot, sampling = request.slot, request.state.sampling
        if sampling.penalised:
            self._penalised[slot] = True
            self._frequency[slot] = sampling.frequency_penalty
            self._presence[slot] = sampling.presence_penalty
            self._repetition[slot] = sampling.repetition_penalty
            self._penalised_count += 1
        if sampling.processors:
            if request.filter is None:
                prompt_ids = request.ids[: request.prompt_tokens]
                request.filter = TokenFilter(sampling.processors, prompt_ids, self._vocab_size)
            self._filters[slot] = request.filter
        if request.guide is not None:
            self._matchers[slot] = request.guide
        if sampling.logit_bias is not None or sampling.min_new_tokens:
            self._biases[slot] = unpack_bias(sampling.logit_bias)

    def clear(self, slot: int) -> None:
        if self._penalised[slot]:
            self._penalised[slot] = False
            self._penalised_count -= 1
        self._filters.pop(slot, None)
        self._matchers.pop(slot, None)
        self._biases.pop(slot, None)

    @property
    def has_grammar(self) -> bool:
        return bool(self._matchers)

    @property
    def idle(self) -> bool:
        return not (self._penalised_count or self._filters or self._matchers or self._biases)

    def penalties(
        self, rows: Sequence[BatchRow], slots: Ints, draws: NDArray[np.bool_]
    ) -> Penalties | None:
        """The penalties of the rows that sample, and the counts that are reset by this plan.

        A count is reset with the first row since its request was given its slot, so that a plan
        built again from the same rows resets it again.
        """
        if not self._penalised_count:
            return None
        penalised = self._penalised[slots]
        sampling = np.flatnonzero(penalised & draws)
        begun = [
            row.request
            for row, counts in zip(rows, penalised.tolist(), strict=True)
            if counts and row.start == row.request.began
        ]
        if not len(sampling) and not begun:
            return None
        outputs = [request.ids[request.prompt_tokens : request.length] for request in begun]
        picked = slots[sampling]
        return Penalties(
            rows=sampling.astype(np.int32),
            frequency=self._frequency[picked],
            presence=self._presence[picked],
            repetition=self._repetition[picked],
            begun=np.array([request.slot for request in begun], np.int32),
            begun_starts=np.cumsum([0, *map(len, outputs)], dtype=np.int32),
            begun_ids=np.concatenate(outputs) if outputs else np.zeros(0, np.int32),
        )

    def masks(self, rows: Sequence[BatchRow]) -> tuple[Ints | None, Ints | None]:
        """The token masks of the rows whose tokens are restricted, and their row indices."""
        if not self._filters and not self._matchers:
            return None, None
        masked = [
            index
            for index, row in enumerate(rows)
            if row.draws and self._restricts(row.request.slot)
        ]
        if not masked:
            return None, None
        words = np.full((len(masked), words_count(self._vocab_size)), -1, np.int32)
        for mask, index in zip(words, masked, strict=True):
            request = rows[index].request
            matcher = request.guide
            if matcher is not None and matcher.mask is not None:
                np.bitwise_and(mask, matcher.mask, out=mask)
            if request.slot in self._filters:
                self._filters[request.slot].restrict(mask, request.ids[: request.length])
        return words, np.array(masked, np.int32)

    def biases(self, rows: Sequence[BatchRow]) -> Biases | None:
        """The logit biases of the rows; EOS ids are forbidden until `min_new_tokens`."""
        if not self._biases:
            return None
        parts = [
            (index, *self._bias(row))
            for index, row in enumerate(rows)
            if row.draws and row.request.slot in self._biases
        ]
        parts = [part for part in parts if len(part[1])]
        if not parts:
            return None
        return Biases(
            rows=np.concatenate([np.full(len(ids), row, np.int32) for row, ids, _ in parts]),
            token_ids=np.concatenate([ids for _, ids, _ in parts]),
            values=np.concatenate([values for _, _, values in parts]),
        )

    def _restricts(self, slot: int) -> bool:
        matcher = self._matchers.get(slot)
        return slot in self._filters or (matcher is not None and matcher.mask is not None)

    def _bias(self, row: BatchRow) -> tuple[Ints, Floats]:
        request = row.request
        ids, values = self._biases[request.slot]
        if row.end - request.prompt_tokens >= request.state.sampling.min_new_tokens:
            return ids, values
        matcher, eos_ids = request.guide, request.end_ids
        if matcher is not None:
            if matcher.must_end:
                return ids, values  # otherwise no token would be left
            eos_ids |= matcher.end_ids
        eos = np.array(sorted(eos_ids), np.int32)
        others = ~np.isin(ids, eos)
        return (
            np.concatenate([ids[others], eos]),
            np.concatenate([values[others], np.full(len(eos), -np.inf, np.float32)]),
        )


def unpack_bias(bias: LogitBias | None) -> tuple[Ints, Floats]:
    """The ids and values of a logit bias, both (B,)."""
    if bias is None:
        return np.zeros(0, np.int32), np.zeros(0, np.float32)
    ids = np.frombuffer(bias.token_ids, WIRE_IDS).astype(np.int32, copy=False)
    return ids, np.frombuffer(bias.values, _VALUES).astype(np.float32, copy=False)
