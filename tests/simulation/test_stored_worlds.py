"""Workers beside a faulty page store answer as if they had computed everything."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from tests.simulation.stored_rank_world import StoredRankWorld
from tests.simulation.stored_world import STORED_TURNS, StoredWorld
from tests.simulation.worker_worlds import live, overlaps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORLDS = 120
WORLDS_OF_RANKS = 80
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


def alone(seed: int) -> StoredWorld:
    world = StoredWorld(seed, overlap=overlaps(seed))
    live(world, STORED_TURNS)
    return world


def of_ranks(seed: int) -> StoredRankWorld:
    world = StoredRankWorld(seed, overlap=overlaps(seed))
    with world.ranks_end():
        live(world, STORED_TURNS)
    world.check_ranks()
    return world


def lived(worlds: Callable[[int], StoredWorld], batch: int, size: int) -> None:
    """Let a batch of worlds live, which between them have seen all that a store may do."""
    seen: Counter[str] = Counter()
    for seed in range(batch * size, (batch + 1) * size):
        with named(seed):
            seen += worlds(seed).seen
    assert (
        min(seen[name] for name in ("saved", "found", "flipped", "cached", "twice", "late")) > 0
    ), seen


@pytest.mark.timeout(120)
@pytest.mark.parametrize("batch", range(4))
def test_worker_beside_a_faulty_store_answers_as_alone(batch: int) -> None:
    lived(alone, batch, WORLDS // 4)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("batch", range(4))
def test_ranks_beside_a_faulty_store_see_the_same_pages(batch: int) -> None:
    lived(of_ranks, batch, WORLDS_OF_RANKS // 4)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", range(MANY // BATCH))
def test_many_workers_beside_faulty_stores_answer_as_alone(batch: int) -> None:
    lived(alone, 10 + batch, BATCH)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", range(MANY_OF_RANKS // BATCH))
def test_many_ranks_beside_faulty_stores_see_the_same_pages(batch: int) -> None:
    lived(of_ranks, 10 + batch, BATCH)
