"""Logits processors as token masks: words of bits that are set for allowed tokens.

A mask depends only on the parameters and the tokens so far, so a request that restarts, on this
worker or another, makes it again.

Axes: V vocabulary, W = ceil(V / 32) words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from antiphon.wire.sampling import (
    AllowRange,
    AllowTokens,
    DisallowFirst,
    DisallowTokens,
    LogitProcessor,
    ThinkingBudget,
    TimestampRules,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.plan import Flags, Ints


_WORD_BITS = 32


class TokenFilter:
    """All token masks of one request, from its first slot to its end.

    Attributes:
        first_timestamp: Set: see `plan.Timestamps`.
    """

    first_timestamp: int | None = None

    def __init__(
        self, processors: tuple[LogitProcessor, ...], prompt_ids: Ints, vocab_size: int
    ) -> None:
        allowed = np.ones(vocab_size, np.bool_)
        budgets: list[ThinkingClock] = []
        rules: list[FirstTokens | TimestampMask] = []
        for processor in processors:
            match processor:
                case DisallowTokens(token_ids=ids):
                    allowed[list(ids)] = False
                case AllowTokens(token_ids=ids):
                    named = np.zeros(vocab_size, np.bool_)
                    named[list(ids)] = True
                    allowed &= named
                case AllowRange(first=first, last=last):
                    allowed[:first] = allowed[last + 1 :] = False
                case ThinkingBudget():
                    budgets.append(ThinkingClock(processor, prompt_ids))
                case DisallowFirst(token_ids=ids):
                    rules.append(FirstTokens(ids, len(prompt_ids), vocab_size))
                case TimestampRules(first_id=first):
                    rules.append(TimestampMask(processor, len(prompt_ids), vocab_size))
                    self.first_timestamp = first
        self._rules = tuple(rules)
        self._words = pack(allowed)
        self._budgets = tuple(budgets)

    def restrict(self, words: Ints, ids: Callable[[int], Ints]) -> None:
        """Clear the bits of tokens that may not follow the request's tokens so far.

        `ids(start)` are these from `start` on. All must be known on the host where a processor
        counts them: see `looks_back`.
        """
        words &= self._words
        for rule in self._rules:
            if (allowed := rule.allowed(ids)) is not None:
                words &= allowed
        for budget in self._budgets:
            if (forced := budget.forced(ids)) is not None:
                index, bit = divmod(forced, _WORD_BITS)
                word = words[index] & np.uint32(1 << bit).astype(np.int32)
                words[:] = 0
                words[index] = word


class ThinkingClock:
    """Counts the thinking tokens of a request."""

    def __init__(self, budget: ThinkingBudget, prompt_ids: Ints) -> None:
        self._budget = budget
        self._read = len(prompt_ids)
        self._tokens = 0
        begun = np.flatnonzero(prompt_ids == budget.begin_id)
        closed = np.flatnonzero(prompt_ids == budget.closing_ids[-1])
        self._thinking = len(begun) > 0 and (len(closed) == 0 or begun[-1] > closed[-1])

    def forced(self, ids: Callable[[int], Ints]) -> int | None:
        """The only token that may follow, if the budget is used up. `ids` only ever grow."""
        new = ids(self._read).tolist()
        for token in new:
            self._count(token)
        self._read += len(new)
        over = self._tokens - self._budget.tokens_max
        if not self._thinking or over < 0:
            return None
        return self._budget.closing_ids[min(over, len(self._budget.closing_ids) - 1)]

    def _count(self, token: int) -> None:
        if self._thinking:
            self._thinking = token != self._budget.closing_ids[-1]
            self._tokens += 1
        elif token == self._budget.begin_id:
            self._thinking, self._tokens = True, 0


class FirstTokens:
    """Tokens with which no output begins."""

    def __init__(self, token_ids: tuple[int, ...], prompt_tokens: int, vocab_size: int) -> None:
        allowed = np.ones(vocab_size, np.bool_)
        allowed[list(token_ids)] = False
        self._words, self._prompt_tokens = pack(allowed), prompt_tokens

    def allowed(self, ids: Callable[[int], Ints]) -> Ints | None:
        """The mask of the next token; None: all are allowed."""
        return None if len(ids(self._prompt_tokens)) else self._words


class TimestampMask:
    """Which text tokens and timestamps may follow: see `TimestampRules`.

    Source: Radford et al. 2022, arXiv:2212.04356, section 2.3.
    """

    def __init__(self, rules: TimestampRules, prompt_tokens: int, vocab_size: int) -> None:
        self._rules, self._prompt_tokens, self._vocab_size = rules, prompt_tokens, vocab_size
        self._read = prompt_tokens
        self._last = list[bool]()  # whether each of the last two is a timestamp
        self._latest = -1

    def allowed(self, ids: Callable[[int], Ints]) -> Ints | None:
        """The mask of the next token. `ids` only ever grow."""
        first, new = self._rules.first_id, ids(self._read).tolist()
        for token in new:
            self._last = [*self._last[-1:], token >= first]
            self._latest = token if token >= first else self._latest
        self._read += len(new)
        allowed = np.ones(self._vocab_size, np.bool_)
        allowed[first - 1] = False
        if not self._last:
            allowed[:first] = False
            if self._rules.initial_max is not None:
                allowed[first + self._rules.initial_max + 1 :] = False
            return pack(allowed)
        # The very first one counts as the second of a pair.
        of_pair = len(self._last) < 2 or self._last[0]
        if self._last[-1] and of_pair:
            allowed[first:] = False
        elif self._last[-1]:
            allowed[: self._rules.end_id] = False
        if self._latest >= first:
            # The second of a pair may equal the first; text between two takes time.
            again = self._last[-1] and not of_pair
            allowed[first : self._latest + (not again)] = False
        return pack(allowed)


def looks_back(processors: tuple[LogitProcessor, ...]) -> bool:
    """Whether the mask of the next token depends on the last one."""
    depends = (ThinkingBudget, DisallowFirst, TimestampRules)
    return any(isinstance(processor, depends) for processor in processors)


def pack(allowed: Flags) -> Ints:
    """Pack (V,) booleans into (W,) int32: token i is bit i % 32 of word i // 32."""
    padded = np.pad(allowed, (0, -len(allowed) % _WORD_BITS))
    return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32, copy=False)


def words_count(vocab_size: int) -> int:
    return -(-vocab_size // _WORD_BITS)
