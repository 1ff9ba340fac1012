"""One choice in the engine core, its rows in plans, and the prefix that it waits for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.plan import Ints, future
from antiphon.model_worker.batching.state import (
    WIRE_IDS,
    ChoiceKey,
    Finish,
    Phase,
    Progress,
    QueueKey,
    RequestState,
)
from antiphon.model_worker.batching.token_masks import TokenFilter, looks_back
from antiphon.wire.base import FinishReason
from antiphon.wire.token_outputs import TokenOutputs, join_token_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.cache.hashing import CacheKey
    from antiphon.model_worker.cache.pages import PageTable
    from antiphon.model_worker.cache.radix import Prefix
    from antiphon.model_worker.grammar.matcher import GrammarMatcher
    from antiphon.wire.sampling import SamplingParams


class Request:
    """One choice in the engine core.

    Its tokens are known up to `length`; those below `computed` have their keys and values in the KV
    cache. Prefill and decode differ only in the number of tokens between the two.

    A plan may be launched before the outcome of the one before it is known: `planned` is where the
    launched rows end, and `ahead` counts the tokens that they sample and that are in flight.

    Attributes:
        arrival: Number in the order of arrival, unchanged by retraction.
        queued_s: When it was first queued, on this worker or before.
        place: Key in the waiting queue.
        rank: Rank by priority; lower ranks go first.
        life: Generation: grows when launched rows become stale, and their outcome is dropped.
        began: Computed tokens when it was last started or resumed.
        cached_tokens: Cached tokens of the prompt when it was first started.
        found_tokens: Cached tokens when it was last started.
        retractions: How often it was retracted.
        told: Cursor of prompt logprobs: prompt tokens whose entries are done or not requested.
        prefilling: No token was sampled since it was started.
        scores: It finishes with its prefill and samples nothing.
        overtaken_s: Since when a later arrival runs before it, if one does.
        overtaken_before_s: For how long that was so before it was last started.
        urgent: It was overtaken for too long: it is neither preempted nor retracted first.
        prefix: Its match in the prefix cache, and the cache's generation at that time.
        touched: The step in which that match was last protected from eviction.
        cache_key: Its key in the prefix cache while it waits, and the namespace.
        following: The request that prefills its prefix now.
        passed_leaders: The last prefilling request that shares no prefix with it, and its cached
            tokens then; see `PrefixSharing`.
        namespace: Digest of the weights that computed its pages.
        guide: Its grammar matcher, if it has a grammar.
        filter: The tokens that its logits processors allow; made when it first gets a slot.
        late: It waits for its grammar matcher to accept its last tokens.
        stepwise: The allowed tokens depend on the token before, which must be known on the host.
    """

    # Slots, not a dictionary: there, each attribute that a step reads costs a cache line.
    __slots__ = (
        "__weakref__", "_details", "ahead", "arrival", "began", "cache_key", "cached_tokens",
        "computed", "emitted", "end_ids", "filter", "finish", "following", "found_tokens", "guide",
        "ids", "key", "late", "length", "life", "namespace", "overtaken_before_s", "overtaken_s",
        "passed_leaders", "phase", "place", "planned", "prefilling", "prefix", "prompt_tokens",
        "queued_s", "rank", "retractions", "scores", "slot", "started_s", "state", "stepwise",
        "table", "tokens_max", "told", "touched", "urgent",
    )  # fmt: skip

    def __init__(
        self,
        key: ChoiceKey,
        state: RequestState,
        *,
        arrival: int,
        queued_s: float,
        outputs_max: int,
        end_ids: frozenset[int],
        place: QueueKey,
        guide: GrammarMatcher | None = None,
    ) -> None:
        prompt = np.frombuffer(state.prompt_ids, WIRE_IDS)
        outputs = np.frombuffer(state.output_ids, WIRE_IDS)
        self.key = key
        self.state = state
        self.arrival = arrival
        self.queued_s = queued_s
        self.place = place
        self.rank = place[0]
        self.phase = Phase.WAITING
        self.prompt_tokens = len(prompt)
        self.tokens_max = len(prompt) + max(outputs_max, len(outputs))
        self.length = len(prompt) + len(outputs)
        self.ids: Ints = np.empty(self.tokens_max, WIRE_IDS)
        self.ids[: len(prompt)] = prompt
        self.ids[len(prompt) : self.length] = outputs
        self.end_ids = _end_ids(state.sampling, end_ids)
        self.guide = guide
        self.filter: TokenFilter | None = None
        self.late = False
        self.stepwise = guide is not None or looks_back(state.sampling.processors)
        self.emitted = state.emitted
        self.slot = -1
        self.table: PageTable | None = None
        self.computed = self.planned = self.ahead = self.life = self.began = 0
        self.retractions = 0
        self.told = _prompt_cursor(state.sampling, self.prompt_tokens, len(outputs))
        self._details: list[TokenOutputs] = []
        self.prefilling = True
        self.cached_tokens = self.found_tokens = 0
        self.started_s: float | None = None
        self.overtaken_s: float | None = None
        self.overtaken_before_s = 0.0
        self.urgent = False
        self.prefix: tuple[int, Prefix] | None = None
        self.touched: int | None = None
        self.following: PendingPrefix | None = None
        self.passed_leaders: tuple[int, int] = (0, 0)
        self.cache_key: tuple[bytes, CacheKey] | None = None
        self.namespace = b""
        self.finish: Finish | None = None
        self.scores = outputs_max == 0 and not len(outputs)
        if outputs_max <= len(outputs) and not self.scores:
            self.finish = Finish.at_length()

    @property
    def outputs(self) -> int:
        """Number of output tokens so far."""
        return self.length - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens that no launched row computes yet; 0 if it only waits for an outcome.

        A token in flight counts, unless it will be the last one, or the tokens allowed after it
        depend on it.
        """
        expected = self.length + self.ahead
        if self.ahead and (expected >= self.tokens_max or self.stepwise):
            return 0
        return expected - self.planned

    @property
    def answers(self) -> bool:
        """Whether it decodes: its prefill is done, or launched to the end."""
        return not self.prefilling or self.ahead > 0

    @property
    def exact(self) -> bool:
        """Whether its number of output tokens is known beforehand."""
        return self.state.sampling.ignore_eos

    @property
    def shared_max(self) -> int:
        """Leading tokens that may be taken from the prefix cache.

        The logprobs of a prompt token come from computing the token before it.
        """
        return self.length if self.told >= self.prompt_tokens else self.told - 1

    @property
    def reserved(self) -> int:
        """Number of tokens for which it has pages."""
        return 0 if self.table is None else self.table.reserved

    def token_bytes(self, tokens: int) -> bytes:
        """The first `tokens` token ids, as bytes of a cache key."""
        return self.ids[:tokens].tobytes()

    def start(self, slot: int, table: PageTable, now: float) -> None:
        """Run it in a slot, with a page table that holds its cached prefix."""
        assert self.phase is Phase.WAITING, "a request was started twice"
        self.phase = Phase.RUNNING
        self.slot = slot
        self.table = table
        self.computed = self.planned = self.began = table.committed
        self.ahead = 0
        self.life += 1
        self.prefilling = True
        self.found_tokens = table.committed
        if self.started_s is None:
            # Only once: a retracted request finds the pages that it computed itself.
            self.cached_tokens = min(table.committed, self.prompt_tokens)
            self.started_s = now

    def retract(self) -> None:
        """Drop its slot and its pages, and keep its tokens."""
        assert self.phase is Phase.RUNNING, "only a running request can be retracted"
        self.phase = Phase.WAITING
        self.retractions += 1
        self.slot = -1
        self.table = None
        self.computed = self.planned = self.ahead = 0
        self.life += 1
        self.prefix = self.following = self.cache_key = None
        self.passed_leaders = (0, 0)

    def end(self) -> None:
        """Mark it as ended: it holds no pages any more."""
        self.phase = Phase.ENDED
        self.table = self.following = None
        self.life += 1

    def promote(self) -> None:
        """Move it to the head of the queue, because it was overtaken for too long."""
        self.urgent = True
        self.place = (-math.inf, 0.0, self.arrival)

    def launch(self, end: int, *, draws: bool) -> None:
        """Note that a row up to `end` was launched."""
        assert self.table is not None, "a running request has no pages"
        for chain in self.table.chains.values():
            chain.launch(end)
        self.planned = end
        if draws:
            self.ahead += 1

    def resume(self, computed: int) -> None:
        """Continue from `computed`: later launched rows rest on a wrong assumption."""
        assert self.table is not None, "a running request has no pages"
        for chain in self.table.chains.values():
            chain.recall()
        self.computed = self.planned = self.began = computed
        self.ahead = 0
        self.life += 1

    def accept(self, token_ids: Sequence[int], ends: Sequence[Finish | None] = ()) -> None:
        """Append sampled tokens, up to the finish. A stop token is not appended.

        `ends` holds the finish that each of the tokens brings by the grammar, if there is one.
        """
        assert self.finish is None, "tokens were sampled for a request that has finished"
        assert (self.guide is None) == (not ends), "tokens did not pass the grammar matcher"
        for index, token in enumerate(token_ids):
            if ends and (finish := ends[index]) is not None:
                self.finish = finish
                return
            if token in self.end_ids:
                self.finish = Finish(reason=FinishReason.STOP, matched_stop=token)
                return
            self.ids[self.length] = token
            self.length += 1
            if self.length == self.tokens_max:
                self.finish = Finish.at_length()
                return

    def go_on(self, token_ids: Ints) -> None:
        """Append tokens of decode steps, all reported already and none of them the last.

        The same as `launch`, `accept` and `progress`, and the commits of its table.
        """
        assert self.table is not None, "a running request has no pages"
        length = self.length + len(token_ids)
        self.ids[self.length : length] = token_ids
        self.length = length
        self.computed = self.planned = length - 1
        self.emitted += len(token_ids)
        self.table.commit(length - 1)

    def tell(self, details: TokenOutputs, prompt_entries: int) -> None:
        """Store the outputs of its next tokens; `prompt_entries` of them are prompt tokens."""
        self.told += prompt_entries
        self._details.append(details)

    def untell(self) -> None:
        """Discard prompt logprobs that were not sent: the prompt is prefilled again."""
        if not self.outputs:
            self._details = []
            self.told = _prompt_cursor(self.state.sampling, self.prompt_tokens, self.outputs)

    def progress(self, weights: str, interval: int = 1) -> Progress | None:
        """What was not reported yet, once; None if there is nothing.

        Args:
            weights: Name of the weights that sampled the tokens.
            interval: Minimum number of tokens to report. The first and the last ones always are.
        """
        outputs = self.length - self.prompt_tokens
        fresh = outputs - self.emitted
        if self.finish is None and (fresh == 0 or (fresh < interval and self.emitted)):
            return None
        token_ids = self.ids[self.prompt_tokens + self.emitted : self.length]
        self.emitted = outputs
        details = _NO_OUTPUTS
        if self._details:
            details, self._details = join_token_outputs(self._details), []
        return Progress(
            key=self.key,
            token_ids=token_ids.tobytes(),
            details=details,
            cached_tokens=self.cached_tokens,
            weights=weights,
            retractions=self.retractions,
            finish=self.finish,
        )

    def snapshot(self) -> RequestState:
        """The state from which it continues, on any worker."""
        outputs = self.ids[self.prompt_tokens : self.length]
        return msgspec.structs.replace(
            self.state, output_ids=outputs.tobytes(), emitted=self.emitted
        )


