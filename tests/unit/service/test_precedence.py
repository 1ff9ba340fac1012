from __future__ import annotations

import pytest

from antiphon.config.worker import Policy, QueueConfig
from antiphon.service.priority import OvertakeTracker, PriorityPolicy


def test_without_priorities_all_have_one_rank() -> None:
    assert {PriorityPolicy().rank(priority) for priority in (-5, 0, 7)} == {0}


@pytest.mark.parametrize(("low_first", "order"), [(False, [7, 0, -5]), (True, [-5, 0, 7])])
def test_the_lower_rank_goes_first(low_first: bool, order: list[int]) -> None:
    precedence = PriorityPolicy(priority=True, low_first=low_first)
    assert sorted((0, -5, 7), key=precedence.rank) == order


def test_preemption_needs_a_rank_difference_above_the_threshold() -> None:
    precedence = PriorityPolicy(priority=True, preempt_threshold=3)
    assert [precedence.preempts(precedence.rank(n), 0) for n in (3, 4)] == [False, True]


@pytest.mark.parametrize("queue", [QueueConfig(priority=True), QueueConfig(policy=Policy.PRIORITY)])
def test_the_settings_have_two_names_for_priorities(queue: QueueConfig) -> None:
    assert PriorityPolicy.from_config(queue).priority


def test_overtaken_requests_are_overdue_after_a_while() -> None:
    waiting = {"a", "b", "c", "d"}
    overtaken = OvertakeTracker[str](5.0, waiting.__contains__)
    for arrival, name in enumerate(sorted(waiting)):
        overtaken.enter(arrival, name)
    overtaken.overtake(2, now=10.0)
    waiting -= {"a", "c"}
    assert list(overtaken.pop_overdue(14.9)) == []
    assert list(overtaken.pop_overdue(15.0)) == ["b"]
    assert list(overtaken.pop_overdue(15.0)) == []
