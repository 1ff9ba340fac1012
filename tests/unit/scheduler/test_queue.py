"""The schedule policy orders the leader's queue, not only what is bound to a worker."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.config.test_sglang import serve
from tests.unit.scheduler.stage import GATEWAY, Stage, full, other_attempt, running

from antiphon.config.worker import Policy
from antiphon.scheduler.leader_config import LeaderConfig
from antiphon.scheduler.outbox import ENVELOPE_BYTES, command_bytes
from antiphon.scheduler.queue import CACHE_WAITING_MAX, DrainRate, QueuePolicy, SchedulerQueue
from antiphon.scheduler.request_table import TOMBSTONES_MAX, SchedulerTombstones
from antiphon.scheduler.worker_caches import EXPECT_S
from antiphon.service.priority import PriorityPolicy
from antiphon.wire.base import Role
from antiphon.wire.codec import pack_ids, split_rows
from antiphon.wire.command import Abort, Admit, ChoiceOutput
from antiphon.wire.digests import BLOCK_TOKENS, DIGEST_BYTES, block_digests
from antiphon.wire.ids import InstanceId, RequestId
from antiphon.wire.sampling import SamplingParams

A, B, C, D = RequestId("a"), RequestId("b"), RequestId("c"), RequestId("d")
HIGH, LOW = -5, 0


def queue_of(*waiting: tuple[RequestId, int], overtake_s_max: float = 10.0) -> SchedulerQueue:
    """These have come one second after the other, with these ranks."""
    queue = SchedulerQueue(overtake_s_max, QueuePolicy(Policy.FCFS, lambda _: {}))
    for second, (request_id, rank) in enumerate(waiting):
        queue.put(request_id, (rank, 0.0, float(second), second))
    return queue


def test_of_one_rank_first_come_is_first_served() -> None:
    queue = queue_of((A, LOW), (B, LOW), (C, LOW))
    assert [queue.position(request_id) for request_id in (A, B, C)] == [0, 1, 2]
    queue.remove(A)
    assert list(queue.in_order(3.0)) == [B, C]
    assert queue.position(C) == 1


def test_higher_rank_goes_first() -> None:
    queue = queue_of((A, LOW), (B, LOW), (C, HIGH))
    assert list(queue.in_order(3.0)) == [C, A, B]
    assert queue.highest() == C
    assert [queue.position(request_id) for request_id in (A, B, C)] == [1, 2, 0]


def test_request_that_comes_back_takes_its_old_place() -> None:
    queue = queue_of((A, LOW), (B, LOW), (C, LOW))
    queue.start(A, 3.0)
    queue.put(D, (LOW, 0.0, 3.0, 3))
    queue.put(A, (LOW, 0.0, 0.0, 0))
    assert list(queue.in_order(4.0)) == [A, B, C, D]


def test_overtaken_request_alternates_with_those_that_outrank_it() -> None:
    highs = [RequestId(f"high-{number}") for number in range(4)]
    queue = queue_of((A, LOW), (B, LOW), *((high, HIGH) for high in highs), overtake_s_max=5.0)
    queue.start(highs[0], 10.0)
    assert next(queue.in_order(14.9)) == highs[1]
    order: list[RequestId] = []
    while queue:
        order.append(next(queue.in_order(15.0)))
        queue.start(order[-1], 15.0)
    assert order == [A, highs[1], B, highs[2], highs[3]]


def test_request_that_left_and_returned_was_not_overtaken_meanwhile() -> None:
    queue = queue_of((A, LOW), (B, HIGH), (C, HIGH), overtake_s_max=5.0)
    queue.start(B, 10.0)
    queue.remove(A)
    queue.put(A, (LOW, 0.0, 0.0, 0))
    assert next(queue.in_order(16.0)) == C
    queue.start(C, 16.0)
    assert list(queue.in_order(22.0)) == [A]


def test_position_of_a_request_that_does_not_wait_is_zero() -> None:
    assert queue_of().position(A) == 0
    assert queue_of().highest() is None


def test_retry_after_is_the_time_that_the_queue_takes_to_drain() -> None:
    rate = DrainRate()
    for second in range(11):
        rate.record(float(second))
    assert 18 <= rate.retry_after_s(waiting=20, now=11.0) <= 22


def test_retry_after_grows_while_nothing_leaves() -> None:
    rate = DrainRate()
    rate.record(0.0)
    rate.record(1.0)
    assert rate.retry_after_s(waiting=4, now=20.0) > rate.retry_after_s(waiting=4, now=2.0)


def test_retry_after_is_never_less_than_a_second_nor_more_than_a_minute() -> None:
    rate = DrainRate()
    assert rate.retry_after_s(waiting=5, now=0.0) == 1.0
    rate.record(0.0)
    assert rate.retry_after_s(waiting=1000, now=100.0) == 60.0


def admit(name: str, prompt_tokens: int) -> Admit:
    return Admit(
        request_id=RequestId(name),
        owner=GATEWAY,
        attempt=other_attempt(1),
        detokenizer=InstanceId("detokenizer-0"),
        prompt_ids=pack_ids(range(prompt_tokens)),
        choices=(ChoiceOutput(choice=0),),
        sampling=SamplingParams(max_new_tokens=1),
        deadline_unix_ms=0,
    )


def test_commands_are_cut_into_messages_that_fit_and_keep_their_order() -> None:
    commands = [admit(str(number), 1000) for number in range(5)]
    cut = split_rows(commands, command_bytes, bytes_max=2 * (ENVELOPE_BYTES + 4100))
    ids = ["".join(command.request_id for command in part) for part in cut]
    assert ids == ["01", "23", "4"]


def test_a_command_is_never_left_out_however_large() -> None:
    large, abort = admit("r", 1000), Abort(request_id=RequestId("s"), attempt=other_attempt(2))
    assert [*split_rows([large, abort], command_bytes, bytes_max=1)] == [[large], [abort]]


def test_tombstone_lasts_until_its_latest_time() -> None:
    tombstones = SchedulerTombstones()
    tombstones.add(RequestId("r"), GATEWAY, 2000)
    tombstones.add(RequestId("r"), GATEWAY, 1000)
    tombstones.add(RequestId("r"), GATEWAY, 3000)
    tombstones.expire(2999)
    assert tombstones.was_ended_by(RequestId("r"), GATEWAY)
    tombstones.expire(3000)
    assert not tombstones._dead


def test_there_are_never_more_tombstones_than_the_bound() -> None:
    tombstones = SchedulerTombstones()
    for number in range(TOMBSTONES_MAX + 10):
        tombstones.add(RequestId(str(number)), GATEWAY, number + 1)
    assert len(tombstones._dead) == TOMBSTONES_MAX
    assert RequestId("0") not in tombstones


def full_by(policy: Policy, **precedence: Any) -> Stage:
    """A leader with this policy whose worker is full; it expects no more blocks there."""
    rules = LeaderConfig(look_ahead=1, policy=policy, precedence=PriorityPolicy(**precedence))
    stage, _ = full(rules, report_s=EXPECT_S + 1)
    return stage


def drained(stage: Stage) -> list[str]:
    """The order in which the waiting requests are started, while one after the other ends."""
    gateway, worker = stage.first(Role.GATEWAY), stage.first(Role.WORKER)
    order: list[str] = []
    while worker.load.running:
        ended = worker.load.running[0]
        worker.runs(*worker.load.running[1:])
        gateway.closes(ended.request_id)
        admits = stage.admits()
        stage.actions.clear()
        order += [str(admit.request_id) for admit in admits]
        worker.runs(*worker.load.running, *map(running, admits))
        stage.pass_s(0.6)
    return order


def wait(stage: Stage, name: str, text: bytes, **fields: Any) -> None:
    """Submit a prompt with a block for each letter."""
    stage.submit_prompt(name, prompt_of(text), **fields)


def prompt_of(text: bytes) -> bytes:
    return pack_ids([letter for letter in text for _ in range(BLOCK_TOKENS)])


def holds(stage: Stage, *texts: bytes) -> None:
    chains = [block_digests(b"root", prompt_of(text)) for text in texts]
    stage.store(stage.first(Role.WORKER), *chains)


def test_lof_starts_the_longest_answers_first() -> None:
    stage = full_by(Policy.LOF)
    for name, tokens in (("short", 5), ("long", 50), ("middle", 20), ("long too", 50)):
        stage.submit(name, sampling=SamplingParams(max_new_tokens=tokens))
    assert drained(stage) == ["long", "long too", "middle", "short"]


def test_lpm_starts_the_longest_cached_prefix_first() -> None:
    stage = full_by(Policy.LPM)
    for name, text in (("none", b"xyz"), ("one", b"ayz"), ("three", b"abc"), ("two", b"abz")):
        wait(stage, name, text)
    holds(stage, b"abcd")
    stage.pass_s(0.1)
    assert drained(stage) == ["three", "two", "one", "none"]


def test_dfs_weight_starts_the_most_wanted_branch_first_and_keeps_it_together() -> None:
    stage = full_by(Policy.DFS_WEIGHT)
    for arrived in ("none xyz", "a ax", "ac1 acx", "bd bdx", "ac2 acy", "ac3 acz", "ad adx"):
        name, text = arrived.split()
        wait(stage, name, text.encode())
    holds(stage, b"ac", b"ad", b"bd")
    stage.pass_s(0.1)
    assert drained(stage) == ["ac1", "ac2", "ac3", "ad", "a", "bd", "none"]


def test_random_order_is_not_arrival_and_can_be_repeated() -> None:
    orders: list[list[str]] = []
    names = [f"r{number}" for number in range(12)]
    for _ in range(2):
        stage = full_by(Policy.RANDOM)
        for name in names:
            stage.submit(name)
        orders.append(drained(stage))
    assert orders[0] == orders[1] != names
    assert sorted(orders[0]) == sorted(names)


@pytest.mark.parametrize("policy", [Policy.LPM, Policy.LOF])
def test_priority_goes_before_the_policy(policy: Policy) -> None:
    stage = full_by(policy, priority=True, preempt_threshold=100)
    holds(stage, b"ab")
    wait(stage, "cached", b"abc")
    wait(stage, "high", b"xyz", priority=1)
    stage.pass_s(0.1)
    assert drained(stage) == ["high", "cached"]


@pytest.mark.parametrize("policy", [Policy.LPM, Policy.LOF])
def test_policy_lets_no_request_be_overtaken_for_ever(policy: Policy) -> None:
    stage = full_by(policy, max_overtake_s=2.0)
    holds(stage, b"ab")
    wait(stage, "poor", b"xyz")
    stage.pass_s(0.1)
    for number in range(12):
        wait(stage, f"r{number}", b"abc", sampling=SamplingParams(max_new_tokens=50))
    stage.pass_s(0.1)
    order = drained(stage)
    # Every request takes 0.6 s: after four of them it has been overtaken for 2 s.
    assert 3 <= order.index("poor") <= 6


def test_cache_order_gives_way_to_arrival_in_a_long_queue() -> None:
    stage = full_by(Policy.LPM)
    holds(stage, b"ab")
    for number in range(CACHE_WAITING_MAX):
        wait(stage, f"r{number}", b"x")
    wait(stage, "cached", b"abc")
    stage.pass_s(0.1)
    assert drained(stage)[:3] == ["r0", "cached", "r1"]


def test_cache_order_looks_at_the_caches_no_more_often_than_it_must() -> None:
    stage = full_by(Policy.LPM)
    for number in range(50):
        wait(stage, f"r{number}", b"abc")
    looked = 0
    index = stage.leader.caches._index
    overlaps = index.overlaps

    def counted(digests: bytes) -> object:
        nonlocal looked
        looked += len(digests) >= DIGEST_BYTES
        return overlaps(digests)

    index.overlaps = counted  # type: ignore[assignment,method-assign]
    tenure = stage.leader._leader_term
    assert tenure is not None
    for _ in range(20):
        tenure.bind_waiting()
    assert looked <= 50


def test_schedule_policy_reaches_the_leader() -> None:
    assert LeaderConfig.of(serve("--schedule-policy lof").settings).policy is Policy.LOF
