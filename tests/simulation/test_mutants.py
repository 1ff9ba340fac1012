"""Every fault on the list is found by some world, which is sound without it."""

from __future__ import annotations

import logging

import pytest
from tests.simulation.mutants import MUTANTS, SEEDS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_world_finds_the_fault(mutant: Mutant, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    seed = mutant.found_by()
    assert seed is not None, f"{mutant.name}: {SEEDS} worlds live with it"
    print(f"{mutant.name}: found by seed {seed}")
    mutant.live(seed)
