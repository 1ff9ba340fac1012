"""Workers beside a faulty page store answer as if they had computed everything."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from tests.simulation.stored_rank_world import StoredRankWorld
from tests.simulation.stored_world import StoredWorld
from tests.simulation.worker_worlds import live, overlaps

if TYPE_CHECKING:
    from collections.abc import Iterator

SEEDS = 24
MANY = 2_000
MANY_OF_RANKS = 1_000
BATCH = 100


@contextmanager
def named(seed: int) -> Iterator[None]:
    """A failure of one of many worlds says which seed it had."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


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


def of_ranks(seed: int) -> StoredRankWorld:
    world = StoredRankWorld(seed, overlap=overlaps(seed))
    with world.ranks_end():
        live(world, 150)
    world.check_ranks()
    return world


@pytest.mark.timeout(120)
def test_ranks_beside_a_faulty_store_see_the_same_pages() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen += of_ranks(seed).seen
    assert min(seen[name] for name in ("saved", "found", "flipped", "cached")) > 0, seen


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", range(MANY // BATCH))
def test_many_workers_beside_faulty_stores_answer_as_alone(batch: int) -> None:
    for seed in range(1000 + batch * BATCH, 1000 + (batch + 1) * BATCH):
        with named(seed):
            live(StoredWorld(seed, overlap=overlaps(seed)), 60)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", range(MANY_OF_RANKS // BATCH))
def test_many_ranks_beside_faulty_stores_see_the_same_pages(batch: int) -> None:
    for seed in range(1000 + batch * BATCH, 1000 + (batch + 1) * BATCH):
        with named(seed):
            of_ranks(seed)
