"""Engine cores in lockstep: where requests are placed, and what their joint plans say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.worker import limits, state
from tests.unit.model_worker.steps import outcome, pools
from tests.unit.model_worker.test_media import WIDTH, medium, prompt

from antiphon.model_worker.batching.attention_groups import AttentionGroups
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.plan import PLAIN, future
from antiphon.model_worker.batching.state import ChoiceKey
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.wire.errors import Internal
from antiphon.wire.ids import RequestId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.attention_groups import GroupedRows
    from antiphon.model_worker.batching.media import MediaLoad

LONG = [*range(1, 13)]


class Groups:
    """Two attention groups, whose steps are run without a model."""

    def __init__(self, **changes: Any) -> None:
        self.cores = [self._core(**changes) for _ in range(2)]
        self.groups = AttentionGroups(self.cores)
        self.step = 0

    def _core(self, **changes: Any) -> EngineCore:
        own = pools(20)
        return EngineCore(limits(**changes), own, RadixIndex(own))

    def add(self, key: int, prompt: Sequence[int], **said: Any) -> int:
        """Add a choice; the number of the group that has it."""
        named = {"request_id": RequestId(f"r{key}")} | said
        self.groups.add(ChoiceKey(key), state(prompt, **named), 0.0)
        return next(n for n, core in enumerate(self.cores) if ChoiceKey(key) in core)

    def run(self, token: int = 1) -> GroupedRows:
        rows = self.groups.next_rows(0.0)
        self.step += 1
        self.groups.build_plan(self.step, rows, PLAIN)
        self.groups.launched(self.step)
        draws = [bool(draw) for own in rows.groups for draw in own.draws]
        self.groups.finished(self.step)
        self.groups.commit(rows, outcome(self.step, [[token] if draw else [] for draw in draws]))
        return rows

    def drain(self) -> None:
        while not self.groups.idle:
            self.run()


def test_requests_are_spread_over_groups_and_choices_stay_together() -> None:
    groups = Groups()
    assert [groups.add(key, [key] * 5) for key in (1, 2, 3)] == [0, 1, 0]
    same = {"request_id": RequestId("several")}
    assert {groups.add(key, [7] * 5, choice=key - 4, **same) for key in (4, 5, 6)} == {1}
    assert groups.groups.totals().waiting == 6


def test_a_cached_prompt_goes_to_its_group_unless_that_is_busier() -> None:
    groups = Groups()
    assert [groups.add(key, [30 + key] * 5) for key in (1, 2)] == [0, 1]
    groups.drain()
    assert groups.add(3, LONG, max_new_tokens=1) == 0
    assert groups.add(4, [50] * 12, max_new_tokens=1) == 1
    groups.drain()
    assert groups.add(5, [50] * 12) == 1
    assert groups.add(6, [50] * 12) == 1, "one more than the other group is no reason to leave"
    assert groups.add(7, [50] * 12) == 0


def test_rows_of_a_joint_plan_have_slots_and_futures_of_their_group() -> None:
    groups = Groups()
    for key in range(1, 5):
        groups.add(key, [key] * 3, max_new_tokens=9)
    slots = groups.cores[0].limits.running_max
    first = groups.groups.next_rows(0.0)
    plan = groups.groups.build_plan(1, first, PLAIN)
    assert plan.group_rows is not None
    assert plan.group_rows.tolist() == [0, 2, 4]
    assert plan.slot.tolist() == [0, 1, slots, slots + 1]
    assert plan.query_start.tolist() == [0, 3, 6, 9]
    assert plan.logit_tokens.tolist() == [2, 5, 8, 11]
    assert plan.tokens.tolist() == [1, 1, 1, 3, 3, 3, 2, 2, 2, 4, 4, 4]
    assert plan.changes is not None
    assert sorted(plan.changes.slots.tolist()) == [0, 1, slots, slots + 1]
    groups.groups.launched(1)
    ahead = groups.groups.build_plan(2, groups.groups.next_rows(0.0), PLAIN)
    assert ahead.tokens.tolist() == [future(slot) for slot in (0, 1, slots, slots + 1)]


def test_a_group_without_rows_is_idle_and_its_changes_are_in_the_plan() -> None:
    groups = Groups()
    groups.add(1, [1] * 3, max_new_tokens=4)
    rows = groups.groups.next_rows(0.0)
    plan = groups.groups.build_plan(1, rows, PLAIN)
    assert plan.group_rows is not None
    assert plan.group_rows.tolist() == [0, 1, 1]
    assert plan.tokens_of(plan.rows_of(1)) == slice(3, 3)
    assert groups.groups.part(rows) is PLAIN


class SlowStore:
    """Embeddings that never come."""

    def load(self, load: MediaLoad) -> None:
        pass

    def release(self, key: ChoiceKey, number: int) -> None:
        pass


def test_groups_starve_while_each_waits_for_media_or_has_nothing() -> None:
    """The loop sleeps then: else it would plan again and again until they have come."""
    groups = Groups(media_width=WIDTH)
    for core in groups.cores:
        core.batch.media.use(SlowStore())
    groups.add(1, prompt(1, -3), media=(medium(1, 3),))
    assert not len(groups.groups.next_rows(0.0))
    assert groups.groups.starved
    assert groups.add(2, [5] * 3) == 1
    assert len(groups.groups.next_rows(0.0)) == 1
    assert not groups.groups.starved


@pytest.mark.parametrize("chosen", [[0, 1], [1, 2], [3], [0, 3], [2, 3]])
def test_some_of_the_rows_are_those_of_their_groups(chosen: list[int]) -> None:
    groups = Groups()
    for key in range(1, 5):
        groups.add(key, [key] * 3)
    rows = groups.groups.next_rows(0.0)
    some = rows.take(np.array(chosen))
    assert len(some) == len(chosen)
    taken = [(n, slot) for n, own in enumerate(some.groups) for slot in own.slots.slots.tolist()]
    assert taken == [(row // 2, row % 2) for row in chosen]
    assert groups.groups.is_current(some).all()


def test_a_group_that_cannot_be_planned_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = Groups()
    assert [groups.add(key, [key] * 3) for key in (1, 2)] == [0, 1]

    def fail(now: float) -> None:
        raise ValueError(now)

    with monkeypatch.context() as broken:
        broken.setattr(groups.cores[1], "plan_rows", fail)
        with pytest.raises(ValueError, match="0"):
            groups.groups.next_rows(0.0)
    groups.groups.fail_planned(None, Internal("broken"))
    assert [core.live_count for core in groups.cores] == [1, 0]
    assert len(groups.run()) == 1, "the rows of the other group are planned again"
