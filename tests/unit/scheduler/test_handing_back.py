"""Requests that a worker requeues unstarted go to another worker, unnoticed by clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from tests.unit.scheduler.stage import (
    Actor,
    Stage,
    held,
    open_entry,
    other_attempt,
    returned,
    running,
    usual,
    waiting,
)

from antiphon.scheduler.leader_config import LeaderConfig
from antiphon.scheduler.outbox import RequestRequeued
from antiphon.wire.base import ProcessState, Role
from antiphon.wire.heartbeat import RefusalReason, RefusedCommands

if TYPE_CHECKING:
    from antiphon.wire.command import Admit


def bound_to_one_of_two(stage: Stage, count: int = 1) -> tuple[Actor, Actor, list[Admit]]:
    """The first worker has these, and then another one comes."""
    _, first, _ = stage.usual()
    stage.submit_all(count)
    admits = stage.admits(first)
    first.runs(*map(waiting, admits))
    stage.pass_s(0.6)
    second = stage.enter(Role.WORKER, "worker-1")
    stage.actions.clear()
    return first, second, admits


def test_a_request_that_is_given_back_goes_to_another_worker_and_is_forgotten_at_the_first() -> (
    None
):
    stage = Stage()
    first, second, (admit,) = bound_to_one_of_two(stage)
    first.reports(returned(admit))
    (again,) = stage.admits(second)
    assert again.request_id == admit.request_id
    assert again.attempt > admit.attempt
    assert [abort.attempt for abort in stage.aborts(first)] == [admit.attempt]
    assert [a.worker for a in stage.actions if isinstance(a, RequestRequeued)] == [first.process]


def test_requeued_requests_keep_their_order_ahead_of_the_queue() -> None:
    stage = Stage(LeaderConfig(look_ahead=1))
    first, second, admits = bound_to_one_of_two(stage, 3)
    second.set_load(running_max=3)
    second.state = ProcessState.DRAINING
    second.beat()
    stage.submit("late")
    first.state = ProcessState.DRAINING
    first.reports(*map(returned, admits))
    assert not stage.admits()
    second.state = ProcessState.READY
    second.beat()
    stage.pass_s(0.2)
    assert [admit.request_id for admit in stage.admits(second)] == ["r0", "r1", "r2", "late"]


def test_requeueing_worker_gets_nothing_before_its_next_report() -> None:
    stage = Stage()
    first, second, (admit,) = bound_to_one_of_two(stage)
    second.state = ProcessState.DRAINING
    second.beat()
    first.reports(returned(admit))
    stage.submit("other")
    assert stage.admits() == []
    first.reports()
    assert [one.request_id for one in stage.admits(first)] == ["r0", "other"]


def refuses(worker: Actor, stage: Stage, *, refuses: bool = True) -> None:
    assert stage.leader.term is not None
    refused = RefusedCommands(leader=stage.leader.term, seq=1, reason=RefusalReason.LATE)
    worker.set_load(refused=refused if refuses else None)
    worker.beat()
    stage.listen()


def test_worker_that_refuses_commands_loses_what_it_lacks_and_gets_nothing_new() -> None:
    stage, _, first, _ = usual()
    stage.submit("r0")
    (admit,) = stage.admits(first)
    second = stage.enter(Role.WORKER, "worker-1")
    stage.actions.clear()
    refuses(first, stage)  # it holds nothing of it
    (again,) = stage.admits(second)
    assert (again.request_id, again.attempt > admit.attempt) == ("r0", True)
    for number in range(1, 4):
        stage.submit(f"r{number}")
        stage.pass_s(0.5)
    assert stage.admits(first) == []
    refuses(first, stage, refuses=False)
    stage.submit("late")
    stage.pass_s(0.5)
    assert stage.admits(first), "it is tried again"


def test_worker_that_refuses_commands_keeps_what_it_runs() -> None:
    stage = Stage()
    first, second, (admit,) = bound_to_one_of_two(stage)
    first.runs(running(admit))
    refuses(first, stage)
    stage.pass_s(3.0)
    assert stage.admits(second) == []
    assert stage.aborts(first) == []


def test_worker_that_refused_another_leader_is_given_work() -> None:
    stage, _, first, _ = usual()
    assert stage.leader.term is not None
    other = msgspec.structs.replace(stage.leader.term, number=0)
    refused = RefusedCommands(leader=other, seq=1, reason=RefusalReason.CLOCK)
    first.set_load(refused=refused)
    first.beat()
    stage.submit("r0")
    assert stage.admits(first)


def test_request_that_all_workers_requeued_is_bound_again() -> None:
    stage = Stage()
    first, second, (admit,) = bound_to_one_of_two(stage)
    first.reports(returned(admit))
    (again,) = stage.admits(second)
    first.reports()
    second.reports(returned(again))
    assert [one.request_id for one in stage.admits(first)] == ["r0"]


def test_what_was_given_back_is_aborted_until_the_worker_has_forgotten_it() -> None:
    stage = Stage()
    first, second, (admit,) = bound_to_one_of_two(stage)
    first.reports(returned(admit))
    second.runs(*map(running, stage.admits(second)))
    stage.actions.clear()
    stage.pass_s(1.0)  # the abort was lost
    assert {abort.attempt for abort in stage.aborts(first)} == {admit.attempt}
    assert stage.admits() == []


def test_what_was_given_back_and_then_cancelled_is_only_aborted() -> None:
    stage = Stage()
    first, _, (admit,) = bound_to_one_of_two(stage)
    stage.cancel(stage.request("r0"))
    stage.actions.clear()
    first.reports(returned(admit))
    assert stage.admits() == []
    assert [abort.attempt for abort in stage.aborts(first)] == [admit.attempt]


def test_a_new_leader_does_not_take_what_is_given_back_for_running() -> None:
    stage = Stage()
    gateway = stage.enter(Role.GATEWAY, "gateway-0")
    stage.enter(Role.DETOKENIZER, "detokenizer-0")
    worker = stage.enter(Role.WORKER, "worker-0")
    request = stage.request("r")
    gateway.open[request.request_id] = open_entry(request)
    attempt = other_attempt(1)
    old = held(request.request_id, attempt, tokens=0, ended=True, returned=True)
    worker.load = msgspec.structs.replace(worker.load, running=(old,), term=attempt.term)
    stage.pass_s(3.0)
    assert (stage.admits(), stage.leader.open_requests) == ([], 0)
    stage.leader.submit(request)
    stage.listen()
    (admit,) = stage.admits(worker)
    assert admit.attempt > attempt
    worker.beat()
    stage.listen()
    assert [abort.attempt for abort in stage.aborts(worker)] == [attempt]


def test_what_waits_at_a_worker_counts_there_until_it_runs() -> None:
    stage, _, worker, _ = usual(LeaderConfig(look_ahead=8))
    worker.set_load(pages_free=4)
    stage.pass_s(0.6)
    stage.submit_all(5)  # a page each
    admits = stage.admits(worker)
    assert len(admits) == 4
    worker.runs(*map(waiting, admits))
    stage.pass_s(0.6)
    assert len(stage.admits(worker)) == 4, "the pages of those who wait were given away again"
    worker.runs(*map(running, admits))
    stage.pass_s(0.6)
    assert len(stage.admits(worker)) == 5


def test_pages_that_are_promised_are_not_given_and_those_that_return_are() -> None:
    stage, _, worker, _ = usual()
    stage.submit("r0")
    worker.runs(running(stage.admits()[0]))
    worker.set_load(pages_free=10, pages_promised=10)
    stage.pass_s(0.6)
    stage.submit("r1")
    assert len(stage.admits()) == 1
    worker.set_load(pages_returning=1)
    stage.pass_s(0.6)
    assert len(stage.admits()) == 2


def test_each_choice_of_a_request_takes_a_place() -> None:
    stage, _, worker, _ = usual(LeaderConfig(look_ahead=1))
    stage.submit("r0", choices=3)
    stage.submit("r1")
    assert [admit.request_id for admit in stage.admits(worker)] == ["r0"]
    stage.actions.clear()
    alone = Stage(LeaderConfig(look_ahead=1))
    alone.usual()
    alone.submit("r0", choices=900)
    assert len(alone.admits()) == 1, "an idle worker takes any"


def test_a_request_of_many_choices_waits_for_no_more_places_than_are_looked_ahead() -> None:
    stage, gateway, worker, _ = usual(LeaderConfig(look_ahead=1))
    stage.submit_all(3)
    stage.submit("many", choices=100)
    stage.submit("next")
    admits = stage.admits(worker)
    assert len(admits) == 3
    gateway.closes(admits[0].request_id)
    assert [admit.request_id for admit in stage.admits(worker)][3:] == ["many"]
    gateway.closes("many")
    assert [admit.request_id for admit in stage.admits(worker)][4:] == ["next"]


def test_a_worker_is_given_no_more_choices_than_it_would_keep() -> None:
    stage, gateway, worker, _ = usual(LeaderConfig(look_ahead=1, waiting_max=8))
    stage.submit_all(2)
    stage.submit("many", choices=9)
    assert len(stage.admits(worker)) == 2
    gateway.closes("r0")
    assert [admit.request_id for admit in stage.admits(worker)][2:] == ["many"]


def test_the_pages_of_what_has_just_ended_are_there_before_the_next_report() -> None:
    stage, gateway, worker, _ = usual()
    stage.submit_all(2)
    first, second = stage.admits(worker)
    worker.runs(running(first), running(second))
    worker.set_load(pages_free=0)
    stage.pass_s(0.6)
    stage.submit("r2")
    assert len(stage.admits()) == 2
    gateway.closes(first.request_id)
    assert len(stage.admits()) == 3
