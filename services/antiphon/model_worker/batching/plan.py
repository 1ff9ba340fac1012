"""A step as data: the plan that every rank executes, and the outcome that the loop commits.

The plan is a rank's only input. It is flat int32 arrays, so that a broadcast is a few copies and
a recorded plan can be replayed offline. The outcome is ragged: a row may accept several tokens
(speculation), one, or none (a prefill chunk), and the loop never assumes one.

Axes: R rows, T tokens of all rows, A position axes (3 for M-RoPE, else 1), L rows of logits,
N pages of the longest row, S accepted tokens of all rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]


def future(slot: int) -> int:
    """A token that is not known on the host yet: what `slot` sampled in the step before.

    Negative, so that it is never a token id; the rank reads it from its own last result.
    """
    return -1 - slot


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """How each row's token is drawn; entry r belongs to row r.

    `top_k` 0 keeps the whole vocabulary; `temperature` 0 is greedy.
    """

    temperature: Floats  # (R,)
    top_p: Floats  # (R,)
    min_p: Floats  # (R,)
    top_k: Ints  # (R,)
    seed: Longs  # (R,)
    choice: Ints  # (R,)

    def of(self, rows: Ints) -> SamplingColumns:
        """The columns of these rows, in this order."""
        return SamplingColumns(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            top_k=self.top_k[rows],
            seed=self.seed[rows],
            choice=self.choice[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """What lowers tokens that a row has drawn before; rows that draw in this plan.

    The rank counts drawn tokens by slot: `begun` are the slots whose count begins anew with the
    outputs given here, because their request has just got them. A plan that is run again says the
    same again.

    Axes: P penalised rows, B slots that begin.
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
    """Numbers added to single logits; -inf forbids a token. A pair of row and token comes once."""

    rows: Ints  # (B,) rising
    token_ids: Ints  # (B,)
    values: Floats  # (B,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsRequest:
    """Which rows tell more of their tokens than ids, and of which prompt tokens.

    Axes: D rows that tell, Q prompt tokens to score, M ids named by all rows.

    Attributes:
        rows: (D,) rising; what a row draws is told of after its prompt tokens.
        logprobs: (D,) whether log-probabilities are told, the drawn token's and those below.
        top: (D,) how many of the likeliest tokens are told.
        named_starts: (D + 1,) the ids of `named_ids` whose log-probabilities are told, a row.
        named_ids: (M,)
        hidden: (D,) whether the hidden state before each token is told.
        prompt_tokens: (Q,) indices into the plan's `tokens`, rising: what follows them is scored,
            by plain softmax.
        prompt_targets: (Q,) the ids that do follow; -1 where the prompt ends.
    """

    rows: Ints
    logprobs: NDArray[np.bool_]
    top: Ints
    named_starts: Ints
    named_ids: Ints
    hidden: NDArray[np.bool_]
    prompt_tokens: Ints
    prompt_targets: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest:
    """How the rows of a model that draws no tokens become vectors; entry r belongs to row r.

    Attributes:
        ends: (R,) whether a row's prompt ends with it, so that its vector is told.
        dimensions: (R,) how many of the vector's numbers are told; 0 tells all.
    """

    ends: NDArray[np.bool_]
    dimensions: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMove:
    """Bring a page of a cache group in before the step, or put it out after."""

    group: int
    page: int
    handle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Splice:
    """Take the embeddings of tokens [start, start + length) of this plan from a buffer."""

    start: int
    length: int
    handle: str


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One forward pass.

    A struct, as all that each step makes anew: a dataclass of so many fields takes longer to make
    than what is in them.

    Attributes:
        step: Grows by one; a rank refuses a gap.
        slot: The request slot of each row, fixed while a choice runs.
        query_start: Index of a row's first token in `tokens`.
        query_len: Tokens of a row in this pass: decode 1, verify k + 1, a prefill chunk n.
        kv_len: Tokens that the row's last query attends to, itself included.
        adapter: Index of the row's adapter, -1 without one.
        tokens: Token ids, or `future(slot)`.
        positions: Of each token, an axis a row.
        logit_tokens: Indices into `tokens` after which a token is drawn; any number a row.
        penalties: For the rows that have any. What follows is None where no row needs it.
        token_masks: (G, ceil(V / 32)) bit i % 32 of word i // 32 says whether token i may be drawn.
        token_mask_rows: (G,) the row of each mask, rising; rows that draw in this plan.
        biases: Added after the masks.
        details: What is told of the tokens beside their ids.
        pooling: How rows become vectors; none of them draws then.
        page_tables: (R, N) a cache group, -1 beyond a row's pages. Token p of a row lies in page
            `table[r, p // page_tokens]` at `p % page_tokens`; the pass writes its own there first.
            Of a group of states (R, 2): where the state lies that a row goes on from, -1 if it is
            zero, and where the one after its last token goes, which is another place.
        tree_mask: For tree verification: (T, T), which tokens of the pass see which.
        follows: Each row has one token and draws one, and is the row at the same place in the plan
            before, one token further, as are its slot, its sampling and all other columns: only
            tokens, positions, kv_len and page tables differ, and these only by pages that were
            added or that no query sees any more. A runner may go on from what it kept of that
            plan, or pass this over: the outcome is the same.
        release_fence: Pages released by this plan may be reused by plans after this step.
    """

    step: int
    microbatch: int = 0
    slot: Ints  # (R,)
    query_start: Ints  # (R,)
    query_len: Ints  # (R,)
    kv_len: Ints  # (R,)
    adapter: Ints  # (R,)
    tokens: Ints  # (T,)
    positions: Ints  # (A, T)
    logit_tokens: Ints  # (L,)
    sampling: SamplingColumns
    page_tables: tuple[Ints, ...]
    penalties: Penalties | None = None
    token_masks: Ints | None = None
    token_mask_rows: Ints | None = None
    biases: Biases | None = None
    details: LogprobsRequest | None = None
    pooling: PoolingRequest | None = None
    tree_mask: NDArray[np.bool_] | None = None
    token_types: Ints | None = None  # (T,) of models that learn types; None: all are of type 0
    splices: tuple[Splice, ...] = ()
    loads: tuple[PageMove, ...] = ()
    saves: tuple[PageMove, ...] = ()
    release_fence: int = 0
    follows: bool = False


class RowStatus(IntEnum):
    """What became of a row."""

    OK = 0
    NON_FINITE = 1
    """Its logits held a NaN or infinity; the request ends with an error, the batch goes on."""
    NO_TOKEN = 2
    """Masks and biases forbade every token; the request ends with an error, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsBatch:
    """What is told of tokens: of a row's prompt tokens first, then of those that it accepted.

    Axes: K tokens of all rows, N the widest top, M the most named ids of a row, H hidden size. A
    row that asked for fewer fills the first columns. NaN where a row did not ask, or nothing is
    known.

    Attributes:
        starts: (R + 1,) row r's are [starts[r], starts[r + 1]).
        token_ids: (K,) -1 behind a prompt after which nothing is drawn.
        logprobs: (K,) after penalties, masks, biases and temperature; greedy rows have
            temperature 1.
        top_ids: (K, N) the likeliest first.
        top_logprobs: (K, N)
        named_logprobs: (K, M)
        hidden: (K, H) float32, the normalised last hidden state that the token followed from.
    """

    starts: Ints
    token_ids: Ints
    logprobs: Floats
    top_ids: Ints
    top_logprobs: Floats
    named_logprobs: Floats
    hidden: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledVectors:
    """What prompts became: row r's is `values[starts[r]:starts[r + 1]]`; empty in mid-prompt."""

    starts: Ints  # (R + 1,)
    values: Floats  # (starts[R],)


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a pass produced. Row r accepted `token_ids[starts[r]:starts[r + 1]]`."""

    step: int
    starts: Ints  # (R + 1,)
    token_ids: Ints  # (S,)
    status: Ints  # (R,)
    details: LogprobsBatch | None = None
    vectors: PooledVectors | None = None
    drafts: Ints | None = None  # (R, k)