class BatchRow(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one request that a plan computes: `[start, start + length)`.

    `life` is the generation of the request when the row was made; if the request's has changed
    since, the outcome of the row is dropped.
    """

    request: Request
    start: int
    length: int
    draws: bool  # a token is sampled after it: not after a prefill chunk within a prompt
    life: int

    @classmethod
    def launched(cls, request: Request, end: int) -> BatchRow:
        """Make the next row of a request, up to `end`, and mark it as launched."""
        start, expected = request.planned, request.length + request.ahead
        if end > request.length:
            request.ids[request.length : end] = future(request.slot)
        draws = end == expected and not request.scores
        row = cls(request, start, end - start, draws, request.life)
        request.launch(end, draws=draws)
        return row

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def current(self) -> bool:
        """Whether the request still waits for the outcome of this row."""
        return self.life == self.request.life

    def repeat(self) -> None:
        """Note that the row runs once more: progress of its request counts from its start."""
        self.request.began = self.start


@dataclass(frozen=True, slots=True)
class PendingPrefix:
    """The prefix that a request waits for."""

    leader: Request  # prefills it
    table: PageTable  # the leader's: should it be retracted and start again, it has another
    tokens: int  # in whole pages

    @property
    def ready(self) -> bool:
        """Whether the common prefix is computed and its pages still exist."""
        return self.leader.table is self.table and self.leader.computed >= self.tokens

    @property
    def computing(self) -> bool:
        leader = self.leader
        return leader.table is self.table and leader.prefilling and leader.computed < self.tokens


_NONE: frozenset[int] = frozenset()
_NO_OUTPUTS = TokenOutputs()


def _prompt_cursor(sampling: SamplingParams, prompt_tokens: int, outputs: int) -> int:
    """The first prompt token whose logprobs are requested, or the end of the prompt."""
    details = sampling.details
    if details is None or details.prompt_start < 0 or outputs:
        return prompt_tokens
    return min(prompt_tokens, max(1, details.prompt_start))


def _end_ids(sampling: SamplingParams, end_ids: frozenset[int]) -> frozenset[int]:
    if sampling.ignore_eos:
        return _NONE
    return end_ids.union(sampling.stop_token_ids) if sampling.stop_token_ids else end_ids
