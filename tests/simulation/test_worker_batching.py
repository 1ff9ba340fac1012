"""Seeded worlds of the batching loop: random requests, drops and faults, checked at every step."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.simulation.batching_world import Reported, World
from tests.simulation.hash_runner import both
from tests.support import worker

from antiphon.config.worker import Policy
from antiphon.model_worker.batching.mailbox import Mail
from antiphon.model_worker.batching.state import ChoiceKey, RequestState
from antiphon.wire.codec import pack_ids

POLICIES = [policy for policy in Policy if policy is not Policy.PRIORITY]
CALM: dict[str, Any] = {
    "window": False,
    "state": "no",
    "stream_interval": 1,
    "priority": False,
    "returned": 0.0,
}
"""So that most tokens are reported in columns."""


def live(world: World, turns: int) -> World:
    """Let a world live; nothing is left of it but what is cached, and a flush takes that, too."""
    for _ in range(turns):
        world.act()
    world.drain()
    assert len(world.reported) > turns // 8
    for reported in world.reported.values():
        world.verify(reported)
    assert world.pools.used() == world.pools.loose()
    world.batching.flush()
    failures = world.turn().failures
    assert world.pools.used() == [0] * len(world.groups)
    if not failures:  # else a logged traceback may hold on to a request
        gc.collect()
        assert not world.batching.batch.store.used_count, "ids of ended choices are left"
    return world


@both
@pytest.mark.parametrize("seed", range(10))
def test_every_choice_says_what_it_says_alone_and_leaves_nothing(seed: int, overlap: bool) -> None:
    live(World(seed, overlap=overlap), 200)


@both
@pytest.mark.parametrize("seed", range(4))
def test_a_long_life_wears_nothing_out(seed: int, overlap: bool) -> None:
    world = live(World(seed, overlap=overlap), 4_000)
    assert world.turns > 4_000


@both
@pytest.mark.parametrize("seed", range(10))
def test_with_states_every_choice_says_the_same_with_and_without_checkpoints(
    seed: int, overlap: bool
) -> None:
    for cached in (False, True):
        live(World(seed, overlap=overlap, state="yes", cached=cached), 150)


@pytest.mark.long
@pytest.mark.timeout(900)
@both
def test_a_thousand_worlds(overlap: bool) -> None:
    for seed in range(1_000, 2_000):
        try:
            live(World(seed, overlap=overlap), 100)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_starves_a_request_in_a_crowd(policy: Policy) -> None:
    world = World(1, policy=policy, max_overtake_s=20.0, queue_max=256, queue_timeout_s=None)
    for _ in range(60):
        world.turn(Mail(runs=dict(world.new_choices())))
    live(world, 100)


@both
@pytest.mark.parametrize("seed", range(4))
def test_who_is_retracted_again_and_again_still_says_the_same(seed: int, overlap: bool) -> None:
    hopeful = {"conservativeness": 0.0, "exact_share": 0.0, "running_max": 16, "prompt_max": 8}
    busy = {"arrivals": [0, 2, 3], "step_tokens_max": 256, "chunk_tokens": 64, "fill_tokens": None}
    world = live(World(seed, overlap=overlap, state="no", returned=0.0, **hopeful, **busy), 250)
    assert world.batching.planner.retractions > 1


@pytest.mark.parametrize(
    ("wanted", "said", "seeds"),
    [
        (
            "stop, length, internal, invalid_request, prompt_too_long, overloaded, deadline,"
            " retracted, preempted, cached, forked, overtaken, urgent, returned",
            {},
            60,
        ),
        (
            "cached, retracted, checkpoint, read by several",
            {"state": "yes", "cached": True},
            30,
        ),
    ],
    ids=["every corner", "with states"],
)
def test_the_worlds_reach_what_they_are_for(wanted: str, said: dict[str, Any], seeds: int) -> None:
    """Worlds live, one after the other, until all that is wanted has come about."""
    missing = set(wanted.split(", "))
    for seed in range(seeds):
        world = World(seed, **said)
        for _ in range(100):
            world.act()
        counts = {
            "retracted": world.batching.planner.retractions,
            "preempted": world.batching.planner.preemptions,
        }
        missing -= set(+(world.seen + Counter(counts)))
        if not missing:
            break
    assert not missing


def test_where_little_happens_every_choice_says_what_it_says_alone() -> None:
    sizes = {"running_max": 16, "prompt_max": 20, "arrivals": [0] * 5 + [1]}
    worlds = [live(World(seed, **CALM, **sizes), 300) for seed in range(10)]
    assert sum(world.seen["sampled"] for world in worlds) > 2_000


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
        world.reported[key] = Reported(moved, ids=whole[:moved_at])
        world.turn(Mail(runs={key: moved}))
        world.drain()
        assert world.reported[key].ids == whole
