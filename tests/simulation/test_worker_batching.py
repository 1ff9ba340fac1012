"""Seeded worlds of the batching loop: random requests, drops and faults, checked at every step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.simulation.batching_world import Told, World
from tests.support import worker

from antiphon.config.worker import Policy
from antiphon.model_worker.batching.mailbox import Mail
from antiphon.model_worker.batching.state import ChoiceKey, RequestState
from antiphon.wire.codec import pack_ids, unpack_ids

if TYPE_CHECKING:
    from collections.abc import Iterable

POLICIES = [policy for policy in Policy if policy is not Policy.PRIORITY]


def live(world: World, turns: int) -> None:
    for _ in range(turns):
        world.act()
    world.drain()
    assert len(world.told) > turns // 8
    for told in world.told.values():
        world.verify(told)


def check_empty(world: World) -> None:
    """Nothing is left but what is cached, and a flush takes that, too."""
    assert world.pools.used() == world.pools.loose()
    world.batching.flush()
    world.turn()
    assert world.pools.used() == [0] * len(world.groups)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("seed", range(10))
def test_every_choice_says_what_it_says_alone_and_leaves_nothing(seed: int, overlap: bool) -> None:
    world = World(seed, overlap=overlap)
    live(world, 200)
    check_empty(world)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("seed", range(4))
def test_a_long_life_wears_nothing_out(seed: int, overlap: bool) -> None:
    world = World(seed, overlap=overlap)
    live(world, 4_000)
    assert world.turns > 4_000
    check_empty(world)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("seed", range(10))
def test_with_states_every_choice_says_the_same_with_and_without_checkpoints(
    seed: int, overlap: bool
) -> None:
    for cached in (False, True):
        world = World(seed, overlap=overlap, state="yes", cached=cached)
        live(world, 150)
        check_empty(world)


def test_the_worlds_with_states_reach_hits_retractions_and_lost_checkpoints() -> None:
    wanted = {"cached", "retracted", "checkpoint", "read by several"}
    seen = reached(wanted, (World(seed, state="yes", cached=True) for seed in range(30)))
    assert set(seen) >= wanted, seen


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_a_thousand_worlds(overlap: bool) -> None:
    for seed in range(1_000, 2_000):
        world = World(seed, overlap=overlap)
        try:
            live(world, 100)
            check_empty(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_starves_anybody_in_a_crowd(policy: Policy) -> None:
    world = World(1, policy=policy, max_overtake_s=20.0, queue_max=256, queue_timeout_s=None)
    for _ in range(60):
        world.turn(Mail(runs=dict(world.new_choices())))
    live(world, 100)
    check_empty(world)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("seed", range(4))
def test_who_is_retracted_again_and_again_still_says_the_same(seed: int, overlap: bool) -> None:
    hopeful = {"conservativeness": 0.0, "exact_share": 0.0, "running_max": 16, "prompt_max": 12}
    busy = {"arrivals": [0, 1, 3], "step_tokens_max": 256, "chunk_tokens": 64, "fill_tokens": None}
    world = World(seed, overlap=overlap, state="no", returned=0.0, **hopeful, **busy)
    live(world, 150)
    assert world.batching.planner.retractions > 1
    check_empty(world)


def test_the_worlds_reach_every_corner() -> None:
    wanted = {"stop", "length", "internal", "invalid_request", "prompt_too_long"}
    wanted |= {"overloaded", "deadline"}
    wanted |= {"retracted", "preempted", "cached", "forked", "overtaken", "urgent", "returned"}
    seen = reached(wanted, (World(seed) for seed in range(60)))
    assert set(seen) >= wanted, seen


def test_steady_rows_meet_whoever_waits_ends_and_fails() -> None:
    calm = {"window": False, "state": "no", "stream_interval": 1, "accepted_max": 1}
    calm |= {"arrivals": [0] * 9 + [1], "returned": 0.0, "priority": False}
    wanted = {f"steady{more}" for more in ("", ", and some wait", ", and somebody ends")}
    wanted |= {"steady, and fails"}
    seen = reached(wanted, (World(seed, **calm) for seed in range(60)))
    assert set(seen) >= wanted, seen


def test_where_little_happens_every_choice_says_what_it_says_alone() -> None:
    calm = {"window": False, "state": "no", "stream_interval": 1, "accepted_max": 1}
    calm |= {"running_max": 16, "prompt_max": 20, "priority": False, "returned": 0.0}
    steady = 0
    for seed in range(10):
        world = World(seed, **calm, arrivals=[0] * 5 + [1])
        live(world, 300)
        check_empty(world)
        steady += world.seen["steady"]
    assert steady > 200


def reached(wanted: set[str], worlds: Iterable[World]) -> Counter[str]:
    """Let worlds live, one after the other, until all that is wanted has come about."""
    seen: Counter[str] = Counter()
    for world in worlds:
        for _ in range(100):
            world.act()
        counts = {
            "retracted": world.batching.planner.retractions,
            "preempted": world.batching.planner.preemptions,
        }
        seen += world.seen + Counter(counts)
        if seen.keys() >= wanted:
            break
    return seen


def test_a_request_moved_at_any_token_goes_on_as_if_it_had_stayed() -> None:
    world = World(5)
    key = ChoiceKey(0)
    sampling = {"max_new_tokens": 30, "seed": 4, "ignore_eos": True}
    state = worker.state([5, 6, 7], choice=1, deadline_unix_ms=5, **sampling)
    whole, _ = world.alone(state)
    for moved_at in range(1, 30):
        moved = msgspec.structs.replace(
            state, output_ids=pack_ids(whole[:moved_at]), emitted=moved_at, weights_digest="w"
        )
        moved = msgspec.msgpack.decode(msgspec.msgpack.encode(moved), type=RequestState)
        world.told[key] = Told(moved, ids=whole[:moved_at])
        world.turn(Mail(runs={key: moved}))
        world.drain()
        assert world.told[key].ids == whole


def test_the_state_of_a_running_request_is_all_that_it_takes() -> None:
    world = World(5, stream_interval=1, fill_tokens=None, running_timeout_s=None)
    fields = {"choice": 1, "priority": 2, "deadline_unix_ms": 5}
    state = worker.state([1, 2, 3], max_new_tokens=9, ignore_eos=True, **fields)
    key = ChoiceKey(0)
    world.told[key] = Told(state)
    world.turn(Mail(runs={key: state}))
    (request,) = world.batching.running.values()
    while not world.told[key].ids:
        world.turn()
    snapshot = request.snapshot()
    assert list(unpack_ids(snapshot.output_ids)) == world.told[key].ids
    assert snapshot.emitted == len(world.told[key].ids)
    assert msgspec.structs.replace(snapshot, output_ids=b"", emitted=0, weights_digest="") == state
