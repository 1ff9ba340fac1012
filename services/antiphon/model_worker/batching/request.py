"""One choice of a request: as a value that can move, and as what it is while it lives here."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, NewType

import msgspec
import numpy as np

from antiphon.model_worker.batching.token_masks import looks_back
from antiphon.wire.base import FinishReason
from antiphon.wire.errors import EngineError, ErrorReply, encode_error
from antiphon.wire.ids import DEFAULT_TENANT, RequestId, TenantId
from antiphon.wire.sampling import SamplingParams
from antiphon.wire.token_outputs import TokenOutputs, join_token_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.policy import QueueKey
    from antiphon.model_worker.batching.prefix_sharing import PendingPrefix
    from antiphon.model_worker.batching.token_masks import TokenFilter
    from antiphon.model_worker.cache.index import CacheKey, Prefix
    from antiphon.model_worker.cache.table import PageTable
    from antiphon.model_worker.grammar.matcher import GrammarMatcher

ChoiceKey = NewType("ChoiceKey", int)
"""Names one admission of one choice. Never used twice, so that a late word hits nobody else."""

WIRE_IDS = np.dtype("<i4")
"""How token ids lie in bytes."""


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """All that determines how a choice goes on, here or on another worker.

    Retraction, migration and hand-off are one move: make the state, run the state.

    Attributes:
        prompt_ids: int32, little-endian, as are `output_ids`.
        emitted: How many of the output ids somebody else has handed on already.
        weights_digest: What computed the outputs; empty if nobody has begun.
        adapter_digest: The adapter that was on; empty without one.
        priority: Who goes first, where the operator has priorities on; 0 is nobody's.
        cache_salt: Its pages are found only by those who brought the same; empty: by all others.
        tenant: Whose request it is.
        waited_ms: How long it had waited to be started when it came here.
    """

    request_id: RequestId
    choice: int
    prompt_ids: bytes
    output_ids: bytes = b""
    emitted: int = 0
    sampling: SamplingParams
    weights_digest: str = ""
    adapter_digest: str = ""
    priority: int = 0
    cache_salt: bytes = b""
    tenant: TenantId = DEFAULT_TENANT
    waited_ms: int = 0
    deadline_unix_ms: int


class Finish(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a choice ended."""

    reason: FinishReason
    matched_stop: int | None = None
    error: ErrorReply | None = None

    @classmethod
    def at_length(cls) -> Finish:
        """It said as much as it was asked for."""
        return cls(reason=FinishReason.LENGTH)

    @classmethod
    def failed(cls, error: EngineError) -> Finish:
        """It ended with an error."""
        return cls(reason=FinishReason.ERROR, error=encode_error(error))


