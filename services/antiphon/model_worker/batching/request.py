"""One choice in the engine core, and the prefix that it waits for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.state import (
    WIRE_IDS,
    ChoiceKey,
    Finish,
    Progress,
    QueueKey,
    RequestMedia,
    RequestState,
)
from antiphon.model_worker.batching.token_masks import TokenFilter, looks_back
from antiphon.wire.token_outputs import TokenOutputs, join_token_outputs

if TYPE_CHECKING:
    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.slot_arrays import SlotArrays
    from antiphon.model_worker.batching.token_store import OutputIds
    from antiphon.model_worker.cache.pages import PageTable
    from antiphon.model_worker.cache.radix import Prefix
    from antiphon.model_worker.cache.tree import CacheKey
    from antiphon.model_worker.grammar.matcher import GrammarMatcher
    from antiphon.wire.namespaces import PageOrigin
    from antiphon.wire.sampling import SamplingParams


class Request:
    """One choice in the engine core.

    While it runs, its numbers are in the arrays of the `RunningBatch`: `length`, `computed` and
    `reported` here are views of these, for the rules that look at one request.

    Attributes:
        arrival: Number in the order of arrival, unchanged by retraction.
        queued_s: When it was first queued, on this worker or before.
        place: Key in the waiting queue.
        rank: Rank by priority; lower ranks go first.
        prompt: Its prompt ids.
        key_prompt: What keys have in their place, as bytes: see `RequestState.key_ids`.
        media: The media of its prompt, if there are any.
        outputs: Its output ids.
        cached_tokens: Cached tokens of the prompt when it was first started.
        found_tokens: Cached tokens when it was last started.
        retractions: How often it was retracted.
        prompt_logprob_cursor: Prompt tokens whose entries are done or not requested.
        scores: It finishes with its prefill and samples nothing.
        overtaken_s: Since when a later arrival runs before it, if one does.
        overtaken_before_s: For how long that was so before it was last started.
        urgent: It was overtaken for too long: it is neither preempted nor retracted first.
        prefix: Its match in the prefix cache, and the cache's generation at that time.
        touched: The step in which that match was last protected from eviction.
        cache_key: Its key in the prefix cache while it waits, and the origin of that namespace.
        following: The request that prefills its prefix now.
        leader_number: Its number among the prefilling requests, whose prefixes others may share;
            0 if it is none. See `Prefixes`.
        passed_leaders: That of the last one that shares no prefix with it, and its cached tokens
            then.
        namespace: Of its pages, once it was started; see `wire.namespaces`.
        matcher: Its grammar matcher, if it has a grammar.
        filter: The tokens that its logits processors allow; made when it first gets a slot.
        stalled: It waits for its grammar matcher to accept its last tokens.
        fetching: The transfer that it waits for, in phase FETCHING; 0 if it is in no such phase.
        fetched: It has fetched blocks since it last waited: what is missing now is computed.
        saved_blocks: Digests of its blocks that were given to a page store since it was started.
        stepwise: The allowed tokens depend on the token before, which must be known on the host.
    """

    __slots__ = (
        "__weakref__", "_details", "_length", "_reported", "arrival", "batch", "cache_key",
        "cached_tokens", "end_ids", "ended", "fetched", "fetching", "filter", "finish",
        "following", "found_tokens", "key", "key_prompt", "leader_number", "matcher", "media",
        "namespace", "outputs",
        "overtaken_before_s", "overtaken_s", "passed_leaders", "place", "prefix", "prompt",
        "prompt_logprob_cursor", "prompt_tokens", "queued_s", "rank", "retractions",
        "saved_blocks", "scores", "slot", "stalled", "started_s", "state", "stepwise", "table",
        "tokens_max", "touched", "urgent",
    )  # fmt: skip

    def __init__(
        self,
        key: ChoiceKey,
        state: RequestState,
        outputs: OutputIds,
        *,
        arrival: int,
        queued_s: float,
        outputs_max: int,
        end_ids: frozenset[int],
        place: QueueKey,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        before = len(state.output_ids) // WIRE_IDS.itemsize
        self.key = key
        self.state = state
        self.arrival = arrival
        self.queued_s = queued_s
        self.place = place
        self.rank = place[0]
        self.ended = False
        self.prompt: Ints = np.frombuffer(state.prompt_ids, WIRE_IDS)
        self.key_prompt = state.key_ids()
        self.media = RequestMedia(state.media, self.prompt) if state.media else None
        self.outputs = outputs
        self.prompt_tokens = len(self.prompt)
        self.tokens_max = self.prompt_tokens + max(outputs_max, before)
        self.end_ids = _end_ids(state.sampling, end_ids)
        self.matcher = matcher
        self.filter: TokenFilter | None = None
        self.stalled = False
        self.stepwise = matcher is not None or looks_back(state.sampling.processors)
        self.batch: SlotArrays | None = None  # while it runs
        self.slot = -1
        self.table: PageTable | None = None
        self._length = self.prompt_tokens + before
        self._reported = before
        self.retractions = 0
        self.prompt_logprob_cursor = _prompt_cursor(state.sampling, self.prompt_tokens, before)
        self._details: list[TokenOutputs] = []
        self.cached_tokens = self.found_tokens = 0
        self.started_s: float | None = None
        self.overtaken_s: float | None = None
        self.overtaken_before_s = 0.0
        self.urgent = False
        self.prefix: tuple[int, Prefix] | None = None
        self.touched: int | None = None
        self.following: PendingPrefix | None = None
        self.leader_number = 0
        self.passed_leaders: tuple[int, int] = (0, 0)
        self.cache_key: tuple[PageOrigin, CacheKey] | None = None
        self.namespace = b""
        self.fetching = 0
        self.fetched = False
        self.saved_blocks: list[bytes] = []
        self.finish: Finish | None = None
        self.scores = outputs_max == 0 and not before
        if outputs_max <= before and not self.scores:
            self.finish = Finish.at_length()

    @property
    def running(self) -> bool:
        """Whether it has a slot. It waits otherwise, or has `ended`."""
        return self.batch is not None

    @property
    def running_table(self) -> PageTable:
        """Its page table, while it runs."""
        assert self.table is not None, "a running request has no pages"
        return self.table

    @property
    def length(self) -> int:
        """Number of known tokens: prompt and outputs."""
        return self._length if self.batch is None else self.batch.length.item(self.slot)

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are in the KV cache."""
        return 0 if self.batch is None else self.batch.computed.item(self.slot)

    @property
    def prefilling(self) -> bool:
        """Whether no token was sampled since it was started."""
        return self.batch is None or bool(self.batch.prefilling[self.slot])

    @property
    def reported(self) -> int:
        """Output ids that were reported."""
        return self._reported if self.batch is None else self.batch.reported.item(self.slot)

    @property
    def outputs_count(self) -> int:
        """Number of output tokens so far."""
        return self.length - self.prompt_tokens

    @property
    def position_offset(self) -> int:
        """What the positions of its tokens behind all images are beyond their indices."""
        return 0 if self.media is None else self.media.position_offset

    @property
    def exact(self) -> bool:
        """Whether its number of output tokens is known beforehand."""
        return self.state.sampling.ignore_eos

    @property
    def shared_max(self) -> int:
        """Leading tokens that may be taken from the prefix cache.

        The logprobs of a prompt token come from computing the token before it.
        """
        cursor = self.prompt_logprob_cursor
        return self.length if cursor >= self.prompt_tokens else cursor - 1

    def aligned_at(self, end: int) -> bool:
        """Whether its prompt is aligned in the step that computes it up to `end`."""
        return self.state.sampling.alignment is not None and end == self.prompt_tokens

    def ids(self, start: int = 0, end: int | None = None) -> Ints:
        """Its known ids from `start` to `end`."""
        end, prompt_tokens = self.length if end is None else end, self.prompt_tokens
        if end <= prompt_tokens:
            return self.prompt[start:end]
        outputs = self.outputs.read(max(0, start - prompt_tokens), end - prompt_tokens)
        return outputs if start >= prompt_tokens else np.concatenate([self.prompt[start:], outputs])

    def key_ids(self, end: int) -> Ints:
        """Its known ids up to `end`, as keys have them."""
        if self.media is None:
            return self.ids(0, end)
        return np.frombuffer(self.token_bytes(end), WIRE_IDS)

    def token_bytes(self, tokens: int) -> bytes:
        """The first `tokens` token ids, as bytes of a cache key."""
        prompt = self.key_prompt[: tokens * WIRE_IDS.itemsize]
        if tokens <= self.prompt_tokens:
            return prompt
        outputs = self.outputs.read(0, tokens - self.prompt_tokens)
        return prompt + outputs.astype(WIRE_IDS, copy=False).tobytes()

    def start(self, batch: SlotArrays, slot: int, table: PageTable, now: float) -> None:
        """Run it in a slot, with a page table that holds its cached prefix."""
        assert not self.running, "a request was started twice"
        assert not self.ended, "a request was started after its end"
        self.batch, self.slot, self.table = batch, slot, table
        self.found_tokens = table.committed
        if self.started_s is None:
            # Only once: a retracted request finds the pages that it computed itself.
            self.cached_tokens = min(table.committed, self.prompt_tokens)
            self.started_s = now

    def leave(self) -> None:
        """Give up its slot and its table; its numbers are its own again."""
        assert self.running, "only a running request has a slot"
        self._length, self._reported = self.length, self.reported
        self.batch, self.slot, self.table = None, -1, None
        self.forget_prefix()
        self.fetched, self.saved_blocks = False, []

    def forget_prefix(self) -> None:
        """Forget what was found of it in the prefix cache, or at others, while it waits."""
        self.prefix = self.following = self.cache_key = None
        self.passed_leaders = (0, 0)

    def end(self) -> None:
        """Mark it as ended. It has no slot any more."""
        self.ended = True
        self.following = None

    def promote(self) -> None:
        """Move it to the head of the queue, because it was overtaken for too long."""
        self.urgent = True
        self.place = (-math.inf, 0.0, self.arrival)

    def add_outputs(self, details: TokenOutputs, prompt_entries: int) -> None:
        """Store the outputs of its next tokens; `prompt_entries` of them are prompt tokens."""
        self.prompt_logprob_cursor += prompt_entries
        self._details.append(details)

    def discard_prompt_logprobs(self) -> None:
        """Discard prompt logprobs that were not sent: the prompt is prefilled again."""
        if not self.outputs_count:
            self._details = []
            self.prompt_logprob_cursor = _prompt_cursor(self.state.sampling, self.prompt_tokens, 0)

    def progress(self, weights: str) -> Progress:
        """All that was not reported yet. `weights` names those that sampled the tokens."""
        start, end = self.reported, self.outputs_count
        if self.batch is None:
            self._reported = end
        else:
            self.batch.reported[self.slot] = end
        details = _NO_OUTPUTS
        if self._details:
            details, self._details = join_token_outputs(self._details), []
        return Progress(
            key=self.key,
            slot=self.slot,
            outputs=self.outputs,
            start=start,
            end=end,
            details=details,
            cached_tokens=self.cached_tokens,
            weights=weights,
            retractions=self.retractions,
            finish=self.finish,
        )


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
