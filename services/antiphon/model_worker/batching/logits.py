"""Logits processors of running requests: masks, biases and penalties, by slot.

They cost nothing in a step in which no request has any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.plan import (
    NO_IDS,
    Biases,
    Floats,
    Ints,
    Penalties,
    SamplingPart,
    Timestamps,
)
from antiphon.model_worker.batching.state import WIRE_IDS
from antiphon.model_worker.batching.token_masks import TokenFilter, words_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from antiphon.model_worker.batching.plan import Flags, Longs
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.rows import StepRows
    from antiphon.wire.sampling import LogitBias

_VALUES = np.dtype("<f4")


class LogitsProcessors:
    """Penalties, grammars, token filters and biases of the `running` requests, by slot."""

    def __init__(self, slots_max: int, vocab_size: int, running: Mapping[int, Request]) -> None:
        self._vocab_size = vocab_size
        self._running = running
        self._penalised = np.zeros(slots_max, np.bool_)
        self._frequency = np.zeros(slots_max, np.float32)
        self._presence = np.zeros(slots_max, np.float32)
        self._repetition = np.ones(slots_max, np.float32)
        self._restricted = np.zeros(slots_max, np.bool_)  # by a grammar or a filter
        self._timed = np.zeros(slots_max, np.bool_)  # of these, by a rule of timestamps
        self._biased = np.zeros(slots_max, np.bool_)
        self._biases: dict[int, tuple[Ints, Floats]] = {}
        self._processed: set[int] = set()  # slots with any of these

    def fill(self, request: Request) -> None:
        slot, sampling = request.slot, request.state.sampling
        self._penalised[slot] = sampling.penalised
        self._frequency[slot] = sampling.frequency_penalty
        self._presence[slot] = sampling.presence_penalty
        self._repetition[slot] = sampling.repetition_penalty
        if sampling.processors and request.filter is None:
            request.filter = TokenFilter(sampling.processors, request.prompt, self._vocab_size)
        self._restricted[slot] = request.filter is not None or request.matcher is not None
        timed = request.filter is not None and request.filter.first_timestamp is not None
        self._timed[slot] = timed
        self._biased[slot] = sampling.logit_bias is not None or sampling.min_new_tokens > 0
        if self._biased[slot]:
            self._biases[slot] = unpack_bias(sampling.logit_bias)
        if sampling.penalised or self._restricted[slot] or self._biased[slot]:
            self._processed.add(slot)

    def clear(self, slot: int) -> None:
        self._penalised[slot] = self._restricted[slot] = False
        self._timed[slot] = self._biased[slot] = False
        self._biases.pop(slot, None)
        self._processed.discard(slot)

    @property
    def idle(self) -> bool:
        return not self._processed

    def part(self, rows: StepRows, current: Flags, base_len: Longs) -> SamplingPart:
        """The sampling part of a plan of these rows; those that are not `current` (R,) have none.

        `base_len` (S,) is where the first row of a slot begins.
        """
        masks, masked = self._masks(rows, current)
        return SamplingPart(
            penalties=self._penalties(rows, current, base_len),
            token_masks=masks,
            token_mask_logits=masked,
            timestamps=self._timestamps(rows, current),
            biases=self._all_biases(rows, current),
        )

    def _penalties(self, rows: StepRows, current: Flags, base_len: Longs) -> Penalties | None:
        """The penalties of the rows that sample, and the counts that are reset by this plan.

        A count is reset with the row at the `base_len` of its slot, so that a plan built again from
        the same rows resets it again.
        """
        at, slots = rows.slots.at, rows.slots.slots
        penalised = self._penalised[at] & current
        if not penalised.any():
            return None
        sampling = np.flatnonzero(penalised & rows.draws)
        begun = slots[penalised & (rows.starts == base_len[at])]
        if not len(sampling) and not len(begun):
            return None
        picked = slots[sampling]
        requests = [self._running[slot] for slot in begun.tolist()]
        outputs = [request.ids(request.prompt_tokens) for request in requests]
        return Penalties(
            rows=sampling.astype(np.int32),
            frequency=self._frequency[picked],
            presence=self._presence[picked],
            repetition=self._repetition[picked],
            begun=begun,
            begun_starts=np.cumsum([0, *map(len, outputs)], dtype=np.int32),
            begun_ids=np.concatenate([NO_IDS, *outputs]),
        )

    def _masks(self, rows: StepRows, current: Flags) -> tuple[Ints | None, Ints | None]:
        """The token masks of restricted rows, one for each of their logits, and whose they are."""
        masks: list[Ints] = []
        masked: list[int] = []
        for row, logits in self._logits_of(rows, self._restricted[rows.slots.at] & current):
            request = self._request(rows, row)
            for draft, at in enumerate(logits):
                if (mask := self._mask(request, draft)) is not None:
                    masks.append(mask)
                    masked.append(at)
        return (np.stack(masks), np.array(masked, np.int32)) if masks else (None, None)

    def _timestamps(self, rows: StepRows, current: Flags) -> Timestamps | None:
        logits, first_ids = list[int](), list[int]()
        for row, each in self._logits_of(rows, self._timed[rows.slots.at] & current):
            found = self._request(rows, row).filter
            assert found is not None, "what a rule of timestamps is in"
            logits += each
            first_ids += [found.first_timestamp or 0] * len(each)
        if not logits:
            return None
        return Timestamps(
            logits=np.array(logits, np.int32), first_ids=np.array(first_ids, np.int32)
        )

    def _mask(self, request: Request, draft: int) -> Ints | None:
        """What may follow the known tokens and so many drafts, (W,); None: anything."""
        words = None
        if request.matcher is not None:
            if draft >= len(request.matcher.masks):
                return None  # the grammar forbids a draft before it
            words = request.matcher.masks[draft]
        if request.filter is None:
            return words
        if words is None:
            words = np.full(words_count(self._vocab_size), -1, np.int32)
        words = words.copy()
        request.filter.restrict(words, request.ids)
        return words

    def _all_biases(self, rows: StepRows, current: Flags) -> Biases | None:
        """The logit biases of the rows; EOS ids are forbidden until `min_new_tokens`."""
        parts: list[tuple[int, Ints, Floats]] = []
        for row, logits in self._logits_of(rows, self._biased[rows.slots.at] & current):
            request = self._request(rows, row)
            known = rows.ends.item(row) - len(logits) + 1 - request.prompt_tokens
            for draft, at in enumerate(logits):
                ids, values = self._bias(request, known + draft, draft)
                if len(ids):
                    parts.append((at, ids, values))
        if not parts:
            return None
        return Biases(
            logits=np.concatenate([np.full(len(ids), at, np.int32) for at, ids, _ in parts]),
            token_ids=np.concatenate([ids for _, ids, _ in parts]),
            values=np.concatenate([values for _, _, values in parts]),
        )

    def _logits_of(self, rows: StepRows, chosen: Flags) -> Iterator[tuple[int, range]]:
        """The `chosen` rows (R,) that sample, and the logits of each."""
        found = np.flatnonzero(chosen & rows.draws)
        if not len(found):
            return
        counts = rows.logit_counts
        ends = np.cumsum(counts)
        for row in found.tolist():
            end = ends.item(row)
            yield row, range(end - counts.item(row), end)

    def _request(self, rows: StepRows, index: int) -> Request:
        return self._running[rows.slots.slots.item(index)]

    def _bias(self, request: Request, outputs: int, draft: int) -> tuple[Ints, Floats]:
        """The bias of the token after so many outputs, of which `draft` are drafts."""
        ids, values = self._biases[request.slot]
        if outputs >= request.state.sampling.min_new_tokens:
            return ids, values
        matcher, eos_ids = request.matcher, request.end_ids
        if matcher is not None:
            if draft < len(matcher.masks) and matcher.must_end(draft):
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