class Progress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a step did to one choice: more ids, an end, or both.

    `weights` names those that drew these ids; `retractions` counts from the choice's beginning.
    """

    key: ChoiceKey
    token_ids: bytes = b""
    details: TokenOutputs = TokenOutputs()
    cached_tokens: int = 0
    weights: str = ""
    retractions: int = 0
    finish: Finish | None = None


class Phase(Enum):
    """Where a choice is. It goes round between the first two until it ends."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Request:
    """One choice in the batching loop.

    Its tokens are known up to `length`; those below `computed` have their keys and values in the
    cache. Prefill and decode differ in nothing but how many tokens lie between.

    A plan may be launched before the outcome of the one before it is known: `planned` is where the
    launched rows end, and `ahead` counts the tokens that they draw and nobody has seen yet.

    Attributes:
        arrival: Its number in the order of arrival, which it keeps when it is retracted.
        queued_s: Since when it waits to be started: before it came, if it had waited elsewhere.
        place: Its place in the order of the policy.
        rank: By priority; the lower outranks the higher.
        life: Grows when launched rows no longer speak for it: their outcome is passed over.
        began: Tokens that were computed when it was started, or had to go back.
        cached_tokens: Of its prompt, what others had computed when it was started first.
        found_tokens: What it found in the cache when it was started last.
        retractions: How often it has lost its pages.
        told: Tokens of the prompt of which it has been told, or nobody wants to be.
        prefilling: It has not drawn a token since it was started.
        scores: It ends with its prompt and draws nothing.
        overtaken_s: Since when it waits behind one that came later, if it does.
        overtaken_before_s: For how long it did so before it was last started.
        urgent: It was overtaken for too long, and gives way to nobody any more.
        prefix: What the index had for it, and at which of the index's generations.
        touched: The step in which that was last kept from being evicted.
        cache_key: What the index knows it by while it waits, and in which namespace.
        following: The request that computes its prefix at this moment.
        passed_leaders: Up to which one it would follow none of those that compute, and how much of
            it was cached then; see `PrefixSharing`.
        namespace: What has computed its pages, from its start on.
        guide: Where it stands in its grammar, if it has one.
        filter: What its processors allow; made when it first gets a slot, if it has any.
        late: Its guide is still on the way over its last tokens: it waits for that.
        stepwise: What may be drawn depends on the token before, which must be known here.
    """

    # Of so many attributes in a dictionary, each that a step needs is a line of memory by itself.
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
        self.told = _told(state.sampling, self.prompt_tokens, len(outputs))
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
        """Tokens of the answer so far."""
        return self.length - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens that no launched row computes yet; 0 if it only waits for an outcome.

        A token that is drawn by a launched row counts, unless it will be the last one, or what may
        follow it depends on it.
        """
        expected = self.length + self.ahead
        if self.ahead and (expected >= self.tokens_max or self.stepwise):
            return 0
        return expected - self.planned

    @property
    def answers(self) -> bool:
        """Whether its prompt is computed, or launched to the end: the next token is drawn."""
        return not self.prefilling or self.ahead > 0

    @property
    def exact(self) -> bool:
        """Whether the length of its answer is known beforehand."""
        return self.state.sampling.ignore_eos

    @property
    def shared_max(self) -> int:
        """Leading tokens that need not be computed here if somebody else has done so.

        What is told of the prompt's tokens comes from computing the one before them.
        """
        return self.length if self.told >= self.prompt_tokens else self.told - 1

    @property
    def reserved(self) -> int:
        """Tokens for which it has pages."""
        return 0 if self.table is None else self.table.reserved

    def token_bytes(self, tokens: int) -> bytes:
        """The first `tokens` of its tokens, as a cache key has them."""
        return self.ids[:tokens].tobytes()

    def start(self, slot: int, table: PageTable, now: float) -> None:
        """It has a slot, and the pages of what is cached of it."""
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
            # Once: what a retracted request finds again is its own work.
            self.cached_tokens = min(table.committed, self.prompt_tokens)
            self.started_s = now

    def retract(self) -> None:
        """It lost its slot and its pages, and keeps its tokens."""
        assert self.phase is Phase.RUNNING, "only what runs can be retracted"
        self.phase = Phase.WAITING
        self.retractions += 1
        self.slot = -1
        self.table = None
        self.computed = self.planned = self.ahead = 0
        self.life += 1
        self.prefix = self.following = self.cache_key = None
        self.passed_leaders = (0, 0)

    def end(self) -> None:
        """It is over, and holds nothing any more."""
        self.phase = Phase.ENDED
        self.table = self.following = None
        self.life += 1

    def promote(self) -> None:
        """It was overtaken for too long: it is next, and gives way to nobody any more."""
        self.urgent = True
        self.place = (-math.inf, 0.0, self.arrival)

    def launch(self, end: int, *, draws: bool) -> None:
        """A row up to `end` is launched."""
        assert self.table is not None, "a running request has no pages"
        for chain in self.table.chains.values():
            chain.launch(end)
        self.planned = end
        if draws:
            self.ahead += 1

    def resume(self, computed: int) -> None:
        """Go on from here: what was launched after it rests on a guess that was wrong."""
        assert self.table is not None, "a running request has no pages"
        for chain in self.table.chains.values():
            chain.recall()
        self.computed = self.planned = self.began = computed
        self.ahead = 0
        self.life += 1

    def accept(self, token_ids: Sequence[int], ends: Sequence[Finish | None] = ()) -> None:
        """Append what a step drew, up to the end. The token that ends a choice is not kept.

        `ends` says how each of the tokens ends it by its grammar, if it has one.
        """
        assert self.finish is None, "tokens were drawn for a request that has ended"
        assert (self.guide is None) == (not ends), "a grammar was not followed"
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
        """Append what steps drew, a token each, of which all was told and that end nothing.

        What `launch`, `accept` and `progress` come to, and the commits of its table.
        """
        assert self.table is not None, "a running request has no pages"
        length = self.length + len(token_ids)
        self.ids[self.length : length] = token_ids
        self.length = length
        self.computed = self.planned = length - 1
        self.emitted += len(token_ids)
        self.table.commit(length - 1)

    def tell(self, details: TokenOutputs, prompt_entries: int) -> None:
        """Keep what is told of its next tokens, of which so many belong to the prompt."""
        self.told += prompt_entries
        self._details.append(details)

    def untell(self) -> None:
        """Forget what is told of the prompt, if nobody has heard of it: it is computed anew."""
        if not self.outputs:
            self._details = []
            self.told = _told(self.state.sampling, self.prompt_tokens, self.outputs)

    def progress(self, weights: str, interval: int = 1) -> Progress | None:
        """What nobody was told yet, once; None if there is nothing.

        Args:
            weights: What those are called that drew the tokens.
            interval: Tokens that are worth a word. The first one and the last ones always are.
        """
        outputs = self.length - self.prompt_tokens
        fresh = outputs - self.emitted
        if self.finish is None and (fresh == 0 or (fresh < interval and self.emitted)):
            return None
        told = self.ids[self.prompt_tokens + self.emitted : self.length]
        self.emitted = outputs
        details = _UNTOLD
        if self._details:
            details, self._details = join_token_outputs(self._details), []
        return Progress(
            key=self.key,
            token_ids=told.tobytes(),
            details=details,
            cached_tokens=self.cached_tokens,
            weights=weights,
            retractions=self.retractions,
            finish=self.finish,
        )

    def snapshot(self) -> RequestState:
        """The value that goes on from here, wherever it is run."""
        outputs = self.ids[self.prompt_tokens : self.length]
        return msgspec.structs.replace(
            self.state, output_ids=outputs.tobytes(), emitted=self.emitted
        )


_NONE: frozenset[int] = frozenset()
_UNTOLD = TokenOutputs()


def _told(sampling: SamplingParams, prompt_tokens: int, outputs: int) -> int:
    """The first token of a prompt of which it is yet to be told, or where the prompt ends."""
    details = sampling.details
    if details is None or details.prompt_start < 0 or outputs:
        return prompt_tokens
    return min(prompt_tokens, max(1, details.prompt_start))


def _end_ids(sampling: SamplingParams, end_ids: frozenset[int]) -> frozenset[int]:
    if sampling.ignore_eos:
        return _NONE
    return end_ids.union(sampling.stop_token_ids) if sampling.stop_token_ids else end_ids
