"""Batches of seeds run to their end."""

from __future__ import annotations

import pytest
from tests.simulation.seed_batch import SeedBatch


def test_a_batch_runs_on_behind_a_failing_seed_and_names_all_that_fail() -> None:
    batch, ended = SeedBatch(), list[int]()
    for seed in range(5):
        with batch.world(seed, "even"):
            assert seed % 2 == 0, f"{seed} is odd"
            ended.append(seed)
    assert ended == [0, 2, 4]
    with pytest.raises(AssertionError) as failure:
        batch.check()
    assert str(failure.value).splitlines()[:3] == [
        "2 worlds failed",
        "seed 1 (even): AssertionError: 1 is odd",
        "seed 3 (even): AssertionError: 3 is odd",
    ]


def test_a_batch_without_failures_passes() -> None:
    batch = SeedBatch()
    with batch.world(1, "any"):
        pass
    batch.check()


def test_a_timeout_ends_a_batch() -> None:
    """pytest-timeout raises it once: seeds behind it would run without a limit."""
    batch = SeedBatch()
    with pytest.raises(pytest.fail.Exception), batch.world(1, "slow"):
        pytest.fail("Timeout (>1800.0s) from pytest-timeout.")
    assert not batch.failed
