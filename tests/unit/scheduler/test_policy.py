"""The schedule policy orders the leader's queue, not only what is bound to a worker."""

from __future__ import annotations

import pytest
from tests.unit.config.test_sglang import serve
from tests.unit.scheduler.stage import Actor, Stage, running, usual

from antiphon.config.worker import Policy
from antiphon.scheduler.leader_config import LeaderConfig
from antiphon.scheduler.queue import CACHE_WAITING_MAX
from antiphon.scheduler.worker_caches import EXPECT_S
from antiphon.service.priority import PriorityPolicy
from antiphon.wire.base import Role
from antiphon.wire.codec import pack_ids
from antiphon.wire.digests import BLOCK_TOKENS, DIGEST_BYTES, block_digests
from antiphon.wire.kv_events import BlocksStored, KvEvents
from antiphon.wire.sampling import SamplingParams


def full(policy: Policy, **precedence: object) -> Stage:
    """A leader whose one worker has all three requests that it is given."""
    rules = LeaderConfig(look_ahead=1, policy=policy, precedence=PriorityPolicy(**precedence))  # type: ignore[arg-type]
    stage, _, worker, _ = usual(rules)
    for number in range(3):
        stage.submit(f"first-{number}")
    worker.runs(*map(running, stage.admits()))
    stage.pass_s(EXPECT_S + 1)
    stage.actions.clear()
    return stage


def worker_of(stage: Stage) -> Actor:
    return next(actor for actor in stage.actors if actor.role is Role.WORKER)


def drained(stage: Stage) -> list[str]:
    """The order in which the waiting requests are started, while one after the other ends."""
    gateway = next(actor for actor in stage.actors if actor.role is Role.GATEWAY)
    worker = worker_of(stage)
    order: list[str] = []
    while worker.load.running:
        ended = worker.load.running[0]
        worker.runs(*worker.load.running[1:])
        gateway.closes(ended.request_id)
        stage.listen()
        admits = stage.admits()
        stage.actions.clear()
        order += [str(admit.request_id) for admit in admits]
        worker.runs(*worker.load.running, *map(running, admits))
        stage.pass_s(0.6)
    return order


def wait(stage: Stage, name: str, text: bytes, priority: int = 0) -> None:
    """Submit a prompt with a block for each letter."""
    prompt = prompt_of(text)
    digests = block_digests(b"root", prompt)
    stage.submit(name, prompt_ids=prompt, block_digests=digests, priority=priority)


def prompt_of(text: bytes) -> bytes:
    return pack_ids([letter for letter in text for _ in range(BLOCK_TOKENS)])


def holds(stage: Stage, *texts: bytes) -> None:
    """The worker reports these prefixes as cached."""
    events = tuple(
        BlocksStored(parent=b"root", digests=block_digests(b"root", prompt_of(text)))
        for text in texts
    )
    worker = worker_of(stage)
    stage.leader.caches.apply_events(
        KvEvents(worker=worker.process, seq=len(events), events=events)
    )


def test_lof_starts_the_longest_answers_first() -> None:
    stage = full(Policy.LOF)
    for name, tokens in (("short", 5), ("long", 50), ("middle", 20), ("long too", 50)):
        stage.submit(name, sampling=SamplingParams(max_new_tokens=tokens))
    assert drained(stage) == ["long", "long too", "middle", "short"]


def test_lpm_starts_the_longest_cached_prefix_first() -> None:
    stage = full(Policy.LPM)
    for name, text in (("none", b"xyz"), ("one", b"ayz"), ("three", b"abc"), ("two", b"abz")):
        wait(stage, name, text)
    holds(stage, b"abcd")
    stage.pass_s(0.1)
    assert drained(stage) == ["three", "two", "one", "none"]


def test_dfs_weight_starts_the_most_wanted_branch_first_and_keeps_it_together() -> None:
    stage = full(Policy.DFS_WEIGHT)
    arrived = (
        ("none", b"xyz"),
        ("a", b"ax"),
        ("ac 1", b"acx"),
        ("bd", b"bdx"),
        ("ac 2", b"acy"),
        ("ac 3", b"acz"),
        ("ad", b"adx"),
    )
    for name, text in arrived:
        wait(stage, name, text)
    holds(stage, b"ac", b"ad", b"bd")
    stage.pass_s(0.1)
    assert drained(stage) == ["ac 1", "ac 2", "ac 3", "ad", "a", "bd", "none"]


def test_random_order_is_not_arrival_and_can_be_repeated() -> None:
    orders: list[list[str]] = []
    names = [f"r{number}" for number in range(12)]
    for _ in range(2):
        stage = full(Policy.RANDOM)
        for name in names:
            stage.submit(name)
        orders.append(drained(stage))
    assert orders[0] == orders[1] != names
    assert sorted(orders[0]) == sorted(names)


@pytest.mark.parametrize("policy", [Policy.LPM, Policy.LOF])
def test_priority_goes_before_the_policy(policy: Policy) -> None:
    stage = full(policy, priority=True, preempt_threshold=100)
    holds(stage, b"ab")
    wait(stage, "cached", b"abc")
    wait(stage, "high", b"xyz", priority=1)
    stage.pass_s(0.1)
    assert drained(stage) == ["high", "cached"]


@pytest.mark.parametrize("policy", [Policy.LPM, Policy.LOF])
def test_policy_lets_no_request_be_overtaken_for_ever(policy: Policy) -> None:
    stage = full(policy, max_overtake_s=2.0)
    holds(stage, b"ab")
    wait(stage, "poor", b"xyz")
    stage.pass_s(0.1)
    for number in range(12):
        long = SamplingParams(max_new_tokens=50)
        prompt = prompt_of(b"abc")
        digests = block_digests(b"root", prompt)
        stage.submit(f"r{number}", prompt_ids=prompt, block_digests=digests, sampling=long)
    stage.pass_s(0.1)
    order = drained(stage)
    # Every request takes 0.6 s: after four of them it has been overtaken for 2 s.
    assert 3 <= order.index("poor") <= 6


def test_cache_order_gives_way_to_arrival_in_a_long_queue() -> None:
    stage = full(Policy.LPM)
    holds(stage, b"ab")
    for number in range(CACHE_WAITING_MAX):
        wait(stage, f"r{number}", b"x")
    wait(stage, "cached", b"abc")
    stage.pass_s(0.1)
    assert drained(stage)[:3] == ["r0", "cached", "r1"]


def test_cache_order_looks_at_the_caches_no_more_often_than_it_must() -> None:
    stage = full(Policy.LPM)
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
