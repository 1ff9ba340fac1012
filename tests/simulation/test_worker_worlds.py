"""Worlds of the batching loop, other ones with each commit: no choice notices the others.

`worker_worlds` says what a world of a seed is like, `tests.support.worlds` which seeds a run has.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from tests.simulation.worker_worlds import KINDS, PAIRS, kind_of, name_of
from tests.support.worlds import WORLDS, command, commit_seed, reported

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Record = Callable[[str, Any], None]

MANY = 5_000
BATCH = 100


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        option = metafunc.config.option
        seeds = range(option.world_seed, option.world_seed + option.worlds)
        metafunc.parametrize("world", seeds, ids=[f"{seed} {name_of(seed)}" for seed in seeds])


@pytest.mark.timeout(120)  # a long life takes 6 s of a core, which others may use, too
def test_a_world_is_sound(world: int, record_property: Record) -> None:
    with reported(world, name_of(world), record_property):
        kind_of(world).live(world)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch", range(MANY // BATCH))
def test_many_worlds_are_sound(
    batch: int, record_property: Record, pytestconfig: pytest.Config
) -> None:
    first = pytestconfig.option.world_seed + batch * BATCH
    failures: list[Exception] = []
    for seed in range(first, first + BATCH):
        try:
            with reported(seed, name_of(seed), record_property):
                kind_of(seed).live(seed)
        except Exception as error:  # noqa: BLE001 - all of them are raised below
            failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {BATCH} worlds", failures)


def test_a_run_has_worlds_of_every_kind_in_turn_and_overlapped() -> None:
    first = 12_345
    counts = Counter(map(name_of, range(first, first + WORLDS)))
    assert len(counts) == 2 * len(KINDS)
    share = WORLDS // (2 * len(PAIRS))
    for kind in KINDS:
        modes = [counts[f"{kind.name}, {mode}"] for mode in ("in turn", "overlapped")]
        assert modes == [kind.share * share] * 2


def test_the_seed_is_zero_outside_of_git(tmp_path: Path) -> None:
    assert commit_seed(tmp_path) == 0


def test_a_world_that_fails_says_how_to_run_it_again() -> None:
    recorded: dict[str, Any] = {}
    with pytest.raises(AssertionError) as caught, reported(7, "drafts", recorded.__setitem__):
        raise AssertionError
    assert command(7) in caught.value.__notes__[0]
    seed, kind, _, sound = recorded["world"]
    assert (seed, kind, sound) == (7, "drafts", False)
