"""The kinds of worlds that the batching loop is run in: a seed alone says which world it is."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulation import test_guided_choices as guided
from tests.simulation.batching_world import DRAFTS_MAX, World
from tests.simulation.test_worker_overlap import CURSE, VOCAB_SIZE, harmless, staged
from tests.simulation.test_worker_threads import beside
from tests.support.worker import chunks_used

from antiphon.model_worker.batching.mailbox import NOTHING, ControlCommand, Mailbox
from antiphon.wire.command import (
    ContinueWorker,
    FlushCache,
    PauseMode,
    PauseWorker,
    SetWeightVersion,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CALM: dict[str, Any] = {
    "window": False,
    "state": "no",
    "stream_interval": 1,
    "priority": False,
    "returned": 0.0,
    "running_max": 16,
    "prompt_max": 20,
    "arrivals": [0] * 5 + [1],
}
"""So that most tokens are reported in columns."""
CROWDED: dict[str, Any] = {
    "state": "no",
    "returned": 0.0,
    "conservativeness": 0.0,
    "exact_share": 0.0,
    "running_max": 16,
    "prompt_max": 8,
    "arrivals": [0, 2, 3],
    "step_tokens_max": 256,
    "chunk_tokens": 64,
    "fill_tokens": None,
}
"""So that requests are retracted again and again."""
LONG_TURNS = 4_000
GRAMMAR_DRAFTS = 0, 1, 5


def overlaps(seed: int) -> bool:
    """Whether the steps of a world are launched before the one before them is read."""
    return seed % 2 == 1


def has_draft_model(seed: int) -> bool:
    return seed // 2 % 5 < 2


def live(world: World, turns: int) -> World:
    """Let a world live; nothing is left of it but what is cached, and a flush takes that, too."""
    for _ in range(turns):
        world.act()
    world.drain()
    assert len(world.reported) > turns // 16, "choices come in any life, in a short one few"
    for reported in world.reported.values():
        world.verify(reported)
    assert world.pools.used() == world.pools.loose()
    world.batching.flush()
    failures = world.turn().failures
    assert world.pools.used() == [0] * len(world.groups)
    if not failures:  # else a logged traceback may hold on to a request
        if chunks_used(world.batching.batch.store):
            gc.collect()
        assert not chunks_used(world.batching.batch.store), "ids of ended choices are left"
    return world


# Kinds.


def of_any_kind(seed: int) -> None:
    live(World(seed, overlap=overlaps(seed)), 200)


def drafting(seed: int) -> None:
    said = {"drafts": DRAFTS_MAX, "costs": None, "draft_model": has_draft_model(seed)}
    live(World(seed, overlap=overlaps(seed), **said), 100)


def keeping_states(seed: int) -> None:
    """With drafts in most worlds, with checkpoints in two of three."""
    live(World(seed, overlap=overlaps(seed), state="yes"), 150)


def drafting_states(seed: int) -> None:
    live(World(seed, overlap=overlaps(seed), state="yes", drafts=DRAFTS_MAX, costs=None), 60)


def crowded(seed: int) -> None:
    live(World(seed, overlap=overlaps(seed), **CROWDED), 250)


def calm(seed: int) -> None:
    live(World(seed, overlap=overlaps(seed), **CALM), 300)


def stumbling(seed: int) -> None:
    """Plans fail often, and succeed when they are run again in halves."""
    often = {"drafts": DRAFTS_MAX, "stumbles": 0.2, "penalised": 0.5, "running_max": 16}
    live(World(seed, overlap=overlaps(seed), **often), 60)


def long_life(seed: int) -> None:
    world = live(World(seed, overlap=overlaps(seed)), LONG_TURNS)
    assert world.turns > LONG_TURNS


def with_grammars(seed: int) -> None:
    how = {"drafts_max": GRAMMAR_DRAFTS[seed % 3], "draft_model": has_draft_model(seed)}
    world = guided.World(seed, overlap=overlaps(seed), **how)
    for _ in range(30):
        world.send_some()
    world.verify()


def with_late_grammars(seed: int) -> None:
    """Matchers advance steps later; pauses in between, and in some worlds plans that fail."""
    drafts_max, flights = GRAMMAR_DRAFTS[seed % 3], random.Random(f"flights {seed}")
    how = {"slow": True, "drafts_max": drafts_max, "draft_model": has_draft_model(seed)}
    how |= {"ahead": flights.choice([1, 1, 2, 3]), "stumbles": flights.choice([0.0, 0.0, 0.2])}
    guided.live_late(guided.World(seed, overlap=overlaps(seed), **how))


def with_culprits(seed: int) -> None:
    """Some requests make every step raise that they are a part of; commands, drops and pauses."""
    chance = random.Random(seed)
    window = chance.choice([None, None, 7])
    pages = chance.choice([31, 40, 90])
    with staged(overlap=overlaps(seed), pages=pages, window=window) as stage:
        for _ in range(150):
            runs = [
                stage.request(_prompt(chance), chance.choice([1, 2, 12, 90]), chance.randint(0, 9))
                for _ in range(chance.choice([0, 0, 1, 3]))
            ]
            drops = [
                key
                for key, reported in stage.reported.items()
                if reported.finish is None and chance.random() < 0.01
            ]
            mailbox = Mailbox(capacity=len(runs))
            for key, request in runs:
                mailbox.run(key, request)
            for key in drops:
                stage.reported[key].dropped = True
                mailbox.drop(key)
            for order in _orders(chance):
                mailbox.submit_command(order)
            stage.turn(mailbox.take(wait=False) or NOTHING)
        stage.order(ContinueWorker())
        stage.finish()
        assert len(stage.reported) > 80


def _prompt(chance: random.Random) -> list[int]:
    start = harmless(chance.choice([1, 8, 24]), chance.randint(0, 2))
    rest = [chance.randrange(4, VOCAB_SIZE - 1) for _ in range(chance.randint(0, 40))]
    curse = [CURSE] if chance.random() < 0.1 else []
    return start + rest + curse


def _orders(chance: random.Random) -> Iterator[ControlCommand]:
    if chance.random() < 0.02:
        yield FlushCache()
    if chance.random() < 0.03:
        yield PauseWorker(mode=chance.choice(list(PauseMode)))
    if chance.random() < 0.3:
        yield ContinueWorker()
    if chance.random() < 0.02:
        yield SetWeightVersion(version=str(chance.random()), abort_all=chance.random() < 0.3)


def with_threads(seed: int) -> None:
    """The loop runs beside the thread that writes to it: how they cross is not in the seed."""
    world = World(seed, overlap=overlaps(seed), queue_timeout_s=None, running_timeout_s=None)
    with beside(world) as side:
        for _ in range(250):
            side.act()
        side.drain()
    for reported in world.reported.values():
        assert reported.dropped or reported.returned or reported.finish is not None
        side.verify(reported)
    assert world.batching.idle
    world.check_pages()
    world.check_slots()
    assert world.pools.used() == world.pools.loose()
    world.batching.flush()
    world.pools.finished(side.last.step if side.last else 0)
    assert world.pools.free() == [pool.total for pool in world.pools.pools]
    assert not world.batching._timeouts._due_s


# Which seed is of which kind.


@dataclass(frozen=True)
class Kind:
    """A kind of world and its share: pairs among 50 pairs of seeds, one in turn, one overlapped."""

    name: str
    live: Callable[[int], None]
    share: int


KINDS = (
    Kind("any kind", of_any_kind, 9),
    Kind("drafts", drafting, 9),
    Kind("states", keeping_states, 6),
    Kind("states and drafts", drafting_states, 3),
    Kind("grammars", with_grammars, 7),
    Kind("late grammars", with_late_grammars, 5),
    Kind("culprits", with_culprits, 3),
    Kind("plans that fail once", stumbling, 2),
    Kind("retractions", crowded, 2),
    Kind("columns", calm, 1),
    Kind("threads", with_threads, 2),
    Kind("long life", long_life, 1),
)
PAIRS = [kind for kind in KINDS for _ in range(kind.share)]


def kind_of(seed: int) -> Kind:
    return PAIRS[seed // 2 % len(PAIRS)]


def name_of(seed: int) -> str:
    return f"{kind_of(seed).name}, {'overlapped' if overlaps(seed) else 'in turn'}"
