"""The neighbours of a worker, what they ask of it, and plans and reports of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tests.support.services import process

from antiphon.model_worker.batching.loop import StepReport
from antiphon.model_worker.batching.plan import SamplingColumns, StepPlan
from antiphon.model_worker.batching.running_batch import Capacity
from antiphon.model_worker.batching.state import EngineLimits, Finish, RequestState
from antiphon.model_worker.cache.groups import CacheGroup, GroupKind
from antiphon.wire.base import Attempt, Term
from antiphon.wire.codec import pack_ids
from antiphon.wire.command import Admit, ChoiceOutput
from antiphon.wire.digests import split_digests
from antiphon.wire.ids import RequestId
from antiphon.wire.kv_events import BlocksRemoved, BlocksStored
from antiphon.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from antiphon.wire.errors import ErrorReply

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
        "steps": True,
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
        page_bytes=1,
        page_tokens=page_tokens,
        pages_total=pages,
        window=window,
    )


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
        pages_promised=0,
        pages_returning=0,
        slots_free=0,
    )
    whole = {"progress": (), "running": 1, "waiting": 0, "retractions": 0, **fields}
    return StepReport(step=step, credit=capacity, **whole)


def error_of(finish: Finish | None) -> ErrorReply:
    assert finish is not None
    assert finish.error is not None
    return finish.error


def decode_plan(rows: int, new: int, kv: int, page_tokens: int = 16) -> StepPlan:
    """Return a greedy step of `new` tokens a row, up to `kv`; its pages lie in no order."""
    random = np.random.default_rng(0)
    each = -(-kv // page_tokens)
    table = random.permutation(rows * each).astype(np.int32).reshape(rows, each)
    every = np.ones(rows, np.int32)
    ends = np.cumsum(every * new, dtype=np.int32)
    positions = np.tile(np.arange(kv - new, kv, dtype=np.int32), rows)
    return StepPlan(
        step=1,
        slot=np.arange(rows, dtype=np.int32),
        query_start=ends - new,
        query_len=every * new,
        kv_len=every * kv,
        adapter=-every,
        tokens=random.integers(0, VOCABULARY, rows * new).astype(np.int32),
        positions=positions[np.newaxis],
        logit_tokens=ends - 1,
        sampling=SamplingColumns(
            temperature=np.zeros(rows, np.float32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            seed=np.zeros(rows, np.int64),
            choice=np.zeros(rows, np.int32),
        ),
        page_tables=(table,),
    )


def blocks_stored(parent: bytes, blocks: Iterable[bytes]) -> BlocksStored:
    return BlocksStored(parent=parent, digests=b"".join(blocks))


def blocks_removed(blocks: Iterable[bytes]) -> BlocksRemoved:
    return BlocksRemoved(digests=b"".join(blocks))


def blocks_of(event: BlocksStored | BlocksRemoved) -> list[bytes]:
    return list(split_digests(event.digests))
