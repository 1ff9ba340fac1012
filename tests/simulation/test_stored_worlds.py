"""Workers beside a faulty page store answer as if they had computed everything."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.simulation.stored_rank_world import StoredRankWorld
from tests.simulation.stored_world import StoredWorld
from tests.simulation.worker_worlds import live, overlaps

SEEDS = 24


@pytest.mark.parametrize("seed", range(SEEDS))
def test_worker_beside_a_faulty_store_answers_as_alone(seed: int) -> None:
    live(StoredWorld(seed, overlap=overlaps(seed)), 60)


def test_stored_worlds_save_find_and_refuse_blocks() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen += live(StoredWorld(seed, overlap=overlaps(seed)), 60).seen
        if min(seen[name] for name in ("saved", "found", "flipped", "cached")) > 0:
            return
    raise AssertionError(seen)


@pytest.mark.timeout(120)
def test_ranks_beside_a_faulty_store_see_the_same_pages() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = StoredRankWorld(seed, overlap=overlaps(seed))
        with world.ranks_end():
            live(world, 150)
        world.check_ranks()
        seen += world.seen
    assert min(seen[name] for name in ("saved", "found", "flipped", "cached")) > 0, seen
