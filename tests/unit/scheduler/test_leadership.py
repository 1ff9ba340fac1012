from __future__ import annotations

import pytest
from tests.unit.scheduler.stage import Actor, Stage, held, other_attempt, process, usual

from antiphon.wire.base import Process, Role, Term
from antiphon.wire.errors import Unavailable, WrongTerm
from antiphon.wire.seal import SealedRequest

ANOTHER = process("scheduler-9")


def mine(number: int) -> Term:
    return Term(number=number, scheduler=process("scheduler-0"))


def lead(stage: Stage, number: int, instance: str = "scheduler-1") -> Actor:
    other = stage.enter(Role.SCHEDULER, instance)
    other.claim(number)
    return other


def worker_obeyed(stage: Stage, number: int, scheduler: Process = ANOTHER) -> Actor:
    """A worker that has applied commands of a term."""
    worker = stage.enter(Role.WORKER, "worker-0")
    worker.set_load(term=Term(number=number, scheduler=scheduler))
    worker.beat()
    return worker


def test_scheduler_without_a_leader_leads_after_two_beats() -> None:
    stage = Stage()
    stage.pass_s(0.9)
    assert stage.leader.term is None
    stage.pass_s(0.3)
    assert stage.leader.term == mine(1)


def test_submit_without_a_leader_is_rejected_with_retry_after() -> None:
    stage = Stage()
    with pytest.raises(Unavailable, match="no scheduler leads"):
        stage.leader.submit(stage.request("r"))


def test_standby_does_not_lead_while_the_leader_sends_heartbeats() -> None:
    stage = Stage()
    lead(stage, 4)
    stage.pass_s(10)
    assert stage.leader.term is None
    with pytest.raises(WrongTerm) as refused:
        stage.leader.submit(stage.request("r"))
    assert refused.value.details == {"term": "4", "scheduler": "scheduler-1"}


def test_a_standby_takes_the_next_term_within_three_seconds_of_the_leaders_death() -> None:
    stage = Stage()
    leader = lead(stage, 4)
    stage.pass_s(2)
    leader.silent = True
    stage.pass_s(2)
    assert stage.leader.term is None
    stage.pass_s(1)
    assert stage.leader.term == mine(5)


def test_a_standby_leads_at_once_when_the_leader_resigns() -> None:
    stage = Stage()
    leader = lead(stage, 4)
    stage.pass_s(2)
    leader.leads = None
    leader.beat()
    stage.pass_s(0.1)
    assert stage.leader.term is not None


def test_a_lower_term_steps_down_and_drops_its_queue() -> None:
    stage, *_ = usual()
    stage.submit_all(6)
    assert stage.leader.open_requests == 6
    lead(stage, 9)
    assert stage.leader.term is None
    assert stage.leader.open_requests == 0
    with pytest.raises(WrongTerm):
        stage.leader.submit(stage.request("r6"))


@pytest.mark.parametrize(("number", "stays"), [(0, True), (1, False)])
def test_the_higher_term_leads_and_of_two_equal_numbers_the_higher_scheduler(
    number: int, stays: bool
) -> None:
    stage, *_ = usual()
    lead(stage, number)
    assert (stage.leader.term is not None) == stays


def test_a_term_that_a_worker_has_obeyed_is_surpassed() -> None:
    stage = Stage()
    worker_obeyed(stage, 7, process("scheduler-0", life=0))
    stage.pass_s(1.2)
    assert stage.leader.term == mine(8)


@pytest.mark.parametrize("teller", ["gateway", "submit", "worker", "detokenizer"])
def test_the_term_of_an_attempt_is_surpassed(teller: str) -> None:
    """Its leader and workers are gone: only requests tell of it, and they follow later attempts."""
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r")
    (admit,) = stage.admits()
    later = other_attempt(9)
    match teller:
        case "gateway":
            gateway.follows(request.request_id, later)
        case "submit":
            with pytest.raises(Unavailable):
                stage.submit("s", attempt_floor=later)
        case "worker":
            worker.reports(held(request.request_id, later))
        case _:
            sealed = SealedRequest(request_id=request.request_id, attempt=later, sealed=False)
            detokenizer.outputs[request.request_id] = sealed
            gateway.follows(request.request_id, admit.attempt)
            worker.silent = True
    stage.pass_s(4.0)
    assert stage.leader.term == mine(10)


@pytest.mark.parametrize("standby", [True, False])
def test_a_leader_that_nothing_reaches_makes_way_for_a_standby(*, standby: bool) -> None:
    stage, *_ = usual()
    if standby:
        stage.enter(Role.SCHEDULER, "scheduler-1")
    stage.reachable = False
    stage.pass_s(1.7)
    assert stage.leader.term == mine(1)
    stage.pass_s(0.6)
    assert stage.leader.term == (None if standby else mine(1))
    stage.pass_s(10)
    assert stage.leader.term == (None if standby else mine(1)), "it cannot know who leads"
    stage.reachable = True
    stage.pass_s(2)
    assert stage.leader.term == mine(2 if standby else 1)


