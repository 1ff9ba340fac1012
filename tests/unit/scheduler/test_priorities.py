"""Queue order by priority, preemption without free slots, and waiting times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.unit.scheduler.stage import (
    Actor,
    Stage,
    full,
    held,
    other_attempt,
    returned,
    running,
    usual,
)

from antiphon.scheduler.leader_config import LeaderConfig
from antiphon.service.priority import PriorityPolicy
from antiphon.wire.base import Role
from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import Overloaded

if TYPE_CHECKING:
    from antiphon.wire.command import Admit

BY_PRIORITY = PriorityPolicy(priority=True, preempt_threshold=10, max_overtake_s=20.0)


def names(stage: Stage) -> list[str]:
    bound = [admit.request_id for admit in stage.admits()]
    stage.actions.clear()
    return [str(name) for name in bound]


def ends(stage: Stage, worker: Actor, name: str) -> None:
    gateway = stage.first(Role.GATEWAY)
    worker.runs(*(line for line in worker.load.running if line.request_id != name))
    gateway.closes(next(line for line in gateway.open if line == name))


def begins(worker: Actor, admit: Admit) -> None:
    worker.runs(*worker.load.running, running(admit))


def test_a_late_high_priority_goes_before_all_that_wait() -> None:
    stage, worker = full(LeaderConfig(look_ahead=1, precedence=BY_PRIORITY), waiting=3)
    late = stage.submit("late", priority=5)
    assert stage.leader.submit(late).position == 0
    ends(stage, worker, "low-0")
    assert names(stage) == ["late"]
    ends(stage, worker, "low-1")
    assert names(stage) == ["low-3"]


def test_low_first_binds_the_lower_number_first() -> None:
    precedence = PriorityPolicy(priority=True, low_first=True)
    stage, worker = full(LeaderConfig(look_ahead=1, precedence=precedence))
    for name, priority in (("third", 2), ("second", 0), ("first", -3)):
        stage.submit(name, priority=priority)
    for number in range(3):
        ends(stage, worker, f"low-{number}")
    assert names(stage) == ["first", "second", "third"]


def test_where_priorities_do_not_count_only_arrival_does() -> None:
    stage, worker = full(LeaderConfig(look_ahead=1), waiting=1)
    stage.submit("late", priority=500)
    assert names(stage) == []
    ends(stage, worker, "low-0")
    assert names(stage) == ["low-3"]


@pytest.mark.parametrize(("priority", "bound"), [(10, []), (11, ["late"])])
def test_request_that_outranks_running_ones_needs_no_slot(priority: int, bound: list[str]) -> None:
    stage, _ = full(LeaderConfig(look_ahead=1, precedence=BY_PRIORITY), waiting=2)
    stage.submit("late", priority=priority)
    assert names(stage) == bound


def test_no_more_go_beyond_the_places_than_there_are_requests_that_give_way() -> None:
    stage, worker = full(LeaderConfig(look_ahead=1, precedence=BY_PRIORITY), waiting=2)
    stage.submit_all(5, "late-", priority=20)
    bound = stage.admits()
    assert names(stage) == ["late-0", "late-1", "late-2"]
    for admit in bound:
        begins(worker, admit)
    stage.pass_s(0.6)
    assert names(stage) == []
    ends(stage, worker, "late-0")
    assert names(stage) == ["late-3"]


def test_a_worker_gets_no_more_beyond_its_places_than_it_would_keep() -> None:
    stage, _ = full(LeaderConfig(look_ahead=1, waiting_max=2, precedence=BY_PRIORITY))
    stage.submit_all(2, "late-", priority=20)
    assert names(stage) == ["late-0"]


def test_where_pages_are_short_a_few_go_and_see() -> None:
    stage, worker = full(LeaderConfig(look_ahead=1, precedence=BY_PRIORITY))
    worker.set_load(pages_free=0, pages_promised=50)
    stage.pass_s(0.6)
    prompt = pack_ids(range(100))
    stage.submit_all(2, "late-", priority=20, prompt_ids=prompt)
    (admit,) = stage.admits()
    assert names(stage) == ["late-0"]
    begins(worker, admit)
    stage.pass_s(0.6)
    assert names(stage) == ["late-1"]


def test_a_stalled_or_paused_worker_is_given_nothing_beyond_its_places() -> None:
    stage, worker = full(LeaderConfig(look_ahead=1, precedence=BY_PRIORITY))
    worker.set_load(paused=True)
    stage.pass_s(0.6)
    stage.submit("late", priority=20)
    assert names(stage) == []


def test_low_priorities_are_not_overtaken_for_ever() -> None:
    precedence = PriorityPolicy(priority=True, preempt_threshold=1000, max_overtake_s=5.0)
    stage, worker = full(LeaderConfig(look_ahead=1, precedence=precedence), waiting=1)
    order: list[str] = []
    for number in range(12):
        stage.submit(f"high-{number}", priority=9)
        stage.pass_s(1.0)
        ends(stage, worker, str(worker.load.running[0].request_id))
        begins(worker, stage.admits()[0])
        order += names(stage)
    assert order.index("low-3") == 6


def test_what_is_not_started_in_time_ends_as_overloaded_with_advice_when_to_come_again() -> None:
    stage, _ = full(LeaderConfig(look_ahead=1, queue_timeout_s=4.0), waiting=1)
    stage.pass_s(3.2)
    assert stage.leader.waiting == 1
    stage.pass_s(0.5)
    assert (stage.leader.waiting, stage.leader.open_requests) == (0, 3)
    (lost, *_) = stage.lost()
    assert (lost.request_id, lost.attempt, lost.error.code) == ("low-3", None, "overloaded")
    assert lost.error.retry_after_s is not None
    with pytest.raises(Overloaded, match="queue timeout"):
        stage.leader.submit(stage.request("low-3"))


def test_admit_has_the_time_waited() -> None:
    stage, worker = full(LeaderConfig(look_ahead=1, queue_timeout_s=60.0), waiting=1)
    stage.pass_s(5.0)
    ends(stage, worker, "low-0")
    (admit,) = stage.admits()
    assert 5_000 <= admit.waited_ms <= 6_000
    held = worker.load.running
    worker.runs(*held, returned(admit))
    stage.pass_s(0.5)
    worker.runs(*held)
    stage.pass_s(0.5)
    again = stage.admits()[-1]
    assert again.attempt > admit.attempt
    assert again.waited_ms >= admit.waited_ms, "its clock began anew"


def test_what_was_lost_with_its_worker_waits_anew_at_its_old_place() -> None:
    stage, worker = full(LeaderConfig(look_ahead=1, queue_timeout_s=8.0), waiting=1)
    stage.pass_s(4.0)
    stage.actors.remove(worker)
    stage.enter(Role.WORKER, "worker-0", life=2)
    stage.pass_s(2.0)  # until the last one counts as silent
    admits = stage.admits()
    assert names(stage) == ["low-3", "low-0", "low-1"]
    assert {admit.waited_ms for admit in admits[1:]} == {0}


def test_a_new_leader_counts_on_from_when_a_request_was_sent_first() -> None:
    stage, worker = full(LeaderConfig(look_ahead=1, queue_timeout_s=8.0))
    stage.submit("young")
    stage.submit("old", waited_ms=6_000)
    ends(stage, worker, "low-0")
    assert names(stage) == ["old"]
    stage.submit("older", waited_ms=7_000)
    stage.pass_s(1.5)
    assert {lost.request_id for lost in stage.lost()} == {"older"}


def test_request_does_not_time_out_before_workers_have_reported() -> None:
    stage, gateway, worker, _ = usual(LeaderConfig(queue_timeout_s=3.0))
    request = stage.request("r", waited_ms=10_000)
    stage.link_up = False
    stage.pass_s(0.2)
    stage.leader.submit(request)
    worker.runs(held(request.request_id, other_attempt(0)))
    stage.link_up = True
    gateway.list(whole=True)
    stage.pass_s(2.0)
    assert stage.lost() == []
