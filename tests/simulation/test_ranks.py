"""Worlds of a worker with several ranks: they compute the same plans, or end together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.simulation.batching_world import DRAFTS_MAX
from tests.simulation.rank_world import GROUPED, LAYOUTS, POINTS, Hung, RankWorld, without_agreement
from tests.simulation.worker_worlds import live, overlaps

from antiphon.model_worker.batching.plan import DeviceLost

TURNS = 50
WORLDS = 100
GROUPED_WORLDS = 40
MANY = 3_000
BATCH = 100
WAIT_S = 300.0
"""How long a rank of many worlds waits for another one: they may run beside anything."""


def sound(seed: int, turns: int = TURNS, **said: Any) -> RankWorld:
    """A world in which no choice notices that there are ranks, nor that one refuses a plan."""
    world = RankWorld(seed, overlap=overlaps(seed), **said)
    with world.ranks_end():
        live(world, turns)
    world.check_ranks()
    return world


@pytest.mark.timeout(120)
@pytest.mark.parametrize("batch", range(4))
def test_ranks_say_what_a_choice_says_alone(batch: int) -> None:
    seen = Counter[str]()
    for seed in range(batch * WORLDS // 4, (batch + 1) * WORLDS // 4):
        seen += sound(seed).seen
    assert seen["refused by 0"] > 0, "no plan was refused by the first rank"
    assert seen["refused by 1"] > 0, "no plan was refused by another rank"
    assert seen["drafts"] > 0
    assert seen["passed on"] > 0, "no stage went on before a plan was sampled from"


@pytest.mark.timeout(120)
def test_ranks_with_a_draft_model_make_the_same_drafts_in_the_same_order() -> None:
    for seed in range(24):
        world = sound(seed, draft_model=True, drafts=DRAFTS_MAX, costs=None)
        assert all(each.drafted == world.runner.drafted for each in world.followers)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("batch", range(4))
def test_attention_groups_say_what_a_choice_says_alone(batch: int) -> None:
    seen = Counter[str]()
    for seed in range(batch * GROUPED_WORLDS // 4, (batch + 1) * GROUPED_WORLDS // 4):
        world = sound(seed, layouts=GROUPED)
        for part in world.parts[1:]:
            part.core.flush()
            assert part.core.pools.used() == [0] * len(world.groups)
            seen["in another group"] += len(part.keys)
        seen += world.seen
    assert seen["idle"] > 0, "no group was idle while another one had rows"
    assert seen["in another group"] > 0
    assert seen["refused by 0"] > 0, "no plan was refused by the first rank"
    assert seen["refused by 1"] > 0, "no plan was refused by another rank"
    assert seen["drafts"] > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize(
    ("rank", "point"), [(rank, point) for rank in (0, 1) for point in POINTS[1 - rank :]]
)
def test_a_rank_that_fails_in_a_step_ends_all(rank: int, point: str, overlap: bool) -> None:
    for seed in range(4):
        world = RankWorld(seed, overlap=overlap, failing=(rank, point))
        with world.ranks_end(), pytest.raises(DeviceLost):
            live(world, 400)
        assert not any(isinstance(error, Hung) for error in world.errors.values())


@pytest.mark.timeout(120)
def test_a_failure_that_is_not_agreed_on_is_found() -> None:
    with without_agreement():
        for seed in range(20):
            world = RankWorld(seed, overlap=overlaps(seed), stumbles=0.3, wait_s=1.0)
            try:
                with world.ranks_end():
                    live(world, TURNS)
            except (AssertionError, DeviceLost):
                return
    raise AssertionError("no world has found it")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", range(MANY // BATCH))
def test_many_worlds_of_ranks_are_sound(batch: int) -> None:
    for seed in range(1000 + batch * BATCH, 1000 + (batch + 1) * BATCH):
        try:
            sound(seed, layouts=(*LAYOUTS, *GROUPED), wait_s=WAIT_S)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
