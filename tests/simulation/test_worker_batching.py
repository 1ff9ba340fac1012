"""Seeded worlds of the batching loop: random requests, drops and faults, checked at every step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.simulation.batching_world import Reported, World
from tests.simulation.hash_runner import both
from tests.simulation.worker_worlds import CALM, CROWDED, live
from tests.support import worker
from tests.support.worker import plain_runs

from antiphon.config.worker import Policy
from antiphon.model_worker.batching.mailbox import Mail
from antiphon.model_worker.batching.state import ChoiceKey, RequestState
from antiphon.wire.codec import pack_ids

POLICIES = [policy for policy in Policy if policy is not Policy.PRIORITY]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_starves_a_request_in_a_crowd(policy: Policy) -> None:
    world = World(1, policy=policy, max_overtake_s=20.0, queue_max=256, queue_timeout_s=None)
    for _ in range(60):
        world.turn(Mail(runs=plain_runs(world.new_choices())))
    live(world, 100)


@both
def test_the_crowded_worlds_retract_again_and_again(overlap: bool) -> None:
    world = live(World(0, overlap=overlap, **CROWDED), 250)
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


def test_the_calm_worlds_report_most_tokens_in_columns() -> None:
    worlds = [live(World(seed, **CALM), 300) for seed in range(3)]
    assert sum(world.seen["sampled"] for world in worlds) > 600


def test_a_request_moved_at_any_token_goes_on_as_if_it_had_stayed() -> None:
    world = World(5)
    key = ChoiceKey(0)
    sampling = {"max_new_tokens": 30, "seed": 4, "ignore_eos": True}
    state = worker.state([5, 6, 7], choice=1, deadline_unix_ms=5, **sampling)
    whole, _ = world.alone(state)
    for moved_at in range(1, 30):
        outputs = pack_ids(whole[:moved_at])
        moved = msgspec.structs.replace(state, output_ids=outputs)
        moved = msgspec.msgpack.decode(msgspec.msgpack.encode(moved), type=RequestState)
        world.reported[key] = Reported(moved, ids=whole[:moved_at])
        world.turn(Mail(runs=plain_runs({key: moved})))
        world.drain()
        assert world.reported[key].ids == whole


def test_a_dropped_choice_makes_room_for_one_of_the_same_mail() -> None:
    world = World(0, running_max=1, queue_max=8, priority=False, queue_timeout_s=None)

    def run(number: int) -> tuple[ChoiceKey, RequestState]:
        state = worker.state([5, 6, 7], max_new_tokens=20, ignore_eos=True)
        world.reported[ChoiceKey(number)] = Reported(state)
        return ChoiceKey(number), state

    world.turn(Mail(runs=plain_runs(run(number) for number in range(9))))
    assert len(world.batching.waiting) == 8
    world.reported[ChoiceKey(8)].dropped = True
    world.turn(Mail(runs=plain_runs([run(9)]), drops={ChoiceKey(8): None}))
    world.drain()
    world.verify(world.reported[ChoiceKey(9)])
    assert not world.seen["overloaded"]