def test_a_leader_that_was_frozen_has_not_been_unreachable() -> None:
    stage, *_ = usual()
    stage.enter(Role.SCHEDULER, "scheduler-1")
    stage.clock.advance(30)
    stage.leader.tick(link_up=True, joins=1)
    assert stage.leader.term == mine(1)
    stage.pass_s(5)
    assert stage.leader.term == mine(1)


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


def test_resigned_scheduler_never_leads_again() -> None:
    stage, *_ = usual()
    stage.leader.resign()
    stage.pass_s(10)
    assert stage.leader.term is None


@pytest.mark.parametrize("number", [2**32 + 1, 2**40, 2**62 - 1])
def test_a_new_scheduler_follows_a_leader_whatever_its_number(number: int) -> None:
    stage = Stage()
    lead(stage, number)
    stage.pass_s(10)
    assert stage.leader.term is None
    with pytest.raises(WrongTerm):
        stage.leader.submit(stage.request("r"))


@pytest.mark.parametrize("number", [2**32 + 2, 2**62, 2**63 - 1])
def test_a_leader_stays_one_beside_a_claim_that_no_election_gives(number: int) -> None:
    stage, *_ = usual()
    reasons: list[str] = []
    stage.peers.on_reject(reasons.append)
    lead(stage, number)
    stage.pass_s(0.2)
    assert stage.leader.term == mine(1)
    assert reasons == ["leads"]


def test_a_leader_stays_one_beside_a_worker_whose_term_no_election_gives() -> None:
    stage, *_ = usual()
    reasons: list[str] = []
    stage.peers.on_reject(reasons.append)
    worker_obeyed(stage, 2**50)
    assert stage.leader.term == mine(1)
    assert reasons == ["worker.term"]


def test_a_standby_leads_when_only_a_claim_is_left_that_no_election_gives() -> None:
    stage = Stage()
    true = lead(stage, 4)
    forged = lead(stage, 2**60, "scheduler-2")
    stage.pass_s(2)
    assert stage.leader.term is None
    true.silent = True
    stage.pass_s(3)
    assert not forged.silent
    assert stage.leader.term == mine(5)


@pytest.mark.parametrize("number", [2**32, 2**62 - 2, 2**62 - 1, 2**62])
def test_a_new_scheduler_leads_after_the_highest_term_there_is(number: int) -> None:
    """Forged before any scheduler knew a term."""
    stage = Stage()
    forged = lead(stage, number)
    stage.pass_s(2)
    forged.silent = True
    stage.pass_s(3)
    expected = 1 if number == 2**62 else number + 1
    assert stage.leader.term == mine(expected)


def test_jumps_of_forged_terms_are_surpassed_up_to_the_highest_and_anew_from_one() -> None:
    stage, *_ = usual()
    number = 2**62 - 3 * 2**32
    stage.leader._leadership._number_max = number
    for _ in range(6):
        number = min(number + 2**32, 2**62)
        worker_obeyed(stage, number)
        stage.pass_s(0.2)
        assert stage.leader.term is not None, number
    assert stage.leader.term == mine(1)


def test_a_lower_claim_shows_that_what_a_new_scheduler_counted_from_was_forged() -> None:
    stage = Stage()
    worker_obeyed(stage, 2**50).silent = True
    true = lead(stage, 4)
    stage.pass_s(2)
    true.silent = True
    stage.pass_s(3)
    assert stage.leader.term == mine(5)


def test_a_worker_far_below_a_live_leader_does_not_show_that_it_was_forged() -> None:
    """Two standbys that counted from such workers' terms would take turns for ever."""
    stage = Stage()
    leader = lead(stage, 2**32 + 4)
    worker_obeyed(stage, 3)
    for _ in range(8):
        stage.pass_s(0.5)
        assert stage.leader.term is None
    leader.silent = True
    stage.pass_s(3)
    assert stage.leader.term is not None


def test_a_leader_that_fails_leaves_its_place_to_a_standby() -> None:
    stage, *_ = usual()
    assert stage.leader.start_over() is not None
    stage.pass_s(0.4)
    assert stage.leader.term is None
    standby = lead(stage, 2)
    stage.pass_s(60)
    assert stage.leader.term is None
    standby.silent = True
    stage.pass_s(3)
    assert stage.leader.term == mine(3)


def test_a_lone_leader_that_fails_each_time_pauses_ever_longer_up_to_a_bound() -> None:
    stage, *_ = usual()
    pauses: list[float] = []
    for longest_s in (1, 2, 4, 8, 16, 30, 30):
        pause_s = stage.leader.start_over()
        assert pause_s is not None
        assert stage.leader.start_over() is None, "it pauses already"
        assert longest_s / 2 <= pause_s <= longest_s
        pauses.append(pause_s / longest_s)
        stage.pass_s(pause_s - 0.2)
        assert stage.leader.term is None
        stage.pass_s(0.6)
        assert stage.leader.term is not None
    assert len(set(pauses)) == len(pauses), "two would fail in step"


def test_a_term_that_lasts_ends_the_row_of_failures() -> None:
    stage, *_ = usual()
    for _ in range(4):
        stage.leader.start_over()
        stage.pass_s(10)
    stage.pass_s(61)
    pause_s = stage.leader.start_over()
    assert pause_s is not None
    assert pause_s <= 1.0
