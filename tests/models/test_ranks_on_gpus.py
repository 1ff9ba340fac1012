"""Ranks on GPUs, as far as they need none: see also `tests/kernels/interpreted/ranks.py`."""

from __future__ import annotations

import socket
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from tests.models.rank import HOST
from tests.support.models import plan, with_draft_model
from tests.support.worker import decode_plan, ints, limits, page_group

from antiphon import embedded
from antiphon.config.parallel import ParallelConfig
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.flights import InStream
from antiphon.model_worker.batching.plan import DeviceLost, Sampled, SamplingPart, StepOutcome
from antiphon.model_worker.batching.plan_buffer import pack
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.ranks import groups
from antiphon.model_worker.ranks.groups import RankGroups, TensorGroup
from antiphon.model_worker.ranks.layout import RankLayout, devices_of
from antiphon.model_worker.ranks.protocol import FollowerRank, LeadRank, RankMessage
from antiphon.model_worker.startup.engine import Engine
from antiphon.model_worker.startup.gpu import find_gpu
from antiphon.service.startup import CannotStart

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.plan import Ints, Longs, StepPlan
    from antiphon.model_worker.runner.model_runner import SampleExchange

LAYOUT = RankLayout(tp=2)


class Options:
    """Of torch's `ProcessGroupNCCL`."""

    _timeout = timedelta()


class NcclGroups:
    """Stands for torch's class of NCCL groups; each is one of gloo."""

    Options = Options

    def __init__(self) -> None:
        self.opened = list[tuple[int, int, timedelta]]()

    def __call__(self, store: object, rank: int, ranks: int, options: Options) -> Any:
        self.opened.append((rank, ranks, options._timeout))
        return groups._gloo(store, rank, ranks, HOST)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> NcclGroups:
    """NCCL, on GPUs whose tensors are those of the CPU."""
    fake = NcclGroups()
    monkeypatch.setattr(groups.dist, "ProcessGroupNCCL", fake, raising=False)
    connect: Callable[[Any, str], Any] = groups._connect
    monkeypatch.setattr(groups, "_connect", lambda group, _: connect(group, "cpu"))
    return fake


