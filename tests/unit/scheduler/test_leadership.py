from __future__ import annotations

import msgspec
import pytest
from tests.unit.scheduler.stage import Stage, process

from antiphon.wire.base import Role, Term
from antiphon.wire.errors import Unavailable, WrongTerm


def test_a_scheduler_that_hears_of_no_leader_leads_after_two_beats() -> None:
    stage = Stage()
    stage.pass_s(0.9)
    assert stage.leader.term is None
    stage.pass_s(0.3)
    assert stage.leader.term == Term(number=1, scheduler=process("scheduler-0"))


def test_before_anybody_leads_a_submit_is_told_to_come_later() -> None:
    stage = Stage()
    with pytest.raises(Unavailable, match="no scheduler leads"):
        stage.leader.submit(stage.request("r"))


def test_a_standby_stays_one_while_the_leader_speaks() -> None:
    stage = Stage()
    leader = stage.enter(Role.SCHEDULER, "scheduler-1")
    leader.leads = Term(number=4, scheduler=leader.process)
    leader.beat()
    stage.pass_s(10)
    assert stage.leader.term is None
    with pytest.raises(WrongTerm) as refused:
        stage.leader.submit(stage.request("r"))
    assert refused.value.details == {"term": "4", "scheduler": "scheduler-1"}


def test_a_standby_takes_the_next_term_within_three_seconds_of_the_leaders_death() -> None:
    stage = Stage()
    leader = stage.enter(Role.SCHEDULER, "scheduler-1")
    leader.leads = Term(number=4, scheduler=leader.process)
    leader.beat()
    stage.pass_s(2)
    leader.silent = True
    stage.pass_s(2)
    assert stage.leader.term is None
    stage.pass_s(1)
    assert stage.leader.term == Term(number=5, scheduler=process("scheduler-0"))


def test_a_standby_leads_at_once_when_the_leader_resigns() -> None:
    stage = Stage()
    leader = stage.enter(Role.SCHEDULER, "scheduler-1")
    leader.leads = Term(number=4, scheduler=leader.process)
    leader.beat()
    stage.pass_s(2)
    leader.leads = None
    leader.beat()
    stage.pass_s(0.1)
    assert stage.leader.term is not None


def test_a_lower_term_steps_down_and_drops_its_queue() -> None:
    stage = Stage()
    stage.usual()
    for number in range(6):
        stage.submit(f"r{number}")
    assert stage.leader.kept == 6
    other = stage.enter(Role.SCHEDULER, "scheduler-1")
    other.leads = Term(number=9, scheduler=other.process)
    other.beat()
    assert stage.leader.term is None
    assert stage.leader.kept == 0
    with pytest.raises(WrongTerm):
        stage.leader.submit(stage.request("r6"))


def test_a_higher_term_does_not_step_down_for_a_lower_one() -> None:
    stage = Stage()
    stage.usual()
    other = stage.enter(Role.SCHEDULER, "scheduler-1")
    other.leads = Term(number=0, scheduler=other.process)
    other.beat()
    assert stage.leader.term is not None


def test_of_two_equal_numbers_the_higher_scheduler_leads() -> None:
    stage = Stage()
    stage.usual()
    other = stage.enter(Role.SCHEDULER, "scheduler-1")
    other.leads = Term(number=1, scheduler=other.process)
    other.beat()
    assert stage.leader.term is None


def test_a_term_that_a_worker_has_obeyed_is_surpassed() -> None:
    stage = Stage()
    worker = stage.enter(Role.WORKER, "worker-0")
    term = Term(number=7, scheduler=process("scheduler-0", life=0))
    worker.load = msgspec.structs.replace(worker.load, term=term)
    worker.beat()
    stage.pass_s(1.2)
    assert stage.leader.term == Term(number=8, scheduler=process("scheduler-0"))


def test_silence_while_the_link_is_down_makes_no_leader() -> None:
    stage = Stage()
    stage.link_up = False
    stage.pass_s(10)
    assert stage.leader.term is None
    stage.link_up = True
    stage.pass_s(0.8)
    assert stage.leader.term is None
    stage.pass_s(0.4)
    assert stage.leader.term is not None


def test_who_has_resigned_never_leads_again() -> None:
    stage = Stage()
    stage.usual()
    stage.leader.resign()
    stage.pass_s(10)
    assert stage.leader.term is None
