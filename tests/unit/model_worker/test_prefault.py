"""Memory of pools is touched while the loop is idle, and only pages that no request has had."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec
import torch
from tests.simulation.batching_world import World
from tests.support.worker import state

from antiphon.model_worker.batching.flights import InTurn
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mailbox
from antiphon.model_worker.batching.state import ChoiceKey
from antiphon.model_worker.cache.groups import CacheGroup, CacheTensor, GroupKind
from antiphon.model_worker.cache.pool import PagePool
from antiphon.model_worker.runner import prefault
from antiphon.model_worker.runner.pools import GroupMemory
from antiphon.model_worker.runner.prefault import Prefault
from antiphon.wire.command import PauseMode, PauseWorker

if TYPE_CHECKING:
    import pytest

GROUP = CacheGroup(
    kind=GroupKind.FULL,
    layers=(0, 1, 2),
    tensors=(
        CacheTensor(name="keys", dtype="bfloat16", shape=(2, 8)),
        CacheTensor(name="scales", dtype="float32", shape=(2,)),
    ),
    page_tokens=16,
    pages_total=40,
)
WRITTEN = 7
"""What every byte holds, as if it had been written: who touches a page zeroes it."""


class Touched:
    """A pool whose memory shows which pages were touched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ahead_pages: int, piece_pages: int) -> None:
        largest = GROUP.page_bytes // len(GROUP.layers) * 32 // 40
        monkeypatch.setattr(prefault, "AHEAD_BYTES", ahead_pages * GROUP.page_bytes)
        monkeypatch.setattr(prefault, "PIECE_BYTES", piece_pages * largest)
        self.pool = PagePool(GROUP.pages_total)
        self.memory = GroupMemory(GROUP, torch.device("cpu"))
        self.memory.data.fill_(WRITTEN)
        self.prefault = Prefault([(self.pool, self.memory)])

    def touch_all(self) -> int:
        pieces = 0
        while self.prefault.touch():
            pieces += 1
        return pieces

    @property
    def pages(self) -> list[int]:
        """Those that were touched, in every layer of every tensor or in none."""
        layers = [tensor[layer] for tensor in self.memory.tensors for layer in GROUP.layers]
        zeroed = torch.stack([(layer == 0).all(dim=1) for layer in layers])
        kept = torch.stack([(layer == WRITTEN).all(dim=1) for layer in layers])
        assert bool((zeroed.all(dim=0) | kept.all(dim=0)).all()), "pages are touched in some layers"
        return zeroed.all(dim=0).nonzero().flatten().tolist()


def test_unused_pool_is_touched_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    touched = Touched(monkeypatch, ahead_pages=5, piece_pages=2)
    pieces = touched.touch_all()
    assert touched.pages == [0, 1, 2, 3, 4]
    assert pieces == 3 * 6  # of 2, 2 and 1 pages, in three layers of two tensors
    assert not touched.prefault.touch()


def test_pages_with_a_request_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    touched = Touched(monkeypatch, ahead_pages=2, piece_pages=3)
    had = touched.pool.allocate(6)
    touched.touch_all()
    assert touched.pages == list(range(6, 24))  # four times as far as it was used
    touched.pool.launched(1)
    touched.pool.release(had)
    touched.pool.finished(1)
    assert touched.touch_all() == 0  # what is free again was written before
    assert touched.pool.allocate(8)[-2:] == [6, 7]
    touched.touch_all()
    assert touched.pages == list(range(6, 32))


def test_pool_that_is_full_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    touched = Touched(monkeypatch, ahead_pages=2, piece_pages=2)
    touched.pool.allocate(39)
    touched.touch_all()
    assert touched.pages == [39]
    touched.pool.allocate(1)
    assert touched.touch_all() == 0


def test_pages_allocated_between_two_pieces_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    touched = Touched(monkeypatch, ahead_pages=4, piece_pages=4)
    assert touched.prefault.touch()
    had = touched.pool.allocate(3)
    touched.memory.data.fill_(WRITTEN)  # as their requests write them
    touched.touch_all()
    assert not set(had) & set(touched.pages)
    assert touched.pages == list(range(3, 12))


def test_group_without_layers_has_nothing_to_touch() -> None:
    group = msgspec.structs.replace(GROUP, layers=())
    memory = GroupMemory(group, torch.device("cpu"))
    assert not Prefault([(PagePool(group.pages_total), memory)]).touch()


def test_an_idle_loop_prepares_until_mail_arrives() -> None:
    world, box = World(1, queue_timeout_s=None, running_timeout_s=None), Mailbox(2)
    reports: list[StepReport] = []
    prepared: list[bool] = []

    def prepare() -> bool:
        prepared.append(world.batching.idle)
        if len(prepared) == 3:
            box.run(ChoiceKey(0), state([5, 6, 7], max_new_tokens=4, ignore_eos=True))
        if len(prepared) == 5:
            box.close()
        return True

    launcher = InTurn(world.runner)
    loop = BatchingLoop(world.batching, launcher, box, reports.append, prepare=prepare)
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join(timeout=20.0)
    assert not thread.is_alive()
    assert prepared == [True] * 5
    assert sum(report.rows for report in reports) == 4


def test_a_request_times_out_though_there_is_always_something_to_prepare() -> None:
    world, box = World(1, queue_timeout_s=5.0, running_timeout_s=None), Mailbox(2)
    reports: list[StepReport] = []
    clock = [0.0]

    def prepare() -> bool:
        clock[0] += 1.0
        if clock[0] == 20.0:
            box.close()
        return True

    box.submit_command(PauseWorker(mode=PauseMode.IN_PLACE))
    box.run(ChoiceKey(0), state([5, 6, 7], max_new_tokens=4, ignore_eos=True))
    launcher = InTurn(world.runner)
    loop = BatchingLoop(
        *(world.batching, launcher, box, reports.append),
        clock=lambda: clock[0],
        prepare=prepare,
    )
    loop.run()
    assert clock == [20.0]
    assert [report.paused for report in reports if report.progress] == [True]
    assert world.batching.idle
