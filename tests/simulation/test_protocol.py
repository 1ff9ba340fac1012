"""The whole protocol on a virtual clock: owner, leader, worker output and detokenizer together.

A failing test names its seed; the same seed fails in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from tests.simulation.protocol_network import Weather
from tests.simulation.protocol_world import SETTLE_S, World

from antiphon.wire.errors import Cancelled

Fault = Callable[[World], None]

FAULTS: tuple[Fault, ...] = (
    World.crash_worker,
    World.drain_worker,
    World.pause_worker,
    World.crash_scheduler,
    World.crash_leader,
    World.crash_detokenizer,
    World.crash_gateway,
    World.freeze,
    World.mute,
    World.deaf,
    World.outage,
    World.forge,
    World.forge_terms,
    World.replace_frozen_worker,
    World.replace_frozen_scheduler,
    World.replace_frozen_detokenizer,
    World.replace_frozen_gateway,
)
UNNOTICED: tuple[Fault, ...] = (
    World.drain_worker,
    World.pause_worker,
    World.crash_scheduler,
    World.crash_leader,
    World.short_outage,
    World.forge,
    World.freeze_gateway,
)
RECOVERY_S = 12.0


def name(fault: Fault) -> str:
    return fault.__name__


@pytest.mark.parametrize("seed", range(4))
def test_in_fair_weather_every_request_succeeds(seed: int) -> None:
    world = World(seed, Weather())
    world.run(SETTLE_S)
    world.load(40, 10, deadline_s=(15, 30))
    world.finish()
    assert_all_succeeded(world)


@pytest.mark.parametrize("apart_s", [2.5, 4.8])
@pytest.mark.parametrize("seed", range(3))
def test_clocks_that_are_seconds_apart_lose_no_request(seed: int, apart_s: float) -> None:
    """Deadlines are met by the clocks of the owners, and nothing stays behind anywhere."""
    world = World(seed, Weather(), apart_s=apart_s)
    world.run(SETTLE_S)
    world.load(40, 10, deadline_s=(15, 30))
    world.finish()
    assert_all_succeeded(world)


@pytest.mark.parametrize("fault", FAULTS, ids=name)
def test_clocks_that_are_seconds_apart_do_no_harm_in_faults(fault: Fault) -> None:
    world = World(7, Weather(delay_s=0.005), apart_s=4.8)
    weather_fault(world, fault)


@pytest.mark.parametrize("seed", range(8))
def test_lost_and_repeated_messages_lose_no_request(seed: int) -> None:
    weather_the_loss(seed)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_given_back_before_it_began_runs_once_and_elsewhere(seed: int) -> None:
    give_back_at_will(seed)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_given_back_in_bad_weather_is_not_lost(seed: int) -> None:
    give_back_in_bad_weather(seed)


@pytest.mark.parametrize("fault", UNNOTICED, ids=name)
@pytest.mark.parametrize("seed", range(3))
def test_no_request_notices_a_dead_scheduler_or_a_short_outage(fault: Fault, seed: int) -> None:
    weather_unnoticed(fault, seed)


@pytest.mark.parametrize("fault", FAULTS, ids=name)
@pytest.mark.parametrize("seed", range(3))
def test_after_one_fault_nothing_hangs_and_new_requests_succeed(fault: Fault, seed: int) -> None:
    weather_one(fault, seed)


@pytest.mark.parametrize("seed", range(4))
def test_an_owner_that_nobody_heard_is_told_soon_what_was_lost(seed: int) -> None:
    """Workers have let go of what it shows; whoever knows nothing of that waits for no deadline."""
    world = World(seed, Weather(delay_s=0.005))
    world.run(SETTLE_S)
    world.load(40, 8, deadline_s=(40, 50))
    gateway = world.gateways[0]
    world.timeline.after(6.0, lambda: setattr(gateway, "mute_until", world.now + 4))
    world.run(8 + 8)
    world.check_recovered()
    world.finish()


@pytest.mark.parametrize("seed", range(4))
def test_a_leader_that_missed_the_one_between_goes_on(seed: int) -> None:
    """Cut off it is followed by another, who accepts requests, starts none, and dies unheard."""
    world = World(seed, Weather(delay_s=0.005))
    world.run(SETTLE_S)
    first, between = sorted(world.schedulers, key=lambda node: node.leader.term is None)
    for worker in world.workers:
        worker.pause(10)
    asked = [world.ask(40) for _ in range(4)]
    world.run(0.5)
    first.mute_until = first.deaf_until = world.now + 6
    world.run(4)
    assert between.leader.term, "nobody leads in its place"
    asked += [world.ask(40) for _ in range(4)]
    world.run(1)
    between.die()
    world.run(10 + RECOVERY_S)
    assert first.leader.term
    assert all(story.ended for story in asked)
    assert [story.error for story in asked] == [None] * len(asked)


@pytest.mark.parametrize("seed", range(6))
def test_forged_terms_stop_no_request_for_longer_than_some_heartbeats(seed: int) -> None:
    forge_and_restart(seed)


@pytest.mark.parametrize("number", [2**32, 2**62 - 1, 2**62, 2**63 - 1])
@pytest.mark.parametrize("who", ["stranger", "leader", "worker", "command"])
def test_one_forged_term_leaves_later_processes_able_to_follow(who: str, number: int) -> None:
    """Whatever it was forged in, and whichever processes are started afterwards."""
    world = World(0, Weather(delay_s=0.005))
    world.run(SETTLE_S)
    world.forge_term_of(who, number)
    world.run(RECOVERY_S)
    for restart in (world.crash_worker, world.crash_gateway, world.crash_leader):
        restart()
        world.run(RECOVERY_S)
        asked = [world.ask(20) for _ in range(8)]
        world.run(RECOVERY_S)
        assert [story.ended and story.error for story in asked] == [None] * len(asked)
    world.finish()


@pytest.mark.parametrize("seed", [*range(16), 66, 147])
def test_in_a_storm_of_faults_the_promises_hold(seed: int) -> None:
    weather_a_storm(seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("hundred", range(1, 6))
def test_five_hundred_seeds_of_each_kind(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        print("seed", seed)
        weather_the_loss(seed)
        weather_a_storm(seed)
        give_back_at_will(seed)
        give_back_in_bad_weather(seed)
        weather_one(FAULTS[seed % len(FAULTS)], seed)
        weather_unnoticed(UNNOTICED[seed % len(UNNOTICED)], seed)
        forge_and_restart(seed)


def forge_and_restart(seed: int) -> None:
    """Terms are forged while processes die and come back; some heartbeats later all is well."""
    world = World(seed, Weather(delay_s=0.005))
    world.run(world.random.choice((0.6, SETTLE_S)))  # some forge before any scheduler leads
    world.load(20, 8, deadline_s=(30, 40))
    for _ in range(4):
        world.timeline.after(world.random.uniform(0, 6), world.forge_terms)
        world.timeline.after(world.random.uniform(0, 10), world.random.choice(restarts(world)))
    world.run(12 + RECOVERY_S)
    asked = [world.ask(20) for _ in range(8)]
    world.run(RECOVERY_S)
    world.check_recovered()
    world.finish()
    assert [story.error for story in asked] == [None] * len(asked)


def restarts(world: World) -> tuple[Callable[[], None], ...]:
    return (world.crash_worker, world.crash_gateway, world.crash_scheduler, world.crash_leader)


def weather_the_loss(seed: int) -> None:
    world = World(seed, Weather(loss=0.05, repeat=0.05, delay_s=0.01))
    world.run(SETTLE_S)
    world.load(30, 10, deadline_s=(40, 50))
    world.run(30)
    world.finish()
    assert_all_succeeded(world)


def give_back_at_will(seed: int) -> None:
    """Workers give back what waits whenever they like, and are drained one after the other."""
    world = World(seed, Weather(), fickle=0.3)
    world.run(SETTLE_S)
    world.load(100, 8, deadline_s=(40, 50))
    for when in (3.0, 9.0):
        world.timeline.after(when, world.drain_worker)
    world.run(8 + 2 * RECOVERY_S)
    world.check_recovered()
    world.finish()
    assert_all_succeeded(world)
    returned = sum(worker.output.requeued_count for worker in world.workers)
    assert returned, "nothing was given back"
    assert set(world.begun.values()) == {1}, "a request ran twice"


def give_back_in_bad_weather(seed: int) -> None:
    world = World(seed, Weather(loss=0.05, repeat=0.05, delay_s=0.01), fickle=0.3)
    world.run(SETTLE_S)
    world.load(30, 10, deadline_s=(40, 50))
    world.timeline.after(5.0, world.drain_worker)
    world.run(30)
    world.finish()
    assert_all_succeeded(world)


def weather_unnoticed(fault: Fault, seed: int) -> None:
    world = World(seed, Weather(delay_s=0.005))
    world.run(SETTLE_S)
    world.load(40, 8, deadline_s=(40, 50))
    world.timeline.after(world.random.uniform(0, 8), lambda: fault(world))
    world.run(8 + RECOVERY_S)
    world.check_recovered()
    world.finish()
    assert_all_succeeded(world)


def weather_one(fault: Fault, seed: int) -> None:
    weather_fault(World(seed, Weather(delay_s=0.005)), fault)


def weather_fault(world: World, fault: Fault) -> None:
    world.run(SETTLE_S)
    world.load(40, 8, deadline_s=(5, 40))
    world.timeline.after(world.random.uniform(0, 8), lambda: fault(world))
    world.run(8 + RECOVERY_S)
    world.check_recovered()
    late = [world.ask(20) for _ in range(8)]
    world.finish()
    assert [story.error for story in late] == [None] * len(late)


def weather_a_storm(seed: int) -> None:
    world = World(seed, Weather(loss=0.01, repeat=0.01, delay_s=0.02), queue_max=20)
    world.load(60, 25, deadline_s=(1, 30))
    for _ in range(12):
        fault = world.random.choice(FAULTS)
        world.timeline.after(world.random.uniform(0, 30), lambda fault=fault: fault(world))
    world.run(45)
    world.finish()
    assert any(story.ended and story.error is None for story in world.stories.values())


def assert_all_succeeded(world: World) -> None:
    """Whoever did not leave has all of the answer."""
    codes = Counter(
        story.error.code
        for story in world.stories.values()
        if story.error is not None and not (story.left and isinstance(story.error, Cancelled))
    )
    assert not codes, codes