@pytest.mark.parametrize("local", [True, False])
def test_ranks_on_gpus_sum_by_nccl_and_agree_by_the_cpu(nccl: NcclGroups, local: bool) -> None:
    listening = socket.create_server((HOST, 0))
    store = HOST, listening.getsockname()[1]
    devices = devices_of(ParallelConfig(tp_size=2), "cuda:1")
    with ThreadPoolExecutor(1) as executor:
        joined = executor.submit(RankGroups.open, 1, LAYOUT, store)
        first = RankGroups.open(0, LAYOUT, store, listening=listening, local=local, devices=devices)
        other = joined.result()
        assert sorted(nccl.opened) == [(rank, 2, timedelta(seconds=120)) for rank in range(2)]
        assert (first.device, other.device) == ("cuda:1", "cuda:2")
        x = torch.arange(6.0).view(2, 3)
        summed = executor.submit(other.tensor.all_reduce, 10 * x)
        assert torch.equal(first.tensor.all_reduce(x.clone()), 11 * x)
        assert torch.equal(summed.result(), 11 * x)
        gathered = executor.submit(other.tensor.all_gather, -x)
        assert torch.equal(first.tensor.all_gather(x), torch.cat([x, -x], dim=-1))
        gathered.result()
        assert not first.tensor.invariant
        most = executor.submit(other.channel.max, torch.tensor([1, 7]).numpy())
        assert first.channel.max(torch.tensor([5, 2]).numpy()).tolist() == [5, 7]
        assert most.result().tolist() == [5, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_in_order_add_what_they_gather(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of them: the order of two additions shows, and where gloo cuts a tensor, too."""
    monkeypatch.setattr(groups, "GATHERED_BYTES", 512)  # several pieces of the longer tensors
    store, ranks = groups.dist.HashStore(), range(3)
    generator = torch.Generator().manual_seed(1)
    with ThreadPoolExecutor(len(ranks)) as threads:
        opened = threads.map(lambda rank: groups._gloo(store, rank, len(ranks), HOST), ranks)
        ordered = [TensorGroup(group).in_order() for group in opened]
        assert all(group.invariant for group in ordered)
        for shape in ((1, 8), (7, 90), (0, 8)):
            parts = [torch.randn(shape, generator=generator).to(dtype) for _ in ranks]
            first, second, third = parts
            expected = first + second + third
            summed = threads.map(lambda group, part: group.all_reduce(part.clone()), ordered, parts)
            assert all(torch.equal(found, expected) for found in summed)


@pytest.mark.parametrize(
    ("name", "ranks", "reason"),
    [
        ("cuda:2", 1, "no such device: torch finds 2 GPUs, the last of them is cuda:1"),
        ("cuda", 3, "each of 3 ranks needs a GPU, from cuda:0 on: torch finds 2 GPUs"),
        ("cuda:1", 2, "each of 2 ranks needs a GPU, from cuda:1 on: torch finds 2 GPUs"),
    ],
)
def test_too_few_gpus_are_counted(
    name: str, ranks: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7 + index, 9))
    with pytest.raises(CannotStart) as refused:
        find_gpu(name, ranks)
    assert str(refused.value).startswith(f"model.device = {name}: {reason}")
    assert find_gpu("cuda", 2) == 7
    assert find_gpu("cuda:1") == 8


class Announcements:
    """What rank 0 sends, and another rank receives afterwards; both agree with everything."""

    rank = 1

    def __init__(self, *messages: RankMessage) -> None:
        self._messages = deque(map(pack, messages))

    def send(self, message: bytearray) -> None:
        self._messages.append(message)

    def receive(self) -> bytearray:
        return self._messages.popleft()

    def max(self, values: Longs) -> Longs:
        return values


class FailedLaunch:
    """Of a plan that does not fit into the memory of the device."""

    error = DeviceLost("out of memory")

    def sample(self, part: SamplingPart) -> None:
        raise AssertionError("rank 0 samples")

    def outcome(self) -> StepOutcome:
        raise self.error

    def drafts(self) -> Ints:
        raise AssertionError("there are none")


class FullDevice:
    """A runner whose launches fail."""

    def check(self, plan: StepPlan) -> StepPlan:
        return plan

    def launch(self, plan: StepPlan) -> FailedLaunch:
        return FailedLaunch()

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        raise AssertionError("it launches")

    def make_drafts(self) -> Ints:
        raise AssertionError("there are none")

    def settle(self) -> None: ...


def test_a_rank_whose_launch_fails_ends_before_rank_0_reads_the_outcome() -> None:
    """Which it never does: its device waits for a sum with this one's."""
    follower = FollowerRank(Announcements(RankMessage(plan=decode_plan(2, 1, 5)), RankMessage()))
    follower.receive(runner := FullDevice())
    with pytest.raises(DeviceLost, match="out of memory"):
        follower.compute(runner)


def test_a_launch_that_fails_on_rank_0_is_the_last_one() -> None:
    """Sums of a later plan would meet those of this one on other ranks."""
    with pytest.raises(DeviceLost, match="out of memory"):
        InStream(FullDevice()).launch(decode_plan(2, 1, 5))


class NotingFlight:
    """A plan that has sampled one token, and may have collectives behind it."""

    error = None

    def __init__(self, device: NotingDevice, step: int) -> None:
        self._device, self._step = device, step

    def sample(self, part: SamplingPart) -> None:
        raise AssertionError("plans have their parts")

    def outcome(self) -> StepOutcome:
        shared = self._device.exchange.share(self._step, lambda: Sampled(ints(7)))
        self._device.calls.append(("read", self._step))
        none = np.zeros(1, np.int32)
        return StepOutcome(
            step=self._step, starts=ints(0, 1), token_ids=shared.tokens, status=none, computed=none
        )

    def drafts(self) -> Ints:
        raise AssertionError("there are none")


class NotingDevice(FullDevice):
    """The runner of a rank, which notes what it launches and whose outcome it reads."""

    def __init__(self, exchange: SampleExchange) -> None:
        self.exchange = exchange
        self.calls: list[tuple[str, int]] = []

    def launch(self, plan: StepPlan) -> Any:
        self.calls.append(("launched", plan.step))
        return NotingFlight(self, plan.step)

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        return self.launch(plan).outcome()


def test_ranks_launch_and_read_in_one_order_in_turn_too() -> None:
    """A step of stages is announced before the one before it is read, which may sum, too."""
    sent = Announcements()
    lead, follower = LeadRank(sent), FollowerRank(sent)
    first, other = NotingDevice(lead), NotingDevice(follower)
    lead.use(first)
    resolved = plan(embedded.path(), device="interpreter")
    core = EngineCore(limits(flights=2), CachePools([page_group(10)]))
    engine = Engine(core, lead, resolved, lead=lead)
    launcher, flights = engine.in_turn(), deque[Any]()
    for step in (1, 2, 3):
        flights.append(launcher.launch(msgspec.structs.replace(decode_plan(1, 1, 5), step=step)))
        if len(flights) > engine.ahead:
            flights.popleft().outcome()
    flights.popleft().outcome()
    lead.end()
    follower.receive(other)
    follower.compute(other)
    assert first.calls == other.calls
    assert other.calls == [
        *(("launched", 1), ("launched", 2), ("read", 1)),
        *(("launched", 3), ("read", 2), ("read", 3)),
    ]


class DraftingDevice(NotingDevice):
    """The same beside a draft model."""

    def make_drafts(self) -> Ints:
        self.calls.append(("drafted", self.calls[-1][1]))
        return np.zeros((1, 2), np.int32)


def test_ranks_with_a_draft_model_launch_a_plan_after_the_drafts_of_the_one_before() -> None:
    sent = Announcements()
    lead, follower = LeadRank(sent), FollowerRank(sent)
    first, other = DraftingDevice(lead), DraftingDevice(follower)
    lead.use(first)
    folder = embedded.path()
    resolved = with_draft_model(plan(folder, device="interpreter"), folder)
    core = EngineCore(limits(), CachePools([page_group(10)]))
    launcher = Engine(core, lead, resolved, lead=lead).in_turn()
    asking = msgspec.structs.replace(decode_plan(1, 1, 5), draft_counts=ints(2))
    launcher.launch(asking).outcome()
    last = launcher.launch(msgspec.structs.replace(asking, step=2))
    last.outcome()
    last.drafts()
    lead.end()
    follower.receive(other)
    follower.compute(other)
    assert first.calls == other.calls
    assert other.calls == [
        *(("launched", 1), ("read", 1), ("drafted", 1)),
        *(("launched", 2), ("read", 2), ("drafted", 2)),
    ]
