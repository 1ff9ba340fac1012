"""The collectives that each rank calls in layers whose ranks attend to different requests."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Barrier, Thread
from typing import TYPE_CHECKING

import pytest
import torch
from tests.models.model_loop import ModelLoop
from tests.models.test_two_ranks import OPEN, check_equal, outputs, requests, write
from tests.support.models import open_model, plan

from antiphon.layers.weights import SingleRank, Tp
from antiphon.model_worker.batching.plan import Sampled
from antiphon.model_worker.ranks.layout import RankLayout
from antiphon.model_worker.runner import opening

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from antiphon.model_worker.batching.plan import Ints, SamplingPart, StepOutcome, StepPlan
    from antiphon.model_worker.runner.model_runner import ModelRunner

WAIT_S = 20.0
Call = tuple[str, tuple[int, ...], torch.dtype]
"""A collective: its kind, and the shape and dtype of what a rank gives."""


class Meeting:
    """Ranks in threads that exchange tensors, and what each of them has called."""

    def __init__(self, ranks: int) -> None:
        self.calls: list[list[Call]] = [[] for _ in range(ranks)]
        self.given = [torch.empty(0)] * ranks
        self.barrier = Barrier(ranks, timeout=WAIT_S)


class MetTp:
    """One rank of a meeting: `antiphon.layers.weights.Tp`."""

    invariant = True

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.ranks = meeting, rank, len(meeting.calls)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange("sum", x)).sum(dim=0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange("gather", x), dim=-1)

    def _exchange(self, kind: str, x: torch.Tensor) -> list[torch.Tensor]:
        met = self._meeting
        met.calls[self.rank].append((kind, tuple(x.shape), x.dtype))
        met.given[self.rank] = x.clone()
        met.barrier.wait()
        given = [*met.given]
        met.barrier.wait()
        return given


class Sampler:
    """Gives the others what rank 0 samples."""

    shared = True

    def __init__(self, inbox: SimpleQueue[Sampled] | None, others: list[SimpleQueue[Sampled]]):
        self._inbox, self._others = inbox, others

    def share(self, step: int, sample: Callable[[], Sampled]) -> Sampled:
        if self._inbox is not None:
            return self._inbox.get(timeout=WAIT_S)
        sampled = sample()
        for other in self._others:
            other.put(sampled)
        return sampled


class Together:
    """Runs each plan on all ranks at once, and notes which groups were idle."""

    def __init__(self, runners: list[ModelRunner]) -> None:
        self._runners = runners
        self.idle = list[tuple[int, int]]()  # steps, and the group that had no rows

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        for group in range(plan.groups_count):
            rows = plan.rows_of(group)
            self.idle += [(plan.step, group)] if rows.start == rows.stop else []
        threads = [Thread(target=other.run, args=(plan,)) for other in self._runners[1:]]
        for thread in threads:
            thread.start()
        outcome = self._runners[0].run(plan, part)
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a rank waits in a collective"
        return outcome

    def make_drafts(self) -> Ints:
        raise AssertionError("no draft model")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", [RankLayout(tp=2, dp=2), RankLayout(tp=4, dp=2)], ids=str)
@pytest.mark.parametrize("family", ["qwen2-moe", "qwen3-next"])
def test_all_ranks_of_a_group_call_the_same_collectives(
    tmp_path: Path, family: str, layout: RankLayout
) -> None:
    write(family, tmp_path)
    whole = Meeting(layout.tp)
    groups = [Meeting(layout.attention_ranks) for _ in range(layout.dp)]
    inboxes = [SimpleQueue[Sampled]() for _ in range(1, layout.tp)]
    models: list[opening.OpenModel] = []
    for rank in range(layout.tp):
        group, place = divmod(rank, layout.attention_ranks)
        alone = layout.attention_ranks == 1
        attention: Tp = SingleRank() if alone else MetTp(groups[group], place)
        models.append(
            opening.open_model(
                tmp_path,
                plan(tmp_path, **OPEN),
                tp=MetTp(whole, rank),
                attention=attention,
                exchange=Sampler(inboxes[rank - 1] if rank else None, inboxes),
            )
        )
    runner = Together([model.runner for model in models])
    loop = ModelLoop(models[0], runner=runner, groups=layout.dp, step_tokens_max=64)
    found = loop.run(requests("greedy", models[0].spec.vocabulary), one_a_turn=True)
    check_equal(found, outputs(open_model(tmp_path, **OPEN), "greedy", {}))
    assert {group for _, group in runner.idle} == {1}, "the first request runs alone"
    for met in (whole, *groups):
        assert all(calls == met.calls[0] for calls in met.calls)
    assert whole.calls[0]
    for first, second in zip(groups[0].calls, groups[1].calls, strict=True):
        assert bool(first) == (layout.attention_ranks > 1)
        assert len(first) > len(second) or not first, "an idle group sums nothing of its own"
