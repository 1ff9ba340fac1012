"""A step as data: the plan that every rank executes, and the outcome that the loop commits.

The plan is a rank's only input. It consists of flat int32 arrays, so that a broadcast is a few
copies and a recorded plan can be replayed offline. The outcome is ragged: a row may accept several
tokens (speculation), one, or none (a prefill chunk), and the loop never assumes one.

Axes: R rows, T tokens of all rows, L rows of logits, N pages of the longest row, S accepted tokens
of all rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Thread

    from antiphon.wire.sampling import SamplingParams

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Indices = NDArray[np.signedinteger[Any]]
Whole = TypeVar("Whole", int, Ints)

NO_IDS: Ints = np.zeros(0, np.int32)

_INT32_MAX = 2**31 - 1
_FIRST_DRAFT = -(2**30)


def draft(slot: int) -> int:
    """Placeholder of the drafts that the runner itself has made for a slot.

    The n-th token of a row after its first one stands for the n-th draft of the last plan that
    asked for drafts. See `future`, whose numbers are higher.
    """
    return _FIRST_DRAFT - slot


def are_drafts(tokens: Ints) -> Flags:
    """Which tokens are placeholders of drafts."""
    return tokens <= _FIRST_DRAFT


def future(slot: Whole) -> Whole:
    """Placeholder of a token not yet known on the host: the one `slot` sampled a step before.

    Negative, so that it is never a token id; the rank reads the id from its own last result.
    """
    return -1 - slot


class SamplingColumns(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Sampling parameters of each row; entry r belongs to row r.

    `top_k` 0 keeps the whole vocabulary; `temperature` 0 is greedy.
    """

    temperature: Floats  # (R,)
    top_p: Floats  # (R,)
    min_p: Floats  # (R,)
    top_k: Ints  # (R,)
    seed: Longs  # (R,)
    choice: Ints  # (R,)

    @classmethod
    def zeros(cls, rows: int) -> SamplingColumns:
        return cls(
            temperature=np.zeros(rows, np.float32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            seed=np.zeros(rows, np.int64),
            choice=np.zeros(rows, np.int32),
        )

    def set(self, row: int, sampling: SamplingParams, choice: int) -> None:
        """Write one row; greedy in one way, so that the runner has one thing to look for."""
        self.temperature[row] = 0 if sampling.greedy else sampling.temperature
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.top_k[row] = min(sampling.top_k, _INT32_MAX)
        self.seed[row] = sampling.seed
        self.choice[row] = choice

    def of(self, rows: Ints) -> SamplingColumns:
        """The columns of these rows, in this order."""
        return SamplingColumns(
            **{name: getattr(self, name)[rows] for name in self.__struct_fields__}
        )

    def put(self, rows: Ints, columns: SamplingColumns) -> None:
        """Replace these rows."""
        for name in self.__struct_fields__:
            getattr(self, name)[rows] = getattr(columns, name)

    def grown(self, rows: int) -> SamplingColumns:
        """Columns of so many rows, the first of which are these."""
        columns = SamplingColumns.zeros(rows)
        columns.put(np.arange(len(self.seed), dtype=np.int32), self)
        return columns

    def filters(self, rows: Longs) -> tuple[Floats, Longs, Floats, Floats]:
        """Temperature, top-k, top-p and min-p of these rows, as the sampling kernel takes them."""
        top_k = self.top_k[rows].astype(np.int64)
        return self.temperature[rows], top_k, self.top_p[rows], self.min_p[rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties of tokens that a row has sampled before, for rows that sample in this plan.

    Logits after a draft count the drafts before them as sampled. The rank counts the sampled tokens
    of each slot: `begun` are the slots whose count is reset to the outputs given here, because a
    new request holds them. A plan that is run again repeats them.

    Axes: P penalised rows, B slots whose count is reset.
    """

    rows: Ints  # (P,) rising
    frequency: Floats  # (P,)
    presence: Floats  # (P,)
    repetition: Floats  # (P,)
    begun: Ints  # (B,) slots
    begun_starts: Ints  # (B + 1,)
    begun_ids: Ints  # (begun_starts[-1],) output ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Biases:
    """Biases added to single logits; -inf forbids a token. Pairs of logits and token are unique."""

    logits: Ints  # (B,) rows of logits, rising
    token_ids: Ints  # (B,)
    values: Floats  # (B,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timestamps:
    """Where a timestamp is sampled if all together are likelier than each text token."""

    logits: Ints  # (B,) rows of logits, rising
    first_ids: Ints  # (B,) the first timestamp; ids of texts are below


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsRequest:
    """Rows with logprobs or hidden states, and the prompt tokens to score.

    The entries of a row's prompt tokens come before that of its sampled token. The token after each
    of `prompt_tokens`, which index the plan's `tokens`, is scored by plain softmax.

    Axes: D rows with such outputs, Q prompt tokens to score, M named ids of all rows.
    """

    rows: Ints  # (D,) rising
    logprobs: NDArray[np.bool_]  # (D,) whether they are returned, of the sampled token and below
    top: Ints  # (D,) number of top logprobs
    named_starts: Ints  # (D + 1,) where the ids of each row start in `named_ids`
    named_ids: Ints  # (M,) ids whose logprobs are returned
    hidden: NDArray[np.bool_]  # (D,) whether the hidden state before each token is returned
    prompt_tokens: Ints  # (Q,) rising
    prompt_targets: Ints  # (Q,) ids of the tokens after them; -1 where the prompt ends


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest:
    """Pooling of the rows of a model that generates no tokens; entry r belongs to row r."""

    ends: NDArray[np.bool_]  # (R,) whether the prompt ends with the row: its vector is returned
    dimensions: Ints  # (R,) length to which the vector is truncated; 0 returns all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentRequest:
    """Prompts that end in a plan, and whose last tokens are found in what they attend to.

    All of a prompt is computed again for it, by itself: see `runner.alignment`.

    Axes: A prompts, P tokens of all, C heads of all, S tokens of the encoder.
    """

    rows: Ints  # (A,) of the plan, rising
    token_starts: Ints  # (A + 1,) where the tokens of each prompt start in `tokens`
    tokens: Ints  # (P,)
    counts: Ints  # (A,) how many of them are aligned: the last ones
    head_starts: Ints  # (A + 1,) where the heads of each start in `heads`
    heads: Ints  # (C, 2) layer and number
    sources: Floats  # (A, S, hidden) what they attend to
    source_tokens: Ints  # (A,) with how many of S tokens they are aligned: the first ones
    filter_widths: Ints  # (A,) of the median, odd


class SamplingPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What changes the logits of a plan before a token is sampled; None where no row needs it.

    May depend on tokens that are in flight when the plan is launched, and follow it then: see
    `Flight.sample`.
    """

    penalties: Penalties | None = None
    token_masks: Ints | None = None  # (G, ceil(V / 32)) bit i % 32 of word i // 32: i is allowed
    token_mask_logits: Ints | None = None  # (G,) the row of logits of each mask, rising
    timestamps: Timestamps | None = None  # of what the masks leave
    biases: Biases | None = None  # added after the masks

    @property
    def changes_logits(self) -> bool:
        return any(getattr(self, name) is not None for name in self.__struct_fields__)


PLAIN = SamplingPart()
"""Of a plan whose logits are sampled as they are."""


class SlotChanges(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What has changed since the plan before of what a runner keeps by slot.

    Page tables and sampling parameters hardly ever change, and are the largest part of a step. All
    values are absolute, so that tables at any step are a change of empty ones.

    Axes: C slots, E entries of page tables.
    """

    slots: Ints  # (C,) whose requests are new: their page tables have nothing but `entries`
    sampling: SamplingColumns  # (C,) their sampling parameters
    entries: tuple[Ints, ...]  # (3, E) for each cache group: slot, place in its table, page


NO_COLUMNS = SamplingColumns.zeros(0)


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One forward pass: decode rows first, then verify rows, then prefill chunks.

    The tokens of a verify row after its first one are drafts of what the token before gives.

    A struct, because every step makes one: a dataclass of so many fields takes longer to make than
    its contents.

    Attributes:
        query_len: Tokens of a row in this step: decode 1, verify k + 1, a prefill chunk n.
        kv_len: Tokens that the row's last query attends to, itself included.
        future_start: Rows that begin where the row before them in their slot has ended, which the
            host does not know: drafts were in flight. Their `kv_len` is an upper bound, and they
            start from `UNKNOWN_STATE`.
        logit_tokens: Indices into `tokens` after which a token is sampled: all of a decode or
            verify row, and the last one of a prefill chunk if the prompt ends there.
        changes: Of page tables and sampling parameters, None if there are none.
        states: (R, 1 + W) for each group of recurrent states: the state that a row starts from, -1
            if it is zero, and different ones, to which the state after its last token is written,
            or after each token of a verify row; -1 beyond these.
        page_tables: (R, N) for each cache group, -1 beyond a row's pages. Token p of a row lies in
            page `table[r, p // page_tokens]` at `p % page_tokens`; the step writes its own tokens
            there first. `states` for a state group. Like `sampling` it is empty until the runner
            fills in what it keeps by slot.
        spliced: Tokens that are not read from the embedding table, rising; see `spliced_rows`.
        spliced_rows: What stands in their place as the layers are entered, in float32, and what is
            added behind each of the first layers, of models with deepstack: see `Decoder.forward`.
        position_offsets: What the positions of a row's tokens are beyond their indices, all axes
            alike: images before them take fewer positions than tokens. See `positions`.
        axis_tokens: Tokens of prompts up to the last image, rising, whose positions
            `axis_positions` has instead.
        sources: What new requests attend to beside their text, of models with cross attention:
            embeddings in float32, which the layers make keys and values of for all later plans.
        source_slots: The slots of these requests.
        ahead: How many tokens after it each token attends to, too: those of its image.
        group_rows: (G + 1,) of several attention groups: which rows are those of each. Each group
            has pages and states of its own, and slots beyond those of the groups before it.
    """

    step: int  # grows by one; a rank rejects a gap
    slot: Ints  # (R,) fixed while a choice runs
    query_start: Ints  # (R,) index of a row's first token in `tokens`
    query_len: Ints  # (R,)
    kv_len: Ints  # (R,)
    tokens: Ints  # (T,) ids, or `future(slot)`
    logit_tokens: Ints  # (L,)
    changes: SlotChanges | None = None
    states: tuple[Ints, ...] = ()
    sampling: SamplingColumns = NO_COLUMNS
    page_tables: tuple[Ints, ...] = ()
    part: SamplingPart | None = PLAIN  # None: it follows before the plan samples
    # The following are None where no row needs them.
    details: LogprobsRequest | None = None
    pooling: PoolingRequest | None = None  # no row samples then
    token_types: Ints | None = None  # (T,) of models that learn types; None: all are of type 0
    future_start: Flags | None = None  # (R,) see above
    draft_counts: Ints | None = None  # (R,) drafts to make after each row, by a draft model
    next_tokens: Ints | None = None  # (R,) beside these: the token after a chunk that samples none
    spliced: Ints | None = None  # (E,) indices into `tokens`
    spliced_rows: Floats | None = None  # (E, hidden), or wider
    position_offsets: Ints | None = None  # (R,) see above
    axis_tokens: Ints | None = None  # (A,) indices into `tokens`
    axis_positions: Ints | None = None  # (3, A)
    sources: Floats | None = None  # (N, S, hidden)
    source_slots: Ints | None = None  # (N,)
    ahead: Ints | None = None  # (T,) see above
    group_rows: Ints | None = None  # (G + 1,) see above
    alignment: AlignmentRequest | None = None

    @property
    def groups_count(self) -> int:
        """Number of attention groups; 0 where there is one."""
        return 0 if self.group_rows is None else len(self.group_rows) - 1

    def rows_of(self, group: int) -> slice:
        """The rows of an attention group."""
        assert self.group_rows is not None, "a plan of several groups"
        return slice(self.group_rows.item(group), self.group_rows.item(group + 1))

    def tokens_of(self, rows: slice) -> slice:
        """The tokens of neighbouring rows."""
        ends = self.query_start + self.query_len
        first, last = (ends.item(row - 1) if row else 0 for row in (rows.start, rows.stop))
        return slice(first, last)


class RowStatus(IntEnum):
    """Status of a row in the outcome."""

    OK = 0
    NON_FINITE = 1
    """Its logits held a NaN or infinity; the request ends with an error, the others continue."""
    NO_TOKEN = 2
    """Masks and biases forbade every token; the request ends with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsBatch:
    """Logprobs and hidden states: entries of a row's prompt tokens, then of its accepted ones.

    Axes: K entries of all rows, N the largest top, M the most named ids of a row, H hidden size. A
    row that requests fewer fills the first columns. NaN where a row requests none, or there is no
    value. Logprobs are those after penalties, masks, biases and temperature, 1 in greedy rows.
    """

    starts: Ints  # (R + 1,) row r's entries are [starts[r], starts[r + 1])
    token_ids: Ints  # (K,) -1 after a prompt that nothing is sampled after
    logprobs: Floats  # (K,)
    top_ids: Ints  # (K, N) the most likely first
    top_logprobs: Floats  # (K, N)
    named_logprobs: Floats  # (K, M)
    hidden: Floats | None = None  # (K, H) the normalised last state that predicted the token


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledVectors:
    """Pooled vectors: row r's is `values[starts[r]:starts[r + 1]]`, empty within a prompt."""

    starts: Ints  # (R + 1,)
    values: Floats  # (starts[R],)


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The result of a step. Row r accepted `token_ids[starts[r]:starts[r + 1]]`.

    Attributes:
        computed: Leading tokens of a row whose keys and values are valid now: of a verify row as
            many as it accepted. 0 of a row that failed, and of no other.
        plan: The plan as it was computed, if it had placeholders of drafts, or rows that follow.
        times: Where the aligned tokens of a prompt begin, in tokens of the encoder.
    """

    step: int
    starts: Ints  # (R + 1,)
    token_ids: Ints  # (S,)
    status: Ints  # (R,)
    computed: Ints  # (R,)
    details: LogprobsBatch | None = None
    vectors: PooledVectors | None = None
    times: PooledVectors | None = None
    plan: StepPlan | None = None


class Sampled(NamedTuple):
    """What the logits of a plan gave.

    Attributes:
        tokens: (L,) sampled from them.
        blocked: (L,) those that have no token to sample; None: all have one.
        failed: (R,) rows that are not finite; None: all are.
    """

    tokens: Ints
    blocked: Flags | None = None
    failed: Flags | None = None


class DeviceLost(Exception):
    """The device computes nothing any more: the process ends, and is started anew."""


class PlanRunner(Protocol):
    """Computes plans, one at a time and in order.

    It never reads beyond a row's `kv_len`, zeroes the pages of a row that it reports as not finite,
    and samples the same token for the same row whatever else is in the plan. The writes of a plan
    depend on the plan alone, so that a failed plan can be run again in parts. A plan may hold
    tokens that the one before it has yet to sample (`future`).
    """

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        """Compute a plan and return its outcome.

        `part` waits for the sampling part of a plan without one; it is called once, when the
        logits are computed.

        An exception is attributed to one request of the plan: the others are run again without it.

        Raises:
            DeviceLost: No plan can be computed any more.
        """
        ...

    def make_drafts(self) -> Ints:
        """Make the drafts that the last plan asks for, and keep them for the next ones.

        Called after each plan with `draft_counts`  ->  (R, K), of each row as many as it gets

        If it fails, the drafts kept for the next plans are token 0.
        """
        ...


class Flight(Protocol):
    """A launched plan. Belongs to the thread that launched it."""

    def sample(self, part: SamplingPart) -> None:
        """Give the sampling part of a plan without one, once."""
        ...

    def outcome(self) -> StepOutcome:
        """Wait for the outcome, once; raises what the plan raised."""
        ...

    def drafts(self) -> Ints:
        """Wait for the drafts that were made after the outcome, (R, K); token 0 if that failed.

        Raises:
            DeviceLost: No plan can be computed any more.
        """
        ...


class Launcher(Protocol):
    """Starts plans, which are computed in the order in which they are launched."""

    @property
    def thread(self) -> Thread | None:
        """A thread of its own, in which plans are computed, while there is one."""
        ...

    @property
    def draft_failures(self) -> int:
        """How often drafting has failed."""
        ...

    def launch(self, plan: StepPlan) -> Flight:
        """Start a plan, and return at once."""
        ...

    def wait(self) -> None:
        """Wait for the drafts after the last plan, whose outcome was read."""
        ...

    def close(self) -> None:
        """End a thread of its own after the launched plans, whose outcomes were read."""
        ...
