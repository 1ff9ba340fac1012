"""Collectives over shared memory: sums in the order of ranks, in pieces, and their end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from antiphon.model_worker.ranks import shared_memory
from antiphon.model_worker.ranks.layout import RankLayout
from antiphon.model_worker.ranks.shared_memory import (
    MemoryParts,
    RanksEnded,
    SharedMemoryGroup,
    SharedMemoryLink,
    attach,
    create,
    is_supported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

pytestmark = pytest.mark.skipif(not is_supported(), reason="no memory is shared here")


def groups(ranks: int) -> list[SharedMemoryGroup]:
    parts = MemoryParts(RankLayout(tp=ranks))
    memory, path = create(parts)
    others = (attach(path) for _ in range(1, ranks))
    return [
        SharedMemoryGroup(rank, each, parts.tensors[0])
        for rank, each in enumerate([memory, *others])
    ]


def on_all(
    ranks: Sequence[SharedMemoryGroup], call: Callable[[SharedMemoryGroup], Tensor]
) -> list[Tensor]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(call, ranks))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (3, 500), (0, 8)])
def test_sums_are_those_of_all_ranks_in_their_order(
    ranks: int, dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", 1024)  # several pieces of the longer tensor
    group = groups(ranks)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        parts = [torch.randn(shape, generator=generator).to(dtype) for _ in range(ranks)]
        expected = parts[0] + parts[1]
        for other in parts[2:]:
            expected = expected + other
        for found in on_all(group, lambda rank, p=parts: rank.all_reduce(p[rank.rank].clone())):
            assert torch.equal(found, expected)
        for found in on_all(group, lambda rank, p=parts: rank.all_gather(p[rank.rank])):
            assert torch.equal(found, torch.cat(parts, dim=-1))


def test_a_rank_that_waits_for_one_that_has_ended_can_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "YIELD_S", 0.0)
    first, _ = groups(2)
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        first.all_reduce(torch.zeros(4))

    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(wait)
        waiting.wait()
        first.abort()
        with pytest.raises(RanksEnded):
            ended.result(10)


def test_what_one_stage_sends_the_next_receives_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", 1024)
    parts = MemoryParts(RankLayout(tp=2, pp=3))
    memory, path = create(parts)
    assert sorted(parts.links) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    part = parts.links[1, 0]
    sender, receiver = (SharedMemoryLink(each, part, 6) for each in (memory, attach(path)))
    generator = torch.Generator().manual_seed(1)
    sent = [torch.randn(rows, 100, generator=generator) for rows in (1, 9, 0, 3) * 5]

    def send() -> None:
        for x in sent:
            sender.send(x)

    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send)
        for x in sent:
            out = torch.empty_like(x)
            receiver.receive(out)
            assert torch.equal(out, x)
        sending.result(10)
