"""The neighbours of a worker, what they ask of it, and plans and reports of its steps."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.support.services import process

from antiphon.model_worker.batching.loop import StepReport
from antiphon.model_worker.batching.page_budget import Capacity
from antiphon.model_worker.batching.plan import (
    PLAIN,
    Penalties,
    SamplingColumns,
    SamplingPart,
    StepPlan,
)
from antiphon.model_worker.batching.state import (
    ChoiceKey,
    CoreTotals,
    EngineLimits,
    Finish,
    Progress,
    RequestState,
    SampledTokens,
)
from antiphon.model_worker.batching.token_store import TokenStore
from antiphon.model_worker.cache.groups import CacheGroup, GroupKind
from antiphon.wire.base import Attempt, Term
from antiphon.wire.codec import pack_ids, unpack_ids, unpack_numbers
from antiphon.wire.command import Admit, ChoiceOutput
from antiphon.wire.digests import split_digests
from antiphon.wire.ids import RequestId
from antiphon.wire.kv_events import BlocksRemoved, BlocksStored
from antiphon.wire.sampling import SamplingParams
from antiphon.wire.token_outputs import TokenOutputs, pack_floats, unpack_floats
from antiphon.wire.tokens import TokenRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.token_store import OutputIds
    from antiphon.model_worker.cache.events import EventLog
    from antiphon.model_worker.cache.pages import PageTable
    from antiphon.model_worker.grammar.matcher import GrammarMatcher
    from antiphon.wire.errors import ErrorReply
    from antiphon.wire.tokens import TokenBatch, TokenColumns, TokenStream

DEADLINE = 60_000
VOCABULARY = 8192
"""Of the models that the benchmarks serve."""


WORKER, DETOKENIZER, GATEWAY = process("worker"), process("detokenizer"), process("gateway")
LEADER = Term(number=1, scheduler=process("scheduler"))


def attempt(n: int = 1, term: Term = LEADER) -> Attempt:
    return Attempt(term=term, n=n)


def admit(request_id: str = "r", n: int = 1, choices: int = 1, **fields: Any) -> Admit:
    """An attempt at a request of three tokens for eight more."""
    whole: dict[str, Any] = {
        "request_id": RequestId(request_id),
        "owner": GATEWAY,
        "attempt": attempt(n),
        "detokenizer": DETOKENIZER.instance,
        "prompt_ids": pack_ids([1, 2, 3]),
        "choices": tuple(ChoiceOutput(choice=i) for i in range(choices)),
        "sampling": SamplingParams(max_new_tokens=8),
        "columns": True,
        "deadline_unix_ms": DEADLINE,
    }
    return Admit(**whole | fields)


def state(prompt: int | Sequence[int] = 3, **said: Any) -> RequestState:
    """A request of so many tokens, or of these; the rest is state or sampling by its name."""
    ids = range(10, 10 + prompt) if isinstance(prompt, int) else prompt
    fields = {name: said.pop(name) for name in list(said) if name in RequestState.__struct_fields__}
    params: dict[str, Any] = {"max_new_tokens": 8} | said
    whole: dict[str, Any] = {
        "request_id": RequestId("r"),
        "choice": 0,
        "prompt_ids": pack_ids(ids),
        "sampling": SamplingParams(**params),
        "deadline_unix_ms": 0,
    }
    return RequestState(**whole | fields)


def page_group(
    pages: int, kind: GroupKind = GroupKind.FULL, window: int | None = None, page_tokens: int = 4
) -> CacheGroup:
    """A group of so many pages."""
    return CacheGroup(
        kind=kind,
        layers=(0,),
        tensors=(),
        page_tokens=page_tokens,
        pages_total=pages,
        window=window,
    )


def compute(table: PageTable, end: int) -> None:
    """A row up to token `end` is launched and committed."""
    table.allocate(end)
    for group in table.chains:
        launch(table, group)
    commit(table, end)


def launch(table: PageTable, group: int, writes: int = 1) -> list[int]:
    """A row that writes so many states is launched; the one that it reads, and these."""
    (states,) = table.chains[group].launch(np.array([table.slot], np.int32), np.array([writes]))
    return states.tolist()


def commit(table: PageTable, end: int) -> None:
    """The first launched row is committed: it was computed up to token `end`."""
    for chains in table.chains.values():
        chains.commit(np.array([table.slot], np.int32))
    table.commit(end)


def limits(**changes: Any) -> EngineLimits:
    """Four requests of at most 40 tokens, in steps of 16."""
    whole: dict[str, Any] = {
        "step_tokens_max": 16,
        "chunk_tokens": 8,
        "running_max": 4,
        "context_tokens": 40,
        "vocab_size": 100,
        "end_ids": frozenset({9}),
        "weights_digest": "w",
    }
    return EngineLimits(**whole | changes)


def report(step: int = 1, *, pages_free: int = 0, pages_evictable: int = 0, **fields: Any):
    """The report of a step of one running request, after which so many pages are left."""
    capacity = Capacity(
        pages_free=pages_free,
        pages_evictable=pages_evictable,
        pages_reserved=0,
        pages_returning=0,
        slots_free=0,
    )
    names = CoreTotals.__struct_fields__
    totals = {name: fields.pop(name) for name in names if name in fields}
    totals, fields = {"running": 1, "waiting": 0, **totals}, {"progress": (), **fields}
    return StepReport(step=step, capacity=capacity, totals=CoreTotals(**totals), **fields)


def plain_runs(
    states: Mapping[ChoiceKey, RequestState] | Iterable[tuple[ChoiceKey, RequestState]],
) -> dict[ChoiceKey, tuple[RequestState, GrammarMatcher | None]]:
    """The `Mail.runs` of choices without a grammar."""
    return {key: (state, None) for key, state in dict(states).items()}


class FakeEngine:
    """Reports tokens as an engine core does: their ids are in its store."""

    def __init__(self) -> None:
        self.store = TokenStore()
        self._outputs: dict[int, OutputIds] = {}
        self._lengths: dict[int, int] = {}
        self._slots: dict[int, int] = {}

    def begin(self, key: int, ids: Sequence[int] = ()) -> None:
        """A choice whose first outputs came from another attempt."""
        self._outputs[key] = self.store.open(np.array(ids, np.int32))
        self._lengths[key] = len(ids)

    def outputs(self, key: int) -> OutputIds:
        return self._outputs[key]

    def progress(
        self,
        key: int,
        ids: Sequence[int] = (),
        finish: Finish | None = None,
        *,
        logprobs: Sequence[float] | None = None,
        **fields: Any,
    ) -> Progress:
        """These tokens of one choice. It has the first free slot, or the given one."""
        if key not in self._outputs:
            self.begin(key)
        start = self._lengths[key]
        for at, token in enumerate(ids):
            self._append(key, token, None if logprobs is None else logprobs[at])
        free = next(slot for slot in itertools.count() if slot not in self._slots.values())
        slot = self._slots[key] = fields.pop("slot", self._slots.get(key, free))
        if finish is not None:
            self.retract(key)
        return Progress(
            key=ChoiceKey(key),
            slot=slot,
            outputs=self._outputs[key],
            start=start,
            end=self._lengths[key],
            finish=finish,
            **fields,
        )

    def sampled(
        self, tokens: Mapping[int, int], logprobs: Mapping[int, float] | None = None
    ) -> SampledTokens:
        """One token of each of these choices."""
        offsets = [self._lengths[key] for key in tokens]
        values = None if logprobs is None else [logprobs.get(key, math.nan) for key in tokens]
        for at, (key, token) in enumerate(tokens.items()):
            self._append(key, token, None if values is None else values[at])
        return SampledTokens(
            slots=np.array([self._slots[key] for key in tokens], np.int32),
            keys=np.array([*tokens], np.int64),
            offsets=np.array(offsets, np.int32),
            ids=np.array([*tokens.values()], np.int32),
            logprobs=None if values is None else np.array(values, np.float32),
        )

    def retract(self, key: int) -> None:
        """It loses its slot."""
        self._slots.pop(key, None)

    def _append(self, key: int, token: int, logprob: float | None) -> None:
        outputs, length = self._outputs[key], self._lengths[key]
        values = None if logprob is None else np.array([logprob], np.float32)
        outputs.write(length, ints(token), values)
        self._lengths[key] = length + 1


def chunks_used(store: TokenStore) -> int:
    """How many chunks hold ids of choices."""
    return len(store.ids) - len(store._free)


class ColumnReader:
    """Expands what one worker sends one detokenizer to rows."""

    def __init__(self) -> None:
        self.plain_count = 0  # rows that came in columns
        self._streams: dict[RequestId, TokenStream] = {}
        self._rows: dict[int, TokenRow] = {}  # the last one with a stream number

    def knows(self, columns: TokenColumns) -> bool:
        """Whether rows have introduced all of its streams."""
        rows = [self._rows.get(number) for number in unpack_numbers(columns.streams)]
        return all(row is not None and row.request_id in self._streams for row in rows)

    def rows(self, batch: TokenBatch) -> list[TokenRow]:
        rows: list[TokenRow] = []
        if (columns := batch.columns) is not None:
            lists = (unpack_numbers(columns.streams), unpack_ids(columns.offsets))
            logprobs = [*unpack_floats(columns.logprobs), *[None] * len(columns)]
            tokens = zip(*lists, unpack_ids(columns.token_ids), logprobs, strict=False)
            rows += [self._plain(*token) for token in tokens]
            self.plain_count += len(rows)
        for row in batch.rows:
            if row.stream is not None:
                self._streams[row.request_id] = row.stream
            if row.stream_number is not None:
                self._rows[row.stream_number] = row
        return [*rows, *batch.rows]

    def _plain(self, number: int, offset: int, token: int, logprob: float | None) -> TokenRow:
        row, ids = self._rows[number], pack_ids([token])
        outputs = None
        if self._streams[row.request_id].details_from is not None:
            values = b"" if logprob is None else pack_floats([logprob])
            outputs = TokenOutputs(count=1, token_ids=ids, logprobs=values)
        return TokenRow(
            request_id=row.request_id,
            choice=row.choice,
            attempt=row.attempt,
            offset=offset,
            token_ids=ids,
            details=outputs,
        )


def error_of(finish: Finish | None) -> ErrorReply:
    assert finish is not None
    assert finish.error is not None
    return finish.error


def decode_plan(rows: int, new: int, kv: int, page_tokens: int = 16) -> StepPlan:
    """Return a greedy step of `new` tokens a row, up to `kv`; its pages lie in no order."""
    random = np.random.default_rng(0)
    each = -(-kv // page_tokens)
    table = random.permutation(rows * each).astype(np.int32).reshape(rows, each)
    return step_plan(
        [new] * rows,
        kv_len=np.full(rows, kv, np.int32),
        tokens=random.integers(0, VOCABULARY, rows * new).astype(np.int32),
        page_tables=(table,),
    )


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def step_plan(query_len: Sequence[int], **fields: Any) -> StepPlan:
    """A greedy plan of whole prompts of so many tokens, all zero and without pages.

    Fields of the sampling part are given like those of the plan.
    """
    rows, lengths = len(query_len), np.array(query_len, np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    whole: dict[str, Any] = {
        "step": 1,
        "slot": np.arange(rows, dtype=np.int32),
        "query_start": ends - lengths,
        "query_len": lengths,
        "kv_len": lengths,
        "tokens": np.zeros(ends[-1], np.int32),
        "logit_tokens": ends - 1,
        "sampling": sampling_columns(rows),
        "page_tables": (),
    }
    part = {name: fields.pop(name) for name in SamplingPart.__struct_fields__ if name in fields}
    return StepPlan(**whole | fields, part=SamplingPart(**part) if part else PLAIN)


def sampling_columns(rows: int, **values: Any) -> SamplingColumns:
    """Greedy rows; `values` are one of all rows, or one a row."""
    kinds = {"top_k": np.int32, "choice": np.int32, "seed": np.int64}
    whole: dict[str, Any] = {
        **dict.fromkeys(("temperature", "min_p", *kinds), 0),
        "top_p": 1,
        **values,
    }
    columns = {n: np.full(rows, value, kinds.get(n, np.float32)) for n, value in whole.items()}
    return SamplingColumns(**columns)


def penalties(
    rows: int,
    begun: Mapping[int, Sequence[int]],
    *,
    frequency: float,
    presence: float,
    repetition: float,
) -> Penalties:
    """Penalties of the first `rows` rows; `begun` are the outputs of slots that begin to count."""
    factors = {"frequency": frequency, "presence": presence, "repetition": repetition}
    return Penalties(
        rows=np.arange(rows, dtype=np.int32),
        **{name: np.full(rows, factor, np.float32) for name, factor in factors.items()},
        begun=np.array(list(begun), np.int32),
        begun_starts=np.cumsum([0, *map(len, begun.values())], dtype=np.int32),
        begun_ids=np.array([token for ids in begun.values() for token in ids], np.int32),
    )


def blocks_stored(parent: bytes, blocks: Iterable[bytes]) -> BlocksStored:
    return BlocksStored(parent=parent, digests=b"".join(blocks))


def blocks_removed(blocks: Iterable[bytes]) -> BlocksRemoved:
    return BlocksRemoved(digests=b"".join(blocks))


def blocks_of(event: BlocksStored | BlocksRemoved) -> list[bytes]:
    return list(split_digests(event.digests))


def blocks_present(log: EventLog) -> list[bytes]:
    """The blocks that a subscriber is told of when it asks for all of them."""
    _clear, *stored = log.replay(after=-1)
    return [
        block for event in stored if isinstance(event, BlocksStored) for block in blocks_of(event)
    ]
