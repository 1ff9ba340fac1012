"""The whole protocol on a virtual clock: owner, leader, worker output and detokenizer together.

A failing test names its seed; the same seed fails in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.simulation.protocol_network import Weather
from tests.simulation.protocol_world import SETTLE_S, World, note_silences
from tests.simulation.seed_batch import SeedBatch

from antiphon.wire.errors import Cancelled, RequestQuarantined, WorkerLost

Fault = Callable[[World], None]


def crash(kind: str) -> Fault:
    return partial(World.crash, kind=kind)


def deaf(kind: str) -> Fault:
    return partial(World.deaf_one, kind=kind)


def replace_frozen(kind: str) -> Fault:
    return partial(World.replace_frozen, kind=kind)


FAULTS: dict[str, Fault] = {
    "crash_worker": crash("worker"),
    "drain_worker": World.drain_worker,
    "drain_and_migrate": partial(World.drain_worker, migrate=True),
    "pause_worker": World.pause_worker,
    "crash_scheduler": crash("scheduler"),
    "crash_leader": World.crash_leader,
    "crash_detokenizer": crash("detokenizer"),
    "crash_gateway": crash("gateway"),
    "crash_host": World.crash_host,
    "crash_worker_beside_frozen_detokenizer": World.crash_worker_beside_frozen_detokenizer,
    "freeze": World.freeze,
    "mute": World.mute,
    "deaf": World.deaf,
    "disconnect": World.disconnect,
    "outage": World.outage,
    "forge": World.forge,
    "forge_terms": World.forge_terms,
    "replace_frozen_worker": replace_frozen("worker"),
    "replace_frozen_scheduler": replace_frozen("scheduler"),
    "replace_frozen_detokenizer": replace_frozen("detokenizer"),
    "replace_frozen_gateway": replace_frozen("gateway"),
}
UNNOTICED: dict[str, Fault] = {
    name: FAULTS[name]
    for name in (
        "drain_worker",
        "drain_and_migrate",
        "pause_worker",
        "crash_scheduler",
        "crash_leader",
        "crash_worker",
        "crash_detokenizer",
        "crash_host",
        "crash_worker_beside_frozen_detokenizer",
        "replace_frozen_worker",
        "replace_frozen_detokenizer",
    )
} | {
    "crash_hosts": World.crash_hosts,
    "short_outage": World.short_outage,
    "disconnect": World.disconnect,
    "deaf_worker": deaf("worker"),
    "deaf_detokenizer": deaf("detokenizer"),
    "forge": World.forge,
    "freeze_gateway": World.freeze_gateway,
}
RESTARTS = [FAULTS[f"crash_{kind}"] for kind in ("worker", "gateway", "scheduler", "leader")]
SLOW = Weather(delay_s=0.005)
BAD = Weather(loss=0.05, repeat=0.05, delay_s=0.01)
RECOVERY_S = 12.0
SMALL_MESSAGE_BYTES = 24 * 1024
"""Token outputs of a whole answer are up to six times as large."""
LARGE = (
    "crash_worker",
    "drain_worker",
    "crash_leader",
    "crash_detokenizer",
    "replace_frozen_worker",
)
"""Faults for which one place is left that has all of an output."""

faults = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)


def loaded(
    seed: int,
    weather: Weather,
    clients: int,
    over_s: float,
    deadline_s: tuple[float, float] = (40, 50),
    **options: Any,
) -> World:
    """A cluster that has settled, and whose clients come from now on."""
    world = World(seed, weather, **options)
    world.run(SETTLE_S)
    world.load(clients, over_s, deadline_s=deadline_s)
    return world


@pytest.mark.timeout(60)
def test_in_fair_weather_every_request_succeeds() -> None:
    """Their workers retract and preempt requests, verify drafts, and launch steps ahead."""
    seen = Counter[str]()
    for seed in range(3):
        print("seed", seed)
        world = loaded(seed, Weather(), 40, 10, (15, 30))
        world.finish()
        assert_all_succeeded(world)
        for worker in world.workers:
            totals = worker.engine.last.totals
            seen["retracted"] += totals.retractions
            seen["preempted"] += totals.preemptions
            seen["accepted"] += totals.drafts_accepted
            seen["rejected"] += totals.drafts_proposed - totals.drafts_accepted
            seen["ahead" if worker.engine.ahead else "in turn"] += 1
    assert (+seen).keys() == {"retracted", "preempted", "accepted", "rejected", "ahead", "in turn"}


@pytest.mark.parametrize("apart_s", [2.5, 4.8])
@pytest.mark.parametrize("seed", range(3))
def test_clocks_that_are_seconds_apart_lose_no_request(seed: int, apart_s: float) -> None:
    """Deadlines are met by the clocks of the owners, and nothing stays behind anywhere."""
    world = loaded(seed, Weather(), 40, 10, (15, 30), apart_s=apart_s)
    world.finish()
    assert_all_succeeded(world)


@faults
@pytest.mark.parametrize(
    ("seed", "apart_s"),
    [(0, 0.0), (1, 0.0), (7, 4.8)],
    ids=["0", "1", "clocks that are seconds apart"],
)
def test_after_one_fault_nothing_hangs_and_new_requests_succeed(
    fault: Fault, seed: int, apart_s: float
) -> None:
    world = loaded(seed, SLOW, 40, 8, (5, 40), apart_s=apart_s)
    world.timeline.after(world.random.uniform(0, 8), lambda: fault(world))
    world.run(8 + RECOVERY_S)
    world.check_recovered()
    late = [world.ask(20) for _ in range(8)]
    world.finish()
    assert [story.error for story in late] == [None] * len(late)


@pytest.mark.parametrize("seed", [*range(8), 536])
def test_lost_and_repeated_messages_lose_no_request(seed: int) -> None:
    world = loaded(seed, BAD, 30, 10)
    world.run(30)
    world.finish()
    assert_all_succeeded(world)


def requeued(seed: int) -> int:
    """How many requests came back from workers, which requeue what waits whenever they like."""
    world = loaded(seed, Weather(), 100, 8, fickle=0.3)
    for when in (3.0, 9.0):
        world.timeline.after(when, world.drain_worker)
    world.run(8 + 2 * RECOVERY_S)
    world.check_recovered()
    world.finish()
    assert_all_succeeded(world)
    assert set(world.begun.values()) == {1}, "a request ran twice"
    return sum(worker.output.requeued_count for worker in world.workers)


@pytest.mark.parametrize("seed", [*range(8), 186, 203, 326, 413, 516])
def test_what_is_requeued_before_it_began_runs_once_and_elsewhere(seed: int) -> None:
    """Workers are drained one after the other, too."""
    assert requeued(seed), "nothing was requeued"


@pytest.mark.parametrize("seed", [*range(8), 219])
def test_what_is_requeued_in_bad_weather_is_not_lost(seed: int) -> None:
    world = loaded(seed, BAD, 30, 10, fickle=0.3)
    world.timeline.after(5.0, world.drain_worker)
    world.run(30)
    world.finish()
    assert_all_succeeded(world)


@pytest.mark.parametrize("fault", UNNOTICED.values(), ids=UNNOTICED)
@pytest.mark.parametrize("seed", [*range(2), 202])
def test_no_request_notices_one_fault(fault: Fault, seed: int) -> None:
    world = loaded(seed, SLOW, 40, 8)
    world.timeline.after(world.random.uniform(0, 8), lambda: fault(world))
    world.run(8 + RECOVERY_S)
    world.run_past_freezes(RECOVERY_S)
    world.check_recovered()
    world.finish()
    assert_all_succeeded(world)


@pytest.mark.parametrize("fault", [UNNOTICED[name] for name in LARGE], ids=LARGE)
@pytest.mark.parametrize("seed", range(3))
def test_output_that_is_larger_than_a_message_is_continued(fault: Fault, seed: int) -> None:
    """Its token outputs stay at its detokenizer, which goes on with them."""
    world = loaded(seed, SLOW, 40, 8, message_bytes_max=SMALL_MESSAGE_BYTES)
    world.timeline.after(world.random.uniform(0, 8), lambda: fault(world))
    world.run(8 + RECOVERY_S)
    world.run_past_freezes(RECOVERY_S)
    world.check_recovered()
    world.finish()
    assert_all_succeeded(world)


@pytest.mark.parametrize("seed", range(8))
def test_output_that_is_larger_than_a_message_and_lost_ends_its_request(seed: int) -> None:
    """Its detokenizer had the rest of it, and dies after the worker."""
    world = loaded(seed, SLOW, 40, 8, message_bytes_max=SMALL_MESSAGE_BYTES)
    when = world.random.uniform(2, 7)
    world.timeline.after(when, lambda: world.crash("worker", world.workers[0]))
    for number in range(2):
        later = when + world.random.uniform(0, 1.5)
        world.timeline.after(later, partial(world.crash, "detokenizer", world.detokenizers[number]))
    world.run(8 + 2 * RECOVERY_S)
    world.check_recovered()
    world.finish()
    errors = [story.error for story in world.stories.values() if story.error is not None]
    assert {type(error) for error in errors} <= {Cancelled, WorkerLost}
    for error in errors:
        assert isinstance(error, Cancelled) or "too large" in error.message


def poisoned(seed: int, running_max: int) -> World:
    """One request that kills each worker that begins it, and 63 others, until all have ended."""
    world = World(seed, SLOW, running_max=running_max)
    world.watched = float(seed % 2)  # or the broker knows that they have ended
    world.run(SETTLE_S)
    world.load(63, 4, deadline_s=(70, 80))
    world.run(2)
    poison = world.ask(60)
    request_id = poison.submit.request_id
    world.poison.add(request_id)
    world.run(2)
    while not all(story.ended for story in world.stories.values()):
        world.run(1)
    assert isinstance(poison.error, RequestQuarantined)
    begun = [world.begun[request_id, choice] for choice in range(poison.submit.choices)]
    assert max(begun) <= 3, "it was given more workers"
    codes = Counter(one.error.code for one in world.stories.values() if one.error is not None)
    codes -= Counter(cancelled=len(world.stories))
    assert codes == {"request_quarantined": 1}
    return world


RUNNING = pytest.mark.parametrize("running_max", [4, 64], ids=["most wait", "all run"])


@RUNNING
@pytest.mark.parametrize("seed", [*range(3), 81000])
def test_a_request_that_kills_its_workers_is_quarantined_and_none_of_63_others(
    seed: int, running_max: int
) -> None:
    """The others ran or waited beside it, and have begun alone, too, after two deaths."""
    world = poisoned(seed, running_max)
    world.run(RECOVERY_S)
    world.check_recovered()
    world.finish()


@pytest.mark.long
@pytest.mark.timeout(1800)
@RUNNING
def test_no_healthy_companion_is_quarantined_in_a_hundred_seeds(running_max: int) -> None:
    batch = SeedBatch()
    for seed in range(100, 200):
        print("seed", seed)
        with batch.world(seed, "poisoned"):
            poisoned(seed, running_max)
    batch.check()


@pytest.mark.parametrize("seed", range(4))
def test_streams_of_a_gateway_that_is_frozen_for_longer_than_its_lease_go_on(seed: int) -> None:
    """All others have forgotten them: what it has delivered is sealed and continued."""
    world = loaded(seed, SLOW, 40, 8, (80, 90))
    world.run(world.random.uniform(2, 8))
    waiting = [one for one in world.stories.values() if not one.ended]
    gateway = waiting[0].gateway
    gateway.freeze(world.random.uniform(16, 30))
    world.run_past_freezes(2 * RECOVERY_S)
    world.check_recovered()
    world.finish()
    assert_all_succeeded(world)


@pytest.mark.parametrize("seed", range(4))
def test_an_owner_without_heartbeats_learns_soon_what_was_lost(seed: int) -> None:
    """Workers have let go of what it shows; what is lost unnoticed waits for no deadline."""
    world = loaded(seed, SLOW, 40, 8)
    gateway = world.gateways[0]
    world.timeline.after(6.0, lambda: setattr(gateway, "mute_until", world.now + 4))
    world.run(8 + 8)
    world.check_recovered()
    world.finish()


@pytest.mark.parametrize("seed", range(4))
def test_a_leader_that_missed_the_one_between_goes_on(seed: int) -> None:
    """Cut off it is followed by another, who accepts requests, starts none, and dies unheard."""
    world = World(seed, SLOW)
    world.run(SETTLE_S)
    first, between = sorted(world.schedulers, key=lambda node: node.leader.term is None)
    for worker in world.workers:
        worker.pause(10)
    asked = [world.ask(40) for _ in range(4)]
    world.run(0.5)
    first.mute_until = first.deaf_until = world.now + 6
    world.run(4)
    assert between.leader.term, "no scheduler leads in its place"
    asked += [world.ask(40) for _ in range(4)]
    world.run(1)
    between.die()
    world.run(10 + RECOVERY_S)
    assert first.leader.term
    assert all(story.ended for story in asked)
    assert [story.error for story in asked] == [None] * len(asked)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["worker", "detokenizer", "scheduler"])
def test_of_a_silent_process_the_broker_knows_whether_it_has_ended(kind: str, seed: int) -> None:
    note_silences(seed, kind)


@pytest.mark.parametrize("kind", ["worker", "detokenizer", "scheduler"])
def test_requests_end_while_one_process_still_receives_nothing(kind: str) -> None:
    """It sends heartbeats, but it counts as silent, and others do what it would have done."""
    world = loaded(0, SLOW, 40, 8)
    when, nodes = (
        world.random.uniform(1, 7),
        {
            "worker": world.workers,
            "detokenizer": world.detokenizers,
            "scheduler": world.schedulers,
        }[kind],
    )
    node = world.random.choice(nodes)
    world.timeline.after(when, lambda: setattr(node, "deaf_until", world.now + 30))
    world.run(8 + RECOVERY_S)
    world.check_ended()
    world.run(30)
    world.check_recovered()
    world.finish()
    assert_all_succeeded(world)


@pytest.mark.parametrize("seed", [*range(6), 136, 292])
def test_forged_terms_stop_no_request_for_longer_than_some_heartbeats(seed: int) -> None:
    """Terms are forged while processes die and come back; some heartbeats later all is well."""
    world = World(seed, SLOW)
    world.run(world.random.choice((0.6, SETTLE_S)))  # some forge before any scheduler leads
    world.load(20, 8, deadline_s=(30, 40))
    for _ in range(4):
        world.timeline.after(world.random.uniform(0, 6), world.forge_terms)
        world.timeline.after(
            world.random.uniform(0, 10), partial(world.random.choice(RESTARTS), world)
        )
    world.run(12 + RECOVERY_S)
    asked = [world.ask(20) for _ in range(8)]
    world.run(RECOVERY_S)
    world.check_recovered()
    world.finish()
    assert [story.error for story in asked] == [None] * len(asked)


@pytest.mark.parametrize("number", [2**32, 2**62 - 1, 2**62, 2**63 - 1])
@pytest.mark.parametrize("who", ["stranger", "leader", "worker", "command"])
def test_one_forged_term_leaves_later_processes_able_to_follow(who: str, number: int) -> None:
    """Whatever it was forged in, and whichever processes are started afterwards."""
    world = World(0, SLOW)
    world.run(SETTLE_S)
    world.forge_term_of(who, number)
    world.run(RECOVERY_S)
    for name in ("crash_worker", "crash_gateway", "crash_leader"):
        FAULTS[name](world)
        world.run(RECOVERY_S)
        asked = [world.ask(20) for _ in range(8)]
        world.run(RECOVERY_S)
        assert [story.ended and story.error for story in asked] == [None] * len(asked)
    world.finish()


@pytest.mark.parametrize("seed", [*range(16), 66, 147, 182, 224, 244, 324, 475])
def test_in_a_storm_of_faults_the_promises_hold(seed: int) -> None:
    world = World(seed, Weather(loss=0.01, repeat=0.01, delay_s=0.02), queue_max=20)
    world.load(60, 25, deadline_s=(1, 30))
    for _ in range(12):
        fault = world.random.choice(list(FAULTS.values()))
        world.timeline.after(world.random.uniform(0, 30), partial(fault, world))
    world.run(45)
    world.finish()
    assert any(story.ended and story.error is None for story in world.stories.values())


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("hundred", range(1, 8))
def test_seven_hundred_seeds_of_each_kind(hundred: int) -> None:
    faults, unnoticed = [*FAULTS.items()], [*UNNOTICED.items()]
    batch, returned = SeedBatch(), 0
    for seed in range(100 * hundred, 100 * hundred + 100):
        print("seed", seed)
        with batch.world(seed, "lost and repeated messages"):
            test_lost_and_repeated_messages_lose_no_request(seed)
        with batch.world(seed, "a storm of faults"):
            test_in_a_storm_of_faults_the_promises_hold(seed)
        with batch.world(seed, "requeued"):
            returned += requeued(seed)
        with batch.world(seed, "requeued in bad weather"):
            test_what_is_requeued_in_bad_weather_is_not_lost(seed)
        name, fault = faults[seed % len(faults)]
        with batch.world(seed, f"one fault: {name}"):
            test_after_one_fault_nothing_hangs_and_new_requests_succeed(fault, seed, 0.0)
        name, fault = unnoticed[seed % len(unnoticed)]
        with batch.world(seed, f"one fault, unnoticed: {name}"):
            test_no_request_notices_one_fault(fault, seed)
        with batch.world(seed, "forged terms"):
            test_forged_terms_stop_no_request_for_longer_than_some_heartbeats(seed)
    batch.check()
    assert returned > 100, "in most worlds something is requeued"


RESUMED: dict[str, Fault] = UNNOTICED | {
    "none": lambda _: None,
    "crash_gateway": crash("gateway"),
    "crash_host_with_gateway": World.crash_host_with_gateway,
}
HOSTS = (
    "crash_host",
    "crash_hosts",
    "crash_host_with_gateway",
    "crash_worker_beside_frozen_detokenizer",
)


@pytest.mark.parametrize("fault", RESUMED)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_streams_that_are_lost_and_resumed_are_complete(fault: str, seed: int) -> None:
    """Each client loses its connection up to four times, and resumes at any gateway.

    If a host dies with the output of a stream that has just moved to another gateway, or with its
    gateway, it is lost: what a client gets is then the beginning of the right text.
    """
    world = resumed(seed, RESUMED[fault])
    lost = {"worker_lost"} if fault in HOSTS else set[str]()
    if fault == "crash_host_with_gateway":
        lost.add("stream_not_found")
    assert error_codes(world).keys() <= lost


@pytest.mark.parametrize("seed", range(9))
def test_streams_are_resumed_although_messages_are_lost(seed: int) -> None:
    """The answer to a gateway that adopts a request among them: it asks again."""
    assert_all_succeeded(resumed(seed, lambda _: None, BAD))


def resumed(seed: int, fault: Fault, weather: Weather = SLOW) -> World:
    """What clients got that lose their connections, while a fault happens."""
    world = World(seed, weather)
    world.resuming = True
    world.run(SETTLE_S)
    world.load(24, 4, deadline_s=(40, 50))
    world.timeline.after(world.random.uniform(0, 6), lambda: fault(world))
    world.finish()
    assert sum(story.resumed for story in world.stories.values()) > 24
    return world


def assert_all_succeeded(world: World) -> None:
    """Clients that did not leave have all of their answers."""
    codes = error_codes(world)
    assert not codes, codes


def error_codes(world: World) -> Counter[str]:
    """Why requests have failed of clients that did not leave, nor broke with their gateway."""
    return Counter(
        story.error.code
        for story in world.stories.values()
        if story.ended is not None and story.error is not None
        if not (story.left and isinstance(story.error, Cancelled))
    )
